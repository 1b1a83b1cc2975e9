"""Selects the contents of a fail-slow plot: which series get a panel, and the points on each line.

All functions are pure.

A line has at most MAX_COLUMNS points, regardless of the number of samples. Each point has the smallest, median and
largest of its samples, so a single spike among 100,000 samples remains visible.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from healthd.common.page import plural
from healthd.failslow import times
from healthd.failslow.model import Cause, Diagnosis, Point, Series, SlowJob, Suspect

MAX_PANELS = 24
MAX_COLUMNS = 320
MAX_PEERS = 60  # maximum number of peers used for a band; from more peers, an even selection is used
MIN_BAND_PEERS = 4  # minimum number of peers for a band (median and spread); if there are fewer, each gets a line
SPREAD = (0.1, 0.9)  # quantiles of the peers that a band shows
MAX_ONSET_DISTANCE = 10  # number of samples; onsets within this distance count as simultaneous
MAX_SPAN_TEXTS = 3  # maximum number of spans per panel that its caption describes


@dataclass(frozen=True, slots=True)
class Column:
    """Range of a series's samples (or of its peers' medians) at one index `x`. low <= middle <= high."""

    x: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class DrawnSpan:
    """A Point as drawn.

    Attributes:
        relief: None while the slowness lasts.
        before, level: duration of a sample before and during the slowness.
    """

    onset: float
    alarm: float
    relief: float | None
    end: float  # the relief, or the last sample
    before: float
    level: float
    slowdown: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        top: upper end of y; a pause of one sample does not raise it.
        above: number of samples above `top`.
        peers: the peers' band, or empty.
        peer_lines: a line for each peer if there are too few peers for a band. Peers are scaled to this series's level
            before its onset.
        times: style of x, None for plain numbers.
    """

    title: str
    captions: tuple[str, ...]
    line: tuple[Column, ...]
    peers: tuple[Column, ...]
    peer_lines: tuple[tuple[Column, ...], ...]
    spans: tuple[DrawnSpan, ...]
    job_spans: tuple[tuple[float, float], ...]  # begin and end of each period in which the whole job was slow
    begin: float
    end: float
    bottom: float
    top: float
    above: int
    times: times.TimeStyle | None


@dataclass(frozen=True, slots=True)
class PanelRequest:
    """Request for a panel: a series, the measure to draw ("" for the value itself), and the reason."""

    series_index: int
    measure: str
    reason: str
    points: tuple[Point, ...]


def build_panels(series: Sequence[Series], diagnosis: Diagnosis) -> tuple[tuple[Panel, ...], int]:
    """Return the panels, suspects first, and the number of panels that were left out."""
    first: dict[tuple[int, str], PanelRequest] = {}
    for request in _panel_requests(series, diagnosis):
        first.setdefault((request.series_index, request.measure), request)
    requests = list(first.values()) or _healthy_requests(series)
    groups: dict[str, list[int]] = {}
    for at, item in enumerate(series):
        groups.setdefault(item.group, []).append(at)
    drawn = tuple(
        _build_panel(series, diagnosis, groups[series[item.series_index].group], item) for item in requests[:MAX_PANELS]
    )
    return drawn, max(0, len(requests) - MAX_PANELS)


def series_label(series: Series) -> str:
    """Return the display name, such as "worker 6"."""
    return f"{series.label} {series.name}".strip()


def span_text(series: Series, point: Point) -> str:
    """Return a point's description as shown on the terminal: "slow from 180 to 195, +65 %, recovered"."""
    onset = index_text(series, point.onset_index)
    if point.relief_index is None:
        return f"slow from {onset} on, {format_percent(point.slowdown)}"
    return f"slow from {onset} to {index_text(series, point.relief_index)}, {format_percent(point.slowdown)}, recovered"


def index_text(series: Series, at: int) -> str:
    """Return a sample's index as text."""
    return format_number(series.index[min(at, len(series.index) - 1)], series.times)


def format_number(value: float, style: times.TimeStyle | None = None) -> str:
    if style is not None:
        return times.format_time(value, style)
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def format_percent(slowdown: float) -> str:
    return f"{slowdown * 100:+.0f} %"


# --- selection


