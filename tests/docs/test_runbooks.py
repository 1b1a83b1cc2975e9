"""Tests of docs/runbooks: generated from the texts of `healthd explain`, with the anchors that alert rules use."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from healthd.agent.reporting import explanation
from healthd.agent.settings import registry

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
HINT = "run scripts/runbooks.py"
CHECKS = registry.built_in_checks()
HEADINGS = {
    "healthd-is-down",
    "rounds-are-stale",
    "the-kernel-log-is-not-read",
    "slurm-is-in-trouble",
    "a-drain-is-wanted-and-held-back",
    "the-fleet-limit-is-reached",
    "drained-for-a-day",
    "unknown-for-an-hour",
    "a-forgotten-ack",
    "a-forgotten-pause",
    "still-in-observe",
}


def load_script():
    spec = importlib.util.spec_from_file_location("runbooks", ROOT / "scripts/runbooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
PAGES = SCRIPT.pages(CHECKS)


def anchors(text: str) -> list[str]:
    """Return GitHub's anchors of the headings: lower case, with only letters, digits, hyphens, underscores and
    blanks."""
    return [
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"(?m)^#+ (.*)$", text)
    ]


def test_runbooks_are_current():
    pages = {path.name: path.read_text("utf-8") for path in (ROOT / "docs/runbooks").glob("*.md")}
    index = pages.pop("README.md")
    assert pages == PAGES, HINT
    assert index == SCRIPT.readme(CHECKS, index), HINT


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_code_has_anchor_for_alerts(name):
    found = anchors(PAGES[f"{name}.md"])
    assert len(found) == len(set(found))
    for code in [*CHECKS[name].codes(), f"{name}/others"]:
        assert explanation.runbook(CHECKS[name], code) == f"docs/runbooks/{name}.md#{code.replace('/', '')}"
        assert code.replace("/", "") in found


def test_index_has_headings_for_problems_of_healthd():
    assert HEADINGS - set(anchors((ROOT / "docs/runbooks/README.md").read_text("utf-8"))) == set()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_runbook_has_all_texts_of_explain(name):
    text = SCRIPT._text
    for code in CHECKS[name].codes():
        explain = CHECKS[name].explain(code)
        todo = explain.todo.replace("repaired CODE ", f"repaired {code} ")
        for text_part in (explain.meaning, explain.matters, todo):
            assert text(text_part) in PAGES[f"{name}.md"], code
