"""What `make test-spark` compares answers by, and what .ci/run makes of it: without Spark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[1]


def test_a_digest_is_of_the_columns_and_the_rows_in_any_order():
    from spark_engines import differences, digest

    rows = [(1, "a", None, 0.1 + 0.2), (2, "b", True, 1.0)]
    assert digest("abcd", rows) == digest("abcd", [(2, "b", True, 1.0), (1, "a", None, 0.3)])
    for other in ([rows[0]], [*rows, rows[0]], [(1, "a", None, 0.31), rows[1]], [(1, "a", "", 0.3), rows[1]]):
        assert digest("abcd", rows) != digest("abcd", other)
    assert digest("abcd", rows) != digest("abce", rows)
    assert differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == ["b", "c"]


def ci(tmp_path: Path, ends: str) -> tuple[int, str]:
    """The last step of .ci/run in a tree whose other steps do nothing and whose scripts/test_spark.sh `ends`."""
    for folder in (".ci", "scripts", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / ".ci/run").write_text((ROOT / ".ci/run").read_text("utf-8"))
    for name, text in (("scripts/test_spark.sh", ends), ("bin/make", "echo 1 passed")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HEALTHD_SPARK_SECONDS": "1"}
    done = subprocess.run(["bash", str(tmp_path / ".ci/run")], capture_output=True, text=True, timeout=240, env=env)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("ends", "status", "says"),
    [
        ("exit 0", 0, "== spark: done in"),
        ("exit 1", 1, "== spark failed after"),
        ("exit 2", 1, "== spark failed after"),
        ("exit 75", 0, "== spark DID NOT RUN: the reason stands above"),
        ("sleep 30", 0, "== spark DID NOT RUN to its end within 1 s"),
    ],
)
def test_a_change_is_not_taken_for_a_wrong_answer_but_is_without_java(tmp_path, ends, status, says):
    found, out = ci(tmp_path, ends)
    assert found == status, out
    assert says in out


def test_where_spark_is_missing_the_comparison_says_that_it_was_not_made():
    program = (
        "import runpy, sys\nsys.modules['pyspark'] = None\n"
        f"runpy.run_path({str(ROOT / 'tests/spark_engines.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 75, done.stderr
    assert done.stderr.endswith("is not installed here: pip install pyspark sqlglot\n")


def test_ci_says_that_the_thousand_kills_were_not_run(tmp_path: Path) -> None:
    status, said = ci(tmp_path, "exit 0")
    assert status == 0
    assert "make test-long DID NOT RUN" in said
