"""Tests of docs/fleet-answers.md: its commands produce the output on the page, compared literally.

The store is generated from a history with a fixed seed, so it is the same on every machine.
`scripts/fleet_excerpts.py` writes the current output into the page.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_excerpts", ROOT / "scripts/fleet_excerpts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXCERPTS = script()
PAGE = EXCERPTS.PAGE.read_text("utf-8")
TERMINALS = EXCERPTS.blocks(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("excerpts")
    EXCERPTS.make_store(where)
    return where


@pytest.mark.parametrize("terminal", TERMINALS, ids=lambda terminal: terminal.partition("\n")[0][2:60])
def test_a_terminal_on_the_page_shows_what_a_terminal_shows(terminal: str, folder: Path) -> None:
    now = EXCERPTS.block(EXCERPTS.commands(terminal), lambda command: EXCERPTS.printed(command, folder))
    assert now == terminal, "scripts/fleet_excerpts.py updates the page"


def test_each_terminal_begins_with_a_command_and_no_command_ends_in_a_traceback() -> None:
    assert TERMINALS
    assert [terminal for terminal in TERMINALS if not terminal.startswith("$ healthd fleet ")] == []
    assert "Traceback" not in PAGE


def test_the_page_says_how_its_history_is_made() -> None:
    assert f"bench/make_history.py --out made {' '.join(EXCERPTS.HISTORY)}" in re.sub(r"\\\n\s*", "", PAGE)
