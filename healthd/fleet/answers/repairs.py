"""Computes how often each remedy ends a fault for good, and how long nodes are out of service until then.

A repair is the end of faults that drained a node: by a GPU reset, a boot (a reboot or a power cycle), a person
(`healthd repaired`), clean runs of the check, or time. Faults of a node that end by the same remedy at the same time
are one repair. It lasts for 7 or 28 days if none of its faults opens again on the same part of the node in that time.
Only repairs whose node is observed for that long afterwards are counted, so that a recent repair, or that of a node
that was removed, is neither a success nor a failure. A step that ended nothing is not recorded as a repair, but the
steps that healthd takes itself are (repair_steps.py). Faults of an NVLink domain's switch side
(statistics/domain_faults.py) are left out, because no remedy on the node ends them.

A later first step is suggested for a code if its first step has failed too often: at least MIN_REPAIRS repairs on at
least MIN_NODES nodes, and the upper end of the 95 % interval (Wilson) for the share that lasts 7 days is below
MIN_SHARE. These limits are healthd's own. A power cycle is never suggested, because it follows only a reboot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.fleet.answers import causes, repair_steps
from healthd.fleet.answers.availability import quantile
from healthd.fleet.answers.document import Document
from healthd.fleet.answers.repair_steps import Attempt, StepEvent, StepHistory
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.domain_faults import LinkFault, domain_fault, faults_by_node, find_domain_faults
from healthd.fleet.statistics.wilson import wilson

DAY = 86400
LASTING_DAYS = (7, 28)
MIN_REPAIRS, MIN_NODES, MIN_SHARE = 10, 5, 0.5
# Remedies in the order of the ladder, by the first word of `cleared_by` (docs/events.md).
REMEDIES = ("gpu_reset", "reboot", "person", "check_passed", "time")
_REMEDY_BY_WORD = {
    "gpu_reset": "gpu_reset",
    "reset": "gpu_reset",
    "reboot": "reboot",
    "repaired": "person",
    "pass": "check_passed",
    "window": "time",
}
_NEXT_STEP = {"gpu_reset": "reboot", "reboot": "person"}

Part = tuple[str, str, str, str]  # cluster, node, code, subject
Node = tuple[str, str]


class Fault(NamedTuple):
    """A row returned by repairs_conditions.sql."""

    cluster: str
    node: str
    code: str
    subject: str
    first_time: int
    cleared_time: int | None
    cleared_by: str | None


class Outage(NamedTuple):
    """A row returned by checks_outages.sql."""

    cluster: str
    node: str
    start_time: int
    end_time: int | None
    by_whom: str


class Observed(NamedTuple):
    """A row returned by repairs_nodes.sql. `until` is the time of the node's last line."""

    cluster: str
    node: str
    until: int


class Repair(NamedTuple):
    """The end of one fault. `returned_after` is in seconds, or None if the fault has not returned."""

    cluster: str
    node: str
    code: str
    remedy: str
    ended_at: int
    returned_after: int | None


def repairs(study: Study) -> Document:
    """Return the document for `healthd fleet repairs`. Raises Unanswerable if there are no events.

    Keys:
        by_remedy, by_cause, by_code: rows with the repairs, the share that lasted 7 and 28 days, and the time from
            drain to service.
        suggested: for each code whose first step fails too often, the step to begin with.
        steps: the steps that healthd took itself (`steps_document`).
    """
    study.require("events")
    domain_faults = faults_by_node(find_domain_faults(study.query("link_faults", LinkFault)))
    faults = [
        fault
        for fault in study.query("repairs_conditions", Fault)
        if domain_fault(domain_faults, fault.cluster, fault.node, fault.code, fault.first_time) is None
    ]
    ends = find_ends(faults)
    ends = [end for end in ends if study.from_time <= end.ended_at < study.to_time]
    observed_until = {(row.cluster, row.node): row.until for row in study.query("repairs_nodes", Observed)}
    outages = by_node(study.query("checks_outages", Outage))
    history = repair_steps.read_steps(study.query("repairs_steps", StepEvent))
    history = history.within(study.from_time, study.to_time)

    def rows(key: Callable[[Repair], tuple[str, ...]], names: tuple[str, ...]) -> list[Row]:
        groups: dict[tuple[str, ...], list[Repair]] = defaultdict(list)
        for end in ends:
            groups[key(end)].append(end)
        found = [
            {
                **dict(zip(names, group, strict=True)),
                **summary(merge_ends(group_ends), outages, observed_until, study.to_time),
            }
            for group, group_ends in sorted(groups.items())
        ]
        return sorted(found, key=lambda row: -row["repairs"])

    by_code = rows(lambda end: (end.code, end.remedy), ("code", "remedy"))
    merged = merge_ends(ends)
    notes = _notes(merged, observed_until, outages, study.to_time)
    return {
        **study.head("repairs", *notes, *study.coverage_notes("events")),
        "repairs": len(merged),
        "lasting_days": list(LASTING_DAYS),
        "by_remedy": rows(lambda end: (end.remedy,), ("remedy",)),
        "by_cause": rows(lambda end: (causes.meaning(end.code).cause, end.remedy), ("cause", "remedy")),
        "by_code": by_code,
        "suggested": suggested_steps(by_code),
        "steps": steps_document(history, faults, outages, observed_until, study.to_time),
    }


