"""Outcome of the jobs and use of the GPU time, by state and size, and before and after a date."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from healthd.common.page import plural
from healthd.fleet.answers import document, hardware_ends
from healthd.fleet.answers.document import Document, WrongChoice, moment, percent, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.spans import Span, joined, seconds, within
from healthd.fleet.statistics.wilson import wilson
from healthd.fleet.tables import BIGINT, TEXT

LARGE_GPUS = 512  # "512+ GPU jobs" of the paper
ONE_SERVER_GPUS = 8  # as in the paper's mix of job sizes


class Ended(NamedTuple):
    """Columns of states_ended.sql."""

    state: str | None
    gpus_up_to: int | None
    ended: str | None
    jobs: int
    gpu_seconds: int
    runtime_seconds: int
    lost_gpu_seconds: int
    big_jobs: int
    big_gpu_seconds: int


class Outcome(NamedTuple):
    """Columns of states_outcomes.sql."""

    after: bool
    state: str | None
    by_hardware: bool
    jobs: int


class Read(NamedTuple):
    """Columns of states_read.sql."""

    cluster: str
    from_time: int
    to_time: int


class There(NamedTuple):
    """Columns of states_there.sql."""

    cluster: str
    gpus: int
    nodes: int
    without: int


class GpuTime(NamedTuple):
    """Columns of states_used.sql and states_lost_there.sql."""

    gpu_seconds: float


found = document.never


def states(study: Study, *, split: int | None = None, large: int = LARGE_GPUS) -> Document:
    """Return the document of `healthd fleet states`.

    by_state, by_size: jobs and GPU-seconds with their shares. infrastructure: jobs that nodes ended. use: utilisation
    and goodput. split: the outcome of jobs of `large` GPUs or more before and after that time, None without one.

    Jobs are accounting records that ended in the requested period, with their whole runtime, including time before it.
    Each requeue is a record of its own. Source: section III of Kokolis, Kuchnik et al. (HPCA 2025, arXiv 2410.21680),
    its states, sizes and the outcome of large jobs.

    Raises Unanswerable without jobs, WrongChoice for a split outside the requested period.
    """
    if split is not None and not study.from_time < split < study.to_time:
        within_times = f"{moment(study.from_time)} and {moment(study.to_time)}"
        raise WrongChoice(f"--split: {moment(split)} is not within the requested period, {within_times} UTC")
    study.must_have("jobs")
    ended = study.ask("states_ended", Ended)
    if study.chosen.model or study.chosen.switch:
        (there,) = study.ask("states_lost_there", GpuTime)
        lost = round(there.gpu_seconds)
    else:
        lost = sum(row.lost_gpu_seconds for row in ended)
    use, unread = _use(study, sum(row.jobs for row in ended), lost)
    return {
        **study.head("states", *_notes(study, ended, use, unread), *study.coverage_notes("jobs")),
        "by_state": by_state(ended),
        "by_size": by_size(ended),
        "size_mix": size_mix(ended),
        "infrastructure": infrastructure(ended),
        "use": use,
        "split": None if split is None else outcomes(_outcomes(study, split, large), split, large),
    }


def _outcomes(study: Study, split: int, large: int) -> list[Outcome]:
    return study.ask("states_outcomes", Outcome, split=split, large=large)


# --- decisions


def by_state(ended: Iterable[Ended]) -> list[Row]:
    """Return the states, most GPU time first."""
    rows = with_shares(_grouped(ended, "state"))
    return sorted(rows, key=lambda row: (-row["gpu_seconds"], row["state"] or ""))


def by_size(ended: Iterable[Ended]) -> list[Row]:
    """Return the size classes, smallest first, each with its states and the jobs that nodes ended."""
    some = list(ended)
    rows = []
    for row in with_shares(_grouped(some, "gpus_up_to")):
        its = [one for one in some if one.gpus_up_to == row["gpus_up_to"]]
        hit = _summed(one for one in its if one.ended)
        rows.append(
            {**row, "by_hardware": {"jobs": hit["jobs"], "gpu_seconds": hit["gpu_seconds"]}, "by_state": by_state(its)}
        )
    return sorted(rows, key=lambda row: (row["gpus_up_to"] is None, row["gpus_up_to"]))


def infrastructure(ended: Iterable[Ended]) -> Row:
    """Return the jobs that nodes ended (`hardware_ends`): their share of jobs, runtime and GPU time.

    The whole runtime of these jobs counts; `goodput` estimates which part was lost.
    """
    some = list(ended)
    whole = _summed(some)

    def part(rows: Iterable[Ended]) -> Row:
        its = _summed(rows)
        return {
            **its,
            "share_of_jobs": share(its["jobs"], whole["jobs"]),
            "share_of_runtime": share(its["runtime_seconds"], whole["runtime_seconds"]),
            "share_of_gpu_time": share(its["gpu_seconds"], whole["gpu_seconds"]),
        }

    return {
        **part(row for row in some if row.ended),
        "by_end": [{"ended": how, **part(row for row in some if row.ended == how)} for how in hardware_ends.ENDED],
    }


def size_mix(ended: Iterable[Ended]) -> Row:
    """Return the shares of jobs with one GPU, with up to 8, and with 256 or more, among all jobs with GPUs."""
    some = [row for row in ended if row.gpus_up_to]
    jobs, gpu_seconds = sum(row.jobs for row in some), sum(row.gpu_seconds for row in some)

    def part(rows: Iterable[Ended], of: str = "") -> Row:
        its = list(rows)
        return {
            "share_of_jobs": share(sum(getattr(row, f"{of}jobs") for row in its), jobs),
            "share_of_gpu_time": share(sum(getattr(row, f"{of}gpu_seconds") for row in its), gpu_seconds),
        }

    return {
        "jobs": jobs,
        "one_gpu": part(row for row in some if row.gpus_up_to == 1),
        "up_to_8_gpus": part(row for row in some if (row.gpus_up_to or 0) <= ONE_SERVER_GPUS),
        "256_gpus_or_more": part(some, "big_"),
    }


def used(there: float, seconds_known: float, gpus: int, its: float, lost: float, jobs: int) -> Row:
    """Return utilisation, goodput, normalised goodput and jobs per day. None if nothing is available.

        utilisation         used GPU-seconds / available GPU-seconds
        goodput             (used GPU-seconds - lost) / seconds: GPUs whose work was kept
        normalised_goodput  goodput / available GPUs, the maximum possible

    available_gpu_seconds: available GPU-seconds of the known time. known_seconds: the longest known time of a cluster.
    jobs: jobs that ended.

    Source: "goodput: the amount of productive work completed per unit of time, normalised by the maximum possible", in
    the section on metrics of Kokolis, Kuchnik et al. (HPCA 2025). The accounting does not record productive work;
    healthd takes all work except that repeated because nodes or pre-emptions ended a job.
    """
    normalised = share(max(its - lost, 0.0), there)
    return {
        "jobs_per_day": jobs / seconds_known * 86400 if seconds_known else None,
        "seconds": seconds_known,
        "gpus": gpus,
        "gpu_seconds_available": there,
        "gpu_seconds_used": its,
        "gpu_seconds_lost": lost,
        "utilisation": share(its, there),
        "goodput": None if normalised is None else normalised * gpus,
        "normalised_goodput": normalised,
    }


def with_shares(rows: list[Row]) -> list[Row]:
    """Add each row's share of all jobs and of all GPU time."""
    jobs, gpu_seconds = sum(row["jobs"] for row in rows), sum(row["gpu_seconds"] for row in rows)
    return [
        {
            **row,
            "share_of_jobs": share(row["jobs"], jobs),
            "share_of_gpu_time": share(row["gpu_seconds"], gpu_seconds),
        }
        for row in rows
    ]


