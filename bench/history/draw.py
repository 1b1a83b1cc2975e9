"""Random numbers that are equal in every Python version: only Random.random() with a text seed, and plain arithmetic.

Each subject has its own stream, so that a change of one subject does not affect another.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log

Draw = Callable[[], float]  # in [0, 1)
GOLDEN = 0.6180339887498949


def stream(seed: int, subject: str) -> Draw:
    return random.Random(f"{seed}/{subject}").random


def even(start: float) -> Draw:
    """Return numbers that fill [0, 1) evenly (a Weyl sequence), so totals are right in a small history too."""
    at = start

    def following() -> float:
        nonlocal at
        at = (at + GOLDEN) % 1.0
        return at

    return following


def wait(draw: Draw, mean: float) -> float:
    """Return the time until the next event of a Poisson process."""
    return -mean * log(1.0 - draw())


def between(draw: Draw, low: int, high: int) -> int:
    """Return an integer with low <= integer < high."""
    return low + int(draw() * (high - low))


def quantile(knots: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value below which that share lies, by linear interpolation between (share, value)."""
    i = 1
    while knots[i][0] <= share:
        i += 1
    (low, a), (high, b) = knots[i - 1], knots[i]
    return a + (b - a) * (share - low) / (high - low)


def mean(knots: Sequence[tuple[float, float]]) -> float:
    return sum((high - low) * (a + b) / 2 for (low, a), (high, b) in pairwise(knots))


class Choice:
    """One of several values, by their weights."""

    def __init__(self, weighed: Sequence[tuple[object, float]]) -> None:
        self._values = [value for value, _ in weighed]
        total, self._edges = 0.0, []
        for _, weight in weighed:
            total += weight
            self._edges.append(total)
        self._edges = [edge / total for edge in self._edges]
        self._edges[-1] = 1.0

    def at(self, share: float) -> object:
        return self._values[bisect_right(self._edges, share)]