def has_findings(repairs: Document) -> bool:
    """Return True if another first step is suggested for a code, or a step of healthd fails too often."""
    return bool(repairs["suggested"] or repairs["steps"]["failing"])


def steps_document(
    history: StepHistory,
    faults: Iterable[Fault],
    outages: Mapping[Node, Sequence[Outage]],
    observed_until: Mapping[Node, int],
    to_time: int,
) -> Document:
    """Return the counts of the steps that healthd took itself. Without any, the lists are empty.

    Keys:
        attempts, impossible, refused, gave_up: numbers of steps, of steps that could not be taken, of refused tries,
            and of repairs that a person had to finish.
        by_step, by_code: rows with the ends of the steps, the share that lasted 7 and 28 days, and the time from drain
            to service.
        failing: steps that fail too often.
        suggested_order: steps for repair.order, or None if there are too few attempts.
    """
    began: dict[Part, list[int]] = defaultdict(list)
    for fault in sorted(faults, key=lambda fault: fault.first_time):
        began[fault.cluster, fault.node, fault.code, fault.subject].append(fault.first_time)

    def lasting(attempt: Attempt, days: int) -> bool | None:
        until = min(observed_until.get((attempt.cluster, attempt.node), to_time), to_time)
        return repair_steps.lasts(attempt, days, began, until)

    def out(attempts: Sequence[Attempt]) -> Row:
        found = (outage_at((attempt.cluster, attempt.node), attempt.began, outages) for attempt in attempts)
        return _out_seconds({outage for outage in found if outage is not None})

    common = (lasting, out, LASTING_DAYS)
    by_step = repair_steps.rows(history, lambda attempt: [(attempt.step,)], ("step",), *common)
    by_code = repair_steps.rows(
        history,
        lambda attempt: {(code, attempt.step) for code, _ in attempt.causes},
        ("code", "step"),
        *common,
    )
    lasted = {row["step"]: row["lasted_7_days"] for row in by_step}
    failing = [
        row["step"]
        for row in by_step
        if row["nodes"] >= MIN_NODES
        and _fails_too_often(lasted[row["step"]]["attempts"], lasted[row["step"]]["interval"])
    ]
    is_known = sum(row["attempts"] for row in lasted.values()) >= MIN_REPAIRS
    tried = [row["step"] for row in by_step if row["attempts"]]
    return {
        "attempts": len(history.attempts),
        "impossible": len(history.impossible),
        "refused": len(history.refused),
        "gave_up": len(history.gave_up),
        "by_step": by_step,
        "by_code": by_code,
        "gave_up_by_code": repair_steps.codes_given_up(history.gave_up),
        "failing": failing,
        "suggested_order": repair_steps.suggested_order(tried, failing) if is_known else None,
    }


def remedy(cleared_by: str | None) -> str:
    """Return the remedy (one of REMEDIES) that ended a fault, or "" if the fault did not end by a remedy."""
    return _REMEDY_BY_WORD.get((cleared_by or "").partition(" ")[0].rstrip(":"), "")


