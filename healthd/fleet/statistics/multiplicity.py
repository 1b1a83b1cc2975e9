"""Adjusts p-values for multiple tests: among 100 tests without an effect, five have p < 0.05 by chance.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the probability of any false finding is at most the level.

    This holds for any dependence between the tests. Source: S. Holm, Scandinavian Journal of Statistics 6 (1979).
    """
    tests, largest = len(p_values), 0.0
    adjusted = [1.0] * tests
    for rank, index in enumerate(sorted(range(tests), key=lambda index: (p_values[index], index))):
        largest = max(largest, min(1.0, (tests - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float], tests: int | None = None) -> list[float]:
    """Adjust p-values so that, on average, the share of false findings is at most the level
    that they are compared with.

    Args:
        tests: total number of tests; needed if tests with p = 1 were left out. Source: Benjamini and Hochberg, J. R.
            Statist. Soc. B 57 (1995); it also holds for positively dependent tests (Benjamini and Yekutieli, Annals of
            Statistics 29, 2001).
    """
    total = max(len(p_values), tests or 0)
    adjusted, smallest = [1.0] * len(p_values), 1.0
    order = sorted(range(len(p_values)), key=lambda index: (p_values[index], index))
    for rank in range(len(order), 0, -1):
        index = order[rank - 1]
        smallest = min(smallest, p_values[index] * total / rank)
        adjusted[index] = smallest
    return adjusted
