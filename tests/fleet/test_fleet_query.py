"""Tests of `healthd fleet query`: the command, and the limits of its engine."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from random import Random

import duckdb
import pytest
from fleet_history import BEGIN, END, history
from fleet_rows import NOVEMBER, row, store_with
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.page import Page
from healthd.fleet import engine, queries
from healthd.fleet.lint import FUNCTIONS
from healthd.fleet.queries import InvalidQuery
from healthd.fleet.store import StoreError
from healthd.fleet.table import format_table
from healthd.fleet.tables import TABLES
from tests.cli.test_fleet_command import fleet

pytestmark = pytest.mark.one_python

BUILTIN_QUERIES = queries.builtin_queries()
TIMES = ("--from", "2026-10-30T22:00:00", "--to", "2026-11-03T05:00:00")


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    rows = {
        table: [tuple(values.values()) for values in table_rows]
        for table, table_rows in history(Random(0), 60).items()
        if table_rows
    }
    return store_with(tmp_path_factory.mktemp("fleet") / "db", rows)


def query(*arguments: str | Path) -> tuple[int, str, str]:
    return fleet("query", *arguments)


def test_list_of_queries_needs_no_extra():
    status, out, err = fleet("query", program="import sys\nsys.modules['duckdb'] = None")
    assert (status, err) == (0, "")
    listed = [line.split(" ", 1) for line in out.partition("\n\n")[0].splitlines()]
    assert [name for name, _ in listed] == sorted(BUILTIN_QUERIES)
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("name", sorted(BUILTIN_QUERIES))
def test_table_fits_page(db, name, columns, monkeypatch):
    with engine.open_database(files_of(db), 1, 512) as connection:
        needed = queries.with_dependencies(BUILTIN_QUERIES[name], BUILTIN_QUERIES)
        answer = engine.run_on_connection(
            connection, needed, engine.QueryParameters(BEGIN, END, queries.resolve_parameters(needed, {}))
        )
        lines = format_table(answer.columns, list(answer.rows), Page(columns)).splitlines()
    assert max(map(len, lines)) <= columns
    assert len(lines) > 1


def files_of(db: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(db.glob("*/*/*.parquet")):
        found.setdefault(path.parts[-3], []).append(str(path))
    return found


def test_format_table_states_constant_columns_once_and_names_hidden():
    rows = [("gpu-1", 1793491200, 5, "c1", None, "x" * 60), ("gpu-12", 1793491261, None, "c1", None, "y")]
    assert format_table(("node", "end_time", "jobs", "cluster", "mode", "words"), rows, Page(80)) == (
        "the same in all rows: cluster = c1\n"
        "node    end_time             jobs  words\n"
        f"gpu-1   2026-11-01 00:00:00     5  {'x' * 37}...\n"
        "gpu-12  2026-11-01 00:01:01        y\n"
    )
    names = [f"column_{number}" for number in range(9)]
    text = format_table(names, [range(9), range(1, 10)], Page(80))
    assert re.findall(r"column_\d", text.splitlines()[-1]) == ["column_8"]


@given(st.lists(st.tuples(st.text(), st.integers(), st.floats(), st.booleans(), st.none()), min_size=1))
def test_format_table_shows_any_values_on_one_line_each(rows):
    shown = format_table(("name", "some_time", "share", "told", "mode"), rows, Page(80)).splitlines()
    assert len([line for line in shown if not line.startswith(("the same in all rows", " ")) or line.strip()]) >= 2


def test_text_json_and_csv_have_same_rows(db):
    status, out, err = query("states", "--db", db, *TIMES)
    assert (status, err) == (0, "")
    assert out.startswith(f"{BUILTIN_QUERIES['states'].title}\nfrom 2026-10-30 22:00:00 to 2026-11-03 05:00:00 UTC\n\n")
    document = json.loads(query("states", "--db", db, *TIMES, "--json")[1])
    rows = list(csv.DictReader(io.StringIO(query("states", "--db", db, *TIMES, "--csv")[1])))
    assert {name: document[name] for name in ("question", "engine", "from_time", "to_time", "parameters")} == {
        "question": "states",
        "engine": "duckdb",
        "from_time": BEGIN,
        "to_time": END,
        "parameters": {},
    }
    as_text = [{n: "" if v is None else str(v) for n, v in row.items()} for row in document["rows"]]
    assert as_text == rows
    assert list(rows[0]) == document["columns"]
    assert len(out.splitlines()) == len(rows) + 4


def test_query_without_times_covers_known_period(db):
    document = json.loads(query("runs", "--db", db, "--json", "--param", "gap_seconds=5")[1])
    with engine.open_database(files_of(db)) as connection:
        first_time = connection.execute("SELECT min(submit_time) FROM jobs").fetchone()
    assert document["from_time"] <= first_time[0] < document["to_time"]
    assert document["parameters"] == {"gap_seconds": 5}


def test_empty_result_prints_no_rows(db):
    status, out, _ = query("states", "--db", db, "--from", "2020-01-01", "--to", "2020-01-02", "--threads", "1")
    assert (status, out.splitlines()[-1]) == (0, "no rows")
    document = json.loads(query("states", "--db", db, "--from", "2020-01-01", "--to", "2020-01-02", "--json")[1])
    assert document["rows"] == []


def test_own_query_file_may_use_queries_and_parameters(db, tmp_path):
    own = tmp_path / "own.sql"
    own.write_text(
        "-- How many conditions of a code.\n-- parameters\n--   code VARCHAR = gpu_xid/79  which\n\n"
        "SELECT conditions.code, count(*) AS conditions FROM conditions CROSS JOIN parameters\n"
        "WHERE conditions.code = parameters.code GROUP BY conditions.code -- the end\n"
    )
    status, out, err = query(own, "--db", db, "--csv")
    assert (status, err) == (0, "")
    assert out.startswith("code,conditions\ngpu_xid/79,")
    assert query(own, "--db", db, "--csv", "--param", "code=none")[1] == "code,conditions\n"


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT 1 AS x\nFROM jobs ASOF JOIN events ON 1 = 1", "own.sql:2: ASOF: only DuckDB has ASOF JOIN"),
        ("SELECT epoch(x)::BIGINT FROM jobs", "own.sql:1: ::: use CAST(... AS BIGINT) (and 1 more)"),
        ("SELECT count(*) AS n FROM read_parquet('/etc/x')", "own.sql:1: FROM read_parquet: only named tables can"),
        ("SELECT nothing FROM jobs", 'own.sql: Binder Error: Referenced column "nothing" not found in FROM clause!'),
        (
            "SELECT CAST('x' AS BIGINT) AS x FROM jobs",
            "own.sql: Conversion Error: Could not convert string 'x' to INT64",
        ),
        (
            "-- parameters\n--   x INT = 1\nSELECT 1 AS x FROM jobs",
            "own.sql:2: write a parameter as NAME BIGINT|DOUBLE|VAR",
        ),
        ("-- parameters\n--   x BIGINT = one\nSELECT 1 AS x FROM jobs", 'own.sql:2: x must be a BIGINT, got "one"'),
        ("", "own.sql:1: the file has no SQL"),
        (b"SELECT 1\n\xff", "own.sql:2: is not UTF-8"),
        (b"-" * ((1 << 20) + 1), "own.sql: larger than 1048576 bytes, the limit for a query"),
    ],
)
def test_invalid_query_file_is_reported_with_line(db, tmp_path, sql, message):
    own = tmp_path / "own.sql"
    own.write_bytes(sql if isinstance(sql, bytes) else sql.encode())
    status, out, err = query(own, "--db", db)
    assert (status, out, err.count("\n")) == (64, "", 1)
    assert err.startswith(f"healthd fleet query: {tmp_path}/{message}"), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stats", "--db", "DB"), 'there is no query "stats"; did you mean "states"?'),
        (("states",), "--db DB is required"),
        (("./none.sql", "--db", "DB"), "./none.sql: No such file or directory"),
        (
            ("states", "--db", "DB", "--engine", "sprak"),
            '--engine: must be duckdb, spark or spark://HOST:PORT, got "sprak"',
        ),
        (("states", "--db", "DB", "--param", "x"), '--param: must be NAME=VALUE, got "x"'),
        (("states", "--db", "DB", "--param", "x=1"), "--param x: the query has no such parameter (available: none)"),
        (("runs", "--db", "DB", "--param", "gap_second=1"), '(available: gap_seconds); did you mean "gap_seconds"?'),
        (("runs", "--db", "DB", "--param", "gap_seconds=1d"), '--param: gap_seconds must be a BIGINT, got "1d"'),
        (
            ("states", "--db", "DB", "--from", "2026-01-02", "--to", "2026-01-02"),
            "2026-01-02 00:00:00 (--from) is not before",
        ),
        (("states", "--db", "DB", "--from", "1970-01-01"), "is too long: at most 9999 days"),
        (("states", "--db", "DB", "--threads", "0"), "argument --threads: must be a whole number from 1 to 256"),
    ],
)
def test_invalid_arguments_are_one_sentence(db, arguments, message):
    status, out, err = query(*(str(db) if word == "DB" else word for word in arguments))
    assert (status, out, err.count("\n")) == (64, "", 1)
    assert err.startswith("healthd fleet query: ")
    assert message in err


def test_empty_or_missing_store_is_one_sentence(tmp_path):
    store_with(tmp_path / "db")
    status, out, err = query("states", "--db", tmp_path / "db")
    assert (status, out) == (3, "")
    assert re.fullmatch(f"healthd fleet query: {tmp_path}/db: .*healthd fleet ingest .*\n", err)
    assert query("states", "--db", tmp_path / "none")[0] == 3


ROWS_WITH_TIME = {
    "jobs": {"cluster": "c1", "db_index": 1, "job_id": 1, "submit_time": NOVEMBER},
    "events": {"cluster": "c1", "node": "n", "stream_id": "s", "seq": 1, "time": NOVEMBER, "event": "alive"},
    "node_states": {"cluster": "c1", "node": "n", "start_time": NOVEMBER},
    "reservations": {"cluster": "c1", "name": "r", "node": "n", "start_time": NOVEMBER},
    "preemptions": {"cluster": "c1", "time": NOVEMBER, "job_id": 1},
    "exclusions": {"cluster": "c1", "job_id": 1, "submit_time": NOVEMBER, "node": "n", "source": "squeue"},
    "tickets": {"cluster": "c1", "node": "n", "opened_time": NOVEMBER},
    "failures": {"cluster": "c1", "node": "n", "time": NOVEMBER, "kind": "x"},
    "scraped_conditions": {
        "cluster": "c1",
        "node": "n",
        "code": "gpu_xid/79",
        "subject": "",
        "severity": "critical",
        "first_time": NOVEMBER,
        "last_time": NOVEMBER,
    },
    "ingests": {"cluster": "c1", "source": "sacct", "name": "f", "from_time": NOVEMBER, "to_time": NOVEMBER + 1},
}


def test_every_table_with_times_has_time_columns():
    assert {*ROWS_WITH_TIME} == {*TABLES} - {"nodes", "job_nodes", "gpus"} == {*engine.TIME_COLUMNS}


@pytest.mark.parametrize("name", sorted(ROWS_WITH_TIME))
def test_store_of_one_table_has_period(tmp_path, name):
    db = store_with(tmp_path / "db", {name: [row(name, **ROWS_WITH_TIME[name])]})
    assert engine.covered_period(files_of(db)) == (NOVEMBER, NOVEMBER + 1)


def test_store_without_times_needs_from_and_to(tmp_path):
    db = store_with(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="n")]})
    assert query("observed", "--db", db, *TIMES)[0] == 0
    status, out, err = query("observed", "--db", db, *TIMES[:2])
    assert (status, out) == (3, "")
    assert re.fullmatch(f"healthd fleet query: {db}: .* --from .* --to\n", err)


@pytest.mark.parametrize(
    "wrong_time", [0, 946_684_800, 999_999_999, NOVEMBER + 2 * 86_400, 4_102_444_799], ids=lambda time: f"at {time}"
)
def test_wrong_node_clock_does_not_change_covered_period(tmp_path, wrong_time):
    line = ROWS_WITH_TIME["events"]
    read = {"cluster": "c1", "source": "events", "name": "ev", "read_time": NOVEMBER + 86_399}
    rows = {
        "events": [row("events", **line), row("events", **{**line, "seq": 2, "time": wrong_time})],
        "ingests": [row("ingests", **read)],
    }
    db = store_with(tmp_path / "db", rows)
    assert engine.covered_period(files_of(db)) == (NOVEMBER, NOVEMBER + 1)
    assert query("lines", "--db", db)[0] == 0


def test_future_reservation_does_not_extend_period(tmp_path):
    rows = {
        "reservations": [row("reservations", **{**ROWS_WITH_TIME["reservations"], "end_time": NOVEMBER + 30 * 86_400})],
        "ingests": [row("ingests", cluster="c1", source="reservations", name="r", read_time=NOVEMBER + 5)],
    }
    assert engine.covered_period(files_of(store_with(tmp_path / "db", rows))) == (NOVEMBER, NOVEMBER + 1)


def test_missing_spark_extra_is_one_sentence(db):
    without = "import sys\nsys.modules['pyspark'] = sys.modules['sqlglot'] = None"
    status, out, err = fleet("query", "states", "--db", db, "--engine", "spark", program=without)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert err.endswith(" pip install pyspark sqlglot\n")


# --- limits of the engine


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "COPY numbers TO '{folder}/written.csv'",
        "ATTACH '{folder}/other.duckdb'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM 'https://example.com/x.parquet'",
        "SET enable_external_access = true",
        "SET memory_limit = '1TB'",
    ],
)
def test_engine_refuses_other_files_and_settings(db, tmp_path, sql):
    refused = (duckdb.PermissionException, duckdb.InvalidInputException, duckdb.CatalogException)
    with engine.open_database(files_of(db), 1, 512) as connection:
        assert connection.execute("SELECT count(*) > 0 FROM jobs").fetchone() == (True,)
        with pytest.raises(refused):
            connection.execute(sql.format(folder=tmp_path)).fetchall()
    assert list(tmp_path.iterdir()) == []


def test_engine_loads_no_extension_and_keeps_limits(db):
    with engine.open_database(files_of(db), 1, 512) as connection:
        rows = connection.execute("SELECT name, value FROM duckdb_settings()").fetchall()
    found = dict(rows)
    assert found["autoinstall_known_extensions"] == found["autoload_known_extensions"] == "false"
    assert (found["threads"], found["memory_limit"]) == ("1", "384.0 MiB"), "three quarters of 512 MiB"


def test_large_query_spills_to_disk_and_cleans_up(db, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with engine.open_database(files_of(db), 1, 64) as connection:
        large_query = (
            "SELECT repeat('x', 200) || a.n || b.n AS x FROM numbers AS a JOIN numbers AS b ON b.n < 60 ORDER BY x"
        )
        assert connection.execute(f"SELECT max(length(x)) FROM ({large_query})").fetchone() == (206,)
    assert list(tmp_path.iterdir()) == []


def test_damaged_file_is_named(tmp_path, db):
    files = files_of(db)
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 nothing")
    with (
        pytest.raises(StoreError, match=r"damaged\.parquet: is damaged"),
        engine.open_database({**files, "jobs": [str(tmp_path / "damaged.parquet")]}),
    ):
        pass  # pragma: no cover


def test_circular_query_is_rejected():
    first = queries.parse_query("first", "first.sql", "SELECT x FROM second")
    second = queries.parse_query("second", "second.sql", "SELECT x FROM first")
    with pytest.raises(InvalidQuery, match=r'second\.sql:1: unknown table "first"'):
        queries.with_dependencies(first, {"first": first, "second": second})


# --- docs/fleet.md

PAGE = (Path(__file__).parents[2] / "docs/fleet.md").read_text("utf-8")


def test_page_lists_every_query_and_function():
    assert sorted(re.findall(r"(?m)^\| `([a-z_]+)` \|", PAGE)) == sorted(BUILTIN_QUERIES)
    listed = re.findall(r"- Functions: ([^.]*)\.", " ".join(PAGE.split()))[0].split(", ")
    assert listed == sorted(FUNCTIONS)


def test_own_query_of_page_runs(db, tmp_path):
    (tmp_path / "codes.sql").write_text(re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)[0])
    status, out, err = query(tmp_path / "codes.sql", "--db", db, "--param", "least=degraded")
    assert (status, err) == (0, "")
    assert out.startswith("On how many nodes each code was seen.\n")
    assert "no rows" not in out
