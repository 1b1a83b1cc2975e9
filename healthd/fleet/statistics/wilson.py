"""How sure a share is that was counted."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(found: float, of: float, effect: float = 1.0, level: float = 0.95) -> tuple[float, float] | None:
    """The interval of the share found / of, with the score of Wilson (1927, J. Am. Stat. Assoc. 22); None of nothing.

    effect: the variance against that of independent cases, at least 1: `design_effect` of Kish, "Survey Sampling"
    (1965), by which both numbers are divided. So a hundred jobs that one alarm met are one case, or nearly.
    """
    if of <= 0:
        return None
    n, z = of / max(effect, 1.0), NormalDist().inv_cdf((1 + level) / 2)
    share, z2 = found / of, z * z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = z / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # At its ends it reaches them exactly, whatever was rounded.
    low = 0.0 if found <= 0 else max(0.0, middle - half)
    return low, 1.0 if found >= of else min(1.0, middle + half)


def clumping(total: float, squares: float) -> float:
    """How much wider than alone: of cases in clumps of k each, sum(k * k) / sum(k), which is the variance of a compound
    Poisson number against a Poisson one (Feller, "An Introduction to Probability Theory", volume 1, XII.2); 1 where
    there are none."""
    return max(1.0, squares / total) if total > 0 else 1.0
