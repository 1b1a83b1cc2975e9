"""What is due. Pure; times are seconds of CLOCK_MONOTONIC, so that setting the clock moves nothing.

Checks of one interval run in one round, at the same phase of it; nodes have different phases, so that a cluster does
not read a file server or its controller in the same second.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from healthd.model import RunName


@dataclass(frozen=True, slots=True)
class ScheduledRun:
    """One run of a check that comes round, and the `resource` that it may hang in."""

    check: str
    instance: str
    resource: str
    interval_seconds: float
    timeout_seconds: float

    @property
    def name(self) -> RunName:
        return RunName(self.check, self.instance)


def phase(node_name: str, interval_seconds: float) -> float:
    """Where in the interval this node's rounds lie: the same after every restart."""
    return zlib.crc32(node_name.encode()) % 65536 / 65536 * interval_seconds


def due_at(run: ScheduledRun, last_run: float | None, node_name: str) -> float:
    """When the run comes round: at once if it never ran, else at the node's phase, at least a tenth of it later."""
    if last_run is None:
        return 0.0
    interval = run.interval_seconds
    offset = phase(node_name, interval)
    rounds = (last_run - offset) // interval + 1
    at = offset + rounds * interval
    return at if at - last_run >= interval / 10 else at + interval


def due(
    runs: Iterable[ScheduledRun],
    last_runs: Mapping[RunName, float],
    early: Mapping[RunName, float],
    node_name: str,
    now: float,
) -> list[ScheduledRun]:
    """The runs that are due: GPU checks first (the worker holds NVML only for them), else in the order given.

    `early`: runs that are wanted before their round, and when.
    """
    wanted = [
        run
        for run in runs
        if min(due_at(run, last_runs.get(run.name), node_name), early.get(run.name, float("inf"))) <= now
    ]
    return sorted(wanted, key=lambda run: run.resource != "nvml")


def next_due(
    runs: Iterable[ScheduledRun],
    last_runs: Mapping[RunName, float],
    early: Mapping[RunName, float],
    node_name: str,
) -> float:
    """When something is due next; infinity if never."""
    return min(
        (min(due_at(run, last_runs.get(run.name), node_name), early.get(run.name, float("inf"))) for run in runs),
        default=float("inf"),
    )
