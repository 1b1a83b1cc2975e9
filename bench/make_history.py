"""Generate a history with known faults: `python bench/make_history.py --out DIR --jobs 20000 --months 1`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from history.generate import make
from history.size import FULL, UTILISATION, Size, nodes_for, refusal


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate the history of a GPU cluster, as Slurm and healthd log it.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument("--jobs", type=int, default=FULL[0], help="approximate number of Slurm's accounting records")
    parser.add_argument("--nodes", type=int, help="nodes with 8 GPUs each (default: enough for the jobs)")
    parser.add_argument("--months", type=int, default=FULL[2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--utilisation", type=float, default=UTILISATION, help="share of the GPU time used by jobs")
    parser.add_argument("--fault-rate", type=float, default=1.0, help="factor on the usual rate of faults")
    args = parser.parse_args()
    size = Size(
        args.jobs,
        args.nodes or nodes_for(args.jobs, args.months, args.utilisation),
        args.months,
        args.seed,
        utilisation=args.utilisation,
        fault_rate=args.fault_rate,
    )
    problem = f"{args.out} already exists" if args.out.exists() else refusal(size)
    if problem:
        print(f"make_history: {problem}", file=sys.stderr)
        return 2
    begun = time.monotonic()
    summary = make(size, args.out)
    print(f"{summary['records']} records, {sum(summary['events'].values())} events in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
