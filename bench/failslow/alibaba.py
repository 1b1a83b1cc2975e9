"""Run the detectors on a public trace: iteration times of four PyTorch and TensorFlow jobs of ten workers each.

The folder contains job_1_norm.csv to job_4_norm.csv of alibaba/clusterdata, cluster-trace-gpu-v2020, mini-batch-time.
Its `time` counts the rows of all workers of a job, so a worker's row number is its iteration. These rows were inspected
while thresholds were chosen, so they are no evidence of accuracy. The script only tests that the detectors miss nothing
obvious and report nothing absurd.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from failslow.generate import Made
from healthd.failslow.model import Diagnosis, Point, Series

SIGNIFICANT_SLOWDOWN = 0.15  # other points in job_1 do not count if their slowdown is below this
JOB_4_POINTS = 5
SLOW_IN_JOB_3 = {"6", "7", "8", "9"}
JOB_1 = ("6", 181, 194)


def jobs(folder: Path) -> list[Made]:
    return [_job(folder / f"job_{number}_norm.csv") for number in (1, 2, 3, 4)]


def _job(path: Path) -> Made:
    values_by_worker: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values_by_worker.setdefault(row["worker"], []).append(float(row["batch_time_norm"]))
    series = tuple(
        Series(name, value, [float(at) for at in range(len(value))], "worker")
        for name, value in sorted(values_by_worker.items(), key=lambda item: int(item[0]))
    )
    at = tuple(np.arange(len(item.value)) for item in series)
    return Made(path.stem, False, "public", 0.0, 0, 0.0, frozenset(), (), series, at)


def verdicts(
    folder: Path, healthd: Callable[[Made], Diagnosis], baselines: dict[str, Callable[[Made], Diagnosis]]
) -> list[tuple[bool | None, str]]:
    """Return (met, sentence) for each job, then the counts of the other detectors. met: None if there is no target."""
    made = jobs(folder)
    found = [
        {point.name: points for point, points in zip(job.series, healthd(job).points, strict=True) if points}
        for job in made
    ]
    worker, first, last = JOB_1
    matching = [
        point
        for point in found[0].get(worker, ())
        if abs(point.onset_index - first) <= 5 and point.relief_index and abs(point.relief_index - last) <= 5
    ]
    other_points = [
        p for points in found[0].values() for p in points if p not in matching and p.slowdown >= SIGNIFICANT_SLOWDOWN
    ]
    count = sum(map(len, found[3].values()))
    rows: list[tuple[bool | None, str]] = [
        (
            bool(matching) and not other_points,
            f"job_1: worker {worker} slow from {first} to {last}, no other significant point: {_describe(found[0])}",
        ),
        (not found[1], f"job_2: no points: {_describe(found[1])}"),
        (
            set(found[2]) <= SLOW_IN_JOB_3 and len(found[2]) > 0,
            f"job_3: points only of workers 6 to 9: {_describe(found[2])}",
        ),
        (count <= JOB_4_POINTS, f"job_4: at most {JOB_4_POINTS} points: {count}: {_describe(found[3])}"),
    ]
    for name, detector in baselines.items():
        counts = [sum(map(len, detector(job).points)) for job in made]
        rows.append((None, f"{name} has {', '.join(map(str, counts))} points in jobs 1 to 4"))
    return rows


def _describe(found: dict[str, tuple[Point, ...]]) -> str:
    if not found:
        return "no point"
    return "; ".join(
        f"worker {name} " + ", ".join(f"{p.onset_index} to {p.relief_index} +{p.slowdown:.0%}" for p in points)
        for name, points in found.items()
    )
