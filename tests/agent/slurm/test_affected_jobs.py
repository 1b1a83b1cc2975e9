"""Tests of the selection of jobs that a fault hits."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from healthd.agent.slurm.affected_jobs import (
    ALL_JOBS,
    ANY_GPU,
    FaultReach,
    JobGpus,
    describe_gpus,
    fault_reach,
    is_certain_hit,
    is_hit,
)
from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.common.model import Clears, Condition, ConditionState, Gpu, Inventory, PciDevice, Severity

ONE, OTHER, THIRD = "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"
GPUS = tuple(Gpu(pci, i, f"GPU-{i}", minor=i) for i, pci in enumerate((ONE, OTHER, THIRD)))
DEVICES = (
    PciDevice(ONE, "0x10de", "0x2330", "0x030200", "gpu"),
    PciDevice("0000:07:00.0", "0x10de", "0x22a3", "0x068000", "nvswitch"),
    PciDevice("0000:5e:00.0", "0x15b3", "0x1021", "0x020700", "nic"),
    PciDevice("0000:f0:00.0", "0x10de", "0x2330", "0x030200", "gpu"),
)


def cause(code: str, subject: str) -> Condition:
    check = code.partition("/")[0]
    state, severity = ConditionState.OPEN, Severity.CRITICAL
    return Condition(check, "", code, subject, severity, "broken", Clears.REBOOT, state, 1.0, 2.0, 1, "b1")


@pytest.mark.parametrize(
    ("code", "subject", "whom"),
    [
        ("gpu_xid/79", ONE, FaultReach(pci=ONE)),
        ("gpu_ecc/uncorrected", OTHER, FaultReach(pci=OTHER)),
        ("gpu_nvlink/down", ONE, FaultReach(pci=ONE)),
        ("gpu_count/missing", OTHER, FaultReach(pci=OTHER)),
        ("pcie_aer/fatal", ONE, FaultReach(pci=ONE)),
        ("pcie_hotplug/link_down", ONE, FaultReach(pci=ONE)),
        ("exec/site", ONE, FaultReach(pci=ONE)),
        ("sxid/20034", "0000:07:00.0", ANY_GPU),
        ("sxid/20034", "", ANY_GPU),
        ("gpu_fabric/error", ONE, ANY_GPU),
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
def test_whom_a_fault_can_hit_follows_from_the_check_and_its_part(code: str, subject: str, whom: FaultReach) -> None:
    assert fault_reach(cause(code, subject), GPUS, DEVICES) == whom


UNKNOWN = JobGpus(is_complete=True)
NO_GPU = JobGpus(has_allocation=False, allocated=frozenset(), is_complete=True)
HAS_ONE = JobGpus(has_allocation=True, allocated=frozenset({ONE}), is_complete=True)
HAS_SOME = JobGpus(has_allocation=True, allocated=None, is_complete=True)
OF_ONE = FaultReach(pci=ONE)


@pytest.mark.parametrize(
    ("fault", "job", "hit"),
    [
        (ALL_JOBS, NO_GPU, True),
        (ALL_JOBS, HAS_ONE, True),
        (ANY_GPU, UNKNOWN, True),
        (ANY_GPU, NO_GPU, False),
        (ANY_GPU, HAS_ONE, True),
        (ANY_GPU, HAS_SOME, True),
        (OF_ONE, UNKNOWN, True),
        (OF_ONE, NO_GPU, False),
        (OF_ONE, HAS_ONE, True),
        (FaultReach(pci=OTHER), HAS_ONE, False),
        (OF_ONE, HAS_SOME, True),
        # no gres, but a GPU is open or may be open
        (OF_ONE, replace(NO_GPU, opened=frozenset({OTHER})), True),
        (OF_ONE, replace(NO_GPU, is_complete=False), True),
        # open GPUs other than the allocated ones
        (FaultReach(pci=OTHER), replace(HAS_ONE, opened=frozenset({ONE})), False),
        (FaultReach(pci=OTHER), replace(HAS_ONE, opened=frozenset({ONE, OTHER})), True),
        (FaultReach(pci=OTHER), replace(HAS_ONE, opened=frozenset({THIRD})), True),
        # a GPU that is not open proves nothing
        (OF_ONE, replace(HAS_ONE, opened=frozenset()), True),
        (FaultReach(pci=OTHER), replace(HAS_ONE, is_complete=False), False),
    ],
)
def test_a_job_is_hit_by_what_it_was_given_or_has_open_and_by_what_is_not_known(
    fault: FaultReach, job: JobGpus, hit: bool
) -> None:
    assert is_hit(fault, job, 8) is hit


def test_slurm_need_not_be_asked_where_its_answer_can_spare_nobody() -> None:
    assert is_certain_hit(ALL_JOBS, UNKNOWN, 8)
    assert is_certain_hit(OF_ONE, UNKNOWN, 0), "a node without gres/gpu"
    assert not is_certain_hit(OF_ONE, UNKNOWN, None), "an unknown number of GPUs is not none"
    assert is_certain_hit(ALL_JOBS, UNKNOWN, None)
    assert is_certain_hit(OF_ONE, replace(UNKNOWN, opened=frozenset({ONE})), 8)
    assert not is_certain_hit(OF_ONE, replace(UNKNOWN, opened=frozenset({OTHER})), 8)
    assert not is_certain_hit(ANY_GPU, UNKNOWN, 8)


@pytest.mark.parametrize(
    ("fault", "job", "hit"),
    [
        (ALL_JOBS, UNKNOWN, True),
        (ANY_GPU, UNKNOWN, False),
        (ANY_GPU, NO_GPU, False),
        (ANY_GPU, HAS_SOME, True),
        (ANY_GPU, replace(UNKNOWN, opened=frozenset({OTHER})), True),
        (OF_ONE, UNKNOWN, False),
        (OF_ONE, NO_GPU, False),
        (OF_ONE, HAS_SOME, False),
        (OF_ONE, HAS_ONE, True),
        (FaultReach(pci=OTHER), HAS_ONE, False),
        (OF_ONE, replace(HAS_SOME, opened=frozenset({ONE})), True),
    ],
)
def test_is_hit_needs_proof_if_the_number_of_gpus_is_unknown(fault: FaultReach, job: JobGpus, hit: bool) -> None:
    assert is_hit(fault, job, None) is hit


def test_why_it_is_spared_names_its_gpus() -> None:
    assert describe_gpus(NO_GPU) == "has no GPU"
    assert describe_gpus(HAS_ONE) == f"has GPU {ONE}, which the fault did not hit"
    two = replace(HAS_ONE, allocated=frozenset({OTHER, ONE}))
    assert describe_gpus(two) == f"has GPUs {ONE}, {OTHER}, which the fault did not hit"


# --- the GPUs of a job


def ascending(_: int) -> bool:
    return True


def test_what_the_prolog_wrote_of_an_earlier_run_of_the_job_does_not_count() -> None:
    gpus = NodeGpus(read_prolog=lambda job: (f"{job} 1 \n", 100.0))
    assert gpus.allocation("12", 102.0) == ("1",)
    assert gpus.allocation("12", 102.1) is None


def test_numbers_count_as_they_did_when_no_gpu_was_missing() -> None:
    lost = tuple(replace(gpu, index=i, minor=i) for i, gpu in enumerate(GPUS[1:]))  # renumbered
    gpus = NodeGpus(Inventory(gpus=lost), GPUS)
    assert gpus.with_allocation(UNKNOWN, ("1",), 3, ascending).allocated == {OTHER}
    assert gpus.with_allocation(UNKNOWN, ("1",), 2, ascending).allocated == {THIRD}, "Slurm counts the remaining GPUs"
    assert gpus.with_allocation(UNKNOWN, ("1",), 4, ascending).allocated is None
    assert gpus.with_allocation(UNKNOWN, ("1",), 3, lambda n: n != 3).allocated is None, "not in gres.conf's order"
    assert gpus.with_allocation(UNKNOWN, ("1",), None, ascending).allocated is None, "GPUs of several types"
    assert gpus.with_allocation(UNKNOWN, ("GPU-0",), None, lambda _: False).allocated == {ONE}
    assert gpus.with_allocation(UNKNOWN, ("GPU-0",), 4, ascending).allocated == {ONE}, "a UUID needs no order"
    assert gpus.with_allocation(UNKNOWN, (), 4, ascending).has_allocation is False
    assert gpus.with_allocation(UNKNOWN, None, 3, ascending) is UNKNOWN
    assert [gpu.pci for gpu in gpus.all_gpus] == [OTHER, THIRD, ONE]


def test_an_open_device_is_the_gpu_that_has_this_number_now() -> None:
    lost = tuple(replace(gpu, minor=gpu.index - 1) for gpu in GPUS[1:])
    seen = NodeGpus(Inventory(gpus=lost), GPUS, find_open=lambda _: ({"12": frozenset({0, 7})}, True))
    assert seen.opened_by({5: "12"})("12").opened == {OTHER, "/dev/nvidia7"}
    still = NodeGpus(Inventory(gpus=GPUS[1:]), GPUS, find_open=lambda _: ({"12": frozenset({0})}, True))
    assert still.opened_by({5: "12"})("12").opened == {ONE}, "the lost GPU"


def test_of_a_job_whose_processes_are_not_known_nothing_is_seen() -> None:
    seen = NodeGpus(find_open=lambda _: ({"12": frozenset()}, True)).opened_by({5: "12"})
    assert seen("12").is_complete
    assert not seen("13").is_complete
