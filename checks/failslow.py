"""Jobs on this node that have become slower, and the GPU of the rank that slows a job down.

Rules: healthd/failslow/detect.py determines when a job is slow (FALCON, arXiv 2410.12588, 2.2: less than 10 % is
jitter), and healthd/failslow/live/jobs.py names the suspect. A job may report its own times (healthd.client). The
setting `sample` selects counters that healthd samples without the job's help. Job reports and sampling are off by
default; nothing then runs or is read.

A job's own report is user input and may contain anything. It therefore never causes more than a WARNING, regardless of
the settings. A site may raise the severity of findings from counters, because root reads the counters.

The last remedy for a slow job is a restart without the slow node (FALCON's S4). With the setting `action`, healthd
takes the node out of service when the job has lost as much time as a restart costs (ski rental:
healthd/failslow/mitigation/planner.py). Only counters can trigger this. A GPU or port of this node must also show a
fault that began at the same time, such as a reduced clock, lost lanes or port errors
(healthd/failslow/live/evidence.py). This is required because every node of a job shows the same slow rhythm although
most nodes are healthy. Load from the job itself is not such a fault. Congestion slows many nodes at once, so the
finding is treated as a shared cause.
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
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    Period,
    Seconds,
    Severity,
    Slowness,
    between,
)
from healthd.failslow.live import document as live_document

USES = ""
AFTER_EVENTS = ("failslow", "job_end")
HOLDS_RESUME = False

FILE = live_document.FILE
SOURCES = ("nvlink", "pcie", "ib", "power")
ACTION_SEVERITIES = {"drain": Severity.DEGRADED, "requeue": Severity.CRITICAL}
FROM_CLIENTS = ("failslow/job", "failslow/gpu")
MAX_JOBS_LISTED = 4  # maximum number of jobs in one sentence
STALE_SECONDS = 600.0  # while a job is slow, the file is written twice a minute


class Config(CheckSettings, frozen=True):
    """client             jobs may report how long their steps take (healthd.client)
    sample             counters that healthd samples by itself: "nvlink", "pcie", "ib", "power"; [] = none
    sample_seconds     interval between samples
    slow_percent       a job is slow if an iteration takes this much longer than before
    counters_percent   like slow_percent, for sampled counters, which vary more
    max_jobs           monitor at most this many jobs on this node
    max_ranks          monitor at most this many ranks of each job
    action             "drain" or "requeue" (drain and requeue its jobs) if sampled counters show a loss; "" = never
    restart_seconds    cost of a restart; a job must lose this much time before `action` or the advice to restart
    loss_window_seconds   how long after the loss the node returns to service
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
            return f'sample: "{source}" cannot be sampled; use {", ".join(SOURCES)}'
    if config.action not in ("", *ACTION_SEVERITIES):
        return f'action: "{config.action}" is not possible; use {" or ".join(ACTION_SEVERITIES)}, or "" for none'
    if config.action and not config.sample:
        return "action requires `sample`: reports from jobs never drain a node"
    for code in FROM_CLIENTS:
        if config.severity.get(code, Severity.WARNING) > Severity.WARNING:
            return f'severity: "{code}" comes from the jobs themselves and cannot be more than "warning"'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not (config.client or config.sample):
        yield NothingToCheck("off: checks.failslow.client is false and sample is empty")
        return
    content = host.read(f"{host.runtime_dir}/{FILE}")
    if content is None:
        yield NothingToCheck("no job has reported its steps yet")
        return
    document = live_document.parse(content)
    jobs = document.jobs
    yield Observation("failslow_jobs", len({job.job for job in jobs}))
    slow = [job for job in jobs if job.slow]
    yield Observation("failslow_slow_jobs", len({job.job for job in slow}))
    yield from _measured(document, slow)
    if slow and host.now() - document.written > STALE_SECONDS:
        raise ValueError(f"{FILE} is {host.now() - document.written:.0f} s old: the process that writes it hangs")
    yield from _findings(slow)
    lossy_jobs = [job for job in slow if job.source == "counters" and job.node_changed]
    lossy_jobs = [job for job in lossy_jobs if _lost_seconds(job, host.now()) >= config.restart_seconds]
    # during a pause (healthd failslow pause) healthd does not drain either
    if config.action and lossy_jobs and document.paused_until <= host.now():
        yield Finding(
            ACTION_SEVERITIES[config.action],
            "failslow/loss",
            "",
            "; ".join(
                f"{_describe_job(job)}, and lost {_lost_seconds(job, host.now()) / 60:.0f} min" for job in lossy_jobs
            ),
            Clears.WINDOW,
            window_seconds=config.loss_window_seconds,
            shared_cause=True,
            slowness=_slowness(lossy_jobs),
        )


def _lost_seconds(job: live_document.LiveJob, now: float) -> float:
    """Return the seconds that the job lost to this slowdown. All its ranks wait for each other. If an iteration takes
    1.26 times as long as before, a share of 0.26 / 1.26 of its time is lost. The result is capped at the loss that was
    counted iteration by iteration since the job began. For counters, that count already covers the whole job
    (failslow/live/jobs.py), on any number of devices.
    """
    duration = max(0.0, now - job.since) if job.since is not None else 0.0
    return min(duration * job.slowdown / (1 + job.slowdown), job.lost_seconds)


def _measured(document: live_document.LiveDocument, slow: list[live_document.LiveJob]) -> Iterator[Observation]:
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


