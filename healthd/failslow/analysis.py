"""Finds where each series is slow, and which components are suspects. This module is the package's entry point."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from healthd.failslow.always_slow import compare_with_peers
from healthd.failslow.detect import detect
from healthd.failslow.model import Diagnosis, Evidence, Point, Series
from healthd.failslow.peers import compare_peers

NUMPY_MIN_SAMPLES = 20_000  # with fewer samples, importing numpy takes longer than it saves


def find_points(series: Sequence[Series]) -> tuple[tuple[Point, ...], ...]:
    """Return the points in each series. Use numpy if there are many samples and numpy is installed."""
    if sum(len(item.value) for item in series) >= NUMPY_MIN_SAMPLES:
        with suppress(ImportError):
            from healthd.failslow import detect_numpy

            values, regimes, starts = zip(*((item.value, item.regimes, item.starts) for item in series), strict=True)
            return tuple(detect_numpy.detect(values, regimes, starts))
    return tuple(detect(item.value, item.regimes, item.starts) for item in series)


def diagnose(series: Sequence[Series], evidence: Sequence[Evidence] = ()) -> Diagnosis:
    """Analyse the series.

    If nothing is found, the notes report how many series were not compared with peers, and why.

    Args:
        evidence: conditions on the nodes, as recorded by root.
    """
    found = compare_peers(series, find_points(series), evidence)
    comparison = compare_with_peers(series)
    named = {name for item in found.suspects for name in item.series}
    slow = tuple(item for item in comparison.slow if item.series not in named)
    notes: list[str] = []
    if not (any(found.points) or found.suspects or found.slow_jobs or slow):
        notes = [
            f"{count:,} series not compared with peers: {why}" for why, count in sorted(comparison.skipped.items())
        ]
    return replace(found, slow_throughout=slow, compared_count=comparison.compared_count, notes=(*found.notes, *notes))
