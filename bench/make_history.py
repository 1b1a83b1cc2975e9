"""A history with a known truth, into a folder: `python bench/make_history.py --out DIR --jobs 20000 --months 1`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from history.making import make
from history.size import FULL, UTILISATION, Size, nodes_for, refusal


def main() -> int:
    parser = argparse.ArgumentParser(description="A history of a GPU cluster, as Slurm and healthd would tell it.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder that is not there yet")
    parser.add_argument("--jobs", type=int, default=FULL[0], help="records that Slurm accounts, about")
    parser.add_argument("--nodes", type=int, help="of 8 GPUs; as many as keep them busy")
    parser.add_argument("--months", type=int, default=FULL[2])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--utilisation", type=float, default=UTILISATION, help="share of the GPU time that jobs have")
    parser.add_argument("--fault-rate", type=float, default=1.0, help="times the usual rate of faults")
    asked = parser.parse_args()
    size = Size(
        asked.jobs,
        asked.nodes or nodes_for(asked.jobs, asked.months, asked.utilisation),
        asked.months,
        asked.seed,
        utilisation=asked.utilisation,
        fault_rate=asked.fault_rate,
    )
    why = f"{asked.out} is there already" if asked.out.exists() else refusal(size)
    if why:
        print(f"make_history: {why}", file=sys.stderr)
        return 2
    begun = time.monotonic()
    summary = make(size, asked.out)
    print(f"{summary['records']} records, {sum(summary['events'].values())} events in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
