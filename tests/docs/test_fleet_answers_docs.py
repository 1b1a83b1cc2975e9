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


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_excerpts", ROOT / "scripts/fleet_excerpts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXCERPTS = load_script()
PAGE = EXCERPTS.PAGE.read_text("utf-8")
TERMINALS = EXCERPTS.blocks(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    excerpts_dir = tmp_path_factory.mktemp("excerpts")
    EXCERPTS.make_store(excerpts_dir)
    return excerpts_dir


@pytest.mark.parametrize("terminal", TERMINALS, ids=lambda terminal: terminal.partition("\n")[0][2:60])
def test_console_block_shows_current_output(terminal: str, folder: Path) -> None:
    now = EXCERPTS.block(EXCERPTS.commands(terminal), lambda command: EXCERPTS.command_output(command, folder))
    assert now == terminal, "scripts/fleet_excerpts.py updates the page"


def test_each_console_block_starts_with_fleet_command() -> None:
    assert TERMINALS
    assert [terminal for terminal in TERMINALS if not terminal.startswith("$ healthd fleet ")] == []
    assert "Traceback" not in PAGE


def test_page_names_command_for_its_history() -> None:
    assert f"bench/make_history.py --out made {' '.join(EXCERPTS.HISTORY)}" in re.sub(r"\\\n\s*", "", PAGE)
