"""What conftest.py says of all tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

TESTS = Path(__file__).parent


def suppressing(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "suppress_health_check":
            yield ast.unparse(node.value)


def test_no_test_turns_on_again_what_the_profile_has_turned_off() -> None:
    texts = [path.read_text("utf-8") for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    lists = [found for text in texts if "suppress_health_check" in text for found in suppressing(text)]
    assert lists
    assert [found for found in lists if not found.startswith("also(")] == []
