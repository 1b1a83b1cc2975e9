"""gpu_fabric: whether each GPU has joined its NVLink fabric and is healthy in it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import BOOT, NOW, codes, findings, healthy_gpus, observed, refusal, run_check, scenarios
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, pci_device, write

from healthd.checks import gpu_fabric
from healthd.checks.gpu_fabric import MANAGER_SETTINGS, SYSTEMCTL_COMMAND, Config, problems
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
RUNS = ProgramResult(0, "LoadState=loaded\nActiveState=active\n", "")
DEAD = ProgramResult(0, "LoadState=loaded\nActiveState=failed\n", "")
WAITING = "[gpu.3]\nfabric_state = 2\n"


@pytest.fixture
def host(tmp_path):
    make = scenarios(tmp_path)

    def with_systemd(text: str = "", profile: str = "dgx-h100", systemd: ProgramResult | OSError | None = None) -> Host:
        plain = make(text, profile)
        root = tmp_path / ("plain" if systemd is None else "booted")
        (root / ("run" if systemd is None else "run/systemd/system")).mkdir(parents=True, exist_ok=True)
        programs = {SYSTEMCTL_COMMAND: systemd or OSError("must not be queried")}
        return Host(str(root), plain._open_nvml, system=FakeSystem(str(root), programs=programs))

    return with_systemd


healthy = healthy_gpus(Config())


def health(mask: int, summary: int = 0) -> str:
    return f"[gpu.3]\nfabric_health = {mask}\nfabric_summary = {summary}\n"


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-h200", "dgx-b200"])
def test_gpus_that_have_joined_give_no_finding(host, profile):
    given = run_check(gpu_fabric, host(profile=profile))
    assert [item.value for item in observed(given, "gpu_fabric_state")] == [3] * 8
    assert [item for item in given if isinstance(item, Finding)] == []


def test_an_a100_a_pcie_card_and_what_says_not_supported_give_nothing(host):
    assert run_check(gpu_fabric, host(profile="dgx-a100")) == []
    text = "".join(f'[gpu.{n}]\nname = "NVIDIA H100 PCIe"\nfabric_state = 0\n' for n in range(8))
    assert run_check(gpu_fabric, host(text)) == []
    text = "".join(
        f'[gpu.{n}]\nname = "NVIDIA GH200 480GB"\n'
        'unsupported = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"]\n'
        for n in range(8)
    )
    assert run_check(gpu_fabric, host(text)) == []


NO_FABRIC_CALLS = 'unsupported = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"]'


@pytest.mark.parametrize("how", ["fabric_state = 0", NO_FABRIC_CALLS])
def test_one_gpu_without_a_fabric_beside_seven_that_have_joined_is_degraded(host, how):
    (finding,) = findings(gpu_fabric, host(f"[gpu.3]\n{how}"))
    assert (finding.code, finding.subject) == ("gpu_fabric/no_fabric", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert finding.message == "the GPU reports no NVLink fabric; 7 of its model have joined theirs"


def test_a_gpu_of_another_model_or_with_mig_needs_no_fabric(host):
    assert findings(gpu_fabric, host('[gpu.3]\nname = "NVIDIA T1000"\nfabric_state = 0')) == []
    assert findings(gpu_fabric, host("[gpu.3]\nmig = true\nfabric_state = 0")) == []


def test_while_none_has_joined_nobody_is_left_out(host):
    text = "".join(f"[gpu.{n}]\nfabric_state = {0 if n == 3 else 2}\n" for n in range(8))
    assert set(codes(findings(gpu_fabric, host(text)))) == {"gpu_fabric/not_joined"}


def test_story_a_gpu_that_is_left_out_drains_without_requeue_until_it_has_joined(host):
    story = Story(gpu_fabric).look(host()).look(host("gpu.3.fabric_state = 0"), 0.5)
    assert not story.drained, "this occurs during a reset"
    story.look(host("gpu.3.fabric_state = 0"))
    assert (story.codes, story.drained, story.requeued) == (["gpu_fabric/no_fabric"], True, False)
    story.looks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_a_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_fabric, Host(str(tmp_path))) == []


@pytest.mark.parametrize(("state", "words"), [(1, "not started"), (2, "in progress")])
def test_a_gpu_that_has_not_joined_after_five_minutes_is_critical(host, state, words):
    (finding,) = findings(gpu_fabric, host(f"gpu.3.fabric_state = {state}"))
    assert (finding.code, finding.subject) == ("gpu_fabric/not_joined", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 300.0)
    assert finding.shared_cause
    assert finding.message == f"the GPU has not joined the NVLink fabric: {words}"


@pytest.mark.parametrize("state", [4, 2**32 - 1])
def test_a_state_that_nobody_knows_is_unknown_and_hides_no_other_gpu(host, state):
    seen: list[Any] = []
    with pytest.raises(ValueError, match=f"unknown fabric state {state}"):
        seen.extend(run_once(host(f"gpu.2.fabric_state = {state}\ngpu.3.fabric_state = 1")))
    assert codes([item for item in seen if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


def run_once(host: Host) -> Any:
    return gpu_fabric.run(host, Config(), History({}, NOW, BOOT))


def test_joining_that_ended_in_an_error_is_critical(host):
    (finding,) = findings(gpu_fabric, host("gpu.3.fabric_status = 999"))
    assert (finding.code, finding.severity, finding.confirm_seconds) == (
        "gpu_fabric/unhealthy",
        Severity.CRITICAL,
        60.0,
    )
    assert "joining failed with NVML error 999" in finding.message


def test_a_driver_that_tells_no_health_is_judged_by_its_state_alone(host):
    text = 'missing_functions = ["nvmlDeviceGetGpuFabricInfoV"]\n'
    assert findings(gpu_fabric, host(text)) == []
    assert codes(findings(gpu_fabric, host(text + WAITING))) == ["gpu_fabric/not_joined"]


# --- health: nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*


@pytest.mark.parametrize(
    ("shift", "code", "words"),
    [
        (0, "gpu_fabric/degraded", "bandwidth is degraded"),
        (2, "gpu_fabric/degraded", "routes are being recovered"),
        (4, "gpu_fabric/unhealthy", "routes are unhealthy"),
        (6, "gpu_fabric/unhealthy", "an access time-out is being recovered"),
    ],
)
def test_of_the_first_four_1_says_that_something_is_wrong(host, shift, code, words):
    assert findings(gpu_fabric, host(health(2 << shift))) == []
    severity = Severity.CRITICAL if code == "gpu_fabric/unhealthy" else Severity.DEGRADED
    for summary in (0, 2):  # "unhealthy" adds nothing to the mask
        (finding,) = findings(gpu_fabric, host(health(1 << shift, summary)))
        assert (finding.code, finding.severity, finding.subject) == (code, severity, PCI)
        assert finding.message == f"the GPU is not healthy in the NVLink fabric: {words}"
        assert (finding.shared_cause, finding.confirm_seconds) == (False, 60.0)


def test_what_slows_beside_what_fails_is_as_bad_as_what_fails(host):
    (finding,) = findings(gpu_fabric, host(health(0b01_01_01, 3)))
    assert (finding.code, finding.severity) == ("gpu_fabric/unhealthy", Severity.CRITICAL)
    (finding,) = findings(gpu_fabric, host("[gpu.3]\nfabric_status = 999\nfabric_summary = 3"))
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("shift", "words"), [(12, "no partition is assigned"), (14, "the fabric manager is disconnected")]
)
def test_of_the_last_two_1_says_that_all_is_well(shift, words):
    assert problems(1 << shift) == []
    assert problems(2 << shift) == [words]


@pytest.mark.parametrize("configuration", range(16))
def test_a_configuration_other_than_none_is_wrong(configuration):
    found = problems(configuration << 8)
    assert found == [] if configuration < 2 else found[0].startswith("incorrect configuration: ")
    assert problems(5 << 8) == ["incorrect configuration: not enough NVLinks"]


def test_a_gb200_that_is_well_says_so_in_every_field():
    assert problems(0b01_01_0001_10_10_10_10) == []
    assert len(problems(0b10_10_0100_01_01_01_01)) == 7


@pytest.mark.parametrize(
    ("summary", "words", "code"),
    [(2, "unhealthy", "gpu_fabric/unhealthy"), (3, "limited capacity", "gpu_fabric/degraded")],
)
def test_a_bad_summary_counts_without_any_reason_and_limited_capacity_is_no_failure(host, summary, words, code):
    (finding,) = findings(gpu_fabric, host(health(0, summary)))
    assert (finding.code, finding.message) == (code, f"the GPU is not healthy in the NVLink fabric: {words}")


@pytest.mark.parametrize(("mask", "summary"), [(3, 0), (3 << 12, 1), (2**32 - 1, 2), (0, 4), (0, 255)])
def test_health_that_nobody_knows_is_unknown(host, mask, summary):
    with pytest.raises(ValueError, match="fabric"):
        run_check(gpu_fabric, host(health(mask, summary)))


@given(st.integers(0, 2**32 - 1))
def test_no_mask_that_says_anything_bad_passes_silently(mask):
    found, said = refusal(problems, mask)
    fields = [mask >> shift & 3 for shift in (0, 2, 4, 6)], [mask >> shift & 3 for shift in (12, 14)]
    bad = 1 in fields[0] or 2 in fields[1] or (mask >> 8 & 15) > 1
    assert said if 3 in fields[0] + fields[1] else bool(found) == bad


def test_an_error_is_a_failure_and_hides_no_other_gpu(host):
    seen: list[Any] = []
    text = f'[gpu.2.errors]\nnvmlDeviceGetGpuFabricInfoV = "Unknown"\n{WAITING}'
    with pytest.raises(NvmlError):
        seen.extend(run_once(host(text)))
    assert codes([item for item in seen if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


# --- no fault


def test_a_joining_that_is_complete_and_not_supported_is_no_fault(host):
    assert findings(gpu_fabric, host("[gpu.3]\nfabric_status = 3\nfabric_summary = 2")) == []
    assert codes(findings(gpu_fabric, host("gpu.3.fabric_status = 4"))) == ["gpu_fabric/unhealthy"]


BAD = ["fabric_state = 1", "fabric_state = 2", "fabric_health = 16", "fabric_health = 1", "fabric_summary = 2"]


@pytest.mark.parametrize("bad", [*BAD, "fabric_status = 999", "fabric_state = 0"])
@pytest.mark.parametrize("why", ["mig = true", "virtualization = 3", "virtualization = 4"])
def test_a_gpu_with_mig_and_one_of_a_vgpu_host_need_no_fabric(host, bad, why):
    assert findings(gpu_fabric, host(f"[gpu.3]\n{bad}\n{why}", systemd=OSError("must not be queried"))) == []
    assert len(findings(gpu_fabric, host(f"[gpu.3]\n{bad}"))) == 1


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_on_a_host_that_shares_its_nvswitches_out_a_gpu_in_progress_waits_for_its_partition(host, tmp_path, mode):
    write(tmp_path / "plain", {MANAGER_SETTINGS: f"# FABRIC_MODE=1\nLOG_LEVEL=4\nFABRIC_MODE={mode}\n"})
    assert codes(findings(gpu_fabric, host(WAITING))) == (["gpu_fabric/not_joined"] if mode == 0 else [])
    assert codes(findings(gpu_fabric, host("gpu.3.fabric_state = 1"))) == ["gpu_fabric/not_joined"]
    assert codes(findings(gpu_fabric, host(health(16)))) == ["gpu_fabric/unhealthy"]


def test_a_fabric_manager_is_no_cause_of_what_waits_for_its_partition(host, tmp_path):
    write(tmp_path / "booted", {MANAGER_SETTINGS: "FABRIC_MODE=1"})
    assert findings(gpu_fabric, host(WAITING, systemd=OSError("must not be queried"))) == []


def test_in_a_virtual_machine_without_nvswitches_a_gpu_in_progress_waits_for_its_host_and_never_drains(host):
    guest = host(WAITING + "virtualization = 1\n", systemd=OSError("must not be queried"))
    (finding,) = findings(gpu_fabric, guest)
    assert (finding.code, finding.severity, finding.subject) == ("gpu_fabric/partition", Severity.WARNING, PCI)
    assert finding.confirm_seconds == 300.0
    assert not Story(gpu_fabric).looks(guest, 50).drained


def test_a_virtual_machine_that_has_its_own_nvswitches_or_is_a_part_of_an_nvl72_joins_as_a_machine_does(host, tmp_path):
    guest = WAITING + "virtualization = 1\n"
    nvl72 = guest + 'name = "NVIDIA GB200"\n'
    assert codes(findings(gpu_fabric, host(nvl72))) == ["gpu_fabric/not_joined"]
    pci_device(tmp_path / "plain", "0000:05:00.0", "0x068000")
    assert codes(findings(gpu_fabric, host(guest))) == ["gpu_fabric/not_joined"]


def test_settings_of_the_fabric_manager_that_cannot_be_read_are_unknown(host, tmp_path):
    (tmp_path / "plain" / MANAGER_SETTINGS[1:]).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"fabricmanager\.cfg: Is a directory"):
        list(run_once(host(WAITING)))


# --- the fabric manager


@pytest.mark.parametrize("state", ["failed", "inactive", "activating", "deactivating"])
def test_a_fabric_manager_that_does_not_run_is_named_as_the_cause(host, state):
    ran = ProgramResult(0, f"LoadState=loaded\nActiveState={state}\n", "")
    gpu, manager = findings(gpu_fabric, host(WAITING, systemd=ran))
    assert gpu.code == "gpu_fabric/not_joined"
    assert (manager.code, manager.subject, manager.severity) == ("gpu_fabric/manager", "", Severity.DEGRADED)
    assert (manager.confirm_seconds, manager.clears, manager.shared_cause) == (300.0, Clears.PASS, True)
    assert manager.message.startswith(f"nvidia-fabricmanager.service is {state}; ")


@pytest.mark.parametrize(
    "ran",
    [
        None,  # no systemd: in a container
        RUNS,
        ProgramResult(0, "LoadState=loaded\nActiveState=reloading\n", ""),
        ProgramResult(0, "LoadState=not-found\nActiveState=inactive\n", ""),  # NVL72: it runs on the switches
    ],
)
def test_one_that_runs_or_is_not_installed_here_is_not_the_cause(host, ran):
    assert codes(findings(gpu_fabric, host(WAITING, systemd=ran))) == ["gpu_fabric/not_joined"]


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100"])
def test_systemd_is_not_asked_while_all_gpus_are_in_the_fabric_or_there_is_none(host, profile):
    assert findings(gpu_fabric, host(profile=profile, systemd=OSError("must not be queried"))) == []


@pytest.mark.parametrize(
    "ran",
    [
        ProgramResult(1, "", "Failed to connect to bus: Connection refused"),
        ProgramResult(0, "", ""),
        ProgramResult(0, "N/A\n", ""),
        ProgramResult(0, "ActiveState=\nLoadState=loaded\n", ""),
        ProgramResult(0, "LoadState=loaded\nActiveSt", ""),
        ProgramResult(0, "\ufffd\0ELF", ""),
    ],
)
def test_a_systemd_that_does_not_say_is_unknown_and_hides_no_gpu(host, ran):
    seen: list[Any] = []
    with pytest.raises(ValueError, match="systemctl: no state of"):
        seen.extend(run_once(host(WAITING, systemd=ran)))
    assert codes([item for item in seen if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


# --- stories


def all_waiting() -> str:
    return "".join(f"[gpu.{n}]\nfabric_state = 2\n" for n in range(8))


def test_a_boot_in_which_the_fabric_manager_takes_its_time_is_no_alarm(host):
    story = Story(gpu_fabric)
    for _ in range(4):
        story.look(host(all_waiting(), systemd=DEAD), minutes=1)
    assert story.look(host(), minutes=0.9).codes == []
    assert not story.drained


def test_gpus_that_never_join_drain_and_requeue_until_the_fabric_manager_runs(host):
    story = Story(gpu_fabric).looks(host(all_waiting(), systemd=DEAD), 2)
    assert story.codes == ["gpu_fabric/manager"] + ["gpu_fabric/not_joined"] * 8
    assert (story.drained, story.requeued) == (True, True)
    story.looks(host(all_waiting(), systemd=RUNS), 100)  # it runs, and the GPUs still wait
    assert story.drained
    assert story.codes == ["gpu_fabric/not_joined"] * 8
    assert story.look(host()).drained
    assert not story.look(host()).drained


def test_a_fabric_that_is_unwell_drains_and_requeues_until_it_is_well(host):
    bad = host(health(1 << 4))
    story = Story(gpu_fabric).look(bad)
    assert not story.drained
    story.look(bad, minutes=1)
    assert (story.drained, story.requeued) == (True, True)
    assert story.reboot().looks(bad, 50).drained
    assert not story.looks(host(), 2).drained


@pytest.mark.parametrize("bad", [health(1), health(1 << 2, 2), health(0, 3)])
def test_a_fabric_that_is_only_slow_drains_without_a_requeue_and_requeues_when_it_fails(host, bad):
    story = Story(gpu_fabric).looks(host(bad), 20)
    assert (story.drained, story.requeued) == (True, False)
    assert story.looks(host(health(1 << 4)), 2).requeued
    assert not story.looks(host(), 2).drained


def test_a_recovery_that_takes_seconds_is_nothing(host):
    story = Story(gpu_fabric).look(host(health(1 << 2))).look(host(), minutes=1).look(host(health(1 << 6)))
    assert (story.drained, story.codes) == (False, [])


def test_a_fabric_manager_that_dies_under_gpus_that_have_joined_is_left_to_the_services_check(host):
    assert Story(gpu_fabric).looks(host(systemd=DEAD), 10).codes == []