def _findings(slow: list[live_document.LiveJob]) -> Iterator[Finding]:
    """Yield one finding for each GPU, and one for all jobs from the same source. Job ids must not become metric labels,
    so there are no findings for single jobs.
    """
    by_client = [job for job in slow if job.source == "client"]
    for gpu in sorted({job.suspect for job in by_client if job.suspect}):
        accusing = [job for job in by_client if job.suspect == gpu]
        yield _finding("failslow/gpu", gpu, accusing)
    if by_client:
        yield _finding("failslow/job", "", by_client)
    if sampled := [job for job in slow if job.source == "counters"]:
        yield _finding("failslow/counters", "", sampled)


def _finding(code: str, gpu: str, slow: list[live_document.LiveJob]) -> Finding:
    descriptions = list(map(_describe_job, slow[:MAX_JOBS_LISTED]))
    descriptions += [f"and {len(slow) - MAX_JOBS_LISTED} more jobs"] if len(slow) > MAX_JOBS_LISTED else []
    return Finding(Severity.WARNING, code, gpu, "; ".join(descriptions), slowness=_slowness(slow))


def _slowness(slow: list[live_document.LiveJob]) -> Slowness | None:
    """Return the slowdown from which the fleet tools compute slow hours, or None."""
    onsets = [job.since for job in slow if job.since is not None]
    if not onsets:
        return None
    return Slowness(max(job.slowdown for job in slow), min(onsets), tuple(sorted({job.job for job in slow})))


def _describe_job(job: live_document.LiveJob) -> str:
    suspect = f", slowed by {job.rank}" if job.rank else ""
    evidence = f": {', '.join(job.evidence)}" if job.evidence else ""
    return f"job {job.job} is {job.slowdown:.0%} slower than before{suspect}{evidence}"


OBSERVATIONS = {
    "failslow_jobs": Meaning("Jobs on this node whose times are being monitored."),
    "failslow_slow_jobs": Meaning("Monitored jobs that are slower than before."),
    "failslow_worst_slowdown": Meaning(
        "Slowdown of the slowest job: how much longer its iteration takes than before (0.26 is 26 % longer). 0 if no "
        "job is slow."
    ),
    "failslow_lost_seconds_total": Meaning(
        "Extra seconds that slow iterations took, since the live process started. For source client, this is the sum "
        "over the ranks on this node (usually one for each GPU). For source counters, each job counts once.",
        ("source",),
    ),
    "failslow_dropped_total": Meaning(
        "Messages, connections and samples from jobs that healthd dropped since the live process started, by reason.",
        ("reason",),
    ),
    "failslow_paused_until_timestamp_seconds": Meaning(
        "Time until which no new slow jobs are reported (healthd failslow pause), in seconds since the epoch; 0 if not "
        "paused."
    ),
    "failslow_sampling": Meaning("1 if counters are being sampled, 0 if the sampler is off."),
    "failslow_sampling_cpu_ratio": Meaning("Share of one core that the sampler used in its last minute, 0 to 1."),
}

EXPLAIN = {
    "failslow/job": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A job that reports its step times has become slower and stays slow.",
        "The job runs without errors but occupies its nodes for longer. In one study, 16 of 27 large jobs were "
        "affected, for 72 minutes on average (FALCON, arXiv 2410.12588, table 1). The report comes from the job "
        "itself, so healthd never drains the node for it.",
        "No action tonight. The message names the slow rank, or says why no rank is named. If the message blames "
        "communication or another node, check that node as well. healthd failslow analyses the times of all ranks. "
        "healthd status lists other open conditions of this node.",
        needs="client",
    ),
    "failslow/gpu": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The rank on this GPU takes longer for each step than before. The other ranks on this node are as fast as "
        "before.",
        "All ranks of the job wait for this rank. A throttled GPU, a slow CPU core or a narrow PCIe link can cause "
        "this without any error. The report comes from the job itself, so healthd never drains the node for it.",
        "No action tonight. nvidia-smi -q -d PERFORMANCE,CLOCK -i PCI shows what limits the clocks; healthd status "
        "lists other open conditions. healthd validate measures the GPU once the node is idle.",
        needs="client",
    ),
    "failslow/counters": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A job's iterations take longer than before: the pattern in this node's sampled counters repeats more slowly.",
        "The job runs without errors but occupies its nodes for longer, as with failslow/job. This job does not "
        "report its times. healthd reads the counters itself, so a site may raise the severity. The counters cannot "
        "show which rank is slow.",
        "No action tonight. healthd status lists other open conditions of this node. Ask the job's user whether the "
        "job itself changed.",
        needs="sample",
    ),
    "failslow/loss": Explain(
        Severity.CRITICAL,
        Clears.WINDOW,
        "According to this node's counters, a job has lost as much time as a restart costs. A GPU or port of the "
        "node shows a fault that began at the same time. This is reported only if `action` is set. The "
        "severity is critical if `action` is requeue, and degraded if `action` is drain.",
        "Continuing here costs more than a restart elsewhere (FALCON, arXiv 2410.12588, algorithm 1). The cause may "
        "be temporary, so the node returns to service after loss_window_seconds. A job that slows down for its own "
        "reasons on a node with an unrelated small fault looks the same. Therefore `action` is off by default.",
        "The message names the clocks, links or ports that changed. healthd validate measures the idle node. If "
        "several nodes are affected at once, check the switch that they share.",
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
