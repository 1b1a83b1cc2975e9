"""Measure how many lemons `healthd fleet lemons` finds in a store of months: default window and --days 180.

    PYTHONPATH=.:bench python bench/fleet_truth/lemons_history.py           # seeds 71 to 78, to report
    PYTHONPATH=.:bench python bench/fleet_truth/lemons_history.py --tuning  # seeds 61 and 62, to choose thresholds

Each history has 8 months and 200 nodes. 1.2 % of the nodes are lemons: they fail 5 to 20 times as often as the others.
Some become lemons only later, and some stop being lemons before the end. There are three kinds of histories: busy (83 %
of the GPU time is used), idle (21 %), and few faults (busy, with a fifth of the usual rate of faults). Each answer is
requested three times: at the end, and 28 and 56 days before the end, so the store always has more than 180 days.

A node counts as a lemon if it is a lemon for at least half of the last 28 days. If one of two kinds of nodes is named,
this is neither right nor wrong. The first kind was a lemon in another part of the window and no longer is (`mended`).
The second kind is the three nodes of a leaf switch whose links fail 70 times as often as usual for 12 days in the
window.

`expected` is the share of lemons that the answer itself expects to name (`share_named` of the document).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from history.causes import SPIKE
from history.size import NODES_PER_POD, Size, node_name
from lemons import rows, stored

from healthd.fleet.answers.lemons import lemons
from healthd.fleet.answers.study import open_study, table_files
from healthd.fleet.statistics.lemon_score import DAY, WINDOW_DAYS
from healthd.fleet.store import open_for_reading

MEASURED, TUNED = range(71, 79), range(61, 63)
NODES, MONTHS, FACTORS = 200, 8, (5, 20)
WINDOW = WINDOW_DAYS * DAY
WINDOWS = (WINDOW_DAYS, 180)  # days
# name: number of jobs (50 GPU-hours each), share of the GPU time in use, factor for the usual rate of faults
KINDS = {"busy": (150_000, 0.83, 1.0), "idle": (38_000, 0.21, 1.0), "few faults": (150_000, 0.83, 0.2)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Nodes at one end of one history.

    lemons                according to the truth
    named, right          named by healthd, and how many of these are lemons
    certain, right_certain  the same for the nodes that --apply drains
    mended                named nodes that were lemons and no longer are; they are not included in `named`
    expected              share of the lemons that the answer expects to name
    """

    lemons: int
    named: int
    right: int
    certain: int
    right_certain: int
    mended: int
    expected: float


def truth_at(truth: Path, size: Size, end: int, days: float) -> dict[str, str]:
    """Return the state of each node at `end`: "lemon", "mended" (a lemon in the days before), "spike" (of links) or
    "good"."""
    begin = end - round(days * DAY)
    found: dict[str, str] = {}
    for row in rows(truth, "nodes"):
        found[row["node"]] = "good"
        if row["lemon_from"]:
            since, until = int(row["lemon_from"]), int(row["lemon_until"])
            if min(until, end) - max(since, end - WINDOW) >= WINDOW / 2:
                found[row["node"]] = "lemon"
            elif min(until, end) > max(since, begin):
                found[row["node"]] = "mended"
    first, last = (size.at(share) for share in SPIKE[:2])
    if first < end and last > begin:
        found.update((node, "spike") for node in spike_nodes(truth, first, last) if found[node] == "good")
    return found


def spike_nodes(truth: Path, first: int, last: int) -> list[str]:
    """Return the nodes of the link spike.

    The truth does not name them, but at that time they have by far the most faults.
    """
    *_, cause, _, nodes_of_leaf = SPIKE
    faults = Counter(
        row["node"] for row in rows(truth, "faults") if row["cause"] == cause and first <= int(row["time"]) < last
    )
    leaves = [
        [node_name(node) for node in range(leaf, min(leaf + nodes_of_leaf, NODES))]
        for leaf in range(0, NODES, NODES_PER_POD)
    ]
    return max(leaves, key=lambda nodes: sum(faults[node] for node in nodes))


def counts(db: Path, truth: Path, size: Size, end: int, days: int) -> Counts:
    with open_for_reading(str(db)) as snapshot, open_study(table_files(snapshot), 0, end) as study:
        document = lemons(study, window_days=days)
    states = truth_at(truth, size, end, days)
    named = [node for node in document["nodes"] if states[node["node"]] in ("lemon", "good")]
    certain = [node for node in named if node["certain"]]
    right, right_certain = (sum(states[node["node"]] == "lemon" for node in nodes) for nodes in (named, certain))
    mended = sum(states[node["node"]] == "mended" for node in document["nodes"])
    expected = document["fleets"][0]["share_named"]
    total = sum(state == "lemon" for state in states.values())
    return Counts(total, len(named), right, len(certain), right_certain, mended, expected)


def measured(folder: Path, kind: str, seeds: range) -> Iterator[tuple[int, Counts]]:
    """Yield (days of the window, counts) of each history and end."""
    jobs, utilisation, fault_rate = KINDS[kind]
    for seed in seeds:
        size = Size(jobs, NODES, MONTHS, seed, FACTORS, utilisation, fault_rate)
        db, truth = stored(folder / f"{kind.replace(' ', '-')}-s{seed}", size)
        for before in range(3):
            for days in WINDOWS:
                yield days, counts(db, truth, size, size.end - before * WINDOW, days)


def share(part: float, whole: float) -> str:
    return f"{part / whole:.2f}" if whole else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description="Find lemons of generated histories of several months.")
    parser.add_argument("--folder", type=Path, default=Path("build/histories/lemons"), help="folder of histories")
    parser.add_argument("--tuning", action="store_true", help="use the seeds on which thresholds were chosen")
    args = parser.parse_args()
    print("history     window    lemons  expected  named: all  right  precision  recall  mended  --apply: all  right")
    for kind in KINDS:
        found = list(measured(args.folder, kind, TUNED if args.tuning else MEASURED))
        for window in WINDOWS:
            window_counts = [count for days, count in found if days == window]
            total, named, right, certain, right_certain, mended = (
                sum(getattr(count, key) for count in window_counts)
                for key in ("lemons", "named", "right", "certain", "right_certain", "mended")
            )
            expected = sum(count.expected * count.lemons for count in window_counts)
            print(
                f"{kind:<10}  {window:>3} days  {total:>6}  {share(expected, total):>8}  {named:>10}  {right:>5}  "
                f"{share(right, named):>9}  {share(right, total):>6}  {mended:>6}  {certain:>12}  {right_certain:>5}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
