"""Formulas and a simulation for the share of a job's time in which it makes progress. All functions are pure.

A job needs all its nodes and writes checkpoints at intervals. A node failure costs the work since the last checkpoint,
a wait in the queue and a restart. ETTR, the effective training time ratio, is the job's progress divided by all the
time for which it was queued or held nodes: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

DAY = 86400
# The first number is how many attempts a simulation draws, which takes one or two seconds. With fewer checkpoint
# intervals than the second number, the result is only a guess.
ATTEMPTS, MIN_INTERVALS = 1_000_000, 100
RUNS, BATCHES = 2000, 100
MIN_EXPECTED_FAILURES = 1e-12  # smallest expected number of failures; a smaller number would vanish in rounding


@dataclass(frozen=True, slots=True)
class Job:
    """A job and the machine on which it runs. Durations are in seconds.

    Attributes:
        nodes: N, 1 or more.
        rate: r_f, failures per 1000 node-days; 0 for no failures.
        checkpoint_seconds: dt, the progress between two checkpoints, more than 0.
        restart_seconds: u0, the time from each start until the job makes progress.
        queue_seconds: q, the time of each wait for nodes: before the first start and after each failure.
        write_seconds: w, time to write a checkpoint.
        productive_seconds: R, the progress that the job needs; None for a job that never ends.
    """

    nodes: float
    rate: float
    checkpoint_seconds: float = 3600.0
    restart_seconds: float = 300.0
    queue_seconds: float = 0.0
    write_seconds: float = 0.0
    productive_seconds: float | None = None

    @property
    def failures_per_second(self) -> float:
        """lam = N r_f; its inverse is the MTTF."""
        return self.nodes * self.rate / 1000 / DAY

    @property
    def lost_share(self) -> float:
        """lam L with L = u0 + dt/2: the share of the running time that is spent on restarts and repeated work."""
        return self.failures_per_second * (self.restart_seconds + self.checkpoint_seconds / 2)


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    Attributes:
        ettr: mean of the runs; 0 if almost every interval has a failure.
        standard_error: standard error of the mean.
        low, high: 5th and 95th percentile, None for a job without end.
        runs, productive_seconds: number of runs, and the progress of each.
    """

    ettr: float
    standard_error: float
    low: float | None
    high: float | None
    runs: int
    productive_seconds: float


def analytic(job: Job) -> float:
    """Return E[ETTR] by definition: R / (wait + run), or its limit for a job without end.

        failures n = lam (R' + U), U = u0 + n L, R' = R (1 + w/dt), L = u0 + dt/2
        E[ETTR] = R / ((R' + u0) / (1 - lam L) (1 + lam q) + q)  ->  (1 - lam L) / ((1 + w/dt) (1 + lam q))

    If lam L is 1 or more, the job loses more progress than it makes, and the result is 0. healthd derived this formula
    from the paper's definitions, because the formula in the paper (HPCA 2025) is unreadable. With w = q = 0, the limit
    equals `closed_form`, which is from version 2 of the paper.
    """
    productive_share = 1 - job.lost_share
    if productive_share <= 0:
        return 0.0
    writing = 1 + job.write_seconds / job.checkpoint_seconds
    waiting = 1 + job.failures_per_second * job.queue_seconds
    if job.productive_seconds is None:
        return productive_share / (writing * waiting)
    running = (job.productive_seconds * writing + job.restart_seconds) / productive_share
    return job.productive_seconds / (running * waiting + job.queue_seconds)


def closed_form(job: Job) -> float:
    """Return E[ETTR] ~ (1 - N r_f (u0 + dt/2)) / (1 + w/dt), at least 0.

    This is from version 2 of the paper (arXiv 2410.21680v2), for a job that never ends and never waits.
    """
    return max(0.0, 1 - job.lost_share) / (1 + job.write_seconds / job.checkpoint_seconds)


def exact(job: Job) -> float:
    """Return progress / expected time for random failures (Poisson), which may also occur during restarts and writes.

    An interval of s = dt + w is repeated until no failure occurs. The expected time for this is (1/lam + q) e^(lam u0)
    (e^(lam s) - 1). The first interval also has a start and a wait, and takes q + (1/lam + q) (e^(lam (u0 + s)) - 1).
    After the last interval, no checkpoint is written. Source: equation 20 of J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval", Future Generation Computer Systems 22 (2006). healthd added the wait, the start
    and the end.
    """
    intervals = _intervals(job)
    if job.productive_seconds is None:
        return job.checkpoint_seconds / _expected_seconds(
            job, job.checkpoint_seconds + job.write_seconds, job.restart_seconds
        )
    full_intervals, last = intervals
    full = job.checkpoint_seconds + job.write_seconds
    first = full if full_intervals else last
    seconds = job.queue_seconds + _expected_seconds(job, job.restart_seconds + first, 0.0)
    if full_intervals:
        seconds += (full_intervals - 1) * _expected_seconds(job, full, job.restart_seconds) + _expected_seconds(
            job, last, job.restart_seconds
        )
    return min(1.0, job.productive_seconds / seconds)  # sums of intervals are rounded


