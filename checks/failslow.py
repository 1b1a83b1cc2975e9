"""Jobs on this node that became slower than they were, and the GPU whose rank makes them so.

Rules: healthd/failslow/detect.py says when a job's times count as slow (FALCON, arXiv 2410.12588, 2.2: less than 10 %
is jitter), healthd/failslow/live/jobs.py whom that accuses. Which jobs tell their times is the job's matter
(healthd.client); what is sampled without them is `sample`. Both are off by default, and then nothing runs, and nothing
is read.

What a job says of itself is a user's word, and anybody may say anything: it never is more than a WARNING, whatever the
settings say. What root reads from counters may be made worse by a site.

The last remedy for a slow job is a new start without the slow node (FALCON's S4). With `action` healthd takes the node
out once the job has lost as much as a new start costs (ski rental: healthd/failslow/mitigation/planner.py).
That rests on counters alone, and only where a part of this node shows a fault that came at that time (a clock held
down, lanes, errors of a port; healthd/failslow/live/evidence.py): each node of a gang sees the same slow rhythm, most
of them are well, and what a job can cause by its own load is no such fault. Congestion makes many nodes slow at once,
so it counts as a shared cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from msgspec.structs import asdict

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    Past,
    Period,
    Seconds,
    Severity,
    Slowness,
    between,
)
from healthd.failslow.live import document as told

USES = ""
AFTER_EVENTS = ("failslow", "job_end")
HOLDS_RESUME = False

FILE = told.FILE
SOURCES = ("nvlink", "pcie", "ib", "power")
ACTS = {"drain": Severity.DEGRADED, "requeue": Severity.CRITICAL}
FROM_CLIENTS = ("failslow/job", "failslow/gpu")
MOST_SAID = 4  # jobs in one sentence
STALE_SECONDS = 600.0  # while something is slow it is written twice a minute


class Config(CheckSettings, frozen=True):
    """client   jobs may tell how long their steps take (healthd.client)
    sample             what is sampled without their help, any of "nvlink", "pcie", "ib", "power"; [] = nothing
    sample_seconds     how often
    slow_percent       a job counts as slow that takes so much longer than it did
    counters_percent   the same of what sampled counters show, which vary more
    max_jobs           so many jobs of this node are watched at once, and
    max_ranks          so many ranks of each
    action             "drain" or "requeue" the jobs of a node whose sampled counters show such a loss; "" = never
    restart_seconds    what a new start of a job costs it: so much must be lost first, also before a job is advised so
    loss_window_seconds   how long after the loss the node is tried again
    """

    client: bool = False
    sample: tuple[str, ...] = ()
    sample_seconds: Period = 0.5
    slow_percent: Annotated[float, between(5, 900)] = 10.0
    counters_percent: Annotated[float, between(5, 900)] = 20.0
    max_jobs: Annotated[int, between(1, 256, " jobs")] = 16
    max_ranks: Annotated[int, between(1, 1024, " ranks")] = 128
    action: str = ""
    restart_seconds: Seconds = 600.0
    loss_window_seconds: Seconds = 3600.0


def validate(config: Config) -> str | None:
    for source in config.sample:
        if source not in SOURCES:
            return f'sample: "{source}" cannot be sampled; {", ".join(SOURCES)} can'
    if config.action not in ("", *ACTS):
        return f'action: "{config.action}" cannot be done; {" and ".join(ACTS)} can, "" is neither'
    if config.action and not config.sample:
        return "action: needs `sample`: what jobs say of themselves drains no node"
    for code in FROM_CLIENTS:
        if config.severity.get(code, Severity.WARNING) > Severity.WARNING:
            return f'severity: "{code}" rests on what jobs say of themselves: it cannot be more than "warning"'
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    if not (config.client or config.sample):
        yield NothingToCheck("off: checks.failslow.client is false and sample is empty")
        return
    text = host.read(f"{host.runtime_dir}/{FILE}")
    if text is None:
        yield NothingToCheck("no job has reported its steps yet")
        return
    document = told.read(text)
    jobs = document.jobs
    yield Observation("failslow_jobs", len({job.job for job in jobs}))
    slow = [job for job in jobs if job.slow]
    yield Observation("failslow_slow_jobs", len({job.job for job in slow}))
    yield from _measured(document, slow)
    if slow and host.now() - document.written > STALE_SECONDS:
        raise ValueError(f"{FILE} is {host.now() - document.written:.0f} s old: the process that writes it hangs")
    yield from _findings(slow)
    lost = [job for job in slow if job.source == "counters" and job.node_changed]
    lost = [job for job in lost if _lost_seconds(job, host.now()) >= config.restart_seconds]
    if config.action and lost and document.paused_until <= host.now():  # who asked for silence wants no drain either
        yield Finding(
            ACTS[config.action],
            "failslow/loss",
            "",
            "; ".join(f"{_says(job)}, and lost {_lost_seconds(job, host.now()) / 60:.0f} min by it" for job in lost),
            Clears.WINDOW,
            window_seconds=config.loss_window_seconds,
            shared_cause=True,
            slowness=_slowness(lost),
        )


def _lost_seconds(job: told.JobTold, now: float) -> float:
    """Of the job, by this slowness: all its ranks wait alike. An iteration of 1.26 times its length loses 0.26 of
    1.26. Never more than what was counted, iteration by iteration, since the job began: of counters
    that is the whole job's already (failslow/live/jobs.py), on however many devices it was seen."""
    lasts = max(0.0, now - job.since) if job.since is not None else 0.0
    return min(lasts * job.slowdown / (1 + job.slowdown), job.lost_seconds)


