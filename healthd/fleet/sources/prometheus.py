"""healthd's conditions as scraped by Prometheus, VictoriaMetrics or Mimir: the second source, where a stream is
missing.

Scrapes give the first and last scrape that showed a condition. A condition between two scrapes is missing;
`step_seconds` is the distance of the queried points. `timestamp()` of a metric gives the times of the scrapes
themselves; the metric alone repeats its value for five minutes if nothing marks its end
(https://prometheus.io/docs/prometheus/latest/querying/basics/#staleness). One query returns the scrape time, the
severity and whether the condition is enforced as one number (QUERY), so that all are from the same scrape.

A query may return 11,000 points per series (github.com/prometheus/prometheus, web/api/v1/api.go: "exceeded maximum
resolution of 11,000 points per timeseries"). A long period is therefore split, and split further if the server or
healthd rejects an answer as too large. nocache=1 stops VictoriaMetrics from aligning the times of a query to multiples
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
from healthd.common.codec import ConvertError, nearest
from healthd.fleet.ingest import IngestError, Run, Source
from healthd.fleet.sources.covered_times import not_ahead, of_text, text_of, to_ask, until_of
from healthd.fleet.sources.pieces import tell_unknown
from healthd.fleet.sources.prometheus_server import Server, ServerError, TooMuch, ask, server
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
MOST_POINTS = 11_000
STEP_SECONDS = 60  # Prometheus' default scrape_interval is a minute
# Newer samples may still arrive, and VictoriaMetrics repeats an older value there (-search.latencyOffset, 30 s).
SETTLED_SECONDS = 60
NODE_LABELS = ("node", "nodename", "instance")

Row: TypeAlias = "tuple[str, str, str, str, str, str, int, int, int, str, int, bool]"
Series: TypeAlias = "tuple[str, str, str, str, str]"  # cluster, node, check, code, subject
Ask: TypeAlias = "Callable[[str, Mapping[str, str]], Any]"


@dataclass(frozen=True, slots=True)
class Span:
    """A condition from the first scrape that showed it to the last.

    last_point      the last point of a query that had it
    severity        the worst, an index of SEVERITIES
    first_severity  of the first scrape
    worst           time of the first scrape with `severity`
    observed        no scrape showed it as enforced
    """

    first: int
    last: int
    looked: int
    severity: int
    first_severity: int
    worst: int
    observed: bool

    def row(self, series: Series, step: int) -> Row:
        worst, began = SEVERITIES[self.severity], SEVERITIES[self.first_severity]
        return (*series, worst, self.first, self.last, step, began, self.worst, self.observed)


class Point(NamedTuple):
    """One scrape of a condition."""

    scrape: int
    severity: int
    observed: bool


@dataclass
class Scraped:
    """How far a server was read. open_spans: conditions that were open at the last point."""

    until: int
    standing: dict[Series, Span] = field(default_factory=dict)

    def text(self, stretches: str) -> str:
        standing = [[*series, *astuple(span)] for series, span in self.standing.items()]
        return json.dumps([self.until, standing, stretches])

    @staticmethod
    def of_text(text: str) -> tuple[Scraped, str]:
        """Return the state, and the text of the spans that were read."""
        until, standing, stretches = json.loads(text)
        return Scraped(until, dict(map(_span_of, standing))), stretches


def _span_of(row: list[Any]) -> tuple[Series, Span]:
    cluster, node, check, code, subject, *more = row
    return (cluster, node, check, code, subject), Span(*more)


def pieces(from_time: int, to_time: int, step: int, points: int = MOST_POINTS) -> Iterator[tuple[int, int]]:
    """Yield (first, last) point of each query: all points from_time..to_time, `step` seconds apart, each once."""
    first = from_time
    while first <= to_time:
        last = min(first + (points - 1) * step, first + (to_time - first) // step * step)
        yield first, last
        first = last + step


def read(
    ask: Ask,
    before: Scraped | None,
    from_time: int,
    to_time: int,
    reading: Reading,
    step: int = STEP_SECONDS,
    matchers: str = "",
) -> Iterator[tuple[list[Row], Scraped]]:
    """Yield rows, piece by piece, and how far they were read. `query_function`: (path, parameters) -> data.

    matchers: 'job="healthd"' selects only these series. A condition that is still open at the end has a row too, which
    a later read replaces, since its first_time is the same. Raises ServerError.
    """
    state = before or Scraped(from_time - step)
    query = QUERY.replace("%s", matchers)
    points = MOST_POINTS
    while state.until + step <= to_time:
        first, last = next(pieces(state.until + step, to_time, step, points))
        parameters = {"query": query, "start": str(first), "end": str(last), "step": str(step), "nocache": "1"}
        try:
            data = ask("query_range", parameters)
        except TooMuch:
            if last == first:
                raise
            points = max(1, ((last - first) // step + 1) // 2)
            continue
        rows, standing = spans(_matrix(data), state.standing, last, step, reading)
        state = Scraped(last, standing)
        yield rows, state


def spans(
    matrix: Sequence[Any],
    standing: Mapping[Series, Span],
    last_point: int,
    step: int,
    reading: Reading,
) -> tuple[list[Row], dict[Series, Span]]:
    """Return all spans that a piece extends, and those that are still open at its last point.

    A span ends at a point of the query without it. Series of one condition (it became worse, another job scraped it)
    are joined.
    """
    seen: dict[Series, dict[int, Point]] = {}
    for number, one in enumerate(matrix, 1):
        try:
            labels, values = one["metric"], one["values"]
            series = series_of(labels, reading)
            told = {_whole(at): _point(_whole(value)) for at, value in values}
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            reading.unread(number, f"an invalid series: {str(error)[:100]}")
            continue
        points = seen.setdefault(series, {})
        for at, point in told.items():
            points[at] = _worse(point, points.get(at, point))
    rows: list[Row] = []
    after: dict[Series, Span] = {}
    for series, points in seen.items():
        span = standing.get(series)
        for at in sorted(points):
            point = points[at]
            scrape = min(point.scrape, at)
            if span is not None and at - span.looked <= step:
                is_worse = point.severity > span.severity
                span = Span(
                    first=span.first,
                    last=max(span.last, scrape),
                    looked=at,
                    severity=max(span.severity, point.severity),
                    first_severity=span.first_severity,
                    worst=max(span.last, scrape) if is_worse else span.worst,
                    observed=span.observed and point.observed,
                )
                continue
            if span is not None and span is not standing.get(series):
                rows.append(span.row(series, step))
            span = Span(scrape, scrape, at, point.severity, point.severity, scrape, point.observed)
        if span is not None:
            rows.append(span.row(series, step))
            if span.looked == last_point:
                after[series] = span
    return rows, after


def series_of(labels: Mapping[str, str], reading: Reading) -> Series:
    """Return the identity of a series. Raises ValueError if a label is missing."""
    if not isinstance(labels, Mapping) or not all(isinstance(value, str) for value in labels.values()):
        raise ValueError("its labels are not text")
    name = next((labels[label] for label in NODE_LABELS if labels.get(label)), "")
    node = node_of(name)
    if not node or not labels.get("code"):
        raise ValueError("it has no node or no code")
    check, subject = labels.get("check", ""), labels.get("subject", "")
    return reading.cluster_of(labels.get("cluster")), node, check, labels["code"], subject


def _point(value: int) -> Point:
    return Point(value // 8, value % 4, value % 8 < 4)


def _worse(one: Point, other: Point) -> Point:
    observed = one.observed and other.observed
    return Point(max(one.scrape, other.scrape), max(one.severity, other.severity), observed)


def node_of(instance: str) -> str:
    """Return the Slurm name of "gpu-1:9100" or "gpu-1.example.org:9100". An IP address is kept."""
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


def _whole(value: Any) -> int:
    """Return a time in whole seconds."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return int(number)


