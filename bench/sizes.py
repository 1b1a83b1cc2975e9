"""Measure whether the CPU time of a round (daemon and worker) is linear in the number of GPUs, disks and processes."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from counted import cpu_ms, daemon_pid
from figure import Figure
from healthd_daemon import Healthd
from made_node import PROCESSES, node
from rounds import slope

Key = TypeVar("Key", int, str)
WINDOWS, WINDOW_ROUNDS = 6, 5
WARM_SECONDS = 10.0
GPU_COUNTS, DISK_COUNTS, PROCESS_COUNTS = (1, 4, 8, 16), (4, 16, 64), (0, 200, PROCESSES, 20_000)
PROCESSES_AIM = 10.0


def sizes() -> list[Figure]:
    """Measure with the check `processes`. `rounds` leaves it out, because it is off when tests start a daemon."""
    gpus = measured({number: {"gpus": number} for number in GPU_COUNTS})
    disks = measured({number: {"disks": number} for number in DISK_COUNTS})
    processes = measured({number: {"processes": number} for number in PROCESS_COUNTS})
    none, full = (statistics.median(processes[number]) for number in (0, PROCESSES))
    return [
        *(Figure(f"one round, {number} GPU{'s' * (number > 1)}: CPU", "ms", gpus[number]) for number in GPU_COUNTS),
        *fit("GPU", gpus),
        *(Figure(f"one round, {number} disks: CPU", "ms", disks[number]) for number in DISK_COUNTS),
        *fit("disk", disks),
        *(Figure(f"one round, {number} processes: CPU", "ms", processes[number]) for number in PROCESS_COUNTS),
        Figure(f"  {PROCESSES} processes, compared with none", "%", [(full / none - 1) * 100], aim=PROCESSES_AIM),
    ]


def fit(unit: str, rounds: Mapping[int, Sequence[float]]) -> list[Figure]:
    """Fit a least-squares line through the medians. Return its slope and the largest deviation from the line."""
    points = [(number, statistics.median(values)) for number, values in rounds.items()]
    per_unit = slope(points)
    middle, level = (statistics.fmean(values) for values in zip(*points, strict=True))
    deviation = max(abs(ms / (level + per_unit * (number - middle)) - 1) for number, ms in points)
    return [
        Figure(f"  per {unit}", "ms", [per_unit]),
        Figure("  largest deviation from the line", "%", [deviation * 100]),
    ]


def measured(nodes: Mapping[Key, Mapping[str, Any]]) -> dict[Key, list[float]]:
    """Return the CPU time (ms) of each round of nodes.

    The nodes run in parallel, so that a busy machine slows all of them.
    """
    with contextlib.ExitStack() as stack:
        daemons: dict[Key, Healthd] = {}
        for index, (number, parts) in enumerate(nodes.items()):
            folder, config = stack.enter_context(node(**parts))
            daemons[number] = stack.enter_context(
                Healthd(
                    *("--interval", "1", "--root", str(folder), "--node-name", f"n{index}"),
                    config=f"{config}\n[checks.processes]\n[checks.disk_space]\n",
                    fake_nvml=str(folder / "gpus.toml"),
                )
            )
        time.sleep(WARM_SECONDS)
        pids = {number: (daemon_pid(daemon), daemon.worker_pid()) for number, daemon in daemons.items()}
        spent: dict[Key, list[float]] = {number: [] for number in nodes}
        for _ in range(WINDOWS):
            before = {number: sum(map(cpu_ms, pid_pair)) for number, pid_pair in pids.items()}
            time.sleep(WINDOW_ROUNDS)  # one round per second; each node has its own phase
            for number, pid_pair in pids.items():
                spent[number].append((sum(map(cpu_ms, pid_pair)) - before[number]) / WINDOW_ROUNDS)
        for number, daemon in daemons.items():
            assert daemon.worker_pid() == pids[number][1], "the worker was replaced during the measurement"
            status = daemon.status()
            assert status["health"] == "healthy", status["conditions"]
    return spent
