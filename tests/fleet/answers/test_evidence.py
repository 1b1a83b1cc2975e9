"""Tests of `slowdown_evidence`: conditions in the store that can slow a job."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, HOUR, NODES, History, history, row, write_parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.model import Evidence
from healthd.fleet.answers.evidence import CHECKS, SlowdownEvidence, slowdown_evidence
from healthd.fleet.answers.study import Choice, open_study
from healthd.fleet.tables import TABLES

NOON = BEGIN + 12 * HOUR
ROOT = Path(__file__).parents[3]


def line(seq: int, event: str, time: int, code: str, **more: Any) -> dict[str, Any]:
    columns = {
        "cluster": "c1",
        "node": "gpu-1",
        "boot_id": "b",
        "stream_id": "0" * 16,
        "mono": float(seq),
        "schema_version": 1,
        "condition_id": f"{code}-1",
        "check_name": code.partition("/")[0],
        "code": code,
        "subject": "",
        "severity": "degraded",
        "kind": "level",
        "first_time": NOON,
        "last_time": time,
        "observed": True,
        "history": False,
    }
    return row("events", seq=seq, event=event, time=time, **{**columns, **more})


def store(*events: dict[str, Any], scraped: tuple[dict[str, Any], ...] = ()) -> History:
    made: History = {name: [] for name in TABLES}
    made["events"] = list(events)
    made["scraped_conditions"] = list(scraped)
    return made


def subfolder(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def evidence_of(
    made: History, folder: Path, nodes: tuple[str, ...] = NODES, chosen: Choice | None = None
) -> list[SlowdownEvidence]:
    with open_study(write_parquet(made, folder), BEGIN, END, chosen) as study:
        return slowdown_evidence(study, nodes)


def test_level_lasts_until_cleared(tmp_path: Path) -> None:
    seen = {"observed": False, "message": "GPU 3 runs at 900 MHz for its temperature."}
    made = store(
        line(1, "opened", NOON, "gpu_clocks/slowed", **seen),
        line(2, "cleared", NOON + 900, "gpu_clocks/slowed", cleared_by="pass", observed=False),
    )
    assert evidence_of(made, tmp_path) == [
        SlowdownEvidence("gpu-1", NOON, NOON + 900, "gpu_clocks/slowed", "GPU 3 runs at 900 MHz for its temperature")
    ]


def test_uncleared_level_has_no_end(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "pcie_link/narrow", observed=False, subject="0000:3b:00.0"))
    assert evidence_of(made, tmp_path) == [
        SlowdownEvidence("gpu-1", NOON, None, "pcie_link/narrow", "narrow on 0000:3b:00.0")
    ]


def test_edge_lasts_ten_minutes(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "gpu_xid/63", observed=False, kind="edge", message="Xid 63"))
    assert evidence_of(made, tmp_path) == [SlowdownEvidence("gpu-1", NOON, NOON + 600, "gpu_xid/63", "Xid 63")]


def test_scraped_condition_lasts_until_last_scrape(tmp_path: Path) -> None:
    seen = {"check_name": "ib_errors", "code": "ib_errors/symbols", "subject": "mlx5_0", "severity": "warning"}
    times = {"first_time": NOON, "last_time": NOON + 60, "step_seconds": 60}
    made = store(scraped=(row("scraped_conditions", cluster="c1", node="gpu-1", **seen, **times),))
    assert evidence_of(made, tmp_path) == [
        SlowdownEvidence("gpu-1", NOON, NOON + 60, "ib_errors/symbols", "symbols on mlx5_0")
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"observed": True},
        {"history": True},
        {"severity": "info"},
        {"code": "disk_space/full", "check_name": "disk_space"},
    ],
    ids=["observed", "before healthd started", "info", "slows nothing"],
)
def test_irrelevant_condition_is_no_evidence(tmp_path: Path, more: dict[str, Any]) -> None:
    made = store(line(1, "opened", NOON, **{"code": "gpu_clocks/slowed", "observed": False, **more}))
    assert evidence_of(made, tmp_path) == []


def test_evidence_is_limited_to_nodes_and_cluster(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "gpu_clocks/slowed", observed=False))
    made["nodes"] = [row("nodes", cluster="c2", node="gpu-2")]
    assert evidence_of(made, subfolder(tmp_path, "other"), ("gpu-2",)) == []
    assert evidence_of(made, subfolder(tmp_path, "cluster"), chosen=Choice(cluster="c2")) == []
    assert len(evidence_of(made, subfolder(tmp_path, "all"), chosen=Choice(cluster="c1"))) == 1


def test_evidence_checks_exist() -> None:
    existing = {path.stem for path in (ROOT / "checks").glob("*.py")} | {"nvlink5"}
    assert set(CHECKS) <= existing


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_evidence_of_any_history_is_valid(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    for entry in evidence_of(history(Random(seed)), tmp_path_factory.mktemp("store")):
        found = Evidence(*entry)
        assert found.node in NODES
        assert found.end is None or found.begin <= found.end
        assert found.text.isprintable()
        assert found.text
