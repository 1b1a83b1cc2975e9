"""Causes of job failures, their domains and order. Maps check codes to causes and finds the cause of a failed job.

Each check declares the causes of its codes, whether they end a job, and which are permanent hardware faults: `CAUSES`,
`ENDS_JOB` and `PERMANENT` in checks/*.py. scripts/fleet_codes.py writes them to codes.csv, which `meaning` reads.

The domains are those of arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025, Table I): user program, system software
(driver, operating system, services), hardware. A hardware fault is transient (an ECC error, a link that flaps) or
permanent (the vendor must replace the part). A fault is permanent if it meets NVIDIA's criteria for a replacement (row
remapping failures, used-up spares, the SRAM threshold, retired pages: NVIDIA GPU memory error management), or if a
device is missing or dead after a boot. All other hardware faults are transient. The paper publishes neither the cause
of each code nor the order of the causes: both are healthd's own.

`CAUSES` is in order of preference: causes for which the node is isolated come first. It begins with the checks that the
paper classifies as high-severity (GPU inaccessible, NVLink, uncorrectable ECC, failed remaps, PCIe and IB link, block
device, mount). Among these, PCIe comes first because a PCIe fault makes a GPU inaccessible. Next are the causes for
which the node is only drained. The user's program is last.

`attribute_failure` returns the most likely cause among the conditions around a job's end. Source for the window and for
"most likely": the same paper. A cause is attributed if it was "detected within the last 10 minutes or 5 minutes after a
failing job's lifetime (FAILED or NODE_FAIL)"; among several checks, it is the one that "indicates whether a node should
be isolated". The paper does not publish this heuristic, so the rule in `may_have_ended` is healthd's own. Like the
paper's differential diagnosis, it excludes unlikely conditions.
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
USER_CAUSE, OTHER_CAUSE = "user", "other"
SWITCH_CAUSE = "nvlink_switch"  # no code has this cause: it is found in the link faults of several nodes
SEVERITIES = ("info", "warning", "degraded", "critical")
ISOLATING_SEVERITIES = frozenset(SEVERITIES[2:])
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of failures.

    Attributes:
        label: the name shown to users.
        domain: None if unknown (a site's own check).
    """

    name: str
    domain: str | None
    label: str


# In order of preference.
CAUSES = {
    cause.name: cause
    for cause in (
        Cause("pcie", HARDWARE, "PCI Express"),
        # PCIe comes before the GPU causes: if a GPU falls off the bus and a link fails too, the paper counts a link
        # failure.
        Cause("ib_link", HARDWARE, "InfiniBand"),
        Cause("gpu_lost", HARDWARE, "a lost GPU"),
        # One fault on many nodes of an NVLink domain (statistics/domain_faults.py). The nodes are not to blame for it.
        Cause(SWITCH_CAUSE, HARDWARE, "switch side of an NVLink domain"),
        Cause("nvlink", HARDWARE, "NVLink and NVSwitch"),
        Cause("gpu_memory", HARDWARE, "GPU memory"),
        # "GSP timeouts came from a code regression, fixed by a driver patch": the paper's section about GSP timeouts.
        Cause("gsp", SYSTEM_SOFTWARE, "GPU firmware (GSP)"),
        Cause("gpu", HARDWARE, "another GPU fault"),
        Cause("disk", HARDWARE, "disks"),
        Cause("mount", SYSTEM_SOFTWARE, "network file systems"),
        Cause("memory", HARDWARE, "host memory and CPUs"),
        Cause("power", HARDWARE, "host power and cooling"),
        Cause("kernel", SYSTEM_SOFTWARE, "the kernel"),
        Cause("driver", SYSTEM_SOFTWARE, "GPU driver and setup"),
        Cause("ethernet", HARDWARE, "Ethernet"),
        Cause("services", SYSTEM_SOFTWARE, "node services"),
        Cause("disk_space", SYSTEM_SOFTWARE, "full disks"),
        Cause(OTHER_CAUSE, None, "site and unknown checks"),
        Cause(USER_CAUSE, USER_PROGRAM, "the user's program"),
    )
}
CAUSE_ORDER = {name: place for place, name in enumerate(CAUSES)}

