"""Causes of job failures, their domains and ranks, and the cause of each code of a check.

Each check declares the cause of its codes, when they end a job, and which are permanent faults of the hardware:
`CAUSES`, `ENDS_JOB` and `PERMANENT` in checks/*.py. scripts/fleet_codes.py writes them into codes.csv, which `meaning`
reads.

The domains are those of arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025, Table I): user program, system software
(driver, operating system, services), hardware. Hardware is transient (an ECC error, a link that flaps) or permanent
(the vendor must exchange it): NVIDIA's criteria for a replacement (row remapping failures, used-up spares, the SRAM
threshold, retired pages: NVIDIA GPU memory error management), and a device that is gone or dead after the boot. All
other hardware faults are transient. The paper publishes neither the cause of each code nor its order: both are
healthd's.

CAUSES is in order of preference: first the causes that isolate the node. It begins with the paper's high class of
checks (GPU inaccessible, NVLink, uncorrectable ECC, failed remaps, PCIe and IB link, block device, mount), PCIe in
front since it is why a GPU is inaccessible; then causes that only drain; the user's program is the last.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from healthd.common.job_failures import EndsJob
from healthd.common.text import is_decimal
from healthd.nvidia.xid_table import AFTER_PROGRAM

USER_PROGRAM, SYSTEM_SOFTWARE, HARDWARE = "user_program", "system_software", "hardware"
USER, OTHER = "user", "other"


@dataclass(frozen=True, slots=True)
class Cause:
    """`words`: for people. `domain`: None = not known, a site's own check."""

    name: str
    domain: str | None
    words: str


# In the written order.
CAUSES = {
    cause.name: cause
    for cause in (
        Cause("pcie", HARDWARE, "PCI Express"),
        # Before a GPU's: a GPU that falls off the bus beside a failed link is told by the paper as the link's failure.
        Cause("ib_link", HARDWARE, "InfiniBand"),
        Cause("gpu_lost", HARDWARE, "a lost GPU"),
        Cause("nvlink", HARDWARE, "NVLink and NVSwitch"),
        Cause("gpu_memory", HARDWARE, "GPU memory"),
        # "GSP timeouts came from a code regression, fixed by a driver patch": the paper's section on them.
        Cause("gsp", SYSTEM_SOFTWARE, "GPU firmware (GSP)"),
        Cause("gpu", HARDWARE, "another GPU fault"),
        Cause("disk", HARDWARE, "disks"),
        Cause("mount", SYSTEM_SOFTWARE, "network file systems"),
        Cause("memory", HARDWARE, "host memory and CPUs"),
        Cause("power", HARDWARE, "host power and heat"),
        Cause("kernel", SYSTEM_SOFTWARE, "the kernel"),
        Cause("driver", SYSTEM_SOFTWARE, "GPU driver and setup"),
        Cause("ethernet", HARDWARE, "Ethernet"),
        Cause("services", SYSTEM_SOFTWARE, "node services"),
        Cause("disk_space", SYSTEM_SOFTWARE, "full disks"),
        Cause(OTHER, None, "site and unknown checks"),
        Cause(USER, USER_PROGRAM, "the user's program"),
    )
}
ORDER = {name: place for place, name in enumerate(CAUSES)}

# One fault speaks in several codes. What is seen on one node belongs to the first of these causes that is seen there
# too: {PCIe, Xid 79, IPMI critical interrupt} is one incident (the paper, section on co-occurrence), and what the
# driver asks for (Xid 154, a reset) follows from another Xid, which says why (docs/severity.md).
BELONGS_TO = {"gpu_lost": ("pcie",), "gpu": ("pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp")}
# A program of one node does not talk over them. Storage does; a file system that is gone is seen as such.
BETWEEN_NODES = frozenset({"ib_link", "ethernet"})
# Of one GPU: what names the jobs at its source has not ended another one.
OF_ONE_GPU = frozenset({"pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp", "gpu", USER})

# Xids that follow from an earlier fault of the program: see AFTER_PROGRAM in healthd/nvidia/xid_table.py.
FOLLOWS_OF_PROGRAM = frozenset(f"gpu_xid/{number}" for number in AFTER_PROGRAM)


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of a code for a job that ended.

    cause      a name in CAUSES
    transient  False: permanent; None: not hardware, or not known
    known      False: the code is in no table
    """

    cause: str
    ends: EndsJob
    transient: bool | None
    known: bool = True

    @property
    def domain(self) -> str | None:
        return CAUSES[self.cause].domain


@functools.lru_cache(maxsize=4096)
def meaning(code: str) -> Meaning:
    """Return the meaning of a code. A newer or a site's check may have codes that no table has: their cause is OTHER.

    `CHECK/others` counts several codes as one and does not name them, so it is not known either.
    """
    check, _, name = code.partition("/")
    found = _codes().get(code) or (_codes().get(f"{check}/*") if is_decimal(name) else None)
    if found is None:
        return Meaning(OTHER, EndsJob.IF_ISOLATES, None, known=False)
    return found


@functools.cache
def _codes() -> dict[str, Meaning]:
    """Return the table of scripts/fleet_codes.py: code -> its meaning."""
    with Path(__file__).parents[1].joinpath("codes.csv").open(encoding="utf-8", newline="") as file:
        return {row["code"]: _meaning(row) for row in csv.DictReader(file)}


def _meaning(row: dict[str, str]) -> Meaning:
    hardware = CAUSES[row["cause"]].domain == HARDWARE
    return Meaning(row["cause"], EndsJob(row["ends_job"]), row["permanent"] == "" if hardware else None)


def checks() -> frozenset[str]:
    """Return the names of the built-in checks, also of those whose codes a site chooses."""
    return frozenset(code.partition("/")[0] for code in _codes())


def of_a_node(code: str) -> bool:
    """Return True if the code can be a node's fault that ends jobs.

    False for a program's own fault, and for what only slows, waits or is bookkeeping.
    """
    means = meaning(code)
    return means.ends is not EndsJob.NEVER and means.domain != USER_PROGRAM


def codes() -> list[str]:
    """Return the codes of the table. CHECK/* stands for the numbers that it does not have."""
    return list(_codes())
