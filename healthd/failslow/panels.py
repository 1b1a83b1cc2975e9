"""Content of a plot of fail-slow: which series get a panel, and the points of each line. Pure functions.

However many samples a series has, its line has at most MAX_COLUMNS points. Each point has the smallest, the median and
the largest of its samples, so that a single spike among 100,000 samples remains visible.
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
from healthd.failslow.model import Cause, JobSlow, Judgement, Point, Series, Suspect

MOST_PANELS = 24
COLUMNS = 320
MOST_PEERS = 60  # used for a band; of more, an even selection
A_BAND = 4  # from this number on peers have a median and a spread; fewer have a line each
SPREAD = (0.1, 0.9)  # of a band: the quantiles of the peers
TOGETHER = 10  # samples; onsets within this distance count as simultaneous
MOST_WORDS = 3  # spans of one panel that are described in its caption


@dataclass(frozen=True, slots=True)
class Column:
    """Samples at x (as Series.index), or medians of the peers there: low <= middle <= high."""

    x: float
    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """A Point as drawn. relief: None while it lasts. before, level: duration of a sample before and during the
    slowness.
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

    above: number of samples higher than `top`, which a pause of one sample does not raise. peers: their band, or empty.
    peer_lines: a line for each peer if there are too few for a band. Both are scaled to the level of the line before
    its onset. times: style of x, None for plain numbers.
    """

    title: str
    words: tuple[str, ...]
    line: tuple[Column, ...]
    peers: tuple[Column, ...]
    thin: tuple[tuple[Column, ...], ...]
    stretches: tuple[Stretch, ...]
    bands: tuple[tuple[float, float], ...]  # begin and end of each time in which the whole job was slow
    begin: float
    end: float
    bottom: float
    top: float
    above: int
    times: times.TimeStyle | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Request for a panel: a series, the drawn measure ("" for the value itself), and the reason."""

    at: int
    measure: str
    why: str
    points: tuple[Point, ...]


def panels(series: Sequence[Series], judgement: Judgement) -> tuple[tuple[Panel, ...], int]:
    """Return the panels, suspects first, and the number of panels left out."""
    first: dict[tuple[int, str], Wanted] = {}
    for each in _wanted(series, judgement):
        first.setdefault((each.at, each.measure), each)
    wanted = list(first.values()) or _calm(series)
    groups: dict[str, list[int]] = {}
    for at, one in enumerate(series):
        groups.setdefault(one.group, []).append(at)
    drawn = tuple(_panel(series, judgement, groups[series[one.at].group], one) for one in wanted[:MOST_PANELS])
    return drawn, max(0, len(wanted) - MOST_PANELS)


def called(one: Series) -> str:
    """Return the display name, such as "worker 6"."""
    return f"{one.kind_of} {one.name}".strip()


def stretch_words(one: Series, point: Point) -> str:
    """Return the description of a point as in the terminal: "slow from 180 to 195, +65 %, recovered"."""
    onset = where(one, point.onset_index)
    if point.relief_index is None:
        return f"slow from {onset} on, {percent(point.slowdown)}"
    return f"slow from {onset} to {where(one, point.relief_index)}, {percent(point.slowdown)}, recovered"


def where(one: Series, at: int) -> str:
    """Return the index at a sample as text."""
    return number(one.index[min(at, len(one.index) - 1)], one.times)


def number(value: float, style: times.TimeStyle | None = None) -> str:
    if style is not None:
        return times.text(value, style)
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def percent(slowdown: float) -> str:
    return f"{slowdown * 100:+.0f} %"


# --- selection


