"""Tests of `healthd failslow --db`: the fleet store names the suspect if a gang reports only whole iterations."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from healthd.failslow.times import units_per_second
from tests.failslow.test_report import run

pytestmark = pytest.mark.one_python

BEGIN = 1_795_305_600  # 2026-11-22
SLOW, RECOVERED, STEPS, STEP_SECONDS = 200, 320, 500, 10
MESSAGE = "GPU 3 runs at 900 MHz for its temperature."


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store where gpu-2 reports a throttled GPU around the slow iterations; gpu-9 runs no rank."""
    from fleet_rows import row, store_with

    def event_row(node: str, seq: int, event: str, time: int, **more: Any) -> Any:
        head = {"cluster": "c1", "node": node, "boot_id": "b", "stream_id": f"{node:0>16}", "mono": float(seq)}
        code = {"condition_id": "x-1", "check_name": "gpu_clocks", "code": "gpu_clocks/hw_thermal", "subject": "gpu 3"}
        kind = {"severity": "degraded", "kind": "level", "first_time": begin, "observed": False, "history": False}
        return row(
            "events", seq=seq, event=event, time=time, schema_version=1, last_time=time, **head, **code, **kind, **more
        )

    begin, end = BEGIN + (SLOW - 6) * STEP_SECONDS, BEGIN + RECOVERED * STEP_SECONDS
    lines = [
        event_row(node, seq, event, time, **more)
        for node in ("gpu-2", "gpu-9")
        for seq, event, time, more in (
            (1, "opened", begin, {"message": MESSAGE}),
            (2, "cleared", end, {"cleared_by": "pass"}),
        )
    ]
    return store_with(tmp_path_factory.mktemp("evidence") / "db", {"events": lines})


def write_gang(folder: Path, index: str = "seconds", nodes: bool = True) -> str:
    """Write eight ranks on four nodes that wait for each other. They slow down by 30 %, and no column shows why."""
    draw = random.Random(14)
    lines = [f"rank,{'node,' if nodes else ''}at,step_time"]
    for step in range(STEPS):
        took = draw.gauss(1, 0.02) * (1.3 if SLOW <= step < RECOVERED else 1)
        time = BEGIN + step * STEP_SECONDS
        minutes, seconds = divmod(step * STEP_SECONDS, 60)
        text = {
            "seconds": str(time),
            "ms": str(time * 1000),
            "iso": f"2026-11-22T{minutes // 60:02}:{minutes % 60:02}:{seconds:02}Z",
        }
        for rank in range(8):
            node = f"gpu-{1 + rank // 2}," if nodes else ""
            lines.append(f"{rank},{node}{text.get(index, step)},{took * draw.gauss(1, 0.001):.5f}")
    (folder / "gang.csv").write_text("\n".join(lines) + "\n")
    return str(folder / "gang.csv")


def run_suspects(*arguments: str) -> tuple[int, list[dict[str, Any]], list[str]]:
    status, out, err = run(*arguments, "--json")
    assert err == ""
    document = json.loads(out)
    return status, document["suspects"], document["notes"]


@pytest.mark.parametrize("index", ["seconds", "ms", "iso"])
def test_node_with_evidence_is_suspect_for_any_time_unit(db: Path, tmp_path: Path, index: str) -> None:
    path = write_gang(tmp_path, index)
    status, no_suspects, _ = run_suspects(path, "--index", "at")
    assert (status, no_suspects) == (1, [])
    status, (suspect,), notes = run_suspects(path, "--index", "at", "--db", str(db))
    assert status == 1
    assert (suspect["subject"], suspect["subject_kind"], suspect["cause"], suspect["series"]) == (
        "gpu-2",
        "node",
        "compute_gpu",
        ["2", "3"],
    )
    assert suspect["confidence"] == "medium"
    assert suspect["evidence"][0] == f"node gpu-2 reported {MESSAGE.rstrip('.')} (gpu_clocks/hw_thermal)"
    assert any(re.search(r" 1 finding from 1 .* 4 nodes ", note) for note in notes)


def test_text_names_node_and_groups_waiting_ranks(db: Path, tmp_path: Path) -> None:
    status, out, err = run(write_gang(tmp_path, "iso"), "--index", "at", "--db", str(db))
    assert (status, err) == (1, "")
    lines = out.splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("node gpu-2"))
    span = "slow from 2026-11-22T00:33:20Z to 2026-11-22T00:53:20Z, +30 %, recovered"
    suspect, reported, _, waiting = lines[begin : begin + 4]
    assert suspect.startswith(f"node gpu-2      {span}: ")
    assert suspect.endswith(" node gpu-2 (medium)")
    assert reported.endswith(f"{MESSAGE.rstrip('.')} (gpu_clocks/hw_thermal)")
    assert waiting.startswith("6 other ranks   waited ")
    assert waiting.endswith(span)


@pytest.mark.parametrize(
    ("index", "nodes", "flags", "status", "sentence"),
    [
        ("seconds", False, (), 64, "--db: no series has a node; name its column with --node"),
        (
            *("steps", True, (), 64),
            "--db: the index is not a time; set --index to a column of ISO 8601 or Unix times",
        ),
        ("seconds", True, ("--db", ""), 64, "--db: is an empty string; name a fleet store"),
        (
            *("seconds", True, ("--db", "/none"), 3),
            '/none: not a store: the folder does not exist; run "healthd fleet ingest --out" first',
        ),
    ],
    ids=["no node", "no time", "no folder", "no store"],
)
def test_invalid_input_is_one_sentence(
    db: Path, tmp_path: Path, index: str, nodes: bool, flags: tuple[str, ...], status: int, sentence: str
) -> None:
    result = run(write_gang(tmp_path, index, nodes), "--index", "at", "--db", str(db), *flags)
    assert result == (status, "", f"healthd failslow: {sentence}\n")


def test_missing_duckdb_is_one_sentence(db: Path, tmp_path: Path) -> None:
    (tmp_path / "duckdb.py").write_text("raise ModuleNotFoundError(\"No module named 'duckdb'\", name='duckdb')\n")
    result = run(write_gang(tmp_path), "--index", "at", "--db", str(db), first=tmp_path)
    sentence = 'duckdb is not installed here: docs/deploy.md, "Central host", describes the installation'
    assert result == (3, "", f"healthd failslow: {sentence}\n")


@pytest.mark.parametrize(
    ("first", "last", "unit"),
    [
        (BEGIN, BEGIN + 5, 1),
        (BEGIN * 1e3, BEGIN * 1e3, 1e3),
        (BEGIN * 1e6, BEGIN * 1e6, 1e6),
        (BEGIN * 1e9, BEGIN * 1e9, 1e9),
        (0, BEGIN, None),
        (0, 5000, None),
        (BEGIN, BEGIN * 1e3, None),
        (-BEGIN, BEGIN, None),
    ],
)
def test_units_per_second_follow_from_size_of_times(first: float, last: float, unit: float | None) -> None:
    assert units_per_second(first, last) == unit
