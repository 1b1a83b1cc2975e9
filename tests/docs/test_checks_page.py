"""Tests of docs/checks.md, the number of checks in README.md and the list in docs/peers.md against the checks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from healthd.agent.settings import registry

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/checks_page.py"
CHECKS = registry.built_in_checks()


def load_script():
    spec = importlib.util.spec_from_file_location("checks_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = load_script()
HINT = "run scripts/checks_page.py: a check or the sample settings changed"


def test_checks_page_is_current():
    assert (ROOT / "docs/checks.md").read_text("utf-8") == PAGES.page(CHECKS), HINT


def test_readme_has_number_of_checks():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(PAGES.COUNT.findall(text)) == 1
    assert text == PAGES.readme(CHECKS, text), HINT
    assert f"\n{len(CHECKS)} checks; " in text


def test_peers_page_lists_missing_checks():
    text = (ROOT / "docs/peers.md").read_text("utf-8")
    assert PAGES.UNLISTED.search(text)
    assert text == PAGES.peers(CHECKS, text), HINT
    with_new_checks = PAGES.peers({**CHECKS, "fan": CHECKS["cpu"], "lid": CHECKS["cpu"]}, text)
    assert re.search(r"\nChecks that no table below lists yet: .*`fan`, `lid`\.\n", with_new_checks)
    assert PAGES.peers(CHECKS, with_new_checks) == text


def test_every_check_has_heading():
    assert sorted(name for names in PAGES.groups().values() for name in names) == sorted(CHECKS)


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_code_of_check_has_row(name):
    section = PAGES.page(CHECKS).partition(f"### {name}\n")[2].partition("\n##")[0]
    assert [code for code in CHECKS[name].codes() if f"| `{code}` |" not in section] == []
