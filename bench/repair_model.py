"""Model what repair mode "act" saves in twelve months, compared with people who repair each drained node.

    .venv/bin/python bench/repair_model.py [--nodes 500] [--seed 1] [--max-concurrent 1]

The faults are those of bench/history (arXiv 2410.21680: 6.5 failures per 1,000 node-days, lemons, a faulty driver, a
leaf switch), as far as healthd detects and drains them, and its false alarms. healthd's own ladder chooses each step.
A node that no longer answers is left out, because healthd does not run there.

Nothing public gives the success of a step by cause, so there are two models:

few    32 % of the faults of GPUs end with a step. Crusoe counted 19.5 % recoverable faults of GPUs and 41.5 % replaced
       hosts on H200 (GTC 2025, as quoted at glennklockwood.com/garden/component-reliability): 19.5 / 61.0.
many   65 % end with a step, the share of repairs that are only a reboot in bench/history (an assumption).

SUCCESS divides each share among causes and steps; these numbers, all durations and RELAPSES are assumptions.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

BENCH = str(Path(__file__).resolve().parent)
if BENCH not in sys.path:
    sys.path.append(BENCH)

from history.causes import (  # noqa: E402
    BASE_RATE,
    BY_NAME,
    CAUSES,
    FALSE_ALARM,
    FALSE_ALARMS,
    LEMONS,
    REGRESSION,
    SPIKE,
    Cause,
    Sign,
)
from history.draw import Choice, Draw, stream, wait  # noqa: E402

from healthd.agent.repair.ladder import plan, step_after  # noqa: E402
from healthd.agent.reporting.fault_timeline import possible_findings  # noqa: E402
from healthd.agent.settings.config import CheckConfig  # noqa: E402
from healthd.agent.settings.registry import built_in_checks, explain, remedies  # noqa: E402
from healthd.common.model import Condition, ConditionState, RepairStep  # noqa: E402

DAY_HOURS, WEEK_HOURS = 24.0, 168.0
MONDAY_TO_FRIDAY, OFFICE_FROM, OFFICE_UNTIL = 5, 9.0, 17.0
RESET, REBOOT, POWER_CYCLE, PERSON = RepairStep
ORDER = (RESET, REBOOT, POWER_CYCLE)
GPU_CAUSES = ("gpu_memory", "pcie", "gpu_lost", "nvlink", "gsp")
# Relative chance that a cause has ended after a step or a later one. `scaled` makes them shares. A reset makes a row
# remapping take effect; a faulty driver's state ends with the boot; a lost GPU often needs its power cut (Xid 79).
SUCCESS: Mapping[str, Mapping[RepairStep, float]] = {
    "gpu_memory": {RESET: 0.60, REBOOT: 0.65, POWER_CYCLE: 0.65},
    "pcie": {REBOOT: 0.45, POWER_CYCLE: 0.60},
    "gpu_lost": {REBOOT: 0.45, POWER_CYCLE: 0.65},
    "nvlink": {RESET: 0.50, REBOOT: 0.60, POWER_CYCLE: 0.65},
    "gsp": {RESET: 0.60, REBOOT: 0.90, POWER_CYCLE: 0.95},
    "disk": {REBOOT: 0.30, POWER_CYCLE: 0.45},
    "memory": {REBOOT: 0.70, POWER_CYCLE: 0.70},
    # Two of three false alarms end with the boot that a measurement repeats; the others return until a person acts.
    "false_alarm": {REBOOT: 0.67, POWER_CYCLE: 0.67},
}
SHARES = {"few": 19.5 / 61.0, "many": 0.65}
STEP_HOURS = {RESET: 0.1, REBOOT: 0.25, POWER_CYCLE: 0.3}
VERIFY_HOURS = 0.25  # all checks, and healthd validate --quick (at most 30 s)
PREPARE_HOURS = 0.1  # evidence, claim and requirements
RESPONSE_HOURS = 0.5  # from the alert, or the beginning of the shift, to the first command
DIAGNOSIS_HOURS = 0.5
QUICK_SHARE, QUICK_HOURS = 0.65, 1.0  # a person ends these faults without a part: a cable, a mount (bench/history)
PART_HOURS = (4.0, 96.0)  # bench/history: 4 hours to 4 days
FALSE_PART_HOURS = 1.0  # a person finds that nothing is broken
RELAPSES = 0.1  # share of the ended faults that return
RELAPSE_HOURS = 168.0  # within healthd's RELAPSE_SECONDS


class Fault(NamedTuple):
    """A fault that drains a node.

    at     hours since the beginning, a Monday 0:00
    step   the first step of healthd's ladder
    luck   the same number decides in each policy whether a step ends the fault
    part_hours  time until a person has ended it without the help of a step
    returns_after  hours after a successful step until the fault returns, or None
    """

    at: float
    node: int
    cause: str
    step: RepairStep
    luck: float
    part_hours: float
    returns_after: float | None = None


@dataclass(slots=True)
class Result:
    """The year under one policy.

    hours         node-hours out of service
    steps         number of steps that healthd took
    alone         faults that ended without a person
    for_nothing   steps of healthd on nodes without a fault
    """

    hours: float = 0.0
    false_hours: float = 0.0
    steps: int = 0
    alone: int = 0
    for_nothing: int = 0
    outages: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


# --- the faults


def first_step(codes: Iterable[str]) -> RepairStep:
    """Return the first step of healthd's ladder for a node with these faults."""
    checks = built_in_checks()
    conditions = [_condition(code) for code in codes]
    found = plan(conditions, (), remedies(checks, (c.code for c in conditions)), ORDER, {})
    return found.step if found else PERSON