def daly_young_seconds(job: Job) -> float | None:
    """Return the checkpoint interval with the least loss, dt* = sqrt(2 w / lam).

    Return None if writing takes no time, if nothing fails, or if `writes_too_long` is true.

    Source: J. W. Young, Communications of the ACM 17 (1974); Daly (2006); the paper writes sqrt(2 w_cp / (N r_f)).
    """
    lam = job.failures_per_second
    if job.write_seconds <= 0 or lam <= 0 or writes_too_long(job):
        return None
    return math.sqrt(2 * job.write_seconds / lam)


def writes_too_long(job: Job) -> bool:
    """Return True if a checkpoint takes more than half the MTTF.

    The rule in `daly_young_seconds` is invalid then: its best interval would be shorter than two writes.
    """
    return job.write_seconds * job.failures_per_second > 0.5


def with_interval(job: Job, checkpoint_seconds: float) -> Job:
    return replace(job, checkpoint_seconds=checkpoint_seconds)


def simulate(job: Job, seed: int) -> Simulation:
    """Check the formulas by Monte Carlo: run the job many times with random failures.

    Deterministic for a given seed.
    """
    random = np.random.default_rng(seed)
    full = job.checkpoint_seconds + job.write_seconds
    attempts_per_interval = math.exp(min(job.failures_per_second * (job.restart_seconds + full), 50.0))
    interval_budget = int(ATTEMPTS / attempts_per_interval)  # intervals
    if interval_budget < MIN_INTERVALS:
        return Simulation(0.0, 0.0, None, None, 0, 0.0)
    if job.productive_seconds is not None:
        full_intervals, last = _intervals(job)
        runs = min(RUNS, interval_budget // (full_intervals + 1))
        if runs >= BATCHES:
            lengths = np.full((runs, full_intervals + 1), full, dtype=float)
            lengths[:, -1] = last
            first = np.zeros((runs, full_intervals + 1), dtype=bool)
            first[:, 0] = True
            times = job.queue_seconds + _simulated_seconds(job, lengths, first, random).sum(axis=1)
            ratios = np.minimum(job.productive_seconds / times, 1.0)
            low, high = (float(end) for end in np.quantile(ratios, (0.05, 0.95)))
            return Simulation(*_mean(ratios), low, high, runs, job.productive_seconds)
    # The job has no end, or is so long that its start is negligible. Only parts of the job are simulated.
    batches = min(BATCHES, interval_budget // 10)
    lengths = np.full((batches, interval_budget // batches), full, dtype=float)
    times = _simulated_seconds(job, lengths, np.zeros_like(lengths, dtype=bool), random).sum(axis=1)
    progress = job.checkpoint_seconds * lengths.shape[1]
    mean = min(1.0, float(progress * batches / times.sum()))
    error = float(np.std(progress / times, ddof=1) / math.sqrt(batches))
    return Simulation(mean, error, None, None, batches, progress)


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _intervals(job: Job) -> tuple[int, float]:
    """Return the number of a job's full intervals, and the length of its last interval, which is more than 0."""
    if job.productive_seconds is None:
        return 0, job.checkpoint_seconds
    full_intervals = max(0, math.ceil(job.productive_seconds / job.checkpoint_seconds) - 1)
    return full_intervals, job.productive_seconds - full_intervals * job.checkpoint_seconds


def _expected_seconds(job: Job, length: float, restart: float) -> float:
    """Return the expected time for work of `length` seconds that begins again after each failure.

    Each attempt after the first takes `restart` seconds longer (0 if `length` already includes the restart).
    """
    lam = job.failures_per_second
    if lam * (length + restart + job.queue_seconds) < MIN_EXPECTED_FAILURES:
        return length
    try:
        return (1 / lam + job.queue_seconds) * math.exp(lam * restart) * math.expm1(lam * length)
    except OverflowError:
        return math.inf


def _simulated_seconds(
    job: Job, lengths: NDArray[np.float64], first: NDArray[np.bool_], random: np.random.Generator
) -> NDArray[np.float64]:
    """Return the time that each interval takes.

    Failures are random, so intervals are independent and computed together.

    Args:
        first: True for each interval that begins with the job's start.
    """
    required: NDArray[np.float64] = (lengths + job.restart_seconds * first).ravel()
    times: NDArray[np.float64] = required.copy()
    lam = job.failures_per_second
    if lam * float(times.max()) < MIN_EXPECTED_FAILURES:
        return np.reshape(times, lengths.shape)
    retry_lengths = lengths.ravel() + job.restart_seconds
    times[:] = 0.0
    pending = np.arange(len(required))
    while len(pending):
        time_to_failure = random.exponential(1 / lam, len(pending))
        succeeded = time_to_failure >= required[pending]
        times[pending[succeeded]] += required[pending[succeeded]]
        failed = pending[~succeeded]
        times[failed] += time_to_failure[~succeeded] + job.queue_seconds
        required[failed] = retry_lengths[failed]
        pending = failed
    return np.reshape(times, lengths.shape)
