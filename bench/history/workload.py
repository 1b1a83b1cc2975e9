"""The jobs that users submit: sizes, durations, users, and the end of a job that nothing disturbs.

Shares follow arXiv 2410.21680, sections on job states and sizes. More than 40 % of the jobs use 1 GPU. More than 90 %
of the jobs use at most one server, and together they use less than 10 % of the GPU time. Jobs of 256 and more GPUs use
50 to 66 % of the GPU time. States: COMPLETED 60 %, FAILED 24 %, PREEMPTED 10 %, REQUEUED 2 %, TIMEOUT 0.6 %,
OUT_OF_MEMORY 0.1 %. PREEMPTED and NODE_FAIL are not drawn; the simulation causes them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from history.draw import Choice, between, even, mean, quantile, stream, wait
from history.size import GPUS_PER_NODE, Size

HOUR = 3600
MAX_DURATION = 7 * 24 * HOUR
RUNS_FROM = 16  # jobs with at least this many GPUs belong to a chain that a user continues

# (GPUs, share of the jobs, share of the GPU time)
SIZES = (
    (1, 0.430, 0.027),
    (2, 0.120, 0.014),
    (4, 0.120, 0.014),
    (8, 0.2646, 0.037),
    (16, 0.0220, 0.023),
    (32, 0.0160, 0.050),
    (64, 0.0120, 0.090),
    (128, 0.0090, 0.145),
    (256, 0.00400, 0.200),
    (512, 0.00160, 0.190),
    (1024, 0.00060, 0.130),
    (2048, 0.00016, 0.060),
    (4096, 0.00004, 0.020),
)
LARGEST = 0.5  # share of the cluster

# Durations as multiples of a scale: most jobs end in minutes, a few run for days.
DURATIONS = (
    (0.0, 0.002),
    (0.1, 0.01),
    (0.25, 0.04),
    (0.5, 0.2),
    (0.7, 0.7),
    (0.85, 1.9),
    (0.93, 4.5),
    (0.98, 9),
    (1, 25),
)

# End of a job that nothing disturbs. REQUEUED: the user's own program requeued it before its time limit.
ENDS = Choice(
    (
        *(("COMPLETED", 0.600), ("FAILED", 0.240), ("CANCELLED", 0.032), ("REQUEUED", 0.020)),
        *(("TIMEOUT", 0.006), ("OUT_OF_MEMORY", 0.001)),
    )
)
RECORDS = 1.15  # records per job on average, because of pre-emption and requeues
WORK_REPEATED = 1.035  # how often work is done on average, because work that was not saved is repeated
BY_HOUR = (
    *(0.55, 0.5, 0.45, 0.45, 0.5, 0.55, 0.65, 0.8, 1.05, 1.3, 1.45, 1.5),
    *(1.45, 1.5, 1.55, 1.55, 1.5, 1.4, 1.25, 1.15, 1.05, 0.95, 0.85, 0.7),
)
WEEKEND = 0.6
NOT_PREEMPTED = 0.1  # share of the jobs of at most one node
LIMITS = tuple(hours * HOUR for hours in (1, 4, 12, 24, 48, 72, 168))
SMALL_NAMES = ("wrap", "eval", "interactive", "debug", "sweep", "preprocess", "notebook", "finetune")
ARRAYS, MAX_TASKS = 0.03, 24  # share of arrays among the submissions of at most one node; an array has 2 to 23 tasks
TASKS = 1 + ARRAYS * ((2 + MAX_TASKS - 1) / 2 - 1)  # average number of tasks of an array
LARGE_NAMES = ("pretrain", "llm", "vision", "diffusion", "speech", "ranking")


class Job:
    """One job with all its records. `row` is the db_index of the current record."""

    __slots__ = (
        *("id", "array", "task", "gpus", "wants", "user", "qos", "name", "folder", "limit", "work", "ends_as"),
        *("excluded", "may_requeue", "priority", "row", "restarts", "submitted", "eligible", "started", "ends"),
        *("nodes", "node_list", "after_failure", "loops"),
    )

    def __init__(self, number: int) -> None:
        self.id = number
        self.array = self.task = self.row = self.restarts = self.submitted = self.eligible = self.started = 0
        self.ends = self.after_failure = self.loops = 0
        self.nodes: tuple[int, ...] = ()
        self.node_list = ""


class Workload:
    """Generates submissions. `exclusions`: for each user, the excluded nodes and when each exclusion ends."""

    def __init__(self, size: Size) -> None:
        seed = size.seed
        self._arrive, self._user_draw, self._job_draw = (
            stream(seed, subject) for subject in ("arrivals", "users", "jobs")
        )
        self._end, self._size_draw = (even(stream(seed, subject)()) for subject in ("ends", "sizes"))
        self._users = max(12, size.nodes // 4)
        self._ids, self._runs = 1000, 0
        self._broken: dict[int, deque[tuple[int, str, str]]] = {}  # number of GPUs -> runs that a user will continue
        self.exclusions: dict[int, dict[int, int]] = {}

        max_gpus = size.nodes * GPUS_PER_NODE * LARGEST
        largest = max(gpus for gpus, _, _ in SIZES if gpus <= max_gpus)
        fits: dict[int, list[float]] = {}
        for gpus, jobs, time in SIZES:
            shares = fits.setdefault(min(gpus, largest), [0.0, 0.0])
            shares[0] += jobs
            shares[1] += time
        submissions = {gpus: jobs / (TASKS if gpus <= GPUS_PER_NODE else 1) for gpus, (jobs, _) in fits.items()}
        self._sizes = Choice(tuple(submissions.items()))
        hours = size.gpu_hours_per_job * RECORDS / WORK_REPEATED
        self._scale = {
            gpus: time * hours * HOUR / (jobs * gpus) / mean(DURATIONS) for gpus, (jobs, time) in fits.items()
        }
        self._share = {gpus: even(stream(seed, f"durations {gpus}")()) for gpus in fits}
        # Submissions per second, by hours since the week of the first day began.
        week = [BY_HOUR[h % 24] * (WEEKEND if weekend(size.start + h * HOUR) else 1.0) for h in range(168)]
        a_second = size.jobs / RECORDS / (size.end - size.start) * sum(submissions.values())
        self._rate = [share * 168 / sum(week) * a_second for share in week]
        self._start = size.start

    def next_arrival(self, now: float) -> float:
        """Return the time of the next submission."""
        return now + wait(self._arrive, 1 / self._rate[int((now - self._start) // HOUR) % 168])

    def submission(self, now: int) -> list[Job]:
        """Return a job, or the tasks of an array. The scheduler creates their records."""
        draw = self._job_draw
        gpus: Any = self._sizes.at(self._size_draw())
        tasks = 1
        if gpus <= GPUS_PER_NODE and draw() < ARRAYS:
            tasks = between(draw, 2, MAX_TASKS)
        user, name, folder = self._run(gpus)
        excluded = self._excluded_nodes(user, now)
        first = self._ids + 1
        self._ids += tasks
        jobs = [self._job(first + task, gpus) for task in range(tasks)]
        for task, job in enumerate(jobs):
            job.user, job.name, job.folder, job.excluded = user, name, folder, excluded
            if tasks > 1:
                job.array, job.task = first, task
        return jobs

    def resubmit(self, job: Job, work: int) -> Job:
        """Return another job of the same run, with the remaining work."""
        self._ids += 1
        new_job = Job(self._ids)
        for name in ("gpus", "wants", "user", "qos", "name", "folder", "limit", "ends_as", "may_requeue", "priority"):
            setattr(new_job, name, getattr(job, name))
        new_job.work, new_job.excluded = min(work, job.limit), self._excluded_nodes(job.user, job.ends)
        return new_job

    def will_continue(self, job: Job) -> None:
        """Queue the run, so that it is submitted again as one of the next jobs of its size."""
        if job.gpus >= RUNS_FROM:
            self._broken.setdefault(job.gpus, deque(maxlen=50)).append((job.user, job.name, job.folder))

    def _run(self, gpus: int) -> tuple[int, str, str]:
        if gpus >= RUNS_FROM and (broken := self._broken.get(gpus)) and self._job_draw() < 0.8:
            return broken.popleft()
        user = int(self._user_draw() ** 2 * self._users)
        if gpus >= RUNS_FROM:
            self._runs += 1
            name = LARGE_NAMES[int(self._job_draw() * len(LARGE_NAMES))]
            return user, f"{name}_{self._runs}", f"/checkpoints/u{user:04d}/{name}_{self._runs}"
        name = SMALL_NAMES[int(self._job_draw() * len(SMALL_NAMES))]
        return user, name, f"/home/u{user:04d}/p{int(self._job_draw() * 8)}"

    def _excluded_nodes(self, user: int, now: int) -> tuple[int, ...]:
        nodes = self.exclusions.get(user)
        if not nodes:
            return ()
        for node in [node for node, until in nodes.items() if until <= now]:
            del nodes[node]
        return tuple(sorted(nodes))

    def _job(self, number: int, gpus: int) -> Job:
        draw, job = self._job_draw, Job(number)
        ends_as: Any = ENDS.at(self._end())
        work = max(10, int(quantile(DURATIONS, self._share[gpus]()) * self._scale[gpus]))
        luck = draw()
        if ends_as == "TIMEOUT":
            job.limit = min(MAX_DURATION, max(900, work // 900 * 900))
            work = job.limit
        elif work >= MAX_DURATION:  # no job runs longer
            ends_as, work, job.limit = "TIMEOUT", MAX_DURATION, MAX_DURATION
        else:
            enough = [limit for limit in LIMITS if limit > work]
            job.limit = enough[0] if luck < 0.5 else enough[min(len(enough) - 1, 2)] if luck < 0.8 else MAX_DURATION
        job.gpus, job.wants, job.work, job.ends_as = gpus, gpus // GPUS_PER_NODE, work, ends_as
        # A job with high or normal priority takes whole nodes from low-priority jobs that have run for two hours.
        if gpus >= 256:
            job.qos, job.priority = "high", 3000
        elif gpus > GPUS_PER_NODE:
            job.qos, job.priority = ("normal", 2000) if draw() < 0.4 else ("low", 1000)
        else:
            job.qos, job.priority = ("normal", 2000) if draw() < NOT_PREEMPTED else ("low", 1000)
        job.may_requeue = draw() < 0.95
        return job


def weekend(time: int) -> bool:
    """Return True for Saturday and Sunday; 1970-01-01 was a Thursday."""
    return (time // 86400 + 3) % 7 >= 5