def _panel_requests(series: Sequence[Series], diagnosis: Diagnosis) -> Iterator[PanelRequest]:
    """Yield requests for suspects, then for slow jobs (one series each), then for other slow series."""
    covered: set[int] = set()
    indices_by_name: dict[str, list[int]] = {}
    for at, item in enumerate(series):
        indices_by_name.setdefault(item.name, []).append(at)
    onsets: dict[str, list[int]] = {}  # suspects' onsets, by group
    for suspect in diagnosis.suspects:
        reason = f"suspect: {suspect.cause.value.replace('_', ' ')}, {suspect.confidence.value} confidence"
        for at in _suspect_indices(indices_by_name, diagnosis, suspect):
            covered.add(at)
            onsets.setdefault(series[at].group, []).extend(point.onset_index for point in diagnosis.points[at])
            yield PanelRequest(at, "", reason, diagnosis.points[at])
            if (measure := _measure(series[at], suspect.cause)) and suspect.point is not None:
                yield PanelRequest(at, measure, reason, (_measure_point(series[at], measure, suspect.point),))
    for job in diagnosis.slow_jobs:
        indices = [at for name in job.series for at in indices_by_name.get(name, ()) if series[at].group == job.group]
        uncovered = [at for at in indices if at not in covered]
        covered.update(indices)
        if uncovered:
            drawn = next((at for at in uncovered if diagnosis.points[at]), uncovered[0])
            yield PanelRequest(drawn, "", f"the job is slow: {job.reason}", diagnosis.points[drawn])
    for at, points in enumerate(diagnosis.points):
        if points and at not in covered and not _began_together(points, onsets.get(series[at].group, ())):
            yield PanelRequest(at, "", "no suspect", points)


def _suspect_indices(indices_by_name: Mapping[str, Sequence[int]], diagnosis: Diagnosis, suspect: Suspect) -> list[int]:
    named = [at for name in suspect.series or (suspect.subject,) for at in indices_by_name.get(name, ())]
    return [at for at in named if suspect.point is not None and suspect.point in diagnosis.points[at]] or named


def _began_together(points: Sequence[Point], onsets: Sequence[int]) -> bool:
    """Return True if all points of a series began together with a suspect's onset, as in a gang that waited.

    Such a series is drawn among the suspect's peers.
    """
    return all(any(abs(point.onset_index - onset) <= MAX_ONSET_DISTANCE for onset in onsets) for point in points)


def _measure(series: Series, cause: Cause) -> str:
    """Return the measure to draw: the rank's own time, because it distinguishes the rank from ranks that only
    waited."""
    if series.busy is not None and cause in (Cause.COMPUTE, Cause.COMPUTE_GPU, Cause.COMPUTE_CPU):
        return "busy"
    communicates = (Cause.COMMUNICATION, Cause.COMMUNICATION_INTRA_NODE, Cause.COMMUNICATION_INTER_NODE)
    return "transfer" if series.transfer is not None and cause in communicates else ""


def _measure_point(series: Series, measure: str, point: Point) -> Point:
    """Return the point with the slowdown of this measure instead of the iteration time's.

    The iteration time of a gang rises by a smaller percentage.
    """
    ys = _values(series, measure)
    before = _healthy_level(series, ys, point, _healthy_positions(ys, (point,)))
    during = [y for y in ys[point.onset_index : point.relief_index] if math.isfinite(y)]
    return replace(point, slowdown=median(during) / before - 1) if during and before > 0 else point


def _healthy_requests(series: Sequence[Series]) -> list[PanelRequest]:
    """If nothing became slow, request one series from each group, drawn among its peers."""
    first: dict[str, int] = {}
    for at, item in enumerate(series):
        if len(item.value):
            first.setdefault(item.group, at)
    return [PanelRequest(at, "", "nothing became slow", ()) for at in first.values()]


# --- one panel


