"""`make bench`: the cost of healthd on this machine, as a table. `--json FILE` also writes the figures.

Only the hardware is simulated. `healthd run` (as a user starts it), its worker and slurmctld are real. CPU time is the
time that the kernel's scheduler counts (the clock of the process, in nanoseconds). Memory is PSS (smaps_rollup). A
wake-up is a time slice of a thread (schedstat). The measurements are in the other files of this folder, one file for
each subject.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "bench"), str(REPOSITORY / "tests" / "e2e")]

import drains  # noqa: E402
import ledger_save  # noqa: E402
import peers  # noqa: E402
import prologs  # noqa: E402
import rounds  # noqa: E402
import scans  # noqa: E402
import scrape  # noqa: E402
import sizes  # noqa: E402
import start  # noqa: E402
import storms  # noqa: E402
import trays  # noqa: E402
from figure import Figure, machine, table  # noqa: E402
from healthd_daemon import Healthd  # noqa: E402

PARTS: dict[str, Callable[[], list[Figure]]] = {
    "rounds": rounds.rounds,
    "sizes": sizes.sizes,
    "trays": trays.trays,
    "memory": rounds.memory,
    "scrape": scrape.rows,
    "growth": rounds.growth,
    "drains-file": drains.drains_from_file,
    "drains-kmsg": drains.drains_from_kmsg,
    "drains-load": drains.drains_under_load,
    "drains-storm": drains.drains_in_storm,
    "storm": storms.storms,
    "ledger": ledger_save.rows,
    "prolog": prologs.prologs,
    "starts": start.rows,
    "idle": rounds.idle,
    "scan": scans.scans,
    "peers": peers.peers,
}


def main() -> int:
    """Run the benchmarks. Returns 1 if a target is missed, 2 if something could not be measured."""
    parser = argparse.ArgumentParser(description="Measure the cost of healthd on this machine.")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", metavar="PART", choices=sorted(PARTS), help=f"one of {', '.join(PARTS)}")
    parser.add_argument(
        "--rounds",
        metavar="N",
        type=int,
        default=rounds.LAST_ROUND,
        help="number of the last round in the measurement of growth",
    )
    args = parser.parse_args()
    PARTS["growth"] = functools.partial(rounds.growth, args.rounds)
    figures: list[Figure] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="healthd-bench.") as compiled:
        # Use compiled modules, as in an installation. Without them, each start would compile everything again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ |= {"PYTHONPYCACHEPREFIX": compiled, "PYTHONPATH": str(REPOSITORY)}
        compile_all()
        for name, part in PARTS.items():
            if args.only in (None, name):
                print(f"bench: {name} ...", file=sys.stderr, flush=True)
                try:
                    figures += part()
                except Exception:  # if one subject fails, measure the others nevertheless
                    traceback.print_exc()
                    failed.append(name)
    print(machine())
    print(table(figures))
    if failed:
        print(f"bench: not measured, see above: {', '.join(failed)}", file=sys.stderr)
    if args.json:
        rows = [{**asdict(figure), "median": figure.median, "met": figure.met} for figure in figures if figure.values]
        Path(args.json).write_text(json.dumps({"machine": machine(), "figures": rows}, indent=2) + "\n")
    return 2 if failed else 0 if all(figure.met for figure in figures) else 1


def compile_all() -> None:
    argv = [sys.executable, "-m", "healthd", "check", "--fake-nvml", "dgx-h100"]
    subprocess.run(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    with Healthd("--listen", "127.0.0.1:0") as daemon:
        scrape.scrape(daemon, scrape.PLAIN)


if __name__ == "__main__":
    sys.exit(main())
