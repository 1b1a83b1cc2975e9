"""Bayesian online change-point detection: computes how likely each length of the current run of samples is.

R. P. Adams and D. J. C. MacKay, "Bayesian online changepoint detection" (arXiv 0710.3742), with a constant hazard: a
run ends at each sample with probability 1 / HAZARD_SAMPLES. Samples in a run are Normal with unknown mean and variance
(conjugate prior: normal-inverse-gamma). The predictive distribution of a run is therefore Student's t.

FALCON (arXiv 2410.12588) detects a change by P(r_t = 0) > 0.9, where r_t is the length of the run. With a constant
hazard, this never happens: at every sample, r_t = 0 gets a share of 1 / HAZARD_SAMPLES of the probability, whatever the
sample is. Short runs become likely only a few samples after a change. The rule here is therefore P(r_t <= RECENT) >
MIN_PROBABILITY.

Memory use is constant: all runs of RUNS - 1 or more samples are treated as one run, which gradually forgets older
samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

HAZARD_SAMPLES = 250
RUNS = 40
RECENT = 5
MIN_PROBABILITY = 0.9

# Prior of a run, for the logarithm of times. The noise is 5 %, with the weight of 2 PRIOR_ALPHA samples. The mean may
# differ from the previous run's mean by about 40 %.
PRIOR_NOISE = 0.05
PRIOR_ALPHA = 3.0
PRIOR_BETA = PRIOR_ALPHA * PRIOR_NOISE**2
PRIOR_KAPPA = (PRIOR_NOISE / 0.4) ** 2

ALPHAS = tuple(PRIOR_ALPHA + run / 2 for run in range(RUNS))
KAPPAS = tuple(PRIOR_KAPPA + run for run in range(RUNS))
# Student's t for a run with alpha, beta, kappa: FACTORS / sqrt(beta) * (1 + d^2 SHAPES / beta)^-POWERS.
SHAPES = tuple(kappa / (2 * (kappa + 1)) for kappa in KAPPAS)
POWERS = tuple(alpha + 0.5 for alpha in ALPHAS)
FACTORS = tuple(
    math.exp(math.lgamma(alpha + 0.5) - math.lgamma(alpha)) * math.sqrt(shape / math.pi)
    for alpha, shape in zip(ALPHAS, SHAPES, strict=True)
)
# Update of a run's mean and beta with d = sample - mean: mean += d * STEPS, beta += d^2 * SHAPES.
STEPS = tuple(1 / (kappa + 1) for kappa in KAPPAS)
# factor for the longest run's beta, so that it keeps the weight of RUNS - 1 samples
BETA_KEPT_SHARE = ALPHAS[-1] / (ALPHAS[-1] + 0.5)
CONTINUE_PROBABILITY = 1 - 1 / HAZARD_SAMPLES


@dataclass(slots=True)
class RunLengths:
    """The distribution of run lengths.

    `probabilities[r]`, `means[r]` and `betas[r]` belong to a run of r samples; the last entry belongs to RUNS - 1
    samples or more.
    """

    probabilities: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)

    def add(self, sample: float) -> int:
        """Add the logarithm of one time. Return the number of samples (including this one) in a new run.

        The result is 1 to RECENT, or 0 if it is unlikely that a new run has begun.
        """
        if not self.probabilities:
            self.probabilities, self.means, self.betas = (
                [1.0] + [0.0] * (RUNS - 1),
                [sample] * RUNS,
                [PRIOR_BETA] * RUNS,
            )
            return 0
        probabilities, means, betas = [0.0], [sample], [PRIOR_BETA]
        sqrt = math.sqrt
        for probability, mean, beta, factor, shape, power, step in zip(
            self.probabilities, self.means, self.betas, FACTORS, SHAPES, POWERS, STEPS, strict=True
        ):
            off = sample - mean
            grown = beta + off * off * shape
            probabilities.append(probability * factor / sqrt(beta) * (beta / grown) ** power)
            means.append(mean + off * step)
            betas.append(grown)
        # The last two entries now both belong to the longest run. It takes the values of the likelier one.
        longest_beta = betas.pop() * BETA_KEPT_SHARE
        mean, probability = means.pop(), probabilities.pop()
        if probability >= probabilities[-1]:
            means[-1], betas[-1] = mean, longest_beta
        probabilities[-1] += probability
        total = sum(probabilities)
        share = CONTINUE_PROBABILITY / total
        self.probabilities = [probability * share for probability in probabilities]
        self.probabilities[0] = 1 - CONTINUE_PROBABILITY
        self.means, self.betas = means, betas
        return recent_run_length(self.probabilities[: RECENT + 1])


def recent_run_length(probabilities: Sequence[float]) -> int:
    """Return the most likely length of a new run, or 0 if all new runs together are too unlikely.

    Args:
        probabilities: probabilities of runs of 0 to RECENT samples.
    """
    if sum(probabilities) <= MIN_PROBABILITY:
        return 0
    return max(range(1, RECENT + 1), key=probabilities.__getitem__)
