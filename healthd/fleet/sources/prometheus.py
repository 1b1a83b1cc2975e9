"""Reads healthd's conditions from Prometheus, VictoriaMetrics or Mimir. These conditions replace missing event streams.

For each condition, it finds the first and last scrape that showed it. Conditions between two scrapes are missing.
`step_seconds` is the distance between the queried points. The query uses `timestamp()`, which returns the times of the
scrapes. Without it, a metric repeats its value for five minutes if nothing marks its end
(https://prometheus.io/docs/prometheus/latest/querying/basics/#staleness). The query encodes the scrape time, the
severity and whether the condition is enforced in one number (QUERY), so that all three are from the same scrape.

A query may return 11,000 points per series (github.com/prometheus/prometheus, web/api/v1/api.go: "exceeded maximum
resolution of 11,000 points per timeseries"). A long period is therefore split, and split further if the server or
healthd rejects a response as too large. nocache=1 stops VictoriaMetrics from aligning the times of a query to multiples
of its step (https://docs.victoriametrics.com/#prometheus-querying-api-enhancements); Prometheus ignores it.
"""

from __future__ import annotations

import ipaddress
import json
import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from healthd.common import toml
from healthd.common.codec import ConvertError, spelling_hint
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.common import report_unknown_nodes
from healthd.fleet.sources.covered_times import format_spans, latest_end, parse_spans, uncovered_spans, without_future
from healthd.fleet.sources.prometheus_server import ResponseTooLarge, Server, ServerError, parse_server, query_server
from healthd.fleet.sources.reading import Reading
from healthd.fleet.tables import SCRAPED_CONDITIONS

if TYPE_CHECKING:
    from healthd.fleet.step import Step

# floor(time) * 8, plus 4 if enforced, plus the severity.
QUERY = (
    "floor(timestamp(healthd_condition_severity{%s})) * 8"
    " + 4 * healthd_condition_enforced{%s} + healthd_condition_severity{%s}"
)
SEVERITIES = ("info", "warning", "degraded", "critical")
MAX_POINTS = 11_000
STEP_SECONDS = 60  # Prometheus's default scrape_interval is one minute
# More recent times are not queried. Their samples may still arrive, and VictoriaMetrics repeats an older value for them
# (-search.latencyOffset, 30 s).
SETTLED_SECONDS = 60
NODE_LABELS = ("node", "nodename", "instance")

Row: TypeAlias = "tuple[str, str, str, str, str, str, int, int, int, str, int, bool]"
Series: TypeAlias = "tuple[str, str, str, str, str]"  # cluster, node, check, code, subject
QueryFunction: TypeAlias = "Callable[[str, Mapping[str, str]], Any]"


@dataclass(frozen=True, slots=True)
class ConditionSpan:
    """The time for which a condition existed, from the first scrape that showed it to the last.

    Attributes:
        last_point: the last point of a query that showed it.
        severity: the worst severity, an index of SEVERITIES.
        first_severity: severity at the first scrape.
        worst: time of the first scrape with `severity`.
        observed: True if no scrape showed it as enforced.
    """

    first: int
    last: int
    last_point: int
    severity: int
    first_severity: int
    worst: int
    observed: bool

    def row(self, series: Series, step: int) -> Row:
        worst, began = SEVERITIES[self.severity], SEVERITIES[self.first_severity]
        return (*series, worst, self.first, self.last, step, began, self.worst, self.observed)


class Point(NamedTuple):
    """A condition in one scrape."""

    scrape: int
    severity: int
    observed: bool


@dataclass
class ReadState:
    """The position up to which a server was read. `open_spans` are conditions that were open at the last point."""

    until: int
    open_spans: dict[Series, ConditionSpan] = field(default_factory=dict)

    def to_text(self, stretches: str) -> str:
        rows = [[*series, *astuple(span)] for series, span in self.open_spans.items()]
        return json.dumps([self.until, rows, stretches])

    @staticmethod
    def from_text(text: str) -> tuple[ReadState, str]:
        """Return the state and the text of the spans that were read."""
        until, standing, stretches = json.loads(text)
        return ReadState(until, dict(map(_parse_span, standing))), stretches


def _parse_span(row: list[Any]) -> tuple[Series, ConditionSpan]:
    cluster, node, check, code, subject, *more = row
    return (cluster, node, check, code, subject), ConditionSpan(*more)