def find_ends(faults: Iterable[Fault]) -> list[Repair]:
    """Return the ends of all faults by a remedy, ordered by cluster, node, code, subject and time.

    A fault has returned if the same part has a later fault with the same code. This fault may have begun during a boot,
    before the daemon started and ended the earlier one.
    """
    by_part: dict[Part, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_part[fault.cluster, fault.node, fault.code, fault.subject].append(fault)
    found = []
    for part, part_faults in sorted(by_part.items()):
        ordered = sorted(part_faults, key=lambda fault: (fault.first_time, fault.cleared_time or 0))
        for position, fault in enumerate(ordered):
            name = remedy(fault.cleared_by)
            if fault.cleared_time is None or not name:
                continue
            later = ordered[position + 1 : position + 2]
            returned = max(later[0].first_time - fault.cleared_time, 0) if later else None
            found.append(Repair(part[0], part[1], part[2], name, fault.cleared_time, returned))
    return found


def merge_ends(ends: Iterable[Repair]) -> list[Repair]:
    """Return one repair for all faults of a node that ended by the same remedy at the same time. It has failed as soon
    as one of its faults returns."""
    merged: dict[tuple[str, str, str, int], Repair] = {}
    for end in ends:
        key = (end.cluster, end.node, end.remedy, end.ended_at)
        earlier = merged.get(key, end)
        times = [time for time in (earlier.returned_after, end.returned_after) if time is not None]
        merged[key] = earlier._replace(returned_after=min(times, default=None))
    return list(merged.values())


def by_node(outages: Iterable[Outage]) -> dict[Node, list[Outage]]:
    """Return each node's outages in order of time."""
    found: dict[Node, list[Outage]] = defaultdict(list)
    for outage in sorted(outages):
        found[outage.cluster, outage.node].append(outage)
    return found


def outage_of(repair: Repair, outages: Mapping[Node, Sequence[Outage]]) -> Outage | None:
    """Return the outage in which the repair was made, or None if the node was in service then."""
    return outage_at((repair.cluster, repair.node), repair.ended_at, outages)


def outage_at(node: Node, time: int, outages: Mapping[Node, Sequence[Outage]]) -> Outage | None:
    """Return the node's outage at this time, or None."""
    node_outages = outages.get(node, ())
    position = bisect_right([outage.start_time for outage in node_outages], time) - 1
    outage = node_outages[position] if position >= 0 else None
    is_within = outage is not None and (outage.end_time is None or outage.end_time >= time)
    return outage if is_within else None


def summary(
    found: Sequence[Repair],
    outages: Mapping[Node, Sequence[Outage]],
    observed_until: Mapping[Node, int],
    to_time: int,
) -> Row:
    """Return the counts for these repairs. A share and its interval are None if there are no cases. Each outage counts
    once."""
    out = {outage for repair in found if (outage := outage_of(repair, outages)) is not None}
    lasting = {}
    for days in LASTING_DAYS:
        cases = [lasts(repair, days, observed_until, to_time) for repair in found]
        followed = [case for case in cases if case is not None]
        lasting[f"lasted_{days}_days"] = {
            "repairs": len(followed),
            "lasted": sum(followed),
            "share": sum(followed) / len(followed) if followed else None,
            "interval": wilson(sum(followed), len(followed)),
        }
    return {
        "repairs": len(found),
        "nodes": len({(repair.cluster, repair.node) for repair in found}),
        **lasting,
        "out_seconds": _out_seconds(out),
    }


def _out_seconds(outages: Collection[Outage]) -> Row:
    known = sorted(outage.end_time - outage.start_time for outage in outages if outage.end_time is not None)
    return {
        "cases": len(known),
        "still_out": len(outages) - len(known),
        "median": quantile(known, 0.5),
        "p90": quantile(known, 0.9),
    }


def lasts(repair: Repair, days: int, observed_until: Mapping[Node, int], to_time: int) -> bool | None:
    """Return True if the repair lasted for these days, False if the fault returned, None if it was not observed."""
    if repair.returned_after is not None and repair.returned_after <= days * DAY:
        return False
    until = min(observed_until.get((repair.cluster, repair.node), to_time), to_time)
    return True if repair.ended_at + days * DAY <= until else None


def suggested_steps(by_code: Iterable[Row]) -> dict[str, str]:
    """Return the step to begin with for each code whose first step fails too often.

    The first step of a code is a GPU reset if any of its faults ended with one, otherwise a reboot. A later step never
    counts against the first: it is taken only for faults that the first step did not end. If the next step fails too
    often as well, a person is suggested.
    """
    steps: dict[str, dict[str, bool]] = defaultdict(dict)
    for row in by_code:
        if row["remedy"] in _NEXT_STEP:
            lasted = row["lasted_7_days"]
            is_failing = row["nodes"] >= MIN_NODES and _fails_too_often(lasted["repairs"], lasted["interval"])
            steps[row["code"]][row["remedy"]] = is_failing
    found = {}
    for code, failing in sorted(steps.items()):
        step = next(name for name in _NEXT_STEP if name in failing)
        if failing[step]:
            while failing.get(step):
                step = _NEXT_STEP[step]
            found[code] = step
    return found


def _fails_too_often(cases: int, interval: tuple[float, float] | None) -> bool:
    return cases >= MIN_REPAIRS and interval is not None and bool(interval[1] < MIN_SHARE)


def _notes(
    found: Sequence[Repair], observed_until: Mapping[Node, int], outages: Mapping[Node, Sequence[Outage]], to_time: int
) -> list[str]:
    notes = []
    unknown = sum(lasts(repair, LASTING_DAYS[0], observed_until, to_time) is None for repair in found)
    if unknown:
        notes.append(
            f"{unknown:,} of {len(found):,} repairs were not followed for {LASTING_DAYS[0]} days: the period "
            "ends, or the node's last event is earlier. They count neither as lasting nor as failed."
        )
    still_out = sum((outage := outage_of(r, outages)) is not None and outage.end_time is None for r in found)
    if still_out:
        notes.append(f"After {still_out:,} repairs the node is still out of service, so the times are underestimated.")
    return notes