def _measured(document: told.Told, slow: list[told.JobTold]) -> Iterator[Observation]:
    yield Observation("failslow_worst_slowdown", max((job.slowdown for job in slow), default=0.0))
    counter = ObservationKind.COUNTER
    for source, seconds in asdict(document.lost).items():
        yield Observation("failslow_lost_seconds_total", seconds, counter, (("source", source),))
    for reason, count in asdict(document.dropped).items():
        yield Observation("failslow_dropped_total", count, counter, (("reason", reason),))
    yield Observation("failslow_paused_until_timestamp_seconds", document.paused_until)
    yield Observation("failslow_sampling", int(document.sampling is not None))
    if document.sampling is not None:
        yield Observation("failslow_sampling_cpu_ratio", document.sampling)


def _findings(slow: list[told.JobTold]) -> Iterator[Finding]:
    """One for each GPU, and one for all jobs of a source: a job's number would become a metric's label."""
    by_client = [job for job in slow if job.source == "client"]
    for gpu in sorted({job.suspect for job in by_client if job.suspect}):
        accusing = [job for job in by_client if job.suspect == gpu]
        yield _finding("failslow/gpu", gpu, accusing)
    if by_client:
        yield _finding("failslow/job", "", by_client)
    if sampled := [job for job in slow if job.source == "counters"]:
        yield _finding("failslow/counters", "", sampled)


def _finding(code: str, gpu: str, slow: list[told.JobTold]) -> Finding:
    """Of these jobs."""
    said = list(map(_says, slow[:MOST_SAID]))
    said += [f"and {len(slow) - MOST_SAID} more jobs"] if len(slow) > MOST_SAID else []
    return Finding(Severity.WARNING, code, gpu, "; ".join(said), slowness=_slowness(slow))


def _slowness(slow: list[told.JobTold]) -> Slowness | None:
    """The same in numbers: the fleet's centre counts hours from them."""
    onsets = [job.since for job in slow if job.since is not None]
    if not onsets:
        return None
    return Slowness(max(job.slowdown for job in slow), min(onsets), tuple(sorted({job.job for job in slow})))


