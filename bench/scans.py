"""Measure the CPU time and memory of `healthd scan` on the logs of scan.py and some other logs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import big_log
import peak
import scan
from figure import Figure

REPOSITORY = Path(__file__).resolve().parents[1]


def scans() -> list[Figure]:
    """Measure the CPU time of the whole program, including its start.

    Targets are minimum MB/s, converted to maximum seconds.
    """
    figures = []
    for name, speeds, target in scan.rows(runs=3, size=50_000_000):
        times = [100 / speed for speed in speeds]
        figures += [
            Figure(f"healthd scan, {name}: CPU for 100 MB", "s", times, 100 / target if target else None),
            Figure("  throughput", "MB/s", speeds),
        ]
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        log = Path(folder) / "syslog"
        for name, size, each in SCANNED:
            if name.startswith("captured"):
                big_log.write_captures(log, size, dated="dated" in name)
            else:
                big_log.write(log, size, each)
            megabytes = log.stat().st_size / 1e6
            subprocess.run(["cksum", log], stdout=subprocess.DEVNULL, check=True)  # loads it into the page cache
            runs = [scanned(log) for _ in range(SCANS)]
            speed = [megabytes / seconds for seconds, _ in runs]
            figures += [
                Figure(f"healthd scan, {name}: CPU for 100 MB", "s", [100 / rate for rate in speed]),
                Figure("  throughput", "MB/s", speed),
                Figure("  peak resident memory", "MiB", [resident for _, resident in runs]),
            ]
    return figures


SCANS = 5
SCANNED = (
    ("no fault", 100_000_000, 10**9),
    ("one fault per 10 lines", 20_000_000, 10),
    ("captured lines, repeated", 100_000_000, 0),
    ("captured lines, dated", 20_000_000, 0),
)


def scanned(log: Path) -> tuple[float, float]:
    """Return (CPU seconds, peak resident MiB) of one run."""
    used = peak.run([sys.executable, "-c", scan.ONE_CORE + scan.WITH_RE2, "scan", log], cwd=REPOSITORY)
    assert used.status in (0, 1, 2), used.status
    return used.cpu_seconds, used.peak_mib
