"""Computes how often each remedy ends a fault for good, and how long nodes are out of service until then.

A repair is the end of a fault that drained its node: by a GPU reset, a reboot, a person (`healthd repaired`), clean
runs of its check, or time. It lasts for 7 or 28 days if the same fault does not open again on the same part of the node
in that time. Only repairs with that much time left in the period are counted, so that a recent repair is neither a
success nor a failure.

A step is suggested for a code if its first step has failed too often: at least MIN_REPAIRS repairs, and the upper end
of the 95 % interval (Wilson) for the share that lasts 7 days is below MIN_SHARE. Both limits are healthd's own. A power
cycle is never suggested, because it follows only a failed reboot.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.fleet.answers import causes
from healthd.fleet.answers.availability import quantile
from healthd.fleet.answers.document import Document
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.wilson import wilson

DAY = 86400
LASTING_DAYS = (7, 28)
MIN_REPAIRS, MIN_SHARE = 10, 0.5
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


class Repair(NamedTuple):
    """The end of a fault. `returned_after` is in seconds, or None if the fault has not returned."""

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
    """
    study.require("events")
    found = find_repairs(study.query("repairs_conditions", Fault))
    out_seconds = seconds_out(found, study.query("checks_outages", Outage))

    def rows(key: Mapping[Repair, tuple[str, ...]], names: tuple[str, ...]) -> list[Row]:
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for position, repair in enumerate(found):
            groups[key[repair]].append(position)
        return [
            {
                **dict(zip(names, group, strict=True)),
                **summary([found[i] for i in positions], [out_seconds[i] for i in positions], study.to_time),
            }
            for group, positions in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        ]

    by_code = rows({r: (r.code, r.remedy) for r in found}, ("code", "remedy"))
    return {
        **study.head("repairs", *_notes(found, study.to_time)),
        "repairs": len(found),
        "lasting_days": list(LASTING_DAYS),
        "by_remedy": rows({r: (r.remedy,) for r in found}, ("remedy",)),
        "by_cause": rows({r: (causes.meaning(r.code).cause, r.remedy) for r in found}, ("cause", "remedy")),
        "by_code": by_code,
        "suggested": suggested_steps(by_code),
    }


def has_findings(repairs: Document) -> bool:
    """Return True if another first step is suggested for a code."""
    return bool(repairs["suggested"])


def remedy(cleared_by: str | None) -> str:
    """Return the remedy (one of REMEDIES) that ended a fault, or "" if the fault did not end by a remedy."""
    return _REMEDY_BY_WORD.get((cleared_by or "").partition(" ")[0].rstrip(":"), "")


def find_repairs(faults: Iterable[Fault]) -> list[Repair]:
    """Return the repairs of all faults, ordered by cluster, node, code, subject and time."""
    by_part: dict[Part, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_part[fault.cluster, fault.node, fault.code, fault.subject].append(fault)
    found = []
    for part, part_faults in sorted(by_part.items()):
        begins = sorted(fault.first_time for fault in part_faults)
        for fault in sorted(part_faults, key=lambda fault: (fault.first_time, fault.cleared_time or 0)):
            name = remedy(fault.cleared_by)
            if fault.cleared_time is None or not name:
                continue
            later = bisect_right(begins, fault.cleared_time)
            returned = begins[later] - fault.cleared_time if later < len(begins) else None
            found.append(Repair(part[0], part[1], part[2], name, fault.cleared_time, returned))
    return found


def seconds_out(found: Sequence[Repair], outages: Iterable[Outage]) -> list[int | None]:
    """Return, for each repair, the duration of the outage in which it ended the fault.

    None: the node was not out of service then, or is still out.
    """
    by_node: dict[Node, list[Outage]] = defaultdict(list)
    for outage in outages:
        by_node[outage.cluster, outage.node].append(outage)
    starts = {node: [outage.start_time for outage in node_outages] for node, node_outages in by_node.items()}
    times: list[int | None] = []
    for repair in found:
        node = (repair.cluster, repair.node)
        position = bisect_right(starts.get(node, []), repair.ended_at) - 1
        start, end = by_node[node][position][2:4] if position >= 0 else (0, None)
        times.append(end - start if end is not None and end >= repair.ended_at else None)
    return times


def summary(found: Sequence[Repair], out_seconds: Iterable[int | None], to_time: int) -> Row:
    """Return the counts for these repairs. A share and its interval are None if there are no cases."""
    known = sorted(seconds for seconds in out_seconds if seconds is not None)
    lasting = {}
    for days in LASTING_DAYS:
        followed = [repair for repair in found if repair.ended_at + days * DAY <= to_time]
        lasted = sum(r.returned_after is None or r.returned_after > days * DAY for r in followed)
        lasting[f"lasted_{days}_days"] = {
            "repairs": len(followed),
            "lasted": lasted,
            "share": lasted / len(followed) if followed else None,
            "interval": wilson(lasted, len(followed)),
        }
    return {
        "repairs": len(found),
        "nodes": len({(repair.cluster, repair.node) for repair in found}),
        **lasting,
        "out_seconds": {"cases": len(known), "median": quantile(known, 0.5), "p90": quantile(known, 0.9)},
    }


def suggested_steps(by_code: Iterable[Row]) -> dict[str, str]:
    """Return the step to begin with for each code whose first step fails too often.

    The first step of a code is a GPU reset if any of its faults ended with one, otherwise a reboot. A later step never
    counts against the first: it is taken only for faults that the first step did not end. If the next step fails too
    often as well, a person is suggested.
    """
    steps: dict[str, dict[str, bool]] = defaultdict(dict)
    for row in by_code:
        if row["remedy"] in _NEXT_STEP:
            steps[row["code"]][row["remedy"]] = _fails_too_often(row["lasted_7_days"])
    found = {}
    for code, failing in sorted(steps.items()):
        step = next(name for name in _NEXT_STEP if name in failing)
        if failing[step]:
            while failing.get(step):
                step = _NEXT_STEP[step]
            found[code] = step
    return found


def _fails_too_often(lasted: Row) -> bool:
    interval = lasted["interval"]
    return lasted["repairs"] >= MIN_REPAIRS and interval is not None and bool(interval[1] < MIN_SHARE)


def _notes(found: Sequence[Repair], to_time: int) -> list[str]:
    recent = sum(repair.ended_at + LASTING_DAYS[0] * DAY > to_time for repair in found)
    if not recent:
        return []
    return [
        f"{recent:,} of {len(found):,} repairs were made less than {LASTING_DAYS[0]} days before the period ends. "
        "They count neither as lasting nor as failed."
    ]
