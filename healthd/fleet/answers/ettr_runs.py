"""What the store's runs (jobs of one name one after another) made of their time, beside what the model expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healthd.fleet.answers.rate import CLASSES
from healthd.fleet.answers.study import Study
from healthd.fleet.statistics.ettr_model import Job, exact


class Run(NamedTuple):
    """Columns of ettr_runs.sql. lost_seconds: of its running time."""

    cluster: str
    run: int
    gpus: int
    nodes: int | None
    starts: int
    interruptions: int
    runtime_seconds: int
    queued_seconds: int
    lost_seconds: float


class Families(NamedTuple):
    """Columns of ettr_families.sql."""

    runs: int


def measured(
    study: Study, r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Each class of size, as `by_size` has it, and how many runs are left out: jobs of one name that ran at the same
    time are a family, no chain."""
    seconds = {"restart_seconds": float(restart_seconds), "checkpoint_seconds": float(checkpoint_seconds)}
    rows = study.ask("ettr_runs", Run, **seconds)
    (families,) = study.ask("ettr_families", Families)
    return by_size(rows, r_f, checkpoint_seconds, restart_seconds), families.runs


def ettr_of(run: Run) -> float:
    """Progress / (running + queued while it could have run), from 0 to 1. lost_seconds: of its running time, by the
    rule min(runtime, restart + half a checkpoint) for each interrupted attempt, min(runtime, restart) for each other.

    Source: the definitions, and "half an hour lost" of hourly checkpoints, in Kokolis, Kuchnik et al. (HPCA 2025)."""
    return float((run.runtime_seconds - run.lost_seconds) / (run.runtime_seconds + run.queued_seconds))


def by_size(
    runs: Sequence[Run], r_f: float | None, checkpoint_seconds: float, restart_seconds: float
) -> list[dict[str, Any]]:
    """[{gpus_up_to, runs, interruptions, mean, low, high, expected}]: the mean of the runs' ETTR, of ten runs one is
    below `low` and one above `high`, and the mean of what the model expects of each: with its own nodes and progress,
    and the class's mean wait."""
    classes: dict[int, list[Run]] = {}
    for run in runs:
        up_to = next((size for size in CLASSES if run.gpus <= size), CLASSES[-1])
        classes.setdefault(up_to, []).append(run)
    found = []
    for up_to, some in sorted(classes.items()):
        ratios = np.asarray([ettr_of(run) for run in some])
        starts = sum(run.starts for run in some)
        queue = sum(run.queued_seconds for run in some) / starts if starts else 0.0
        low, high = (float(end) for end in np.quantile(ratios, (0.1, 0.9)))
        of_model = [
            exact(
                Job(
                    max(1.0, run.nodes),
                    r_f,
                    checkpoint_seconds,
                    restart_seconds,
                    queue,
                    0.0,
                    max(1.0, run.runtime_seconds - run.lost_seconds),
                )
            )
            for run in some
            if r_f is not None and run.nodes
        ]
        found.append(
            {
                "gpus_up_to": up_to,
                "runs": len(some),
                "attempts": starts,
                "interruptions": sum(run.interruptions for run in some),
                "queue_seconds": queue,
                "mean": float(ratios.mean()),
                "low": low,
                "high": high,
                "expected": sum(of_model) / len(of_model) if of_model else None,
            }
        )
    return found
