"""gpu_fabric: whether each GPU has joined its NVLink fabric and is healthy in it."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from fakes import (
    BOOT,
    NOW,
    codes,
    findings,
    healthy_gpus,
    observations_named,
    parse_or_error,
    run_check,
    run_until_error,
    scenarios,
)
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import FakeSystem, add_pci_device, write

from healthd.checks import gpu_fabric
from healthd.checks.gpu_fabric import MANAGER_SETTINGS, SYSTEMCTL_COMMAND, Config, problems
from healthd.common.history import History
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host
from healthd.host.program import ProgramResult
from healthd.nvidia.nvml import NvmlError

PCI = fake_pci_gpus("dgx-h100")[3]
MANAGER_ACTIVE = ProgramResult(0, "LoadState=loaded\nActiveState=active\n", "")
MANAGER_FAILED = ProgramResult(0, "LoadState=loaded\nActiveState=failed\n", "")
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
def test_joined_gpus_give_no_finding(host, profile):
    results = run_check(gpu_fabric, host(profile=profile))
    assert [item.value for item in observations_named(results, "gpu_fabric_state")] == [3] * 8
    assert [item for item in results if isinstance(item, Finding)] == []


def test_gpus_without_fabric_support_give_nothing(host):
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


@pytest.mark.parametrize("setting", ["fabric_state = 0", NO_FABRIC_CALLS])
def test_gpu_without_fabric_next_to_joined_gpus_is_degraded(host, setting):
    (finding,) = findings(gpu_fabric, host(f"[gpu.3]\n{setting}"))
    assert (finding.code, finding.subject) == ("gpu_fabric/no_fabric", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.DEGRADED, Clears.PASS, 60.0)
    assert finding.message == "the GPU reports no NVLink fabric; 7 other GPUs of this model have joined"


def test_gpu_of_other_model_or_with_mig_needs_no_fabric(host):
    assert findings(gpu_fabric, host('[gpu.3]\nname = "NVIDIA T1000"\nfabric_state = 0')) == []
    assert findings(gpu_fabric, host("[gpu.3]\nmig = true\nfabric_state = 0")) == []


def test_missing_fabric_is_ignored_until_a_gpu_has_joined(host):
    text = "".join(f"[gpu.{n}]\nfabric_state = {0 if n == 3 else 2}\n" for n in range(8))
    assert set(codes(findings(gpu_fabric, host(text)))) == {"gpu_fabric/not_joined"}


def test_gpu_without_fabric_drains_without_requeue_until_joined(host):
    story = Story(gpu_fabric).run_check(host()).run_check(host("gpu.3.fabric_state = 0"), 0.5)
    assert not story.drained, "this occurs during a reset"
    story.run_check(host("gpu.3.fabric_state = 0"))
    assert (story.codes, story.drained, story.requeued) == (["gpu_fabric/no_fabric"], True, False)
    story.run_checks(host(), 3)
    assert (story.codes, story.drained) == ([], False)


def test_machine_without_gpus_gives_nothing(tmp_path):
    assert run_check(gpu_fabric, Host(str(tmp_path))) == []


@pytest.mark.parametrize(("state", "state_text"), [(1, "not started"), (2, "in progress")])
def test_gpu_not_joined_after_five_minutes_is_critical(host, state, state_text):
    (finding,) = findings(gpu_fabric, host(f"gpu.3.fabric_state = {state}"))
    assert (finding.code, finding.subject) == ("gpu_fabric/not_joined", PCI)
    assert (finding.severity, finding.clears, finding.confirm_seconds) == (Severity.CRITICAL, Clears.PASS, 300.0)
    assert not finding.shared_cause, "the other GPUs have joined"
    assert finding.message == f"the GPU has not joined the NVLink fabric: {state_text}"


def test_gpus_that_have_all_not_joined_have_a_shared_cause(host):
    waiting = host("".join(f"gpu.{n}.fabric_state = 2\n" for n in range(8)))
    assert [(f.code, f.shared_cause) for f in findings(gpu_fabric, waiting)] == [("gpu_fabric/not_joined", True)] * 8


@pytest.mark.parametrize("state", [4, 2**32 - 1])
def test_unrecognised_state_fails_run_and_hides_no_other_finding(host, state):
    results: list[Any] = []
    with pytest.raises(ValueError, match=f"unknown fabric state {state}"):
        results.extend(run_once(host(f"gpu.2.fabric_state = {state}\ngpu.3.fabric_state = 1")))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


def run_once(host: Host) -> Any:
    return gpu_fabric.run(host, Config(), History({}, NOW, BOOT))


def test_failed_joining_is_critical(host):
    (finding,) = findings(gpu_fabric, host("gpu.3.fabric_status = 999"))
    assert (finding.code, finding.severity, finding.confirm_seconds) == (
        "gpu_fabric/unhealthy",
        Severity.CRITICAL,
        60.0,
    )
    assert "joining failed with NVML error 999" in finding.message


def test_driver_without_health_fields_uses_state_only(host):
    text = 'missing_functions = ["nvmlDeviceGetGpuFabricInfoV"]\n'
    assert findings(gpu_fabric, host(text)) == []
    assert codes(findings(gpu_fabric, host(text + WAITING))) == ["gpu_fabric/not_joined"]


# --- health: nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*


@pytest.mark.parametrize(
    ("shift", "code", "problem"),
    [
        (0, "gpu_fabric/degraded", "bandwidth is degraded"),
        (2, "gpu_fabric/degraded", "routes are being recovered"),
        (4, "gpu_fabric/unhealthy", "routes are unhealthy"),
        (6, "gpu_fabric/unhealthy", "recovering from an access time-out"),
    ],
)
def test_first_four_health_fields_mean_a_fault_if_1(host, shift, code, problem):
    assert findings(gpu_fabric, host(health(2 << shift))) == []
    severity = Severity.CRITICAL if code == "gpu_fabric/unhealthy" else Severity.DEGRADED
    for summary in (0, 2):  # "unhealthy" adds nothing to the mask
        (finding,) = findings(gpu_fabric, host(health(1 << shift, summary)))
        assert (finding.code, finding.severity, finding.subject) == (code, severity, PCI)
        assert finding.message == f"the GPU is not healthy in the NVLink fabric: {problem}"
        assert (finding.shared_cause, finding.confirm_seconds) == (False, 60.0)


def test_severity_is_that_of_the_worst_health_field(host):
    (finding,) = findings(gpu_fabric, host(health(0b01_01_01, 3)))
    assert (finding.code, finding.severity) == ("gpu_fabric/unhealthy", Severity.CRITICAL)
    (finding,) = findings(gpu_fabric, host("[gpu.3]\nfabric_status = 999\nfabric_summary = 3"))
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("shift", "problem"), [(12, "no partition is assigned"), (14, "the fabric manager is disconnected")]
)
def test_last_two_health_fields_mean_healthy_if_1(shift, problem):
    assert problems(1 << shift) == []
    assert problems(2 << shift) == [problem]


@pytest.mark.parametrize("configuration", range(16))
def test_configuration_field_above_1_is_a_problem(configuration):
    found = problems(configuration << 8)
    assert found == [] if configuration < 2 else found[0].startswith("incorrect configuration: ")
    assert problems(5 << 8) == ["incorrect configuration: not enough NVLinks"]


def test_problems_of_healthy_and_faulty_gb200():
    assert problems(0b01_01_0001_10_10_10_10) == []
    assert len(problems(0b10_10_0100_01_01_01_01)) == 7


@pytest.mark.parametrize(
    ("summary", "problem", "code"),
    [(2, "unhealthy", "gpu_fabric/unhealthy"), (3, "limited capacity", "gpu_fabric/degraded")],
)
def test_bad_summary_is_a_finding_and_limited_capacity_only_degrades(host, summary, problem, code):
    (finding,) = findings(gpu_fabric, host(health(0, summary)))
    assert (finding.code, finding.message) == (code, f"the GPU is not healthy in the NVLink fabric: {problem}")


@pytest.mark.parametrize(("mask", "summary"), [(3, 0), (3 << 12, 1), (2**32 - 1, 2), (0, 4), (0, 255)])
def test_unrecognised_health_fails_run(host, mask, summary):
    with pytest.raises(ValueError, match="fabric"):
        run_check(gpu_fabric, host(health(mask, summary)))


@given(st.integers(0, 2**32 - 1))
def test_problems_reports_every_bad_mask(mask):
    found, error = parse_or_error(problems, mask)
    fields = [mask >> shift & 3 for shift in (0, 2, 4, 6)], [mask >> shift & 3 for shift in (12, 14)]
    has_problem = 1 in fields[0] or 2 in fields[1] or (mask >> 8 & 15) > 1
    assert error if 3 in fields[0] + fields[1] else bool(found) == has_problem


def test_nvml_error_fails_run_and_hides_no_other_finding(host):
    results: list[Any] = []
    text = f'[gpu.2.errors]\nnvmlDeviceGetGpuFabricInfoV = "Unknown"\n{WAITING}'
    with pytest.raises(NvmlError):
        results.extend(run_once(host(text)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


# --- the NVLink domain of a rack

CLUSTER = "00000001-0000-0000-0000-000000000001"
OTHER_CLUSTER = "00000002-0000-0000-0000-000000000001"
IN_DOMAIN = f'fabric_cluster = "{CLUSTER}"\nfabric_clique = 32766'
PLACE = 'platform = { peer_type = 1, serial = "1820000000001", slot = 14, tray = 4, host = 1 }'
RACK_GPUS = fake_pci_gpus("dgx-b200")[:4]
NO_MANAGER = "fabric_health = 0x8000"


def tray(*settings: str, place: str = PLACE) -> str:
    """Return the text of a GB200 tray. `settings` are those of GPU 0, 1, ...; the last ones are those of the rest."""
    addresses = ", ".join(f'"{pci}"' for pci in RACK_GPUS)
    tables = (f'[gpu.{n}]\nname = "NVIDIA GB200"\n{place}\n{settings[min(n, len(settings) - 1)]}\n' for n in range(4))
    return f"pci = [{addresses}]\n" + "".join(tables)


def test_tray_in_its_domain_gives_no_finding_and_its_place(host):
    results = run_check(gpu_fabric, host(tray(IN_DOMAIN), profile="dgx-b200"))
    assert [item for item in results if isinstance(item, Finding)] == []
    labels = [dict(item.labels) for item in observations_named(results, "gpu_fabric_info")]
    place = {"domain": CLUSTER, "clique": "32766", "chassis": "1820000000001", "slot": "14", "tray": "4"}
    assert labels == [{"pci": pci, **place} for pci in RACK_GPUS]


def test_domain_without_platform_has_no_place(host):
    results = run_check(gpu_fabric, host(tray(IN_DOMAIN, place=""), profile="dgx-b200"))
    assert {dict(item.labels)["slot"] for item in observations_named(results, "gpu_fabric_info")} == {""}


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (f'fabric_cluster = "{CLUSTER}"\nfabric_clique = 1', f"the GPU is in NVLink domain {CLUSTER}, clique 1; "),
        (f'fabric_cluster = "{OTHER_CLUSTER}"\nfabric_clique = 2', f"the GPU is in NVLink domain {OTHER_CLUSTER}, "),
        ("", "the GPU is in no NVLink domain; "),
        ("fabric_status = 3", "the GPU is in no NVLink domain; "),
    ],
)
def test_gpu_of_tray_in_another_domain_is_degraded(host, other, text):
    different = host(tray(other, IN_DOMAIN), profile="dgx-b200")
    (finding,) = findings(gpu_fabric, different)
    assert (finding.code, finding.subject) == ("gpu_fabric/other_domain", RACK_GPUS[0])
    assert (finding.severity, finding.shared_cause, finding.confirm_seconds) == (Severity.DEGRADED, False, 60.0)
    assert finding.message.startswith(text)
    story = Story(gpu_fabric).run_checks(different, 2)
    assert (story.drained, story.requeued) == (True, False)
    assert not story.run_checks(host(tray(IN_DOMAIN), profile="dgx-b200"), 2).drained


def test_only_gpu_with_domain_is_not_the_faulty_one(host):
    found = findings(gpu_fabric, host(tray(IN_DOMAIN, ""), profile="dgx-b200"))
    assert [(f.code, f.subject) for f in found] == [("gpu_fabric/other_domain", pci) for pci in RACK_GPUS[1:]]


def test_all_gpus_are_reported_if_two_domains_have_equally_many(host):
    other = f'fabric_cluster = "{OTHER_CLUSTER}"'
    found = findings(gpu_fabric, host(tray(other, other, IN_DOMAIN), profile="dgx-b200"))
    assert [(f.code, f.subject) for f in found] == [("gpu_fabric/other_domain", pci) for pci in RACK_GPUS]


@pytest.mark.parametrize("exemption", ["mig = true", "virtualization = 3", "virtualization = 4"])
@pytest.mark.parametrize("fault", ["fabric_clique = 1", f"{IN_DOMAIN}\n{NO_MANAGER}"])
def test_gpu_with_mig_or_vgpu_host_needs_no_domain(host, exemption, fault):
    assert findings(gpu_fabric, host(tray(f"{fault}\n{exemption}", IN_DOMAIN), profile="dgx-b200")) == []


def test_gpu_that_failed_to_join_is_only_unhealthy(host):
    found = findings(gpu_fabric, host(tray("fabric_status = 999", IN_DOMAIN), profile="dgx-b200"))
    assert codes(found) == ["gpu_fabric/unhealthy"]


@pytest.mark.parametrize("state", ["fabric_state = 0", NO_FABRIC_CALLS, "", "fabric_status = 3"])
def test_tray_outside_its_domain_warns_and_never_drains(host, state):
    found = findings(gpu_fabric, host(tray(state), profile="dgx-b200"))
    assert [(f.code, f.severity, f.subject) for f in found] == [
        ("gpu_fabric/no_domain", Severity.WARNING, pci) for pci in RACK_GPUS
    ]
    assert {(f.confirm_seconds, f.shared_cause) for f in found} == {(300.0, True)}
    assert not Story(gpu_fabric).run_checks(host(tray(state), profile="dgx-b200"), 50).drained


@pytest.mark.parametrize(
    "place",
    [
        "",  # H100
        "platform = { peer_type = 1, slot = 255, tray = 255, host = 1, module = 6 }",  # HGX B200 (qx-b200.xml)
        'platform = { peer_type = 0, serial = "1820000000001", slot = 1, host = 1 }',  # directly connected GPUs
    ],
)
@pytest.mark.parametrize("state", ["fabric_state = 0", NO_FABRIC_CALLS, "", "fabric_status = 3"])
def test_gpus_without_place_in_rack_need_no_domain(host, place, state):
    text = tray(state, place=place).replace("NVIDIA GB200", "NVIDIA B200")
    assert run_check(gpu_fabric, host(text, profile="dgx-b200"))[4:] == []


@pytest.mark.parametrize("state", ["fabric_state = 0", ""])
def test_gb200_without_serial_number_of_its_chassis_needs_a_domain(host, state):
    found = findings(gpu_fabric, host(tray(state, place="platform = { peer_type = 1, host = 1 }"), profile="dgx-b200"))
    assert codes(found) == ["gpu_fabric/no_domain"] * 4
    assert findings(gpu_fabric, host(tray(state, place="platform = { peer_type = 0, host = 1 }"), "dgx-b200")) == []


def test_unreadable_platform_fails_run_and_hides_no_other_finding(host):
    results: list[Any] = []
    text = tray('errors = { nvmlDeviceGetPlatformInfo = "Unknown" }', "")
    with pytest.raises(NvmlError, match="nvmlDeviceGetPlatformInfo"):
        results.extend(run_once(host(text, profile="dgx-b200")))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_fabric/no_domain"] * 3


def test_unreadable_platform_hides_no_fault_of_the_fabric(host):
    lost = f'errors = {{ nvmlDeviceGetPlatformInfo = "Unknown" }}\n{NO_MANAGER}'
    text = tray(f'{lost}\nfabric_cluster = "{CLUSTER}"\nfabric_clique = 1', f"{lost}\n{IN_DOMAIN}")
    results: list[Any] = []
    with pytest.raises(NvmlError, match="nvmlDeviceGetPlatformInfo"):
        results.extend(run_once(host(text, profile="dgx-b200")))
    found = codes([item for item in results if isinstance(item, Finding)])
    assert sorted(found) == ["gpu_fabric/manager_lost"] * 4 + ["gpu_fabric/other_domain"]


# --- the connection to the fabric manager


def test_lost_fabric_manager_of_all_gpus_has_shared_cause_and_never_requeues(host):
    lost = host(tray(f"{IN_DOMAIN}\n{NO_MANAGER}\nfabric_summary = 2"), profile="dgx-b200")
    found = findings(gpu_fabric, lost)
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [
        ("gpu_fabric/manager_lost", Severity.DEGRADED, True)
    ] * 4
    assert {f.message for f in found} == {"the fabric manager is disconnected (4 of 4 GPUs)"}
    story = Story(gpu_fabric).run_check(lost).run_check(lost, minutes=4)
    assert not story.drained, "the fabric manager may restart"
    story.run_checks(lost, 50)
    assert (story.drained, story.requeued) == (True, False)


def test_lost_fabric_manager_of_one_gpu_is_its_own_fault(host):
    (finding,) = findings(gpu_fabric, host(tray(f"{IN_DOMAIN}\n{NO_MANAGER}", IN_DOMAIN), profile="dgx-b200"))
    assert (finding.code, finding.severity, finding.shared_cause) == (
        "gpu_fabric/manager_lost",
        Severity.DEGRADED,
        False,
    )


def test_lost_fabric_manager_hides_no_other_problem(host):
    found = findings(gpu_fabric, host(health(2 << 14 | 1 << 4, 2)))
    assert codes(found) == ["gpu_fabric/unhealthy", "gpu_fabric/manager_lost"]
    assert found[0].message == "the GPU is not healthy in the NVLink fabric: routes are unhealthy"


# --- problems of all GPUs of a tray

NOT_ENOUGH_LINKS = f"{IN_DOMAIN}\nfabric_health = {5 << 8}"
LESS_BANDWIDTH = f"{IN_DOMAIN}\nfabric_health = 1"
WITHOUT_PARTITION = f"{IN_DOMAIN}\nfabric_health = {2 << 12}"


@pytest.mark.parametrize(
    ("fault", "code", "severity"),
    [
        (LESS_BANDWIDTH, "gpu_fabric/degraded", Severity.DEGRADED),
        (NOT_ENOUGH_LINKS, "gpu_fabric/unhealthy", Severity.CRITICAL),
        (WITHOUT_PARTITION, "gpu_fabric/unhealthy", Severity.CRITICAL),
    ],
)
def test_problem_of_all_gpus_of_tray_suspects_switch_side_and_never_requeues(host, fault, code, severity):
    faulty = host(tray(fault), profile="dgx-b200")
    found = findings(gpu_fabric, faulty)
    assert [(f.code, f.severity, f.shared_cause) for f in found] == [(code, severity, True)] * 4
    assert all(f.message.endswith("; all GPUs of this node report it: suspect the switch side") for f in found)
    story = Story(gpu_fabric).run_checks(faulty, 3)
    assert (story.drained, story.requeued) == (True, False)


@pytest.mark.parametrize(
    "fault",
    ["fabric_status = 23", *(f"fabric_health = {number << 8}" for number in (2, 3, 6, 7, 8))],
)
def test_misconfiguration_of_tray_is_its_own_fault(host, fault):
    faulty = host(tray(f"{IN_DOMAIN}\n{fault}"), profile="dgx-b200")
    assert [(f.code, f.shared_cause) for f in findings(gpu_fabric, faulty)] == [("gpu_fabric/unhealthy", False)] * 4
    story = Story(gpu_fabric).run_checks(faulty, 3)
    assert (story.drained, story.requeued) == (True, True)


@pytest.mark.parametrize(
    "fault", ["fabric_summary = 2", "fabric_health = 0x100AA\nfabric_summary = 2", f"fabric_health = {9 << 8}"]
)
def test_unknown_problem_of_all_gpus_may_be_caused_by_the_switches(host, fault):
    faulty = host(tray(f"{IN_DOMAIN}\n{fault}"), profile="dgx-b200")
    assert [(f.code, f.shared_cause) for f in findings(gpu_fabric, faulty)] == [("gpu_fabric/unhealthy", True)] * 4
    story = Story(gpu_fabric).run_checks(faulty, 3)
    assert (story.drained, story.requeued) == (True, False)


def test_invalid_health_mask_of_one_gpu_hides_no_fault_of_the_others(host):
    text = tray(f"{IN_DOMAIN}\nfabric_health = 0xAB", f"{IN_DOMAIN}\nfabric_health = 0xA9")
    results: list[Any] = []
    with pytest.raises(ValueError, match="not a health mask"):
        results.extend(run_once(host(text, profile="dgx-b200")))
    found = [item for item in results if isinstance(item, Finding)]
    assert [(f.code, f.shared_cause) for f in found] == [("gpu_fabric/degraded", True)] * 3


def test_invalid_health_masks_do_not_show_the_fault_of_another_gpu(host):
    text = tray(f"{IN_DOMAIN}\nfabric_health = 0x9A", f"{IN_DOMAIN}\nfabric_health = 0xAB")
    results: list[Any] = []
    with pytest.raises(ValueError, match="not a health mask"):
        results.extend(run_once(host(text, profile="dgx-b200")))
    found = [item for item in results if isinstance(item, Finding)]
    assert [(f.code, f.shared_cause) for f in found] == [("gpu_fabric/unhealthy", False)]


def test_switch_fault_that_ends_on_one_gpu_first_requeues_nothing(host):
    story = Story(gpu_fabric).run_checks(host(tray(WITHOUT_PARTITION), profile="dgx-b200"), 3)
    healing = host(tray(IN_DOMAIN, WITHOUT_PARTITION), profile="dgx-b200")
    assert (story.drained, story.requeued) == (True, False)
    assert not story.run_check(healing).requeued
    assert story.run_check(healing).requeued


@pytest.mark.parametrize("others", [IN_DOMAIN, f"{IN_DOMAIN}\nfabric_state = 2", WITHOUT_PARTITION])
def test_problem_that_one_gpu_of_tray_lacks_is_their_own_fault(host, others):
    found = findings(gpu_fabric, host(tray(NOT_ENOUGH_LINKS, others), profile="dgx-b200"))
    assert not any(f.shared_cause for f in found)


def test_gpu_of_tray_with_a_further_problem_also_has_its_own_fault(host):
    both = f"{IN_DOMAIN}\nfabric_health = {5 << 8 | 1 << 4}"
    found = findings(gpu_fabric, host(tray(both, NOT_ENOUGH_LINKS), profile="dgx-b200"))
    assert [f.shared_cause for f in found] == [False, True, True, True]


def test_problem_of_all_gpus_of_hgx_board_is_its_own_fault(host):
    text = "".join(f"[gpu.{n}]\nplatform = {{ peer_type = 1 }}\nfabric_health = {5 << 8}\n" for n in range(8))
    found = findings(gpu_fabric, host(text, profile="dgx-b200"))
    assert [(f.code, f.shared_cause) for f in found] == [("gpu_fabric/unhealthy", False)] * 8


def test_unreadable_platform_hides_no_problem(host):
    text = tray('fabric_health = 1280\nerrors = { nvmlDeviceGetPlatformInfo = "Unknown" }')
    results, error = run_until_error(gpu_fabric, host(text, profile="dgx-b200"))
    found = [item for item in results if isinstance(item, Finding)]
    assert [(f.code, f.shared_cause) for f in found] == [("gpu_fabric/unhealthy", False)] * 4
    assert "nvmlDeviceGetPlatformInfo" in error


# --- no fault


def test_completed_joining_without_support_is_no_fault(host):
    assert findings(gpu_fabric, host("[gpu.3]\nfabric_status = 3\nfabric_summary = 2")) == []
    assert codes(findings(gpu_fabric, host("gpu.3.fabric_status = 4"))) == ["gpu_fabric/unhealthy"]


FAULTS = ["fabric_state = 1", "fabric_state = 2", "fabric_health = 16", "fabric_health = 1", "fabric_summary = 2"]


@pytest.mark.parametrize("fault", [*FAULTS, "fabric_status = 999", "fabric_state = 0"])
@pytest.mark.parametrize("exemption", ["mig = true", "virtualization = 3", "virtualization = 4"])
def test_gpu_with_mig_or_vgpu_host_needs_no_fabric(host, fault, exemption):
    assert findings(gpu_fabric, host(f"[gpu.3]\n{fault}\n{exemption}", systemd=OSError("must not be queried"))) == []
    assert len(findings(gpu_fabric, host(f"[gpu.3]\n{fault}"))) == 1


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_waiting_gpu_is_fine_on_host_with_shared_nvswitches(host, tmp_path, mode):
    write(tmp_path / "plain", {MANAGER_SETTINGS: f"# FABRIC_MODE=1\nLOG_LEVEL=4\nFABRIC_MODE={mode}\n"})
    assert codes(findings(gpu_fabric, host(WAITING))) == (["gpu_fabric/not_joined"] if mode == 0 else [])
    assert codes(findings(gpu_fabric, host("gpu.3.fabric_state = 1"))) == ["gpu_fabric/not_joined"]
    assert codes(findings(gpu_fabric, host(health(16)))) == ["gpu_fabric/unhealthy"]


def test_fabric_manager_is_not_queried_for_shared_nvswitches(host, tmp_path):
    write(tmp_path / "booted", {MANAGER_SETTINGS: "FABRIC_MODE=1"})
    assert findings(gpu_fabric, host(WAITING, systemd=OSError("must not be queried"))) == []


def test_waiting_gpu_in_guest_without_nvswitches_warns_and_never_drains(host):
    guest = host(WAITING + "virtualization = 1\n", systemd=OSError("must not be queried"))
    (finding,) = findings(gpu_fabric, guest)
    assert (finding.code, finding.severity, finding.subject) == ("gpu_fabric/partition", Severity.WARNING, PCI)
    assert finding.confirm_seconds == 300.0
    assert not Story(gpu_fabric).run_checks(guest, 50).drained


def test_guest_with_nvswitches_or_in_nvl72_must_join(host, tmp_path):
    guest = WAITING + "virtualization = 1\n"
    nvl72 = guest + 'name = "NVIDIA GB200"\n'
    assert codes(findings(gpu_fabric, host(nvl72))) == ["gpu_fabric/not_joined"]
    add_pci_device(tmp_path / "plain", "0000:05:00.0", "0x068000")
    assert codes(findings(gpu_fabric, host(guest))) == ["gpu_fabric/not_joined"]


def test_unreadable_fabric_manager_settings_fail_run(host, tmp_path):
    (tmp_path / "plain" / MANAGER_SETTINGS[1:]).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"fabricmanager\.cfg: Is a directory"):
        list(run_once(host(WAITING)))


# --- the fabric manager


@pytest.mark.parametrize("state", ["failed", "inactive", "activating", "deactivating"])
def test_fabric_manager_that_is_not_active_is_reported_as_cause(host, state):
    output = ProgramResult(0, f"LoadState=loaded\nActiveState={state}\n", "")
    gpu, manager = findings(gpu_fabric, host(WAITING, systemd=output))
    assert gpu.code == "gpu_fabric/not_joined"
    assert (manager.code, manager.subject, manager.severity) == ("gpu_fabric/manager", "", Severity.DEGRADED)
    assert (manager.confirm_seconds, manager.clears, manager.shared_cause) == (300.0, Clears.PASS, True)
    assert manager.message.startswith(f"nvidia-fabricmanager.service is {state}; ")


@pytest.mark.parametrize(
    "output",
    [
        None,  # no systemd: in a container
        MANAGER_ACTIVE,
        ProgramResult(0, "LoadState=loaded\nActiveState=reloading\n", ""),
        ProgramResult(0, "LoadState=not-found\nActiveState=inactive\n", ""),  # NVL72: it runs on the switches
    ],
)
def test_active_or_absent_fabric_manager_is_not_reported(host, output):
    assert codes(findings(gpu_fabric, host(WAITING, systemd=output))) == ["gpu_fabric/not_joined"]


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100"])
def test_systemd_is_not_queried_if_all_gpus_joined_or_no_fabric_exists(host, profile):
    assert findings(gpu_fabric, host(profile=profile, systemd=OSError("must not be queried"))) == []


@pytest.mark.parametrize(
    "output",
    [
        ProgramResult(1, "", "Failed to connect to bus: Connection refused"),
        ProgramResult(0, "", ""),
        ProgramResult(0, "N/A\n", ""),
        ProgramResult(0, "ActiveState=\nLoadState=loaded\n", ""),
        ProgramResult(0, "LoadState=loaded\nActiveSt", ""),
        ProgramResult(0, "\ufffd\0ELF", ""),
    ],
)
def test_systemctl_without_state_fails_run_and_hides_no_other_finding(host, output):
    results: list[Any] = []
    with pytest.raises(ValueError, match="systemctl: no state of"):
        results.extend(run_once(host(WAITING, systemd=output)))
    assert codes([item for item in results if isinstance(item, Finding)]) == ["gpu_fabric/not_joined"]


# --- stories


def all_waiting() -> str:
    return "".join(f"[gpu.{n}]\nfabric_state = 2\n" for n in range(8))


def test_slow_fabric_manager_at_boot_gives_no_finding(host):
    story = Story(gpu_fabric)
    for _ in range(4):
        story.run_check(host(all_waiting(), systemd=MANAGER_FAILED), minutes=1)
    assert story.run_check(host(), minutes=0.9).codes == []
    assert not story.drained


def test_gpus_that_never_join_drain_and_requeue_until_joined(host):
    story = Story(gpu_fabric).run_checks(host(all_waiting(), systemd=MANAGER_FAILED), 2)
    assert story.codes == ["gpu_fabric/manager"] + ["gpu_fabric/not_joined"] * 8
    assert (story.drained, story.requeued) == (True, True)
    story.run_checks(host(all_waiting(), systemd=MANAGER_ACTIVE), 100)  # it runs, and the GPUs still wait
    assert story.drained
    assert story.codes == ["gpu_fabric/not_joined"] * 8
    assert story.run_check(host()).drained
    assert not story.run_check(host()).drained


def test_unhealthy_fabric_drains_and_requeues_until_healthy(host):
    unhealthy = host(health(1 << 4))
    story = Story(gpu_fabric).run_check(unhealthy)
    assert not story.drained
    story.run_check(unhealthy, minutes=1)
    assert (story.drained, story.requeued) == (True, True)
    assert story.reboot().run_checks(unhealthy, 50).drained
    assert not story.run_checks(host(), 2).drained


@pytest.mark.parametrize("fault", [health(1), health(1 << 2, 2), health(0, 3)])
def test_slow_fabric_drains_and_requeues_only_when_it_fails(host, fault):
    story = Story(gpu_fabric).run_checks(host(fault), 20)
    assert (story.drained, story.requeued) == (True, False)
    assert story.run_checks(host(health(1 << 4)), 2).requeued
    assert not story.run_checks(host(), 2).drained


def test_short_fabric_recovery_is_ignored(host):
    story = (
        Story(gpu_fabric).run_check(host(health(1 << 2))).run_check(host(), minutes=1).run_check(host(health(1 << 6)))
    )
    assert (story.drained, story.codes) == (False, [])


def test_failed_fabric_manager_of_joined_gpus_is_left_to_services_check(host):
    assert Story(gpu_fabric).run_checks(host(systemd=MANAGER_FAILED), 10).codes == []
