"""A store opened for one period and one choice of jobs and nodes, for the queries of the answers.

The SQL of an answer reads the store's tables and the queries (both whole), and the choice: `chosen_jobs` (with their
size class `gpus_up_to`) and `chosen_nodes`. Expensive tables are computed once for all answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from healthd.common.codec import nearest
from healthd.fleet import engine, store
from healthd.fleet.answers import causes
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice, head, moment, percent, share
from healthd.fleet.database import Database, DuckDb
from healthd.fleet.questions import Question, Value, for_answers, needed
from healthd.fleet.statistics.job_sizes import class_of
from healthd.fleet.store import literal
from healthd.fleet.tables import BOOLEAN, TABLES, TEXT

Row = dict[str, Any]
R = TypeVar("R", bound=tuple[Any, ...])

# The ingest option that fills each table.
_FILLED_BY = {
    "jobs": "--sacct or --jobs",
    "job_nodes": "--sacct or --jobs",
    "events": "--events",
    "node_states": "--node-states",
    "nodes": "--nodes",
    "preemptions": "--slurmctld-log",
    "reservations": "--reservations",
    "tickets": "--tickets",
    "exclusions": "--exclusions",
    "failures": "--failures",
    "scraped_conditions": "--prometheus",
}
# The names that each choice may have; a list with commas has several.
_NAMES = {
    "cluster": "SELECT cluster AS name FROM jobs UNION SELECT cluster FROM events UNION SELECT cluster FROM nodes "
    "UNION SELECT cluster FROM node_states UNION SELECT cluster FROM failures",
    "partition": "SELECT partition AS name FROM jobs UNION SELECT partitions FROM nodes",
    "account": "SELECT account AS name FROM jobs",
    "model": "SELECT gpu_model AS name FROM nodes",
    "switch": "SELECT switch AS name FROM nodes",
}
_KNOWN = " UNION ".join(
    f"SELECT cluster, node FROM {table} WHERE node IS NOT NULL AND cluster <> ''"
    for table in ("nodes", "job_nodes", "events", "node_states", "failures", "scraped_conditions")
)
# These are as long and wide as the store's own table; a view reads only the columns that a query needs.
_READ_EACH_TIME = ("lines", "placed_days", "rate_ran")
# Tables that a study has in addition to the queries, or that an answer adds.
CHOSEN = (
    *("chosen_jobs", "chosen_nodes", "all_nodes", "codes", "link_codes", "known_times", "unread_times"),
    *("named_nodes", "named_checks"),
)
MOST_HINT = 400  # characters of suggested names


class Place(NamedTuple):
    """Columns of chosen_places.sql."""

    cluster: str
    node: str


class JobsKnown(NamedTuple):
    """Columns of jobs_known.sql."""

    cluster: str
    known_until: int


class Observed(NamedTuple):
    """Columns of observed_share.sql."""

    seconds: int
    observed_seconds: int
    step_seconds: int | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Choice of jobs and nodes; "" = all.

    partition      its jobs (of several partitions of a job, one must match), and its nodes
    account        its jobs, and nodes that one of them ran on
    model, switch  nodes with that GPU model or behind that switch; jobs that ran at least partly on such a node
    """

    cluster: str = ""
    partition: str = ""
    account: str = ""
    model: str = ""
    switch: str = ""

    @property
    def said(self) -> dict[str, str]:
        return asdict(self)


