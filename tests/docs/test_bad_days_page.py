"""Tests of docs/bad-days.md: each day names tests, and each named test exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/bad-days.md").read_text("utf-8")
TESTS = re.compile(r"(?m)^- `(tests/[\w/]+\.py)`: (.*)$")


def names_of_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def sections() -> dict[str, str]:
    """Return heading -> text below it."""
    return dict(re.findall(r"(?ms)^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE))


def test_each_named_test_exists() -> None:
    named = [(path, name) for path, names in TESTS.findall(PAGE) for name in re.findall(r"`(\w+)`", names)]
    assert len(named) > 20
    assert [(path, name) for path, name in named if name not in names_of_tests(path)] == []


def test_each_day_of_table_has_section_with_tests() -> None:
    linked = re.findall(r"(?m)^\| \[[^]]*\]\(#([\w-]+)\)", PAGE)
    section_texts = {heading.lower().replace(" ", "-"): section_text for heading, section_text in sections().items()}
    assert sorted(set(linked)) == sorted(section_texts)
    assert [heading for heading, section_text in section_texts.items() if not TESTS.search(section_text)] == []
