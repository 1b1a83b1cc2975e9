"""Measure whether `healthd fleet lemons` finds nodes that keep failing, on public failure data of real machines.

    PYTHONPATH=. python bench/fleet_truth/lanl.py --data LA-UR-05-7318-failure-data-1996-2005.csv.xz

The data are from Los Alamos National Laboratory (LA-UR-05-7318), a CSV, plain or .xz. Every 28 days of 2004 and 2005,
two rules each flag the same number of nodes of each system. The first rule flags nodes with two or more failures in the
last 28 days. The second rule flags the nodes with the highest score (healthd/fleet/statistics/lemon_score.py; its
constants were chosen on the years before 2004). The precision of a rule is the share of its flagged nodes that fail in
the next 28 days. The lift is the ratio of the two precisions, pooled over all windows. Its interval is a paired
bootstrap of whole nodes; a bootstrap of whole windows is printed too.

Front ends (node 0 of each cluster, and nodes with this purpose) are left out, because people log in there, and they
fail ten times as often as other nodes. `--write FILE` writes the rest in the format of `healthd fleet ingest
--failures`.
"""

from __future__ import annotations

import argparse
import calendar
import csv
import lzma
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from healthd.fleet.statistics.lemon_score import (
    DAY,
    WINDOW_DAYS,
    Observation,
    Record,
    discounted_counts,
    fit_prior,
    merge_incidents,
    score,
)

WINDOW = WINDOW_DAYS * DAY
TUNED_ON = (0, calendar.timegm((2004, 1, 1, 0, 0, 0)))
MEASURED_ON = (TUNED_ON[1], calendar.timegm((2006, 1, 1, 0, 0, 0)))
MIN_NODES = 100
RESAMPLED = 4000


@dataclass(frozen=True, slots=True)
class System:
    """One system. failures: times of failures by node, ascending.

    front_ends: the same for the nodes that are left out.
    """

    name: str
    nodes: int
    failures: dict[int, list[int]]
    front_ends: dict[int, list[int]]

    @property
    def first(self) -> int:
        return min(times[0] for times in (*self.failures.values(), *self.front_ends.values()))

    @property
    def last(self) -> int:
        return max(times[-1] for times in (*self.failures.values(), *self.front_ends.values()))


@dataclass(frozen=True, slots=True)
class Flagged:
    """One node in one window.

    `old`, `new`: 1 if the first or second rule flags it. `fails`: 1 if it then fails in 28 days.
    """

    system: str
    window: int
    node: int
    old: int
    new: int
    fails: int


def read(path: Path) -> tuple[dict[str, System], int]:
    """Return (systems by number, number of records without a time or a node)."""
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="latin-1", newline="") as file:
        rows = list(csv.DictReader(file))
    times: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    purposes: dict[tuple[str, int], str] = {}
    sizes: dict[str, int] = {}
    unread = 0
    for row in rows:
        try:
            system, node = str(int(row["System"])), int(row["nodenumz"])
            # the time as written, without a time zone, because only differences matter
            when = calendar.timegm(time.strptime(row["Prob Started"], "%m/%d/%Y %H:%M"))
            sizes[system] = int(row["nodes"])
        except ValueError:
            unread += 1
            continue
        times[system][node].append(when)
        purposes[system, node] = row["purpose"]
    found = {}
    for system, by_node in times.items():
        all_nodes = {node: sorted(by_node[node]) for node in sorted(by_node)}
        front = {n: all_nodes[n] for n in all_nodes if n == 0 or purposes[system, n].endswith("fe")}
        others = {n: all_nodes[n] for n in all_nodes if n not in front}
        found[system] = System(system, sizes[system], others, front)
    return found, unread


def windows(system: System, years: tuple[int, int]) -> Iterator[int]:
    """Yield the times of evaluation. There are 28 days of data before and after each."""
    at = max(years[0], system.first + WINDOW)
    while at + WINDOW <= min(years[1], system.last):
        yield at
        at += WINDOW


def flagged(system: System, years: tuple[int, int]) -> Iterator[Flagged]:
    """Yield the nodes that each rule flags. Nodes that never failed belong to the fleet too."""
    never = system.nodes - len(system.failures) - len(system.front_ends)
    whole = {n: merge_incidents(Observation(at, at, 1.0) for at in times) for n, times in system.failures.items()}
    for window in windows(system, years):
        counts = {
            n: discounted_counts(Record(incidents, [(system.first, window)]), (window - WINDOW, window))
            for n, incidents in whole.items()
        }
        no_failures = discounted_counts(Record((), [(system.first, window)]), (window - WINDOW, window))
        fleet = fit_prior([*counts.values(), *[no_failures] * never])
        old = {n for n, times in system.failures.items() if _between(times, window - WINDOW, window) >= 2}
        if fleet is None or not old:
            continue
        ranked = sorted(counts, key=lambda n: (-score(counts[n], fleet), n))
        new = set(ranked[: len(old)])
        for node in sorted(old | new):
            fails = int(_between(system.failures[node], window, window + WINDOW) > 0)
            yield Flagged(system.name, window, node, int(node in old), int(node in new), fails)


