"""Many tests at once: of a hundred true nothings, five have p < 0.05. What is left of each p then. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted so that, at a level, the chance of even one false finding is at most the level, however the tests hang
    together. Source: S. Holm, Scandinavian Journal of Statistics 6 (1979)."""
    tests, largest = len(p_values), 0.0
    adjusted = [1.0] * tests
    for place, at in enumerate(sorted(range(tests), key=lambda at: (p_values[at], at))):
        largest = max(largest, min(1.0, (tests - place) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Adjusted so that, at a level, at most that share of the findings is false on average. tests: how many there were,
    where those left out had p = 1. Source: Benjamini and Hochberg, J. R. Statist. Soc. B 57 (1995); it also holds where
    the tests hang together positively (Benjamini and Yekutieli, Annals of Statistics 29, 2001)."""
    of = max(len(p_values), tests or 0)
    adjusted, smallest = [1.0] * len(p_values), 1.0
    order = sorted(range(len(p_values)), key=lambda at: (p_values[at], at))
    for place in range(len(order), 0, -1):
        at = order[place - 1]
        smallest = min(smallest, p_values[at] * of / place)
        adjusted[at] = smallest
    return adjusted
