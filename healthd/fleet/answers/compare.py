"""Finds significant differences between two periods, partitions, models, switches, accounts or clusters.

Each measure is a rate: an amount per exposure, on each side. Two rates differ if the interval of their ratio excludes
1. The interval would be exact if failures were independent, but real failures come in clumps: a node fails repeatedly,
   a job is requeued into the same fault, a user's script is broken. Each measure is therefore also counted for each
   node, job or user, and its effective count is reduced if these counts vary strongly (`dispersion`).

A share (of jobs, of time) is not a count per exposure: a share of 90 % of 3,000 jobs is known far more precisely than a
rate from 2,700 events.

Among many measures, some differ by chance. Holm's method limits the probability of any false difference to `LEVEL`.
"""

from __future__ import annotations

import calendar
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from scipy import stats

from healthd.common.text import regex
from healthd.fleet.answers import document
from healthd.fleet.answers.document import Document, WrongChoice, share
from healthd.fleet.answers.evidence import completed_checks
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.intervals import (
    poisson_interval,
    rate_ratio_interval,
    rate_ratio_p_value,
    share_ratio_interval,
    share_ratio_p_value,
)
from healthd.fleet.statistics.multiplicity import holm
from healthd.fleet.statistics.wilson import wilson
from healthd.fleet.times import TimeError, parse_seconds

LEVEL = 0.05
LARGE_GPUS = 128  # same as in the answer `rate`
MIN_EVENTS = 5  # if both sides together have fewer events, a code cannot show a difference
CHOICE_KEYS = ("cluster", "partition", "account", "model", "switch")


@dataclass(frozen=True, slots=True)
class Units:
    """Amounts and exposures by unit (a node, a job, a day, a user), in the same order.

    If the exposure of single units is unknown, all exposures are 0, and the spread is computed from the amounts alone
    (compound Poisson).
    """

    amounts: Sequence[float]
    exposures: Sequence[float]


@dataclass(frozen=True, slots=True)
class Measure:
    """A rate on one side.

    Attributes:
        name: "r_f", "code gpu_xid/79".
        unit: unit of the rate; "of all" means a share.
        per: amount of exposure in the rate's unit, such as 1000 (node-days); 1 for a share.
        groupings: the same amount, grouped by different units; the grouping with the largest spread counts.
    """

    name: str
    title: str
    unit: str
    per: float
    amount: float
    exposure: float
    groupings: tuple[Units, ...]

    @property
    def is_share(self) -> bool:
        return self.per == 1


@dataclass(frozen=True, slots=True)
class Side:
    name: str
    from_time: int
    to_time: int
    chosen: dict[str, str]
    measures: tuple[Measure, ...]
    notes: tuple[str, ...]
    completed_node_days: dict[
        str, int
    ]  # for each check, the node-days on which it completed; empty if the store has no record of completed checks
    nodes: frozenset[tuple[str, str]] = frozenset()  # (cluster, node) for each chosen node


# --- rows of the store


class FailedJob(NamedTuple):
    """A row returned by compare_failed.sql."""

    cluster: str
    job_id: int | None
    large: bool
    node: str | None
    lost: float


class NodeDays(NamedTuple):
    """A row returned by compare_node_days.sql."""

    days: float


class EndedJobs(NamedTuple):
    """A row returned by compare_by_day.sql or compare_by_user.sql."""

    unit: str
    jobs: int
    completed: int
    failed: int
    node_fail: int
    preempted: int
    timeout: int
    gpu_hours: float


class Node(NamedTuple):
    """A row returned by compare_nodes.sql."""

    cluster: str
    node: str
    out_days: float
    known_days: float
    observed_days: float


class Code(NamedTuple):
    """A row returned by compare_codes.sql."""

    code: str
    cluster: str
    node: str
    times: int


def compare(a: Study, b: Study, name_a: str = "A", name_b: str = "B") -> Document:
    """Return the document for `healthd fleet compare`: each measure with both rates, the ratio B / A and its interval.

    Raises Unanswerable if the store has neither jobs nor events for one of the sides.
    """
    return compare_sides(measure_side(a, name_a), measure_side(b, name_b))


