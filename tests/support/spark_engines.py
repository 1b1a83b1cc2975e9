"""Asks every question of DuckDB and of Spark over the same small stores, and says where the answers differ: nowhere.

python tests/support/spark_engines.py     in an environment with healthd[fleet,spark] and Java;
scripts/test_spark.sh Exit status: 0 they agree, 1 they differ, 75 Spark does not start here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from fleet_history import BEGIN, END, NODES, history  # noqa: E402  the path comes first
from fleet_rows import made  # noqa: E402

from healthd.fleet import engine, questions, spark  # noqa: E402
from healthd.fleet.answers import (  # noqa: E402
    alarms,
    attribution,
    availability,
    checks,
    compare,
    ettr,
    evidence,
    failslow,
    goodput,
    lemons,
    links,
    rate,
    states,
)
from healthd.fleet.answers.document import Unanswerable  # noqa: E402
from healthd.fleet.answers.study import Study, opened  # noqa: E402
from healthd.fleet.store import reading  # noqa: E402
from healthd.fleet.tables import TABLES  # noqa: E402

# To compile a plan takes longer than to walk through it, on so few rows.
QUICKLY = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
DIFFER, NOT_HERE = 1, 75  # EX_TEMPFAIL of sysexits.h
# Of each kind that the lint lets pass and no question of ours uses.
OF_A_SITE = """
-- Words and numbers that engines like to treat in their own ways.
SELECT
  jobs.state, lower(jobs.state) AS small, substr(jobs.state, 2, 3) AS part, length(trim(' a ')) AS long,
  replace(jobs.state, 'E', 'e') AS other, jobs.gpus / 8 AS eighths, -7 % 3 AS remainder, 7 / nullif(0, 0) AS nothing,
  greatest(jobs.gpus, NULL, 3) AS most, least(NULL, jobs.gpus) AS fewest, jobs.gpus > 8 AND NULL AS unknown,
  avg(jobs.gpus) OVER (PARTITION BY jobs.state) AS mean, sqrt(jobs.nodes) AS root, ln(1 + jobs.nodes) AS log,
  coalesce(jobs.run_key, 'none' || ' here') AS run_key, jobs.state LIKE 'FAIL%' AS failed, abs(-jobs.nodes) AS nodes,
  rank() OVER (ORDER BY jobs.gpus NULLS FIRST) AS place, dense_rank() OVER (ORDER BY jobs.gpus NULLS LAST) AS dense,
  first_value(jobs.db_index) OVER (PARTITION BY jobs.state ORDER BY jobs.cluster, jobs.db_index) AS first_index,
  jobs.gpus IS NOT DISTINCT FROM NULL AS no_gpus, numbers.n
FROM jobs
CROSS JOIN numbers
WHERE numbers.n < 2 AND jobs.state NOT IN ('RUNNING')
"""


def digest(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Of an answer, whatever the order of its rows; a fraction counts to nine digits."""
    lines = sorted(repr([f"{value:.9g}" if isinstance(value, float) else value for value in row]) for row in rows)
    return hashlib.sha256("\n".join([repr(list(columns)), *lines]).encode()).hexdigest()[:12]


# Every answer of a store.
ANSWERS: dict[str, Callable[[Study], dict[str, Any]]] = {
    "states": lambda study: states.states(study, split=(BEGIN + END) // 2, large=8),
    "goodput": goodput.goodput,
    "failslow": failslow.failslow,
    "alarms": alarms.alarms,
    "availability": lambda study: availability.availability(study, sla=99.0),
    "checks": checks.checks,
    "attribution": attribution.attribution,
    "lemons": lambda study: lemons.lemons(study, window_days=None),
    "links": links.links,
    "rate": lambda study: rate.rate(study, more_than_gpus=8),
    "ettr": ettr.ettr,
    "compare": lambda study: compare.compared(compare.measured(study, "A"), compare.measured(study, "B")),
    "slowing": lambda study: {"told": evidence.told_by(study, NODES)},
}


def document_of(answer: Callable[[Study], dict[str, Any]], study: Study) -> str:
    """Return a digest of an answer's document, or why the store has none. A fraction counts to nine digits."""
    try:
        return hashlib.sha256(json.dumps(_rounded(answer(study))).encode()).hexdigest()[:12]
    except Unanswerable as error:
        return str(error)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def stores(folder: Path) -> Iterator[tuple[str, engine.Files]]:
    """Name and files: an empty store, and one with a history, as an ingest leaves it."""
    yield "empty", {}
    rows = {table: [tuple(one.values()) for one in some] for table, some in history(Random(0), 60).items() if some}
    with reading(str(made(folder / "db", rows))) as snapshot:
        yield "history", {table: snapshot.files(table) for table in TABLES}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The questions of which two engines' digests are not the same."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def main() -> int:
    there = questions.built_in()
    there["of_a_site"] = questions.parse("of_a_site", "of_a_site", OF_A_SITE)
    needed = {name: questions.needed(question, there) for name, question in there.items()}
    asked = engine.Asked(BEGIN, END, questions.parameters(there.values(), {}))
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with spark.session(threads=2) as session:
                for name, value in QUICKLY.items():
                    session.conf.set(name, value)
                for store, files in stores(Path(folder)):
                    ours, theirs = {}, {}
                    for name, its in needed.items():
                        with engine.answered(its, files, asked, 1, 512) as answer:
                            rows = list(answer.rows)
                            ours[name] = digest(answer.columns, rows)
                        answer = spark.ask(session, its, files, asked)
                        theirs[name] = digest(answer.columns, answer.rows)
                        same = "same" if ours[name] == theirs[name] else f"DIFFERENT: Spark {theirs[name]}"
                        print(f"{store:10} {name:20} {len(rows):5} rows  {ours[name]}  {same}", flush=True)
                    for name, answer_of in ANSWERS.items():
                        with opened(files, BEGIN, END, None, 1, 512) as study:
                            ours[name] = document_of(answer_of, study)
                        theirs[name] = document_of(answer_of, Study(spark.Spark(session, files), BEGIN, END))
                        same = "same" if ours[name] == theirs[name] else "DIFFERENT"
                        print(f"{store:10} {name:20} answer {ours[name]:>12}  {same}", flush=True)
                    wrong += [f"{store}: {name}" for name in differences(ours, theirs)]
        except spark.NoSpark as error:
            print(f"spark: {error}", file=sys.stderr)
            return NOT_HERE
    asked_of = len(needed) + len(ANSWERS)
    print(f"spark: {asked_of} questions and answers, {len(wrong)} differ {', '.join(wrong)}".rstrip())
    return DIFFER if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