# One fault can cause several codes. Each cause below is followed by the causes that can explain it. If one of these is
# found on the same node, the fault is attributed to the first of these that is found. {PCIe, Xid 79, IPMI critical
# interrupt} is one incident (the paper's section about co-occurrence). A reset request from the driver (Xid 154)
# follows from another Xid, which has the reason (docs/severity.md).
PARENT_CAUSES = {"gpu_lost": ("pcie",), "gpu": ("pcie", "gpu_lost", SWITCH_CAUSE, "nvlink", "gpu_memory", "gsp")}
# A job on a single node does not communicate over these links. Its storage traffic uses them, but a lost file system is
# a separate cause.
INTER_NODE_CAUSES = frozenset({"ib_link", "ethernet"})
# Causes that affect a single GPU. If a condition with such a cause names jobs, it did not end any other job.
SINGLE_GPU_CAUSES = frozenset({"pcie", "gpu_lost", SWITCH_CAUSE, "nvlink", "gpu_memory", "gsp", "gpu", USER_CAUSE})

# Xids that follow from an earlier fault in the program: see AFTER_PROGRAM in healthd/nvidia/xid_table.py.
AFTER_PROGRAM_CODES = frozenset(f"gpu_xid/{number}" for number in AFTER_PROGRAM)


@dataclass(frozen=True, slots=True)
class CodeMeaning:
    """What a code means for a job that ended.

    Attributes:
        cause: a name in `CAUSES`.
        transient: False if permanent; None if it is unknown or the cause is not hardware.
        is_known: False if the code is in no table.
    """

    cause: str
    ends: EndsJob
    transient: bool | None
    is_known: bool = True

    @property
    def domain(self) -> str | None:
        return CAUSES[self.cause].domain


@functools.lru_cache(maxsize=4096)
def meaning(code: str) -> CodeMeaning:
    """Return the meaning of a code.

    Newer checks and a site's own checks may have codes that are in no table. Their cause is `OTHER_CAUSE`.
    The meaning of `CHECK/others` is also unknown, because it replaces several codes without naming them.
    """
    check, _, name = code.partition("/")
    found = _codes().get(code) or (_codes().get(f"{check}/*") if is_decimal(name) else None)
    if found is None:
        return CodeMeaning(OTHER_CAUSE, EndsJob.IF_ISOLATES, None, is_known=False)
    return found


@functools.cache
def _codes() -> dict[str, CodeMeaning]:
    """Read codes.csv, which scripts/fleet_codes.py writes, and map each code to its meaning."""
    with Path(__file__).parents[1].joinpath("codes.csv").open(encoding="utf-8", newline="") as file:
        return {row["code"]: _meaning(row) for row in csv.DictReader(file)}


def _meaning(row: dict[str, str]) -> CodeMeaning:
    hardware = CAUSES[row["cause"]].domain == HARDWARE
    return CodeMeaning(row["cause"], EndsJob(row["ends_job"]), row["permanent"] == "" if hardware else None)


def checks() -> frozenset[str]:
    """Return the names of the built-in checks, including the checks whose codes a site defines in its settings."""
    return frozenset(code.partition("/")[0] for code in _codes())


def is_node_fault(code: str) -> bool:
    """Return True if the code can indicate a node fault that ends jobs.

    Return False for faults in the user's program, and for codes that only report slowness, waiting or bookkeeping.
    """
    code_meaning = meaning(code)
    return code_meaning.ends is not EndsJob.NEVER and code_meaning.domain != USER_PROGRAM


def codes() -> list[str]:
    """Return the codes in the table. `CHECK/*` matches all numbered codes of a check that the table does not list."""
    return list(_codes())


