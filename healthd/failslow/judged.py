"""From series to what is to be said of them: where each is slow, and who is suspected. The one way in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from healthd.failslow.detect import detect
from healthd.failslow.model import Evidence, Judgement, Point, Series
from healthd.failslow.peers import judge

MANY_SAMPLES = 20_000  # below, to import numpy takes longer than it saves


def points_of(series: Sequence[Series]) -> tuple[tuple[Point, ...], ...]:
    """Of each series its points: by numpy where there are many samples, and the extra that brings it."""
    if sum(len(one.value) for one in series) >= MANY_SAMPLES:
        with suppress(ImportError):
            from healthd.failslow import many

            values, regimes, starts = zip(*((one.value, one.regimes, one.starts) for one in series), strict=True)
            return tuple(many.detect(values, regimes, starts))
    return tuple(detect(one.value, one.regimes, one.starts) for one in series)


def judged(series: Sequence[Series], evidence: Sequence[Evidence] = ()) -> Judgement:
    """evidence: what the nodes of these series told by themselves."""
    return judge(series, points_of(series), evidence)
