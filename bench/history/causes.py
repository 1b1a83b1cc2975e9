"""Faults: their rates, the signs that healthd detects, and their effect on jobs.

The largest classes and their co-occurrence follow arXiv 2410.21680: links, mounts, GPU memory and PCIe are the most
frequent. 43 % of the PCIe faults come with Xid 79 and 21 % also with the BMC's critical interrupt. If the node dies,
nothing is detected. Codes and severities are healthd's (docs/checks.md).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """The finding of a check about a fault.

    chance  probability of the finding; there is one draw for the whole fault, so a rarer sign implies all more frequent
            ones
    part    gpu, port, mount, disk, node
    clears  reboot, pass, window, operator
    """

    code: str
    severity: str
    kind: str
    part: str
    clears: str
    message: str
    chance: float = 1.0

    @property
    def check(self) -> str:
        return self.code.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Cause:
    """A kind of fault.

    share    share of the faults that hit jobs
    effects  crash: the program fails; requeue: healthd requeues it; node_fail: the node no longer answers Slurm
    whole    True if all jobs of the node are hit, False for those on one GPU
    """

    name: str
    share: float
    effects: tuple[tuple[str, float], ...]
    whole: bool
    signs: tuple[Sign, ...] = ()


XID_79 = Sign("gpu_xid/79", "critical", "edge", "gpu", "reboot", "Xid 79: GPU has fallen off the bus")
LOST = Sign("gpu_access/lost", "critical", "level", "gpu", "reboot", "the GPU is lost", 0.8)
INTERRUPT = Sign(
    *("ipmi_sel/critical_interrupt", "degraded", "edge", "node", "operator", "Critical Interrupt: PCI SERR", 0.21)
)


def _rare(sign: Sign, chance: float) -> Sign:
    return Sign(sign.code, sign.severity, sign.kind, sign.part, sign.clears, sign.message, chance)


CAUSES = (
    Cause(
        "ib_link",
        0.15,
        (("crash", 0.85), ("node_fail", 0.15)),
        True,
        (
            Sign("ib_link/down", "degraded", "level", "port", "pass", "the port is down", 0.95),
            Sign("ib_flap/link_downed", "degraded", "level", "port", "operator", "the link went down", 0.4),
            _rare(XID_79, 0.02),
        ),
    ),
    Cause(
        "mount",
        0.11,
        (("crash", 0.5), ("requeue", 0.5)),
        True,
        (Sign("mount/missing", "critical", "level", "mount", "pass", "the file system is not mounted", 0.97),),
    ),
    Cause(
        "gpu_memory",
        0.12,
        (("crash", 0.7), ("requeue", 0.3)),
        False,
        (
            Sign("gpu_xid/95", "critical", "edge", "gpu", "reboot", "Xid 95: Uncontained memory error", 0.97),
            Sign("gpu_ecc/uncorrected", "critical", "level", "gpu", "reboot", "uncorrected ECC errors", 0.8),
            Sign("gpu_row_remap/pending", "degraded", "level", "gpu", "reboot", "a row waits for its remapping", 0.6),
        ),
    ),
    Cause(
        "pcie",
        0.11,
        (("crash", 0.5), ("requeue", 0.3), ("node_fail", 0.2)),
        False,
        (
            Sign("pcie_aer/fatal", "critical", "edge", "gpu", "reboot", "fatal PCIe error"),
            LOST,
            _rare(XID_79, 0.43),
            INTERRUPT,
        ),
    ),
    Cause("gpu_lost", 0.03, (("crash", 0.6), ("requeue", 0.4)), False, (XID_79, LOST)),
    Cause(
        "nvlink",
        0.04,
        (("crash", 1.0),),
        False,
        (Sign("gpu_xid/74", "critical", "edge", "gpu", "reboot", "Xid 74: NVLink error", 0.95),),
    ),
    Cause(
        "gsp",
        0.03,
        (("crash", 0.6), ("requeue", 0.4)),
        False,
        (Sign("gpu_xid/119", "critical", "edge", "gpu", "reboot", "Xid 119: Timeout waiting for RPC from GSP"),),
    ),
    Cause(
        "disk",
        0.02,
        (("crash", 1.0),),
        True,
        (Sign("block_device/nvme", "degraded", "edge", "disk", "reboot", "the disk's controller failed", 0.9),),
    ),
    Cause(
        "memory",
        0.02,
        (("node_fail", 0.6), ("crash", 0.4)),
        True,
        (Sign("memory_edac/uncorrected", "critical", "edge", "node", "reboot", "uncorrected memory error", 0.7),),
    ),
    Cause("node_dead", 0.37, (("node_fail", 1.0),), True),
)
BY_NAME = {cause.name: cause for cause in CAUSES}

# Faults per day and node, for nodes that are not lemons. With lemons, r_f is 6.50 / 1000 node-days, as in RSC-1.
BASE_RATE = 0.0057
LEMONS = 0.012  # share of the nodes; size.py has their factors

# Faults of programs that look like hardware faults: Xids 13 and 31 are caused by the program (docs/severity.md).
PROGRAM_SIGNS = (
    Sign("gpu_xid/31", "warning", "edge", "gpu", "window", "Xid 31: MMU fault"),
    Sign("gpu_xid/13", "warning", "edge", "gpu", "window", "Xid 13: Graphics Engine Exception"),
    Sign("gpu_xid/43", "info", "edge", "gpu", "window", "Xid 43: GPU stopped processing"),
    Sign("gpu_xid/45", "info", "edge", "gpu", "window", "Xid 45: Preemptive cleanup"),
)
PROGRAM_SIGN_SHARE = 0.10  # share of the FAILED jobs without a fault

# Findings that hurt no job, with their rate per day and node and their duration in seconds.
HARMLESS = (
    (Sign("disk_space/low_space", "warning", "level", "mount", "pass", "little space"), 0.012, (3600, 2 * 86400)),
    (Sign("mount/hang", "warning", "level", "mount", "pass", "the file system does not answer"), 0.020, (300, 10800)),
    (Sign("gpu_temperature/hot", "warning", "level", "gpu", "pass", "the GPU is hot"), 0.020, (600, 14400)),
    (Sign("clock/unsynchronised", "warning", "level", "node", "pass", "the clock is not set"), 0.005, (600, 86400)),
    (
        Sign("gpu_ecc/corrected", "warning", "level", "gpu", "reboot", "many corrected errors"),
        0.005,
        (86400, 7 * 86400),
    ),
    (Sign("gpu_xid/63", "info", "edge", "gpu", "window", "Xid 63: Row remapper event"), 0.010, (3600, 7200)),
    (Sign("gpu_xid/94", "warning", "edge", "gpu", "window", "Xid 94: Contained memory error"), 0.004, (3600, 7200)),
    (
        Sign("filesystem/not_responding", "warning", "edge", "mount", "window", "server not responding"),
        0.015,
        (3600, 7200),
    ),
    (Sign("ib_errors/symbol_rate", "warning", "edge", "port", "window", "symbol errors"), 0.012, (3600, 7200)),
)
# A false alarm that drains, with its rate per day and node.
FALSE_ALARM = Sign("pcie_link/slow", "degraded", "level", "gpu", "reboot", "the link is slower than it can be")
FALSE_ALARMS = 0.002

CHECKS = (
    *("block_device", "clock", "cpu", "disk_space", "filesystem", "gpu_access", "gpu_clocks", "gpu_count", "gpu_ecc"),
    *("gpu_nvlink", "gpu_pcie", "gpu_power", "gpu_temperature", "gpu_xid", "ib_errors", "ib_link", "ipmi_sel"),
    *("kernel", "memory_edac", "pcie_aer", "pcie_link", "processes", "services"),
)
# (time as a share of the history, event, check). Before this time, the check finds nothing.
ROLL_OUTS = (
    (0.20, "check_enabled", "mount"),
    (0.30, "check_changed", "gpu_ecc"),
    (0.35, "check_enabled", "gpu_row_remap"),
    (0.50, "check_enabled", "ib_flap"),
    (0.70, "check_disabled", "gpu_clocks"),
)
# (from and to as shares of the history, cause, factor for its rate): a faulty driver, until it is replaced.
REGRESSION = (0.45, 0.55, "gsp", 12.0)
# (from, to, cause, rate per day and node, number of nodes of one leaf): a few links fail often for a short time.
SPIKE = (0.75, 0.80, "ib_link", 0.4, 3)
