"""A model of slurmctld's scheduling: starts, pre-emption, and the states in which records end.

A record ends in one of Slurm's states. A requeue keeps the job id and begins a new record (a new db_index). The new
record starts after 121 s at the earliest, because slurmctld then considers the old credentials expired.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from history.clock import Clock
from history.cluster import NEVER, Cluster, host_list
from history.draw import Draw, between, stream
from history.size import Size
from history.workload import HOUR, RUNS_FROM, Job, Workload

REQUEUE_DELAY = 121
CHECKPOINT = 1800  # seconds of work that a disturbed job repeats: half of the hour between two checkpoints
PASS = 180  # seconds between two passes for whole nodes (bf_interval)
STUCK = 6 * HOUR  # a large job that waits longer than this blocks the other large jobs


class SchedulerListener(Protocol):
    """Receives what the scheduler does."""

    def ended(self, job: Job, state: str, now: int) -> None: ...
    def preempted(self, victim: Job, preemptor: Job, now: int) -> None: ...


class Scheduler:
    """Schedules jobs.

    listener    receives records and pre-emptions
    after_end   called with (job, state, now), for the nodes' side
    on_loop     called with (now, job) when a crash-looping job starts
    """

    def __init__(
        self, size: Size, clock: Clock, workload: Workload, cluster: Cluster, listener: SchedulerListener
    ) -> None:
        self.cluster, self.running, self.waiting = cluster, dict[Job, None](), dict[Job, None]()
        self.after_end: Callable[[Job, str, int], None] = lambda job, state, now: None
        self.on_loop: Callable[[int, Job], None] = lambda now, job: None
        self._clock, self._workload, self._listener = clock, workload, listener
        self._draw: Draw = stream(size.seed, "scheduler")
        self._rows = 5000
        self._small: dict[int, deque[Job]] = {gpus: deque() for gpus in (8, 4, 2, 1)}
        self._large: deque[Job] = deque()
        self._next_pass = 0
        self._arrival = 0.0

    def begin(self, now: int) -> None:
        self._arrival = self._workload.next_arrival(now)
        self._clock.at(int(self._arrival), self._submission)

    # from a submission to a start

    def _submission(self, now: int, _: None) -> None:
        for job in self._workload.submission(now):
            self._record(job, now, now)
            if job.ends_as == "CANCELLED" and self._draw() < 0.3:
                self._clock.at(now + between(self._draw, 5, 6 * HOUR), self._user_cancels, (job, job.row))
            self._enter(now, job)
        self._arrival = self._workload.next_arrival(self._arrival)
        self._clock.at(int(self._arrival), self._submission)

    def _record(self, job: Job, now: int, eligible: int) -> None:
        self._rows += 1
        job.row, job.submitted, job.eligible, job.started, job.nodes, job.node_list = (
            self._rows,
            now,
            eligible,
            0,
            (),
            "",
        )
        self.waiting[job] = None

    def _enter(self, now: int, job: Job) -> None:
        """Make the job eligible to start."""
        if job not in self.waiting or self._start(job, now):
            return
        if job.wants > 1:
            self._large.append(job)
        else:
            self._small[job.gpus].append(job)

    def _start(self, job: Job, now: int) -> bool:
        victims: tuple[Job, ...] = ()
        if job.wants <= 1:
            nodes = self.cluster.place_on_one_node(job, now)
        elif job.qos != "low":
            nodes, victims = self.cluster.place_with_preemption(job, now)
        else:
            nodes = self.cluster.place_on_whole_nodes(job, now)
        if not nodes:
            return False
        for victim in victims:
            self._listener.preempted(victim, job, now)
            self.end(victim, "PREEMPTED", now)
        del self.waiting[job]
        self.running[job] = None
        job.nodes, job.node_list = nodes, host_list(nodes)
        job.started = now + (between(self._draw, 3, 40) if victims else 1)
        job.ends = job.started + (job.work // 2 if job.ends_as == "REQUEUED" else job.work)
        self.cluster.take(job)
        self._clock.at(job.ends, self._job_finished, (job, job.row))
        if job.loops:
            self.on_loop(now, job)
        return True

    def _schedule(self, now: int) -> None:
        """Start jobs after something became free: small jobs at once, large ones at the next pass."""
        for jobs in self._small.values():
            while jobs and (jobs[0] not in self.waiting or self._start(jobs[0], now)):
                jobs.popleft()
        if self._large and now >= self._next_pass:
            self._next_pass = now + PASS
            still_waiting, whole, too_large, is_blocked = deque[Job](), self.cluster.whole_nodes(), NEVER, False
            for job in sorted(self._large, key=lambda job: (-job.priority, job.row)):
                if job not in self.waiting:
                    continue
                if (is_blocked or job.wants > whole) if job.qos == "low" else job.wants >= too_large:
                    still_waiting.append(job)
                elif self._start(job, now):
                    whole = self.cluster.whole_nodes()
                else:
                    is_blocked = is_blocked or now - job.eligible > STUCK
                    too_large = min(too_large, job.wants)
                    still_waiting.append(job)
            self._large = still_waiting

    # from a start to an end

    def _job_finished(self, now: int, about: tuple[Job, int]) -> None:
        job, row = about
        if job.row != row or job not in self.running:
            return
        ran = job.ends - job.started
        self.end(job, job.ends_as, now)
        if job.ends_as == "REQUEUED":
            job.ends_as = "COMPLETED" if self._draw() < 0.8 else "FAILED"
            self.requeue(job, now, max(10, job.work - ran), 0)
        elif job.ends_as in ("FAILED", "TIMEOUT"):
            self._workload.will_continue(job)
        self._schedule(now)

    def _user_cancels(self, now: int, about: tuple[Job, int]) -> None:
        job, row = about
        if job.row == row and job in self.waiting:
            del self.waiting[job]
            self._listener.ended(job, "CANCELLED", now)

    def end(self, job: Job, state: str, now: int) -> None:
        """End the job's record. A pre-empted job is requeued if this is allowed.

        For all other jobs, the caller decides.
        """
        del self.running[job]
        now = max(now, job.started)
        self.cluster.give(job)
        self._listener.ended(job, state, now)
        self.after_end(job, state, now)
        if state == "PREEMPTED" and job.may_requeue:
            ran = now - job.started
            self.requeue(job, now, max(10, job.work - ran + min(ran, CHECKPOINT)), 0)

    def requeue(self, job: Job, now: int, work: int, after_failure: int) -> None:
        """Requeue a job. after_failure: the record that hardware ended, or 0."""
        job.restarts += 1
        job.work, job.after_failure = min(work, job.limit), after_failure
        self._record(job, now, now + REQUEUE_DELAY)
        self._clock.at(job.eligible, self._enter, job)

    def fail(self, job: Job, state: str, now: int) -> None:
        """End a job because of its node's fault: NODE_FAIL, REQUEUED, or FAILED without a requeue."""
        ran, row = now - job.started, job.row
        self.end(job, state, now)
        remaining = max(10, job.work - ran + min(ran, CHECKPOINT))
        if state != "FAILED" and job.may_requeue:
            self.requeue(job, now, remaining, row)
        elif job.gpus >= RUNS_FROM:
            self._clock.at(now + between(self._draw, 120, CHECKPOINT), self._resubmission, (job, remaining))
        self._schedule(now)

    def _resubmission(self, now: int, about: tuple[Job, int]) -> None:
        """Submit the rest of a run as a new job."""
        job = self._workload.resubmit(*about)
        self._record(job, now, now)
        self._enter(now, job)

    def opened(self, now: int) -> None:
        """Start waiting jobs after a node is back."""
        self._schedule(now)
