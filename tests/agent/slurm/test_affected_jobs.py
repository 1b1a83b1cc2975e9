"""Tests of the selection of jobs that a fault hits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from healthd.agent.slurm import affected_jobs
from healthd.agent.slurm.affected_jobs import (
    ALL_JOBS,
    ANY_GPU,
    FaultReach,
    JobGpus,
    describe_gpus,
    fault_reach,
    is_certain_hit,
    is_hit,
    rack_gpus,
    with_switch_side,
)
from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.common.model import Clears, Condition, ConditionState, Gpu, Inventory, PciDevice, Severity

GPU_0, GPU_1, GPU_2 = "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"
GPUS = tuple(Gpu(pci, i, f"GPU-{i}", minor=i) for i, pci in enumerate((GPU_0, GPU_1, GPU_2)))
DEVICES = (
    PciDevice(GPU_0, "0x10de", "0x2330", "0x030200", "gpu"),
    PciDevice("0000:07:00.0", "0x10de", "0x22a3", "0x068000", "nvswitch"),
    PciDevice("0000:5e:00.0", "0x15b3", "0x1021", "0x020700", "nic"),
    PciDevice("0000:f0:00.0", "0x10de", "0x2330", "0x030200", "gpu"),
)


def cause(code: str, subject: str) -> Condition:
    check = code.partition("/")[0]
    state, severity = ConditionState.OPEN, Severity.CRITICAL
    return Condition(check, "", code, subject, severity, "broken", Clears.REBOOT, state, 1.0, 2.0, 1, "b1")


@pytest.mark.parametrize(
    ("code", "subject", "reach"),
    [
        ("gpu_xid/79", GPU_0, FaultReach(pci=GPU_0)),
        ("gpu_ecc/uncorrected", GPU_1, FaultReach(pci=GPU_1)),
        ("gpu_nvlink/down", GPU_0, FaultReach(pci=GPU_0)),
        ("gpu_count/missing", GPU_1, FaultReach(pci=GPU_1)),
        ("pcie_aer/fatal", GPU_0, FaultReach(pci=GPU_0)),
        ("pcie_hotplug/link_down", GPU_0, FaultReach(pci=GPU_0)),
        ("exec/site", GPU_0, FaultReach(pci=GPU_0)),
        ("sxid/20034", "0000:07:00.0", ANY_GPU),
        ("sxid/20034", "", ANY_GPU),
        ("gpu_fabric/error", GPU_0, ANY_GPU),
        ("pcie_aer/fatal", "0000:07:00.0", ANY_GPU),
        ("gpu_access/hang", "", ANY_GPU),
        ("gpu_xid/79", "others", ANY_GPU),
        ("gpu_xid/79", "0000:aa:00.0", ANY_GPU),  # not in the inventory
        ("gpu_xid/79", "0000:f0:00.0", ANY_GPU),  # never reported by NVML
        ("pcie_aer/fatal", "0000:f0:00.0", ANY_GPU),
        ("pcie_aer/fatal", "0000:5e:00.0", ALL_JOBS),
        ("pcie_aer/fatal", "0000:00:01.0", ALL_JOBS),  # a port
        ("memory_edac/uncorrected", "mc0", ALL_JOBS),
        ("mount/missing", "/data", ALL_JOBS),
        ("ib_link/down", "mlx5_0/1", ALL_JOBS),
        ("block_device/root_stopped", "/", ALL_JOBS),
    ],
)
def test_fault_reach_follows_from_check_and_part(code: str, subject: str, reach: FaultReach) -> None:
    assert fault_reach(cause(code, subject), GPUS, DEVICES) == reach


UNKNOWN = JobGpus(is_complete=True)
NO_GPU = JobGpus(has_allocation=False, allocated=frozenset(), is_complete=True)
HAS_GPU_0 = JobGpus(has_allocation=True, allocated=frozenset({GPU_0}), is_complete=True)
HAS_UNKNOWN_GPUS = JobGpus(has_allocation=True, allocated=None, is_complete=True)
REACHES_GPU_0 = FaultReach(pci=GPU_0)


@pytest.mark.parametrize(
    ("fault", "job", "is_expected"),
    [
        (ALL_JOBS, NO_GPU, True),
        (ALL_JOBS, HAS_GPU_0, True),
        (ANY_GPU, UNKNOWN, True),
        (ANY_GPU, NO_GPU, False),
        (ANY_GPU, HAS_GPU_0, True),
        (ANY_GPU, HAS_UNKNOWN_GPUS, True),
        (REACHES_GPU_0, UNKNOWN, True),
        (REACHES_GPU_0, NO_GPU, False),
        (REACHES_GPU_0, HAS_GPU_0, True),
        (FaultReach(pci=GPU_1), HAS_GPU_0, False),
        (REACHES_GPU_0, HAS_UNKNOWN_GPUS, True),
        # no gres, but a GPU is open or may be open
        (REACHES_GPU_0, replace(NO_GPU, opened=frozenset({GPU_1})), True),
        (REACHES_GPU_0, replace(NO_GPU, is_complete=False), True),
        # open GPUs other than the allocated ones
        (FaultReach(pci=GPU_1), replace(HAS_GPU_0, opened=frozenset({GPU_0})), False),
        (FaultReach(pci=GPU_1), replace(HAS_GPU_0, opened=frozenset({GPU_0, GPU_1})), True),
        (FaultReach(pci=GPU_1), replace(HAS_GPU_0, opened=frozenset({GPU_2})), True),
        # a GPU that is not open proves nothing
        (REACHES_GPU_0, replace(HAS_GPU_0, opened=frozenset()), True),
        (FaultReach(pci=GPU_1), replace(HAS_GPU_0, is_complete=False), False),
    ],
)
def test_is_hit_by_allocated_open_or_unknown_gpus(fault: FaultReach, job: JobGpus, is_expected: bool) -> None:
    assert is_hit(fault, job, 8) is is_expected


RACK = (GPU_0, GPU_1, GPU_2)
LATE = 1000.0


def requeuing(conditions: list[Condition], gpus: tuple[str, ...], now: float) -> list[Condition]:
    return affected_jobs.requeuing(causes(conditions, gpus), gpus, now)


def undecided_until(conditions: list[Condition], gpus: tuple[str, ...], now: float) -> float:
    return affected_jobs.undecided_until(causes(conditions, gpus), gpus, now)


def causes(conditions: list[Condition], gpus: tuple[str, ...]) -> list[Condition]:
    recorded = with_switch_side({c.key: c for c in conditions}, gpus)
    return [c for c in recorded.values() if c.severity >= Severity.DEGRADED]


@pytest.mark.parametrize(
    ("code", "is_shared", "gpus", "is_expected"),
    [
        ("gpu_nvlink/inactive", False, RACK, True),
        ("gpu_nvlink/inactive", True, RACK, False),
        ("gpu_fabric/unhealthy", True, RACK, False),
        ("gpu_fabric/unhealthy", True, (), False),
        ("gpu_xid/154", False, RACK, True),
        ("gpu_fabric/not_joined", True, (), True),  # the node's fabric manager: CUDA does not start
        ("gpu_fabric/not_joined", True, RACK, False),
        ("gpu_fabric/not_joined", False, RACK, True),
        ("mount/missing", True, RACK, True),
    ],
)
def test_fault_on_switch_side_requeues_nothing(
    code: str, is_shared: bool, gpus: tuple[str, ...], is_expected: bool
) -> None:
    fault = replace(cause(code, GPU_0), shared_cause=is_shared)
    assert requeuing([fault], gpus, LATE) == ([fault] if is_expected else [])
    assert requeuing([replace(fault, severity=Severity.DEGRADED)], gpus, LATE) == []


def link_xid(gpu: str, began: float, last: float = 0.0, number: int = 149) -> Condition:
    return replace(cause(f"gpu_xid/{number}", gpu), critical_at=began, last_event=last or began)


def milder(gpu: str, at: float, severity: Severity = Severity.WARNING) -> Condition:
    return replace(link_xid(gpu, 0.0, at), severity=severity, first_seen=at)


def shared_inactive(gpu: str) -> Condition:
    return replace(cause("gpu_nvlink/inactive", gpu), shared_cause=True, first_seen=130.0, last_seen=500.0)


def test_link_xids_of_all_gpus_of_tray_requeue_nothing() -> None:
    all_gpus = [link_xid(GPU_0, 100.0), link_xid(GPU_1, 130.0, number=145), link_xid(GPU_2, 160.0)]
    assert requeuing(all_gpus, RACK, LATE) == []
    assert requeuing(all_gpus, (), 100.0) == all_gpus, "not in a rack"
    assert requeuing(all_gpus[:1], (GPU_0,), 100.0) == all_gpus[:1], "one GPU proves nothing"
    repeated = replace(all_gpus[0], last_event=900.0)
    assert requeuing([repeated, *all_gpus[1:]], RACK, LATE) == []


@pytest.mark.parametrize(
    "others",
    [
        [milder(GPU_1, 100.0), milder(GPU_2, 160.0, Severity.INFO)],
        [shared_inactive(GPU_1), shared_inactive(GPU_2)],
        [milder(GPU_1, 100.0), replace(shared_inactive(GPU_2), code="gpu_fabric/degraded", check="gpu_fabric")],
        [milder(GPU_1, 100.0), replace(milder(GPU_2, 1.0), last_event=130.0)],
        [replace(shared_inactive(gpu), first_seen=1.0) for gpu in RACK],  # the switch failed earlier
        [link_xid(GPU_1, 100.0), replace(shared_inactive(GPU_2), state=ConditionState.PENDING)],
    ],
)
def test_xid_of_one_gpu_requeues_nothing_if_others_show_the_same_fault(others: list[Condition]) -> None:
    assert requeuing([link_xid(GPU_0, 100.0), *others], RACK, LATE) == []


def test_xid_of_a_switch_fault_requeues_nothing_after_the_other_gpus_have_recovered() -> None:
    fault = link_xid(GPU_0, 100.0)
    (recorded,) = causes([fault, milder(GPU_1, 100.0), milder(GPU_2, 130.0)], RACK)
    assert requeuing([recorded], RACK, LATE) == []
    escalated = [recorded, link_xid(GPU_1, 900.0), link_xid(GPU_2, 900.0)]
    assert [c.subject for c in requeuing(escalated, RACK, LATE)] == [GPU_1, GPU_2]
    resumed = replace(recorded, acknowledged_at=500.0, last_event=900.0)
    assert requeuing([resumed], RACK, LATE) == [resumed], "a new fault"


def test_gpu_with_mig_devices_has_no_link_to_the_switches() -> None:
    gpus = (GPUS[0], replace(GPUS[1], mig=("MIG-1",)), GPUS[2])
    assert rack_gpus(Inventory(gpus, domain="a" * 8)) == {GPU_0, GPU_2}
    assert rack_gpus(Inventory(gpus)) == frozenset()


def test_link_xid_of_one_gpu_of_tray_requeues_after_a_minute() -> None:
    fault = link_xid(GPU_0, 100.0)
    assert requeuing([fault], RACK, 159.9) == []
    assert undecided_until([fault], RACK, 159.9) == 160.0
    assert requeuing([fault], RACK, 160.0) == [fault]
    assert undecided_until([fault], RACK, 160.0) == 0.0
    assert undecided_until([fault], (), 100.0) == 0.0


@pytest.mark.parametrize(
    "other",
    [
        link_xid(GPU_2, 160.1),
        link_xid(GPU_2, 1.0, 39.9),
        link_xid(GPU_2, 100.0, number=79),
        milder(GPU_2, 160.1),
        replace(shared_inactive(GPU_2), first_seen=160.1, last_seen=LATE),
        replace(shared_inactive(GPU_2), first_seen=1.0, last_seen=39.9),
        replace(shared_inactive(GPU_2), shared_cause=False, first_seen=100.0, last_seen=LATE),
        replace(shared_inactive(GPU_2), code="gpu_fabric/manager_lost", first_seen=100.0),
        replace(shared_inactive(GPU_2), code="gpu_fabric/degraded", first_seen=1.0, last_seen=LATE),
    ],
)
def test_gpu_without_link_xid_at_that_time_shows_no_switch_fault(other: Condition) -> None:
    found = requeuing([link_xid(GPU_0, 100.0), link_xid(GPU_1, 100.0), other], RACK, LATE)
    assert [c.subject for c in found][:2] == [GPU_0, GPU_1]


def test_link_xid_after_an_operator_resumed_the_node_is_a_new_fault() -> None:
    again = replace(link_xid(GPU_0, 100.0, 900.0), acknowledged_at=500.0)
    assert requeuing([again], RACK, 959.0) == []
    others = [link_xid(GPU_1, 100.0), link_xid(GPU_2, 100.0)]
    assert requeuing([again, *others], RACK, LATE)[0] == again


def test_is_certain_hit_needs_no_query() -> None:
    assert is_certain_hit(ALL_JOBS, UNKNOWN, 8)
    assert is_certain_hit(REACHES_GPU_0, UNKNOWN, 0), "a node without gres/gpu"
    assert not is_certain_hit(REACHES_GPU_0, UNKNOWN, None), "an unknown number of GPUs is not none"
    assert is_certain_hit(ALL_JOBS, UNKNOWN, None)
    assert is_certain_hit(REACHES_GPU_0, replace(UNKNOWN, opened=frozenset({GPU_0})), 8)
    assert not is_certain_hit(REACHES_GPU_0, replace(UNKNOWN, opened=frozenset({GPU_1})), 8)
    assert not is_certain_hit(ANY_GPU, UNKNOWN, 8)


@pytest.mark.parametrize(
    ("fault", "job", "is_expected"),
    [
        (ALL_JOBS, UNKNOWN, True),
        (ANY_GPU, UNKNOWN, False),
        (ANY_GPU, NO_GPU, False),
        (ANY_GPU, HAS_UNKNOWN_GPUS, True),
        (ANY_GPU, replace(UNKNOWN, opened=frozenset({GPU_1})), True),
        (REACHES_GPU_0, UNKNOWN, False),
        (REACHES_GPU_0, NO_GPU, False),
        (REACHES_GPU_0, HAS_UNKNOWN_GPUS, False),
        (REACHES_GPU_0, HAS_GPU_0, True),
        (FaultReach(pci=GPU_1), HAS_GPU_0, False),
        (REACHES_GPU_0, replace(HAS_UNKNOWN_GPUS, opened=frozenset({GPU_0})), True),
    ],
)
def test_is_hit_needs_proof_if_gpu_count_is_unknown(fault: FaultReach, job: JobGpus, is_expected: bool) -> None:
    assert is_hit(fault, job, None) is is_expected


def test_describe_gpus_names_allocated_gpus() -> None:
    assert describe_gpus(NO_GPU) == "has no GPU"
    assert describe_gpus(HAS_GPU_0) == f"has GPU {GPU_0}, which the fault did not hit"
    two = replace(HAS_GPU_0, allocated=frozenset({GPU_1, GPU_0}))
    assert describe_gpus(two) == f"has GPUs {GPU_0}, {GPU_1}, which the fault did not hit"


# --- the GPUs of a job


def is_ascending(_: int) -> bool:
    return True


def test_allocation_ignores_prolog_file_from_earlier_run() -> None:
    gpus = NodeGpus(read_prolog=lambda job: (f"{job} 1 \n", 100.0))
    assert gpus.allocation("12", 102.0) == ("1",)
    assert gpus.allocation("12", 102.1) is None


def test_with_allocation_counts_gpus_as_before_loss() -> None:
    remaining = tuple(replace(gpu, index=i, minor=i) for i, gpu in enumerate(GPUS[1:]))  # renumbered
    gpus = NodeGpus(Inventory(gpus=remaining), GPUS)
    assert gpus.with_allocation(UNKNOWN, ("1",), 3, is_ascending).allocated == {GPU_1}
    assert gpus.with_allocation(UNKNOWN, ("1",), 2, is_ascending).allocated == {GPU_2}, (
        "Slurm counts the remaining GPUs"
    )
    assert gpus.with_allocation(UNKNOWN, ("1",), 4, is_ascending).allocated is None
    assert gpus.with_allocation(UNKNOWN, ("1",), 3, lambda n: n != 3).allocated is None, "not in gres.conf's order"
    assert gpus.with_allocation(UNKNOWN, ("1",), None, is_ascending).allocated is None, "GPUs of several types"
    assert gpus.with_allocation(UNKNOWN, ("GPU-0",), None, lambda _: False).allocated == {GPU_0}
    assert gpus.with_allocation(UNKNOWN, ("GPU-0",), 4, is_ascending).allocated == {GPU_0}, "a UUID needs no order"
    assert gpus.with_allocation(UNKNOWN, (), 4, is_ascending).has_allocation is False
    assert gpus.with_allocation(UNKNOWN, None, 3, is_ascending) is UNKNOWN
    assert [gpu.pci for gpu in gpus.all_gpus] == [GPU_1, GPU_2, GPU_0]


def test_opened_by_maps_device_to_current_gpu() -> None:
    renumbered = tuple(replace(gpu, minor=gpu.index - 1) for gpu in GPUS[1:])
    with_renumbered = NodeGpus(Inventory(gpus=renumbered), GPUS, find_open=lambda _: ({"12": frozenset({0, 7})}, True))
    assert with_renumbered.opened_by({5: "12"})("12").opened == {GPU_1, "/dev/nvidia7"}
    with_lost_gpu = NodeGpus(Inventory(gpus=GPUS[1:]), GPUS, find_open=lambda _: ({"12": frozenset({0})}, True))
    assert with_lost_gpu.opened_by({5: "12"})("12").opened == {GPU_0}, "the lost GPU"


def test_opened_by_without_processes_is_incomplete() -> None:
    open_gpus = NodeGpus(find_open=lambda _: ({"12": frozenset()}, True)).opened_by({5: "12"})
    assert open_gpus("12").is_complete
    assert not open_gpus("13").is_complete
