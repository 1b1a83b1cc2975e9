"""Read a daemon's CPU time, wake-ups and memory from the kernel, and wait for a running daemon."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "e2e")]

from healthd_daemon import Healthd  # noqa: E402


def daemon_pid(daemon: Healthd) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process, including ended threads, from its clock (linux/posix-timers.h,
    CPUCLOCK_SCHED)."""
    return time.clock_gettime(~pid << 3 | 2) * 1000


def time_slices(pid: int) -> int:
    """Return how often the threads of a process got a CPU (Documentation/scheduler/sched-stats.rst, the third
    field)."""
    tasks = os.listdir(f"/proc/{pid}/task")
    return sum(int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[2]) for task in tasks)


def tree_pss(daemon: Healthd) -> float:
    """Return the memory of the daemon and its worker in MiB."""
    return sum(pss(pid) for pid in (daemon_pid(daemon), daemon.worker_pid()))


def pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def peak_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def scrape(daemon: Healthd) -> bytes:
    address = next(word for word in daemon.log.read_text().split() if word.startswith("http://"))
    with urllib.request.urlopen(address, timeout=5) as page:
        text: bytes = page.read()
    return text


def wait_for_text(path: Path, offset: int, text: bytes, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.stat().st_size > offset:
            with open(path, "rb") as file:
                file.seek(offset)
                if text in file.read():
                    return
        time.sleep(0.001)
    raise TimeoutError(f"{path}: no {text!r} within {seconds} s")
