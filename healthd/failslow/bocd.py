"""Bayesian online change-point detection: how long the present run of samples has lasted, as a distribution.

R. P. Adams and D. J. C. MacKay, "Bayesian online changepoint detection" (arXiv 0710.3742), with a constant hazard: a
run ends at each sample with probability 1 / HAZARD_SAMPLES. Samples of a run are Normal, its mean and variance unknown
(conjugate prior: normal-inverse-gamma), so that what a run predicts is a Student's t.

FALCON (arXiv 2410.12588) tells a change by P(r_t = 0) > 0.9. Under a constant hazard that never is: of every sample's
probability the share 1 / HAZARD_SAMPLES goes to r_t = 0, whatever the sample is. What a change moves to short runs is
seen a few samples later, so the rule is P(r_t <= RECENT) > LEAST_CHANCE.

The memory is constant: runs of RUNS - 1 samples and more are one, which forgets what is older.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

HAZARD_SAMPLES = 250
RUNS = 40
RECENT = 5
LEAST_CHANCE = 0.9

# The prior of a run, in the logarithm of times: a noise of 5 %, known as from 2 PRIOR_ALPHA samples; a mean that may
# be off the last one's by some 40 %.
PRIOR_NOISE = 0.05
PRIOR_ALPHA = 3.0
PRIOR_BETA = PRIOR_ALPHA * PRIOR_NOISE**2
PRIOR_KAPPA = (PRIOR_NOISE / 0.4) ** 2

ALPHAS = tuple(PRIOR_ALPHA + run / 2 for run in range(RUNS))
KAPPAS = tuple(PRIOR_KAPPA + run for run in range(RUNS))
# Student's t of a run with alpha, beta, kappa: FACTORS / sqrt(beta) * (1 + d^2 SHAPES / beta)^-POWERS.
SHAPES = tuple(kappa / (2 * (kappa + 1)) for kappa in KAPPAS)
POWERS = tuple(alpha + 0.5 for alpha in ALPHAS)
FACTORS = tuple(
    math.exp(math.lgamma(alpha + 0.5) - math.lgamma(alpha)) * math.sqrt(shape / math.pi)
    for alpha, shape in zip(ALPHAS, SHAPES, strict=True)
)
# How a run's mean and beta move by d = sample - mean: mean += d * STEPS, beta += d^2 * SHAPES.
STEPS = tuple(1 / (kappa + 1) for kappa in KAPPAS)
KEPT = ALPHAS[-1] / (ALPHAS[-1] + 0.5)  # of the longest run's beta, so that it weighs as much as RUNS - 1 samples do
GOES_ON = 1 - 1 / HAZARD_SAMPLES


@dataclass(slots=True)
class RunLengths:
    """chances[r], means[r], betas[r] of a run of r samples; the last is of RUNS - 1 or more."""

    chances: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)

    def add(self, sample: float) -> int:
        """Takes the logarithm of one time. Returns how many samples, this one included, are of a new run: 1 to RECENT;
        0 if it is not likely that one has begun."""
        if not self.chances:
            self.chances, self.means, self.betas = [1.0] + [0.0] * (RUNS - 1), [sample] * RUNS, [PRIOR_BETA] * RUNS
            return 0
        chances, means, betas = [0.0], [sample], [PRIOR_BETA]
        sqrt = math.sqrt
        for chance, mean, beta, factor, shape, power, step in zip(
            self.chances, self.means, self.betas, FACTORS, SHAPES, POWERS, STEPS, strict=True
        ):
            off = sample - mean
            grown = beta + off * off * shape
            chances.append(chance * factor / sqrt(beta) * (beta / grown) ** power)
            means.append(mean + off * step)
            betas.append(grown)
        # The last two are both of the longest run now: it is as the likelier one.
        longest = betas.pop() * KEPT
        mean, chance = means.pop(), chances.pop()
        if chance >= chances[-1]:
            means[-1], betas[-1] = mean, longest
        chances[-1] += chance
        total = sum(chances)
        share = GOES_ON / total
        self.chances = [chance * share for chance in chances]
        self.chances[0] = 1 - GOES_ON
        self.means, self.betas = means, betas
        return newest(self.chances[: RECENT + 1])


def newest(chances: Sequence[float]) -> int:
    """Of the chances of runs of 0 to RECENT samples: the likeliest run's length, 0 if together they are too small."""
    if sum(chances) <= LEAST_CHANCE:
        return 0
    return max(range(1, RECENT + 1), key=chances.__getitem__)
