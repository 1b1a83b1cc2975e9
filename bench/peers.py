"""Measure Prometheus' node_exporter on this machine in the same run.

The program is NODE_EXPORTER=PROGRAM, or node_exporter in the PATH. If there is none, a row gives the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.request

from counted import cpu_ms, pss
from figure import Figure

SCRAPES = 20


def peers() -> list[Figure]:
    """Return node_exporter's memory after some scrapes, as for healthd with its metrics page, and the CPU time of a
    scrape."""
    names = ("node_exporter", "prometheus-node-exporter")
    program = os.environ.get("NODE_EXPORTER") or next(filter(None, map(shutil.which, names)), None)
    if not program:
        return [Figure("node_exporter: not measured (set NODE_EXPORTER or install it in the PATH)", "", [])]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [program, f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        page = f"http://127.0.0.1:{port}/metrics"
        _wait_until_ready(process, page)
        spent = []
        for _ in range(SCRAPES):
            before = cpu_ms(process.pid)
            with urllib.request.urlopen(page, timeout=10) as answer:
                answer.read()
            spent.append(cpu_ms(process.pid) - before)
        memory = pss(process.pid)
    finally:
        process.kill()
        process.wait()
    return [
        Figure("node_exporter: memory, PSS", "MiB", [memory]),
        Figure("  one scrape: CPU", "ms", spent),
    ]


def _wait_until_ready(process: subprocess.Popen[bytes], page: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(page, timeout=10).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise
        time.sleep(0.1)
