"""Keeps the monitored jobs on this node: their series, their slowness, and the rank that causes it.

This module uses no sockets and no clock. A job exists while one of its ranks is connected or its counters are sampled.

A rank is named by the rule in healthd/failslow/peers.py, applied to the ranks on one node. A collective makes every
rank equally slow, so a rank's own time must show that it is the cause:
- its busy time rose against its own baseline, by more than LIMIT times the median of the other ranks (FALCON, arXiv
  2410.12588, step 5);
- the rise makes up MIN_EXPLAINED_SHARE of the lost time;
- there are at least MIN_PEERS ranks, and the outlying ranks are a minority.

If no rank reports a busy time, the iterations of workers that do not wait for each other are compared.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from healthd.failslow.live.datagram import StepMessage
from healthd.failslow.live.document import MAX_RECENT, LiveJob, LostSeconds, clean_sentence
from healthd.failslow.live.evidence import NodeChange, is_hardware_fault
from healthd.failslow.live.series import Sample, Series
from healthd.failslow.live.settings import LiveSettings
from healthd.failslow.model import Cause, Kind
from healthd.failslow.outliers import LIMIT, MIN_EXPLAINED_SHARE, MIN_PEERS

CLIENT, COUNTERS = "client", "counters"
FORGET_SECONDS = 120.0  # a job that is known only from counters ends this time plus QUIET_SAMPLES after its last sample
MAX_GPU_LOOKUPS = 5  # the search for a rank's GPU is limited, because users control how many files the rank has open
GRACE_SECONDS = 60.0  # a message may include steps from before the connection
# multiple of a sample's duration; if the job's rhythm changes, the new rhythm is found within this time
QUIET_SAMPLES = 50.0

# key: PCI address of the suspect GPU or "", cause according to the ranks' times, onset; value: changes on the node
FindChanges = Callable[[str, Cause, float | None], tuple[NodeChange, ...]]


@dataclass(slots=True)
class Rank:
    """A process that reports its steps.

    Attributes:
        number, local_rank: as reported by the process, -1 if not reported.
        started_at: time of the first message.
        reported_seconds: total duration of the steps since then.
        gpu_lookups: number of searches for its GPU.
    """

    pid: int
    started_at: float
    iteration: Series
    busy: Series | None = None
    reported_seconds: float = 0.0
    number: int = -1
    local_rank: int = -1
    gpu: str = ""
    gpu_lookups: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.number}" if self.number >= 0 else f"process {self.pid}"

    def plausible_steps(self, step: StepMessage, now: float) -> float:
        """Return the number of reported steps that fit in the elapsed time. This limits the loss that a rank can
        claim."""
        available_seconds = max(0.0, now - self.started_at + GRACE_SECONDS - self.reported_seconds)
        steps = min(float(step.steps), available_seconds / step.seconds)
        self.reported_seconds += steps * step.seconds
        return steps


@dataclass(slots=True)
class Job:
    """A job as seen by one source.

    Attributes:
        ranks: keyed by connection.
        counters: keyed by counter name.
        ended_ranks_seconds: time lost by ranks that ended.
        sample_seconds: time that one sample of the counters covers.
    """

    name: str
    source: str
    ranks: dict[int, Rank] = field(default_factory=dict)
    counters: dict[str, Series] = field(default_factory=dict)
    ended_ranks_seconds: float = 0.0
    last_time: float = 0.0
    sample_seconds: float = 0.0
    record: LiveJob | None = None
    node_changes: tuple[NodeChange, ...] = ()  # changes on the node at the onset


class Jobs:
    """All monitored jobs.

    `find_gpu(pid, job, local rank)` returns the PCI address of a process's GPU, or "" if it is unknown.
    """

    def __init__(
        self,
        settings: LiveSettings,
        find_gpu: Callable[[int, str, int], str],
        find_changes: FindChanges = lambda gpu, cause, since: (),
    ) -> None:
        self.settings = settings
        self.recent: deque[LiveJob] = deque(maxlen=MAX_RECENT)
        self._find_gpu = find_gpu
        self._find_changes = find_changes
        self._jobs: dict[tuple[str, str], Job] = {}
        self._reported: list[tuple[object, ...]] = []  # contents of the last evaluation, for detecting changes
        self._ended_lost = {CLIENT: 0.0, COUNTERS: 0.0}  # seconds

    def reconfigure(self, settings: LiveSettings) -> None:
        """Apply new thresholds. Data about running jobs is kept."""
        self.settings = settings
        for job in self._jobs.values():
            percent = self._slow_percent(job.source)
            for series in _all_series(job):
                series.set_percent(percent)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs)

    @property
    def slow_jobs(self) -> list[LiveJob]:
        return [job.record for job in self._jobs.values() if job.record is not None and job.record.slow]

    def add_step(self, connection: int, pid: int, name: str, step: StepMessage, now: float) -> bool:
        """Add a rank's message. Return True if the job is new, or if one of its series became slow or recovered."""
        is_new = (name, CLIENT) not in self._jobs
        job = self._job(name, CLIENT)
        job.last_time = now
        rank = job.ranks.get(connection)
        if rank is None:
            rank = job.ranks[connection] = Rank(pid, now, Series(Kind.ITERATION, self.settings.slow_percent))
        if rank.number < 0:
            rank.number, rank.local_rank = step.rank, step.local_rank
        steps = rank.plausible_steps(step, now)
        changed = rank.iteration.add(step.seconds, now, steps)
        if step.busy is not None:
            if rank.busy is None:
                rank.busy = Series(Kind.BUSY, self.settings.slow_percent)
            changed |= rank.busy.add(step.busy, now, steps)
        return changed or is_new

    def add_sample(self, sample: Sample) -> bool:
        """Add an iteration time from sampled counters. The result is the same as for `add_step`."""
        is_new = (sample.job, COUNTERS) not in self._jobs
        job = self._job(sample.job, COUNTERS)
        job.last_time, job.sample_seconds = sample.time, sample.value * sample.steps
        series = job.counters.get(sample.series)
        if series is None:
            if len(job.counters) >= self.settings.max_ranks:
                return False
            series = job.counters[sample.series] = Series(sample.kind, self.settings.counters_percent)
        return series.add(sample.value, sample.time, sample.steps) or is_new

    def remove_connection(self, connection: int, name: str, now: float) -> bool:
        """Remove a connection that ended. Return True if this ended the job."""
        job = self._jobs.get((name, CLIENT))
        rank = job.ranks.pop(connection, None) if job is not None else None
        if job is None or rank is None:
            return False
        job.ended_ranks_seconds += rank.iteration.lost_seconds
        if job.ranks:
            return False
        self._end(job, now)
        return True

    def end_quiet_jobs(self, now: float, sampled_job: str) -> bool:
        """End jobs that are known only from counters and have no new samples. Return True if there was such a job.

        Such a job ends if its counters are no longer sampled, or if its next sample is overdue.

        Args:
            sampled_job: the job whose counters are sampled.
        """
        by_counters = [job for job in self._jobs.values() if job.source == COUNTERS]
        quiet = [
            job
            for job in by_counters
            if job.name != sampled_job or now - job.last_time > FORGET_SECONDS + QUIET_SAMPLES * job.sample_seconds
        ]
        for job in quiet:
            self._end(job, now)
        return bool(quiet)

    def evaluate(self, is_paused: bool) -> bool:
        """Evaluate all jobs again. Return True if the reported contents changed.

        Args:
            is_paused: True if detection is paused: jobs that become slow now are not reported.
        """
        before = self._reported
        for job in self._jobs.values():
            job.record = self._evaluate_job(job, is_paused)
        self._reported = _reported_content(self.records())
        return self._reported != before

    def records(self) -> tuple[LiveJob, ...]:
        return tuple(job.record for job in self._jobs.values() if job.record is not None)

    def lost_seconds(self) -> LostSeconds:
        """Return the lost time of all jobs since the process started."""
        total = dict(self._ended_lost)
        for job in self._jobs.values():
            total[job.source] += job.record.lost_seconds if job.record is not None else 0.0
        return LostSeconds(round(total[CLIENT], 3), round(total[COUNTERS], 3))

    def _evaluate_job(self, job: Job, is_paused: bool) -> LiveJob:
        ranks = list(job.ranks.values())
        found = evaluate_ranks(ranks) if job.source == CLIENT else evaluate_counters(job.counters)
        lost_by_series = [series.lost_seconds for series in _all_series(job) if series.kind is not Kind.BUSY]
        # All counters of a job show the same iterations, so only one counts.
        lost = job.ended_ranks_seconds + (
            sum(lost_by_series) if job.source == CLIENT else max(lost_by_series, default=0.0)
        )
        count = len(ranks) if job.source == CLIENT else 1  # counters show only the job as a whole
        record = LiveJob(job.name, count, job.source, lost_seconds=round(lost, 3))
        was_slow = job.record is not None and job.record.slow
        if not found.slow or (is_paused and not was_slow):
            return record
        gpu = name = ""
        if found.rank is not None:
            rank = ranks[found.rank]
            if not rank.gpu and rank.gpu_lookups < MAX_GPU_LOOKUPS:
                rank.gpu_lookups += 1
                rank.gpu = self._find_gpu(rank.pid, job.name, rank.local_rank)
            gpu, name = rank.gpu, rank.name
        cause = Cause.COMPUTE_GPU if gpu and found.cause is Cause.COMPUTE else found.cause
        before = job.record if was_slow else None
        # The changes on the node are those at the onset. They are computed only once, or again if another rank is named
        # later.
        if before is None or (before.suspect, before.rank) != (gpu, name):
            job.node_changes = self._find_changes(gpu, cause, found.since)
        return replace(
            record,
            slow=True,
            since=found.since,
            slowdown=round(found.slowdown, 4),
            suspect=gpu,
            rank=name,
            cause=cause.value,
            evidence=(
                *map(clean_sentence, found.evidence),
                *(clean_sentence(change.sentence) for change in job.node_changes),
            ),
            node_changed=any(map(is_hardware_fault, job.node_changes)),
        )

    def _job(self, name: str, source: str) -> Job:
        job = self._jobs.get((name, source))
        if job is None:
            job = self._jobs[name, source] = Job(name, source)
        return job

    def _slow_percent(self, source: str) -> float:
        return self.settings.slow_percent if source == CLIENT else self.settings.counters_percent

    def _end(self, job: Job, now: float) -> None:
        record = job.record or LiveJob(job.name, 0, job.source)
        lost = round(max(record.lost_seconds, job.ended_ranks_seconds), 3)
        self._ended_lost[job.source] += lost
        self.recent.append(replace(record, lost_seconds=lost, ended=round(now, 3)))
        del self._jobs[job.name, job.source]


