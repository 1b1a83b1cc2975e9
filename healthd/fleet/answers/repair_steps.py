"""Counts the repair steps that healthd took itself (repair.mode = "act"), and how often they ended the faults for good.

An attempt is one step on one node: its stages in the event stream have the same id. It counts once the step was taken
or has failed; a step that was only claimed or refused changed nothing. A successful attempt lasts for 7 or 28 days if
none of its faults opens again on the same part of the node in that time. A failed attempt has not lasted. An attempt
that a person stopped, or whose end the store lacks, is neither. A step that could not be taken on its node is counted
separately: it changed nothing, so that it says nothing about the remedy.

A step is left out of the suggested order if it fails too often, by the same limits as for a first step (repairs.py).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from healthd.fleet.answers.study import Row
from healthd.fleet.statistics.wilson import wilson

LADDER = ("gpu_reset", "reboot", "power_cycle")
DEFAULT_ORDER = LADDER[:2]  # repair.order; a site must allow a power cycle
DAY = 86400
_TRIED = frozenset({"taken", "failed", "succeeded"})
_ENDS = ("succeeded", "failed", "stopped")
IMPOSSIBLE = "impossible"  # end of a step that could not be taken


class StepEvent(NamedTuple):
    """A row returned by repairs_steps.sql. `rest` has the other fields of the event as JSON."""

    cluster: str
    node: str
    time: int
    stage: str
    rest: str


class Attempt(NamedTuple):
    """One step on one node.

    Attributes:
        causes: the faults that the step should end, as (code, part).
        end: succeeded, failed, stopped or impossible; "" if the store has no end.
        ended_at: time of the end, or of the last stage.
    """

    cluster: str
    node: str
    step: str
    causes: tuple[tuple[str, str], ...]
    began: int
    end: str
    ended_at: int


class GaveUp(NamedTuple):
    """A repair whose last step failed, so that a person had to act."""

    time: int
    codes: tuple[str, ...]


class StepHistory(NamedTuple):
    """All attempts, the repairs that were given up, and the times of refused steps.

    Attributes:
        impossible: the steps that could not be taken.
    """

    attempts: list[Attempt]
    impossible: list[Attempt]
    gave_up: list[GaveUp]
    refused: list[int]

    def within(self, from_time: int, to_time: int) -> StepHistory:
        """Return what began in this period."""
        return StepHistory(
            [attempt for attempt in self.attempts if from_time <= attempt.began < to_time],
            [attempt for attempt in self.impossible if from_time <= attempt.began < to_time],
            [end for end in self.gave_up if from_time <= end.time < to_time],
            [time for time in self.refused if from_time <= time < to_time],
        )


def read_steps(events: Iterable[StepEvent]) -> StepHistory:
    """Return the history of the stages, which are in the order of time."""
    by_id: dict[tuple[str, str, str], list[tuple[StepEvent, Row]]] = defaultdict(list)
    left_out, gave_up, refused = [], [], []
    for event in events:
        fields = _fields(event.rest)
        if event.stage == "gave_up":
            gave_up.append(GaveUp(event.time, tuple(sorted({code for code, _ in _causes(fields)}))))
        elif event.stage == "refused":
            refused.append(event.time)
        elif id := fields.get("id"):
            by_id[event.cluster, event.node, str(id)].append((event, fields))
        elif fields.get("was_taken") is False:  # the step was left out before its claim
            left_out.append([(event, fields)])
    found = [attempt for stages in (*by_id.values(), *left_out) if (attempt := _attempt(stages)) is not None]
    attempts = [attempt for attempt in found if attempt.end != IMPOSSIBLE]
    impossible = [attempt for attempt in found if attempt.end == IMPOSSIBLE]
    return StepHistory(attempts, impossible, gave_up, refused)


def _fields(rest: str) -> Row:
    try:
        found = json.loads(rest or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _causes(fields: Row) -> tuple[tuple[str, str], ...]:
    texts = fields.get("causes")
    words = [str(text).partition(" ") for text in texts] if isinstance(texts, list) else []
    return tuple(dict.fromkeys((code, part) for code, _, part in words))


def _attempt(stages: Sequence[tuple[StepEvent, Row]]) -> Attempt | None:
    """Return the attempt, or None if nothing was done."""
    if _TRIED.isdisjoint(event.stage for event, _ in stages):
        return None
    first, fields = stages[0]
    ends = [stage for stage in stages if stage[0].stage in _ENDS]
    last, last_fields = ends[-1] if ends else stages[-1]
    end = last.stage if ends else ""
    if end == "failed" and last_fields.get("was_taken") is False:
        end = IMPOSSIBLE
    return Attempt(first.cluster, first.node, str(fields.get("step", "")), _causes(fields), first.time, end, last.time)


def lasts(
    attempt: Attempt, days: int, began_by_part: Mapping[tuple[str, str, str, str], Sequence[int]], until: int
) -> bool | None:
    """Return True if the attempt lasted for these days, False if it failed or a fault returned, None if it is unknown.

    Args:
        began_by_part: the times at which faults began, in order, by cluster, node, code and part.
        until: how long the node was observed.
    """
    if attempt.end != "succeeded":
        return False if attempt.end == "failed" else None
    for code, part in attempt.causes:
        times = began_by_part.get((attempt.cluster, attempt.node, code, part), ())
        position = bisect_right(times, attempt.ended_at)
        if position < len(times) and times[position] - attempt.ended_at <= days * DAY:
            return False
    return True if attempt.ended_at + days * DAY <= until else None


def rows(
    history: StepHistory,
    keys: Callable[[Attempt], Iterable[tuple[str, ...]]],
    names: tuple[str, ...],
    lasting: Callable[[Attempt, int], bool | None],
    out_seconds: Callable[[Sequence[Attempt]], Row],
    lasting_days: Sequence[int],
) -> list[Row]:
    """Return one row for each key, those with the most attempts first."""
    groups: dict[tuple[str, ...], list[Attempt]] = defaultdict(list)
    impossible: Counter[tuple[str, ...]] = Counter()
    for attempt in history.attempts:
        for key in keys(attempt):
            groups[key].append(attempt)
    for attempt in history.impossible:
        impossible.update(keys(attempt))
    found = []
    for key in sorted({*groups, *impossible}):
        group = groups[key]
        ends = Counter(attempt.end for attempt in group)
        row: Row = {
            **dict(zip(names, key, strict=True)),
            "attempts": len(group),
            "nodes": len({(attempt.cluster, attempt.node) for attempt in group}),
            **{end: ends[end] for end in _ENDS},
            IMPOSSIBLE: impossible[key],
            "unknown": ends[""],
        }
        for days in lasting_days:
            followed = [case for attempt in group if (case := lasting(attempt, days)) is not None]
            row[f"lasted_{days}_days"] = {
                "attempts": len(followed),
                "lasted": sum(followed),
                "share": sum(followed) / len(followed) if followed else None,
                "interval": wilson(sum(followed), len(followed)),
            }
        found.append({**row, "out_seconds": out_seconds(group)})
    return sorted(found, key=lambda row: -row["attempts"])


def suggested_order(tried: Collection[str], failing: Collection[str]) -> list[str]:
    """Return the steps for repair.order: the default ones, and a power cycle that was tried, without failing steps."""
    allowed = {*DEFAULT_ORDER, *tried}
    return [step for step in LADDER if step in allowed and step not in failing]


def codes_given_up(gave_up: Iterable[GaveUp]) -> dict[str, int]:
    """Return the number of repairs that were given up for each code, the most frequent first."""
    counts = Counter(code for end in gave_up for code in end.codes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