def _condition(code: str) -> Condition:
    checks = built_in_checks()
    text = explain(checks, code)
    assert text is not None, code
    finding = possible_findings(code, text, CheckConfig())[0]
    check = code.partition("/")[0]
    return Condition(
        *(check, "", code, "0000:1b:00.0", finding.severity, "", finding.clears, ConditionState.OPEN, 0.0, 0.0, 1, ""),
        window_seconds=finding.window_seconds,
        shared_cause=finding.shared_cause,
    )


class Year:
    """Draws the faults of a cluster, with the rates of bench/history."""

    def __init__(self, nodes: int, days: int, seed: int) -> None:
        self._nodes, self._hours = nodes, days * DAY_HOURS
        self._when, self._what, self._repair = (stream(seed, name) for name in ("when", "what", "repair"))
        self._lemon = stream(seed, "lemons")
        self._causes = Choice([(cause, cause.share) for cause in CAUSES])
        self._steps: dict[tuple[str, ...], RepairStep] = {}

    def faults(self) -> list[Fault]:
        hourly = BASE_RATE / DAY_HOURS
        found = list(self._drawn(hourly * self._nodes, 0.0, self._hours, None, None))
        for _ in range(max(1, round(LEMONS * self._nodes))):
            factor = 5 + 15 * self._lemon()  # as in bench/history/size.py
            found += self._drawn(hourly * (factor - 1), 0.0, self._hours, None, self._random_node(self._lemon))
        start, end, name, times = REGRESSION
        more = hourly * BY_NAME[name].share * (times - 1) * self._nodes
        found += self._drawn(more, start * self._hours, end * self._hours, BY_NAME[name], None)
        start, end, name, a_day, spike_nodes = SPIKE
        for node in range(min(spike_nodes, self._nodes)):
            found += self._drawn(a_day / DAY_HOURS, start * self._hours, end * self._hours, BY_NAME[name], node)
        for at in _moments(self._when, FALSE_ALARMS / DAY_HOURS * self._nodes, 0.0, self._hours):
            found.append(self._fault(at, self._random_node(self._what), "false_alarm", (FALSE_ALARM,)))
        return sorted(found)

    def _random_node(self, draw: Draw) -> int:
        return int(draw() * self._nodes)

    def _drawn(self, hourly: float, start: float, end: float, cause: Cause | None, node: int | None) -> Iterator[Fault]:
        for at in _moments(self._when, hourly, start, end):
            what: Cause = cause or self._causes.at(self._what())  # type: ignore[assignment]
            effect = Choice(what.effects).at(self._what())
            share = self._what()
            signs = tuple(s for s in what.signs if share < s.chance and s.severity in ("degraded", "critical"))
            where = self._random_node(self._what) if node is None else node
            if signs and effect != "node_fail":
                yield self._fault(at, where, what.name, signs)

    def _fault(self, at: float, node: int, cause: str, signs: Sequence[Sign]) -> Fault:
        draw = self._repair
        codes = tuple(dict.fromkeys(sign.code for sign in signs))
        if codes not in self._steps:
            self._steps[codes] = first_step(codes)
        step, luck, is_quick, part, returns, after = (self._steps[codes], *(draw() for _ in range(5)))
        hours = PART_HOURS[0] + part * (PART_HOURS[1] - PART_HOURS[0])
        if cause == "false_alarm":
            hours = FALSE_PART_HOURS
        elif step is PERSON and is_quick < QUICK_SHARE:
            hours = QUICK_HOURS
        return Fault(at, node, cause, step, luck, hours, after * RELAPSE_HOURS if returns < RELAPSES else None)


