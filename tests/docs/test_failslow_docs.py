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


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("failslow_figures", ROOT / "scripts/failslow_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FIGURES = load_script()
PAGE = FIGURES.PAGE.read_text("utf-8")
TERMINALS = FIGURES.CONSOLE.findall(PAGE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    figures_dir = tmp_path_factory.mktemp("figures")
    FIGURES.make_folder(figures_dir)
    return figures_dir


@pytest.mark.parametrize("terminal", TERMINALS, ids=lambda terminal: terminal.partition("\n")[0][2:60])
def test_console_block_shows_current_output(terminal: str, folder: Path) -> None:
    now = FIGURES.block(FIGURES.commands(terminal), lambda command: FIGURES.command_output(command, folder))
    assert now == terminal, "scripts/failslow_figures.py updates the page"
    assert "Traceback" not in now


def test_each_figure_is_on_page_and_current(folder: Path, tmp_path: Path) -> None:
    assert re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE) == list(FIGURES.FIGURES)
    FIGURES.draw(folder, tmp_path)
    for name in FIGURES.FIGURES:
        is_current = (tmp_path / name).read_text("utf-8") == (ROOT / "docs" / name).read_text("utf-8")
        assert is_current, f"docs/{name}: scripts/failslow_figures.py draws it"


def test_named_command_creates_files_of_page(folder: Path, tmp_path: Path) -> None:
    (command,) = re.findall(r"`python (scripts/failslow_figures\.py --data \.)`", PAGE)
    program, *arguments = shlex.split(command)
    subprocess.run([sys.executable, str(ROOT / program), *arguments], cwd=tmp_path, check=True)
    created = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert created == {path.name: path.read_bytes() for path in folder.glob("*.csv")}


def test_training_loop_writes_files_readable_by_failslow(
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
    output = FIGURES.command_output(f"healthd failslow {shlex.quote(str(ranks))} --json", folder)
    assert output.count('"samples": 30') == 2, output