# --- the cause of one failed job


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that ended FAILED or NODE_FAIL. Times are epoch seconds; None if unknown.

    Attributes:
        ids: the names under which a condition may list the job: its raw id, or "ARRAY_TASK".
        nodes: number of nodes.
    """

    ids: frozenset[str]
    state: str
    start_time: int | None
    nodes: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A condition on one of the job's nodes within the job's window (query `seen_with_failures`).

    Attributes:
        from_stream: True if a healthd event stream reported it; False if only a Prometheus scrape did. A scrape does
            not show whether a user can forge the condition.
        jobs: jobs that the condition's source names; empty if there are none or the list is incomplete.
        nvlink_domain: UUID of the node's NVLink domain, if the condition belongs to a fault of its switch side; else
            "".
    """

    node: str
    code: str
    subject: str
    check: str
    severity: str
    kind: str
    first_seen: int
    last_seen: int
    from_stream: bool
    jobs: frozenset[str]
    nvlink_domain: str = ""

    @property
    def cause(self) -> str:
        """The cause of the code, or the switch side."""
        return SWITCH_CAUSE if self.nvlink_domain else meaning(self.code).cause


@dataclass(frozen=True, slots=True)
class Attribution:
    """The most likely cause of a failed job.

    Attributes:
        sighting: the condition that determines the cause.
        other_sightings: all other conditions, each with its cause.
        possible_causes: causes of all incidents that may have ended the job.
    """

    cause: str
    sighting: Sighting
    confidence: str
    other_sightings: tuple[tuple[str, Sighting], ...]
    possible_causes: frozenset[str]

    @property
    def has_competing_cause(self) -> bool:
        """True if another incident would also have isolated a node."""
        return bool(self.possible_causes - {self.cause, USER_CAUSE})

    @property
    def codes(self) -> frozenset[str]:
        """The codes found on the node with the cause."""
        node_codes = {sighting.code for _, sighting in self.other_sightings if sighting.node == self.sighting.node}
        return frozenset(node_codes | {self.sighting.code})


def may_have_ended(failure: Failure, sighting: Sighting) -> bool:
    """Return True if this condition may have ended this job.

    A condition may have ended the job if it isolates the node (its code or its report has the severity degraded or
    critical), or if it is a fault in the program itself. Unlikely combinations are excluded:
    - a fault of one GPU whose report names other jobs, if the job FAILED (if the node died instead, all jobs on
      it ended);
    - a fault in the program, if the job ended with NODE_FAIL (a program does not end slurmd);
    - a fault in the program that was reported before the job began.
    """
    code_meaning = meaning(sighting.code)
    names_job = bool(sighting.jobs & failure.ids)
    if code_meaning.ends is EndsJob.NEVER or (code_meaning.ends is EndsJob.IF_NAMED and not names_job):
        return False
    if code_meaning.ends is EndsJob.IF_ISOLATES and sighting.severity not in ISOLATING_SEVERITIES:
        return False
    if sighting.cause == USER_CAUSE and (
        failure.state != "FAILED" or (failure.start_time is not None and sighting.last_seen < failure.start_time)
    ):
        return False
    names_other_jobs = bool(sighting.jobs) and not names_job
    return not (names_other_jobs and sighting.cause in SINGLE_GPU_CAUSES and failure.state == "FAILED")


def is_unlikely(failure: Failure, cause: str) -> bool:
    """Return True if the cause is a fault of a link between nodes, but the job ran on only one node.

    The job may have used the link for storage or to reach Slurm. The link therefore remains a possible cause, but every
    other cause takes precedence.
    """
    return cause in INTER_NODE_CAUSES and failure.nodes <= 1