def measure_side(study: Study, name: str) -> Side:
    """Return all measures for one side. Raises Unanswerable if the store has no data for it."""
    if not study.has_rows("events"):
        study.require("jobs")
    measures: list[Measure] = []
    if study.has_rows("jobs"):
        (large,) = study.query("compare_node_days", NodeDays)
        by_unit = [study.query(name, EndedJobs) for name in ("compare_by_day", "compare_by_user")]
        measures += job_measures(study.query("compare_failed", FailedJob), large.days, by_unit)
    nodes = study.query("compare_nodes", Node)
    measures += node_measures(nodes, study.query("compare_codes", Code))
    return Side(
        name,
        study.from_time,
        study.to_time,
        {key: value for key, value in study.choice.as_dict.items() if value},
        tuple(measures),
        tuple(study.coverage_notes("jobs", "events")),
        {check: completed.node_days for check, completed in completed_checks(study).items()},
        frozenset((row.cluster, row.node) for row in nodes),
    )


def job_measures(
    failed: Sequence[FailedJob], node_days: float, by_unit: Sequence[Sequence[EndedJobs]]
) -> list[Measure]:
    """Return r_f, the share of each job state, and the GPU time lost to failures.

    r_f is defined in section III of Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680). Lost time means first-order
    losses as in their section III.D, min(runtime, 30 min) x GPUs for each job that a node ended. `hardware_ends`
    defines these jobs.
    """
    large = [row for row in failed if row.large]
    gpu_hours = math.fsum(row.gpu_hours for row in by_unit[0]) if by_unit else 0.0
    ended = sum(row.jobs for row in by_unit[0]) if by_unit else 0
    measures = [
        Measure(
            "r_f",
            f"failures of jobs > {LARGE_GPUS} GPUs (r_f)",
            "per 1000 node-days",
            1000.0,
            len(large),
            node_days,
            _failure_groupings(large, [1.0] * len(large)),
        ),
        Measure(
            "lost_gpu_time",
            "GPU time lost to node failures",
            "of all",
            1.0,
            math.fsum(row.lost for row in failed),
            gpu_hours,
            _failure_groupings(failed, [row.lost for row in failed]),
        ),
    ]
    for state in ("completed", "failed", "node_fail", "preempted", "timeout"):
        measures.append(
            Measure(
                state,
                f"jobs that ended {state.upper()}",
                "of all",
                1.0,
                sum(getattr(row, state) for row in by_unit[0]) if by_unit else 0,
                ended,
                tuple(Units([getattr(row, state) for row in rows], [row.jobs for row in rows]) for rows in by_unit),
            )
        )
    return measures


def _failure_groupings(failed: Sequence[FailedJob], amounts: Sequence[float]) -> tuple[Units, ...]:
    """Group failures by job (including its requeues) and, if the nodes are known, by node."""
    by_job: dict[Any, float] = {}
    by_node: dict[Any, float] = {}
    for index, (row, amount) in enumerate(zip(failed, amounts, strict=True)):
        job = (row.cluster, row.job_id if row.job_id is not None else f"row {index}")
        node = job if row.node is None else (row.cluster, row.node)
        by_job[job] = by_job.get(job, 0.0) + amount
        by_node[node] = by_node.get(node, 0.0) + amount
    return tuple(
        Units(list(amounts_by_key.values()), [0.0] * len(amounts_by_key)) for amounts_by_key in (by_job, by_node)
    )


def node_measures(nodes: Sequence[Node], codes: Sequence[Code]) -> list[Measure]:
    """Return the share of the known time that nodes were out of service, and the rate of each draining code."""
    out_days, known_days = [row.out_days for row in nodes], [row.known_days for row in nodes]
    measures = [
        Measure(
            "unavailable",
            "nodes' time out of service",
            "of all",
            1.0,
            math.fsum(out_days),
            math.fsum(known_days),
            (Units(out_days, known_days),),
        )
    ]
    observed = [row.observed_days for row in nodes]
    for code in ("", *sorted({row.code for row in codes})):
        sighting_counts = Counter[tuple[str, str]]()
        for row in codes:
            if code in ("", row.code):
                sighting_counts[row.cluster, row.node] += row.times
        counts = [sighting_counts[row.cluster, row.node] for row in nodes]
        measures.append(
            Measure(
                f"code {code}" if code else "all_codes",
                code or "all that drains",
                "per 1000 observed node-days",
                1000.0,
                sum(counts),
                math.fsum(observed),
                (Units(counts, observed),),
            )
        )
    return measures


