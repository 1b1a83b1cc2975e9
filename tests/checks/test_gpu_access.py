"""gpu_access: whether the driver and every GPU respond."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observations_named, run_check, run_until_error, scenarios
from msgspec.structs import replace
from story import MultiCheckNode, Story
from trees import PCI, add_gpus, write

from healthd.agent.conditions import intake
from healthd.agent.conditions.absorb import absorb_result
from healthd.agent.conditions.condition import acknowledged
from healthd.agent.conditions.endings import acknowledge
from healthd.checks import (
    gpu_access,
    gpu_count,
    gpu_ecc,
    gpu_nvlink,
    gpu_recovery_action,
    gpu_row_remap,
    gpu_xid,
    pcie_hotplug,
)
from healthd.checks.gpu_access import Config
from healthd.common.history import History
from healthd.common.model import (
    Ack,
    CheckResult,
    Clears,
    ConditionKey,
    ConditionState,
    Finding,
    KernelEvent,
    Outcome,
    Severity,
)
from healthd.host.host import Host
from healthd.nvidia.fake_nvml import library
from healthd.nvidia.nvml import Nvml, NvmlError

THIRD = "0000:61:00.0"  # index 3 of a DGX H100
healthy = healthy_gpus(Config())


def has_nvml() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


without_nvml = pytest.mark.skipif(has_nvml(), reason="this machine has an NVIDIA driver")


@pytest.mark.parametrize("profile", ["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200"])
def test_healthy_machine_gives_no_finding(host, profile):
    results = run_check(gpu_access, host(profile=profile))
    assert [item.value for item in observations_named(results, "gpus")] == [8]
    assert [item for item in results if hasattr(item, "severity")] == []


def test_lost_gpu_is_critical_until_reboot(host):
    (finding,) = findings(gpu_access, host("gpu.3.lost = true"))
    assert (finding.code, finding.subject) == ("gpu_access/lost", THIRD)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.REBOOT)


def test_gpu_without_handle_is_lost(host):
    (finding,) = findings(gpu_access, host("gpu.3.unreachable = true"))
    assert finding.code == "gpu_access/lost"
    assert "index 3" in finding.message


def test_gpu_that_requires_reset_is_critical_until_gpu_reset(host):
    (finding,) = findings(gpu_access, host("gpu.3.requires_reset = true"))
    assert (finding.code, finding.subject) == ("gpu_access/reset_required", THIRD)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.GPU_RESET)


def test_gpu_without_power_cable_is_degraded(host):
    (finding,) = findings(gpu_access, host('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "InsufficientPower" }'))
    assert (finding.code, finding.severity) == ("gpu_access/no_answer", Severity.DEGRADED)


def test_missing_permission_of_healthd_fails_run_without_finding(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByIndex"):
        run_check(gpu_access, host('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "NoPermission" }'))


def test_permission_error_of_a_gpu_hides_no_other_finding(host):
    text = '[gpu.2]\nerrors = { nvmlDeviceGetHandleByIndex = "NoPermission" }\n[gpu.3]\nlost = true'
    results: list[object] = []
    with pytest.raises(NvmlError, match="index 2"):
        results.extend(gpu_access.run(host(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in results if isinstance(f, Finding)] == [THIRD]


def test_unreadable_driver_version_hides_no_lost_gpu(tmp_path):
    scenario = tmp_path / "lost.toml"
    scenario.write_text('profile = "dgx-h100"\ngpu.3.lost = true\n')
    inner = library(str(scenario))

    class NoVersionLibrary:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def nvmlSystemGetDriverVersion(self) -> str:
            raise pynvml.NVMLError_Unknown

    results, error = run_until_error(gpu_access, Host("/nonexistent", lambda: Nvml.open(NoVersionLibrary())))
    assert [item.subject for item in results if isinstance(item, Finding)] == [THIRD]
    assert "nvmlSystemGetDriverVersion" in error


@pytest.mark.parametrize(
    ("library", "code", "shared"),
    [
        ("mismatch", "gpu_access/driver_mismatch", True),
        ("driver_not_loaded", "gpu_access/driver_not_loaded", False),
        ("library_not_found", "gpu_access/library_missing", False),
    ],
)
def test_driver_that_cannot_be_opened_is_degraded(host, library, code, shared):
    (finding,) = findings(gpu_access, host(f'library = "{library}"'))
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.DEGRADED, Clears.PASS)
    assert finding.shared_cause is shared


@pytest.mark.parametrize("state", ["coming", "live"])
def test_loading_driver_or_missing_device_files_fail_run_without_finding(host, tmp_path, state):
    (tmp_path / "root/sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "root/sys/module/nvidia/initstate").write_text(f"{state}\n")
    loading = host('library = "driver_not_loaded"', root=str(tmp_path / "root"))
    results, error = run_until_error(gpu_access, loading)
    assert results == []
    assert "driver" in error.lower()


def test_other_nvmlinit_error_fails_run_without_finding(tmp_path):
    from healthd.nvidia.nvml import Nvml

    class Broken:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self):
            raise pynvml.NVMLError_Unknown()

    with pytest.raises(NvmlError, match="nvmlInit"):
        run_check(gpu_access, Host(str(tmp_path), lambda: Nvml.open(Broken())))


@without_nvml
@pytest.mark.parametrize("check", [gpu_access, gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_gpu_checks_report_nothing_without_gpus_and_driver(tmp_path, check):
    assert findings(check, write(tmp_path, {"/proc/version": "Linux"})) == []


@without_nvml
def test_gpus_without_library_are_degraded(tmp_path):
    assert codes(findings(gpu_access, add_gpus(tmp_path, [THIRD]))) == ["gpu_access/library_missing"]


@without_nvml
@pytest.mark.parametrize("check", [gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_other_gpu_checks_fail_without_driver_if_gpus_exist(tmp_path, check):
    with pytest.raises(NvmlError):
        run_check(check, add_gpus(tmp_path, [THIRD]))


def test_hanging_call_warns_and_is_degraded_after_240_seconds():
    (finding,) = gpu_access.overdue(gpu_access.Config(), 10.0)
    assert (finding.code, finding.severity) == ("gpu_access/hang", Severity.WARNING)
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.DEGRADED, 240.0)
    assert "10 s" in finding.message


@pytest.mark.parametrize("check", [gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_gpu_checks_fail_if_every_call_fails(host, check):
    with pytest.raises(NvmlError):
        run_check(check, host("random_failures = 1.0"))


# --- GPU resets, which look like a lost GPU


def hosts_with_slurmd(tmp_path, *states: str, driver: str | None = "nvidia", process: str = "slurmd") -> list[Host]:
    """Return hosts with the GPUs in sysfs and this process running, one for each state of the fake NVML."""
    root = tmp_path / "node"
    add_gpus(root, [THIRD])
    link = root / PCI[1:] / THIRD / "driver"
    link.unlink()
    if driver:
        link.symlink_to(f"../../../../bus/pci/drivers/{driver}")
    write(root, {"/proc/4242/comm": f"{process}\n", "/proc/self/comm": "slurmd\n", "/proc/uptime": "1 1\n"})
    return [scenarios(tmp_path)(text, root=str(root)) for text in states]


def test_lost_gpu_is_confirmed_for_a_minute_if_slurmd_may_reset_it(tmp_path):
    (host,) = hosts_with_slurmd(tmp_path, "gpu.3.lost = true")
    (finding,) = findings(gpu_access, host)
    assert (finding.code, finding.confirm_seconds) == ("gpu_access/lost", 60.0)
    (finding,) = findings(gpu_access, host, Config(confirm_seconds=5.0))
    assert finding.confirm_seconds == 5.0


def test_lost_gpu_without_handle_has_no_subject(tmp_path):
    (host,) = hosts_with_slurmd(tmp_path, "gpu.3.unreachable = true")
    (finding,) = findings(gpu_access, host)
    assert (finding.subject, finding.confirm_seconds) == ("", 60.0)


@pytest.mark.parametrize("process", ["slurmd", "slurmstepd", "bash"])
@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", None])
def test_lost_gpu_counts_at_once_before_slurmd_starts_or_without_driver(tmp_path, process, driver):
    (host,) = hosts_with_slurmd(tmp_path, "gpu.3.lost = true", process=process, driver=driver)
    (finding,) = findings(gpu_access, host)
    assert finding.confirm_seconds == (60.0 if (process, driver) == ("slurmd", "nvidia") else 0.0)


def test_lost_gpu_counts_at_once_if_kernel_has_no_such_device(tmp_path):
    (host,) = hosts_with_slurmd(tmp_path, "gpu.4.lost = true")
    assert [finding.confirm_seconds for finding in findings(gpu_access, host)] == [0.0]


def test_epilog_reset_within_a_minute_does_not_drain(tmp_path):
    healthy_host, lost = hosts_with_slurmd(tmp_path, "", "gpu.3.lost = true")
    story = Story(gpu_access).run_check(healthy_host).run_check(lost).run_check(lost, 59 / 60)
    assert not story.drained, "59 s"
    story.run_check(healthy_host, 0.1)
    assert (story.codes, story.drained) == ([], False)


def test_gpu_lost_for_a_minute_requeues(tmp_path):
    healthy_host, lost = hosts_with_slurmd(tmp_path, "", "gpu.3.lost = true")
    story = Story(gpu_access).run_check(healthy_host).run_check(lost).run_check(lost, 1.0)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/lost"], True, True)


@pytest.mark.parametrize(
    ("subject", "kernel_event", "at_once"),
    [
        (THIRD, KernelEvent("xid", "79", THIRD), True),
        (THIRD, KernelEvent("xid", "79", "0000:1b:00.0"), False),
        ("", KernelEvent("xid", "79", "0000:1b:00.0"), True),
        (THIRD, KernelEvent("xid", "79", THIRD, history=True), False),
        (THIRD, KernelEvent("xid", "31", THIRD), False),
    ],
)
def test_lost_gpu_counts_at_once_if_kernel_log_confirms_it(tmp_path, subject, kernel_event, at_once):
    state = "lost" if subject else "unreachable"
    (host,) = hosts_with_slurmd(tmp_path, f"gpu.3.{state} = true")
    xid_story = Story(gpu_xid)
    event = replace(kernel_event, time=NOW, last_time=NOW, boot_id=BOOT)
    ledger = intake.take_kernel_events(xid_story.ledger, [event], [(xid_story.check, xid_story.config)], NOW).ledger
    result = CheckResult("gpu_access", "", Outcome.COMPLETED, NOW, 0.1, tuple(findings(gpu_access, host)))
    new_ledger = intake.take_result(ledger, result, Config(), NOW).ledger
    found = new_ledger.by_key()[ConditionKey("gpu_access/lost", subject)]
    assert found.state is (ConditionState.OPEN if at_once else ConditionState.PENDING)


@pytest.mark.parametrize(
    "kernel_event", [KernelEvent("xid", "79", THIRD), KernelEvent("pcie_hotplug", "link_down", THIRD)]
)
@pytest.mark.parametrize("acknowledged_how", ["not at all", "resumed", "acked", "acked before"])
@pytest.mark.parametrize(("minutes", "recent"), [(0.0, True), (9.9, True), (10.0, False), (3 * 24 * 60.0, False)])
def test_acknowledged_or_old_kernel_event_does_not_confirm_lost_gpu(
    tmp_path, kernel_event, acknowledged_how, minutes, recent
):
    """An operator acknowledged an Xid 79 days ago: the next reset of this GPU by an epilog is no new fault."""
    (host,) = hosts_with_slurmd(tmp_path, "gpu.3.lost = true")
    check = Story(gpu_xid if kernel_event.kind == "xid" else pcie_hotplug)
    when = NOW - minutes * 60
    event = replace(kernel_event, time=when, last_time=when, boot_id=BOOT)
    ledger = intake.take_kernel_events(check.ledger, [event], [(check.check, check.config)], when).ledger
    ((key, condition),) = ledger.by_key().items()
    conditions = {key: acknowledged(condition, when) if acknowledged_how == "resumed" else condition}
    if acknowledged_how.startswith("acked"):
        ack = Ack(
            NOW + 60, "", "", condition.severity, requested_at=when - 1 if acknowledged_how == "acked before" else when
        )
        conditions = acknowledge(conditions, *key, ack)
    (finding,) = findings(gpu_access, host)
    result = CheckResult("gpu_access", "", Outcome.COMPLETED, NOW, 0.0, (finding,))
    found = absorb_result(conditions, result, 2, BOOT, ())[finding.key]
    at_once = recent and acknowledged_how in ("not at all", "acked before")
    assert found.state is (ConditionState.OPEN if at_once else ConditionState.PENDING)


def test_node_that_boots_with_lost_gpu_drains_at_once(tmp_path):
    """healthd reports ready, so slurmd starts, only after the drain."""
    (lost,) = hosts_with_slurmd(tmp_path, "gpu.3.lost = true", process="systemd")
    story = Story(gpu_access).run_check(lost)
    assert (story.codes, story.drained) == (["gpu_access/lost"], True)


# --- stories


@pytest.mark.parametrize("state", ["lost", "unreachable"])
def test_lost_gpu_requeues_and_needs_a_reboot(host, state):
    lost = host(f"gpu.3.{state} = true")
    story = Story(gpu_access).run_check(host()).run_check(lost)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/lost"], True, True)
    story.run_checks(host(), 300)
    assert story.drained, "it responds again, but there was no reboot"
    story.reset(THIRD)
    assert story.drained, "a GPU reset does not restore a lost GPU"
    story.reboot().run_check(host())
    assert (story.codes, story.drained) == ([], False)


def test_gpu_still_lost_after_reboot_drains_again(host):
    lost = host("gpu.3.lost = true")
    story = Story(gpu_access).run_check(lost).reboot().run_check(lost)
    assert (story.codes, story.drained) == (["gpu_access/lost"], True)
    story.repaired("gpu_access/lost", THIRD).run_check(lost)
    assert story.drained, "reported as repaired, but the check still finds it"


NO_RECOVERY_ACTION, RESET_STILL_REQUESTED = "gpu.3.unsupported_fields = [230]", "gpu.3.recovery_action = 1"


@pytest.mark.parametrize("ending", ["reset", "reboot", "repaired"])
@pytest.mark.parametrize("answers", [NO_RECOVERY_ACTION, RESET_STILL_REQUESTED])
def test_gpu_that_requires_reset_requeues_until_reset(host, ending, answers):
    story = Story(gpu_access).run_check(host()).run_check(host("gpu.3.requires_reset = true"))
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/reset_required"], True, True)
    story.run_checks(host(answers), 300)
    assert story.drained, "it responds again, but nothing proves a reset"
    if ending == "reset":
        story.reset("0000:1b:00.0")
        assert story.drained, "that was another GPU"
        story.reset(THIRD)
    elif ending == "reboot":
        story.reboot()
    else:
        story.repaired("gpu_access/reset_required")
    story.run_check(host(answers))
    assert (story.codes, story.drained) == ([], False)


def test_reset_without_log_line_is_detected_by_recovery_action(host):
    refused = host("gpu.3.requires_reset = true\ngpu.5.requires_reset = true")
    story = Story(gpu_access).run_check(host()).run_checks(refused, 3)
    story.run_checks(host(f"{RESET_STILL_REQUESTED}\ngpu.5.requires_reset = true"), 2)
    assert len(story.conditions) == 2, "the driver was reloaded, and its reset request remains"
    story.run_check(host("gpu.5.requires_reset = true"))
    ((ended,), (still_open,)) = story.cleared, story.conditions.values()
    assert (ended.subject, still_open.code, story.drained) == (THIRD, "gpu_access/reset_required", True)
    assert ended.cleared_by == (
        "gpu_reset: the GPU had to be reset, responds again, and the driver requests no recovery"
    )
    story.run_check(host())
    assert (story.codes, story.drained) == ([], False)


def test_gpu_that_requires_reset_again_after_reset_drains_again(host):
    refused = host("gpu.3.requires_reset = true")
    story = Story(gpu_access).run_check(host()).run_check(refused).run_check(host()).run_check(refused)
    assert (story.codes, story.drained) == (["gpu_access/reset_required"], True)


def test_unreadable_recovery_action_is_read_again_and_hides_no_finding(host):
    """The recovery action cannot be read in the run in which the GPU responds again."""
    silent = host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }\ngpu.5.lost = true')
    story = Story(gpu_access).run_check(host()).run_check(host("gpu.3.requires_reset = true"))
    with pytest.raises(NvmlError):
        story.run_check(silent)
    assert story.codes == ["gpu_access/lost", "gpu_access/reset_required"]
    story.run_check(host("gpu.5.lost = true"))
    assert story.codes == ["gpu_access/lost"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('library = "mismatch"', "gpu_access/driver_mismatch"),
        ('library = "driver_not_loaded"', "gpu_access/driver_not_loaded"),
        ('library = "library_not_found"', "gpu_access/library_missing"),
        ('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "InsufficientPower" }', "gpu_access/no_answer"),
    ],
)
def test_broken_driver_drains_until_it_works(host, text, code):
    broken = host(text)
    story = Story(gpu_access).run_check(host()).run_check(broken)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.run_checks(broken, 20).reboot().run_check(broken)
    assert story.drained, "neither time nor a reboot repairs it"
    story.run_checks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_driver_hang_of_one_round_warns_and_clears(host):
    story = Story(gpu_access).run_check(host()).hang(60.0)
    assert (story.codes, story.drained) == (["gpu_access/hang"], False)
    story.run_checks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_driver_hang_in_second_round_drains_until_it_responds(host):
    story = Story(gpu_access).run_check(host()).hang(60.0).hang(360.0)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/hang"], True, False)
    for _ in range(5):
        story.hang(3600.0)
    assert story.drained
    story.run_checks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize("code", ["79", "119", "120"])
@pytest.mark.parametrize("xid_first", [True, False])
def test_hang_with_xid_of_dead_gpu_requeues_at_once(host, code, xid_first):
    """Third step in the catalogue: gpu_xid decides, while every driver call hangs."""
    node = MultiCheckNode([Story(gpu_access), Story(gpu_xid)]).run_round(host())
    xid = KernelEvent("xid", code, THIRD)
    if xid_first:
        node.story_of("gpu_xid").take_event(xid)
    node.story_of("gpu_access").hang(60.0)
    assert not node.story_of("gpu_access").drained, "a hang alone only warns in its first round"
    if not xid_first:
        node.story_of("gpu_xid").take_event(xid)
    assert node.codes == ["gpu_access/hang", f"gpu_xid/{code}"]
    assert (node.drained, node.story_of("gpu_xid").requeued) == (True, True)
    node.run_rounds(host(), 3)
    assert node.drained, "the calls return, but there was no reset or reboot"
    node.apply_to_each(Story.reboot).run_round(host())
    assert (node.codes, node.drained) == ([], False)