def evaluate_counters(counters: dict[str, Series]) -> Evaluation:
    """Evaluate sampled counters. They show that a job is slow, but never which rank is the cause."""
    slow = {name: point for name, series in counters.items() if (point := series.slow) is not None}
    if not slow:
        return Evaluation(False)
    since = min((counter.since for counter in counters.values() if counter.since is not None), default=None)
    evidence = tuple(
        f"{name}: iterations take {point.slowdown:.0%} longer than before ({counters[name].healthy:.3g} s)"
        for name, point in slow.items()
    )
    return Evaluation(True, since, max(point.slowdown for point in slow.values()), None, Cause.UNKNOWN, evidence)


# --- the rank that is the cause


class Evaluation(NamedTuple):
    """The values for document.LiveJob. `rank` is the index of the named rank, or None."""

    slow: bool
    since: float | None = None
    slowdown: float = 0.0
    rank: int | None = None
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[str, ...] = ()


def evaluate_ranks(ranks: Sequence[Rank]) -> Evaluation:
    """Evaluate the ranks that are currently connected."""
    slow = [item.iteration for item in ranks if item.iteration.slow is not None]
    if not slow:
        return Evaluation(False)
    slowdown = max(item.slow.slowdown for item in slow if item.slow is not None)
    since = min((item.since for item in slow if item.since is not None), default=None)
    rank, cause, evidence = _blame(ranks)
    return Evaluation(True, since, slowdown, rank, cause, evidence)


