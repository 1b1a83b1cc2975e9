"""Share of its time that a job makes progress, by formula and by simulation. Pure.

A job needs all its nodes and writes checkpoints at intervals. A failure of a node costs the work since the last
checkpoint, a wait in the queue and a restart. ETTR, the effective training time ratio, is the job's progress divided by
all the time it was queued or held nodes: Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

DAY = 86400
# Attempts that a simulation draws (one or two seconds). With fewer intervals than the second the result is a guess.
ATTEMPTS, LEAST_INTERVALS = 1_000_000, 100
RUNS, BATCHES = 2000, 100
NEVER = 1e-12  # expected failures: fewer than this vanish in the arithmetic


@dataclass(frozen=True, slots=True)
class Job:
    """A job and where it runs. Durations in seconds.

    nodes               N, 1 or more
    rate                r_f, failures per 1000 node-days; 0: no failures
    checkpoint_seconds  dt, progress between two checkpoints, more than 0
    restart_seconds     u0, from each start to progress
    queue_seconds       q, each wait for nodes: before the first start and after each failure
    write_seconds       w, time to write a checkpoint
    productive_seconds  R, the progress that the job needs; None: unlimited
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
        """lam L, L = u0 + dt/2: share of the running time spent on restarts and repeated work."""
        return self.failures_per_second * (self.restart_seconds + self.checkpoint_seconds / 2)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulation.

    ettr                      the mean of the runs; 0 if almost no interval ends without a failure
    standard_error            of the mean
    low, high                 5th and 95th percentile; None for a job without end
    runs, productive_seconds  number of runs, and the progress of each
    """

    ettr: float
    standard_error: float
    low: float | None
    high: float | None
    runs: int
    productive_seconds: float


def expected(job: Job) -> float:
    """Return E[ETTR] by definition: R / (wait + run), or its limit for a job without end.

        failures n = lam (R' + U), U = u0 + n L, R' = R (1 + w/dt), L = u0 + dt/2
        E[ETTR] = R / ((R' + u0) / (1 - lam L) (1 + lam q) + q)  ->  (1 - lam L) / ((1 + w/dt) (1 + lam q))

    0 from lam L = 1 on, where the job loses more than it makes. Derived by healthd: the paper (HPCA 2025) has readable
    definitions and an unreadable formula. With w = q = 0 the limit is that of its version 2, `closed_form`.
    """
    left = 1 - job.lost_share
    if left <= 0:
        return 0.0
    writing = 1 + job.write_seconds / job.checkpoint_seconds
    waiting = 1 + job.failures_per_second * job.queue_seconds
    if job.productive_seconds is None:
        return left / (writing * waiting)
    running = (job.productive_seconds * writing + job.restart_seconds) / left
    return job.productive_seconds / (running * waiting + job.queue_seconds)


def closed_form(job: Job) -> float:
    """Return E[ETTR] ~ (1 - N r_f (u0 + dt/2)) / (1 + w/dt), at least 0.

    Version 2 of the paper (arXiv 2410.21680v2), for a job that runs without end and never waits.
    """
    return max(0.0, 1 - job.lost_share) / (1 + job.write_seconds / job.checkpoint_seconds)


def exact(job: Job) -> float:
    """Return progress / expected time, for random failures (Poisson), also during restarts and writes.

    An interval of s = dt + w is repeated until no failure occurs: (1/lam + q) e^(lam u0) (e^(lam s) - 1). The first one
    includes its own start and wait: q + (1/lam + q) (e^(lam (u0 + s)) - 1). After the last interval nothing is written.
    Source: equation 20 of J. T. Daly, "A higher order estimate of the optimum checkpoint interval", Future Generation
    Computer Systems 22 (2006). The wait, the start and the end are healthd's.
    """
    lengths = _intervals(job)
    if job.productive_seconds is None:
        return job.checkpoint_seconds / _time_of(job, job.checkpoint_seconds + job.write_seconds, job.restart_seconds)
    whole, last = lengths
    full = job.checkpoint_seconds + job.write_seconds
    first = full if whole else last
    time = job.queue_seconds + _time_of(job, job.restart_seconds + first, 0.0)
    if whole:
        time += (whole - 1) * _time_of(job, full, job.restart_seconds) + _time_of(job, last, job.restart_seconds)
    return min(1.0, job.productive_seconds / time)  # sums of intervals are rounded


def daly_young_seconds(job: Job) -> float | None:
    """Return the checkpoint interval of least loss, dt* = sqrt(2 w / lam).

    None if writing is free, nothing fails, or `writes_too_long`.

    Source: J. W. Young, Communications of the ACM 17 (1974); Daly (2006); in the paper sqrt(2 w_cp / (N r_f)).
    """
    lam = job.failures_per_second
    if job.write_seconds <= 0 or lam <= 0 or writes_too_long(job):
        return None
    return math.sqrt(2 * job.write_seconds / lam)


def writes_too_long(job: Job) -> bool:
    """Return True if a checkpoint takes more than half the MTTF.

    `daly_young_seconds` assumes that it takes much less. Otherwise the best interval would be shorter than two writes.
    """
    return job.write_seconds * job.failures_per_second > 0.5


def at_interval(job: Job, checkpoint_seconds: float) -> Job:
    return replace(job, checkpoint_seconds=checkpoint_seconds)


def simulate(job: Job, seed: int) -> Simulated:
    """Run the job many times with random failures: a Monte Carlo check of the formulas. Deterministic for a seed."""
    random = np.random.default_rng(seed)
    full = job.checkpoint_seconds + job.write_seconds
    tries = math.exp(min(job.failures_per_second * (job.restart_seconds + full), 50.0))
    fitting = int(ATTEMPTS / tries)  # intervals
    if fitting < LEAST_INTERVALS:
        return Simulated(0.0, 0.0, None, None, 0, 0.0)
    if job.productive_seconds is not None:
        whole, last = _intervals(job)
        runs = min(RUNS, fitting // (whole + 1))
        if runs >= BATCHES:
            lengths = np.full((runs, whole + 1), full, dtype=float)
            lengths[:, -1] = last
            first = np.zeros((runs, whole + 1), dtype=bool)
            first[:, 0] = True
            times = job.queue_seconds + _times(job, lengths, first, random).sum(axis=1)
            ratios = np.minimum(job.productive_seconds / times, 1.0)
            low, high = (float(end) for end in np.quantile(ratios, (0.05, 0.95)))
            return Simulated(*_mean(ratios), low, high, runs, job.productive_seconds)
    # A job without end, or one so long that its start is negligible: simulate parts of it.
    batches = min(BATCHES, fitting // 10)
    lengths = np.full((batches, fitting // batches), full, dtype=float)
    times = _times(job, lengths, np.zeros_like(lengths, dtype=bool), random).sum(axis=1)
    progress = job.checkpoint_seconds * lengths.shape[1]
    mean = min(1.0, float(progress * batches / times.sum()))
    error = float(np.std(progress / times, ddof=1) / math.sqrt(batches))
    return Simulated(mean, error, None, None, batches, progress)


def _mean(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


def _intervals(job: Job) -> tuple[int, float]:
    """Return the number of full intervals of a job, and the length of its last one, which is more than 0."""
    if job.productive_seconds is None:
        return 0, job.checkpoint_seconds
    whole = max(0, math.ceil(job.productive_seconds / job.checkpoint_seconds) - 1)
    return whole, job.productive_seconds - whole * job.checkpoint_seconds


def _time_of(job: Job, length: float, restart: float) -> float:
    """Return the expected time of a piece of work of `length`, which starts again after each failure.

    The first attempt has no restart. The `restart` of later attempts is added to the length, or already included (0).
    """
    lam = job.failures_per_second
    if lam * (length + restart + job.queue_seconds) < NEVER:
        return length
    try:
        return (1 / lam + job.queue_seconds) * math.exp(lam * restart) * math.expm1(lam * length)
    except OverflowError:
        return math.inf


def _times(
    job: Job, lengths: NDArray[np.float64], first: NDArray[np.bool_], random: np.random.Generator
) -> NDArray[np.float64]:
    """Return the time of each interval. Failures are random, so intervals are independent and are computed at once.

    first: intervals that begin with a start.
    """
    needed: NDArray[np.float64] = (lengths + job.restart_seconds * first).ravel()
    times: NDArray[np.float64] = needed.copy()
    lam = job.failures_per_second
    if lam * float(times.max()) < NEVER:
        return np.reshape(times, lengths.shape)
    again = lengths.ravel() + job.restart_seconds
    times[:] = 0.0
    left = np.arange(len(needed))
    while len(left):
        until = random.exponential(1 / lam, len(left))
        done = until >= needed[left]
        times[left[done]] += needed[left[done]]
        failed = left[~done]
        times[failed] += until[~done] + job.queue_seconds
        needed[failed] = again[failed]
        left = failed
    return np.reshape(times, lengths.shape)
