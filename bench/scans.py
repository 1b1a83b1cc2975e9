"""What `healthd scan` costs: of the logs of scan.py, and of some more, with its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import big_log
import scan
from figure import Figure

REPOSITORY = Path(__file__).resolve().parents[1]


def scans() -> list[Figure]:
    """CPU of the whole program, its start included. The aims are MB/s, which a median must exceed: so of the time."""
    figures = []
    for name, speeds, target in scan.rows(runs=3, size=50_000_000):
        times = [100 / speed for speed in speeds]
        figures += [
            Figure(f"healthd scan, {name}: CPU for 100 MB", "s", times, 100 / target if target else None),
            Figure("  that is", "MB/s", speeds),
        ]
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        log = Path(folder) / "syslog"
        for name, size, each in SCANNED:
            if name.startswith("captured"):
                big_log.write_captures(log, size, dated="dated" in name)
            else:
                big_log.write(log, size, each)
            megabytes = log.stat().st_size / 1e6
            subprocess.run(["cksum", log], stdout=subprocess.DEVNULL, check=True)  # it is in the page cache
            runs = [scanned(log) for _ in range(SCANS)]
            speed = [megabytes / seconds for seconds, _ in runs]
            figures += [
                Figure(f"healthd scan, {name}: CPU for 100 MB", "s", [100 / rate for rate in speed]),
                Figure("  that is", "MB/s", speed),
                Figure("  its memory, resident at most", "MiB", [resident for _, resident in runs]),
            ]
    return figures


SCANS = 5
SCANNED = (
    ("no fault", 100_000_000, 10**9),
    ("a fault in 10 lines", 20_000_000, 10),
    ("captured lines again and again", 100_000_000, 0),
    ("captured lines, dated", 20_000_000, 0),
)


def scanned(log: Path) -> tuple[float, float]:
    """(CPU seconds, MiB resident at most) of one run."""
    argv = [sys.executable, "-c", scan.ONE_CORE + scan.WITH_RE2, "scan", str(log)]
    process = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1, 2), process.returncode
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
