"""Measure the cost of `healthd failslow`: time per sample of the online detector, time and memory of the command.

The command reads files of ten million rows. Values are medians of several runs. Each run has its own process and uses
compiled bytecode.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peak

REPOSITORY = Path(__file__).parents[2]
SAMPLE_US, MIB, SECONDS = 50.0, 512.0, 60.0
RUNS = 5
ROWS = 10_000_000
SERIES = 100_000
LIMIT = 900  # seconds, for one command

ONLINE = """
import random, sys, time
from healthd.failslow.detect import detect
random.seed(1)
samples = [random.lognormvariate(0, 0.05) * (1.3 if 9000 < at < 11000 else 1) for at in range(20_000)]
begun = time.process_time()
points = detect(samples)
print(1e6 * (time.process_time() - begun) / len(samples))
"""
TOGETHER = """
import random, sys, time
from healthd.failslow.analysis import find_points
from healthd.failslow.model import Series
random.seed(1)
at = [float(one) for one in range(500)]
series = [Series(str(n), [random.lognormvariate(0, 0.05) for _ in at], at) for n in range(500)]
begun = time.process_time()
find_points(series)
print(1e6 * (time.process_time() - begun) / (len(series) * len(at)))
"""


def verdicts(rows: int = ROWS) -> list[tuple[bool | None, str]]:
    """Return (met, sentence) for each cost. met: None if there is no target."""
    online, together = _repeated(ONLINE), _repeated(TOGETHER)
    results: list[tuple[bool | None, str]] = [
        (
            statistics.median(online) <= SAMPLE_US,
            f"CPU time per sample, one series (standard library): {_spread(online)} us, aim {SAMPLE_US:.0f} us",
        ),
        (None, f"CPU time per sample, 500 series at once: {_spread(together)} us"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for series in (rows // 10_000, SERIES * rows // ROWS):
            for ending in ("csv", "parquet"):
                path = Path(folder) / f"{series}.{ending}"
                _write_file(path, rows, series)
                seconds, mib, status = _command(path)
                path.unlink()
                file_description = f"{rows:,} rows of {series:,} series, {ending}"
                is_success = status in (0, 1)
                failure_note = "" if is_success else f" (it ended with status {status})"
                results.append(
                    (
                        is_success and seconds <= SECONDS,
                        f"{file_description}: {seconds:.0f} s{failure_note}, aim {SECONDS:.0f} s",
                    ),
                )
                aim = f", aim {MIB:.0f} MiB" if series >= SERIES * rows // ROWS else ""
                results.append((is_success and (not aim or mib <= MIB), f"{file_description}: peak {mib:.0f} MiB{aim}"))
    return results


def _repeated(program: str) -> list[float]:
    _run(program)  # compiles the bytecode
    return sorted(_run(program) for _ in range(RUNS))


def _run(program: str) -> float:
    done = subprocess.run([sys.executable, "-c", program], env=_environment(), check=True, capture_output=True)
    return float(done.stdout)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f}, n={len(values)})"


def _write_file(path: Path, rows: int, series: int) -> None:
    """Write the times of healthy workers with 5 % noise, and of three workers that slow down halfway, in order of
    time."""
    import duckdb

    each = rows // series
    with duckdb.connect() as at:
        at.execute("SELECT setseed(0.5)")
        at.execute(
            f"""COPY (
                SELECT n % {series} AS worker, n // {series} AS iteration,
                    round((1 + 0.05 * sqrt(-2 * ln(1 - random())) * cos(6.283185 * random()))
                        * CASE WHEN n % {series} < 3 AND n // {series} >= {each // 2} THEN 1.4 ELSE 1 END, 5) AS seconds
                FROM range({each * series}) AS of(n)
            ) TO '{path}' ({"HEADER" if path.suffix == ".csv" else "FORMAT parquet"})"""
        )


def _command(path: Path) -> tuple[float, float, int]:
    """Run the command. Returns (wall seconds, peak resident MiB, exit status)."""
    argv = [*("timeout", str(LIMIT)), sys.executable, "-m", "healthd", "failslow", str(path), "--json"]
    argv += ["--series", "worker", "--value", "seconds", "--index", "iteration"]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        used = peak.run(argv, errors, _environment())
        if used.status not in (0, 1):
            errors.seek(0)
            print(f"{path.name}: {errors.read().decode(errors='replace').strip()[-500:]}", file=sys.stderr)
    return time.monotonic() - begun, used.peak_mib, used.status


def _environment() -> dict[str, str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**variables, "PYTHONPATH": str(REPOSITORY)}


if __name__ == "__main__":
    for met, sentence in verdicts(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS):
        print("MISSED:" if met is False else "met:" if met else " ", sentence)
