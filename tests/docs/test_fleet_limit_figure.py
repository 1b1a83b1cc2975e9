"""Tests of the picture of a bad day in docs/fleet-limit.md."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
FIGURE = ROOT / "docs/fleet-limit.svg"
# .venv has matplotlib (scripts/setup.sh); the other Pythons skip the drawing.
CAN_DRAW = importlib.util.find_spec("matplotlib") is not None or Path(sys.prefix) == ROOT / ".venv"


def words(figure: Path) -> set[str]:
    return {"".join(element.itertext()) for element in xml.parse(figure).iter() if element.tag.endswith("}text")}


def test_figure_has_text_and_panels_of_first_table_rows() -> None:
    table = (ROOT / "docs/fleet-limit.md").read_text().partition("<!-- modelled: make simulate -->")[2]
    rows = re.findall(r"^\| ([^|]+?) \| 10,000 ", table, re.MULTILINE)
    assert set(rows[:4]) <= words(FIGURE)
    assert {"drained nodes", "limit for shared causes: 1,000", "GPUs are lost"} <= words(FIGURE)


@pytest.mark.skipif(not CAN_DRAW, reason="matplotlib is not installed")
def test_figure_is_reproducible_and_labels_limit(tmp_path: Path) -> None:
    drawn = [tmp_path / "first.svg", tmp_path / "second.svg"]
    for path in drawn:
        command = [sys.executable, "scripts/fleet_limit_figure.py", "--nodes", "300", "--to", str(path)]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert (result.returncode, result.stdout) == (0, f"{path}: written\n"), result.stdout + result.stderr
    assert drawn[0].read_bytes() == drawn[1].read_bytes()
    assert "limit for shared causes: 30" in words(drawn[0])