def _blame(ranks: Sequence[Rank]) -> tuple[int | None, Cause, tuple[str, ...]]:
    timed = [number for number, rank in enumerate(ranks) if rank.busy is not None and rank.busy.ratio is not None]
    if not timed:
        return _blame_by_iterations(ranks)
    if len(timed) < MIN_PEERS:
        return None, Cause.UNKNOWN, (f"{len(timed)} ranks on this node report their own work, too few to compare",)
    busy = {number: channel for number in timed if (channel := ranks[number].busy) is not None}
    ratios = {number: channel.ratio or 1.0 for number, channel in busy.items()}
    middle = statistics.median_high(ratios.values())
    risen = [number for number in timed if busy[number].slow is not None]
    if len(risen) * 2 >= len(timed):
        return (
            None,
            Cause.IMBALANCE,
            (f"own work rose in {len(risen)} of {len(timed)} ranks, so all ranks have more work",),
        )
    lost = statistics.median([_rise(rank.iteration) for rank in ranks if rank.iteration.slow is not None])
    outlying = [
        number
        for number in risen
        if ratios[number] >= LIMIT * middle and _rise(busy[number]) >= MIN_EXPLAINED_SHARE * lost
    ]
    if not outlying:
        return (
            None,
            Cause.UNKNOWN,
            ("no rank on this node works longer, so the cause is communication or another node",),
        )
    worst = max(outlying, key=lambda number: ratios[number])
    return worst, Cause.COMPUTE, _explain(ranks, worst, busy, outlying, "own work")


