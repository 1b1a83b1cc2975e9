"""Compare DuckDB with Spark: every query, every answer, and each table of the answers, on small stores.

scripts/test_spark.sh runs it in an environment with healthd[fleet,spark] and Java.
Exit status: 0 the engines agree; 1 they differ, or a query of an answer returned no row; 75 Spark does not start here.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from fleet_complete import CHOSEN, complete  # noqa: E402  the path comes first
from fleet_history import BEGIN, END, NODES  # noqa: E402
from fleet_rows import store_with  # noqa: E402

from healthd.fleet import engine, queries, report, spark  # noqa: E402
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
    repairs,
    states,
)
from healthd.fleet.answers.document import Unanswerable  # noqa: E402
from healthd.fleet.answers.study import Choice, R, Study  # noqa: E402
from healthd.fleet.database import Database, DuckDb  # noqa: E402
from healthd.fleet.queries import Value  # noqa: E402
from healthd.fleet.store import open_for_reading  # noqa: E402
from healthd.fleet.tables import TABLES  # noqa: E402

# For so few rows, compiling a plan takes longer than interpreting it.
FAST_SETTINGS = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
}
DIFFER, NOT_HERE = 1, 75  # EX_TEMPFAIL of sysexits.h
# Each SQL construct that the lint allows and no built-in query uses.
SITE_QUERY = """
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
    """Return a digest of an answer that ignores the order of rows and rounds fractions to nine digits."""
    lines = sorted(repr([f"{value:.9g}" if isinstance(value, float) else value for value in row]) for row in rows)
    return hashlib.sha256("\n".join([repr(list(columns)), *lines]).encode()).hexdigest()[:12]


class RecordingStudy(Study):
    """A study that records which queries ran.

    digests   query name and number of its run -> digest of its columns and rows
    rows      query name -> number of rows of all its runs
    """

    def __init__(self, database: Database, from_time: int, to_time: int, chosen: Choice | None) -> None:
        self.digests: dict[str, str] = {}
        self.rows: Counter[str] = Counter()
        self._runs: Counter[str] = Counter()
        super().__init__(database, from_time, to_time, chosen)

    def query(self, name: str, row: type[R], **parameters: Value) -> list[R]:
        found = super().query(name, row, **parameters)
        self.digests[f"{name} {self._runs[name]}"] = digest(getattr(row, "_fields", ()), map(tuple, found))
        self._runs[name] += 1
        self.rows[name] += len(found)
        return found


class RecordingDatabase:
    """A database that records the names of its computed tables."""

    def __init__(self, database: Database) -> None:
        self.database, self.names = database, set[str]()
        self.rows = database.rows

    def table(self, name: str, sql: str) -> None:
        self.database.table(name, sql)
        self.names.add(name)

    def view(self, name: str, sql: str) -> None:
        self.database.view(name, sql)
        self.names.add(name)


# Every answer of a store, except `compare`, which needs two studies.
ANSWERS: dict[str, Callable[[Study], Any]] = {
    "states": lambda study: states.states(study, split=(BEGIN + END) // 2, large=8),
    "goodput": goodput.goodput,
    "failslow": failslow.failslow,
    "alarms": alarms.alarms,
    "availability": lambda study: availability.availability(study, sla=99.0),
    "checks": checks.checks,
    "attribution": attribution.attribution,
    "lemons": lambda study: lemons.lemons(study, window_days=None),
    "links": links.links,
    "repairs": repairs.repairs,
    "rate": lambda study: rate.rate(study, more_than_gpus=8),
    "ettr": ettr.ettr,
    "slowing": lambda study: {"told": evidence.slowdown_evidence(study, NODES)},
    "report": lambda study: report.report_document(study, report.Answers({}, {}, {})),
}
COMPARE = "compare"


class Result(NamedTuple):
    """The results of one engine for one store and filter.

    digests   answer, query or table -> digest
    rows      query or table -> number of rows
    """

    digests: dict[str, str]
    rows: Counter[str]


def compute_all(open_database: Callable[[], AbstractContextManager[Database]], chosen: Choice | None) -> Result:
    """Compute every answer and return digests of each document, query and table."""
    found = Result({}, Counter())
    middle = (BEGIN + END) // 2
    sides: list[compare.Side] = []
    studies = [("whole", BEGIN, END)]
    if chosen is None:  # a filter does not change the queries of `compare`
        studies += [("A", BEGIN, middle), ("B", middle, END)]
    for name, begin, end in studies:
        with open_database() as database:
            tables = RecordingDatabase(database)
            study = RecordingStudy(tables, begin, end, chosen)
            if name == "whole":
                found.digests.update({f"answer {key}": answer_digest(answer, study) for key, answer in ANSWERS.items()})
            else:
                with suppress(Unanswerable):
                    sides.append(compare.measure_side(study, name))
            found.digests.update({f"{name} {key}": value for key, value in study.digests.items()})
            found.rows.update(study.rows)
            for table in sorted(tables.names & set(queries.answer_queries())):
                answer = database.rows(f"SELECT * FROM {table}")
                found.digests[f"{name} table {table}"] = digest(answer.columns, answer.rows)
                found.rows[table] += len(answer.rows)
    if len(sides) == 2:
        found.digests[f"answer {COMPARE}"] = _digest(compare.compare_sides(*sides))
    return found


def answer_digest(answer: Callable[[Study], Any], study: Study) -> str:
    """Return a digest of an answer's document, or the reason why the store has none. Fractions are rounded to nine
    digits."""
    try:
        return _digest(answer(study))
    except Unanswerable as error:
        return str(error)


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(_rounded(document)).encode()).hexdigest()[:12]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def queries_without_rows(results: Iterable[Result]) -> list[str]:
    """Return the queries of the answers that returned no row in any result, so that nothing was compared."""
    rows = sum((result.rows for result in results), Counter[str]())
    return sorted(name for name in set(queries.answer_queries()) - set(queries.builtin_queries()) if not rows[name])


