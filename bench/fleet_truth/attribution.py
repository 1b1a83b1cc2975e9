"""Compare the attribution of causes and nodes with the truth of a generated history.

    PYTHONPATH=.:bench python bench/fleet_truth/attribution.py --db DB --truth DIR

Precision is the share of right causes among the jobs with a cause. A cause is right if cause and node match the truth.
The cause "program" is right if no fault ended the job. Precision is printed for all causes, and for all causes except
"program". The second number is harder to reach, and the target applies to it. Recall is the share with the right cause
and node among the failures whose fault a check detected.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from healthd.fleet import engine
from healthd.fleet.answers.attribution import attribution
from healthd.fleet.answers.causes import CAUSE_ORDER, CAUSES, USER_CAUSE, meaning
from healthd.fleet.answers.study import Study, open_study, table_files
from healthd.fleet.store import open_for_reading

PRECISION, RECALL = 0.97, 0.95
# The naive rule: all conditions that were open in the window, even if they began before it.
_OPEN_CONDITIONS = """
SELECT jobs.db_index, job_nodes.node, conditions.code, conditions.severity
FROM jobs JOIN job_nodes USING (cluster, db_index) CROSS JOIN parameters
JOIN conditions ON conditions.cluster = jobs.cluster AND conditions.node = job_nodes.node
  AND conditions.first_time <= jobs.end_time + 300
  AND greatest(conditions.last_time, coalesce(conditions.cleared_time, conditions.last_time)) >= jobs.end_time - 600
WHERE jobs.state IN ('FAILED', 'NODE_FAIL') AND jobs.end_time >= parameters.from_time
  AND jobs.end_time < parameters.to_time
"""


class Failure(NamedTuple):
    """One failure. is_detected: True if a check detected the fault then and there, None if no fault ended the job."""

    state: str
    cause: str
    node: str
    is_detected: bool | None


class Named(NamedTuple):
    db_index: int
    cause: str
    node: str
    confidence: str


def read_truth(folder: Path) -> dict[int, Failure]:
    """Return the truth by db_index, for the jobs that ended FAILED or NODE_FAIL."""
    detected = {row["fault"]: row["seen"] == "1" for row in _rows(folder / "faults.csv")}
    return {
        int(row["db_index"]): Failure(row["state"], row["cause"], row["node"], detected.get(row["fault"]))
        for row in _rows(folder / "failures.csv")
        if row["state"] in ("FAILED", "NODE_FAIL")
    }


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def is_right(named: Named, truth: dict[int, Failure]) -> bool:
    """Return True if the answer matches. A program's own fault has no node in the truth, so any node is right."""
    failure = truth.get(named.db_index)
    return (
        failure is not None
        and failure.cause == named.cause
        and (named.cause == USER_CAUSE or failure.node == named.node)
    )


def measured(found: Iterable[Named], truth: dict[int, Failure]) -> dict[str, float]:
    """Return precision (of causes other than the program's), precision_all and recall."""
    all_named = list(found)
    hardware_named = [named for named in all_named if named.cause != USER_CAUSE]
    hits = {named.db_index for named in hardware_named if is_right(named, truth)}
    detected = {index for index, failure in truth.items() if failure.is_detected}
    return {
        "precision": len([named for named in hardware_named if named.db_index in hits]) / len(hardware_named)
        if hardware_named
        else 1.0,
        "precision_all": sum(is_right(named, truth) for named in all_named) / len(all_named) if all_named else 1.0,
        "recall": len(hits & detected) / len(detected) if detected else 1.0,
    }


def naive(study: Study, isolating: bool) -> list[Named]:
    """Return the first cause, in CAUSE_ORDER, that was open in the window. isolating: only conditions that drain."""
    study.compute_tables("conditions")
    best: dict[int, tuple[int, str, str]] = {}
    for db_index, node, code, severity in study.database.rows(_OPEN_CONDITIONS).rows:
        if isolating and severity not in ("degraded", "critical"):
            continue
        cause = meaning(code).cause
        rank = (CAUSE_ORDER[cause], node, cause)
        best[db_index] = min(best.get(db_index, rank), rank)
    return [Named(index, cause, node, "") for index, (_, node, cause) in best.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", required=True, help="store of a generated history")
    parser.add_argument("--truth", required=True, type=Path, help="truth/ of the history")
    args = parser.parse_args()
    truth = read_truth(args.truth)
    with open_for_reading(args.db) as snapshot:
        files = table_files(snapshot)
        times = engine.covered_period(files)
        assert times is not None, "the store has no times"
        with open_study(files, *times, threads=2, memory_mib=1024) as study:
            begun = time.monotonic()
            document = attribution(study)
            took = time.monotonic() - begun
            found = [Named(job["db_index"], job["cause"], job["node"], job["confidence"]) for job in document["jobs"]]
            naive_results = [naive(study, isolating) for isolating in (False, True)]
    healthd_quality = measured(found, truth)
    print(f"{document['failures']:,} failures, {len(found):,} with a cause, in {took:.1f} s")
    _line("precision", healthd_quality["precision"], PRECISION)
    print(f"  with the program's causes: {healthd_quality['precision_all']:.4f}")
    _line("recall of failures whose fault was detected", healthd_quality["recall"], RECALL)
    for rule, subset in zip(("all open conditions", "open conditions that drain"), naive_results, strict=True):
        naive_quality = measured(subset, truth)
        print(f"  naive, {rule} in the window: ", end="")
        print(f"precision {naive_quality['precision']:.3f}, recall {naive_quality['recall']:.3f}")
    by_chance = sum(cause["by_chance"] for cause in document["causes"] if cause["cause"] != USER_CAUSE)
    wrong_named = [named for named in found if named.cause != USER_CAUSE and not is_right(named, truth)]
    print(f"  except the program's: {by_chance} expected by chance, {len(wrong_named)} wrong")
    for named in wrong_named[:20]:
        print(f"    {named} {truth.get(named.db_index)}")
    for confidence in ("high", "medium", "low"):
        subset = [named for named in found if named.confidence == confidence]
        print(f"  confidence {confidence}: {_share(subset, lambda named: is_right(named, truth))}")
    for name in CAUSES:
        faults = {index for index, failure in truth.items() if failure.cause == name and failure.is_detected}
        hits = {named.db_index for named in found if named.cause == name and is_right(named, truth)}
        if faults:
            missed = Counter(next((o.cause for o in found if o.db_index == i), "none") for i in faults - hits)
            print(f"  {name}: recall {len(faults & hits)} of {len(faults)} {dict(missed) or ''}")
    return 0 if healthd_quality["precision"] >= PRECISION and healthd_quality["recall"] >= RECALL else 1


def _share(subset: list[Named], is_good: Callable[[Named], bool]) -> str:
    return f"{sum(map(is_good, subset)) / len(subset):.3f} of {len(subset):,} are right" if subset else "none"


def _line(title: str, value: float, aim: float) -> None:
    print(f"{title}: {value:.4f} (aim: at least {aim}) {'met' if value >= aim else 'MISSED'}")


if __name__ == "__main__":
    raise SystemExit(main())