def query_ranges(from_time: int, to_time: int, step: int, points: int = MAX_POINTS) -> Iterator[tuple[int, int]]:
    """Yield the first and last point for each query.

    Together, the queries contain each point from from_time to to_time, `step` seconds apart, exactly once.
    """
    first = from_time
    while first <= to_time:
        last = min(first + (points - 1) * step, first + (to_time - first) // step * step)
        yield first, last
        first = last + step


def read(
    query_function: QueryFunction,
    previous: ReadState | None,
    from_time: int,
    to_time: int,
    reading: Reading,
    step: int = STEP_SECONDS,
    matchers: str = "",
) -> Iterator[tuple[list[Row], ReadState]]:
    """Yield the rows in pieces. Each piece comes with the state after it.

    A condition that is still open at the end also has a row. A later read replaces this row, because the new row has
    the same first_time. Raises ServerError.

    Args:
        query_function: (path, parameters) -> data.
        matchers: selects series, for example 'job="healthd"'.
    """
    state = previous or ReadState(from_time - step)
    query = QUERY.replace("%s", matchers)
    points = MAX_POINTS
    while state.until + step <= to_time:
        first, last = next(query_ranges(state.until + step, to_time, step, points))
        parameters = {"query": query, "start": str(first), "end": str(last), "step": str(step), "nocache": "1"}
        try:
            data = query_function("query_range", parameters)
        except ResponseTooLarge:
            if last == first:
                raise
            points = max(1, ((last - first) // step + 1) // 2)
            continue
        rows, open_spans = merge_points(_matrix(data), state.open_spans, last, step, reading)
        state = ReadState(last, open_spans)
        yield rows, state


def merge_points(
    matrix: Sequence[Any],
    open_spans: Mapping[Series, ConditionSpan],
    last_point: int,
    step: int,
    reading: Reading,
) -> tuple[list[Row], dict[Series, ConditionSpan]]:
    """Return all spans that a piece extends, and the spans that are still open at its last point.

    A span ends at a query point that lacks the condition. If a condition has several series, for example because it
    became worse or another job scraped it, the series are joined.
    """
    points_by_series: dict[Series, dict[int, Point]] = {}
    for number, result in enumerate(matrix, 1):
        try:
            labels, values = result["metric"], result["values"]
            series = parse_series(labels, reading)
            new_points = {_whole_seconds(at): _point(_whole_seconds(value)) for at, value in values}
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            reading.unread(number, f"invalid series: {str(error)[:100]}")
            continue
        points = points_by_series.setdefault(series, {})
        for at, point in new_points.items():
            points[at] = _merge_points(point, points.get(at, point))
    rows: list[Row] = []
    still_open: dict[Series, ConditionSpan] = {}
    for series, points in points_by_series.items():
        span = open_spans.get(series)
        for at in sorted(points):
            point = points[at]
            scrape = min(point.scrape, at)
            if span is not None and at - span.last_point <= step:
                is_worse = point.severity > span.severity
                span = ConditionSpan(
                    first=span.first,
                    last=max(span.last, scrape),
                    last_point=at,
                    severity=max(span.severity, point.severity),
                    first_severity=span.first_severity,
                    worst=max(span.last, scrape) if is_worse else span.worst,
                    observed=span.observed and point.observed,
                )
                continue
            if span is not None and span is not open_spans.get(series):
                rows.append(span.row(series, step))
            span = ConditionSpan(scrape, scrape, at, point.severity, point.severity, scrape, point.observed)
        if span is not None:
            rows.append(span.row(series, step))
            if span.last_point == last_point:
                still_open[series] = span
    return rows, still_open


def parse_series(labels: Mapping[str, str], reading: Reading) -> Series:
    """Return the identity of a series. Raises ValueError if a label is missing."""
    if not isinstance(labels, Mapping) or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("the labels are not text")
    name = next((labels[label] for label in NODE_LABELS if labels.get(label)), "")
    node = node_name(name)
    if not node or not labels.get("code"):
        raise ValueError("the node or the code is missing")
    check, subject = labels.get("check", ""), labels.get("subject", "")
    return reading.resolve_cluster(labels.get("cluster")), node, check, labels["code"], subject


def _point(value: int) -> Point:
    return Point(value // 8, value % 4, value % 8 < 4)


def _merge_points(point: Point, other: Point) -> Point:
    observed = point.observed and other.observed
    return Point(max(point.scrape, other.scrape), max(point.severity, other.severity), observed)


def node_name(instance: str) -> str:
    """Return the Slurm node name for "gpu-1:9100" or "gpu-1.example.org:9100". An IP address stays unchanged."""
    host = urllib.parse.urlsplit(f"//{instance}").hostname or ""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return instance.partition(":")[0].partition(".")[0]
    return host


def _matrix(data: Any) -> Sequence[Any]:
    result = data.get("result") if isinstance(data, dict) else None
    if not isinstance(result, list) or data.get("resultType") != "matrix":
        raise ServerError("does not return a range of values: is this the address of a Prometheus server?")
    return result


def _whole_seconds(value: Any) -> int:
    """Convert a time to whole seconds."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return int(number)


SETTINGS = ("url", "tenant", "token_file", "basic_file", "ca_file", "step_seconds", "matchers")


def load_settings(address: str) -> tuple[Server, int, str]:
    """Return (server, step, matchers) for "http://HOST:PORT" or a TOML file with SETTINGS. Raises IngestError."""
    if "://" in address:
        return parse_server(address), STEP_SECONDS, ""
    try:
        with open(address, "rb") as file:
            values = toml.parse(file.read())
    except OSError as error:
        raise IngestError(f"{address}: cannot be read: {error.strerror or error}") from None
    except ConvertError as error:
        raise IngestError(f"{address}: {error}") from None
    for name in values:
        if name not in SETTINGS:
            raise IngestError(f"{address}: unknown setting {name}{spelling_hint(name, SETTINGS)}")
    step = values.pop("step_seconds", STEP_SECONDS)
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= 86_400:
        raise IngestError(f"{address}: step_seconds must be whole seconds from 1 to 86400, got {step!r}")
    for name, value in values.items():
        if not isinstance(value, str):
            raise IngestError(f"{address}: {name} must be text")
    if "url" not in values:
        raise IngestError(f"{address}: url is missing")
    matchers = values.pop("matchers", "")
    try:
        return parse_server(**values), step, matchers
    except ServerError as error:
        raise IngestError(f"{address}: {error}") from None


def ingest(run: Run, files: list[str]) -> None:
    """Ingest the servers' conditions.

    The rows from each query are committed together with the position that the query reached.
    """
    for named in files:
        with run.guard():
            try:
                at, step, matchers = load_settings(named)
            except ServerError as error:
                raise IngestError(f"{named}: {error}") from None
            try:
                _ingest_server(run, at, step, matchers)
            except ServerError as error:
                raise IngestError(f"{at.url}: {error}") from None


def _ingest_server(run: Run, server_address: Server, step: int, matchers: str) -> None:
    """Query all times that are not covered yet (covered_times.py).

    A queried span covers the time from its first point to one step after its last point.
    """
    reading, query_function = Reading.from_run(run, server_address.url), partial(query_server, server_address)
    cursor = f"{server_address.url} {matchers} {step}"
    if tenant := server_address.headers.get("X-Scope-OrgID"):
        cursor += f" {tenant}"
    text = run.cursor(cursor)
    newest, stretches = ReadState.from_text(text) if text else (None, "")
    was_read = without_future(run, parse_spans(stretches), server_address.url)
    if latest_end(was_read) is None and run.from_time is None:
        raise IngestError(f"{server_address.url}: the start of the period is missing; add --from")
    until = run.now - max(step, SETTLED_SECONDS)
    until = until if run.to_time is None else min(run.to_time, until)
    for begin, end in uncovered_spans(was_read, run.from_time, until + 1, 0, 0):
        continues = newest is not None and begin == newest.until + step
        is_newest = begin >= (latest_end(was_read) or 0)
        answers = read(query_function, newest if continues else None, begin, end - 1, reading, step, matchers)
        since = begin
        for rows, state in run.track(answers, unit="queries"):
            with run.step(f"{server_address.url} {since}", since, state.until) as ingest_step:
                ingest_step.stage("scraped_conditions", rows)
                _drop_shorter_spans(ingest_step)
                report_unknown_nodes(run, ingest_step, "scraped_conditions")
                run.read(len(rows))
                if is_newest:
                    newest = state
                if is_newest or state.until + step >= end:  # an older span counts as read only when it is complete
                    was_read.add(begin, state.until + step - 1)
                assert newest is not None
                ingest_step.cursor(cursor, newest.to_text(format_spans(was_read)))
            since = state.until + step


def _drop_shorter_spans(step: Step) -> None:
    """Delete staged rows for conditions that have a longer span in the store.

    At the border between two queried spans, the earlier span contains only one scrape of the later span's conditions.
    """
    table = SCRAPED_CONDITIONS
    same = " AND ".join(f"live.{name} = {step.staged(table.name)}.{name}" for name in table.key_columns)
    step.execute(
        f"DELETE FROM {step.staged(table.name)} WHERE EXISTS (SELECT 1 FROM {step.live(table.name)} AS live "
        f"WHERE {same} AND live.last_time > {step.staged(table.name)}.last_time)"
    )


SOURCE = Source(
    "prometheus",
    "--prometheus",
    "URL|FILE",
    "healthd's conditions from Prometheus, VictoriaMetrics or Mimir; FILE is TOML with url, token_file, ...",
    ingest,
)
