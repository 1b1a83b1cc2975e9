"""The monitored jobs of this node: their series, their slowness, and the rank that causes it. No sockets and no clock.

A job exists while one of its ranks is connected, or while its counters are sampled.

The rule for naming a rank is that of healthd/failslow/peers.py, for the ranks of one node. A collective makes every
rank equally slow, so a rank is named only by its own time. Its busy time must have risen against its own baseline, and
by LIMIT more than the median of the other ranks (FALCON, arXiv 2410.12588, step 5). There must be at least MIN_PEERS
ranks. The rise must make up MIN_EXPLAINED_SHARE of the lost time, and the outlying ranks must be a minority. If no rank
reports a busy time, the iterations of workers that do not wait for each other are compared.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from healthd.failslow.live.datagram import Step
from healthd.failslow.live.document import MOST_RECENT, JobTold, Lost, sentence
from healthd.failslow.live.evidence import Said, is_of_hardware
from healthd.failslow.live.series import Sample, Series
from healthd.failslow.live.settings import Watched
from healthd.failslow.model import Cause, Kind
from healthd.failslow.outliers import EXPLAINS, FEWEST, LIMIT

CLIENT, COUNTERS = "client", "counters"
FORGOTTEN_SECONDS = 120.0  # a job known only from counters ends this long after its last sample, plus QUIET_SAMPLES
MOST_LOOKS = 5  # a user decides how many files a rank has open, so the search for its GPU is limited
GRACE_SECONDS = 60.0  # a message may include steps before the connection
QUIET = 50.0  # times the duration of a sample: a rhythm that changed is found again within this time

# (PCI address of the suspect GPU or "", cause from the ranks' times, onset) -> changes on the node
Evidence = Callable[[str, Cause, float | None], tuple[Said, ...]]


@dataclass(slots=True)
class Rank:
    """One process that reports its steps.

    number, local_rank: as the process reports them, -1 if it does not. started_at: time of the first message.
    reported_seconds: total duration of the steps since then. gpu_lookups: how often its GPU was searched.
    """

    pid: int
    began: float
    iteration: Series
    busy: Series | None = None
    told_seconds: float = 0.0
    number: int = -1
    local: int = -1
    gpu: str = ""
    looks: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.number}" if self.number >= 0 else f"process {self.pid}"

    def believed(self, step: Step, now: float) -> float:
        """Return how many of the steps fit into the elapsed time. This limits the loss that a rank can report."""
        left = max(0.0, now - self.began + GRACE_SECONDS - self.told_seconds)
        steps = min(float(step.steps), left / step.seconds)
        self.told_seconds += steps * step.seconds
        return steps


@dataclass(slots=True)
class Job:
    """One job as seen by one source.

    ranks: by connection. counters: by name of the counter. ended_ranks_seconds: time lost by ranks that ended.
    sample_seconds: time that one sample of the counters covers.
    """

    name: str
    source: str
    ranks: dict[int, Rank] = field(default_factory=dict)
    counters: dict[str, Series] = field(default_factory=dict)
    gone_seconds: float = 0.0
    last: float = 0.0
    each: float = 0.0
    told: JobTold | None = None
    of_node: tuple[Said, ...] = ()  # changes on the node at the onset


class Jobs:
    """All monitored jobs. `find_gpu(pid, job, local rank)` returns the PCI address of a process's GPU, or "" if
    unknown.
    """

    def __init__(
        self,
        watched: Watched,
        gpu_of: Callable[[int, str, int], str],
        evidence: Evidence = lambda gpu, cause, since: (),
    ) -> None:
        self.watched = watched
        self.recent: deque[JobTold] = deque(maxlen=MOST_RECENT)
        self._gpu_of = gpu_of
        self._evidence = evidence
        self._jobs: dict[tuple[str, str], Job] = {}
        self._said: list[tuple[object, ...]] = []  # content of the last evaluation, to detect changes
        self._ended_lost = {CLIENT: 0.0, COUNTERS: 0.0}  # seconds

    def reconfigure(self, watched: Watched) -> None:
        """Apply new thresholds. The data of running jobs is kept."""
        self.watched = watched
        for job in self._jobs.values():
            percent = self._percent(job.source)
            for series in _series(job):
                series.change_percent(percent)

    @property
    def watches_any(self) -> bool:
        return bool(self._jobs)

    @property
    def slow(self) -> list[JobTold]:
        return [job.told for job in self._jobs.values() if job.told is not None and job.told.slow]

    def heard(self, connection: int, pid: int, name: str, step: Step, now: float) -> bool:
        """Add a message of a rank. Return True if the job is new, or something in it became slow or recovered."""
        is_new = (name, CLIENT) not in self._jobs
        job = self._job(name, CLIENT)
        job.last = now
        rank = job.ranks.get(connection)
        if rank is None:
            rank = job.ranks[connection] = Rank(pid, now, Series(Kind.ITERATION, self.watched.slow_percent))
        if rank.number < 0:
            rank.number, rank.local = step.rank, step.local_rank
        steps = rank.believed(step, now)
        changed = rank.iteration.add(step.seconds, now, steps)
        if step.busy is not None:
            if rank.busy is None:
                rank.busy = Series(Kind.BUSY, self.watched.slow_percent)
            changed |= rank.busy.add(step.busy, now, steps)
        return changed or is_new

    def sampled(self, sample: Sample) -> bool:
        """Add an iteration time from sampled counters. Return True as in `add_step`."""
        is_new = (sample.job, COUNTERS) not in self._jobs
        job = self._job(sample.job, COUNTERS)
        job.last, job.each = sample.time, sample.value * sample.steps
        series = job.counters.get(sample.series)
        if series is None:
            if len(job.counters) >= self.watched.max_ranks:
                return False
            series = job.counters[sample.series] = Series(sample.kind, self.watched.counters_percent)
        return series.add(sample.value, sample.time, sample.steps) or is_new

    def left(self, connection: int, name: str, now: float) -> bool:
        """Remove a connection that ended. Return True if this ended the job."""
        job = self._jobs.get((name, CLIENT))
        rank = job.ranks.pop(connection, None) if job is not None else None
        if job is None or rank is None:
            return False
        job.gone_seconds += rank.iteration.lost_seconds
        if job.ranks:
            return False
        self._end(job, now)
        return True

    def forget_quiet(self, now: float, sampled: str) -> bool:
        """End jobs that are known from counters and have no new samples. Return True if there was such a job.

        Such a job ends if its counters are no longer sampled (`sampled_job` is the sampled one), or if no sample came
        for longer than expected.
        """
        by_counters = [job for job in self._jobs.values() if job.source == COUNTERS]
        quiet = [
            job for job in by_counters if job.name != sampled or now - job.last > FORGOTTEN_SECONDS + QUIET * job.each
        ]
        for job in quiet:
            self._end(job, now)
        return bool(quiet)

    def judge(self, silent: bool) -> bool:
        """Evaluate all jobs again. Return True if the reported content changed.

        Args:
            is_paused: do not report jobs that become slow now.
        """
        before = self._said
        for job in self._jobs.values():
            job.told = self._judged(job, silent)
        self._said = _essence(self.told())
        return self._said != before

    def told(self) -> tuple[JobTold, ...]:
        return tuple(job.told for job in self._jobs.values() if job.told is not None)

    def lost(self) -> Lost:
        """Return the lost time of all jobs since the process started."""
        total = dict(self._ended_lost)
        for job in self._jobs.values():
            total[job.source] += job.told.lost_seconds if job.told is not None else 0.0
        return Lost(round(total[CLIENT], 3), round(total[COUNTERS], 3))

    def _judged(self, job: Job, silent: bool) -> JobTold:
        ranks = list(job.ranks.values())
        found = judge(ranks) if job.source == CLIENT else of_counters(job.counters)
        each = [series.lost_seconds for series in _series(job) if series.kind is not Kind.BUSY]
        # Several counters show the same iterations.
        lost = job.gone_seconds + (sum(each) if job.source == CLIENT else max(each, default=0.0))
        count = len(ranks) if job.source == CLIENT else 1  # counters show the job as a whole
        told = JobTold(job.name, count, job.source, lost_seconds=round(lost, 3))
        was_slow = job.told is not None and job.told.slow
        if not found.slow or (silent and not was_slow):
            return told
        gpu = name = ""
        if found.rank is not None:
            rank = ranks[found.rank]
            if not rank.gpu and rank.looks < MOST_LOOKS:
                rank.looks += 1
                rank.gpu = self._gpu_of(rank.pid, job.name, rank.local)
            gpu, name = rank.gpu, rank.name
        cause = Cause.COMPUTE_GPU if gpu and found.cause is Cause.COMPUTE else found.cause
        before = job.told if was_slow else None
        # The changes on the node belong to the onset: they are computed once, and again if another rank is named.
        if before is None or (before.suspect, before.rank) != (gpu, name):
            job.of_node = self._evidence(gpu, cause, found.since)
        return replace(
            told,
            slow=True,
            since=found.since,
            slowdown=round(found.slowdown, 4),
            suspect=gpu,
            rank=name,
            cause=cause.value,
            evidence=(*map(sentence, found.evidence), *(sentence(one.sentence) for one in job.of_node)),
            node_changed=any(map(is_of_hardware, job.of_node)),
        )

    def _job(self, name: str, source: str) -> Job:
        job = self._jobs.get((name, source))
        if job is None:
            job = self._jobs[name, source] = Job(name, source)
        return job

    def _percent(self, source: str) -> float:
        return self.watched.slow_percent if source == CLIENT else self.watched.counters_percent

    def _end(self, job: Job, now: float) -> None:
        told = job.told or JobTold(job.name, 0, job.source)
        lost = round(max(told.lost_seconds, job.gone_seconds), 3)
        self._ended_lost[job.source] += lost
        self.recent.append(replace(told, lost_seconds=lost, ended=round(now, 3)))
        del self._jobs[job.name, job.source]


def of_counters(counters: dict[str, Series]) -> Judged:
    """Evaluate sampled counters. They show that a job is slow, but never which rank is the cause."""
    slow = {name: point for name, series in counters.items() if (point := series.slow) is not None}
    if not slow:
        return Judged(False)
    since = min((s.since for s in counters.values() if s.since is not None), default=None)
    evidence = tuple(
        f"{name}: iterations take {point.slowdown:.0%} longer than the {counters[name].healthy:.3g} s before"
        for name, point in slow.items()
    )
    return Judged(True, since, max(point.slowdown for point in slow.values()), None, Cause.UNKNOWN, evidence)


# --- the rank that is the cause


class Judged(NamedTuple):
    """Values for document.LiveJob. rank: index of the named rank, or None."""

    slow: bool
    since: float | None = None
    slowdown: float = 0.0
    rank: int | None = None
    cause: Cause = Cause.UNKNOWN
    evidence: tuple[str, ...] = ()


def judge(ranks: Sequence[Rank]) -> Judged:
    """Evaluate the ranks that are connected now."""
    slow = [one.iteration for one in ranks if one.iteration.slow is not None]
    if not slow:
        return Judged(False)
    slowdown = max(one.slow.slowdown for one in slow if one.slow is not None)
    since = min((one.since for one in slow if one.since is not None), default=None)
    rank, cause, evidence = _blame(ranks)
    return Judged(True, since, slowdown, rank, cause, evidence)


def _blame(ranks: Sequence[Rank]) -> tuple[int | None, Cause, tuple[str, ...]]:
    told = [number for number, one in enumerate(ranks) if one.busy is not None and one.busy.ratio is not None]
    if not told:
        return _of_iterations(ranks)
    if len(told) < FEWEST:
        return None, Cause.UNKNOWN, (f"{len(told)} ranks of this node report their own work: too few to compare",)
    busy = {number: channel for number in told if (channel := ranks[number].busy) is not None}
    ratios = {number: channel.ratio or 1.0 for number, channel in busy.items()}
    middle = statistics.median_high(ratios.values())
    risen = [number for number in told if busy[number].slow is not None]
    if len(risen) * 2 >= len(told):
        return None, Cause.IMBALANCE, (f"own work rose in {len(risen)} of {len(told)} ranks: more work for all",)
    lost = statistics.median([_rise(one.iteration) for one in ranks if one.iteration.slow is not None])
    standing_out = [
        number for number in risen if ratios[number] >= LIMIT * middle and _rise(busy[number]) >= EXPLAINS * lost
    ]
    if not standing_out:
        return None, Cause.UNKNOWN, ("no rank of this node works longer: the cause is communication or another node",)
    worst = max(standing_out, key=lambda number: ratios[number])
    return worst, Cause.COMPUTE, _why(ranks, worst, busy, standing_out, "own work")


def _of_iterations(ranks: Sequence[Rank]) -> tuple[int | None, Cause, tuple[str, ...]]:
    """Find the cause by whole iterations, because no rank reports its own work."""
    known = {number: one.iteration for number, one in enumerate(ranks) if one.iteration.ratio is not None}
    slow = [number for number, channel in known.items() if channel.slow is not None]
    if len(known) < FEWEST or len(slow) * 2 >= len(known):
        return (
            None,
            Cause.UNKNOWN,
            (f"{len(slow)} of {len(ranks)} ranks are slow together, and no rank reports its own work",),
        )
    middle = statistics.median_high([channel.ratio or 1.0 for channel in known.values()])
    standing_out = [number for number in slow if (known[number].ratio or 1.0) >= LIMIT * middle]
    if not standing_out:
        return None, Cause.UNKNOWN, ("no rank is slower than the others",)
    worst = max(standing_out, key=lambda number: known[number].ratio or 1.0)
    return worst, Cause.COMPUTE, _why(ranks, worst, known, standing_out, "an iteration")


def _rise(channel: Series) -> float:
    """Return by how many seconds an iteration or its busy part is longer now."""
    return channel.healthy * max((channel.ratio or 1.0) - 1, 0.0)


def _why(
    ranks: Sequence[Rank], worst: int, channels: dict[int, Series], standing_out: Sequence[int], what: str
) -> tuple[str, ...]:
    one = channels[worst]
    peers = [channel.ratio or 1.0 for number, channel in channels.items() if number != worst]
    others = [ranks[number].name for number in standing_out if number != worst]
    says = (
        f"{what} takes {_seconds(one.healthy * (one.ratio or 1.0))} against "
        f"{_seconds(one.healthy)} before; median of its {len(peers)} peers {statistics.median(peers) - 1:+.0%}"
    )
    return (says, f"{', '.join(others)}: slower too, by a smaller factor") if others else (says,)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


# --- helpers


def _series(job: Job) -> Iterator[Series]:
    for rank in job.ranks.values():
        yield from (rank.iteration,) if rank.busy is None else (rank.iteration, rank.busy)
    yield from job.counters.values()


def _essence(told: Iterable[JobTold]) -> list[tuple[object, ...]]:
    """Return the content whose change must be reported. Jobs that start or end without being slow do not count."""
    return [(one.job, one.source, one.suspect, one.rank, one.cause) for one in told if one.slow]