def _wanted(series: Sequence[Series], judgement: Judgement) -> Iterator[Wanted]:
    """Yield requests for suspects, then for slow jobs (one series each), then for other slow series."""
    told: set[int] = set()
    named_so: dict[str, list[int]] = {}
    for at, one in enumerate(series):
        named_so.setdefault(one.name, []).append(at)
    onsets: dict[str, list[int]] = {}  # onsets of suspects, by group
    for suspect in judgement.suspects:
        why = f"suspect: {suspect.cause.value.replace('_', ' ')}, {suspect.confidence.value} confidence"
        for at in _of_suspect(named_so, judgement, suspect):
            told.add(at)
            onsets.setdefault(series[at].group, []).extend(point.onset_index for point in judgement.points[at])
            yield Wanted(at, "", why, judgement.points[at])
            if (measure := _measure(series[at], suspect.cause)) and suspect.point is not None:
                yield Wanted(at, measure, why, (_of_measure(series[at], measure, suspect.point),))
    for job in judgement.job_slow:
        those = [at for name in job.series for at in named_so.get(name, ()) if series[at].group == job.group]
        fresh = [at for at in those if at not in told]
        told.update(those)
        if fresh:
            shown = next((at for at in fresh if judgement.points[at]), fresh[0])
            yield Wanted(shown, "", f"the job is slow: {job.why}", judgement.points[shown])
    for at, points in enumerate(judgement.points):
        if points and at not in told and not _together(points, onsets.get(series[at].group, ())):
            yield Wanted(at, "", "no suspect", points)


def _of_suspect(named_so: Mapping[str, Sequence[int]], judgement: Judgement, suspect: Suspect) -> list[int]:
    named = [at for name in suspect.series or (suspect.subject,) for at in named_so.get(name, ())]
    return [at for at in named if suspect.point is not None and suspect.point in judgement.points[at]] or named


def _together(points: Sequence[Point], onsets: Sequence[int]) -> bool:
    """Return True if all points began with a suspect, as in a gang that waited.

    Such a series is among the peers there.
    """
    return all(any(abs(point.onset_index - onset) <= TOGETHER for onset in onsets) for point in points)


def _measure(one: Series, cause: Cause) -> str:
    """Return the rank's own time to draw, which distinguishes it from ranks that waited for it."""
    if one.busy is not None and cause in (Cause.COMPUTE, Cause.COMPUTE_GPU, Cause.COMPUTE_CPU):
        return "busy"
    communicates = (Cause.COMMUNICATION, Cause.COMMUNICATION_INTRA_NODE, Cause.COMMUNICATION_INTER_NODE)
    return "transfer" if one.transfer is not None and cause in communicates else ""


def _of_measure(one: Series, measure: str, point: Point) -> Point:
    """Return the same point with the slowdown of this measure.

    The iteration of a gang rises by a smaller percentage.
    """
    ys = _values(one, measure)
    before = _before(one, ys, point, _healthy(ys, (point,)))
    during = [y for y in ys[point.onset_index : point.relief_index] if math.isfinite(y)]
    return replace(point, slowdown=median(during) / before - 1) if during and before > 0 else point


def _calm(series: Sequence[Series]) -> list[Wanted]:
    """Return a request for one series of each group among its peers, because nothing became slow."""
    first: dict[str, int] = {}
    for at, one in enumerate(series):
        if len(one.value):
            first.setdefault(one.group, at)
    return [Wanted(at, "", "nothing became slow", ()) for at in first.values()]


# --- one panel