def _moments(draw: Draw, hourly: float, start: float, end: float) -> Iterator[float]:
    """Yield the times of a Poisson process with this rate (hours)."""
    at = start + wait(draw, 1 / hourly)
    while at < end:
        yield at
        at += wait(draw, 1 / hourly)


# --- success of a step


def scaled(share: float, faults: Sequence[Fault]) -> dict[str, dict[RepairStep, float]]:
    """Return SUCCESS, scaled so that this share of the GPUs' faults ends with a step. A chance is at most 1.

    False alarms are left as they are: no hardware decides about them.
    """
    counted = [fault.cause for fault in faults if fault.cause in GPU_CAUSES]
    all_steps = sum(SUCCESS[cause][POWER_CYCLE] for cause in counted)
    factor = share * len(counted) / all_steps if counted else 1.0
    return {
        cause: {step: min(1.0, chance * (1.0 if cause == "false_alarm" else factor)) for step, chance in steps.items()}
        for cause, steps in SUCCESS.items()
    }


# --- people


def office_hours(at: float) -> float:
    """Return the first moment of an office hour from `at` on: Monday to Friday, 9:00 to 17:00."""
    day, hour = divmod(at, DAY_HOURS)
    weekday = int(day) % 7
    if weekday < MONDAY_TO_FRIDAY and hour < OFFICE_UNTIL:
        return max(at, day * DAY_HOURS + OFFICE_FROM)
    days = 1 if weekday < MONDAY_TO_FRIDAY - 1 else 7 - weekday
    return (day + days) * DAY_HOURS + OFFICE_FROM


def person_starts(at: float, shift: str) -> float:
    """Return when a person begins to work on a node that needs them from `at` on. `shift` is "24x7" or "8x5"."""
    if shift == "24x7":
        return at + RESPONSE_HOURS
    start = office_hours(at)
    response_end = start + RESPONSE_HOURS
    closes = start // DAY_HOURS * DAY_HOURS + OFFICE_UNTIL
    return response_end if response_end <= closes else office_hours(closes) + response_end - closes


# --- the two policies


def steps_from(step: RepairStep, order: Sequence[RepairStep]) -> Iterator[RepairStep]:
    """Yield this step and those after it that the order has, without the person."""
    while step is not PERSON:
        if step in order:
            yield step
        step = step_after(step, order)


def by_people(faults: Iterable[Fault], shift: str, success: Mapping[str, Mapping[RepairStep, float]]) -> Result:
    """Return the year if people take all steps, also the power cycle."""
    result = Result()
    waiting = [*faults]
    heapq.heapify(waiting)
    while waiting:
        fault = heapq.heappop(waiting)
        now = person_starts(fault.at, shift) + DIAGNOSIS_HOURS
        for step in steps_from(fault.step, ORDER):
            now += STEP_HOURS[step] + VERIFY_HOURS
            if fault.luck < success[fault.cause].get(step, 0.0):
                _returned(waiting, fault, now, step, success)
                break
        else:
            now += fault.part_hours
        _add_outage(result, fault, now)
    return _with_hours(result)


