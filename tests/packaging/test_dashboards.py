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


def test_the_files_are_what_the_script_writes() -> None:
    assert {path.name: path.read_text("utf-8") for path in FILES} == dashboards.boards(), "python scripts/dashboards.py"


@pytest.mark.parametrize("name", BOARDS)
def test_no_panel_lies_on_another_or_beside_the_board(name: str) -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        return {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}

    assert all(x < dashboards.WIDTH for panel in panels(name) for x, _ in cells(panel))
    assert all(cells(one).isdisjoint(cells(other)) for one, other in combinations(panels(name), 2))
    assert len({panel["id"] for panel in panels(name)}) == len(panels(name))


@pytest.mark.parametrize("name", BOARDS)
def test_each_panel_says_what_it_shows_and_asks_the_chosen_prometheus_for_the_chosen_jobs(name: str) -> None:
    variables = {variable["name"] for variable in BOARDS[name]["templating"]["list"]}
    for panel in panels(name):
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert 'cluster=~"$cluster", job=~"$job"' in target["expr"], panel["title"]
            assert " on (job" not in target["expr"], "two clusters can have nodes of the same name"
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables


def test_each_metric_of_a_board_is_in_the_reference() -> None:
    text = (ROOT / "docs/metrics.md").read_text("utf-8")
    known = set(re.findall(r"\| `(healthd_\w+)`", text))
    assert len(known) > 50
    for name in BOARDS:
        for panel in panels(name):
            for target in panel["targets"]:
                asked = set(re.findall(r"healthd_\w+", target["expr"]))
                assert asked <= known, panel["title"]
