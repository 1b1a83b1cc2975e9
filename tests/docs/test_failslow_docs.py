"""Tests of docs/fail-slow.md: its commands, pictures and training loop produce the content of the page.

The jobs are generated from a fixed seed. `scripts/failslow_figures.py` writes the current output into the page.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("failslow_figures", ROOT / "scripts/failslow_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = script()
PAGE = FIGURES.PAGE.read_text("utf-8")
TERMINALS = FIGURES.CONSOLE.findall(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("figures")
    FIGURES.make_folder(where)
    return where


@pytest.mark.parametrize("terminal", TERMINALS, ids=lambda terminal: terminal.partition("\n")[0][2:60])
def test_a_terminal_on_the_page_shows_what_a_terminal_shows(terminal: str, folder: Path) -> None:
    now = FIGURES.block(FIGURES.commands(terminal), lambda command: FIGURES.printed(command, folder))
    assert now == terminal, "scripts/failslow_figures.py updates the page"
    assert "Traceback" not in now


def test_each_picture_is_on_the_page_and_is_what_is_drawn_now(folder: Path, tmp_path: Path) -> None:
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE) == list(FIGURES.FIGURES)
    FIGURES.draw(folder, tmp_path)
    for name in FIGURES.FIGURES:
        again = (tmp_path / name).read_text("utf-8") == (ROOT / "docs" / name).read_text("utf-8")
        assert again, f"docs/{name}: scripts/failslow_figures.py draws it"


def test_the_files_of_the_page_are_made_by_the_command_that_it_names(folder: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"`python (scripts/failslow_figures\.py --data \.)`", PAGE)
    program, *arguments = shlex.split(command)
    subprocess.run([sys.executable, str(ROOT / program), *arguments], cwd=tmp_path, check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_the_training_loop_on_the_page_writes_what_the_command_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (loop,) = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    monkeypatch.chdir(tmp_path)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        exec(compile(loop, "docs/fail-slow.md", "exec"), {"steps": 30, "train_step": lambda: sum(range(20_000))})
        (tmp_path / f"times-{rank}.csv").rename(ranks / f"times-{rank}.csv")
    said = FIGURES.printed(f"healthd failslow {shlex.quote(str(ranks))} --json", folder)
    assert said.count('"samples": 30') == 2, said
