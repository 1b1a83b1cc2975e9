"""A store that is open for one period and one choice of jobs and nodes: what the answers query.

SQL of an answer reads the store's tables and the questions, both whole, and what was chosen: `chosen_jobs` (with the
class of their size, `gpus_up_to`) and `chosen_nodes`. Expensive tables are computed once, for all answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from healthd.common.codec import nearest
from healthd.fleet import engine, store
from healthd.fleet.answers import causes
from healthd.fleet.answers.document import Document, Unanswerable, WrongChoice, head, moment, percent, share
from healthd.fleet.database import Database, DuckDb
from healthd.fleet.questions import Value, for_answers, needed
from healthd.fleet.statistics.job_sizes import class_of
from healthd.fleet.store import literal
from healthd.fleet.tables import BOOLEAN, TABLES, TEXT

Row = dict[str, Any]
R = TypeVar("R", bound=tuple[Any, ...])

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
# Where the names of a choice are; a list with commas has several.
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
# As long as the store's own table and as wide: of a view only the columns are read that are asked for.
_READ_EACH_TIME = ("lines", "placed_days", "rate_ran")
# Tables that a study has beside the questions, or that an answer gives it.
CHOSEN = ("chosen_jobs", "chosen_nodes", "all_nodes", "codes", "link_codes", "known_times", "unread_times")
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

    def __init__(self, database: Database, from_time: int, to_time: int, chosen: Chosen | None = None) -> None:
        """Raises WrongChoice for a name that nothing in the store has."""
        self.from_time, self.to_time, self.chosen = from_time, to_time, chosen or Chosen()
        self._database = database
        self._questions = for_answers()
        self._made: set[str] = set()
        self._defaults: dict[str, Value] = {}
        for question in self._questions.values():
            self._defaults |= question.parameters
        self._ask({})
        of_node = ((code, causes.of_a_node(code)) for code in causes.codes())
        self.given("codes", {"code": TEXT, "of_node": BOOLEAN}, of_node)
        self._choose()

    # --- what the answers ask

    def ask(self, name: str, row: type[R], **parameters: Value) -> list[R]:
        """Run sql/answers/NAME.sql and return its rows as `row`, a NamedTuple whose fields are the columns in order.

        The tables that the SQL reads are computed before, each once. parameters: of `asked`, by name. Raises StoreError
        for a damaged file.
        """
        self._stand_on(name)
        self._require_known(name, parameters)
        self._ask(parameters)
        try:
            found = self._database.rows(engine.bare(self._questions[name].sql))
        finally:
            self._ask({})
        fields = getattr(row, "_fields", ())
        if found.columns != fields:
            raise TypeError(f"{name}.sql has the columns {found.columns}, {row.__name__} the fields {fields}")
        return [row(*values) for values in found.rows]

    def rows(self, sql: str, *values: Value | None) -> list[Row]:
        """column -> value, in the order of the SQL. Its `?` are the values. Raises StoreError for a damaged file."""
        found = self._database.rows(sql, values)
        return [dict(zip(found.columns, row, strict=True)) for row in found.rows]

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
        self._require_known(question, parameters)
        self._stand_on(question)
        self._ask(parameters)
        try:
            self._make_question(name, question)
        finally:
            self._ask({})

    def make(self, name: str, sql: str) -> None:
        """A table of our own, made once for all answers that name it."""
        if name not in self._made:
            self._database.table(name, sql)
            self._made.add(name)

    def given(self, name: str, columns: Mapping[str, str], rows: Iterable[tuple[Value | None, ...]]) -> None:
        """Make a table of rows that Python has. columns: name -> type. It must have at least one column."""
        listed = ", ".join(f"({', '.join(map(_literal, row))})" for row in rows)
        names = ", ".join(columns)
        typed = ", ".join(f"CAST({column} AS {kind}) AS {column}" for column, kind in columns.items())
        nothing = ", ".join(f"CAST(NULL AS {kind}) AS {column}" for column, kind in columns.items())
        some = f"SELECT {typed} FROM (VALUES {listed}) AS listed({names})"
        self._database.view(name, some if listed else f"SELECT {nothing} WHERE FALSE")

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

    def _ask(self, parameters: dict[str, Value]) -> None:
        """Set the one-row table `asked`: the period, and each question's parameters."""
        columns = engine.Asked(self.from_time, self.to_time, {**self._defaults, **parameters}).columns
        values = ", ".join(f"CAST({_literal(value)} AS {kind}) AS {name}" for name, (kind, value) in columns.items())
        self._database.view("asked", f"SELECT {values}")

    def _require_known(self, question: str, parameters: dict[str, Value]) -> None:
        unknown = set(parameters) - set(self._questions[question].parameters)
        if unknown:
            raise ValueError(f"{question} has no parameter {', '.join(sorted(unknown))}")

    def _stand_on(self, name: str) -> None:
        """Make the questions that this one reads, as tables, since others read them too."""
        for one in needed(self._questions[name], self._questions, CHOSEN)[:-1]:
            if one.name not in self._made:
                self._make_question(one.name, one.name)

    def _make_question(self, name: str, question: str) -> None:
        # A table keeps no order, and to sort the 2.7 million runs of 4 million jobs took a sixth of their time.
        ordered = engine.bare(self._questions[question].sql)
        sql = ordered.rpartition("\nORDER BY ")[0] or ordered
        (self._database.view if question in _READ_EACH_TIME else self._database.table)(name, sql)
        self._made.add(name)

    def _choose(self) -> None:
        for key, name in self.chosen.said.items():
            if name:
                self._there_is(key, name)
        self._database.view("all_nodes", _KNOWN)
        self._database.table("chosen_nodes", self._nodes())
        where = []
        if self.chosen.cluster:
            where.append(f"jobs.cluster = {literal(self.chosen.cluster)}")
        if self.chosen.partition:
            where.append(_listed("jobs.partition", self.chosen.partition))
        if self.chosen.account:
            where.append(f"jobs.account = {literal(self.chosen.account)}")
        if self.chosen.model or self.chosen.switch:
            self._database.table(
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
        self._database.view("chosen_jobs", sql)

    def _of_nodes(self) -> str:
        """Return the condition on the table nodes of --model and --switch."""
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
        """Raises WrongChoice if nothing in the store has this name."""
        if key in ("model", "switch"):
            self.must_have("nodes")
        lists = self.rows(f"SELECT DISTINCT name FROM ({_NAMES[key]}) AS names WHERE name <> ''")
        known = {name for row in lists for name in (row["name"].split(",") if key == "partition" else [row["name"]])}
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
        yield Study(DuckDb(connection, files), from_time, to_time, chosen)


def tables_of(snapshot: store.Snapshot) -> engine.Files:
    """table -> its files, of a store that is being read."""
    return {table: snapshot.files(table) for table in TABLES}


def _ran_there(condition: str) -> str:
    """Return the condition that a job like this ran on a node of all_nodes."""
    return (
        "EXISTS (SELECT 1 FROM job_nodes "
        "JOIN jobs ON jobs.cluster = job_nodes.cluster AND jobs.db_index = job_nodes.db_index "
        f"WHERE job_nodes.cluster = all_nodes.cluster AND job_nodes.node = all_nodes.node AND {condition})"
    )


def _listed(column: str, name: str) -> str:
    """Return the condition that a name is in a list with commas."""
    padded = f"',' || {column} || ','"
    return f"replace({padded}, {literal(f',{name},')}, '') <> {padded}"


def _literal(value: Value | None) -> str:
    if value is None:
        return "NULL"
    return literal(value) if isinstance(value, str) else repr(value)
