"""Cost of jobs that became slower, on which nodes, and the time until detection and reaction.

Uses the conditions failslow/... and validation/... of the nodes (docs/events.md). An iteration that takes 1 + s of its
previous time loses s / (1 + s) of that time; this share applies to the job's GPUs on the node while it was reported
slow. If Slurm did not account the job's GPUs, or no slowdown was reported, the loss is unknown: it is counted in hours,
never as 0.
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
from healthd.fleet.statistics.spans import Span, joined, seconds

FAILED, SLOW = "validation/failed", "validation/slow"

Node = tuple[str, str]  # cluster, node


class SlowTime(NamedTuple):
    """Columns of failslow_stretches.sql. jobs: ids separated by blanks."""

    cluster: str
    node: str
    begin_time: int
    end_time: int
    slowdown: float | None
    jobs: str | None


class RanThere(NamedTuple):
    """Columns of failslow_jobs.sql."""

    cluster: str
    node: str
    job_id: int
    begin_time: int
    end_time: int
    gpus: float | None


class Life(NamedTuple):
    """A condition from its onset to its end. Columns of failslow_lives.sql."""

    cluster: str
    node: str
    onset: int
    told_time: int
    last_time: int | None
    cleared_time: int | None
    known_time: int | None


class Drain(NamedTuple):
    """Columns of failslow_drains.sql."""

    cluster: str
    node: str
    start_time: int
    by_whom: str


class Validation(NamedTuple):
    """Columns of failslow_validations.sql."""

    cluster: str
    node: str
    code: str
    times: int
    first_time: int
    last_time: int
    ongoing: bool


class GpuTime(NamedTuple):
    """Columns of failslow_gpu_time.sql."""

    thousandths: float


class Stretch(NamedTuple):
    """A time in which a node reported a slow job. slowdown: None if none was reported. jobs: named ids, if any."""

    begin: int
    end: int
    slowdown: float | None
    jobs: frozenset[int]


class Ran(NamedTuple):
    """A job's time on a node. gpus: its GPUs there, None if Slurm did not account them."""

    job: int
    begin: int
    end: int
    gpus: float | None


class Lost(NamedTuple):
    """Loss of one node. unknown_seconds: slow time of unknown cost. worst: the largest reported slowdown."""

    slow_seconds: int
    unknown_seconds: int
    gpu_seconds: float
    worst: float | None


def failslow(study: Study) -> Document:
    """Return the document of `healthd fleet failslow`. Raises Unanswerable if no source has conditions."""
    if not study.has("scraped_conditions"):
        study.must_have("events")
    stretches: dict[Node, list[Stretch]] = defaultdict(list)
    for slow in study.ask("failslow_stretches", SlowTime):
        one = Stretch(slow.begin_time, slow.end_time, slow.slowdown, jobs_of(slow.jobs))
        stretches[slow.cluster, slow.node].append(one)
    ran: dict[Node, list[Ran]] = defaultdict(list)
    for job in study.ask("failslow_jobs", RanThere):
        ran[job.cluster, job.node].append(Ran(job.job_id, job.begin_time, job.end_time, job.gpus))
    lives: dict[Node, list[Life]] = defaultdict(list)
    for life in study.ask("failslow_lives", Life):
        lives[life.cluster, life.node].append(life)
    drains: dict[Node, list[Drain]] = defaultdict(list)
    for drain in study.ask("failslow_drains", Drain):
        drains[drain.cluster, drain.node].append(drain)
    validations = study.ask("failslow_validations", Validation)
    judged = {(one.cluster, one.node, one.code): one.times for one in validations}
    (gpu_time,) = study.ask("failslow_gpu_time", GpuTime)
    spells = {where: spells_of(its, drains[where]) for where, its in lives.items()}
    nodes = []
    for where in sorted({*stretches, *((one.cluster, one.node) for one in validations)}):
        told = lost(stretches[where], ran[where])
        nodes.append(
            {
                "cluster": where[0],
                "node": where[1],
                "slow_seconds": told.slow_seconds,
                "unknown_seconds": told.unknown_seconds,
                "lost_gpu_seconds": told.gpu_seconds,
                "worst_slowdown": told.worst,
                "times": sum(spell["end"] > study.from_time for spell in spells.get(where, ())),
                "ongoing": any(spell["ongoing"] for spell in spells.get(where, ())),
                "failed_validations": judged.get((*where, FAILED), 0),
                "slow_validations": judged.get((*where, SLOW), 0),
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
            spell for some in spells.values() for spell in some if study.from_time <= spell["reported"] < study.to_time
        ),
        "nodes": nodes,
        "validations": [one._asdict() for one in validations],
    }


def jobs_of(text: str | None) -> frozenset[int]:
    """Parse ids separated by blanks. Words that are not numbers are not Slurm jobs and are skipped."""
    return frozenset(int(word) for word in (text or "").split() if is_decimal(word) and len(word) < 19)


# --- loss of a node


