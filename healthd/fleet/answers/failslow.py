"""Computes the cost of slow jobs on each node, and the time until a slowdown was detected and acted on.

It uses the nodes' conditions failslow/... and validation/... (docs/events.md). An iteration that takes 1 + s times as
long as before loses s / (1 + s) of its time. The node's loss is this share of the GPU time that the job used on the
node while the job was reported as slow. If Slurm did not record the job's GPUs, or no slowdown was reported, the loss
is unknown. The slow time is then listed separately in hours and does not count as a loss of 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from healthd.common.text import is_decimal
from healthd.fleet.answers.availability import quantile
from healthd.fleet.answers.document import Document, percent, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.spans import Span, merge, total_seconds

FAILED_CODE, SLOW_CODE = "validation/failed", "validation/slow"

Node = tuple[str, str]  # cluster, node


class SlowTimeRow(NamedTuple):
    """A row returned by failslow_slow_times.sql. `jobs` are ids separated by blanks."""

    cluster: str
    node: str
    begin_time: int
    end_time: int
    slowdown: float | None
    jobs: str | None


class JobOnNode(NamedTuple):
    """A row returned by failslow_jobs.sql."""

    cluster: str
    node: str
    job_id: int
    begin_time: int
    end_time: int
    gpus: float | None


class SlowCondition(NamedTuple):
    """A slow condition, from its onset to its end, as returned by failslow_conditions.sql."""

    cluster: str
    node: str
    onset: int
    told_time: int
    last_time: int | None
    cleared_time: int | None
    known_time: int | None


class Drain(NamedTuple):
    """A row returned by failslow_drains.sql."""

    cluster: str
    node: str
    start_time: int
    by_whom: str


class Validation(NamedTuple):
    """A row returned by failslow_validations.sql."""

    cluster: str
    node: str
    code: str
    times: int
    first_time: int
    last_time: int
    ongoing: bool


class GpuTime(NamedTuple):
    """A row returned by failslow_gpu_time.sql."""

    thousandths: float


class SlowSpan(NamedTuple):
    """A period in which a node reported a slow job.

    Attributes:
        slowdown: None if not reported.
        jobs: ids that the report names, if any.
    """

    begin: int
    end: int
    slowdown: float | None
    jobs: frozenset[int]


class NodeJob(NamedTuple):
    """The time that a job spent on a node. `gpus` is None if Slurm did not record the GPUs."""

    job: int
    begin: int
    end: int
    gpus: float | None


class NodeLoss(NamedTuple):
    """The loss on one node.

    Attributes:
        unknown_seconds: slow time whose cost is unknown.
        worst: the largest reported slowdown.
    """

    slow_seconds: int
    unknown_seconds: int
    gpu_seconds: float
    worst: float | None


def failslow(study: Study) -> Document:
    """Return the document for `healthd fleet failslow`. Raises Unanswerable if no source has conditions."""
    if not study.has_rows("scraped_conditions"):
        study.require("events")
    slow_spans: dict[Node, list[SlowSpan]] = defaultdict(list)
    for slow in study.query("failslow_slow_times", SlowTimeRow):
        item = SlowSpan(slow.begin_time, slow.end_time, slow.slowdown, parse_job_ids(slow.jobs))
        slow_spans[slow.cluster, slow.node].append(item)
    ran: dict[Node, list[NodeJob]] = defaultdict(list)
    for job in study.query("failslow_jobs", JobOnNode):
        ran[job.cluster, job.node].append(NodeJob(job.job_id, job.begin_time, job.end_time, job.gpus))
    lives: dict[Node, list[SlowCondition]] = defaultdict(list)
    for life in study.query("failslow_conditions", SlowCondition):
        lives[life.cluster, life.node].append(life)
    drains: dict[Node, list[Drain]] = defaultdict(list)
    for drain in study.query("failslow_drains", Drain):
        drains[drain.cluster, drain.node].append(drain)
    validations = study.query("failslow_validations", Validation)
    validation_counts = {(item.cluster, item.node, item.code): item.times for item in validations}
    (gpu_time,) = study.query("failslow_gpu_time", GpuTime)
    episodes_by_node = {node_key: episodes(conditions, drains[node_key]) for node_key, conditions in lives.items()}
    nodes = []
    for node_key in sorted({*slow_spans, *((item.cluster, item.node) for item in validations)}):
        loss = node_loss(slow_spans[node_key], ran[node_key])
        nodes.append(
            {
                "cluster": node_key[0],
                "node": node_key[1],
                "slow_seconds": loss.slow_seconds,
                "unknown_seconds": loss.unknown_seconds,
                "lost_gpu_seconds": loss.gpu_seconds,
                "worst_slowdown": loss.worst,
                "times": sum(episode["end"] > study.from_time for episode in episodes_by_node.get(node_key, ())),
                "ongoing": any(episode["ongoing"] for episode in episodes_by_node.get(node_key, ())),
                "failed_validations": validation_counts.get((*node_key, FAILED_CODE), 0),
                "slow_validations": validation_counts.get((*node_key, SLOW_CODE), 0),
            }
        )
    nodes.sort(key=lambda row: (-row["lost_gpu_seconds"], -row["slow_seconds"], row["cluster"], row["node"]))
    return {
        **study.head("failslow", *_notes(study, nodes)),
        "slow_seconds": sum(row["slow_seconds"] for row in nodes),
        "unknown_seconds": sum(row["unknown_seconds"] for row in nodes),
        "lost_gpu_seconds": sum(row["lost_gpu_seconds"] for row in nodes),
        "job_gpu_seconds": gpu_time.thousandths / 1000,
        "reaction": reaction(
            episode
            for node_episodes in episodes_by_node.values()
            for episode in node_episodes
            if study.from_time <= episode["reported"] < study.to_time
        ),
        "nodes": nodes,
        "validations": [item._asdict() for item in validations],
    }


def parse_job_ids(text: str | None) -> frozenset[int]:
    """Parse ids separated by blanks. A word that is not a number is not a Slurm job id and is skipped."""
    return frozenset(int(token) for token in (text or "").split() if is_decimal(token) and len(token) < 19)


# --- loss on a node


def node_loss(slow_spans: Sequence[SlowSpan], ran: Iterable[NodeJob]) -> NodeLoss:
    """Return the GPU time that a node lost while jobs on it were reported as slow.

    If slow spans overlap, the largest slowdown applies to all jobs that the spans name. If the spans name no job, it
    applies to the only job on the node.
    """
    slow = merge((slow_span.begin, slow_span.end) for slow_span in slow_spans)
    node_jobs = [
        job
        for job in ran
        if job.gpus != 0 and any(job.begin < slow_end and job.end > slow_begin for slow_begin, slow_end in slow)
    ]
    cuts = sorted(
        {
            *(time for slow_span in slow_spans for time in (slow_span.begin, slow_span.end)),
            *(time for job in node_jobs for time in (job.begin, job.end)),
        }
    )
    unknown, gpu_seconds = 0, 0.0
    for begin, end in _split_spans(slow, cuts):
        active_spans = [slow_span for slow_span in slow_spans if slow_span.begin <= begin and slow_span.end >= end]
        slowdown = max(
            (slow_span.slowdown for slow_span in active_spans if slow_span.slowdown is not None), default=None
        )
        named_jobs = frozenset(job for slow_span in active_spans for job in slow_span.jobs)
        jobs = [job for job in node_jobs if job.begin <= begin and job.end >= end]
        affected_jobs = [job for job in jobs if job.job in named_jobs] if named_jobs else jobs
        if (
            slowdown is None
            or not affected_jobs
            or (not named_jobs and len(affected_jobs) > 1)
            or any(job.gpus is None for job in affected_jobs)
        ):
            unknown += end - begin
            continue
        gpu_seconds += sum(job.gpus or 0.0 for job in affected_jobs) * (end - begin) * slowdown / (1 + slowdown)
    worst = max((slow_span.slowdown for slow_span in slow_spans if slow_span.slowdown is not None), default=None)
    return NodeLoss(total_seconds(slow), unknown, gpu_seconds, worst)


def _split_spans(spans: Sequence[Span], cuts: Sequence[int]) -> Iterable[Span]:
    """Split the spans at each time in `cuts`. The ends of the spans must be among these times."""
    for begin, end in spans:
        times = [time for time in cuts if begin <= time <= end]
        yield from pairwise(times)


# --- durations


def episodes(lives: Sequence[SlowCondition], drains: Sequence[Drain]) -> list[Row]:
    """Return a node's slow episodes. Overlapping episodes are merged.

    Keys: `onset`, `reported`, `end` (last sighting), `ongoing`, `acted` (time of the first reaction, or None) and `by`
    (healthd, person, slurm, unknown or acknowledged).
    """
    merged: list[Row] = []
    for life in sorted(lives, key=lambda life: life.onset):
        end = max(life.last_time or life.told_time, life.onset)
        episode: Row = {
            "onset": life.onset,
            "reported": life.told_time,
            "end": end,
            "over": life.cleared_time or end,
            "ongoing": life.cleared_time is None,
            "known": life.known_time,
        }
        if merged and episode["onset"] <= merged[-1]["end"]:
            last = merged[-1]
            acknowledged_times = [time for time in (last["known"], episode["known"]) if time is not None]
            last |= {
                "reported": min(last["reported"], episode["reported"]),
                "end": max(last["end"], end),
                "over": max(last["over"], episode["over"]),
                "ongoing": last["ongoing"] or episode["ongoing"],
                "known": min(acknowledged_times, default=None),
            }
        else:
            merged.append(episode)
    for episode in merged:
        actions = [
            (drain.start_time, drain.by_whom)
            for drain in drains
            if episode["reported"] <= drain.start_time <= episode["over"]
        ]
        actions += [(episode["known"], "acknowledged")] if episode["known"] is not None else []
        episode["acted"], episode["by"] = min(actions, default=(None, None))
    return merged


def reaction(episode_rows: Iterable[Row]) -> Row:
    """Return the times from onset to report, from report to reaction, and from onset to end."""
    episode_list = list(episode_rows)
    counts: dict[str, int] = defaultdict(int)
    for episode in episode_list:
        if episode["by"]:
            counts[episode["by"]] += 1
    return {
        "episodes": len(episode_list),
        "ongoing": sum(episode["ongoing"] for episode in episode_list),
        "reported": _duration_statistics(episode["reported"] - episode["onset"] for episode in episode_list),
        "acted": {
            **_duration_statistics(
                episode["acted"] - episode["reported"] for episode in episode_list if episode["acted"] is not None
            ),
            "by": dict(counts),
        },
        "lasted": _duration_statistics(
            episode["end"] - episode["onset"] for episode in episode_list if not episode["ongoing"]
        ),
    }


def _duration_statistics(durations: Iterable[int]) -> Row:
    """Return the median and 90th percentile. A negative duration (a clock was set back) counts as 0."""
    sorted_durations = sorted(max(value, 0) for value in durations)
    return {
        "episodes": len(sorted_durations),
        "median_seconds": quantile(sorted_durations, 0.5),
        "p90_seconds": quantile(sorted_durations, 0.9),
    }


def _notes(study: Study, nodes: Sequence[Row]) -> list[str]:
    found = []
    unknown, slow = sum(row["unknown_seconds"] for row in nodes), sum(row["slow_seconds"] for row in nodes)
    if unknown:
        found.append(
            f"The cost of {percent(share(unknown, slow))} of the slow time is unknown: the job or its GPUs were not "
            "recorded, several jobs were possible, or no slowdown was reported. The GPU-hours exclude this time."
        )
    found.append(
        "Slowness is detected only if jobs report their iterations or counters are sampled ([checks.failslow]). A node "
        "without reports may still have been slow."
    )
    return [*found, *study.coverage_notes("jobs", "events")]


def has_findings(failslow: Document) -> bool:
    """Return True if a job is still slow or a failed validation is still open."""
    return any(row["ongoing"] for row in failslow["nodes"]) or any(
        row["ongoing"] for row in failslow["validations"] if row["code"] == FAILED_CODE
    )
