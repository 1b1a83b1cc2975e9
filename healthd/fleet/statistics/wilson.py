"""Confidence interval for a counted share."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(found: float, total: float, effect: float = 1.0, level: float = 0.95) -> tuple[float, float] | None:
    """Return Wilson's score interval for the share found / total, or None if there are no cases.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927).

    Args:
        effect: variance relative to independent cases, at least 1 (`design_effect`; Kish, "Survey Sampling", 1965).
            `found` and `total` are divided by it, so that a hundred jobs that saw the same alarm count as about one
            case.
    """
    if total <= 0:
        return None
    n, z = total / max(effect, 1.0), NormalDist().inv_cdf((1 + level) / 2)
    share, z2 = found / total, z * z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # If the share is 0 or 1, this end of the interval is set exactly, without rounding errors.
    low = 0.0 if found <= 0 else max(0.0, middle - half)
    return low, 1.0 if found >= total else min(1.0, middle + half)


def design_effect(total: float, squares: float) -> float:
    """Return the design effect for cases in clumps of size k: sum(k * k) / sum(k), or 1 if there are no cases.

    The design effect is the variance of a compound Poisson number relative to that of a Poisson number (Feller, "An
    Introduction to Probability Theory", volume 1, XII.2).
    """
    return max(1.0, squares / total) if total > 0 else 1.0