def stores(folder: Path) -> Iterator[tuple[str, engine.Files]]:
    """Yield name and files of an empty store and of a store with a history."""
    yield "empty", {}
    rows = {table: [tuple(line.values()) for line in lines] for table, lines in complete(Random(0)).items() if lines}
    with open_for_reading(str(store_with(folder / "db", rows))) as snapshot:
        yield "history", {table: snapshot.files(table) for table in TABLES}


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the names whose digests differ between two engines."""
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


@contextmanager
def duckdb_of(files: engine.Files) -> Iterator[Database]:
    with engine.open_database(files, 1, 512) as connection:
        yield DuckDb(connection, files)


@contextmanager
def spark_of(session: Any, files: engine.Files) -> Iterator[Database]:
    yield spark.Spark(session, files)


def compare_queries(session: Any, store: str, files: engine.Files) -> list[str]:
    """Run every query on both engines. Return the names of the queries that differ."""
    all_queries = queries.builtin_queries()
    all_queries["of_a_site"] = queries.parse_query("of_a_site", "of_a_site", SITE_QUERY)
    parameters = engine.QueryParameters(BEGIN, END, queries.resolve_parameters(all_queries.values(), {}))
    differ = []
    for name, query in all_queries.items():
        needed = queries.with_dependencies(query, all_queries)
        with engine.run_queries(needed, files, parameters, 1, 512) as answer:
            rows = list(answer.rows)
            duckdb_digest = digest(answer.columns, rows)
        answer = spark.run_in_session(session, needed, files, parameters)
        spark_digest = digest(answer.columns, answer.rows)
        comparison = "same" if duckdb_digest == spark_digest else f"DIFFERENT: Spark {spark_digest}"
        print(f"{store:10} {name:20} {len(rows):5} rows  {duckdb_digest}  {comparison}", flush=True)
        differ += [f"{store}: {name}"] if duckdb_digest != spark_digest else []
    return differ


def main() -> int:
    mistakes = []
    results: list[Result] = []
    compared = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            with spark.session(threads=2) as session:
                for name, value in FAST_SETTINGS.items():
                    session.conf.set(name, value)
                for store, files in stores(Path(folder)):
                    mistakes += compare_queries(session, store, files)
                    for filter_name, chosen in (("all", None), ("chosen", CHOSEN)) if files else (("all", None),):
                        duckdb_result = compute_all(partial(duckdb_of, files), chosen)
                        spark_result = compute_all(partial(spark_of, session, files), chosen)
                        differ = differences(duckdb_result.digests, spark_result.digests)
                        print(
                            f"{store:10} {filter_name:10} {len(duckdb_result.digests):5} answers, queries and tables, "
                            f"{len(differ)} differ",
                            flush=True,
                        )
                        mistakes += [f"{store} {filter_name}: {name}" for name in differ]
                        results += [duckdb_result]
                        compared += len(duckdb_result.digests)
        except spark.SparkUnavailable as error:
            print(f"spark: {error}", file=sys.stderr)
            return NOT_HERE
    mistakes += [f"{name}: no rows" for name in queries_without_rows(results)]
    print(f"spark: {compared} answers, queries and tables, {len(mistakes)} differ {', '.join(mistakes)}".rstrip())
    return DIFFER if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
