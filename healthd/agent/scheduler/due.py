"""Selection of due runs. The functions are pure. Times are in seconds on CLOCK_MONOTONIC, so that clock steps have no
effect.

Checks with the same interval run in one round, at the same phase of the interval. Each node has its own phase, so that
a cluster's nodes do not all query a file server or slurmctld in the same second.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Collection, Iterable, Mapping

from healthd.common.model import RunName
from healthd.common.values import Value


class ScheduledRun(Value, frozen=True):
    """A recurring run of a check. `resource` is the resource in which the run may hang."""

    name: RunName
    resource: str
    interval_seconds: float
    timeout_seconds: float

    @property
    def check(self) -> str:
        return self.name.check

    @property
    def instance(self) -> str:
        return self.name.instance


@functools.lru_cache(maxsize=64)  # called for each run, several times per round
def phase(node_name: str, interval_seconds: float) -> float:
    """Return the offset of this node's rounds within the interval. The offset stays the same after a restart."""
    return zlib.crc32(node_name.encode()) % 65536 / 65536 * interval_seconds


def due_at(run: ScheduledRun, last_run: float | None, node_name: str) -> float:
    """Return the time at which a run is due.

    A run that never ran is due at once. Otherwise the run is due at the node's phase, but at least a tenth of the
    interval after the last run.
    """
    if last_run is None:
        return 0.0
    interval = run.interval_seconds
    offset = phase(node_name, interval)
    rounds = (last_run - offset) // interval + 1
    at = offset + rounds * interval
    return at if at - last_run >= interval / 10 else at + interval


def due_runs(
    runs: Iterable[ScheduledRun],
    last_runs: Mapping[RunName, float],
    early: Mapping[RunName, float],
    node_name: str,
    now: float,
) -> list[ScheduledRun]:
    """Return the due runs: GPU checks first (the worker keeps NVML open only for them), then others in the given order.

    `early` maps runs that are due before their round to the times at which they are due.
    """
    due_now = [
        run
        for run in runs
        if min(due_at(run, last_runs.get(run.name), node_name), early.get(run.name, float("inf"))) <= now
    ]
    return gpus_first(due_now)


def gpus_first(runs: Iterable[ScheduledRun]) -> list[ScheduledRun]:
    return sorted(runs, key=lambda run: run.resource != "nvml")


def with_repeats(
    waiting: Iterable[ScheduledRun], runs: Iterable[ScheduledRun], repeated: Collection[RunName]
) -> list[ScheduledRun]:
    """Return a round's waiting runs plus those of `repeated` that are in `runs` and not already waiting."""
    queue = list(waiting)
    queued_names = {run.name for run in queue}
    return gpus_first([*queue, *(run for run in runs if run.name in repeated and run.name not in queued_names)])


def next_due(
    runs: Iterable[ScheduledRun],
    last_runs: Mapping[RunName, float],
    early: Mapping[RunName, float],
    node_name: str,
) -> float:
    """Return the time at which the next run is due, or infinity if there are no runs."""
    return min(
        (min(due_at(run, last_runs.get(run.name), node_name), early.get(run.name, float("inf"))) for run in runs),
        default=float("inf"),
    )
