"""Tests of docs/kernel-lines.md, and of how the rules parse the captured lines."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from healthd.agent.kernel_log import parse as kernel_parse

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
HINT = "run scripts/kernel_lines_page.py: a rule, a check or the captured lines changed"
RECOGNISED_SHARE = 0.95  # of the lines of each kind except Xids and SXids


def load_script():
    spec = importlib.util.spec_from_file_location("kernel_lines_page", ROOT / "scripts/kernel_lines_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = load_script()
ROWS = PAGES.captured()
TALLY = PAGES.tally(ROWS)


def outcomes_of(*kinds: str) -> Counter[str]:
    return sum((counts for (kind, _), counts in TALLY.items() if kind in kinds), Counter())


def test_kernel_lines_page_is_current():
    print("\n" + "\n".join(PAGES.table(TALLY)))  # pytest -s shows it
    assert (ROOT / "docs/kernel-lines.md").read_text("utf-8") == PAGES.page(), HINT


@pytest.mark.parametrize("kind", ["xid", "sxid"])
def test_every_xid_and_sxid_from_users_is_parsed(kind):
    wrong_rows = [
        row.id
        for row in ROWS
        if row.kind == kind and row.provenance == "user-paste" and PAGES.outcome(row) not in ("right", "meant")
    ]
    assert wrong_rows == []
    assert outcomes_of(kind)["right"] + outcomes_of(kind)["meant"] == outcomes_of(kind).total()


def test_benign_lines_report_nothing():
    assert [row.id for row in ROWS if row.kind == "benign" and PAGES.outcome(row) != "right"] == []


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in TALLY} - {"xid", "sxid", "benign"}))
def test_lines_of_other_kinds_are_recognised(kind):
    missed = [row.id for row in ROWS if row.kind == kind and PAGES.outcome(row) != "right"]
    assert outcomes_of(kind)["right"] >= RECOGNISED_SHARE * outcomes_of(kind).total(), missed


def test_every_kind_has_section():
    text = PAGES.page()
    assert [rule.kind for rule in kernel_parse.RULES if f"\n### {rule.kind}\n" not in text] == []
