"""From what was seen around a failed job's end to its most likely cause. Pure.

Source of the window and of "the most likely one": arXiv 2410.21680 (Kokolis, Kuchnik et al., HPCA 2025): a cause is
attributed if it was "detected within the last 10 minutes or 5 minutes after a failing job's lifetime (FAILED or
NODE_FAIL)"; of several checks it is the one that "indicates whether a node should be isolated". That heuristic is not
published; `decides` and the order in causes.py are ours. They exclude what is unlikely, as the paper's differential
diagnosis does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from healthd.fleet.answers.causes import (
    BELONGS_TO,
    BETWEEN_NODES,
    FOLLOWS_OF_PROGRAM,
    NAMED,
    NEVER,
    OF_ONE_GPU,
    ORDER,
    TOLD,
    USER,
    meaning,
)

SEVERITIES = ("info", "warning", "degraded", "critical")
ISOLATING = frozenset(SEVERITIES[2:])
CONFIDENCES = ("high", "medium", "low")


@dataclass(frozen=True, slots=True)
class Failure:
    """A job that ended FAILED or NODE_FAIL. Times are epoch seconds; None: not known.

    ids    the names that a condition may have for it: its raw id, "ARRAY_TASK"
    nodes  how many it had
    """

    ids: frozenset[str]
    state: str
    start_time: int | None
    nodes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """A condition that was seen on one of the job's nodes in its window (seen_with_failures).

    told   whether our own stream told it; False: only a scrape, which does not say whether a user can forge it
    jobs   the jobs that it names at its source; empty: it names none, or not all
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
    """cause: of `seen`, which decided; also: all else that was seen, each with its cause; deciding: the causes of all
    incidents that can have ended the job."""

    cause: str
    seen: Seen
    confidence: str
    also: tuple[tuple[str, Seen], ...]
    deciding: frozenset[str]

    @property
    def others(self) -> bool:
        """Whether another incident would have isolated a node too."""
        return bool(self.deciding - {self.cause, USER})

    @property
    def codes(self) -> frozenset[str]:
        """What was seen on the node of the cause."""
        there = {one.code for _, one in self.also if one.node == self.seen.node}
        return frozenset(there | {self.seen.code})


def decides(failure: Failure, seen: Seen) -> bool:
    """Whether this condition can have ended this job.

    It isolates the node: degraded or critical, by its code or as it was told; or it is the program's own doing. What
    is unlikely is excluded:
    - a fault of one GPU that names other jobs, for a job that FAILED (where the node died, all jobs ended);
    - a program's own fault, for a NODE_FAIL (a program does not end slurmd), and from before the job began.
    """
    means = meaning(seen.code)
    named = bool(seen.jobs & failure.ids)
    if means.ends == NEVER or (means.ends == NAMED and not named):
        return False
    if means.ends == TOLD and seen.severity not in ISOLATING:
        return False
    if means.cause == USER and (
        failure.state != "FAILED" or (failure.start_time is not None and seen.last_seen < failure.start_time)
    ):
        return False
    others = bool(seen.jobs) and not named
    return not (others and means.cause in OF_ONE_GPU and failure.state == "FAILED")


def is_unlikely(failure: Failure, cause: str) -> bool:
    """Return True for a link between nodes and a job of one node.

    The job may have used the link, for storage or to Slurm, so it is a cause, but after all others: a link that fails
    beside another fault is not preferred."""
    return cause in BETWEEN_NODES and failure.nodes <= 1


def attributed(failure: Failure, seen: Iterable[Seen]) -> Attributed | None:
    """The most likely cause; None where nothing that was seen can have ended the job. The order of `seen` is without
    meaning.

    The incident is chosen by the order of its cause (an unlikely one after all others), then by what was seen first,
    then by the node's name. It is told by the code that is of this cause itself, the worst, an edge before a level.
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
    """By which of an incident's conditions it is told: the least."""
    own, bad = meaning(one.code).cause == cause, SEVERITIES.index(one.severity) if one.severity in SEVERITIES else -1
    return (not own, -bad, one.kind != "edge", one.first_seen, one.code, one.subject)


def _with_incidents(seen: Iterable[Seen]) -> list[tuple[str, Seen]]:
    """Each with its cause: its own, or that of the incident on its node that it belongs to. In the written order."""
    every = list(seen)
    there: dict[str, set[str]] = defaultdict(set)
    for one in every:
        if meaning(one.code).ends != NEVER:
            there[one.node].add(meaning(one.code).cause)
    return sorted(
        ((_incident(meaning(one.code).cause, there[one.node]), one) for one in every),
        key=lambda it: (ORDER[it[0]], it[1].node, it[1].first_seen, it[1].code, it[1].subject),
    )


def _incident(cause: str, there: set[str]) -> str:
    return next((wider for wider in BELONGS_TO.get(cause, ()) if wider in there), cause)


def _confidence(failure: Failure, cause: str, deciding: Sequence[Seen], others: bool) -> str:
    """Return high if the condition ends jobs by its code, healthd's stream reported it, and no other cause was seen.

    One step less for each of: another cause was seen that isolates a node; only a scrape shows it, which does not give
    the time within its step, nor whether a user can forge it; and what `_weakness` adds. A program's own Xid is medium
    (bad GPUs cause the same Xids, on different jobs), low if it only follows from something else (43, 45)."""
    if cause == USER:
        return "low" if all(one.code in FOLLOWS_OF_PROGRAM for one in deciding) else "medium"
    steps = int(others) + int(not any(one.told for one in deciding)) + min(map(_weakness, deciding))
    if is_unlikely(failure, cause):
        steps += 2 if failure.state == "FAILED" else 1
    return CONFIDENCES[min(steps, len(CONFIDENCES) - 1)]


def _weakness(one: Seen) -> int:
    """Return how many steps of confidence a condition lacks by its code.

    0: the code ends jobs, or a code of ours was critical. 1: one of ours that was reported as degraded only (corrected
    ECC errors, error rates), or an unknown code that was critical. 2: an unknown code that was degraded."""
    means = meaning(one.code)
    if means.known and means.ends != TOLD:
        return 0
    return int(one.severity != "critical") + int(not means.known)
