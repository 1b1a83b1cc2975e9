"""The faults of a GB200 or GB300 compute tray, each with its condition, severity and consequence in Slurm.

Each row runs all checks that read NVML, or all checks that read the kernel log, on the same node: the row's condition
opens and no other one. Sources are in the checks. Tables for other machines are in tests/data/golden_decisions.txt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_gpus import fake_pci_gpus
from fakes import scenarios
from story import MultiCheckNode, Story
from trees import write

from healthd.agent.settings.registry import built_in_checks
from healthd.checks import cpu, memory_size
from healthd.common.codec import load
from healthd.common.model import ConditionState, Gpu, Inventory, Severity
from healthd.host.host import Host
from healthd.nvidia import fake_scenario

TRAYS = ("gb200-nvl72", "gb300-nvl72")
PCI = fake_pci_gpus("gb200-nvl72")
DOMAIN = "00000001-0000-0000-0000-000000000001"
INVENTORY = Inventory(tuple(Gpu(pci, index) for index, pci in enumerate(PCI)), domain=DOMAIN)
INFO, WARNING, DEGRADED, CRITICAL = Severity
OTHER_DOMAIN = "00000002-0000-0000-0000-000000000001"


class Effect(NamedTuple):
    """What healthd does in mode "act"."""

    drains: bool
    requeues: bool


REPORTED, DRAINED, REQUEUED = Effect(False, False), Effect(True, False), Effect(True, True)


class Row(NamedTuple):
    """A fault of the GPUs.

    each, first   settings of each GPU, and further settings of GPU 0 (healthd/nvidia/fake_scenario.py)
    gpus          how many GPUs have the condition; 0: the node has it
    """

    name: str
    each: str
    first: str
    code: str
    severity: Severity
    is_shared: bool
    effect: Effect
    gpus: int
    machines: tuple[str, ...] = TRAYS


ROWS = [
    # the same fault on all GPUs: the cause may be the switch side, so no job is requeued
    Row("a switch chip is dead", "nvlink_inactive = [7]", "", "gpu_nvlink/inactive", CRITICAL, True, DRAINED, 4),
    Row("no link is up", f"nvlink_inactive = {[*range(18)]}", "", "gpu_nvlink/inactive", CRITICAL, True, DRAINED, 4),
    Row("no state of links", "nvlink_unreported = [16, 17]", "", "gpu_nvlink/unreported", WARNING, False, REPORTED, 4),
    Row("no fabric", "fabric_state = 0", "", "gpu_fabric/no_domain", WARNING, True, REPORTED, 4),
    Row("no domain", 'fabric_cluster = ""', "", "gpu_fabric/no_domain", WARNING, True, REPORTED, 4),
    Row("not joined", "fabric_state = 2", "", "gpu_fabric/not_joined", CRITICAL, True, DRAINED, 4),
    Row("fabric manager lost", "fabric_health = 0x80AA", "", "gpu_fabric/manager_lost", DEGRADED, True, DRAINED, 4),
    Row("no partition", "fabric_health = 0x20AA", "", "gpu_fabric/unhealthy", CRITICAL, True, DRAINED, 4),
    Row("less bandwidth", "fabric_health = 0xA9", "", "gpu_fabric/degraded", DEGRADED, True, DRAINED, 4),
    Row("slow links", "nvlink_speed = 26562", "", "gpu_nvlink/slow", WARNING, False, REPORTED, 4),
    # a wrong configuration is the node's own fault
    Row("joining fails", "fabric_status = 23", "", "gpu_fabric/unhealthy", CRITICAL, False, REQUEUED, 4),
    Row("wrong firmware", "fabric_health = 0x26AA", "", "gpu_fabric/unhealthy", CRITICAL, False, REQUEUED, 4),
    # a fault of one GPU is the node's own
    Row("a link is down", "", "nvlink_inactive = [7]", "gpu_nvlink/inactive", CRITICAL, False, REQUEUED, 1),
    Row("a link is not reported", "", "nvlink_unreported = [7]", "gpu_nvlink/inactive", CRITICAL, False, REQUEUED, 1),
    Row("a link is slow", "", "nvlink_speeds = {4 = 26562}", "gpu_nvlink/slow", DEGRADED, False, DRAINED, 1),
    Row("one without fabric", "", "fabric_state = 0", "gpu_fabric/no_fabric", DEGRADED, False, DRAINED, 1),
    Row("one not joined", "", "fabric_state = 2", "gpu_fabric/not_joined", CRITICAL, False, REQUEUED, 1),
    Row("other clique", "", "fabric_clique = 3", "gpu_fabric/other_domain", DEGRADED, False, DRAINED, 1),
    Row(
        "other domain", "", f'fabric_cluster = "{OTHER_DOMAIN}"', "gpu_fabric/other_domain", DEGRADED, False, DRAINED, 1
    ),
    Row("one without domain", "", 'fabric_cluster = ""', "gpu_fabric/other_domain", DEGRADED, False, DRAINED, 1),
    Row("limited capacity", "", "fabric_summary = 3", "gpu_fabric/degraded", DEGRADED, False, DRAINED, 1),
    Row("bad routes", "", "fabric_health = 0x9A", "gpu_fabric/unhealthy", CRITICAL, False, REQUEUED, 1),
    Row("too few links", "", "fabric_health = 0x5AA", "gpu_fabric/unhealthy", CRITICAL, False, REQUEUED, 1),
    Row("insufficient resources", "", "fabric_status = 23", "gpu_fabric/unhealthy", CRITICAL, False, REQUEUED, 1),
    Row(
        "no traffic",
        "",
        "nvlink_traffic_disabled = [4]",
        "gpu_nvlink/traffic_disabled",
        WARNING,
        False,
        REPORTED,
        1,
    ),
    Row("bit errors", "", "nvlink_ber = {4 = 5e-7}", "gpu_nvlink/bit_errors", WARNING, False, REPORTED, 1),
    Row("recovery", "", "nvlink_recovery = {4 = 1}", "gpu_nvlink/recovered", WARNING, False, REPORTED, 1),
    Row(
        "failed recovery",
        "",
        "nvlink_recovery_failed = {4 = 1}",
        "gpu_nvlink/recovery_failed",
        DEGRADED,
        False,
        DRAINED,
        1,
    ),
    Row("packet errors", "", "nvlink_packet_errors = {4 = 9}", "gpu_nvlink/packet", WARNING, False, REPORTED, 1),
    Row(
        "IMEX recovery",
        "",
        "recovery_action = 5",
        "gpu_recovery_action/recover_imex_domain",
        WARNING,
        False,
        REPORTED,
        1,
    ),
    Row("reset required", "", "recovery_action = 1", "gpu_recovery_action/gpu_reset", CRITICAL, False, REQUEUED, 1),
    Row("C2C link down", "", "c2c_inactive = [2]", "gpu_c2c/inactive", DEGRADED, False, DRAINED, 1),
    Row("all C2C links down", f"c2c_inactive = {[*range(5)]}", "", "gpu_c2c/inactive", DEGRADED, False, DRAINED, 4),
    Row("C2C not reported", "", "c2c_unreported = [2]", "gpu_c2c/inactive", WARNING, False, REPORTED, 1),
    Row("C2C replays", "", "c2c_replays = {2 = 7}", "gpu_c2c/errors", WARNING, False, REPORTED, 1),
    Row(
        "channel repair",
        "",
        "repair_pending_channel = true",
        "gpu_row_remap/repair_pending",
        DEGRADED,
        False,
        DRAINED,
        1,
    ),
    Row("GPU is gone", "", "gone = true", "gpu_count/fewer_than_expected", DEGRADED, False, DRAINED, 0),
    Row(
        "uncorrected error",
        "",
        "ecc_volatile_uncorrected_dram = 1",
        "gpu_ecc/uncorrected",
        DEGRADED,
        False,
        DRAINED,
        1,
        machines=("gb200-nvl72",),
    ),
    Row(
        "uncorrected error",  # NVIDIA's containment table names GB10x only
        "",
        "ecc_volatile_uncorrected_dram = 1",
        "gpu_ecc/uncorrected",
        CRITICAL,
        False,
        REQUEUED,
        1,
        machines=("gb300-nvl72",),
    ),
]
CASES = [pytest.param(row, machine, id=f"{row.name} {machine}") for row in ROWS for machine in row.machines]
NVML_SETTINGS: Mapping[str, Mapping[str, Any]] = {"gpu_count": {"expected": 4}}


def gpu_node(settings: Mapping[str, Mapping[str, Any]] = NVML_SETTINGS) -> MultiCheckNode:
    return node_of((name for name, check in built_in_checks().items() if check.uses == "nvml"), settings)


def node_of(names: Iterable[str], settings: Mapping[str, Mapping[str, Any]]) -> MultiCheckNode:
    checks = built_in_checks()
    return MultiCheckNode(
        Story(checks[name].module, load(checks[name].config, settings.get(name, {}), name), INVENTORY) for name in names
    )


def tables(each: str, first: str) -> str:
    return "".join(f"[gpu.{n}]\n{each}\n{first if n == 0 else ''}\n" for n in range(4))


def effect(node: MultiCheckNode) -> Effect:
    return Effect(node.drained, any(story.requeued for story in node.stories))


@pytest.mark.parametrize("links", [0, 18])  # without and with a baseline
@pytest.mark.parametrize(("row", "machine"), CASES)
def test_fault_of_tray_has_its_condition_and_effect(tmp_path: Path, row: Row, machine: str, links: int) -> None:
    host = scenarios(tmp_path)
    node = gpu_node({**NVML_SETTINGS, "gpu_nvlink": {"links": links}})
    node.run_rounds(host("", machine), 2)
    assert (node.seen, node.failed) == (set(), [])
    node.run_rounds(host(tables(row.each, row.first), machine), 3)
    opened = [c for story in node.stories for c in story.conditions.values() if c.state is ConditionState.OPEN]
    assert {(c.code, c.severity, c.shared_cause) for c in opened} == {(row.code, row.severity, row.is_shared)}
    assert sorted(c.subject for c in opened) == sorted(fake_pci_gpus(machine)[: row.gpus] or [""])
    assert effect(node) == row.effect
    assert ("switch side" in opened[0].message) == (row.is_shared and row.code in SWITCH_SIDE)


SWITCH_SIDE = ("gpu_nvlink/inactive", "gpu_fabric/unhealthy", "gpu_fabric/degraded", "gpu_fabric/not_joined")


@pytest.mark.parametrize("machine", fake_scenario.profiles())
def test_healthy_machine_has_no_condition(tmp_path: Path, machine: str) -> None:
    node = gpu_node({"gpu_count": {"expected": len(fake_pci_gpus(machine))}})
    node.run_rounds(scenarios(tmp_path)("", machine), 6)
    assert (node.seen, node.failed, node.drained) == (set(), [], False)


# --- lines of the kernel log


def xid(text: str, pci: str = PCI[0]) -> str:
    return f"NVRM: Xid (PCI:{pci.removesuffix('.0')}): {text}"


LINES = [
    # source: NVIDIA's Xid workbook (healthd/nvidia/facts/nvlink5.csv)
    (xid("149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001 0x0 0x0 0x0 0x0)"), "gpu_xid/149", INFO),
    (xid("149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)"), "gpu_xid/149", CRITICAL),
    (xid("121, C2C Link corrected error"), "gpu_xid/121", INFO),
    (xid("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"), "gpu_xid/154", CRITICAL),
    (xid("154, GPU recovery action changed from 0x0 (None) to 0x5 (Recover IMEX Domain)"), "gpu_xid/154", WARNING),
    # drivers/iommu/arm/arm-smmu-v3/arm-smmu-v3.c
    (
        "arm-smmu-v3 arm-smmu-v3.3.auto: CMD_SYNC timeout at 0x00000010 [hwprod 0x00000010, hwcons 0x0000000f]",
        "iommu/stuck",
        WARNING,
    ),
]


@pytest.mark.parametrize(("line", "code", "severity"), LINES)
def test_kernel_line_of_tray_has_its_condition(line: str, code: str, severity: Severity) -> None:
    node = node_of((name for name, check in built_in_checks().items() if hasattr(check.module, "correlate")), {})
    node.apply_to_each(lambda story: story.log_lines(line, node=INVENTORY).decide_after(2))
    opened = [c for story in node.stories for c in story.conditions.values() if c.state is ConditionState.OPEN]
    assert [(c.code, c.severity) for c in opened] == [(code, severity)]
    assert effect(node) == (REQUEUED if severity is CRITICAL else REPORTED)


# a dead switch takes down a link of each GPU (tests/data has no such line of a real tray)
LINK_DOWN = "149, NETIR_LINK_EVT Fatal XC0 i0 Link 07 (0x004525c6 0x00000000 0x0 0x0 0x0 0x0)"
RESET_REQUIRED = "154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


def xid_story() -> Story:
    return node_of(["gpu_xid"], {}).story_of("gpu_xid")


def test_links_down_on_all_gpus_of_tray_requeue_nothing() -> None:
    story = xid_story()
    for pci in PCI:
        story.log_lines(xid(LINK_DOWN, pci))
        assert (story.drained, story.requeued) == (True, False)
    assert not story.decide_after(60).requeued
    assert story.log_lines(xid(RESET_REQUIRED, PCI[2])).requeued, "this GPU's jobs cannot continue"


def test_links_down_on_some_gpus_of_tray_requeue_after_a_minute() -> None:
    story = xid_story().log_lines(*(xid(LINK_DOWN, pci) for pci in PCI[:3]))
    assert (story.drained, story.requeued) == (True, False)
    assert story.decide_after(1).requeued


# --- CPUs and memory of two Grace CPUs with 72 cores each

GIB = 1 << 30
NODES = "/sys/devices/system/node"
GRACE = {
    "/proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n",
    "/sys/devices/system/cpu/online": "0-143\n",
    "/sys/devices/system/cpu/possible": "0-143\n",
    f"{NODES}/has_cpu": "0-1\n",
    f"{NODES}/has_memory": "0-2,10,18,26\n",
    "/proc/meminfo": f"MemTotal:       {1704 * 2**20} kB\n",
    **{f"{NODES}/node{n}/meminfo": f"Node {n} MemTotal:       {480 * 2**20} kB\n" for n in (0, 1)},
}
GRACE_FAULTS = [
    ({}, []),
    ({"/sys/devices/system/cpu/online": "0-71\n"}, [("cpu/missing", DEGRADED)]),
    ({"/sys/devices/system/cpu/online": "0-142\n"}, [("cpu/missing", DEGRADED)]),
    ({f"{NODES}/has_cpu": "0\n"}, [("cpu/numa_nodes", WARNING)]),
    # HBM of the GPUs is in MemTotal, or is not because the driver is not loaded or runs in the mode CDMM
    ({f"{NODES}/has_memory": "0-1\n", "/proc/meminfo": f"MemTotal:       {960 * 2**20} kB\n"}, []),
    ({f"{NODES}/node1/meminfo": f"Node 1 MemTotal:       {360 * 2**20} kB\n"}, [("memory_size/too_small", DEGRADED)]),
]


@pytest.mark.parametrize(("files", "conditions"), GRACE_FAULTS)
def test_fault_of_grace_has_its_condition(
    tmp_path: Path, files: dict[str, str], conditions: list[tuple[str, Severity]]
) -> None:
    settings = {"cpu": {"expected": 144, "numa_nodes": 2}, "memory_size": {"expected_bytes": 960 * GIB}}
    modules = (cpu, memory_size)
    node = node_of((module.__name__.rpartition(".")[2] for module in modules), settings)
    node.run_rounds(write(tmp_path / "well", GRACE), 2)
    assert (node.seen, node.failed) == (set(), [])
    host: Host = write(tmp_path / "faulty", {**GRACE, **files})
    if f"{NODES}/has_cpu" in files:  # otherwise the memory of node 1 counts as a GPU's
        node = node_of(["cpu"], settings)
    node.run_rounds(host, 2)
    opened = [c for story in node.stories for c in story.conditions.values() if c.state is ConditionState.OPEN]
    assert [(c.code, c.severity) for c in opened] == conditions