# --- the comparison


def compare_sides(a: Side, b: Side) -> Document:
    """Compare two sides.

    If a code is missing on one side, it counts as 0 there, with the exposure of that side's other codes.
    """
    uneven_checks = unevenly_deployed_checks(a, b)
    rows = [
        ratio_row(measure_a, measure_b)
        for measure_a, measure_b in pair_measures(
            without_checks(a.measures, uneven_checks), without_checks(b.measures, uneven_checks)
        )
    ]
    tested_rows_indices = tested_indices(rows)
    adjusted = dict(zip(tested_rows_indices, holm([rows[at]["p_value"] for at in tested_rows_indices]), strict=True))
    tested_rows = [
        {**row, "adjusted": adjusted.get(at), "differs": adjusted.get(at, 1.0) < LEVEL} for at, row in enumerate(rows)
    ]
    notes = [*(f"{a.name}: {note}" for note in a.notes), *(f"{b.name}: {note}" for note in b.notes)]
    if uneven_checks:
        notes.append(
            f"Not compared, because the check ran on one side only, or rarely: {', '.join(sorted(uneven_checks))}. A "
            "check that was added between the two sides would make its findings seem to increase."
        )
    notes += overlap_notes(a, b)
    return {
        **document.head(
            "compare",
            min(a.from_time, b.from_time),
            max(a.to_time, b.to_time),
            a.chosen if a.chosen == b.chosen else {},
            notes,
        ),
        "a": _side_row(a),
        "b": _side_row(b),
        "level": LEVEL,
        "measures": sorted(tested_rows, key=_sort_key),
    }


def _sort_key(row: Row) -> tuple[bool, float, float, str]:
    """Return a sort key. The smallest adjusted p-value comes first, and untested measures come last."""
    untested = row["adjusted"] is None
    return untested, 1.0 if untested else row["adjusted"], row["p_value"], row["measure"]


def tested_indices(rows: Sequence[Row]) -> list[int]:
    """Return the indices of the measures to test.

    With each additional test, a difference must be clearer to be significant. Measures that cannot differ are therefore
    not tested:
    - neither side has an event;
    - all jobs of both sides are affected;
    - one side has no exposure.

    This depends only on the sums over both sides, so it neither hides nor creates a finding (Tarone, Biometrics 46,
    1990). The sum of all codes is not tested if at least one single code is tested.
    """
    testable = [index for index, row in enumerate(rows) if row["interval"] is not None]
    codes = any(rows[index]["measure"].startswith("code ") for index in testable)
    return [index for index in testable if not (codes and rows[index]["measure"] == "all_codes")]


def overlap_notes(a: Side, b: Side) -> list[str]:
    """Return notes about data that is counted on both sides."""
    if max(a.from_time, b.from_time) >= min(a.to_time, b.to_time):
        return []
    if a.chosen == b.chosen:
        return ["The two periods overlap: the time in both periods counts on both sides and hides differences."]
    if nodes := len(a.nodes & b.nodes):
        return [
            f"{nodes} of the {len(a.nodes | b.nodes)} nodes are on both sides: the events of these nodes count on "
            "both sides and hide differences."
        ]
    return []


def unevenly_deployed_checks(a: Side, b: Side) -> set[str]:
    """Return the checks whose share of completed node-days is, on one side, less than half of the other side's.

    The set is empty if one side has no record of completed checks.
    """
    if not a.completed_node_days or not b.completed_node_days:
        return set()
    max_a, max_b = max(a.completed_node_days.values()), max(b.completed_node_days.values())
    uneven = set()
    for check in {*a.completed_node_days, *b.completed_node_days}:
        shares = sorted((a.completed_node_days.get(check, 0) / max_a, b.completed_node_days.get(check, 0) / max_b))
        if 2 * shares[0] < shares[1]:
            uneven.add(check)
    return uneven


def without_checks(measures: Sequence[Measure], checks: Collection[str]) -> list[Measure]:
    """Remove the codes of these checks from the measures, and also from the sum of all codes."""
    remaining = [measure for measure in measures if _check_name(measure.name) not in checks]
    removed = [measure for measure in measures if _check_name(measure.name) in checks]
    for index, measure in enumerate(remaining):
        if measure.name == "all_codes" and removed:
            (units,) = measure.groupings
            columns = zip(
                units.amounts, *(removed_measure.groupings[0].amounts for removed_measure in removed), strict=True
            )
            amounts = [amount - math.fsum(subtracted) for amount, *subtracted in columns]
            remaining[index] = replace(measure, amount=math.fsum(amounts), groupings=(Units(amounts, units.exposures),))
    return remaining


