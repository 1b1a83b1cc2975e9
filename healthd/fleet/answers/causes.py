"""Causes of job failures: their domains and ranks, the cause of each code of a check, and the cause of one failed job.

Each check declares the causes of its codes, whether they end a job, and which are permanent hardware faults: `CAUSES`,
`ENDS_JOB` and `PERMANENT` in checks/*.py. scripts/fleet_codes.py writes them to codes.csv, which `meaning` reads.

The domains are those of arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025, Table I): user program, system software
(driver, operating system, services), hardware. A hardware fault is transient (an ECC error, a link that flaps) or
permanent (the vendor must replace the part). Permanent are NVIDIA's criteria for a replacement (row remapping failures,
used-up spares, the SRAM threshold, retired pages: NVIDIA GPU memory error management), and a device that is missing or
dead after a boot. All other hardware faults are transient. The paper publishes neither the cause of each code nor their
order: both are healthd's.

`CAUSES` is in order of preference, causes that isolate the node first. It begins with the paper's high class of checks
(GPU inaccessible, NVLink, uncorrectable ECC, failed remaps, PCIe and IB link, block device, mount). PCIe comes first
because it is the reason why a GPU is inaccessible. Then come causes that only drain; the user's program is last.

`attribute_failure` returns the most likely cause among the conditions around a job's end. Source of the window and of
"most likely": the same paper. A cause is attributed if it was "detected within the last 10 minutes or 5 minutes after a
failing job's lifetime (FAILED or NODE_FAIL)"; of several checks it is the one that "indicates whether a node should be
isolated". That heuristic is not published; `may_have_ended` is healthd's. It excludes unlikely conditions, as the
paper's differential diagnosis does.
"""

from __future__ import annotations

import csv
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from healthd.common.job_failures import EndsJob
from healthd.common.text import is_decimal
from healthd.nvidia.xid_table import AFTER_PROGRAM

