"""`make soak`: SECONDS=3600 sets the duration, SEED=N the events. Exit status 1: a check failed."""

from __future__ import annotations

import argparse
import random
import signal
import sys
import traceback

from soak.run import SoakError, start_soak


def main() -> int:
    parser = argparse.ArgumentParser(description="Run healthd under random faults for an hour.")
    parser.add_argument("--seconds", type=float, default=3600.0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="0: a random seed")
    parser.add_argument("--verbose", action="store_true", help="print each step")
    args = parser.parse_args()
    # so that all started processes end, even if this is a background job
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    seed = args.seed or random.SystemRandom().randrange(1, 10**6)
    print(f"soak: seed {seed}, {args.seconds:.0f} s", file=sys.stderr, flush=True)
    with start_soak(seed) as soak:
        try:
            soak.run(args.seconds, verbosity=2 if args.verbose else 1)
        except SoakError as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            print(f"soak: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"soak: interrupted at step {soak.steps} ({soak.happening})\n{soak.report()}", file=sys.stderr)
            return 130
        print(soak.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