SETTINGS = ("url", "tenant", "token_file", "basic_file", "ca_file", "step_seconds", "matchers")


def settings(named: str) -> tuple[Server, int, str]:
    """Return (server, step, matchers) for "http://HOST:PORT" or a TOML file with SETTINGS. Raises IngestError."""
    if "://" in named:
        return server(named), STEP_SECONDS, ""
    try:
        with open(named, "rb") as file:
            told = toml.parse(file.read())
    except OSError as error:
        raise IngestError(f"{named}: cannot be read: {error.strerror or error}") from None
    except ConvertError as error:
        raise IngestError(f"{named}: {error}") from None
    for name in told:
        if name not in SETTINGS:
            raise IngestError(f"{named}: unknown setting {name}{nearest(name, SETTINGS)}")
    step = told.pop("step_seconds", STEP_SECONDS)
    if not isinstance(step, int) or isinstance(step, bool) or not 1 <= step <= 86_400:
        raise IngestError(f"{named}: step_seconds must be whole seconds from 1 to 86400, got {step!r}")
    for name, value in told.items():
        if not isinstance(value, str):
            raise IngestError(f"{named}: {name} must be text")
    if "url" not in told:
        raise IngestError(f"{named}: url is missing")
    matchers = told.pop("matchers", "")
    try:
        return server(**told), step, matchers
    except ServerError as error:
        raise IngestError(f"{named}: {error}") from None


