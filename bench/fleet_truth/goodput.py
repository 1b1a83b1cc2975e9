"""Compare `healthd fleet goodput` and `availability` with the truth of a generated history.

It compares the losses of first and second order, and the time that nodes were out of service. `PYTHONPATH=. python
bench/fleet_truth/goodput.py --db DB --truth DIR`: DIR is truth/ of the history in the store (bench/make_history.py).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from healthd.fleet.answers.availability import availability
from healthd.fleet.answers.goodput import goodput
from healthd.fleet.answers.study import Study, open_study, table_files
from healthd.fleet.statistics.spans import Span, merge, subtract, total_seconds
from healthd.fleet.store import open_for_reading

WITHIN = 0.05  # relative to the truth
NO_HARDWARE = ("user", "limit")  # truth/failures.csv, cause
DOWN = ("node_fail", "crash_loop")  # truth/outages.csv, why
HALF_AN_HOUR = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare losses and availability with the truth.")
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    args = parser.parse_args()
    summary = json.loads((args.truth / "summary.json").read_text())
    whole = summary["from_time"], summary["to_time"]
    with study_of_store(args.db, whole) as study:
        verdicts = [*losses(study, args.truth), *outages(study, args.truth, whole)]
    for _, sentence in verdicts:
        print(sentence)
    return 0 if all(met for met, _ in verdicts) else 1


@contextmanager
def study_of_store(db: Path, whole: Span) -> Iterator[Study]:
    with open_for_reading(str(db)) as snapshot, open_study(table_files(snapshot), *whole) as study:
        yield study


def losses(study: Study, truth: Path) -> list[tuple[bool, str]]:
    """Compare the lost GPU-hours and the number of jobs."""
    document = goodput(study)
    runtime = f"least(greatest(end_time - start_time, 0), {HALF_AN_HOUR})"
    ended = study.database.rows(
        f"SELECT db_index, coalesce(gpus, 0) * {runtime} AS gpu_seconds FROM jobs "
        "WHERE end_time IS NOT NULL AND state IN ('FAILED', 'NODE_FAIL', 'REQUEUED', 'PREEMPTED')"
    )
    ran = dict(ended.rows)
    hit = [int(row["db_index"]) for row in rows(truth, "failures") if row["cause"] not in NO_HARDWARE]
    preempted = [int(row["victim_db_index"]) for row in rows(truth, "preemptions") if row["second_order"] == "1"]
    return [
        compared(
            f"{name} order: {answer['jobs']:,} jobs, {len(keys):,} in truth; GPU-hours",
            answer["gpu_hours"],
            sum(ran.get(key, 0) for key in keys) / 3600,
        )
        for name, answer, keys in (
            ("first", document["first_order"], hit),
            ("second", document["second_order"], preempted),
        )
    ]


def outages(study: Study, truth: Path, whole: Span) -> list[tuple[bool, str]]:
    """Compare how long nodes were drained and down, in node-hours without planned maintenance."""
    document = availability(study)
    planned: dict[str, list[Span]] = defaultdict(list)
    for node, start, end in study.database.rows("SELECT node, start_time, end_time FROM reservations").rows:
        planned[node].append((start, end))
    out = {"drained": 0, "down": 0}
    for row in rows(truth, "outages"):
        span = int(row["from_time"]), min(int(row["until_time"] or whole[1]), whole[1])
        out["down" if row["why"] in DOWN else "drained"] += total_seconds(
            subtract(merge([span]), merge(planned[row["node"]]))
        )
    shares, counted = document["fleet"]["shares"], document["fleet"]["counted_seconds"]
    drained = sum(share for kind, share in shares.items() if kind.startswith("drained"))
    return [
        compared(f"nodes {kind}: node-hours", share_of_time * counted / 3600, out[kind] / 3600)
        for kind, share_of_time in (("drained", drained), ("down", shares["down"]))
    ]


def compared(title: str, answer: float, true: float) -> tuple[bool, str]:
    deviation = abs(answer - true) / true if true else float(answer != 0)
    met = deviation <= WITHIN
    verdict = f"off by {deviation:.1%}, aim {WITHIN:.0%}: {'met' if met else 'MISSED'}"
    return met, f"{title} {answer:,.0f}, truth {true:,.0f}: {verdict}"


def rows(truth: Path, name: str) -> Iterator[dict[str, str]]:
    with (truth / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


if __name__ == "__main__":
    sys.exit(main())
