"""Check `healthd fleet rate`: r_f on a generated history, and the coverage and width of its interval on drawn
histories.

`PYTHONPATH=. python bench/fleet_truth/rate.py --db DB --truth DIR`: DIR is truth/ of the history in the store
(bench/make_history.py). The interval must contain the rate at which faults ended large jobs. Crash loops are printed in
a separate column: a loop begins with a fault, and then the job itself takes down its nodes. Slurm records NODE_FAIL in
both cases, so r_f counts the loops too, and they make the interval wide.

`--histories 1000 --seed 100` needs no store. It draws the failures of nodes in three groups of histories. In the first
group, failures are independent. In the second group, they come in clumps with variance / mean from 3 to 7 (a Gamma
mixture of rates for lemons; incidents of several failures for loops). The third group has the same clumps but only six
failures, to show how much the coverage drops. The exact Poisson interval of the same counts is printed too. Seeds below
100 were used for tuning. Exit status 1: a target was missed.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from healthd.fleet.answers.hardware_ends import END_KINDS
from healthd.fleet.answers.rate import MORE_THAN_GPUS, RATE_NODE_DAYS, rate
from healthd.fleet.answers.study import open_study, table_files
from healthd.fleet.statistics.intervals import Spread, poisson_interval, rate_estimate
from healthd.fleet.store import open_for_reading

# no target for "few", because no guarantee is possible (docs/fleet-answers.md)
AIMS = {"independent": 0.94, "dispersed": 0.90, "few": None}
NODES = (60, 367, 1000)
MEAN_COUNTS = (0.2, 0.5, 2.0)  # failures per node; this is 12 to 2,000 failures in total
# expected failures in a dispersed history: several clumps of 7 are needed to be recognisable
MIN_EXPECTED_FAILURES = 30
EXPECTED_FEW_FAILURES = 6  # expected failures in a history of the group "few", in the same clumps
DISPERSIONS = (3.0, 5.0, 7.0)


def draw_history(random: np.random.Generator, nodes: int, mean: float, dispersion: float, kind: str) -> Spread:
    """Draw a history: the counts and exposures of its nodes. `mean` is its rate per unit of exposure."""
    exposures = random.gamma(4.0, 0.25, nodes)
    expected = mean * exposures
    if kind == "lemons":
        shape = mean / (dispersion - 1)
        counts = random.poisson(expected * random.gamma(shape, 1 / shape, nodes))
    elif kind == "loops":  # sizes are geometric, so that E[s^2] / E[s] = (2 - p) / p
        p = 2 / (dispersion + 1)
        incidents = random.poisson(expected * p)
        counts = np.array([random.geometric(p, value).sum() if value else 0 for value in incidents])
    else:
        counts = random.poisson(expected)
    return Spread([int(value) for value in counts], [float(value) for value in exposures])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", type=Path, help="store of a generated history")
    parser.add_argument("--truth", type=Path, help="truth/ of the history")
    parser.add_argument(
        "--histories", type=int, default=1000, help="number of histories to draw for each group (1000; 0: none)"
    )
    parser.add_argument("--seed", type=int, default=100, help="seed; those below 100 were used for tuning (100)")
    args = parser.parse_args()
    if (args.db is None) != (args.truth is None):
        parser.error("--db and --truth need each other")
    met = args.db is None or compare_with_truth(args.db, args.truth)
    if args.histories:
        met &= measure_coverage(args.histories, args.seed)
    return int(not met)


def compare_with_truth(db: Path, truth: Path) -> bool:
    """Return True if the interval of the store's r_f contains the rate at which faults ended large jobs."""
    summary = json.loads((truth / "summary.json").read_text())
    with (
        open_for_reading(str(db)) as snapshot,
        open_study(table_files(snapshot), summary["from_time"], summary["to_time"]) as study,
    ):
        document = rate(study)
    hit, looped = Counter[str](), Counter[str]()
    with (truth / "failures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if int(row["gpus"] or 0) > MORE_THAN_GPUS:
                hit[row["state"].lower()] += bool(row["fault"])
                looped[row["state"].lower()] += row["cause"] == "crash_loop"
    days = summary["large_jobs_node_days"]
    true, with_loops = (RATE_NODE_DAYS * jobs / days for jobs in (hit.total(), hit.total() + looped.total()))
    low, high = document["interval"]
    met = bool(low <= true <= high)
    print("large jobs  answer  truth  in crash loops")
    for end_kind in END_KINDS:
        print(f"{end_kind:11} {document['by_end'][end_kind]:6,}  {hit[end_kind]:5,}  {looped[end_kind]:14,}")
    print(
        f"node-days {document['node_days']:,.0f}, truth {days:,.0f}; "
        f"r_f {document['r_f']:.2f} ({low:.2f} to {high:.2f}), "
        f"truth {true:.2f}, with the crash loops {with_loops:.2f}: {'met' if met else 'MISSED'}\n"
    )
    return met


def measure_coverage(histories: int, seed: int) -> bool:
    """Draw histories and print the coverage. Returns True if both targets are met."""
    missed = False
    print("failures    histories  holds  aim     width  median  exact holds  exact width  bootstrapped")
    for group, aim in AIMS.items():
        random = np.random.default_rng(seed)
        rows = []
        for number in range(histories):
            kind = "even" if group == "independent" else ("lemons", "loops")[number % 2]
            while True:
                nodes, mean = int(random.choice(NODES)), float(random.choice(MEAN_COUNTS))
                if group == "few":
                    mean = EXPECTED_FEW_FAILURES / nodes
                if group != "dispersed" or nodes * mean >= MIN_EXPECTED_FAILURES:
                    break
            spread = draw_history(random, nodes, mean, float(random.choice(DISPERSIONS)), kind)
            estimate = rate_estimate(spread)
            ends, exact = estimate.interval, poisson_interval(spread.count, spread.exposure)
            assert ends is not None
            assert exact is not None
            rows.append(
                (
                    ends[0] <= mean <= ends[1],
                    (ends[1] - ends[0]) / mean,
                    exact[0] <= mean <= exact[1],
                    (exact[1] - exact[0]) / mean,
                    estimate.method == "bootstrap",
                )
            )
        coverage, width, exact_coverage, exact_width, bootstrapped = np.asarray(rows, dtype=float).mean(axis=0)
        median = float(np.median([row[1] for row in rows]))
        met = aim is None or coverage >= aim
        missed |= not met
        verdict = "   -       " if aim is None else f"{aim:.2f} {'met' if met else 'MISSED':6}"
        print(
            f"{group:11} {histories:9,}  {coverage:5.3f}  {verdict} {width:5.2f}  "
            f"{median:6.2f}  {exact_coverage:11.3f}  {exact_width:11.2f}  {bootstrapped:12.3f}"
        )
    print(
        "width: width of the interval / true rate, mean and median; exact: the exact Poisson interval of the same "
        "counts"
    )
    return not missed


if __name__ == "__main__":
    sys.exit(main())
