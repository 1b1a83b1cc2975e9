"""Tests of the golden decisions: the output of golden.py equals data/golden_decisions.txt."""

from __future__ import annotations

import difflib

import golden
import pytest
from golden_node import CHECKS

from healthd.agent.settings import registry

MAX_SHOWN_LINES = 40


@pytest.fixture(scope="module")
def recorded() -> str:
    return golden.FILE.read_text("utf-8")


def test_golden_decisions_are_unchanged(recorded: str) -> None:
    old, new = recorded.splitlines(), golden.text().splitlines()
    diff = list(difflib.unified_diff(old, new, "golden_decisions.txt", "this code", n=0, lineterm=""))
    shown_lines = "\n".join(diff[:MAX_SHOWN_LINES])
    assert not diff, (
        f"{len(diff)} lines of difference:\n{shown_lines}\n"
        "If these changes are intended: .venv/bin/python tests/support/golden.py --write"
    )


def test_golden_decisions_have_each_code(recorded: str) -> None:
    explained = recorded.partition("\n== explained codes\n")[2].partition("\n== ")[0]
    assert {line.split()[0] for line in explained.splitlines()} == set(registry.all_codes(CHECKS))


def test_golden_decisions_are_below_400_kb(recorded: str) -> None:
    assert len(recorded) < 400_000