def attribute_failure(failure: Failure, sightings: Iterable[Sighting]) -> Attribution | None:
    """Return the most likely cause, or None if no condition can have ended the job.

    Incidents are compared by the order of their causes (unlikely causes last), then by first sighting, then by node
    name. The chosen incident is represented by a condition whose code has this cause. Among several such conditions,
    the most severe is used, and an edge is preferred to a level. The order of `sightings` does not matter.
    """
    with_causes = _with_incident_causes(sightings)
    deciding: dict[tuple[str, str], list[Sighting]] = defaultdict(list)
    for cause, sighting in with_causes:
        if may_have_ended(failure, sighting):
            deciding[cause, sighting.node].append(sighting)
    if not deciding:
        return None
    cause, node = min(
        deciding,
        key=lambda entry: (
            is_unlikely(failure, entry[0]),
            CAUSE_ORDER[entry[0]],
            min(sighting.first_seen for sighting in deciding[entry]),
            entry[1],
        ),
    )
    chosen = min(deciding[cause, node], key=lambda sighting: _representative_order(cause, sighting))
    other_sightings = tuple(entry for entry in with_causes if entry[1] is not chosen)
    causes = frozenset(entry[0] for entry in deciding)
    confidence = _confidence(failure, cause, deciding[cause, node], bool(causes - {cause, USER_CAUSE}))
    return Attribution(cause, chosen, confidence, other_sightings, causes)


def _representative_order(cause: str, sighting: Sighting) -> tuple[object, ...]:
    """Return the sort key for choosing the condition that represents an incident. The lowest key wins."""
    has_cause, badness = (
        sighting.cause == cause,
        SEVERITIES.index(sighting.severity) if sighting.severity in SEVERITIES else -1,
    )
    return (not has_cause, -badness, sighting.kind != "edge", sighting.first_seen, sighting.code, sighting.subject)


def _with_incident_causes(sightings: Iterable[Sighting]) -> list[tuple[str, Sighting]]:
    """Return each condition with a cause, in order of preference.

    If the condition belongs to an incident on its node, the cause is the incident's. Otherwise, it is the condition's
    own.
    """
    all_sightings = list(sightings)
    node_causes: dict[str, set[str]] = defaultdict(set)
    for sighting in all_sightings:
        if meaning(sighting.code).ends is not EndsJob.NEVER:
            node_causes[sighting.node].add(sighting.cause)
    return sorted(
        ((_incident_cause(sighting.cause, node_causes[sighting.node]), sighting) for sighting in all_sightings),
        key=lambda entry: (CAUSE_ORDER[entry[0]], entry[1].node, entry[1].first_seen, entry[1].code, entry[1].subject),
    )


def _incident_cause(cause: str, node_causes: set[str]) -> str:
    return next((wider for wider in PARENT_CAUSES.get(cause, ()) if wider in node_causes), cause)


def _confidence(failure: Failure, cause: str, deciding: Sequence[Sighting], has_competing_cause: bool) -> str:
    """Return the confidence in an attribution: high, medium or low.

    It is high if the code ends jobs by itself, healthd's event stream reported it, and there is no competing cause. It
    is one step lower if a competing cause also isolates a node. It is one step lower if only a Prometheus scrape
    reported the condition, because a scrape shows neither the exact time nor whether a user can forge the condition.
    `_weakness` can lower it further. For an Xid caused by the user's program, it is medium, because bad GPUs cause the
    same Xids in other jobs. It is low if the Xid only follows from another error (Xids 43 and 45).
    """
    if cause == USER_CAUSE:
        return "low" if all(sighting.code in AFTER_PROGRAM_CODES for sighting in deciding) else "medium"
    steps = (
        int(has_competing_cause)
        + int(not any(sighting.from_stream for sighting in deciding))
        + min(map(_weakness, deciding))
    )
    if is_unlikely(failure, cause):
        steps += 2 if failure.state == "FAILED" else 1
    return CONFIDENCES[min(steps, len(CONFIDENCES) - 1)]


def _weakness(sighting: Sighting) -> int:
    """Return the number of steps by which a condition's code lowers the confidence.

    0 steps: the code ends jobs, or a known code was critical. 1 step: a known code was only degraded (corrected ECC
    errors, error rates), or an unknown code was critical. 2 steps: an unknown code was degraded.
    """
    code_meaning = meaning(sighting.code)
    if code_meaning.is_known and code_meaning.ends is not EndsJob.IF_ISOLATES:
        return 0
    return int(sighting.severity != "critical") + int(not code_meaning.is_known)
