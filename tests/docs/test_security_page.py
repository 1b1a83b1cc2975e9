"""Tests of docs/security.md: each promise names an existing test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/security.md").read_text("utf-8")
TEST = re.compile(r"`((?:[a-z0-9_]+/)*test_\w+\.py)(?:::(\w+))?`")


def test_each_named_test_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 20
    missing = [f"{file}::{test}" for file, test in named if test not in names_of_tests(file)]
    assert missing == []


def test_each_promise_names_test() -> None:
    rows = [row for table in promise_rows() for row in table]
    assert len(rows) > 15
    assert [row for row in rows if not TEST.search(row)] == []


def promise_rows() -> list[list[str]]:
    """Return the rows of each table whose last column is "verified by"."""
    tables = re.split(r"\n\n", PAGE)
    return [table.splitlines()[2:] for table in tables if re.match(r"\|.*\| verified by \|\n", table)]


def names_of_tests(file: str) -> set[str]:
    """Return the names of a file's tests, and "" for the file itself."""
    path = ROOT / "tests" / file
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)} | {
        ""
    }