def _says(job: told.JobTold) -> str:
    who = f", made so by {job.rank}" if job.rank else ""
    why = f": {', '.join(job.evidence)}" if job.evidence else ""
    return f"job {job.job} is {job.slowdown:.0%} slower than it was{who}{why}"


OBSERVATIONS = {
    "failslow_jobs": Meaning("Jobs on this node whose times are watched now."),
    "failslow_slow_jobs": Meaning("Of these those that are slower than they were."),
    "failslow_worst_slowdown": Meaning(
        "How much longer an iteration of the slowest job takes than before: 0.26 is 26 % longer, 0 = none is slow."
    ),
    "failslow_lost_seconds_total": Meaning(
        "How many seconds iterations took longer than before, since the watching process began; of source client "
        "summed over the ranks on this node, each of which has a GPU as a rule, of source counters of whole jobs.",
        ("source",),
    ),
    "failslow_dropped_total": Meaning(
        "Messages, connections and samples of jobs that were not taken since the watching process began, by reason.",
        ("reason",),
    ),
    "failslow_paused_until_timestamp_seconds": Meaning(
        "Until when nothing new is said of slow jobs (healthd failslow pause), in seconds since the epoch; 0 = it is "
        "not paused."
    ),
    "failslow_sampling": Meaning("1 while counters are sampled, 0 where the sampler is off."),
    "failslow_sampling_cpu_ratio": Meaning("What the sampler took of one core in its last minute, 0 to 1."),
}

EXPLAIN = {
    "failslow/job": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A job that reports its step times became slower than it was, and stays slow.",
        "Nothing has failed, yet the job occupies its nodes for longer: 16 of 27 large jobs had this, for 72 minutes "
        "on average (FALCON, arXiv 2410.12588, table 1). The report is the job's own, so it never drains.",
        "The message names the slow rank, or the reason why none is named. If communication or another node is slow, "
        "look there as well: healthd failslow reads the times of all ranks. healthd status lists other open conditions "
        "of this node.",
        needs="client",
    ),
    "failslow/gpu": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The rank on this GPU needs longer for each step than before, and the ranks beside it do not.",
        "All ranks of the job wait for this rank. A throttled GPU, a slow CPU core or a narrow PCIe link causes this "
        "without an error. The report is the job's own, so it never drains.",
        "nvidia-smi -q -d PERFORMANCE,CLOCK -i PCI shows what limits the clocks; healthd status lists other open "
        "conditions. healthd validate measures the GPU once the node is idle.",
        needs="client",
    ),
    "failslow/counters": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The period in this node's sampled counters became longer: an iteration of the job takes longer than before.",
        "As failslow/job, for a job that reports nothing. healthd reads the counters itself, so a site may raise the "
        "severity. The counters cannot show which rank is slow.",
        "healthd status lists other open conditions of this node. Ask the job's user whether the job itself changed.",
        needs="sample",
    ),
    "failslow/loss": Explain(
        Severity.CRITICAL,
        Clears.WINDOW,
        "By the counters of this node, a job has lost as much time as a restart costs, and a part of the "
        "node shows a fault that began at that time. Only with `action`: requeue makes it critical, drain degraded.",
        "Going on costs more than a restart elsewhere (FALCON, arXiv 2410.12588, algorithm 1). The cause may be "
        "temporary, so the node is tried again after loss_window_seconds. A job that slowed down for a reason of its "
        "own, on a node whose part had a small fault at that time, looks the same. Therefore it is off by default.",
        "The message names what changed: clocks, links, ports. healthd validate measures the idle node. If several "
        "nodes have this at once, check the switch that they share.",
        also=(Severity.DEGRADED,),
        shared=True,
        needs="action",
        window="loss_window_seconds",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.OTHER),
    "failslow/gpu": FailureCause.GPU,
}
ENDS_JOB = {
    "failslow/job": EndsJob.NEVER,
    "failslow/gpu": EndsJob.NEVER,
    "failslow/counters": EndsJob.NEVER,
}
