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
AGAIN = "run scripts/runbooks.py"
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


def script():
    spec = importlib.util.spec_from_file_location("runbooks", ROOT / "scripts/runbooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = script()
PAGES = SCRIPT.pages(CHECKS)


def anchors(text: str) -> list[str]:
    """Return GitHub's anchors of the headings: lower case, with only letters, digits, hyphens, underscores and
    blanks."""
    return [
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"(?m)^#+ (.*)$", text)
    ]


def test_the_pages_are_what_the_checks_say():
    there = {path.name: path.read_text("utf-8") for path in (ROOT / "docs/runbooks").glob("*.md")}
    index = there.pop("README.md")
    assert there == PAGES, AGAIN
    assert index == SCRIPT.readme(CHECKS, index), AGAIN


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_every_code_has_its_place_where_alerts_look_for_it(name):
    found = anchors(PAGES[f"{name}.md"])
    assert len(found) == len(set(found))
    for code in [*CHECKS[name].codes(), f"{name}/others"]:
        assert explanation.runbook(CHECKS[name], code) == f"docs/runbooks/{name}.md#{code.replace('/', '')}"
        assert code.replace("/", "") in found


def test_what_is_healthds_own_trouble_has_its_place():
    assert HEADINGS - set(anchors((ROOT / "docs/runbooks/README.md").read_text("utf-8"))) == set()


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_page_says_all_that_explain_says(name):
    text = SCRIPT._text
    for code in CHECKS[name].codes():
        explain = CHECKS[name].explain(code)
        todo = explain.todo.replace("repaired CODE ", f"repaired {code} ")
        for words in (explain.meaning, explain.matters, todo):
            assert text(words) in PAGES[f"{name}.md"], code