def _blame_by_iterations(ranks: Sequence[Rank]) -> tuple[int | None, Cause, tuple[str, ...]]:
    """Find the cause from whole iterations, because no rank reports its own work."""
    measured = {number: rank.iteration for number, rank in enumerate(ranks) if rank.iteration.ratio is not None}
    slow = [number for number, channel in measured.items() if channel.slow is not None]
    if len(measured) < MIN_PEERS or len(slow) * 2 >= len(measured):
        return (
            None,
            Cause.UNKNOWN,
            (f"{len(slow)} of {len(ranks)} ranks are slow together, and no rank reports its own work",),
        )
    middle = statistics.median_high([channel.ratio or 1.0 for channel in measured.values()])
    outlying = [number for number in slow if (measured[number].ratio or 1.0) >= LIMIT * middle]
    if not outlying:
        return None, Cause.UNKNOWN, ("no rank is slower than the others",)
    worst = max(outlying, key=lambda number: measured[number].ratio or 1.0)
    return worst, Cause.COMPUTE, _explain(ranks, worst, measured, outlying, "an iteration")


def _rise(channel: Series) -> float:
    """Return the increase of the iteration time, or of its busy part, in seconds."""
    return channel.healthy * max((channel.ratio or 1.0) - 1, 0.0)


def _explain(
    ranks: Sequence[Rank], worst: int, channels: dict[int, Series], outlying: Sequence[int], subject: str
) -> tuple[str, ...]:
    worst_channel = channels[worst]
    peers = [channel.ratio or 1.0 for number, channel in channels.items() if number != worst]
    others = [ranks[number].name for number in outlying if number != worst]
    comparison = (
        f"{subject} takes {_format_seconds(worst_channel.healthy * (worst_channel.ratio or 1.0))}, up from "
        f"{_format_seconds(worst_channel.healthy)}; median of its {len(peers)} peers "
        f"{statistics.median(peers) - 1:+.0%}"
    )
    return (comparison, f"{', '.join(others)}: also slower, by a smaller factor") if others else (comparison,)


def _format_seconds(value: float) -> str:
    return f"{value:.3g} s"


# --- helpers


def _all_series(job: Job) -> Iterator[Series]:
    for rank in job.ranks.values():
        yield from (rank.iteration,) if rank.busy is None else (rank.iteration, rank.busy)
    yield from job.counters.values()


def _reported_content(records: Iterable[LiveJob]) -> list[tuple[object, ...]]:
    """Return the contents whose changes must be reported.

    Jobs that start or end without ever being slow are left out.
    """
    return [(record.job, record.source, record.suspect, record.rank, record.cause) for record in records if record.slow]