def _panel(series: Sequence[Series], judgement: Judgement, group: Sequence[int], wanted: Wanted) -> Panel:
    one = series[wanted.at]
    others = [at for at in group if at != wanted.at and series[at].kind_of == one.kind_of]
    some = [series[at] for at in others[:: max(1, math.ceil(len(others) / MOST_PEERS))]]
    by_index = all(_ascends(each.index) for each in (one, *some))
    xs = _places(one, by_index)
    ys = _values(one, wanted.measure)
    begin, end = xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1
    line = _line(xs, ys, begin, end)
    lines = [
        _line(*_thinned(_places(each, by_index), _values(each, wanted.measure)), begin, end)
        for each in some
        if wanted.measure == "" or getattr(each, wanted.measure) is not None
    ]
    if wanted.points:
        first = min(point.onset_index for point in wanted.points)
        lines = _at_one_level(lines, line, xs[first])
    peers = _band(lines, begin, end, min(COLUMNS // 2, max(1, len(one.value) // 3))) if len(lines) >= A_BAND else ()
    healthy = _healthy(ys, wanted.points)
    stretches = tuple(_stretch(one, xs, ys, point, healthy) for point in wanted.points)
    bottom, top = _range(line, peers, stretches)
    measure = f", {wanted.measure} time" if wanted.measure else ""
    there = "".join((f", group {one.group}" if one.group else "", f", on {one.node}" if one.node else ""))
    return Panel(
        title=f"{called(one) or 'one series'}{there}{measure}",
        words=_words(one, wanted, len(others)),
        line=line,
        peers=peers,
        thin=tuple(lines) if len(lines) < A_BAND else (),
        stretches=stretches,
        bands=tuple(_job_bands(one, xs, by_index, judgement.job_slow)),
        begin=begin,
        end=end,
        bottom=bottom,
        top=top,
        above=sum(y > top for y in ys),
        times=one.times if by_index else None,
    )


def _words(one: Series, wanted: Wanted, peers: int) -> tuple[str, ...]:
    said = [stretch_words(one, point) for point in wanted.points[:MOST_WORDS]]
    if len(wanted.points) > MOST_WORDS:
        said.append(f"and {len(wanted.points) - MOST_WORDS} more")
    beside = f"compared with {plural(peers, 'peer')}" if peers else "without peers"
    return (f"{wanted.why}; {beside}", "; ".join(said)) if said else (f"{wanted.why}; {beside}",)


def _ascends(index: Sequence[float]) -> bool:
    return all(before <= after for before, after in pairwise(index))


def _places(one: Series, by_index: bool) -> Sequence[float]:
    """Return the x value of each sample. If the index restarts, this is its position."""
    return one.index if by_index else range(len(one.value))


def _values(one: Series, measure: str) -> Sequence[float]:
    found: Sequence[float] | None = {"busy": one.busy, "transfer": one.transfer}.get(measure, one.value)
    return one.value if found is None else found


def _thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    step = max(1, len(xs) // (3 * COLUMNS))
    return xs[::step], ys[::step]


def _line(xs: Sequence[float], ys: Sequence[float], begin: float, end: float) -> tuple[Column, ...]:
    """Return the samples between begin and end, or columns if there are many.

    Values that are not finite are left out.
    """
    known = [(x, y) for x, y in zip(xs, ys, strict=False) if begin <= x <= end and math.isfinite(y)]
    if len(known) <= COLUMNS:
        return tuple(Column(x, y, y, y) for x, y in known)
    return tuple(
        Column(x, min(column), median(column), max(column)) for x, column in _columns(known, begin, end, COLUMNS)
    )


def _columns(
    those: Iterable[tuple[float, float]], begin: float, end: float, count: int
) -> Iterator[tuple[float, list[float]]]:
    width = (end - begin) / count
    columns: dict[int, list[float]] = {}
    for x, y in those:
        columns.setdefault(min(count - 1, int((x - begin) / width)), []).append(y)
    for column in sorted(columns):
        yield begin + (column + 0.5) * width, columns[column]


def _at_one_level(lines: Sequence[Sequence[Column]], line: Sequence[Column], onset: float) -> list[tuple[Column, ...]]:
    """Return the peers' lines, each scaled to the level of this series before its onset.

    The analysis compares each series with itself, and workers may differ by a factor of 4 at rest.
    """

    def rest(those: Sequence[Column]) -> float:
        return median([one.middle for one in those if one.x < onset] or [one.middle for one in those] or [1.0])

    own = rest(line)
    scaled = []
    for each in lines:
        by = own / rest(each)
        scaled.append(tuple(Column(one.x, one.low * by, one.middle * by, one.high * by) for one in each))
    return scaled


def _band(lines: Sequence[Sequence[Column]], begin: float, end: float, count: int) -> tuple[Column, ...]:
    """Return the median and the spread of the peers, wherever at least half of them have samples."""
    columns: dict[float, list[float]] = {}
    for line in lines:
        for x, column in _columns(((one.x, one.middle) for one in line), begin, end, count):
            columns.setdefault(x, []).append(median(column))
    band = []
    for x, those in sorted(columns.items()):
        if 2 * len(those) >= len(lines):
            low, high = (_quantile(sorted(those), share) for share in SPREAD)
            band.append(Column(x, low, median(those), high))
    return tuple(band)


def _quantile(ascending: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated between two samples (type 7 of Hyndman and Fan, The American Statistician 50,
    1996).
    """
    place = share * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def _healthy(ys: Sequence[float], points: Sequence[Point]) -> Sequence[int]:
    """Return the positions of the samples outside of slow spans, ascending."""
    slow = bytearray(len(ys))
    for point in points:
        stretch = slice(point.onset_index, point.relief_index)
        slow[stretch] = b"\1" * len(slow[stretch])
    return [at for at, y in enumerate(ys) if not slow[at] and math.isfinite(y)]


def _stretch(one: Series, xs: Sequence[float], ys: Sequence[float], point: Point, healthy: Sequence[int]) -> Stretch:
    last = len(xs) - 1
    end = last if point.relief_index is None else min(point.relief_index, last)
    before = _before(one, ys, point, healthy)
    return Stretch(
        onset=xs[point.onset_index],
        alarm=xs[min(point.alarm_index, last)],
        relief=None if point.relief_index is None else xs[end],
        end=xs[end],
        before=before,
        level=before * (1 + point.slowdown),
        slowdown=point.slowdown,
    )


def _before(one: Series, ys: Sequence[float], point: Point, healthy: Sequence[int]) -> float:
    """Return the duration of a healthy sample of this regime before the point.

    Without such samples, it is computed from the slow samples and their slowdown.
    """
    begins = max(start for start in (0, *one.starts) if start <= point.onset_index)
    regime = one.regimes[point.onset_index] if one.regimes is not None else None
    samples = [
        ys[at]
        for at in healthy[bisect_left(healthy, begins) : bisect_left(healthy, point.onset_index)]
        if one.regimes is None or one.regimes[at] == regime
    ]
    if samples:
        return median(samples)
    during = [y for y in ys[point.onset_index : point.relief_index] if math.isfinite(y)]
    return median(during) / (1 + point.slowdown) if during else math.nan


def _job_bands(
    one: Series, xs: Sequence[float], by_index: bool, jobs: Sequence[JobSlow]
) -> Iterator[tuple[float, float]]:
    last = len(xs) - 1
    for job in jobs:
        if job.group != one.group or job.point.onset_index > last:
            continue
        relief = last if job.point.relief_index is None else min(job.point.relief_index, last)
        onset = min(max(job.onset, xs[0]), xs[-1]) if by_index else xs[job.point.onset_index]
        yield onset, max(onset, xs[relief])


def _range(line: Sequence[Column], peers: Sequence[Column], stretches: Sequence[Stretch]) -> tuple[float, float]:
    """Return the range of y. It includes all slow spans, but not a pause of one sample."""
    levels = [level for one in stretches for level in (one.before, one.level * 1.05) if math.isfinite(level)]
    if not line and not levels:
        return 0.0, 1.0
    lows, highs = sorted(column.low for column in line), sorted(column.high for column in line)
    bottom = min([_quantile(lows, 0.005), *levels] if lows else levels)
    top = max([_quantile(highs, 0.98), *levels] if highs else levels)
    for one in stretches:  # include short spans, unless a single sample is far off
        during = sorted(column.high for column in line if one.onset <= column.x <= one.end)
        if during and math.isfinite(one.level):
            top = max(top, min(_quantile(during, 0.9), 2 * one.level))
    # Peers may be far off. The plot of the series must stay readable.
    middles = [column.middle for column in peers]
    bottom = min([bottom, *(max(middle, bottom - (top - bottom)) for middle in middles)])
    top = max([top, *(min(column.high, top + (top - bottom)) for column in peers)])
    room = (top - bottom) * 0.06 or abs(top) * 0.05 or 1.0
    return bottom - room, top + room
