"""Tests of the SQL lint: it rejects constructs that the engines treat differently or that do not scale."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet import lint

TABLES = ("jobs", "events", "nodes")
KNOWN_TABLES = (*TABLES, "parameters", "numbers")


def first_error(sql: str) -> str:
    """Return the first error, or "" without one."""
    found = lint.find_errors(sql, KNOWN_TABLES)
    return f"{found[0].line}: {found[0].reason}" if found else ""


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT state, count(*) FILTER (WHERE gpus > 8) AS large FROM jobs GROUP BY state ORDER BY state;",
        "-- a comment with epoch( and ASOF in it\nSELECT 'epoch(1); ASOF JOIN, x::y' AS words FROM jobs",
        "WITH a(n) AS (SELECT gpus FROM jobs), b AS (SELECT 1 AS n) SELECT a.n FROM a JOIN b ON b.n = a.n",
        "SELECT a.x FROM (SELECT time - time % 3600 AS x FROM events) AS a",
        "SELECT jobs.gpus / nullif(jobs.nodes, 0), gpus / 8, 1.5e0 FROM jobs CROSS JOIN parameters CROSS JOIN numbers",
        "SELECT 1 AS one FROM jobs JOIN events USING (cluster)",
        "SELECT lag(time) OVER (PARTITION BY node ORDER BY seq ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) FROM events",
        "SELECT jobs.state FROM jobs WHERE jobs.state IS NOT DISTINCT FROM 'FAILED' AND jobs.gpus IN (1, 2)",
        "SELECT jobs.state FROM jobs WHERE EXISTS (SELECT 1 AS one FROM nodes WHERE nodes.cluster = jobs.cluster)",
        "SELECT DISTINCT cluster FROM jobs UNION ALL SELECT CAST(NULL AS VARCHAR) FROM nodes",
        "SELECT e.code FROM jobs AS j JOIN events AS e ON e.time_bin = j.time_bin AND e.time BETWEEN j.a AND j.b",
        "SELECT b.x FROM jobs AS a LEFT JOIN jobs AS b ON b.job_id = a.job_id AND b.start >= a.y WHERE a.x > 1",
    ],
)
def test_plain_sql_is_accepted(sql):
    assert first_error(sql) == ""


@pytest.mark.parametrize(
    ("sql", "line", "message"),
    [
        ("SELECT epoch(x) FROM jobs", 1, "epoch() differs in Spark"),
        ("SELECT x\nFROM jobs\nASOF JOIN events ON events.node = jobs.node", 3, "ASOF: only DuckDB has ASOF JOIN"),
        ("SELECT *\nFROM jobs PIVOT (count(*) FOR state IN ('A'))", 2, "PIVOT: use count(*) FILTER"),
        ("SELECT time_bucket(1, x) FROM jobs", 1, "time_bucket(): use time - time % 3600"),
        ("SELECT x FROM read_parquet('a.parquet')", 1, "FROM read_parquet: only named tables can be read"),
        ("SELECT x FROM 'a.parquet'", 1, "FROM 'a.parquet': only named tables can be read"),
        ('SELECT x FROM "a.parquet"', 1, "write names without quotes"),
        ("SELECT x FROM jobs\nJOIN LATERAL (SELECT 1) ON 1 = 1", 2, "LATERAL: use a JOIN"),
        ("SELECT x FROM jobs, nodes", 1, "a comma between tables"),
        ("SELECT x FROM jobs, unnest(jobs.list)", 1, "a comma between tables"),
        ("SELECT unnest(jobs) FROM jobs", 1, "unnest(): join `numbers`"),
        ("SELECT x FROM range(3)", 1, "only named tables can be read"),
        (
            "SELECT x FROM jobs JOIN generate_series(1, 2) ON 1 = 1",
            1,
            "JOIN generate_series: only named tables can be read",
        ),
        ("SELECT x FROM information_schema.tables", 1, "only named tables can be read"),
        ("SELECT x FROM job", 1, 'unknown table "job"; available: events, jobs, nodes, numbers, parameters'),
        ("SELECT x::BIGINT FROM jobs", 1, "::: use CAST"),
        ("SELECT x // 2 FROM jobs", 1, "//: whole numbers"),
        ("SELECT x -> 'a' FROM events", 1, "->: JSON and lambda functions"),
        ("SELECT list[1] FROM jobs", 1, "[: not supported by both engines"),
        ("SELECT x / y FROM jobs", 1, "/: if the divisor is 0"),
        ("SELECT x % y FROM jobs", 1, "%: if the divisor is 0"),
        ("SELECT x / 0 FROM jobs", 1, "/: if the divisor is 0"),
        ("SELECT CAST(x AS TIMESTAMP) FROM jobs", 1, "CAST: the types are BIGINT, BOOLEAN, DOUBLE, VARCHAR"),
        ("SELECT x + INTERVAL 1 DAY FROM jobs", 1, "INTERVAL: times are whole seconds"),
        ("SELECT x * 1.5 FROM jobs", 1, "1.5: a DECIMAL, which the engines round differently: use 1.5e0"),
        ("SELECT round(x) FROM jobs", 1, "round(): the engines round halves"),
        ("SELECT strftime(x) FROM jobs", 1, "strftime(): the allowed functions are abs, avg"),
        ("SELECT DISTINCT ON (a) a FROM jobs", 1, "Spark has no DISTINCT ON"),
        ("SELECT a FROM jobs GROUP BY ALL", 1, "ALL: name the columns"),
        ("SELECT * EXCLUDE (a) FROM jobs", 1, "EXCLUDE: name the columns"),
        ("SELECT a FROM jobs QUALIFY row_number() OVER () = 1", 1, "QUALIFY: filter in an outer SELECT"),
        ("WITH RECURSIVE t AS (SELECT 1 AS a) SELECT a FROM t", 1, "RECURSIVE: join `numbers`"),
        ("SELECT a FROM jobs TABLESAMPLE 10", 1, "TABLESAMPLE: a random sample"),
        ("SELECT '\\n' FROM jobs", 1, "a backslash in a text"),
        ("SELECT a /* b */ FROM jobs", 1, "/*: comments begin with --"),
        ("SELECT 1;\nDROP TABLE jobs", 2, "there is text after it"),
        ("DELETE FROM jobs", 1, "a query is one SELECT"),
        ("COPY jobs TO 'x'", 1, "a query is one SELECT"),
        ("", 1, "the file has no SQL"),
        ("-- nothing\n", 1, "the file has no SQL"),
        ("SELECT (a FROM jobs", 1, "the brackets do not match"),
        ("SELECT a) FROM jobs", 1, "the brackets do not match"),
        ("SELECT 'a FROM jobs", 1, "': not supported by both engines"),
        ("SELECT a FROM jobs CROSS JOIN nodes", 1, "CROSS JOIN is allowed only for parameters and numbers"),
        ("SELECT a FROM jobs JOIN nodes WHERE jobs.a = nodes.a", 1, "JOIN: the condition is missing"),
        ("SELECT a FROM jobs JOIN nodes", 1, "JOIN: the condition is missing"),
        ("SELECT a FROM jobs JOIN nodes ON 1 = 1", 1, "JOIN: needs two equal columns"),
        ("SELECT a FROM jobs JOIN nodes ON jobs.a = jobs.b", 1, "JOIN: needs two equal columns"),
        ("SELECT a FROM jobs\nJOIN events ON events.node = jobs.node AND events.time < jobs.time", 2, "time bins"),
        (
            "SELECT a FROM jobs JOIN events ON events.node = jobs.node AND events.time BETWEEN 1 AND 2",
            1,
            "time bins",
        ),
    ],
)
def test_engine_specific_sql_is_rejected_with_line(sql, line, message):
    found = lint.find_errors(sql, KNOWN_TABLES)
    assert any(refusal.line == line and message in f"{refusal.reason}" for refusal in found), found


def test_table_names_excludes_own_ctes():
    sql = "WITH a AS (SELECT 1 AS x FROM jobs) SELECT a.x FROM a JOIN (SELECT x FROM sights) AS s ON s.x = a.x"
    assert lint.table_names(sql) == {"jobs", "sights"}


@given(st.text(alphabet="SELECTFROMJOIN()'\"--;,.*/%:[]{}\\\n =<>x1 é\x00", max_size=60))
def test_any_text_is_accepted_or_rejected(text):
    assert all(1 <= refusal.line <= text.count("\n") + 1 for refusal in lint.find_errors(text, KNOWN_TABLES))
    lint.table_names(text)


@given(
    st.lists(
        st.sampled_from(
            [
                "SELECT",
                "FROM",
                "JOIN",
                "ON",
                "WITH",
                "AS",
                "(",
                ")",
                ",",
                "jobs",
                "a",
                ".",
                "x",
                "=",
                "<",
                "CAST",
                "BIGINT",
                "UNION",
                "ALL",
            ]
        ),
        max_size=20,
    )
)
def test_any_words_are_accepted_or_rejected(tokens):
    lint.find_errors("\n".join(tokens), KNOWN_TABLES)
    lint.table_names(" ".join(tokens))