def lost(stretches: Sequence[Stretch], ran: Iterable[Ran]) -> Lost:
    """Return the loss of a node's GPUs while a job there was reported slow. Pure.

    Where stretches overlap, the largest slowdown counts for all jobs that they name. If none is named, it counts for
    the job that was alone on the node.
    """
    slow = joined((one.begin, one.end) for one in stretches)
    there = [job for job in ran if job.gpus != 0 and any(job.begin < e and job.end > b for b, e in slow)]
    cuts = sorted(
        {
            *(time for one in stretches for time in (one.begin, one.end)),
            *(time for job in there for time in (job.begin, job.end)),
        }
    )
    unknown, gpu_seconds = 0, 0.0
    for begin, end in _pieces(slow, cuts):
        now = [one for one in stretches if one.begin <= begin and one.end >= end]
        how_slow = max((one.slowdown for one in now if one.slowdown is not None), default=None)
        named = frozenset(job for one in now for job in one.jobs)
        jobs = [job for job in there if job.begin <= begin and job.end >= end]
        hit = [job for job in jobs if job.job in named] if named else jobs
        if how_slow is None or not hit or (not named and len(hit) > 1) or any(job.gpus is None for job in hit):
            unknown += end - begin
            continue
        gpu_seconds += sum(job.gpus or 0.0 for job in hit) * (end - begin) * how_slow / (1 + how_slow)
    worst = max((one.slowdown for one in stretches if one.slowdown is not None), default=None)
    return Lost(seconds(slow), unknown, gpu_seconds, worst)


def _pieces(spans: Sequence[Span], cuts: Sequence[int]) -> Iterable[Span]:
    """Split the spans at each of these times, which include the spans' ends."""
    for begin, end in spans:
        within = [time for time in cuts if begin <= time <= end]
        yield from pairwise(within)


# --- durations


def spells_of(lives: Sequence[Life], drains: Sequence[Drain]) -> list[Row]:
    """Return a node's slow episodes, overlapping ones merged. Pure.

    Keys: `onset`, `reported`, `end` (last sighting), `ongoing`, `acted` (time of the first reaction, or None) and `by`
    (healthd, person, slurm, unknown or acknowledged).
    """
    found: list[Row] = []
    for life in sorted(lives, key=lambda life: life.onset):
        end = max(life.last_time or life.told_time, life.onset)
        one: Row = {
            "onset": life.onset,
            "reported": life.told_time,
            "end": end,
            "over": life.cleared_time or end,
            "ongoing": life.cleared_time is None,
            "known": life.known_time,
        }
        if found and one["onset"] <= found[-1]["end"]:
            last = found[-1]
            known = [time for time in (last["known"], one["known"]) if time is not None]
            last |= {
                "reported": min(last["reported"], one["reported"]),
                "end": max(last["end"], end),
                "over": max(last["over"], one["over"]),
                "ongoing": last["ongoing"] or one["ongoing"],
                "known": min(known, default=None),
            }
        else:
            found.append(one)
    for one in found:
        acts = [
            (drain.start_time, drain.by_whom) for drain in drains if one["reported"] <= drain.start_time <= one["over"]
        ]
        acts += [(one["known"], "acknowledged")] if one["known"] is not None else []
        one["acted"], one["by"] = min(acts, default=(None, None))
    return found


def reaction(spells: Iterable[Row]) -> Row:
    """Return the times from onset to report, from report to reaction, and from onset to end. Pure."""
    its = list(spells)
    by: dict[str, int] = defaultdict(int)
    for one in its:
        if one["by"]:
            by[one["by"]] += 1
    return {
        "episodes": len(its),
        "ongoing": sum(one["ongoing"] for one in its),
        "reported": _took(one["reported"] - one["onset"] for one in its),
        "acted": {**_took(one["acted"] - one["reported"] for one in its if one["acted"] is not None), "by": dict(by)},
        "lasted": _took(one["end"] - one["onset"] for one in its if not one["ongoing"]),
    }


def _took(some: Iterable[int]) -> Row:
    """Return median and 90th percentile. Negative durations (a clock was set back) count as 0."""
    ordered = sorted(max(one, 0) for one in some)
    return {"episodes": len(ordered), "median_seconds": quantile(ordered, 0.5), "p90_seconds": quantile(ordered, 0.9)}


def _notes(study: Study, nodes: Sequence[Row]) -> list[str]:
    found = []
    unknown, slow = sum(row["unknown_seconds"] for row in nodes), sum(row["slow_seconds"] for row in nodes)
    if unknown:
        found.append(
            f"The cost of {percent(share(unknown, slow))} of the slow time is not known: the job or its GPUs were not "
            "accounted, several jobs were possible, or no slowdown was reported. The GPU-hours exclude it."
        )
    found.append(
        "Slowness is detected only if jobs report their iterations or counters are sampled ([checks.failslow]): a node "
        "without reports may still have been slow."
    )
    return [*found, *study.coverage_notes("jobs", "events")]


def found(failslow: Document) -> bool:
    """Return True if a job is still slow, or a failed validation is still open."""
    return any(row["ongoing"] for row in failslow["nodes"]) or any(
        row["ongoing"] for row in failslow["validations"] if row["code"] == FAILED
    )
