"""gpu_access: whether the driver and every GPU respond."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observed, run_check, scenarios, until_it_fails
from msgspec.structs import replace
from story import Node, Story
from trees import PCI, gpus, write

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
def test_a_healthy_machine_gives_no_finding(host, profile):
    given = run_check(gpu_access, host(profile=profile))
    assert [item.value for item in observed(given, "gpus")] == [8]
    assert [item for item in given if hasattr(item, "severity")] == []


def test_a_lost_gpu_is_critical_until_a_reboot(host):
    (finding,) = findings(gpu_access, host("gpu.3.lost = true"))
    assert (finding.code, finding.subject) == ("gpu_access/lost", THIRD)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.REBOOT)


def test_a_gpu_whose_handle_is_an_unknown_error_is_lost(host):
    (finding,) = findings(gpu_access, host("gpu.3.unreachable = true"))
    assert finding.code == "gpu_access/lost"
    assert "index 3" in finding.message


def test_a_gpu_that_must_be_reset_is_critical_until_a_gpu_reset(host):
    (finding,) = findings(gpu_access, host("gpu.3.requires_reset = true"))
    assert (finding.code, finding.subject) == ("gpu_access/reset_required", THIRD)
    assert (finding.severity, finding.clears) == (Severity.CRITICAL, Clears.GPU_RESET)


def test_a_gpu_without_its_power_cable_is_degraded(host):
    (finding,) = findings(gpu_access, host('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "InsufficientPower" }'))
    assert (finding.code, finding.severity) == ("gpu_access/no_answer", Severity.DEGRADED)


def test_healthds_own_lack_of_rights_is_no_finding_but_a_failure(host):
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByIndex"):
        run_check(gpu_access, host('gpu.3.errors = { nvmlDeviceGetHandleByIndex = "NoPermission" }'))


def test_a_gpu_that_may_not_be_opened_hides_no_other(host):
    text = '[gpu.2]\nerrors = { nvmlDeviceGetHandleByIndex = "NoPermission" }\n[gpu.3]\nlost = true'
    given: list[object] = []
    with pytest.raises(NvmlError, match="index 2"):
        given.extend(gpu_access.run(host(text), Config(), History({}, NOW, BOOT)))
    assert [f.subject for f in given if isinstance(f, Finding)] == [THIRD]


def test_a_driver_that_does_not_tell_its_version_hides_no_lost_gpu(tmp_path):
    scenario = tmp_path / "lost.toml"
    scenario.write_text('profile = "dgx-h100"\ngpu.3.lost = true\n')
    inner = library(str(scenario))

    class Mute:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def nvmlSystemGetDriverVersion(self) -> str:
            raise pynvml.NVMLError_Unknown

    given, error = until_it_fails(gpu_access, Host("/nonexistent", lambda: Nvml.open(Mute())))
    assert [item.subject for item in given if isinstance(item, Finding)] == [THIRD]
    assert "nvmlSystemGetDriverVersion" in error


@pytest.mark.parametrize(
    ("library", "code", "shared"),
    [
        ("mismatch", "gpu_access/driver_mismatch", True),
        ("driver_not_loaded", "gpu_access/driver_not_loaded", False),
        ("library_not_found", "gpu_access/library_missing", False),
    ],
)
def test_a_driver_that_cannot_be_opened_is_degraded(host, library, code, shared):
    (finding,) = findings(gpu_access, host(f'library = "{library}"'))
    assert (finding.code, finding.severity, finding.clears) == (code, Severity.DEGRADED, Clears.PASS)
    assert finding.shared_cause is shared


@pytest.mark.parametrize("state", ["coming", "live"])
def test_a_driver_that_is_being_loaded_or_lacks_its_device_files_is_no_fault(host, tmp_path, state):
    (tmp_path / "root/sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "root/sys/module/nvidia/initstate").write_text(f"{state}\n")
    loading = host('library = "driver_not_loaded"', root=str(tmp_path / "root"))
    given, error = until_it_fails(gpu_access, loading)
    assert given == []
    assert "driver" in error.lower()


def test_any_other_error_of_nvmlinit_is_a_failure_and_says_nothing_of_the_gpus(tmp_path):
    from healthd.nvidia.nvml import Nvml

    class Broken:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self):
            raise pynvml.NVMLError_Unknown()

    with pytest.raises(NvmlError, match="nvmlInit"):
        run_check(gpu_access, Host(str(tmp_path), lambda: Nvml.open(Broken())))


@without_nvml
@pytest.mark.parametrize("check", [gpu_access, gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_a_machine_without_gpus_and_driver_gives_no_finding(tmp_path, check):
    assert findings(check, write(tmp_path, {"/proc/version": "Linux"})) == []


@without_nvml
def test_a_machine_with_gpus_but_no_library_is_degraded(tmp_path):
    assert codes(findings(gpu_access, gpus(tmp_path, [THIRD]))) == ["gpu_access/library_missing"]


@without_nvml
@pytest.mark.parametrize("check", [gpu_count, gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_the_other_gpu_checks_cannot_look_without_the_driver_where_there_are_gpus(tmp_path, check):
    with pytest.raises(NvmlError):
        run_check(check, gpus(tmp_path, [THIRD]))


def test_a_call_that_hangs_warns_first_and_is_degraded_in_the_second_round():
    (finding,) = gpu_access.overdue(gpu_access.Config(), 10.0)
    assert (finding.code, finding.severity) == ("gpu_access/hang", Severity.WARNING)
    assert finding.worsens is not None
    assert (finding.worsens.severity, finding.worsens.after_seconds) == (Severity.DEGRADED, 240.0)
    assert "10 s" in finding.message


@pytest.mark.parametrize("check", [gpu_ecc, gpu_nvlink, gpu_recovery_action, gpu_row_remap])
def test_gpus_that_answer_every_question_with_an_error_never_pass_silently(host, check):
    with pytest.raises(NvmlError):
        run_check(check, host("random_failures = 1.0"))


# --- GPU resets, which look like a lost GPU


def with_slurmd(tmp_path, *states: str, driver: str | None = "nvidia", process: str = "slurmd") -> list[Host]:
    """Return hosts with the GPUs in sysfs and this process running, one for each state of the fake NVML."""
    root = tmp_path / "node"
    gpus(root, [THIRD])
    link = root / PCI[1:] / THIRD / "driver"
    link.unlink()
    if driver:
        link.symlink_to(f"../../../../bus/pci/drivers/{driver}")
    write(root, {"/proc/4242/comm": f"{process}\n", "/proc/self/comm": "slurmd\n", "/proc/uptime": "1 1\n"})
    return [scenarios(tmp_path)(text, root=str(root)) for text in states]


def test_a_lost_gpu_counts_after_a_minute_where_slurmd_may_reset_it(tmp_path):
    (host,) = with_slurmd(tmp_path, "gpu.3.lost = true")
    (finding,) = findings(gpu_access, host)
    assert (finding.code, finding.confirm_seconds) == ("gpu_access/lost", 60.0)
    (finding,) = findings(gpu_access, host, Config(confirm_seconds=5.0))
    assert finding.confirm_seconds == 5.0


def test_of_a_gpu_without_a_handle_nobody_can_say_more(tmp_path):
    (host,) = with_slurmd(tmp_path, "gpu.3.unreachable = true")
    (finding,) = findings(gpu_access, host)
    assert (finding.subject, finding.confirm_seconds) == ("", 60.0)


@pytest.mark.parametrize("process", ["slurmd", "slurmstepd", "bash"])
@pytest.mark.parametrize("driver", ["nvidia", "vfio-pci", None])
def test_it_counts_at_once_before_slurmd_has_started_and_without_the_driver(tmp_path, process, driver):
    (host,) = with_slurmd(tmp_path, "gpu.3.lost = true", process=process, driver=driver)
    (finding,) = findings(gpu_access, host)
    assert finding.confirm_seconds == (60.0 if (process, driver) == ("slurmd", "nvidia") else 0.0)


def test_it_counts_at_once_where_the_kernel_has_no_such_device(tmp_path):
    (host,) = with_slurmd(tmp_path, "gpu.4.lost = true")
    assert [finding.confirm_seconds for finding in findings(gpu_access, host)] == [0.0]


def test_story_a_reset_of_an_epilog_that_ends_within_a_minute_drains_nothing(tmp_path):
    well, lost = with_slurmd(tmp_path, "", "gpu.3.lost = true")
    story = Story(gpu_access).look(well).look(lost).look(lost, 59 / 60)
    assert not story.drained, "59 s"
    story.look(well, 0.1)
    assert (story.codes, story.drained) == ([], False)


def test_story_a_gpu_that_is_lost_for_a_minute_requeues(tmp_path):
    well, lost = with_slurmd(tmp_path, "", "gpu.3.lost = true")
    story = Story(gpu_access).look(well).look(lost).look(lost, 1.0)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/lost"], True, True)


@pytest.mark.parametrize(
    ("subject", "said", "at_once"),
    [
        (THIRD, KernelEvent("xid", "79", THIRD), True),
        (THIRD, KernelEvent("xid", "79", "0000:1b:00.0"), False),
        ("", KernelEvent("xid", "79", "0000:1b:00.0"), True),
        (THIRD, KernelEvent("xid", "79", THIRD, history=True), False),
        (THIRD, KernelEvent("xid", "31", THIRD), False),
    ],
)
def test_a_lost_gpu_counts_at_once_where_the_kernel_log_says_that_it_is_gone(tmp_path, subject, said, at_once):
    state = "lost" if subject else "unreachable"
    (host,) = with_slurmd(tmp_path, f"gpu.3.{state} = true")
    heard = Story(gpu_xid)
    event = replace(said, time=NOW, last_time=NOW, boot_id=BOOT)
    ledger = intake.take_kernel_events(heard.ledger, [event], [(heard.check, heard.config)], NOW).ledger
    result = CheckResult("gpu_access", "", Outcome.COMPLETED, NOW, 0.1, tuple(findings(gpu_access, host)))
    looked = intake.take_result(ledger, result, Config(), NOW).ledger
    found = looked.by_key()[ConditionKey("gpu_access/lost", subject)]
    assert found.state is (ConditionState.OPEN if at_once else ConditionState.PENDING)


@pytest.mark.parametrize("said", [KernelEvent("xid", "79", THIRD), KernelEvent("pcie_hotplug", "link_down", THIRD)])
@pytest.mark.parametrize("knows", ["not at all", "resumed", "acked", "acked before"])
@pytest.mark.parametrize(("minutes", "recent"), [(0.0, True), (9.9, True), (10.0, False), (3 * 24 * 60.0, False)])
def test_what_the_log_said_before_somebody_knew_of_it_or_long_ago_confirms_no_reset(
    tmp_path, said, knows, minutes, recent
):
    """An operator acknowledged an Xid 79 days ago: the next reset of this GPU by an epilog is no new fault."""
    (host,) = with_slurmd(tmp_path, "gpu.3.lost = true")
    check = Story(gpu_xid if said.kind == "xid" else pcie_hotplug)
    when = NOW - minutes * 60
    event = replace(said, time=when, last_time=when, boot_id=BOOT)
    ledger = intake.take_kernel_events(check.ledger, [event], [(check.check, check.config)], when).ledger
    ((key, heard),) = ledger.by_key().items()
    conditions = {key: acknowledged(heard, when) if knows == "resumed" else heard}
    if knows.startswith("acked"):
        ack = Ack(NOW + 60, "", "", heard.severity, requested_at=when - 1 if knows == "acked before" else when)
        conditions = acknowledge(conditions, *key, ack)
    (finding,) = findings(gpu_access, host)
    result = CheckResult("gpu_access", "", Outcome.COMPLETED, NOW, 0.0, (finding,))
    found = absorb_result(conditions, result, 2, BOOT, ())[finding.key]
    at_once = recent and knows in ("not at all", "acked before")
    assert found.state is (ConditionState.OPEN if at_once else ConditionState.PENDING)


def test_story_a_node_that_boots_with_a_lost_gpu_takes_no_job(tmp_path):
    """healthd reports ready, so slurmd starts, only after the drain."""
    (lost,) = with_slurmd(tmp_path, "gpu.3.lost = true", process="systemd")
    story = Story(gpu_access).look(lost)
    assert (story.codes, story.drained) == (["gpu_access/lost"], True)


# --- stories


@pytest.mark.parametrize("state", ["lost", "unreachable"])
def test_story_a_lost_gpu_requeues_and_waits_for_a_reboot(host, state):
    lost = host(f"gpu.3.{state} = true")
    story = Story(gpu_access).look(host()).look(lost)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/lost"], True, True)
    story.looks(host(), 300)
    assert story.drained, "it responds again, but there was no reboot"
    story.reset(THIRD)
    assert story.drained, "a GPU reset does not restore a lost GPU"
    story.reboot().look(host())
    assert (story.codes, story.drained) == ([], False)


def test_story_a_lost_gpu_that_is_still_lost_after_the_reboot_drains_again(host):
    lost = host("gpu.3.lost = true")
    story = Story(gpu_access).look(lost).reboot().look(lost)
    assert (story.codes, story.drained) == (["gpu_access/lost"], True)
    story.repaired("gpu_access/lost", THIRD).look(lost)
    assert story.drained, "reported as repaired, but the check still finds it"


SAYS_NOTHING, STILL_ASKS = "gpu.3.unsupported_fields = [230]", "gpu.3.recovery_action = 1"


@pytest.mark.parametrize("how", ["reset", "reboot", "repaired"])
@pytest.mark.parametrize("answers", [SAYS_NOTHING, STILL_ASKS])
def test_story_a_gpu_that_must_be_reset_requeues_until_it_is(host, how, answers):
    story = Story(gpu_access).look(host()).look(host("gpu.3.requires_reset = true"))
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/reset_required"], True, True)
    story.looks(host(answers), 300)
    assert story.drained, "it responds again, but nothing proves a reset"
    if how == "reset":
        story.reset("0000:1b:00.0")
        assert story.drained, "that was another GPU"
        story.reset(THIRD)
    elif how == "reboot":
        story.reboot()
    else:
        story.repaired("gpu_access/reset_required")
    story.look(host(answers))
    assert (story.codes, story.drained) == ([], False)


def test_story_a_reset_that_no_line_tells_is_seen_where_the_driver_asks_for_nothing_any_more(host):
    refused = host("gpu.3.requires_reset = true\ngpu.5.requires_reset = true")
    story = Story(gpu_access).look(host()).looks(refused, 3)
    story.looks(host(f"{STILL_ASKS}\ngpu.5.requires_reset = true"), 2)
    assert len(story.conditions) == 2, "the driver was reloaded, and its reset request remains"
    story.look(host("gpu.5.requires_reset = true"))
    ((ended,), (stands,)) = story.cleared, story.conditions.values()
    assert (ended.subject, stands.code, story.drained) == (THIRD, "gpu_access/reset_required", True)
    assert ended.cleared_by == (
        "gpu_reset: the GPU had to be reset, responds again, and the driver requests no recovery"
    )
    story.look(host())
    assert (story.codes, story.drained) == ([], False)


def test_story_a_gpu_that_is_refused_again_right_after_its_reset_drains_again(host):
    refused = host("gpu.3.requires_reset = true")
    story = Story(gpu_access).look(host()).look(refused).look(host()).look(refused)
    assert (story.codes, story.drained) == (["gpu_access/reset_required"], True)


def test_a_gpu_that_does_not_say_what_the_driver_wants_of_it_is_asked_again_and_hides_nothing(host):
    """The recovery action cannot be read in the run in which the GPU responds again."""
    silent = host('gpu.3.errors = { nvmlDeviceGetFieldValues = "Unknown" }\ngpu.5.lost = true')
    story = Story(gpu_access).look(host()).look(host("gpu.3.requires_reset = true"))
    with pytest.raises(NvmlError):
        story.look(silent)
    assert story.codes == ["gpu_access/lost", "gpu_access/reset_required"]
    story.look(host("gpu.5.lost = true"))
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
def test_story_a_driver_that_does_not_work_drains_until_it_does(host, text, code):
    broken = host(text)
    story = Story(gpu_access).look(host()).look(broken)
    assert (story.codes, story.drained, story.requeued) == ([code], True, False)
    story.looks(broken, 20).reboot().look(broken)
    assert story.drained, "neither time nor a reboot repairs it"
    story.looks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_story_a_driver_that_hangs_for_one_round_warns_and_is_forgiven(host):
    story = Story(gpu_access).look(host()).hang(60.0)
    assert (story.codes, story.drained) == (["gpu_access/hang"], False)
    story.looks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_story_a_driver_that_still_hangs_in_the_second_round_drains_until_it_answers(host):
    story = Story(gpu_access).look(host()).hang(60.0).hang(360.0)
    assert (story.codes, story.drained, story.requeued) == (["gpu_access/hang"], True, False)
    for _ in range(5):
        story.hang(3600.0)
    assert story.drained
    story.looks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


@pytest.mark.parametrize("code", ["79", "119", "120"])
@pytest.mark.parametrize("xid_first", [True, False])
def test_story_a_hang_together_with_the_xid_of_a_dead_gpu_requeues_at_once(host, code, xid_first):
    """Third step in the catalogue: gpu_xid decides, while every driver call hangs."""
    node = Node([Story(gpu_access), Story(gpu_xid)]).look(host())
    xid = KernelEvent("xid", code, THIRD)
    if xid_first:
        node.of("gpu_xid").hear(xid)
    node.of("gpu_access").hang(60.0)
    assert not node.of("gpu_access").drained, "a hang alone only warns in its first round"
    if not xid_first:
        node.of("gpu_xid").hear(xid)
    assert node.codes == ["gpu_access/hang", f"gpu_xid/{code}"]
    assert (node.drained, node.of("gpu_xid").requeued) == (True, True)
    node.looks(host(), 3)
    assert node.drained, "the calls return, but there was no reset or reboot"
    node.each(Story.reboot).look(host())
    assert (node.codes, node.drained) == ([], False)
