"""What `make test-spark` compares answers by, and what `make test-all` makes of it: without Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def test_a_digest_is_of_the_columns_and_the_rows_in_any_order():
    from spark_engines import differences, digest

    rows = [(1, "a", None, 0.1 + 0.2), (2, "b", True, 1.0)]
    assert digest("abcd", rows) == digest("abcd", [(2, "b", True, 1.0), (1, "a", None, 0.3)])
    for other in ([rows[0]], [*rows, rows[0]], [(1, "a", None, 0.31), rows[1]], [(1, "a", "", 0.3), rows[1]]):
        assert digest("abcd", rows) != digest("abcd", other)
    assert digest("abcd", rows) != digest("abce", rows)
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]


def within(tmp_path: Path, ends: str) -> tuple[int, str]:
    """test_spark_within.sh, and what it prints, where the comparison ends so."""
    (tmp_path / "scripts").mkdir()
    for name, text in (
        ("test_spark_within.sh", (ROOT / "scripts/test_spark_within.sh").read_text("utf-8")),
        ("test_spark.sh", f"#!/bin/sh\n{ends}\n"),
    ):
        (tmp_path / "scripts" / name).write_text(text)
        (tmp_path / "scripts" / name).chmod(0o755)
    program = [str(tmp_path / "scripts/test_spark_within.sh"), "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("exit 0", 0, ""),
        ("exit 1", 1, ""),
        ("exit 2", 1, ""),
        ("exit 75", 0, "spark DID NOT RUN: the reason stands above"),
        ("sleep 30", 0, "spark DID NOT RUN to its end within 1 s"),
    ],
)
def test_a_change_is_not_taken_for_a_wrong_answer_but_is_without_java(tmp_path, ends, status, says):
    found, out = within(tmp_path, ends)
    assert found == status, out
    assert says in out


def test_where_spark_is_missing_the_comparison_says_that_it_was_not_made():
    program = (
        "import runpy, sys\nsys.modules['pyspark'] = None\n"
        f"runpy.run_path({str(ROOT / 'tests/support/spark_engines.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 75, done.stderr
    assert done.stderr.endswith("is not installed here: pip install pyspark sqlglot\n")
