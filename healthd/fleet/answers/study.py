"""A store that is open for one time and one choice of jobs and nodes: what the answers ask.

Its SQL sees the store's tables and the questions that were needed, both whole, and what was chosen: `chosen_jobs`,
`chosen_nodes`. What takes long is made once, for all answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import duckdb

from healthd.common.codec import nearest
from healthd.fleet import engine, store
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice, head, moment, percent, share
from healthd.fleet.questions import Value, built_in, needed
from healthd.fleet.store import literal
from healthd.fleet.tables import TABLES

Row = dict[str, Any]

# What brings a table into the store.
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
# Where the names are that a choice can say.
_NAMES = {
    "cluster": "SELECT cluster AS name FROM jobs UNION SELECT cluster FROM events UNION SELECT cluster FROM nodes "
    "UNION SELECT cluster FROM node_states UNION SELECT cluster FROM failures",
    "partition": "SELECT unnest(string_split(partition, ',')) AS name FROM (SELECT DISTINCT partition FROM jobs) "
    "UNION SELECT unnest(string_split(partitions, ',')) FROM nodes",
    "account": "SELECT account AS name FROM jobs",
    "model": "SELECT gpu_model AS name FROM nodes",
    "switch": "SELECT switch AS name FROM nodes",
}
_KNOWN = " UNION ".join(
    f"SELECT cluster, node FROM {table} WHERE node IS NOT NULL AND cluster <> ''"
    for table in ("nodes", "job_nodes", "events", "node_states", "failures", "scraped_conditions")
)
# As long as the store's own table and as wide: of a view only the columns are read that are asked for.
_READ_EACH_TIME = ("lines",)
# Errors that files, the disk or the memory limit may cause.
_OF_FILES = (duckdb.IOException, duckdb.InvalidInputException, duckdb.OutOfMemoryException)
MOST_HINT = 400  # characters of what is known instead


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which jobs and nodes; "" = all.

    partition  jobs of it (of several that a job names, one), nodes that are in it
    account    jobs of it, nodes that one of them ran on
    model, switch  nodes of that GPU model, behind that switch; jobs that ran on such a node at least in part
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
    """from_time, to_time   what is asked of, [from, to) in epoch seconds"""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        files: engine.Files,
        from_time: int,
        to_time: int,
        chosen: Chosen | None = None,
    ) -> None:
        """connection: of engine.connected(files). Raises WrongChoice for a name that nothing in the store has."""
        self.from_time, self.to_time, self.chosen = from_time, to_time, chosen or Chosen()
        self._connection, self._files = connection, files
        self._questions = built_in()
        self._made: set[str] = set()
        self._defaults: dict[str, Value] = {}
        for question in self._questions.values():
            self._defaults |= question.parameters
        self._ask({})
        self._choose()

    # --- what the answers ask

    def rows(self, sql: str, *values: Value | None) -> list[Row]:
        """column -> value, in the order of the SQL. Its `?` are the values. Raises StoreError for a damaged file."""
        answer = self._execute(sql, values)
        columns = [column[0] for column in answer.description or ()]
        return [dict(zip(columns, row, strict=True)) for row in answer.fetchall()]

    def row(self, sql: str, *values: Value | None) -> Row:
        """The one row of an answer that has one."""
        (found,) = self.rows(sql, *values)
        return found

    def need(self, *questions: str) -> None:
        """Each of these questions is a table of its name from now on, as it is without --param. In no order."""
        for name in questions:
            if name not in self._made:
                self._stand_on(name)
                self._make_question(name, name)

    def table(self, name: str, question: str, **parameters: Value) -> None:
        """The same question under another name, with parameters of its own (not of those that it stands on). Once."""
        if name in self._made:
            return
        unknown = set(parameters) - set(self._questions[question].parameters)
        if unknown:
            raise ValueError(f"{question} has no parameter {', '.join(sorted(unknown))}")
        self._stand_on(question)
        self._ask(parameters)
        try:
            self._make_question(name, question)
        finally:
            self._ask({})

    def make(self, name: str, sql: str) -> None:
        """A table of our own, made once for all answers that name it."""
        if name not in self._made:
            self._execute(f"CREATE TABLE {name} AS {sql}")
            self._made.add(name)

    def must_have(self, *tables: str) -> None:
        """Raises Unanswerable if one of these tables of the store has no row at all."""
        for table in tables:
            if not self.has(table):
                flag = _FILLED_BY[table]
                raise Unanswerable(f"the store has no {table.replace('_', ' ')}: healthd fleet ingest {flag}")

    def has(self, table: str) -> bool:
        """Whether a table of the store has a row at all."""
        return bool(self.rows(f"SELECT 1 AS one FROM {table} LIMIT 1"))

    def elsewhere_notes(self, places: Iterable[tuple[str, str | None]], what: str) -> list[str]:
        """How many of these (cluster, node) were not chosen, in a sentence about `what`."""
        if not (self.chosen.model or self.chosen.switch):
            return []
        chosen = {(row["cluster"], row["node"]) for row in self.rows("SELECT cluster, node FROM chosen_nodes")}
        there = [place for place in places if place[1] is not None]
        outside = sum(place not in chosen for place in there)
        if not outside:
            return []
        return [
            f"{outside:,} of these {len(there):,} {what} were on nodes that were not chosen: a job is chosen whole, "
            "for any of its nodes."
        ]

    def head(self, name: str, *notes: str) -> Document:
        """The first keys of the answer's document."""
        return head(name, self.from_time, self.to_time, self.chosen.said, notes)

    # --- what limits an answer

    def coverage_notes(self, *tables: str) -> list[str]:
        """What of [from, to) the store does not know, in sentences: of jobs, events."""
        found = []
        if "jobs" in tables:
            self.need("jobs_known")
            for row in self.rows("SELECT cluster, known_until FROM jobs_known ORDER BY cluster"):
                if self.chosen.cluster in ("", row["cluster"]) and row["known_until"] < self.to_time - 1:
                    whose, until = row["cluster"] or "the cluster", moment(row["known_until"])
                    found.append(f"The store has the jobs of {whose} only until {until}.")
        if "events" in tables:
            self.need("observed")
            told = self.row(
                "SELECT CAST(coalesce(sum(seconds), 0) AS BIGINT) AS seconds, "
                "CAST(coalesce(sum(observed_seconds), 0) AS BIGINT) AS observed_seconds "
                "FROM observed JOIN chosen_nodes USING (cluster, node)"
            )
            seen = share(told["observed_seconds"], told["seconds"])
            if seen is not None and seen < 0.9995:
                found.append(
                    f"healthd observed {percent(seen)} of the nodes' time; faults in the rest were not recorded."
                )
            step = self.row("SELECT max(step_seconds) AS step FROM scraped_conditions")["step"]
            if step is not None:
                found.append(f"Prometheus scraped every {step} s at most: a condition shorter than that is missing.")
        return found

    # --- inside

    def _execute(self, sql: str, values: Sequence[Value | None] = ()) -> duckdb.DuckDBPyConnection:
        try:
            return self._connection.execute(sql, list(values))
        except duckdb.Error as error:
            # Damaged bytes within a Parquet page raise the bare base class; our own mistakes in SQL have classes.
            if type(error) is not duckdb.Error and not isinstance(error, _OF_FILES):
                raise
            raise store.damaged(
                self._connection, [path for some in self._files.values() for path in some], error
            ) from None

    def _ask(self, parameters: dict[str, Value]) -> None:
        """The one-row table `asked`: the time, and each question's parameters."""
        columns = engine.Asked(self.from_time, self.to_time, {**self._defaults, **parameters}).columns
        kinds = ", ".join(f"CAST(? AS {kind}) AS {name}" for name, (kind, _) in columns.items())
        self._execute(f"CREATE OR REPLACE TABLE asked AS SELECT {kinds}", [value for _, value in columns.values()])

    def _stand_on(self, name: str) -> None:
        """What a question stands on is there, and as tables too, since others stand on the same."""
        for one in needed(self._questions[name], self._questions)[:-1]:
            if one.name not in self._made:
                self._make_question(one.name, one.name)

    def _make_question(self, name: str, question: str) -> None:
        # A table keeps no order, and to sort the 2.7 million runs of 4 million jobs took a sixth of their time.
        ordered = engine.bare(self._questions[question].sql)
        sql = ordered.rpartition("\nORDER BY ")[0] or ordered
        self._execute(f"CREATE {'VIEW' if question in _READ_EACH_TIME else 'TABLE'} {name} AS {sql}")
        self._made.add(name)

    def _choose(self) -> None:
        for key, told in self.chosen.said.items():
            if told:
                self._there_is(key, told)
        self._execute(f"CREATE VIEW all_nodes AS {_KNOWN}")
        nodes = self._nodes()
        self._execute(f"CREATE TABLE chosen_nodes AS {nodes}")
        where = []
        if self.chosen.cluster:
            where.append(f"cluster = {literal(self.chosen.cluster)}")
        if self.chosen.partition:
            where.append(_listed("partition", self.chosen.partition))
        if self.chosen.account:
            where.append(f"account = {literal(self.chosen.account)}")
        if self.chosen.model or self.chosen.switch:
            self._execute(
                "CREATE TABLE chosen_keys AS SELECT DISTINCT cluster, db_index FROM job_nodes "
                f"SEMI JOIN (SELECT cluster, node FROM nodes WHERE {self._of_nodes()}) USING (cluster, node)"
            )
            where.append("(cluster, db_index) IN (SELECT (cluster, db_index) FROM chosen_keys)")
        self._execute(f"CREATE VIEW chosen_jobs AS SELECT * FROM jobs{' WHERE ' if where else ''}{' AND '.join(where)}")

    def _of_nodes(self) -> str:
        """The condition on the table nodes of --model and --switch."""
        asked = (("gpu_model", self.chosen.model), ("switch", self.chosen.switch))
        return " AND ".join(f"{column} = {literal(value)}" for column, value in asked if value) or "TRUE"

    def _nodes(self) -> str:
        where = [self._of_nodes()] if self.chosen.model or self.chosen.switch else []
        if self.chosen.cluster:
            where.append(f"cluster = {literal(self.chosen.cluster)}")
        if self.chosen.partition:
            ran = self._ran_on(_listed("partition", self.chosen.partition))
            said = _listed("partitions", self.chosen.partition)
            where.append(f"({said} OR (partitions IS NULL AND (cluster, node) IN ({ran})))")
        if self.chosen.account:
            where.append(f"(cluster, node) IN ({self._ran_on(f'account = {literal(self.chosen.account)}')})")
        return (
            "SELECT cluster, node, gpu_model, gpus, partitions, switch, rack "
            "FROM all_nodes LEFT JOIN nodes USING (cluster, node) "
            f"{'WHERE ' + ' AND '.join(where) if where else ''} ORDER BY cluster, node"
        )

    def _ran_on(self, of_jobs: str) -> str:
        return (
            "SELECT DISTINCT (job_nodes.cluster, job_nodes.node) FROM job_nodes "
            f"SEMI JOIN (SELECT cluster, db_index FROM jobs WHERE {of_jobs}) USING (cluster, db_index)"
        )

    def _there_is(self, key: str, told: str) -> None:
        """Raises WrongChoice if nothing in the store has this name."""
        if key in ("model", "switch"):
            self.must_have("nodes")
        known = {row["name"] for row in self.rows(f"SELECT DISTINCT name FROM ({_NAMES[key]}) WHERE name <> ''")}
        if told not in known:
            near = nearest(told, known)
            hint = near if len(near) < MOST_HINT else f"; {len(known)} others are known"
            raise WrongChoice(f'--{key}: nothing in the store has the {key} "{told}"{hint}')


@contextmanager
def opened(
    files: engine.Files,
    from_time: int,
    to_time: int,
    chosen: Chosen | None = None,
    threads: int = engine.THREADS,
    memory_mib: int = engine.MEMORY_MIB,
) -> Iterator[Study]:
    """Raises StoreError, WrongChoice."""
    with engine.connected(files, threads, memory_mib) as connection:
        yield Study(connection, files, from_time, to_time, chosen)


def tables_of(snapshot: store.Snapshot) -> engine.Files:
    """table -> its files, of a store that is being read."""
    return {table: snapshot.files(table) for table in TABLES}


def _listed(column: str, name: str) -> str:
    """Whether a name is in a list with commas."""
    return f"list_contains(string_split({column}, ','), {literal(name)})"
