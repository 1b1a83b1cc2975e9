"""Tests of how `make test-spark` compares answers and how `make test-all` runs it, without Spark."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def test_digest_depends_on_columns_and_rows_but_not_on_order():
    from spark_engines import differences, digest

    rows = [(1, "a", None, 0.1 + 0.2), (2, "b", True, 1.0)]
    assert digest("abcd", rows) == digest("abcd", [(2, "b", True, 1.0), (1, "a", None, 0.3)])
    for different in ([rows[0]], [*rows, rows[0]], [(1, "a", None, 0.31), rows[1]], [(1, "a", "", 0.3), rows[1]]):
        assert digest("abcd", rows) != digest("abcd", different)
    assert digest("abcd", rows) != digest("abce", rows)
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]


def test_every_answer_of_store_is_compared():
    from spark_engines import ANSWERS, COMPARE

    from healthd.cli.fleet.answers import COMMANDS
    from healthd.fleet import report

    parts = {part.name for part in report.report_chapters(compared=("A B", dict))}
    commands = {command.removeprefix("fleet ") for command in COMMANDS}
    additional = {"slowing", "report"}  # the evidence for `healthd failslow`, and the sources of the report
    assert {*ANSWERS, COMPARE} == (parts | commands | additional) - {"nccl"}  # reads no store


def test_every_query_of_answers_has_rows_to_compare(tmp_path):
    from spark_engines import CHOSEN, COMPARE, compute_all, duckdb_of, queries_without_rows, stores

    _, (_, files) = stores(tmp_path)
    results = [compute_all(partial(duckdb_of, files), chosen) for chosen in (None, CHOSEN)]
    assert queries_without_rows(results) == []
    assert "completed_checks" in queries_without_rows(results[:0])
    assert f"answer {COMPARE}" in results[0].digests
    for result in results:
        answers = {name: value for name, value in result.digests.items() if name.startswith("answer ")}
        assert [name for name, value in answers.items() if not re.fullmatch("[0-9a-f]{12}", value)] == []


def run_within(tmp_path: Path, comparison: str) -> tuple[int, str]:
    """Run test_spark_within.sh with this comparison. Return its exit status and output."""
    (tmp_path / "scripts").mkdir()
    for name, text in (
        ("test_spark_within.sh", (ROOT / "scripts/test_spark_within.sh").read_text("utf-8")),
        ("test_spark.sh", f"#!/bin/sh\n{comparison}\n"),
    ):
        (tmp_path / "scripts" / name).write_text(text)
        (tmp_path / "scripts" / name).chmod(0o755)
    program = [str(tmp_path / "scripts/test_spark_within.sh"), "1"]
    result = subprocess.run(program, capture_output=True, text=True, timeout=240)
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("comparison", "status", "message"),
    [
        ("exit 0", 0, ""),
        ("exit 1", 1, ""),
        ("exit 2", 1, ""),
        ("exit 75", 0, "spark DID NOT RUN: see the reason above"),
        ("sleep 30", 0, "spark DID NOT FINISH within 1 s"),
    ],
)
def test_spark_within_fails_only_for_differences(tmp_path, comparison, status, message):
    exit_status, out = run_within(tmp_path, comparison)
    assert exit_status == status, out
    assert message in out


def test_comparison_without_pyspark_exits_75():
    program = (
        "import runpy, sys\nsys.modules['pyspark'] = None\n"
        f"runpy.run_path({str(ROOT / 'tests/support/spark_engines.py')!r}, run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert result.returncode == 75, result.stderr
    assert result.stderr.endswith("is not installed here; run pip install pyspark sqlglot\n")