class Study:
    """The open store with its period and choice.

    from_time, to_time  the period, [from, to) in epoch seconds
    database            runs the SQL, also for queries that are not files
    """

    def __init__(self, database: Database, from_time: int, to_time: int, chosen: Chosen | None = None) -> None:
        """Raises WrongChoice for a name that does not occur in the store."""
        self.from_time, self.to_time, self.chosen = from_time, to_time, chosen or Chosen()
        self.database = database
        self._made: set[str] = set()
        of_node = ((code, causes.of_a_node(code)) for code in causes.codes())
        self.given("codes", {"code": TEXT, "of_node": BOOLEAN}, of_node)
        self._choose()

    # --- queries of the answers

    def ask(self, name: str, row: type[R], **parameters: Value) -> list[R]:
        """Run sql/answers/NAME.sql and return its rows as `row`, a NamedTuple whose fields are the columns in order.

        The tables that the SQL reads are computed first, each once. parameters: columns of the table `parameters`.
        Raises StoreError for a damaged file.
        """
        *below, question = _needed(name)
        unknown = set(parameters) - set(question.parameters)
        if unknown:
            raise ValueError(f"{name} has no parameter {', '.join(sorted(unknown))}")
        self._compute(below)
        self._ask({**question.parameters, **parameters})
        found = self.database.rows(engine.bare(question.sql))
        fields = getattr(row, "_fields", ())
        if found.columns != fields:
            raise TypeError(f"{name}.sql has the columns {found.columns}, {row.__name__} the fields {fields}")
        return [row(*values) for values in found.rows]

    def need(self, *names: str) -> None:
        """Compute the tables of these queries, each once."""
        for name in names:
            self._compute(_needed(name))

    def given(self, name: str, columns: Mapping[str, str], rows: Iterable[tuple[Value | None, ...]]) -> None:
        """Create a table from rows in Python. columns: name -> type, at least one."""
        listed = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
        names = ", ".join(columns)
        typed = ", ".join(f"CAST({column} AS {kind}) AS {column}" for column, kind in columns.items())
        nothing = ", ".join(f"CAST(NULL AS {kind}) AS {column}" for column, kind in columns.items())
        some = f"SELECT {typed} FROM (VALUES {listed}) AS listed({names})"
        self.database.view(name, some if listed else f"SELECT {nothing} WHERE FALSE")

    def must_have(self, *tables: str) -> None:
        """Raise Unanswerable if one of these tables of the store is empty."""
        for table in tables:
            if not self.has(table):
                flag = _FILLED_BY[table]
                raise Unanswerable(f"the store has no {table.replace('_', ' ')}: healthd fleet ingest {flag}")

    def has(self, table: str) -> bool:
        return bool(self.database.rows(f"SELECT 1 AS one FROM {table} LIMIT 1").rows)

    def elsewhere_notes(self, places: Iterable[tuple[str, str | None]], what: str) -> list[str]:
        """Return a note on how many of these (cluster, node) were not chosen. noun: a noun for them."""
        if not (self.chosen.model or self.chosen.switch):
            return []
        chosen = set(self.ask("chosen_places", Place))
        there = [place for place in places if place[1] is not None]
        outside = sum(place not in chosen for place in there)
        if not outside:
            return []
        return [
            f"{outside:,} of these {len(there):,} {what} were on nodes that were not chosen: a job is chosen whole if "
            "any of its nodes is."
        ]

    def head(self, name: str, *notes: str) -> Document:
        return head(name, self.from_time, self.to_time, self.chosen.said, notes)

    # --- limits of an answer

    def coverage_notes(self, *tables: str) -> list[str]:
        """Return notes on the parts of [from, to) that the store does not cover, for jobs or events."""
        found = []
        if "jobs" in tables:
            for row in self.ask("jobs_known", JobsKnown):
                if self.chosen.cluster in ("", row.cluster) and row.known_until < self.to_time - 1:
                    whose, until = row.cluster or "the cluster", moment(row.known_until)
                    found.append(f"The store has the jobs of {whose} only until {until}.")
        if "events" in tables:
            (observed,) = self.ask("observed_share", Observed)
            seen = share(observed.observed_seconds, observed.seconds)
            if seen is not None and seen < 0.9995:
                found.append(
                    f"healthd observed {percent(seen)} of the nodes' time; faults in the rest were not recorded."
                )
            if observed.step_seconds is not None:
                step = f"every {observed.step_seconds} s at most"
                found.append(f"Prometheus scraped {step}: shorter conditions are missing.")
        return found

    # --- internals

    def _ask(self, parameters: Mapping[str, Value]) -> None:
        """Set the one-row table `parameters`: the period, and the parameters of the next query."""
        columns = engine.Asked(self.from_time, self.to_time, parameters).columns
        values = ", ".join(f"CAST({_literal(value)} AS {kind}) AS {name}" for name, (kind, value) in columns.items())
        self.database.view("parameters", f"SELECT {values}")

    def _compute(self, questions: Iterable[Question]) -> None:
        """Create the missing tables of these queries, with the default parameters of their files."""
        for question in questions:
            if question.name not in self._made:
                self._ask(question.parameters)
                # A table has no order, and sorting the 2.7 million runs of 4 million jobs took a sixth of their time.
                ordered = engine.bare(question.sql)
                sql = ordered.rpartition("\nORDER BY ")[0] or ordered
                make = self.database.view if question.name in _READ_EACH_TIME else self.database.table
                make(question.name, sql)
                self._made.add(question.name)

    def _choose(self) -> None:
        for key, name in self.chosen.said.items():
            if name:
                self._there_is(key, name)
        self.database.view("all_nodes", _KNOWN)
        self.database.table("chosen_nodes", self._nodes())
        where = []
        if self.chosen.cluster:
            where.append(f"jobs.cluster = {literal(self.chosen.cluster)}")
        if self.chosen.partition:
            where.append(_listed("jobs.partition", self.chosen.partition))
        if self.chosen.account:
            where.append(f"jobs.account = {literal(self.chosen.account)}")
        if self.chosen.model or self.chosen.switch:
            self.database.table(
                "chosen_keys",
                "SELECT DISTINCT job_nodes.cluster, job_nodes.db_index FROM job_nodes "
                "JOIN nodes ON nodes.cluster = job_nodes.cluster AND nodes.node = job_nodes.node "
                f"WHERE {self._of_nodes()}",
            )
            where.append(
                "EXISTS (SELECT 1 FROM chosen_keys WHERE chosen_keys.cluster = jobs.cluster "
                "AND chosen_keys.db_index = jobs.db_index)"
            )
        size = class_of("jobs.gpus")
        sql = f"SELECT jobs.*, {size} AS gpus_up_to FROM jobs{' WHERE ' if where else ''}{' AND '.join(where)}"
        self.database.view("chosen_jobs", sql)

    def _of_nodes(self) -> str:
        """Return the SQL condition of --model and --switch on the table nodes."""
        asked = (("gpu_model", self.chosen.model), ("switch", self.chosen.switch))
        return " AND ".join(f"nodes.{column} = {literal(value)}" for column, value in asked if value) or "TRUE"

    def _nodes(self) -> str:
        where = [self._of_nodes()] if self.chosen.model or self.chosen.switch else []
        if self.chosen.cluster:
            where.append(f"all_nodes.cluster = {literal(self.chosen.cluster)}")
        if self.chosen.partition:
            ran = _ran_there(_listed("jobs.partition", self.chosen.partition))
            listed = _listed("nodes.partitions", self.chosen.partition)
            where.append(f"({listed} OR (nodes.partitions IS NULL AND {ran}))")
        if self.chosen.account:
            where.append(_ran_there(f"jobs.account = {literal(self.chosen.account)}"))
        return (
            "SELECT all_nodes.cluster, all_nodes.node, nodes.gpu_model, nodes.gpus, nodes.partitions, nodes.switch, "
            "nodes.rack FROM all_nodes "
            "LEFT JOIN nodes ON nodes.cluster = all_nodes.cluster AND nodes.node = all_nodes.node "
            f"{'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY all_nodes.cluster, all_nodes.node"
        )

    def _there_is(self, key: str, told: str) -> None:
        """Raise WrongChoice if the name does not occur in the store."""
        if key in ("model", "switch"):
            self.must_have("nodes")
        lists = self.database.rows(f"SELECT DISTINCT name FROM ({_NAMES[key]}) AS names WHERE name <> ''").rows
        known = {name for (text,) in lists for name in (text.split(",") if key == "partition" else [text])}
        if told not in known:
            near = nearest(told, known)
            hint = near if len(near) < MOST_HINT else f"; the store has {len(known)} others"
            raise WrongChoice(f'--{key}: the {key} "{told}" does not occur in the store{hint}')


