"""Measure the cost of the prolog for a job."""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from figure import Figure

REPOSITORY = Path(__file__).resolve().parents[1]
PROLOGS = 200


def prologs() -> list[Figure]:
    """Measure the prolog, which slurmd runs before each job, on a healthy node and on a node that is about to drain."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        default, script, verdict = (Path(folder) / name for name in ("default", "prolog", "verdict"))
        default.write_text(f"HEALTHD_RUNTIME_DIR={folder}\nHEALTHD_TELL_JOB=no\n")
        shipped = (REPOSITORY / "packaging/slurm/prolog").read_text()
        script.write_text(shipped.replace("/etc/default/healthd", str(default)))
        for node_state, word, status in (("healthy", "ok", 0), ("about to drain", "drain", 1)):
            verdict.write_text(f"{word} {int(time.time()) + 3600} gpu_xid/79 0000:61:00.0: written by the benchmark\n")
            taken = []
            for _ in range(PROLOGS):
                began = time.perf_counter()
                done = subprocess.run(["/bin/sh", script], env={}, stderr=subprocess.DEVNULL)
                taken.append((time.perf_counter() - began) * 1000)
                assert done.returncode == status
            p90 = statistics.quantiles(taken, n=10, method="inclusive")[8]
            figures += [
                Figure(f"prolog on a node that is {node_state}: wall time", "ms", taken, aim=5),
                Figure("  90th percentile", "ms", [p90]),
            ]
    return figures
