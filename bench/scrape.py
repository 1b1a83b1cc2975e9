"""Measure a scrape of the metrics page, including HTTP: if nothing changed since the last scrape, and after a round.

    PYTHONPATH=. python bench/scrape.py

The daemon runs on the fake node of node_tree.py, with one round per second. The times are user and system time of the
daemon's process. They include ended threads, because each client has a thread that ends with the answer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "e2e")]

import node_tree  # noqa: E402
from figure import Figure, table  # noqa: E402
from healthd_daemon import Healthd  # noqa: E402

SCRAPES = 30
APART_SECONDS = 1.1  # pause between requests, because requests within one second share a page
QUIET_SECONDS = 0.3  # time after a round for the tasks that follow it
# The headers of Prometheus 3 (prometheus/prometheus, scrape/scrape.go).
PROMETHEUS = {
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/3.5.0",
    "X-Prometheus-Scrape-Timeout-Seconds": "10",
}
PLAIN: dict[str, str] = {}


def rows() -> list[Figure]:
    """Return the figures; the medians count."""
    folder = Path(tempfile.mkdtemp(prefix="healthd-bench."))
    try:
        node_tree.build(folder)
        with node(folder, interval="3600") as daemon:
            time.sleep(2)  # by now, the checks that were requested at the start have ended
            same = {name: unchanged(daemon, headers) for name, headers in REQUEST_HEADERS.items()}
            sizes = {name: len(scrape(daemon, headers)) / 1024 for name, headers in REQUEST_HEADERS.items()}
        with node(folder, interval="1") as daemon:
            after = {name: after_rounds(daemon, headers) for name, headers in REQUEST_HEADERS.items()}
    finally:
        shutil.rmtree(folder)
    found = []
    for name in REQUEST_HEADERS:
        found += [
            Figure(f"scrape, {name}, unchanged page: CPU", "ms", same[name], 1),
            Figure("  after a round", "ms", after[name], 4),
            Figure("  size", "KiB", [sizes[name]]),
        ]
    return found


REQUEST_HEADERS = {"OpenMetrics, gzip": PROMETHEUS, "plain text": PLAIN}


def node(folder: Path, interval: str) -> Healthd:
    flags = ("--interval", interval, "--root", str(folder), "--listen", "127.0.0.1:0")
    return Healthd(*flags, config=node_tree.CONFIG)


def unchanged(daemon: Healthd, headers: dict[str, str]) -> list[float]:
    scrape(daemon, headers)
    spent = []
    for _ in range(SCRAPES):
        time.sleep(APART_SECONDS)
        spent.append(cost(daemon, headers))
    return spent


def after_rounds(daemon: Healthd, headers: dict[str, str]) -> list[float]:
    spent = []
    for _ in range(SCRAPES):
        verdict = daemon.run_dir / "verdict"  # this file is rewritten after each round; polling it wakes no process
        last = verdict.stat().st_mtime_ns
        while verdict.stat().st_mtime_ns == last:
            time.sleep(0.01)
        time.sleep(QUIET_SECONDS)
        spent.append(cost(daemon, headers))
    return spent


def cost(daemon: Healthd, headers: dict[str, str]) -> float:
    assert daemon.process is not None
    clock = ~daemon.process.pid << 3 | 2  # its CPU time (linux/posix-timers.h, CPUCLOCK_SCHED)
    before = time.clock_gettime(clock)
    scrape(daemon, headers)
    time.sleep(0.02)  # the client's thread ends after its last byte
    return (time.clock_gettime(clock) - before) * 1000


def scrape(daemon: Healthd, headers: dict[str, str]) -> bytes:
    address = next(word for word in daemon.log.read_text().split() if word.startswith("http://"))
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as page:
        text: bytes = page.read()
    return text


if __name__ == "__main__":
    print(table(rows()))