def _between(times: Sequence[int], begin: int, end: int) -> int:
    return sum(begin <= at < end for at in times)


def bounds(rows: Sequence[Flagged], by_window: bool) -> tuple[float, float]:
    """Return the 95 % interval of the lift by a paired bootstrap.

    Whole nodes (or whole windows) are drawn within each system, with the results of both rules (Efron and Tibshirani,
    An Introduction to the Bootstrap, 1993, 8.6).
    """
    clusters: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for row in rows:
        sums = clusters[row.system, row.window if by_window else row.node]
        for column, value in enumerate((row.old * row.fails, row.new * row.fails, row.old, row.new)):
            sums[column] += value
    draw = np.random.default_rng(2005)
    totals = np.zeros((RESAMPLED, 4))
    for system in sorted({name for name, _ in clusters}):
        values = np.array([clusters[key] for key in sorted(clusters) if key[0] == system], float)
        totals += draw.multinomial(len(values), np.full(len(values), 1 / len(values)), RESAMPLED) @ values
    lifts = (totals[:, 1] / totals[:, 3]) / (totals[:, 0] / totals[:, 2])
    low, high = np.quantile(lifts, (0.025, 0.975))
    return float(low), float(high)


def study(systems: dict[str, System], years: tuple[int, int]) -> list[Flagged]:
    large = [s for s in systems.values() if s.nodes >= MIN_NODES]
    return [row for s in sorted(large, key=lambda s: int(s.name)) for row in flagged(s, years)]


def precisions(rows: Sequence[Flagged]) -> tuple[int, float, float]:
    """Return (number of nodes that each rule flags, precision of the rule of two failures, precision of the score)."""
    flagged_count = sum(row.old for row in rows)
    return (
        flagged_count,
        sum(r.old * r.fails for r in rows) / flagged_count,
        sum(r.new * r.fails for r in rows) / flagged_count,
    )


def show(rows: Sequence[Flagged]) -> tuple[float, float]:
    """Print the table. Returns the lift and the smaller of its lower bounds."""
    for name in sorted({row.system for row in rows}, key=int):
        flagged_count, old, new = precisions([row for row in rows if row.system == name])
        print(f"  system {name:>2}  {flagged_count:4} flagged   >= 2 failures {old:.3f}   score {new:.3f}")
    flagged_count, old, new = precisions(rows)
    by_node, by_window = bounds(rows, False), bounds(rows, True)
    print(f"  pooled     {flagged_count:4} flagged   >= 2 failures {old:.3f}   score {new:.3f}   lift {new / old:.2f}")
    print(
        f"  95 % of the lift: {by_node[0]:.2f} to {by_node[1]:.2f} by nodes, "
        f"{by_window[0]:.2f} to {by_window[1]:.2f} by windows"
    )
    return new / old, min(by_node[0], by_window[0])


def main() -> int:
    parser = argparse.ArgumentParser(description="Find lemons among LANL's nodes.")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="LA-UR-05-7318, CSV or .csv.xz")
    parser.add_argument(
        "--tuning", action="store_true", help="use the years before 2004, on which the constants were chosen"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the failures for `fleet ingest --failures`")
    args = parser.parse_args()
    if not args.data.is_file():
        print(f"lanl: {args.data} does not exist, nothing is measured", file=sys.stderr)
        return 2
    systems, unread = read(args.data)
    print(f"{len(systems)} systems; {unread} records without a time or a node")
    for system in sorted(systems.values(), key=lambda s: int(s.name)):
        if system.nodes >= MIN_NODES:
            median = statistics.median([len(times) for times in system.failures.values()])
            front_end_text = ", ".join(f"node {n}: {len(times)} failures" for n, times in system.front_ends.items())
            about = f"{system.nodes:4} nodes, median {median:g}; front end {front_end_text or 'unknown'}"
            print(f"  system {system.name:>2}  {about}")
    if args.write:
        with args.write.open("w", encoding="ascii", newline="\n") as file:
            file.write("cluster,node,time,kind\n")
            for system in systems.values():
                for node, times in system.failures.items():
                    file.writelines(f"lanl{system.name},n{node:04d},{at},failure\n" for at in times)
    if args.tuning:
        print("before 2004 (the years on which the constants were chosen):")
        show(study(systems, TUNED_ON))
        return 0
    print("2004 and 2005 (independent of the constants):")
    _, lowest = show(study(systems, MEASURED_ON))
    print(f"lower bound of the lift above 1 (of the gain above 0): {'met' if lowest > 1 else 'MISSED'}")
    return 0 if lowest > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