def ingest(run: Run, files: list[str]) -> None:
    """Ingest the conditions of servers. Each query's rows are committed together with how far the server was read."""
    for named in files:
        with run.guard():
            try:
                at, step, matchers = settings(named)
            except ServerError as error:
                raise IngestError(f"{named}: {error}") from None
            try:
                _server(run, at, step, matchers)
            except ServerError as error:
                raise IngestError(f"{at.url}: {error}") from None


def _server(run: Run, at: Server, step: int, matchers: str) -> None:
    """Query all uncovered spans (covered_times.py). A span counts from its first point to one step after its last."""
    reading, asked = Reading.of(run, at.url), partial(ask, at)
    cursor = f"{at.url} {matchers} {step}"
    if tenant := at.headers.get("X-Scope-OrgID"):
        cursor += f" {tenant}"
    text = run.cursor(cursor)
    newest, stretches = Scraped.of_text(text) if text else (None, "")
    was_read = not_ahead(run, of_text(stretches), at.url)
    if until_of(was_read) is None and run.from_time is None:
        raise IngestError(f"{at.url}: the start of the period is missing: add --from")
    until = run.now - max(step, SETTLED_SECONDS)
    until = until if run.to_time is None else min(run.to_time, until)
    for begin, end in to_ask(was_read, run.from_time, until + 1, 0, 0):
        goes_on = newest is not None and begin == newest.until + step
        is_newest = begin >= (until_of(was_read) or 0)
        answers = read(asked, newest if goes_on else None, begin, end - 1, reading, step, matchers)
        since = begin
        for rows, state in run.watch(answers, unit="queries"):
            with run.step(f"{at.url} {since}", since, state.until) as one:
                one.stage("scraped_conditions", rows)
                _keep_longer(one)
                tell_unknown(run, one, "scraped_conditions")
                run.read(len(rows))
                if is_newest:
                    newest = state
                if is_newest or state.until + step >= end:  # an older span counts once it is complete
                    was_read.add(begin, state.until + step - 1)
                assert newest is not None
                one.cursor(cursor, newest.text(text_of(was_read)))
            since = state.until + step


def _keep_longer(step: Step) -> None:
    """Delete staged rows of conditions for which the store has a longer span.

    A span that ends where another one begins contains only the first scrape of the other span's conditions.
    """
    table = SCRAPED_CONDITIONS
    same = " AND ".join(f"live.{name} = {step.staged(table.name)}.{name}" for name in table.replace_by)
    step.execute(
        f"DELETE FROM {step.staged(table.name)} WHERE EXISTS (SELECT 1 FROM {step.live(table.name)} AS live "
        f"WHERE {same} AND live.last_time > {step.staged(table.name)}.last_time)"
    )


SOURCE = Source(
    "prometheus",
    "--prometheus",
    "URL|FILE",
    "conditions scraped by Prometheus, VictoriaMetrics or Mimir; FILE: TOML with url, token_file, ...",
    ingest,
)