def outcomes(rows: Sequence[Outcome], at: int, large: int) -> Row:
    """Return the shares of large jobs that completed and that nodes ended, before and after; with 95 % intervals."""
    before, after = ([row for row in rows if row.after is later] for later in (False, True))
    sides = [_outcome(side) for side in (before, after)]
    return {
        "at": at,
        "large_gpus": large,
        "before": sides[0],
        "after": sides[1],
        "change": {key: changed(sides[0][key], sides[1][key]) for key in ("completed", "by_hardware")},
    }


def _outcome(rows: Sequence[Outcome]) -> Row:
    jobs = sum(row.jobs for row in rows)
    return {
        "jobs": jobs,
        "completed": _counted(sum(row.jobs for row in rows if row.state == "COMPLETED"), jobs),
        "by_hardware": _counted(sum(row.jobs for row in rows if row.by_hardware), jobs),
        "by_state": [
            {"state": row["state"], "jobs": row["jobs"], "share_of_jobs": share(row["jobs"], jobs)}
            for row in sorted(_grouped(rows, "state", ("jobs",)), key=lambda row: (-row["jobs"], row["state"] or ""))
        ],
    }


def _counted(jobs: int, of: int) -> Row:
    interval = wilson(jobs, of)
    return {"jobs": jobs, "share": share(jobs, of), "interval": None if interval is None else list(interval)}


