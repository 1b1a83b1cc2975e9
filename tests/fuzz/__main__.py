"""`python -m tests.fuzz [--seconds N] [--seed N] [--keep FOLDER] [TARGET...]`: hostile inputs for every boundary.

Each target runs in its own process, as many at a time as there are cores. An input that fails is saved to a file;
`python -m tests.fuzz --again FILE TARGET` tries it again. Exit status 1 if an input failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.run import Outcome, error_of, fuzz
from tests.fuzz.targets import TARGETS, make_target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("targets", metavar="TARGET", nargs="*", help=f"of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all together (default: 240)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="the same makes the same inputs")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where inputs that fail are kept")
    parser.add_argument("--again", metavar="FILE", type=Path, help="try this one input on one target")
    args = parser.parse_args()
    if unknown := [name for name in args.targets if name not in TARGETS]:
        parser.error(f"there is no target {unknown[0]}; there are: {', '.join(TARGETS)}")
    names = args.targets or list(TARGETS)
    if args.again:
        return retry(names[0], args.again)
    logging.disable()
    cores = len(os.sched_getaffinity(0))
    seconds = args.seconds * cores / len(names)
    print(f"seed {args.seed}, {seconds:.0f} s a target, {cores} at a time")
    with ProcessPoolExecutor(cores, get_context("fork")) as processes:
        running = {name: processes.submit(fuzz_target, name, args.seed, seconds) for name in names}
        outcomes = {name: future.result() for name, future in running.items()}
    keep = args.keep or Path(tempfile.mkdtemp(prefix="healthd-fuzz."))
    for name, outcome in outcomes.items():
        print(
            f"{name:15} {outcome.inputs:9,} inputs, {len(outcome.failures)} failed, "
            f"slowest {outcome.slowest_seconds:.2f} s"
        )
        for index, (data, problem) in enumerate(outcome.failures):
            file = keep / f"{name}.{index}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            print(f"  {file}: {problem.strip().splitlines()[-1]:.200}")
    failed = sum(len(outcome.failures) for outcome in outcomes.values())
    print(f"{sum(outcome.inputs for outcome in outcomes.values()):,} inputs, {failed} failed")
    return 1 if failed else 0


def fuzz_target(name: str, seed: int, seconds: float) -> Outcome:
    seeds, take = make_target(name)
    return fuzz(seeds, take, seed, seconds=seconds)


def retry(name: str, file: Path) -> int:
    _, take = make_target(name)
    problem = error_of(take, file.read_bytes(), Outcome())
    print(problem or "it is taken")
    return 1 if problem else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        traceback.clear_frames(sys.exc_info()[2])
        sys.exit(130)
