"""Measure how often `healthd fleet compare` reports a difference between two equal sides.

    PYTHONPATH=. python bench/fleet_truth/compare.py [--histories 500] [--seed 1]

Each history has two sides with seven measures of 100 nodes. The counts of a node are negative binomial with a mean of
0.5 and a variance of 1, 3 or 7 times the mean; LANL's nodes have 3 to 7. Target: a difference is reported in at most 5
% of the histories. For comparison, the share without the adjustment for many measures (each with an interval of 95 %)
is printed too.
"""

from __future__ import annotations

import argparse

import numpy as np

from healthd.fleet.answers.compare import LEVEL, Measure, Side, Units, compare_sides

AIM = 0.05
MEASURES, NODES, DAYS, MEAN = 7, 100, 30.0, 0.5
DAY = 86400


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure false differences of healthd fleet compare.")
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    missed = False
    for dispersion in (1, 3, 7):
        adjusted = plain = 0
        for number in range(args.histories):
            rows = compare_sides(*sides(np.random.default_rng([args.seed, dispersion, number]), dispersion))["measures"]
            adjusted += any(row["differs"] for row in rows)
            plain += any(row["p_value"] < LEVEL for row in rows if row["adjusted"] is not None)
        failed = adjusted > AIM * args.histories
        missed |= failed
        print(
            f"variance {dispersion} times the mean: {adjusted / args.histories:.1%} of {args.histories} histories, "
            f"without the adjustment {plain / args.histories:.1%}{'  MISSED' if failed else ''}"
        )
    return int(missed)


def sides(random: np.random.Generator, dispersion: int) -> tuple[Side, Side]:
    first, second = (
        Side(name, 0, int(DAYS * DAY), {}, tuple(measure(random, dispersion, n) for n in range(MEASURES)), (), {})
        for name in "AB"
    )
    return first, second


def measure(random: np.random.Generator, dispersion: int, number: int) -> Measure:
    if dispersion == 1:
        counts = random.poisson(MEAN, NODES).tolist()
    else:
        counts = random.negative_binomial(MEAN / (dispersion - 1), 1 / dispersion, NODES).tolist()
    days = [DAYS] * NODES
    name = f"m{number}"
    return Measure(name, name, "per 1000 node-days", 1000.0, sum(counts), sum(days), (Units(counts, days),))


if __name__ == "__main__":
    raise SystemExit(main())
