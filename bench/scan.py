"""Measure how fast `healthd scan` reads three kinds of logs, with and without google-re2, optionally for two trees.

    .venv/bin/python bench/scan.py [--seed N] [--runs N] [--tree DIRECTORY] [--size-mb N]

Times are user and system time of the whole program, including its start. Wall-clock time is not used, because other
programs may load the machine. The program is pinned to one core; otherwise, it would read a large log on all cores.
Runs of the variants alternate, so that a slow moment affects all of them. A row has the median, the minimum and the
maximum.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import big_log

ROOT = Path(__file__).parents[1]
STORM_LINE_BYTES = 155
ONE_CORE = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
# A program without re2, even if re2 is installed.
WITHOUT_RE2 = "import sys; sys.modules['re2'] = None; from healthd.cli.main import main; sys.exit(main())"
WITH_RE2 = "import sys; from healthd.cli.main import main; sys.exit(main())"
TARGETS = {"storm": 150.0, "mostly benign": 140.0, "mostly benign, re2": 250.0, "all different faults": 4.0}


class Row(NamedTuple):
    """MB of log that were read per CPU second, one figure for each run."""

    name: str
    mb_per_second: list[float]
    target: float | None


def rows(seed: int = 1, runs: int = 5, size: int = 150_000_000, tree: Path | None = None) -> Iterator[Row]:
    """Measure logs of `size` bytes.

    The log that has only faults has a tenth. `tree`: another healthd, for comparison.
    """
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as folder:
        log = Path(folder) / "syslog"
        for kind in ("storm", "mostly benign", "all different faults"):
            _write(kind, log, size, seed)
            variants = {kind: (ROOT, WITHOUT_RE2)}
            if find_spec("re2") is not None:
                variants[f"{kind}, re2"] = (ROOT, WITH_RE2)
            if tree is not None:
                variants |= {f"{name}, {tree}": (tree, program) for name, (_, program) in variants.items()}
            speeds: dict[str, list[float]] = {name: [] for name in variants}
            for turn in range(runs + 1):
                for name, (source_tree, program) in variants.items():
                    speed = log.stat().st_size / 1e6 / _cpu_seconds(source_tree, program, log)
                    if turn:  # the first run compiles bytecode and fills the page cache
                        speeds[name].append(speed)
            for name, measured in speeds.items():
                yield Row(name, measured, TARGETS.get(name))


def _write(kind: str, log: Path, size: int, seed: int) -> None:
    if kind == "storm":
        big_log.write_storm(log, size // STORM_LINE_BYTES)
    elif kind == "mostly benign":
        big_log.write(log, size, 500, seed)
    else:
        big_log.write(log, size // 10, 1, seed)


def _cpu_seconds(tree: Path, program: str, log: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    argv = [sys.executable, "-c", ONE_CORE + program, "scan", str(log)]
    process = subprocess.Popen(argv, cwd=log.parent, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 2):
        raise SystemExit(f"healthd scan ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=150)
    parser.add_argument("--tree", type=Path)
    args = parser.parse_args()
    print(f"{'':44}{'median':>8}{'min':>8}{'max':>8}  target, MB/s of CPU")
    for name, speeds, target in rows(args.seed, args.runs, args.size_mb * 1_000_000, args.tree):
        aim = "" if target is None else f"{target:g}"
        print(f"{name:44}{statistics.median(speeds):8.1f}{min(speeds):8.1f}{max(speeds):8.1f}  {aim}", flush=True)


if __name__ == "__main__":
    main()
