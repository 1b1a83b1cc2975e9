"""Runs queries on Spark, for stores that are too large for one machine.

sqlglot translates the SQL to Spark's dialect. The Parquet files must be readable on all machines in the cluster.
Requires the optional dependencies `healthd[spark]`, and Java.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from healthd.common.errors import HealthdError
from healthd.fleet.database import Rows
from healthd.fleet.engine import MEMORY_MIB, NUMBER_COUNT, THREADS, Files, QueryParameters, QueryResult
from healthd.fleet.manifest import StoreError
from healthd.fleet.queries import InvalidQuery, Query
from healthd.fleet.tables import BIGINT, BOOLEAN, DOUBLE, TABLES, TEXT


class SparkUnavailable(HealthdError):
    """Spark is not installed or does not start."""


_TYPES = {BIGINT: "BIGINT", DOUBLE: "DOUBLE", TEXT: "STRING", BOOLEAN: "BOOLEAN"}


@contextmanager
def run_queries(
    queries: Sequence[Query],
    files: Files,
    parameters: QueryParameters,
    master: str = "spark",
    threads: int = THREADS,
    memory_mib: int = MEMORY_MIB,
) -> Iterator[QueryResult]:
    """Run the last of these queries, like engine.run_queries.

    Raises SparkUnavailable, and InvalidQuery if Spark rejects the SQL.

    Args:
        master: "spark" for this machine, "spark://HOST:PORT" for a cluster.
    """
    with session(master, threads, memory_mib) as spark:
        yield run_in_session(spark, queries, files, parameters)


class Spark:
    """A Spark session with the store's tables, used as the `database.Database` of the answers. Raises StoreError."""

    def __init__(self, session: Any, files: Files) -> None:
        self._session = session
        _create_views(session, files)

    def table(self, name: str, sql: str) -> None:
        # Use a checkpoint, not a cache. With a cache, the plan of a later query would contain the plans of all tables
        # that it reads.
        with _raise_store_errors():
            self._session.sql(to_spark_sql(sql)).localCheckpoint().createOrReplaceTempView(name)

    def view(self, name: str, sql: str) -> None:
        with _raise_store_errors():
            self._session.sql(to_spark_sql(sql)).createOrReplaceTempView(name)

    def rows(self, sql: str) -> Rows:
        with _raise_store_errors():
            answer = self._session.sql(to_spark_sql(sql))
            return Rows(tuple(answer.columns), [tuple(row) for row in answer.collect()])


@contextmanager
def _raise_store_errors() -> Iterator[None]:
    """Raise StoreError if Spark cannot read the store or compute the answer."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        raise StoreError(f"Spark: {_first_line(error)}") from None


def run_in_session(spark: Any, queries: Sequence[Query], files: Files, parameters: QueryParameters) -> QueryResult:
    """Run the last of these queries in an existing session."""
    from pyspark.errors import PySparkException

    _create_views(spark, files)
    columns = parameters.columns
    values = ", ".join(f"CAST(:{name} AS {_TYPES[kind]}) AS {name}" for name, (kind, _) in columns.items())
    arguments = {name: value for name, (_, value) in columns.items()}
    spark.sql(f"SELECT {values}", args=arguments).createOrReplaceTempView("parameters")
    *dependencies, last = queries
    try:
        for query in dependencies:
            spark.sql(_translate(query)).createOrReplaceTempView(query.name)
        result = spark.sql(_translate(last))
        return QueryResult(tuple(result.columns), _rows(result, last))
    except PySparkException as error:
        raise _invalid_query(last, error) from None


def _create_views(spark: Any, files: Files) -> None:
    """Create views for the store's tables and `numbers` in the session."""
    for name, table in TABLES.items():
        schema = ", ".join(f"{column} {_TYPES[kind]}" for column, kind in table.columns.items())
        paths = [f"file://{os.path.abspath(path)}" for path in files.get(name, ())]
        if paths:
            rows = spark.read.schema(schema).parquet(*paths)
        else:
            nothing = ", ".join(f"CAST(NULL AS {_TYPES[kind]}) AS {column}" for column, kind in table.columns.items())
            rows = spark.sql(f"SELECT {nothing} WHERE false")
        rows.createOrReplaceTempView(name)
    # Do not create the table from Python rows: Spark would then need the same Python version on all its machines.
    spark.range(NUMBER_COUNT).toDF("n").createOrReplaceTempView("numbers")


def to_spark_sql(sql: str) -> str:
    """Translate SQL from DuckDB's dialect to Spark's."""
    import sqlglot

    [found] = sqlglot.transpile(sql, read="duckdb", write="spark", comments=False)
    return str(found)


def _translate(query: Query) -> str:
    from sqlglot.errors import SqlglotError

    try:
        return to_spark_sql(query.sql)
    except SqlglotError as error:
        raise _invalid_query(query, error) from None


@contextmanager
def session(master: str = "spark", threads: int = THREADS, memory_mib: int = MEMORY_MIB) -> Iterator[Any]:
    """Open a Spark session. It is stopped at the end of the block. Raises SparkUnavailable."""
    try:
        import sqlglot as _sqlglot  # noqa: F401  imported here to report its absence at once
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise SparkUnavailable(
            f"--engine: {error.name} is not installed here; run pip install pyspark sqlglot"
        ) from None
    is_local = master == "spark"
    settings = {
        "spark.app.name": "healthd fleet",
        "spark.log.level": "ERROR",
        "spark.sql.ansi.enabled": "true",  # an overflow is an error, as in DuckDB, instead of NULL
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    if is_local:  # do not listen on other interfaces
        settings |= {
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": f"{memory_mib}m",
            "spark.sql.shuffle.partitions": str(2 * threads),
        }
    builder = SparkSession.builder.master(f"local[{threads}]" if is_local else master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except (PySparkException, OSError) as error:
        raise SparkUnavailable(f"--engine {master}: Spark does not start: {_first_line(error)}") from None
    try:
        yield spark
    finally:
        spark.stop()


def _rows(result: Any, query: Query) -> Iterator[tuple[Any, ...]]:
    from pyspark.errors import PySparkException

    try:
        yield from (tuple(row) for row in result.toLocalIterator())
    except PySparkException as error:
        raise _invalid_query(query, error) from None


def _invalid_query(query: Query, error: Exception) -> InvalidQuery:
    return InvalidQuery(f"{query.path}: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
