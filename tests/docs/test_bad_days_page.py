"""Tests of docs/bad-days.md: each day names tests, and each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/bad-days.md").read_text("utf-8")
TESTS = re.compile(r"(?m)^- `(tests/[\w/]+\.py)`: (.*)$")


def defined_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def sections() -> dict[str, str]:
    """Return heading -> text below it."""
    return dict(re.findall(r"(?ms)^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE))


def test_each_test_that_the_page_names_is_there() -> None:
    named = [(path, name) for path, names in TESTS.findall(PAGE) for name in re.findall(r"`(\w+)`", names)]
    assert len(named) > 20
    assert [(path, name) for path, name in named if name not in defined_in(path)] == []


def test_each_day_of_the_table_has_a_section_with_tests() -> None:
    linked = re.findall(r"(?m)^\| \[[^]]*\]\(#([\w-]+)\)", PAGE)
    told = {heading.lower().replace(" ", "-"): below for heading, below in sections().items()}
    assert sorted(set(linked)) == sorted(told)
    assert [heading for heading, below in told.items() if not TESTS.search(below)] == []