@contextmanager
def opened(
    files: engine.Files,
    from_time: int,
    to_time: int,
    chosen: Chosen | None = None,
    threads: int = engine.THREADS,
    memory_mib: int = engine.MEMORY_MIB,
    on: str = "duckdb",
) -> Iterator[Study]:
    """Open a store. Raises StoreError, WrongChoice, spark.NoSpark.

    engine_name: duckdb, spark (on this machine) or spark://HOST:PORT.
    """
    if on == "duckdb":
        with engine.connected(files, threads, memory_mib) as connection:
            yield Study(DuckDb(connection, files), from_time, to_time, chosen)
    else:
        from healthd.fleet import spark

        with spark.session(on, threads, memory_mib) as session:
            yield Study(spark.Spark(session, files), from_time, to_time, chosen)


def tables_of(snapshot: store.Snapshot) -> engine.Files:
    """Return table -> its files, of a store that is open for reading."""
    return {table: snapshot.files(table) for table in TABLES}


@cache
def _questions() -> dict[str, Question]:
    """Return the queries of the answers, read once per process."""
    return for_answers()


@cache
def _needed(name: str) -> tuple[Question, ...]:
    """Return the queries that a query reads, and itself last. Their SQL has passed the lint."""
    return tuple(needed(_questions()[name], _questions(), CHOSEN))


def _ran_there(condition: str) -> str:
    """Return the SQL condition that a job with `condition` ran on a node of all_nodes."""
    return (
        "EXISTS (SELECT 1 FROM job_nodes "
        "JOIN jobs ON jobs.cluster = job_nodes.cluster AND jobs.db_index = job_nodes.db_index "
        f"WHERE job_nodes.cluster = all_nodes.cluster AND job_nodes.node = all_nodes.node AND {condition})"
    )


def _listed(column: str, name: str) -> str:
    """Return the SQL condition that a name is in a list with commas."""
    padded = f"',' || {column} || ','"
    return f"replace({padded}, {literal(f',{name},')}, '') <> {padded}"


def _literal(value: Value | None) -> str:
    if value is None:
        return "NULL"
    return literal(value) if isinstance(value, str) else repr(value)
