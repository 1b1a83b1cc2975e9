"""Computes the outcomes of jobs and their use of GPU time, by state and by size.

It can compare the times before and after a date.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from healthd.common.page import plural
from healthd.fleet.answers import document, hardware_ends
from healthd.fleet.answers.document import Document, WrongChoice, format_time, percent, share
from healthd.fleet.answers.study import Row, Study
from healthd.fleet.statistics.spans import Span, intersect, merge, total_seconds
from healthd.fleet.statistics.wilson import wilson
from healthd.fleet.tables import BIGINT, TEXT

LARGE_GPUS = 512  # "512+ GPU jobs" in the paper
SERVER_GPUS = 8  # GPU limits of the paper's statistics of job sizes


class EndedJobs(NamedTuple):
    """A row returned by states_ended.sql."""

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
    """A row returned by states_outcomes.sql."""

    after: bool
    state: str | None
    by_hardware: bool
    jobs: int


class ReadPeriod(NamedTuple):
    """A row returned by states_read_periods.sql."""

    cluster: str
    from_time: int
    to_time: int


class ClusterGpus(NamedTuple):
    """A row returned by states_nodes.sql."""

    cluster: str
    gpus: int
    nodes: int
    without: int


class GpuTime(NamedTuple):
    """A row returned by states_used_gpu_time.sql or states_lost_on_nodes.sql."""

    gpu_seconds: float


has_findings = document.no_findings


def states(study: Study, *, split: int | None = None, large: int = LARGE_GPUS) -> Document:
    """Return the document for `healthd fleet states`.

    Keys:
        by_state, by_size: jobs and GPU-seconds with their shares.
        infrastructure: jobs that nodes ended.
        use: utilisation and goodput.
        split: the outcome of jobs with `large` or more GPUs before and after the split, or None without a split.

    Jobs are accounting records that ended in the requested period. Their whole runtime is counted, including time
    before the period. Each requeue is a separate record. Source: section III of Kokolis, Kuchnik et al. (HPCA 2025,
    arXiv 2410.21680), for the states, the sizes and the outcome of large jobs.

    Raises Unanswerable if there are no jobs, and WrongChoice if the split is outside the requested period.
    """
    if split is not None and not study.from_time < split < study.to_time:
        within_times = f"{format_time(study.from_time)} and {format_time(study.to_time)}"
        raise WrongChoice(f"--split: {format_time(split)} is not within the requested period, {within_times} UTC")
    study.require("jobs")
    ended = study.query("states_ended", EndedJobs)
    if study.choice.model or study.choice.switch:
        (lost_row,) = study.query("states_lost_on_nodes", GpuTime)
        lost_gpu_seconds = round(lost_row.gpu_seconds)
    else:
        lost_gpu_seconds = sum(row.lost_gpu_seconds for row in ended)
    use, unread_shares = _gpu_use_row(study, sum(row.jobs for row in ended), lost_gpu_seconds)
    return {
        **study.head("states", *_notes(study, ended, use, unread_shares), *study.coverage_notes("jobs")),
        "by_state": by_state(ended),
        "by_size": by_size(ended),
        "size_mix": size_mix(ended),
        "infrastructure": infrastructure(ended),
        "use": use,
        "split": None if split is None else outcomes(_outcomes(study, split, large), split, large),
    }


def _outcomes(study: Study, split: int, large: int) -> list[Outcome]:
    return study.query("states_outcomes", Outcome, split=split, large=large)


# --- decisions


def by_state(ended: Iterable[EndedJobs]) -> list[Row]:
    """Return the states, sorted by GPU time, largest first."""
    rows = with_shares(_sums_by(ended, "state"))
    return sorted(rows, key=lambda row: (-row["gpu_seconds"], row["state"] or ""))


def by_size(ended: Iterable[EndedJobs]) -> list[Row]:
    """Return the size classes, smallest first.

    Each has the states of its jobs and the number of jobs that nodes ended.
    """
    ended_rows = list(ended)
    rows = []
    for row in with_shares(_sums_by(ended_rows, "gpus_up_to")):
        class_rows = [entry for entry in ended_rows if entry.gpus_up_to == row["gpus_up_to"]]
        hardware_sums = _sums(entry for entry in class_rows if entry.ended)
        rows.append(
            {
                **row,
                "by_hardware": {"jobs": hardware_sums["jobs"], "gpu_seconds": hardware_sums["gpu_seconds"]},
                "by_state": by_state(class_rows),
            }
        )
    return sorted(rows, key=lambda row: (row["gpus_up_to"] is None, row["gpus_up_to"]))


def infrastructure(ended: Iterable[EndedJobs]) -> Row:
    """Return the share of jobs, runtime and GPU time for jobs that nodes ended (`hardware_ends`).

    The whole runtime of these jobs is counted; `goodput` estimates the lost part.
    """
    ended_rows = list(ended)
    total = _sums(ended_rows)

    def part(rows: Iterable[EndedJobs]) -> Row:
        sums = _sums(rows)
        return {
            **sums,
            "share_of_jobs": share(sums["jobs"], total["jobs"]),
            "share_of_runtime": share(sums["runtime_seconds"], total["runtime_seconds"]),
            "share_of_gpu_time": share(sums["gpu_seconds"], total["gpu_seconds"]),
        }

    return {
        **part(row for row in ended_rows if row.ended),
        "by_end": [
            {"ended": how, **part(row for row in ended_rows if row.ended == how)} for how in hardware_ends.END_KINDS
        ],
    }


def size_mix(ended: Iterable[EndedJobs]) -> Row:
    """Return the shares of jobs with one GPU, with at most 8 GPUs and with 256 or more.

    The total is all jobs with GPUs.
    """
    gpu_rows = [row for row in ended if row.gpus_up_to]
    jobs, gpu_seconds = sum(row.jobs for row in gpu_rows), sum(row.gpu_seconds for row in gpu_rows)

    def part(rows: Iterable[EndedJobs], prefix: str = "") -> Row:
        part_rows = list(rows)
        return {
            "share_of_jobs": share(sum(getattr(row, f"{prefix}jobs") for row in part_rows), jobs),
            "share_of_gpu_time": share(sum(getattr(row, f"{prefix}gpu_seconds") for row in part_rows), gpu_seconds),
        }

    return {
        "jobs": jobs,
        "one_gpu": part(row for row in gpu_rows if row.gpus_up_to == 1),
        "up_to_8_gpus": part(row for row in gpu_rows if (row.gpus_up_to or 0) <= SERVER_GPUS),
        "256_gpus_or_more": part(gpu_rows, "big_"),
    }


def gpu_use(
    available_gpu_seconds: float,
    known_seconds: float,
    gpus: int,
    used_gpu_seconds: float,
    lost_gpu_seconds: float,
    jobs: int,
) -> Row:
    """Return utilisation, goodput, normalised goodput and jobs per day. A value is None if nothing is available.

        utilisation         used GPU-seconds / available GPU-seconds
        goodput             (used GPU-seconds - lost GPU-seconds) / seconds: the mean number of GPUs whose work was kept
        normalised_goodput  goodput / available GPUs, which is the maximum goodput

    Source: "goodput: the amount of productive work completed per unit of time, normalised by the maximum possible", in
    the section about metrics in Kokolis, Kuchnik et al. (HPCA 2025). The accounting does not record productive work.
    healthd counts all work as productive, except work that had to be repeated because a node or a pre-emption ended the
    job.

    Args:
        available_gpu_seconds: GPU-seconds that were available in the known time.
        known_seconds: the longest known time of a cluster.
        jobs: number of jobs that ended.
    """
    normalised = share(max(used_gpu_seconds - lost_gpu_seconds, 0.0), available_gpu_seconds)
    return {
        "jobs_per_day": jobs / known_seconds * 86400 if known_seconds else None,
        "seconds": known_seconds,
        "gpus": gpus,
        "gpu_seconds_available": available_gpu_seconds,
        "gpu_seconds_used": used_gpu_seconds,
        "gpu_seconds_lost": lost_gpu_seconds,
        "utilisation": share(used_gpu_seconds, available_gpu_seconds),
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


def outcomes(rows: Sequence[Outcome], split_time: int, large: int) -> Row:
    """Return the shares of large jobs that completed and of those that nodes ended, before and after the split.

    The shares have 95 % intervals.
    """
    before, after = ([row for row in rows if row.after is is_after] for is_after in (False, True))
    sides = [_outcome(side) for side in (before, after)]
    return {
        "at": split_time,
        "large_gpus": large,
        "before": sides[0],
        "after": sides[1],
        "change": {key: share_difference(sides[0][key], sides[1][key]) for key in ("completed", "by_hardware")},
    }


def _outcome(rows: Sequence[Outcome]) -> Row:
    jobs = sum(row.jobs for row in rows)
    return {
        "jobs": jobs,
        "completed": _share_row(sum(row.jobs for row in rows if row.state == "COMPLETED"), jobs),
        "by_hardware": _share_row(sum(row.jobs for row in rows if row.by_hardware), jobs),
        "by_state": [
            {"state": row["state"], "jobs": row["jobs"], "share_of_jobs": share(row["jobs"], jobs)}
            for row in sorted(_sums_by(rows, "state", ("jobs",)), key=lambda row: (-row["jobs"], row["state"] or ""))
        ],
    }


def _share_row(jobs: int, total: int) -> Row:
    interval = wilson(jobs, total)
    return {"jobs": jobs, "share": share(jobs, total), "interval": None if interval is None else list(interval)}


def share_difference(before: Row, after: Row) -> Row:
    """Return the second share minus the first, with its 95 % interval, or None if either share is unknown.

    Source: method 10 of Newcombe, "Interval estimation for the difference between independent proportions", Statistics
    in Medicine 17 (1998), from two Wilson intervals.
    """
    if before["share"] is None or after["share"] is None:
        return {"difference": None, "interval": None}
    difference = after["share"] - before["share"]
    (low_1, high_1), (low_2, high_2) = before["interval"], after["interval"]
    down = ((after["share"] - low_2) ** 2 + (high_1 - before["share"]) ** 2) ** 0.5
    up = ((high_2 - after["share"]) ** 2 + (before["share"] - low_1) ** 2) ** 0.5
    return {"difference": difference, "interval": [difference - down, difference + up]}


_SUMS = ("jobs", "gpu_seconds", "runtime_seconds")


def _sums(rows: Iterable[EndedJobs | Outcome], sums: Sequence[str] = _SUMS) -> Row:
    row_list = list(rows)
    return {name: sum(getattr(row, name) for row in row_list) for name in sums}


def _sums_by(rows: Iterable[EndedJobs | Outcome], key: str, sums: Sequence[str] = ("jobs", "gpu_seconds")) -> list[Row]:
    groups: dict[Any, list[EndedJobs | Outcome]] = {}
    for row in rows:
        groups.setdefault(getattr(row, key), []).append(row)
    return [{key: value, **_sums(group, sums)} for value, group in groups.items()]


# --- coverage of the store


def _gpu_use_row(study: Study, jobs: int, lost: int) -> tuple[Row, dict[str, float]]:
    """Return the use of the GPUs and, for each cluster, the share of the period that has no job records."""
    read_spans: dict[str, list[Span]] = {}
    for row in study.query("states_read_periods", ReadPeriod):
        read_spans.setdefault(row.cluster, []).append((row.from_time, row.to_time))
    whole = [(study.from_time, study.to_time)]
    nodes = study.query("states_nodes", ClusterGpus)
    times = {row.cluster: intersect(whole, merge(read_spans.get(row.cluster, ()))) for row in nodes}
    known_spans = ((cluster, *span) for cluster, spans in times.items() for span in spans)
    study.add_table("known_times", {"cluster": TEXT, "begin_time": BIGINT, "end_time": BIGINT}, known_spans)
    by_jobs = study.choice.partition or study.choice.account
    (gpu_time,) = study.query("states_used_gpu_time", GpuTime, chosen_alone=int(bool(by_jobs)))
    known_by_cluster = {cluster: total_seconds(spans) for cluster, spans in times.items()}
    use = gpu_use(
        float(sum(row.gpus * known_by_cluster[row.cluster] for row in nodes)),
        max(known_by_cluster.values(), default=0),
        sum(row.gpus for row in nodes if known_by_cluster[row.cluster]),
        gpu_time.gpu_seconds,
        float(lost),
        jobs,
    )
    counts = {"nodes": sum(row.nodes for row in nodes), "nodes_without_gpus": sum(row.without for row in nodes)}
    unread = {
        cluster: 1 - cluster_seconds / (study.to_time - study.from_time)
        for cluster, cluster_seconds in known_by_cluster.items()
    }
    return {**use, **counts}, unread


def _notes(study: Study, ended: Sequence[EndedJobs], use: Row, unread: dict[str, float]) -> list[str]:
    found = hardware_ends.notes(study)
    without = sum(row.jobs for row in ended if row.gpus_up_to is None)
    if without:
        found.append(
            f"{plural(without, 'job')} never started, or {'has' if without == 1 else 'have'} an unknown number of "
            "GPUs; counted as jobs without GPU time."
        )
    if use["nodes_without_gpus"]:
        found.append(
            f"The number of GPUs of {plural(use['nodes_without_gpus'], 'node')} is unknown (run healthd fleet ingest "
            "--nodes); these are excluded from the utilisation."
        )
    for cluster, missing in unread.items():
        if missing >= 0.0005:
            found.append(
                f"No jobs of {cluster} were read for {percent(missing)} of the time, which is excluded from the "
                "utilisation."
            )
    return found
