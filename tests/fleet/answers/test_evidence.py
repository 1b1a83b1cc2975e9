"""Tests of `slowdown_evidence`: conditions in the store that can slow a job."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, END, HOUR, NODES, History, history, row, write
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.model import Evidence
from healthd.fleet.answers.evidence import CHECKS, SlowdownEvidence, slowdown_evidence
from healthd.fleet.answers.study import Choice, open_study
from healthd.fleet.tables import TABLES

NOON = BEGIN + 12 * HOUR
ROOT = Path(__file__).parents[3]


def line(seq: int, event: str, time: int, code: str, **more: Any) -> dict[str, Any]:
    about = {
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
    return row("events", seq=seq, event=event, time=time, **{**about, **more})


def store(*events: dict[str, Any], scraped: tuple[dict[str, Any], ...] = ()) -> History:
    made: History = {name: [] for name in TABLES}
    made["events"] = list(events)
    made["scraped_conditions"] = list(scraped)
    return made


def below(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def told(
    made: History, folder: Path, nodes: tuple[str, ...] = NODES, chosen: Choice | None = None
) -> list[SlowdownEvidence]:
    with open_study(write(made, folder), BEGIN, END, chosen) as study:
        return slowdown_evidence(study, nodes)


def test_a_level_lasts_until_it_was_cleared(tmp_path: Path) -> None:
    seen = {"observed": False, "message": "GPU 3 runs at 900 MHz for its temperature."}
    made = store(
        line(1, "opened", NOON, "gpu_clocks/slowed", **seen),
        line(2, "cleared", NOON + 900, "gpu_clocks/slowed", cleared_by="pass", observed=False),
    )
    assert told(made, tmp_path) == [
        SlowdownEvidence("gpu-1", NOON, NOON + 900, "gpu_clocks/slowed", "GPU 3 runs at 900 MHz for its temperature")
    ]


def test_a_level_that_was_not_cleared_stands(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "pcie_link/narrow", observed=False, subject="0000:3b:00.0"))
    assert told(made, tmp_path) == [SlowdownEvidence("gpu-1", NOON, None, "pcie_link/narrow", "narrow of 0000:3b:00.0")]


def test_what_happened_at_a_moment_counts_ten_minutes(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "gpu_xid/63", observed=False, kind="edge", message="Xid 63"))
    assert told(made, tmp_path) == [SlowdownEvidence("gpu-1", NOON, NOON + 600, "gpu_xid/63", "Xid 63")]


def test_what_was_scraped_was_seen_until_then(tmp_path: Path) -> None:
    seen = {"check_name": "ib_errors", "code": "ib_errors/symbols", "subject": "mlx5_0", "severity": "warning"}
    times = {"first_time": NOON, "last_time": NOON + 60, "step_seconds": 60}
    made = store(scraped=(row("scraped_conditions", cluster="c1", node="gpu-1", **seen, **times),))
    assert told(made, tmp_path) == [
        SlowdownEvidence("gpu-1", NOON, NOON + 60, "ib_errors/symbols", "symbols of mlx5_0")
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
def test_what_is_no_evidence_of_slowness_is_not_told(tmp_path: Path, more: dict[str, Any]) -> None:
    made = store(line(1, "opened", NOON, **{"code": "gpu_clocks/slowed", "observed": False, **more}))
    assert told(made, tmp_path) == []


def test_only_the_nodes_and_the_cluster_that_were_asked_for(tmp_path: Path) -> None:
    made = store(line(1, "opened", NOON, "gpu_clocks/slowed", observed=False))
    made["nodes"] = [row("nodes", cluster="c2", node="gpu-2")]
    assert told(made, below(tmp_path, "other"), ("gpu-2",)) == []
    assert told(made, below(tmp_path, "cluster"), chosen=Choice(cluster="c2")) == []
    assert len(told(made, below(tmp_path, "all"), chosen=Choice(cluster="c1"))) == 1


def test_the_checks_are_checks() -> None:
    there = {path.stem for path in (ROOT / "checks").glob("*.py")} | {"nvlink5"}
    assert set(CHECKS) <= there


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000))
def test_of_any_history_each_is_evidence_with_an_end_after_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    for one in told(history(Random(seed)), tmp_path_factory.mktemp("store")):
        found = Evidence(*one)
        assert found.node in NODES
        assert found.end is None or found.begin <= found.end
        assert found.text.isprintable()
        assert found.text
