"""Opens the store for one period and one selection of jobs and nodes. All answers query the store through this module.

An answer's SQL can read the store's tables and the named queries, which contain all rows. It can also read
`chosen_jobs` (with the size class `gpus_up_to`) and `chosen_nodes`, which contain only the selected rows. Expensive
tables are computed once for all answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from healthd.common.codec import spelling_hint
from healthd.fleet import engine, store
from healthd.fleet.answers import causes
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice, format_time, head, percent, share
from healthd.fleet.database import Database, DuckDb
from healthd.fleet.queries import Query, Value, answer_queries, with_dependencies
from healthd.fleet.statistics.job_sizes import size_class_sql
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
# For each choice, the SQL for the names in the store. A comma-separated list contains several names.
_CHOICE_NAMES_SQL = {
    "cluster": "SELECT cluster AS name FROM jobs UNION SELECT cluster FROM events UNION SELECT cluster FROM nodes "
    "UNION SELECT cluster FROM node_states UNION SELECT cluster FROM failures",
    "partition": "SELECT partition AS name FROM jobs UNION SELECT partitions FROM nodes",
    "account": "SELECT account AS name FROM jobs",
    "model": "SELECT gpu_model AS name FROM nodes",
    "switch": "SELECT switch AS name FROM nodes",
}
_ALL_NODES_SQL = " UNION ".join(
    f"SELECT cluster, node FROM {table} WHERE node IS NOT NULL AND cluster <> ''"
    for table in ("nodes", "job_nodes", "events", "node_states", "failures", "scraped_conditions")
)
# These results are as large as the store's own tables. As views, they read only the columns that a query needs.
_UNMATERIALIZED = ("lines", "job_node_days", "rate_jobs")
# Tables that a study or an answer creates in addition to the queries.
STUDY_TABLES = (
    *("chosen_jobs", "chosen_nodes", "all_nodes", "codes", "link_codes", "known_times", "unread_times"),
    *("named_nodes", "named_checks"),
)
MAX_HINT_LENGTH = 400  # maximum characters in suggested names


class ChosenNode(NamedTuple):
    """A row returned by chosen_node_names.sql."""

    cluster: str
    node: str


class JobsCoverage(NamedTuple):
    """A row returned by jobs_known.sql."""

    cluster: str
    known_until: int


class ObservedShare(NamedTuple):
    """A row returned by observed_share.sql."""

    seconds: int
    observed_seconds: int
    step_seconds: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """Selection of jobs and nodes; "" selects all.

    Attributes:
        partition: jobs in the partition (one of a job's partitions must match) and its nodes.
        account: the account's jobs, and the nodes on which at least one of these jobs ran.
        model, switch: nodes with this GPU model or behind this switch, and jobs that ran on at least one of these
            nodes.
    """

    cluster: str = ""
    partition: str = ""
    account: str = ""
    model: str = ""
    switch: str = ""

    @property
    def as_dict(self) -> dict[str, str]:
        return asdict(self)


class Study:
    """The open store, with the selected period, jobs and nodes.

    Attributes:
        from_time, to_time: the period, [from, to) in epoch seconds.
        database: runs SQL, including SQL that is not in a file.
    """

    def __init__(self, database: Database, from_time: int, to_time: int, choice: Choice | None = None) -> None:
        """Open the study. Raises WrongChoice if a name does not occur in the store."""
        self.from_time, self.to_time, self.choice = from_time, to_time, choice or Choice()
        self.database = database
        self._computed: set[str] = set()
        node_codes = ((code, causes.is_node_fault(code)) for code in causes.codes())
        self.add_table("codes", {"code": TEXT, "of_node": BOOLEAN}, node_codes)
        self._create_chosen_tables()

    # --- queries of the answers

    def query(self, name: str, row: type[R], **parameters: Value) -> list[R]:
        """Run sql/answers/NAME.sql and return its rows as `row`, a NamedTuple whose fields are the columns in order.

        The tables that the SQL reads are computed first, unless they were computed before. Raises StoreError for a
        damaged file.

        Args:
            parameters: values for the columns of the table `parameters`.
        """
        *dependencies, query_file = _with_dependencies(name)
        unknown = set(parameters) - set(query_file.parameters)
        if unknown:
            raise ValueError(f"{name} has no parameter {', '.join(sorted(unknown))}")
        self._compute(dependencies)
        self._set_parameters({**query_file.parameters, **parameters})
        result = self.database.rows(engine.strip_semicolon(query_file.sql))
        fields = getattr(row, "_fields", ())
        if result.columns != fields:
            raise TypeError(f"{name}.sql has the columns {result.columns}, but {row.__name__} has the fields {fields}")
        return [row(*values) for values in result.rows]

    def compute_tables(self, *names: str) -> None:
        """Compute the tables for these queries, unless they were computed before."""
        for name in names:
            self._compute(_with_dependencies(name))

    def add_table(self, name: str, columns: Mapping[str, str], rows: Iterable[tuple[Value | None, ...]]) -> None:
        """Create a table from Python rows.

        Args:
            columns: maps each column's name to its type; at least one.
        """
        values_sql = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
        names = ", ".join(columns)
        typed = ", ".join(f"CAST({column} AS {kind}) AS {column}" for column, kind in columns.items())
        nulls = ", ".join(f"CAST(NULL AS {kind}) AS {column}" for column, kind in columns.items())
        select_sql = f"SELECT {typed} FROM (VALUES {values_sql}) AS listed({names})"
        self.database.view(name, select_sql if values_sql else f"SELECT {nulls} WHERE FALSE")

    def require(self, *tables: str) -> None:
        """Raise Unanswerable if one of these tables is empty in the store."""
        for table in tables:
            if not self.has_rows(table):
                flag = _FILLED_BY[table]
                raise Unanswerable(f"the store has no {table.replace('_', ' ')}: healthd fleet ingest {flag}")

    def has_rows(self, table: str) -> bool:
        return bool(self.database.rows(f"SELECT 1 AS one FROM {table} LIMIT 1").rows)

    def unchosen_node_notes(self, nodes: Iterable[tuple[str, str | None]], noun: str) -> list[str]:
        """Return a note with the number of (cluster, node) pairs that were not selected.

        Args:
            noun: the thing that a pair represents, such as failures.
        """
        if not (self.choice.model or self.choice.switch):
            return []
        chosen = set(self.query("chosen_node_names", ChosenNode))
        located = [pair for pair in nodes if pair[1] is not None]
        outside = sum(pair not in chosen for pair in located)
        if not outside:
            return []
        return [
            f"{outside:,} of these {len(located):,} {noun} were on nodes that were not selected: if one node of a "
            "job is selected, the whole job is selected."
        ]

    def head(self, name: str, *notes: str) -> Document:
        return head(name, self.from_time, self.to_time, self.choice.as_dict, notes)

    # --- limits of an answer

    def coverage_notes(self, *tables: str) -> list[str]:
        """Return notes about the parts of [from, to) for which the store has no jobs or no events."""
        notes = []
        if "jobs" in tables:
            for row in self.query("jobs_known", JobsCoverage):
                if self.choice.cluster in ("", row.cluster) and row.known_until < self.to_time - 1:
                    cluster_text, until = row.cluster or "the cluster", format_time(row.known_until)
                    notes.append(f"The store has no jobs of {cluster_text} after {until}.")
        if "events" in tables:
            (observed,) = self.query("observed_share", ObservedShare)
            observed_fraction = share(observed.observed_seconds, observed.seconds)
            if observed_fraction is not None and observed_fraction < 0.9995:
                notes.append(
                    f"healthd observed {percent(observed_fraction)} of the nodes' time; faults in the rest were not "
                    "recorded."
                )
            if observed.step_seconds is not None:
                step = f"every {observed.step_seconds} s at most"
                notes.append(f"Prometheus scraped {step}, so shorter conditions are missing.")
        return notes

    # --- internals

    def _set_parameters(self, parameters: Mapping[str, Value]) -> None:
        """Set the one-row table `parameters`: the period, and the parameters of the next query."""
        columns = engine.QueryParameters(self.from_time, self.to_time, parameters).columns
        values = ", ".join(f"CAST({_literal(value)} AS {kind}) AS {name}" for name, (kind, value) in columns.items())
        self.database.view("parameters", f"SELECT {values}")

    def _compute(self, queries: Iterable[Query]) -> None:
        """Create the missing tables for these queries, with the default parameters in their files."""
        for query_file in queries:
            if query_file.name not in self._computed:
                self._set_parameters(query_file.parameters)
                # Do not sort: a table has no order, and sorting 2.7 million runs from 4 million jobs took a sixth of
                # the time.
                ordered = engine.strip_semicolon(query_file.sql)
                sql = ordered.rpartition("\nORDER BY ")[0] or ordered
                create = self.database.view if query_file.name in _UNMATERIALIZED else self.database.table
                create(query_file.name, sql)
                self._computed.add(query_file.name)

    def _create_chosen_tables(self) -> None:
        for key, name in self.choice.as_dict.items():
            if name:
                self._require_name(key, name)
        self.database.view("all_nodes", _ALL_NODES_SQL)
        self.database.table("chosen_nodes", self._chosen_nodes_sql())
        where = []
        if self.choice.cluster:
            where.append(f"jobs.cluster = {literal(self.choice.cluster)}")
        if self.choice.partition:
            where.append(_in_list_condition("jobs.partition", self.choice.partition))
        if self.choice.account:
            where.append(f"jobs.account = {literal(self.choice.account)}")
        if self.choice.model or self.choice.switch:
            self.database.table(
                "chosen_keys",
                "SELECT DISTINCT job_nodes.cluster, job_nodes.db_index FROM job_nodes "
                "JOIN nodes ON nodes.cluster = job_nodes.cluster AND nodes.node = job_nodes.node "
                f"WHERE {self._node_condition()}",
            )
            where.append(
                "EXISTS (SELECT 1 FROM chosen_keys WHERE chosen_keys.cluster = jobs.cluster "
                "AND chosen_keys.db_index = jobs.db_index)"
            )
        size = size_class_sql("jobs.gpus")
        sql = f"SELECT jobs.*, {size} AS gpus_up_to FROM jobs{' WHERE ' if where else ''}{' AND '.join(where)}"
        self.database.view("chosen_jobs", sql)

    def _node_condition(self) -> str:
        """Return the SQL condition for --model and --switch on the table nodes."""
        requested = (("gpu_model", self.choice.model), ("switch", self.choice.switch))
        return " AND ".join(f"nodes.{column} = {literal(value)}" for column, value in requested if value) or "TRUE"

    def _chosen_nodes_sql(self) -> str:
        where = [self._node_condition()] if self.choice.model or self.choice.switch else []
        if self.choice.cluster:
            where.append(f"all_nodes.cluster = {literal(self.choice.cluster)}")
        if self.choice.partition:
            ran = _ran_on_node_condition(_in_list_condition("jobs.partition", self.choice.partition))
            listed = _in_list_condition("nodes.partitions", self.choice.partition)
            where.append(f"({listed} OR (nodes.partitions IS NULL AND {ran}))")
        if self.choice.account:
            where.append(_ran_on_node_condition(f"jobs.account = {literal(self.choice.account)}"))
        return (
            "SELECT all_nodes.cluster, all_nodes.node, nodes.gpu_model, nodes.gpus, nodes.partitions, nodes.switch, "
            "nodes.rack FROM all_nodes "
            "LEFT JOIN nodes ON nodes.cluster = all_nodes.cluster AND nodes.node = all_nodes.node "
            f"{'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY all_nodes.cluster, all_nodes.node"
        )

    def _require_name(self, key: str, requested_name: str) -> None:
        """Raise WrongChoice if the name does not occur in the store."""
        if key in ("model", "switch"):
            self.require("nodes")
        lists = self.database.rows(
            f"SELECT DISTINCT name FROM ({_CHOICE_NAMES_SQL[key]}) AS names WHERE name <> ''"
        ).rows
        known_names = {
            known_name for (text,) in lists for known_name in (text.split(",") if key == "partition" else [text])
        }
        if requested_name not in known_names:
            suggestion = spelling_hint(requested_name, known_names)
            hint = suggestion if len(suggestion) < MAX_HINT_LENGTH else f"; the store has {len(known_names)} others"
            raise WrongChoice(f'--{key}: the {key} "{requested_name}" does not occur in the store{hint}')


@contextmanager
def open_study(
    files: engine.Files,
    from_time: int,
    to_time: int,
    choice: Choice | None = None,
    threads: int = engine.THREADS,
    memory_mib: int = engine.MEMORY_MIB,
    engine_name: str = "duckdb",
) -> Iterator[Study]:
    """Open a store. Raises StoreError, WrongChoice, spark.NoSpark.

    Args:
        engine_name: duckdb, spark (on this machine) or spark://HOST:PORT.
    """
    if engine_name == "duckdb":
        with engine.open_database(files, threads, memory_mib) as connection:
            yield Study(DuckDb(connection, files), from_time, to_time, choice)
    else:
        from healthd.fleet import spark

        with spark.session(engine_name, threads, memory_mib) as session:
            yield Study(spark.Spark(session, files), from_time, to_time, choice)


def table_files(snapshot: store.Snapshot) -> engine.Files:
    """Return each table's files in a store that is open for reading."""
    return {table: snapshot.files(table) for table in TABLES}


@cache
def _answer_queries() -> dict[str, Query]:
    """Return the answers' queries, which are read once per process."""
    return answer_queries()


@cache
def _with_dependencies(name: str) -> tuple[Query, ...]:
    """Return the queries that a query reads, followed by the query itself.

    The SQL of all these queries has passed the lint.
    """
    return tuple(with_dependencies(_answer_queries()[name], _answer_queries(), STUDY_TABLES))


def _ran_on_node_condition(condition: str) -> str:
    """Return an SQL condition for a node in all_nodes: at least one job that meets `condition` ran on it."""
    return (
        "EXISTS (SELECT 1 FROM job_nodes "
        "JOIN jobs ON jobs.cluster = job_nodes.cluster AND jobs.db_index = job_nodes.db_index "
        f"WHERE job_nodes.cluster = all_nodes.cluster AND job_nodes.node = all_nodes.node AND {condition})"
    )


def _in_list_condition(column: str, name: str) -> str:
    """Return the SQL condition that a name is in a comma-separated list."""
    padded = f"',' || {column} || ','"
    return f"replace({padded}, {literal(f',{name},')}, '') <> {padded}"


def _literal(value: Value | None) -> str:
    if value is None:
        return "NULL"
    return literal(value) if isinstance(value, str) else repr(value)