def changed(before: Row, after: Row) -> Row:
    """Return the second share minus the first with its 95 % interval; None if either is unknown.

    Source: method 10 of Newcombe, "Interval estimation for the difference between independent proportions", Statistics
    in Medicine 17 (1998), of two intervals by Wilson.
    """
    if before["share"] is None or after["share"] is None:
        return {"difference": None, "interval": None}
    difference = after["share"] - before["share"]
    (low_1, high_1), (low_2, high_2) = before["interval"], after["interval"]
    down = ((after["share"] - low_2) ** 2 + (high_1 - before["share"]) ** 2) ** 0.5
    up = ((high_2 - after["share"]) ** 2 + (before["share"] - low_1) ** 2) ** 0.5
    return {"difference": difference, "interval": [difference - down, difference + up]}


_SUMS = ("jobs", "gpu_seconds", "runtime_seconds")


def _summed(rows: Iterable[Ended | Outcome], sums: Sequence[str] = _SUMS) -> Row:
    some = list(rows)
    return {name: sum(getattr(row, name) for row in some) for name in sums}


def _grouped(rows: Iterable[Ended | Outcome], key: str, sums: Sequence[str] = ("jobs", "gpu_seconds")) -> list[Row]:
    groups: dict[Any, list[Ended | Outcome]] = {}
    for row in rows:
        groups.setdefault(getattr(row, key), []).append(row)
    return [{key: value, **_summed(some, sums)} for value, some in groups.items()]


# --- coverage of the store


def _use(study: Study, jobs: int, lost: int) -> tuple[Row, dict[str, float]]:
    """Return the use of the GPUs, and for each cluster the share of the period without job records."""
    read: dict[str, list[Span]] = {}
    for row in study.ask("states_read", Read):
        read.setdefault(row.cluster, []).append((row.from_time, row.to_time))
    whole = [(study.from_time, study.to_time)]
    nodes = study.ask("states_there", There)
    times = {row.cluster: within(whole, joined(read.get(row.cluster, ()))) for row in nodes}
    spans_known = ((cluster, *span) for cluster, spans in times.items() for span in spans)
    study.given("known_times", {"cluster": TEXT, "begin_time": BIGINT, "end_time": BIGINT}, spans_known)
    by_jobs = study.chosen.partition or study.chosen.account
    (its,) = study.ask("states_used", GpuTime, chosen_alone=int(bool(by_jobs)))
    known = {cluster: seconds(spans) for cluster, spans in times.items()}
    use = used(
        float(sum(row.gpus * known[row.cluster] for row in nodes)),
        max(known.values(), default=0),
        sum(row.gpus for row in nodes if known[row.cluster]),
        its.gpu_seconds,
        float(lost),
        jobs,
    )
    counts = {"nodes": sum(row.nodes for row in nodes), "nodes_without_gpus": sum(row.without for row in nodes)}
    unread = {
        cluster: 1 - known_seconds / (study.to_time - study.from_time) for cluster, known_seconds in known.items()
    }
    return {**use, **counts}, unread


def _notes(study: Study, ended: Sequence[Ended], use: Row, unread: dict[str, float]) -> list[str]:
    found = hardware_ends.notes(study)
    without = sum(row.jobs for row in ended if row.gpus_up_to is None)
    if without:
        found.append(
            f"{plural(without, 'job')} never started, or {'has' if without == 1 else 'have'} an unknown number of "
            "GPUs: counted as jobs, without GPU time."
        )
    if use["nodes_without_gpus"]:
        found.append(
            f"The number of GPUs of {plural(use['nodes_without_gpus'], 'node')} is not known (healthd fleet ingest "
            "--nodes): they are excluded from the utilisation."
        )
    for cluster, missing in unread.items():
        if missing >= 0.0005:
            found.append(
                f"No jobs of {cluster} were read for {percent(missing)} of the time, which is excluded from the "
                "utilisation."
            )
    return found
