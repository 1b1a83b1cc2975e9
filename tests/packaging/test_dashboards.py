"""Tests of the dashboards in packaging/grafana without a Prometheus (e2e/test_board.py has one)."""

from __future__ import annotations

import json
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import dashboards  # noqa: E402

FILES = sorted((ROOT / "packaging/grafana").glob("*.json"))
BOARDS = {path.name: json.loads(path.read_text("utf-8")) for path in FILES}
pytestmark = pytest.mark.one_python


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = BOARDS[name]["panels"]
    return found


def test_dashboards_are_current() -> None:
    assert {path.name: path.read_text("utf-8") for path in FILES} == dashboards.boards(), "python scripts/dashboards.py"


@pytest.mark.parametrize("name", BOARDS)
def test_panels_do_not_overlap_and_fit_board(name: str) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        position = panel["gridPos"]
        return {(position["x"] + x, position["y"] + y) for x in range(position["w"]) for y in range(position["h"])}

    assert all(x < dashboards.WIDTH for panel in panels(name) for x, _ in cells(panel))
    assert all(cells(first).isdisjoint(cells(second)) for first, second in combinations(panels(name), 2))
    assert len({panel["id"] for panel in panels(name)}) == len(panels(name))


@pytest.mark.parametrize("name", BOARDS)
def test_each_panel_has_description_and_uses_variables(name: str) -> None:
    variables = {variable["name"] for variable in BOARDS[name]["templating"]["list"]}
    for panel in panels(name):
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'cluster=~"$cluster", job=~"$job"' in target["expr"], panel["title"]
            assert " on (job" not in target["expr"], "two clusters can have nodes of the same name"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables


def test_each_metric_of_dashboards_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    documented = set(re.findall(r"\| `(healthd_\w+)`", text))
    assert len(documented) > 50
    for name in BOARDS:
        for panel in panels(name):
            for target in panel["targets"]:
                used = set(re.findall(r"healthd_\w+", target["expr"]))
                assert used <= documented, panel["title"]
