"""Analysis of series: where each one is slow, and which components are suspects. Entry point of the package."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from healthd.failslow.always_slow import compared
from healthd.failslow.detect import detect
from healthd.failslow.model import Evidence, Judgement, Point, Series
from healthd.failslow.peers import judge

MANY_SAMPLES = 20_000  # with fewer, importing numpy takes longer than it saves


def points_of(series: Sequence[Series]) -> tuple[tuple[Point, ...], ...]:
    """Return the points of each series. Use numpy if there are many samples and the extra is installed."""
    if sum(len(one.value) for one in series) >= MANY_SAMPLES:
        with suppress(ImportError):
            from healthd.failslow import detect_many

            values, regimes, starts = zip(*((one.value, one.regimes, one.starts) for one in series), strict=True)
            return tuple(detect_many.detect(values, regimes, starts))
    return tuple(detect(one.value, one.regimes, one.starts) for one in series)


def judged(series: Sequence[Series], evidence: Sequence[Evidence] = ()) -> Judgement:
    """Analyse these series.

    If nothing is found, the notes say how many series were not compared with peers, and why.

    Args:
        evidence: conditions of the nodes, as root recorded them.
    """
    found = judge(series, points_of(series), evidence)
    beside = compared(series)
    named = {name for one in found.suspects for name in one.series}
    slow = tuple(one for one in beside.slow if one.series not in named)
    notes: list[str] = []
    if not (any(found.points) or found.suspects or found.job_slow or slow):
        notes = [f"{count:,} series not compared with peers: {why}" for why, count in sorted(beside.why.items())]
    return replace(found, slow_throughout=slow, compared=beside.number, notes=(*found.notes, *notes))
