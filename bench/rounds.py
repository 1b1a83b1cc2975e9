"""Measure a running daemon: rounds, memory, growth, and wake-ups between two rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from counted import cpu_ms, daemon_pid, pss, scrape, time_slices, tree_pss
from figure import Figure
from healthd_daemon import Healthd
from installed import installed
from made_node import node

ROUNDS = 20
WARM_ROUND, LAST_ROUND = 300, 1300
GROWTH_SAMPLES = 20
PATIENCE_SECONDS = 120.0
IDLE_SECONDS = 20.0
QUIET_SECONDS = 0.5  # time after a round for the tasks that follow it


def rounds() -> list[Figure]:
    """Measure the CPU time of rounds, with one round per second, without the programs that exec checks start."""
    with node() as (folder, config), Healthd("--interval", "1", "--root", str(folder), config=config) as daemon:
        pids = [daemon_pid(daemon), daemon.worker_pid()]
        settle(daemon)
        spent = []
        for _ in range(ROUNDS):
            before = [cpu_ms(pid) for pid in pids]
            settle(daemon)
            spent.append([cpu_ms(pid) - was for pid, was in zip(pids, before, strict=True)])
        assert pids[1] == daemon.worker_pid(), "the worker was replaced during the measurement"
        status = daemon.status()
        assert status["health"] == "healthy", status["conditions"]
    return [
        Figure("one round, daemon and worker: CPU", "ms", [sum(pair) for pair in spent], aim=20),
        Figure("  daemon", "ms", [daemon_ms for daemon_ms, _ in spent]),
        Figure("  worker", "ms", [worker_ms for _, worker_ms in spent]),
    ]


def memory() -> list[Figure]:
    """Measure the memory of the process tree after some rounds, and with the metrics page after some scrapes.

    scrape.py measures the cost of one scrape.
    """
    found = []
    for listen in ("off", "127.0.0.1:0"):
        with node() as (folder, config):
            flags = ("--interval", "1", "--root", str(folder), "--listen", listen)
            with installed(*flags, config=config) as daemon:
                for _ in range(ROUNDS):
                    settle(daemon)
                    if listen != "off":
                        scrape(daemon)
                settle(daemon)
                found.append(tree_pss(daemon))
    return [
        Figure("memory of the process tree, PSS", "MiB", [found[0]], aim=30),
        Figure("memory with the metrics page, PSS", "MiB", [found[1]], aim=35),
    ]


def growth(last: int = LAST_ROUND) -> list[Figure]:
    """Measure the growth of the processes over many short rounds, after the first ones have filled all caches."""
    with node() as (folder, config), Healthd("--interval", "0.15", "--root", str(folder), config=config) as daemon:
        pids = {"daemon": daemon_pid(daemon), "worker": daemon.worker_pid()}
        samples: dict[str, list[tuple[int, float]]] = {name: [] for name in pids}
        at = until_round(daemon, WARM_ROUND)
        while True:
            for name, pid in pids.items():
                samples[name].append((at, pss(pid)))
            if at >= last:
                break
            at = until_round(daemon, min(at + max((last - WARM_ROUND) // GROWTH_SAMPLES, 1), last))
        assert pids["worker"] == daemon.worker_pid(), "the worker was replaced during the measurement"
    figures = []
    for name, process_samples in samples.items():
        (first, before), (at, after) = process_samples[0], process_samples[-1]
        figures.append(Figure(f"growth of the {name} from round {first} to {at}, PSS", "MiB", [after - before], aim=1))
        figures.append(Figure("  slope per 1,000 rounds", "KiB", [slope(process_samples) * 1000 * 1024]))
    return figures


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the slope of the least-squares line through the points."""
    x, y = (statistics.fmean(values) for values in zip(*points, strict=True))
    across = sum((at - x) ** 2 for at, _ in points)
    return sum((at - x) * (value - y) for at, value in points) / across if across else 0.0


def until_round(daemon: Healthd, number: int) -> int:
    """Wait for a round. Returns the number of the last round."""
    while (now := int(daemon.status()["round"]["number"])) < number:
        time.sleep(1)
    return now


def settle(daemon: Healthd) -> None:
    """Wait until the next round and the tasks after it have ended.

    This polls the verdict file, which wakes no process.
    """
    verdict = daemon.run_dir / "verdict"
    last = verdict.stat().st_mtime_ns
    end = time.monotonic() + PATIENCE_SECONDS
    while verdict.stat().st_mtime_ns == last:
        if time.monotonic() > end:
            raise TimeoutError(f"no round within {PATIENCE_SECONDS:g} s")
        time.sleep(0.01)
    time.sleep(QUIET_SECONDS)


def idle() -> list[Figure]:
    """Check that nothing runs between two rounds.

    The daemon reads this machine's /dev/kmsg and udev, and has a metrics page.
    """
    flags = ("--interval", "86400", "--kernel-log", "kmsg", "--listen", "127.0.0.1:0", "--node-name", "bench")
    with Healthd(*flags) as daemon:
        daemon.wait_until(lambda status: status["health"] == "healthy", "health is healthy")
        time.sleep(12)  # by now, the checks that were requested at the start have ended
        pids = [daemon_pid(daemon), daemon.worker_pid()]
        # repeat until no kernel line arrives during the measurement: each line is an event and wakes the daemon
        for _ in range(5):
            lines = daemon.status()["kernel_log"]["lines_total"]
            time.sleep(1)
            before = {pid: time_slices(pid) for pid in pids}
            time.sleep(IDLE_SECONDS)
            woken = [float(time_slices(pid) - before[pid]) for pid in pids]
            if daemon.status()["kernel_log"]["lines_total"] == lines:
                break
    hourly = 3600 / IDLE_SECONDS
    return [
        Figure("wake-ups per hour between rounds, daemon", "", [woken[0] * hourly], aim=0),
        Figure("  worker", "", [woken[1] * hourly], aim=0),
    ]