def _check_name(name: str) -> str:
    """Return the check's name for a measure named "code CHECK/NAME", or "" for any other measure."""
    return name.removeprefix("code ").partition("/")[0] if name.startswith("code ") else ""


def _side_row(side: Side) -> Row:
    return {"name": side.name, "from_time": side.from_time, "to_time": side.to_time, "filters": side.chosen}


def pair_measures(a: Sequence[Measure], b: Sequence[Measure]) -> list[tuple[Measure, Measure]]:
    """Pair the measures of both sides by name.

    A code that occurs on only one side counts as 0 on the other, because that side's nodes were observed too. Codes
    with fewer than MIN_EVENTS events are left out.
    """
    by_name_a, by_name_b = ({measure_a.name: measure_a for measure_a in side} for side in (a, b))
    pairs = []
    for name in [*by_name_a, *(name for name in by_name_b if name not in by_name_a)]:
        measure_a, measure_b = by_name_a.get(name), by_name_b.get(name)
        if name.startswith("code "):
            measure_a, measure_b = measure_a or _zero_measure(measure_b, a), measure_b or _zero_measure(measure_a, b)
            if measure_a is not None and measure_b is not None and measure_a.amount + measure_b.amount < MIN_EVENTS:
                continue
        if measure_a is not None and measure_b is not None:
            pairs.append((measure_a, measure_b))
    return pairs


def _zero_measure(template: Measure | None, side: Sequence[Measure]) -> Measure | None:
    """Return the measure for a code that is missing on one side: amount 0, with the exposure of all codes."""
    total = next((measure for measure in side if measure.name == "all_codes"), None)
    if template is None or total is None:
        return None
    (units,) = total.groupings
    zero_units = Units([0] * len(units.amounts), units.exposures)
    return Measure(template.name, template.title, template.unit, template.per, 0.0, total.exposure, (zero_units,))


def ratio_row(a: Measure, b: Measure) -> Row:
    """Return rate B / rate A with its interval, dispersion and p-value."""
    spread = dispersion(a, b)
    counted = (b.amount, b.exposure, a.amount, a.exposure, spread)
    if a.is_share:
        interval, p_value = share_ratio_interval(*counted), share_ratio_p_value(*counted)
    else:
        interval = rate_ratio_interval(*counted[:4], dispersion=spread)
        p_value = rate_ratio_p_value(*counted)
    rate_a, rate_b = share(a.amount, a.exposure), share(b.amount, b.exposure)
    return {
        "measure": a.name,
        "title": a.title,
        "unit": a.unit,
        "per": a.per,
        "a": _rate(a, spread),
        "b": _rate(b, spread),
        "ratio": rate_b / rate_a if rate_a and rate_b is not None else None,
        "interval": None if interval is None else list(interval),
        "dispersion": spread,
        "p_value": p_value,
    }


def _rate(measure: Measure, spread: float) -> Row:
    if measure.is_share:
        interval = wilson(min(measure.amount, measure.exposure), measure.exposure, spread, 1 - LEVEL)
    else:
        interval = poisson_interval(measure.amount / spread, measure.exposure / spread)
    rate = share(measure.amount, measure.exposure)
    return {
        "amount": measure.amount,
        "exposure": measure.exposure,
        "rate": None if rate is None else measure.per * rate,
        "interval": None if interval is None else [measure.per * end for end in interval],
    }