USER_PROGRAM, SYSTEM_SOFTWARE, HARDWARE = "user_program", "system_software", "hardware"
USER, OTHER = "user", "other"
SEVERITIES = ("info", "warning", "degraded", "critical")
ISOLATING = frozenset(SEVERITIES[2:])
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of a failure. `label` is for people. `domain` None: unknown (a site's own check)."""

    name: str
    domain: str | None
    words: str


# In order of preference.
CAUSES = {
    cause.name: cause
    for cause in (
        Cause("pcie", HARDWARE, "PCI Express"),
        # Before the GPU causes: the paper counts a GPU that falls off the bus along with a failed link as link failure.
        Cause("ib_link", HARDWARE, "InfiniBand"),
        Cause("gpu_lost", HARDWARE, "a lost GPU"),
        Cause("nvlink", HARDWARE, "NVLink and NVSwitch"),
        Cause("gpu_memory", HARDWARE, "GPU memory"),
        # "GSP timeouts came from a code regression, fixed by a driver patch": the paper's section on GSP timeouts.
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

# One fault causes several codes. A cause on a node belongs to the first of these other causes found on the same node:
# {PCIe, Xid 79, IPMI critical interrupt} is one incident (the paper, section on co-occurrence), and a reset request of
# the driver (Xid 154) follows from another Xid, which has the reason (docs/severity.md).
BELONGS_TO = {"gpu_lost": ("pcie",), "gpu": ("pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp")}
# A job on one node does not communicate over these links. Storage does; a lost file system has its own cause.
BETWEEN_NODES = frozenset({"ib_link", "ethernet"})
# Faults of one GPU: a condition that names its jobs did not end any other job.
OF_ONE_GPU = frozenset({"pcie", "gpu_lost", "nvlink", "gpu_memory", "gsp", "gpu", USER})

# Xids that follow from an earlier fault of the program: see AFTER_PROGRAM in healthd/nvidia/xid_table.py.
FOLLOWS_OF_PROGRAM = frozenset(f"gpu_xid/{number}" for number in AFTER_PROGRAM)


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of a code for a job that ended.

    cause      a name in `CAUSES`
    transient  False: permanent; None: not hardware, or unknown
    is_known   False: the code is in no table
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
    """Return the meaning of a code.

    Newer checks and a site's checks may have codes that are in no table; their cause is `OTHER_CAUSE`. `CHECK/others`
    counts several codes as one without their names, so its meaning is unknown too.
    """
    check, _, name = code.partition("/")
    found = _codes().get(code) or (_codes().get(f"{check}/*") if is_decimal(name) else None)
    if found is None:
        return Meaning(OTHER, EndsJob.IF_ISOLATES, None, known=False)
    return found


@functools.cache
def _codes() -> dict[str, Meaning]:
    """Read codes.csv, which scripts/fleet_codes.py writes: code -> its meaning."""
    with Path(__file__).parents[1].joinpath("codes.csv").open(encoding="utf-8", newline="") as file:
        return {row["code"]: _meaning(row) for row in csv.DictReader(file)}


def _meaning(row: dict[str, str]) -> Meaning:
    hardware = CAUSES[row["cause"]].domain == HARDWARE
    return Meaning(row["cause"], EndsJob(row["ends_job"]), row["permanent"] == "" if hardware else None)


def checks() -> frozenset[str]:
    """Return the names of the built-in checks, including those whose codes a site chooses."""
    return frozenset(code.partition("/")[0] for code in _codes())


def of_a_node(code: str) -> bool:
    """Return True if the code can be a fault of a node that ends jobs.

    False for faults of the program, and for codes that only indicate slowness, waiting or bookkeeping.
    """
    means = meaning(code)
    return means.ends is not EndsJob.NEVER and means.domain != USER_PROGRAM


def codes() -> list[str]:
    """Return the codes of the table. CHECK/* covers numbers that the table does not list."""
    return list(_codes())


# --- the cause of one failed job


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that ended FAILED or NODE_FAIL. Times are epoch seconds; None: unknown.

    ids    names of the job that a condition may contain: its raw id, or "ARRAY_TASK"
    nodes  number of nodes
    """

    ids: frozenset[str]
    state: str
    start_time: int | None
    nodes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A condition on one of the job's nodes within its window (query `seen_with_failures`).

    from_stream  True if a healthd stream reported it; False: only a scrape, which does not show whether a user can
                 forge it
    jobs         jobs that the condition names at its source; empty: none, or the list is incomplete
    """

    node: str
    code: str
    subject: str
    check: str
    severity: str
    kind: str
    first_seen: int
    last_seen: int
    told: bool
    jobs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Attributed:
    """Most likely cause of a failed job.

    sighting         the condition that decided
    other_sightings  all other conditions, each with its cause
    possible_causes  causes of all incidents that may have ended the job
    """

    cause: str
    seen: Seen
    confidence: str
    also: tuple[tuple[str, Seen], ...]
    deciding: frozenset[str]

    @property
    def others(self) -> bool:
        """True if another incident would have isolated a node too."""
        return bool(self.deciding - {self.cause, USER})

    @property
    def codes(self) -> frozenset[str]:
        """Codes on the node of the cause."""
        there = {one.code for _, one in self.also if one.node == self.seen.node}
        return frozenset(there | {self.seen.code})


def decides(failure: Failure, seen: Seen) -> bool:
    """Return True if this condition may have ended this job.

    It isolates the node (degraded or critical, by its code or as reported), or it is a fault of the program itself.
    Unlikely combinations are excluded:
    - a fault of one GPU that names other jobs, for a job that FAILED (if the node died, all its jobs ended);
    - a fault of the program, for a NODE_FAIL (a program does not end slurmd), or from before the job began.
    """
    means = meaning(seen.code)
    named = bool(seen.jobs & failure.ids)
    if means.ends is EndsJob.NEVER or (means.ends is EndsJob.IF_NAMED and not named):
        return False
    if means.ends is EndsJob.IF_ISOLATES and seen.severity not in ISOLATING:
        return False
    if means.cause == USER and (
        failure.state != "FAILED" or (failure.start_time is not None and seen.last_seen < failure.start_time)
    ):
        return False
    others = bool(seen.jobs) and not named
    return not (others and means.cause in OF_ONE_GPU and failure.state == "FAILED")


def is_unlikely(failure: Failure, cause: str) -> bool:
    """Return True for a link between nodes and a job on one node.

    The job may have used the link for storage or to reach Slurm. The link therefore remains a possible cause, but every
    other cause takes precedence.
    """
    return cause in BETWEEN_NODES and failure.nodes <= 1


def attributed(failure: Failure, seen: Iterable[Seen]) -> Attributed | None:
    """Return the most likely cause, or None if no condition can have ended the job.

    The incident is chosen by the order of its cause (unlikely ones last), then by its first sighting, then by the
    node's name. Its representative condition is one whose code has this cause, then the most severe, an edge before a
    level. The order of `sightings` does not matter.
    """
    placed = _with_incidents(seen)
    deciding: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for cause, one in placed:
        if decides(failure, one):
            deciding[cause, one.node].append(one)
    if not deciding:
        return None
    cause, node = min(
        deciding,
        key=lambda it: (
            is_unlikely(failure, it[0]),
            ORDER[it[0]],
            min(one.first_seen for one in deciding[it]),
            it[1],
        ),
    )
    chosen = min(deciding[cause, node], key=lambda one: _telling(cause, one))
    also = tuple(it for it in placed if it[1] is not chosen)
    causes = frozenset(it[0] for it in deciding)
    sure = _confidence(failure, cause, deciding[cause, node], bool(causes - {cause, USER}))
    return Attributed(cause, chosen, sure, also, causes)


def _telling(cause: str, one: Seen) -> tuple[object, ...]:
    """Return the sort key for the representative condition of an incident: the lowest wins."""
    own, bad = meaning(one.code).cause == cause, SEVERITIES.index(one.severity) if one.severity in SEVERITIES else -1
    return (not own, -bad, one.kind != "edge", one.first_seen, one.code, one.subject)


def _with_incidents(seen: Iterable[Seen]) -> list[tuple[str, Seen]]:
    """Return each condition with its own cause, or that of the incident on its node it belongs to, in order of
    preference.
    """
    every = list(seen)
    there: dict[str, set[str]] = defaultdict(set)
    for one in every:
        if meaning(one.code).ends is not EndsJob.NEVER:
            there[one.node].add(meaning(one.code).cause)
    return sorted(
        ((_incident(meaning(one.code).cause, there[one.node]), one) for one in every),
        key=lambda it: (ORDER[it[0]], it[1].node, it[1].first_seen, it[1].code, it[1].subject),
    )


def _incident(cause: str, there: set[str]) -> str:
    return next((wider for wider in BELONGS_TO.get(cause, ()) if wider in there), cause)


def _confidence(failure: Failure, cause: str, deciding: Sequence[Seen], others: bool) -> str:
    """Return high if the code ends jobs by itself, healthd's stream reported it, and there is no competing cause.

    One step less for each of: a competing cause that isolates a node; only a scrape shows the condition, which gives
    neither the time within its step nor whether a user can forge it; and the result of `_weakness`. A program's own Xid
    is medium (bad GPUs cause the same Xids, on different jobs), or low if it only follows from another error (43, 45).
    """
    if cause == USER:
        return "low" if all(one.code in FOLLOWS_OF_PROGRAM for one in deciding) else "medium"
    steps = int(others) + int(not any(one.told for one in deciding)) + min(map(_weakness, deciding))
    if is_unlikely(failure, cause):
        steps += 2 if failure.state == "FAILED" else 1
    return CONFIDENCES[min(steps, len(CONFIDENCES) - 1)]


def _weakness(one: Seen) -> int:
    """Return how many steps of confidence a condition lacks because of its code.

    0: the code ends jobs, or a known code was critical. 1: a known code that was only degraded (corrected ECC errors,
    error rates), or an unknown code that was critical. 2: an unknown code that was degraded.
    """
    means = meaning(one.code)
    if means.known and means.ends is not EndsJob.IF_ISOLATES:
        return 0
    return int(one.severity != "critical") + int(not means.known)
