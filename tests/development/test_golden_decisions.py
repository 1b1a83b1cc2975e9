"""Tests of the golden decisions: the output of golden.py equals data/golden_decisions.txt."""

from __future__ import annotations

import difflib

import golden
import pytest
from golden_node import CHECKS

from healthd.agent.settings import registry

MOST_LINES = 40


@pytest.fixture(scope="module")
def kept() -> str:
    return golden.FILE.read_text("utf-8")


def test_golden_decisions_are_unchanged(kept: str) -> None:
    before, now = kept.splitlines(), golden.text().splitlines()
    diff = list(difflib.unified_diff(before, now, "golden_decisions.txt", "this code", n=0, lineterm=""))
    shown = "\n".join(diff[:MOST_LINES])
    assert not diff, (
        f"{len(diff)} lines of difference:\n{shown}\n"
        "If these changes are intended: .venv/bin/python tests/support/golden.py --write"
    )


def test_golden_decisions_have_each_code(kept: str) -> None:
    explained = kept.partition("\n== explained codes\n")[2].partition("\n== ")[0]
    assert {line.split()[0] for line in explained.splitlines()} == set(registry.all_codes(CHECKS))


def test_golden_decisions_stay_readable(kept: str) -> None:
    assert len(kept) < 400_000