def dispersion(a: Measure, b: Measure) -> float:
    """Return the ratio of the amounts' variance to the variance of independent events, at least 1.

    For each grouping, a unit's deviation is its amount minus the amount expected from its side's rate. The ratio is the
    sum of the squared deviations divided by the sum that independent events would have. For independent events, this
    sum is the amount or, for a share p of n, n p (1 - p). The grouping with the largest ratio is used.

    Because the ratio is estimated from few units, Student's quantile replaces the normal quantile. Source: the variance
    of a ratio of sums over clusters (Cochran, "Sampling Techniques", 1977, 6.4 and 9A). It is used as a quasi-Poisson
    dispersion (Wedderburn, Biometrika 61, 1974) or, for a share, as its design effect (Kish, "Survey Sampling", 1965).
    The widening for an estimated dispersion is healthd's own, as in `bootstrap_rate`.
    """
    largest = 1.0
    independent = math.fsum(
        side.amount * (1 - min(1.0, side.amount / side.exposure) if side.is_share and side.exposure > 0 else 1.0)
        for side in (a, b)
    )
    for grouping_a, grouping_b in zip(a.groupings, b.groupings, strict=True):
        squares, units = 0.0, 0
        for measure, grouping in ((a, grouping_a), (b, grouping_b)):
            rate = measure.amount / measure.exposure if measure.exposure > 0 else 0.0
            squares += math.fsum(
                (amount - rate * exposure) ** 2
                for amount, exposure in zip(grouping.amounts, grouping.exposures, strict=True)
            )
            units += sum(amount > 0 for amount in grouping.amounts)
        estimate = squares / independent if independent > 0 else 0.0
        quantile = 1 - LEVEL / 2
        widened = float(stats.t.ppf(quantile, max(1, units - 1)) / stats.norm.ppf(quantile)) ** 2
        largest = max(largest, estimate * widened if estimate > 1 else 1.0)
    return largest


# --- the two sides, as typed by the user

_YEAR, _MONTH, _DAY = regex(r"(\d{4})"), regex(r"(\d{4})-(\d\d)"), regex(r"(\d{4})-(\d\d)-(\d\d)")


def parse_period(text: str) -> tuple[int, int]:
    """Parse a period, "2026", "2026-03", "2026-03-05" or "FROM..TO", into [from, to).

    Times are UTC unless they have a zone.

    If TO is a year or month, the period includes it. If TO is a date or time, the period ends at that moment, as with
    --to. Raises WrongChoice.
    """
    begin, separator, end = text.partition("..")
    if not separator:
        return _parse_calendar_period(text, text)
    boundaries = _parse_boundary(begin, text, 0), _parse_boundary(end, text, 1)
    if boundaries[0] >= boundaries[1]:
        raise WrongChoice(f'"{text}": FROM is not before TO; a date as TO ends the period at the start of that day')
    return boundaries


def _parse_boundary(word: str, text: str, side: int) -> int:
    """Parse a time. If `word` is a year or month, return its beginning (side 0) or its end (side 1)."""
    if _YEAR.fullmatch(word) or _MONTH.fullmatch(word):
        return _parse_calendar_period(word, text)[side]
    try:
        epoch_seconds = parse_seconds(word, timezone.utc)
    except TimeError as error:
        raise WrongChoice(f'"{text}": {error}') from None
    if epoch_seconds is None:
        raise WrongChoice(f'"{text}" is not a period; examples: 2026-03, 2026-03-01..2026-03-15')
    return epoch_seconds


def _parse_calendar_period(word: str, text: str) -> tuple[int, int]:
    try:
        if found := _YEAR.fullmatch(word):
            begin = datetime(int(found[1]), 1, 1, tzinfo=timezone.utc)
            days = 366 if calendar.isleap(begin.year) else 365
        elif found := _MONTH.fullmatch(word):
            begin = datetime(int(found[1]), int(found[2]), 1, tzinfo=timezone.utc)
            days = calendar.monthrange(begin.year, begin.month)[1]
        elif found := _DAY.fullmatch(word):
            begin, days = datetime(int(found[1]), int(found[2]), int(found[3]), tzinfo=timezone.utc), 1
        else:
            raise WrongChoice(
                f'"{text}" is neither a period (2026-03, 2026-03-01..2026-03-15) nor one of '
                f"{', '.join(f'{key}:NAME' for key in CHOICE_KEYS)}"
            )
        return int(begin.timestamp()), int((begin + timedelta(days=days)).timestamp())
    except (ValueError, OverflowError):
        raise WrongChoice(f'"{text}" is not a date') from None


def parse_choice(text: str) -> tuple[str, str] | None:
    """Return ("partition", "train") for "partition:train", or None if the text is a period instead."""
    key, colon, name = text.partition(":")
    return (key, name) if colon and key in CHOICE_KEYS and name else None


def has_findings(compare: Document) -> bool:
    return any(row["differs"] for row in compare["measures"])