def by_healthd(
    faults: Iterable[Fault],
    shift: str,
    success: Mapping[str, Mapping[RepairStep, float]],
    order: Sequence[RepairStep],
    max_concurrent: int,
) -> Result:
    """Return the year in mode "act". A person acts after the last step of `order`, and if no step applies."""
    result = Result()
    waiting = [*faults]
    heapq.heapify(waiting)
    slots = [0.0] * max_concurrent  # when each repair ends
    while waiting:
        fault = heapq.heappop(waiting)
        now, is_over = fault.at, False
        steps = list(steps_from(fault.step, order))
        if steps:
            now = max(now, heapq.heappop(slots)) + PREPARE_HOURS
        for step in steps:
            now += STEP_HOURS[step] + VERIFY_HOURS
            result.steps += 1
            result.for_nothing += fault.cause == "false_alarm"
            if fault.luck < success[fault.cause].get(step, 0.0):
                is_over = True
                result.alone += 1
                _returned(waiting, fault, now, step, success)
                break
        if steps:
            heapq.heappush(slots, now)
        if not is_over:
            now = person_starts(now, shift) + DIAGNOSIS_HOURS
            for step in steps_from(step_after(steps[-1], ORDER) if steps else fault.step, ORDER):
                now += STEP_HOURS[step] + VERIFY_HOURS
                if fault.luck < success[fault.cause].get(step, 0.0):
                    _returned(waiting, fault, now, step, success)
                    break
            else:
                now += fault.part_hours
        _add_outage(result, fault, now)
    return _with_hours(result)


def _returned(
    waiting: list[Fault],
    fault: Fault,
    now: float,
    step: RepairStep,
    success: Mapping[str, Mapping[RepairStep, float]],
) -> None:
    """Add the relapse of a fault that `step` ended for some days only. It needs a later step."""
    if fault.returns_after is not None:
        chance = success[fault.cause][step]
        luck = chance + (1 - chance) * fault.luck / chance  # uniform again, above the chance of this step
        later = step_after(step, ORDER)
        heapq.heappush(waiting, fault._replace(at=now + fault.returns_after, step=later, luck=luck, returns_after=None))


def _add_outage(result: Result, fault: Fault, until: float) -> None:
    result.outages[fault.node].append((fault.at, until))
    if fault.cause == "false_alarm":
        result.false_hours += until - fault.at


def _with_hours(result: Result) -> Result:
    """Return the result with its node-hours. Outages of a node that overlap count once."""
    result.hours = sum(map(union_hours, result.outages.values()))
    return result


def union_hours(intervals: Iterable[tuple[float, float]]) -> float:
    total, end = 0.0, float("-inf")
    for start, until in sorted(intervals):
        total += max(0.0, until - max(start, end))
        end = max(end, until)
    return total


# --- the table


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table. Hours are node-hours of all faults, or of the false alarms."""

    success: str
    shift: str
    order: Sequence[RepairStep]
    people: Result
    healthd: Result

    @property
    def saved(self) -> float:
        return self.people.hours - self.healthd.hours


def rows(faults: Sequence[Fault], max_concurrent: int) -> Iterator[Row]:
    for (name, share), shift in itertools.product(SHARES.items(), ("8x5", "24x7")):
        success = scaled(share, faults)
        people = by_people(faults, shift, success)
        for order in (ORDER[:2], ORDER):
            yield Row(name, shift, order, people, by_healthd(faults, shift, success, order, max_concurrent))


HEAD = ("steps work", "people", "last step", "without act", "with act", "saved", "share", "alone", "steps")
FALSE_HEAD = ("false: without act", "with act", "steps")


def table(found: Iterable[Row]) -> Iterator[str]:
    """Yield the table. `alone` are faults that ended without a person, `steps` those that healthd took."""
    lines = [(*HEAD, *FALSE_HEAD), *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cells(row: Row) -> tuple[str, ...]:
    people, healthd = row.people, row.healthd
    return (
        *(row.success, row.shift, row.order[-1].value, f"{people.hours:,.0f}", f"{healthd.hours:,.0f}"),
        *(f"{row.saved:,.0f}", f"{row.saved / people.hours:.0%}", str(healthd.alone), str(healthd.steps)),
        *(f"{people.false_hours:,.0f}", f"{healthd.false_hours:,.0f}", str(healthd.for_nothing)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Model what repair mode act saves in twelve months.")
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-concurrent", type=int, default=1)
    args = parser.parse_args()
    faults = Year(args.nodes, args.days, args.seed).faults()
    false_count = sum(fault.cause == "false_alarm" for fault in faults)
    with_step = sum(fault.step is not PERSON for fault in faults)
    print(f"{args.nodes} nodes, {args.days} days, seed {args.seed}, max_concurrent = {args.max_concurrent}")
    print(f"{len(faults)} drains, {with_step} of them with a step, {false_count} for false alarms")
    print("node-hours out of service:\n")
    print("\n".join(table(rows(faults, args.max_concurrent))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