def _build_panel(series: Sequence[Series], diagnosis: Diagnosis, group: Sequence[int], request: PanelRequest) -> Panel:
    drawn = series[request.series_index]
    peer_indices = [at for at in group if at != request.series_index and series[at].label == drawn.label]
    sampled_peers = [series[at] for at in peer_indices[:: max(1, math.ceil(len(peer_indices) / MAX_PEERS))]]
    uses_index = all(_ascends(peer.index) for peer in (drawn, *sampled_peers))
    xs = _x_values(drawn, uses_index)
    ys = _values(drawn, request.measure)
    begin, end = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1
    line = _line(xs, ys, begin, end)
    lines = [
        _line(*_thinned(_x_values(peer, uses_index), _values(peer, request.measure)), begin, end)
        for peer in sampled_peers
        if request.measure == "" or getattr(peer, request.measure) is not None
    ]
    if request.points:
        first = min(point.onset_index for point in request.points)
        lines = _scale_to_level(lines, line, xs[first])
    peers = (
        _band(lines, begin, end, min(MAX_COLUMNS // 2, max(1, len(drawn.value) // 3)))
        if len(lines) >= MIN_BAND_PEERS
        else ()
    )
    healthy = _healthy_positions(ys, request.points)
    spans = tuple(_drawn_span(drawn, xs, ys, point, healthy) for point in request.points)
    bottom, top = _y_range(line, peers, spans)
    measure = f", {request.measure} time" if request.measure else ""
    location = "".join((f", group {drawn.group}" if drawn.group else "", f", on {drawn.node}" if drawn.node else ""))
    return Panel(
        title=f"{series_label(drawn) or 'one series'}{location}{measure}",
        captions=_captions(drawn, request, len(peer_indices)),
        line=line,
        peers=peers,
        peer_lines=tuple(lines) if len(lines) < MIN_BAND_PEERS else (),
        spans=spans,
        job_spans=tuple(_job_spans(drawn, xs, uses_index, diagnosis.slow_jobs)),
        begin=begin,
        end=end,
        bottom=bottom,
        top=top,
        above=sum(y > top for y in ys),
        times=drawn.times if uses_index else None,
    )


def _captions(series: Series, request: PanelRequest, peers: int) -> tuple[str, ...]:
    span_texts = [span_text(series, point) for point in request.points[:MAX_SPAN_TEXTS]]
    if len(request.points) > MAX_SPAN_TEXTS:
        span_texts.append(f"and {len(request.points) - MAX_SPAN_TEXTS} more")
    peers_text = f"compared with {plural(peers, 'peer')}" if peers else "without peers"
    return (
        (f"{request.reason}; {peers_text}", "; ".join(span_texts))
        if span_texts
        else (f"{request.reason}; {peers_text}",)
    )


def _ascends(index: Sequence[float]) -> bool:
    return all(before <= after for before, after in pairwise(index))


def _x_values(series: Series, uses_index: bool) -> Sequence[float]:
    """Return the x value of each sample. If the index restarts, this is the sample's position."""
    return series.index if uses_index else range(len(series.value))


def _values(series: Series, measure: str) -> Sequence[float]:
    found: Sequence[float] | None = {"busy": series.busy, "transfer": series.transfer}.get(measure, series.value)
    return series.value if found is None else found


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    step = max(1, len(xs) // (3 * MAX_COLUMNS))
    return xs[::step], ys[::step]


def _line(xs: Sequence[float], ys: Sequence[float], begin: float, end: float) -> tuple[Column, ...]:
    """Return the samples between begin and end, one by one or, if there are many, combined into columns.

    Values that are not finite are left out.
    """
    points = [(x, y) for x, y in zip(xs, ys, strict=False) if begin <= x <= end and math.isfinite(y)]
    if len(points) <= MAX_COLUMNS:
        return tuple(Column(x, y, y, y) for x, y in points)
    return tuple(
        Column(x, min(column), median(column), max(column)) for x, column in _columns(points, begin, end, MAX_COLUMNS)
    )


def _columns(
    points: Iterable[tuple[float, float]], begin: float, end: float, count: int
) -> Iterator[tuple[float, list[float]]]:
    width = (end - begin) / count
    columns: dict[int, list[float]] = {}
    for x, y in points:
        columns.setdefault(min(count - 1, int((x - begin) / width)), []).append(y)
    for column in sorted(columns):
        yield begin + (column + 0.5) * width, columns[column]


def _scale_to_level(
    lines: Sequence[Sequence[Column]], line: Sequence[Column], onset: float
) -> list[tuple[Column, ...]]:
    """Return the peers' lines, each scaled to the level of this series before its onset.

    The analysis compares each series with itself, and healthy workers may differ by a factor of 4.
    """

    def rest_level(columns: Sequence[Column]) -> float:
        return median(
            [column.middle for column in columns if column.x < onset] or [column.middle for column in columns] or [1.0]
        )

    own = rest_level(line)
    scaled = []
    for peer_line in lines:
        factor = own / rest_level(peer_line)
        scaled.append(
            tuple(
                Column(column.x, column.low * factor, column.middle * factor, column.high * factor)
                for column in peer_line
            )
        )
    return scaled


def _band(lines: Sequence[Sequence[Column]], begin: float, end: float, count: int) -> tuple[Column, ...]:
    """Return the peers' median and spread wherever at least half of the peers have samples."""
    columns: dict[float, list[float]] = {}
    for line in lines:
        for x, column in _columns(((point.x, point.middle) for point in line), begin, end, count):
            columns.setdefault(x, []).append(median(column))
    band = []
    for x, values in sorted(columns.items()):
        if 2 * len(values) >= len(lines):
            low, high = (_quantile(sorted(values), share) for share in SPREAD)
            band.append(Column(x, low, median(values), high))
    return tuple(band)


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated between two samples (type 7 of Hyndman and Fan, The American Statistician 50,
    1996).
    """
    position = share * (len(ascending) - 1)
    below = int(position)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (position - below) * (ascending[above] - ascending[below])


def _healthy_positions(ys: Sequence[float], points: Sequence[Point]) -> Sequence[int]:
    """Return the positions of the samples outside slow spans, in ascending order."""
    slow = bytearray(len(ys))
    for point in points:
        span = slice(point.onset_index, point.relief_index)
        slow[span] = b"\1" * len(slow[span])
    return [at for at, y in enumerate(ys) if not slow[at] and math.isfinite(y)]


def _drawn_span(
    series: Series, xs: Sequence[float], ys: Sequence[float], point: Point, healthy: Sequence[int]
) -> DrawnSpan:
    last = len(xs) - 1
    end = last if point.relief_index is None else min(point.relief_index, last)
    before = _healthy_level(series, ys, point, healthy)
    return DrawnSpan(
        onset=xs[point.onset_index],
        alarm=xs[min(point.alarm_index, last)],
        relief=None if point.relief_index is None else xs[end],
        end=xs[end],
        before=before,
        level=before * (1 + point.slowdown),
        slowdown=point.slowdown,
    )


def _healthy_level(series: Series, ys: Sequence[float], point: Point, healthy: Sequence[int]) -> float:
    """Return the duration of a healthy sample in this regime before the point.

    Without healthy samples, compute it from the slow samples and their slowdown.
    """
    attempt_begin = max(start for start in (0, *series.starts) if start <= point.onset_index)
    regime = series.regimes[point.onset_index] if series.regimes is not None else None
    samples = [
        ys[at]
        for at in healthy[bisect_left(healthy, attempt_begin) : bisect_left(healthy, point.onset_index)]
        if series.regimes is None or series.regimes[at] == regime
    ]
    if samples:
        return median(samples)
    during = [y for y in ys[point.onset_index : point.relief_index] if math.isfinite(y)]
    return median(during) / (1 + point.slowdown) if during else math.nan


def _job_spans(
    series: Series, xs: Sequence[float], uses_index: bool, jobs: Sequence[SlowJob]
) -> Iterator[tuple[float, float]]:
    last = len(xs) - 1
    for job in jobs:
        if job.group != series.group or job.point.onset_index > last:
            continue
        relief = last if job.point.relief_index is None else min(job.point.relief_index, last)
        onset = min(max(job.onset, xs[0]), xs[-1]) if uses_index else xs[job.point.onset_index]
        yield onset, max(onset, xs[relief])


def _y_range(line: Sequence[Column], peers: Sequence[Column], spans: Sequence[DrawnSpan]) -> tuple[float, float]:
    """Return the range of y. It includes all slow spans, but not a pause of one sample."""
    levels = [level for span in spans for level in (span.before, span.level * 1.05) if math.isfinite(level)]
    if not line and not levels:
        return 0.0, 1.0
    lows, highs = sorted(column.low for column in line), sorted(column.high for column in line)
    bottom = min([_quantile(lows, 0.005), *levels] if lows else levels)
    top = max([_quantile(highs, 0.98), *levels] if highs else levels)
    for span in spans:  # include short spans, unless a single sample is far off
        during = sorted(column.high for column in line if span.onset <= column.x <= span.end)
        if during and math.isfinite(span.level):
            top = max(top, min(_quantile(during, 0.9), 2 * span.level))
    # Peers far away from the series are not shown completely, because the series must stay readable.
    middles = [column.middle for column in peers]
    bottom = min([bottom, *(max(middle, bottom - (top - bottom)) for middle in middles)])
    top = max([top, *(min(column.high, top + (top - bottom)) for column in peers)])
    margin = (top - bottom) * 0.06 or abs(top) * 0.05 or 1.0
    return bottom - margin, top + margin
