"""`make bench-repair`: the safety and the speed of repair mode "act", with a real Slurm and fake hardware.

    .venv/bin/python bench/repair_trials.py [--only times races kills limit] [--seed 1]

times  from the line in the kernel log to the node in service
races  operators, jobs and a killed slurmctld at each boundary of a repair
kills  kill -9 and power losses: of the program that takes the steps, with fake commands, and with a real Slurm
limit  nodes that fail at the same moment, and max_concurrent

Only the hardware is fake. Each trial has its own random numbers, which the seed determines; the timing differs in each
run. A violation prints its trial and the end of the daemon's log. Exit status 1: a rule was violated.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in (".", "bench", "tests/e2e", "tests/support")]

from repairs.executor_kills import run_kills  # noqa: E402
from repairs.limit import measure_limit  # noqa: E402
from repairs.races import run_races  # noqa: E402
from repairs.reboot_races import run_reboot_races  # noqa: E402
from repairs.result import Result  # noqa: E402
from repairs.slurm_kills import run_slurm_kills  # noqa: E402
from repairs.times import measure_times  # noqa: E402

Measure = Callable[[], Result]


def measurements(args: argparse.Namespace, seed: int) -> Mapping[str, tuple[Measure, ...]]:
    return {
        "times": (lambda: measure_times(args.resets, args.reboots, seed),),
        "races": (lambda: run_races(args.races, seed), lambda: run_reboot_races(args.reboot_races, seed)),
        "kills": (lambda: run_kills(args.kills, seed), lambda: run_slurm_kills(args.slurm_kills, seed)),
        "limit": (lambda: measure_limit(args.nodes, args.max_concurrent, seed),),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description='Measure the safety and the speed of repair mode "act".')
    parser.add_argument("--only", nargs="+", choices=("times", "races", "kills", "limit"), metavar="PART")
    parser.add_argument("--seed", type=int, default=0, help="0: a random seed")
    parser.add_argument("--resets", type=int, default=24)
    parser.add_argument("--reboots", type=int, default=12)
    parser.add_argument("--races", type=int, default=200)
    parser.add_argument("--reboot-races", type=int, default=50)
    parser.add_argument("--kills", type=int, default=850, help="kills with fake commands")
    parser.add_argument("--slurm-kills", type=int, default=150, help="kills with a real Slurm")
    parser.add_argument("--nodes", type=int, default=20, help="nodes that fail at the same moment")
    parser.add_argument("--max-concurrent", type=int, default=2)
    args = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # end what was started, also in a background job
        signal.signal(number, signal.default_int_handler)
    seed = args.seed or random.SystemRandom().randrange(1, 10**6)
    print(f"seed {seed}, {os.cpu_count()} cores", flush=True)
    violations = 0
    for name, measures in measurements(args, seed).items():
        for measure in measures if not args.only or name in args.only else ():
            began = time.monotonic()
            result = measure()
            print("\n".join(["", *result.rows(), f"  {time.monotonic() - began:.0f} s"]), flush=True)
            violations += len(result.violations)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
