"""Tests of the commands `healthd fleet states`, `goodput` and `availability`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fleet_history import DAY, HOUR
from fleet_rows import NOVEMBER, job, row, store_with

from healthd.cli.terminal import json_pieces
from tests.cli.test_fleet_command import fleet

pytestmark = pytest.mark.one_python


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store of one node and one day: it ended a job of 8 GPUs after one hour and was down for two hours."""
    ran = {"start_time": NOVEMBER, "nodes": 1, "gpus": 8, "node_list": "a", "partition": "train"}
    times = {"from_time": NOVEMBER, "to_time": NOVEMBER + DAY}
    rows = {
        "jobs": [
            job(1, state="NODE_FAIL", end_time=NOVEMBER + HOUR, **ran),
            job(2, state="COMPLETED", end_time=NOVEMBER + DAY - 1, **{**ran, "start_time": NOVEMBER + 3 * HOUR}),
        ],
        "nodes": [row("nodes", cluster="c1", node="a", gpu_model="H100", gpus=8, rack="r1")],
        "node_states": [
            row(
                *("node_states",),
                cluster="c1",
                node="a",
                start_time=NOVEMBER + HOUR,
                end_time=NOVEMBER + 3 * HOUR,
                state="DOWN*",
                set_by="slurm",
            )
        ],
        "ingests": [
            row("ingests", cluster="c1", source=source, name=source, read_time=NOVEMBER + DAY, **times)
            for source in ("sacct", "node_states")
        ],
    }
    return store_with(tmp_path_factory.mktemp("costs") / "db", rows)


def run_answer(db: Path, name: str, *flags: str) -> tuple[int, Any]:
    status, out, err = fleet(name, "--db", db, "--from", "2026-11-01", "--to", "2026-11-02", "--json", *flags)
    assert err == ""
    return status, json.loads(out)


def test_states_splits_jobs_by_date(db: Path) -> None:
    status, answer = run_answer(db, "states", "--split", "2026-11-01T12:00:00", "--large", "8")
    assert (status, answer["answer"], answer["infrastructure"]["jobs"]) == (0, "states", 1)
    assert [answer["split"][side]["jobs"] for side in ("before", "after")] == [1, 1]


def test_goodput_reports_loss_in_hours_and_money(db: Path) -> None:
    status, answer = run_answer(db, "goodput", "--checkpoint", "30m", "--price", "2.5")
    assert (status, answer["first_order"]["gpu_hours"], answer["first_order"]["cost"]) == (0, 2.0, 5.0)


def test_availability_exits_with_1_below_sla(db: Path) -> None:
    assert run_answer(db, "availability")[0] == 0
    assert run_answer(db, "availability", "--sla", "91")[0] == 0
    status, answer = run_answer(db, "availability", "--sla", "99.5")
    assert (status, answer["fleet"]["shares"]["down"]) == (1, pytest.approx(2 / 24))
    assert answer["fleet"]["repair"]["mean_seconds"] == 2 * HOUR


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("states", ("--split", "x"), '--split: "x" is not a time; examples: 2026-11-01'),
        ("states", ("--split", ""), '--split: "" is not a time'),
        ("states", ("--split", "2026-12-01"), "--split: 2026-12-01 00:00 is not within the requested period"),
        ("states", ("--large", "0"), "must be a whole number of at least 1"),
        ("goodput", ("--checkpoint", "often"), '--checkpoint: "often" is not a duration; examples: 60m, 1h30m'),
        *(
            (
                "goodput",
                ("--price", price),
                f'--price: must be the price of a GPU-hour, a number from 0 to 1,000,000,000, got "{price}"',
            )
            for price in ("much", "-1", "nan", "inf", "1e308")
        ),
        ("availability", ("--sla", "101"), "--sla: 101 is not a percentage from 1 to 100"),
    ],
)
def test_usage_error_is_one_sentence(db: Path, name: str, flags: tuple[str, ...], sentence: str) -> None:
    status, out, err = fleet(name, "--db", db, "--from", "2026-11-01", "--to", "2026-11-02", *flags)
    assert (status, out) == (64, "")
    assert sentence in err
    assert "Traceback" not in err


def test_nccl_rejects_empty_folder_argument() -> None:
    status, out, err = fleet("nccl", "")
    assert (status, out) == (64, "")
    assert err.startswith("healthd fleet nccl: DIR ")


@pytest.mark.parametrize("name", ["states", "goodput", "availability"])
def test_text_fits_page_of_100_columns(db: Path, name: str) -> None:
    status, out, err = fleet(name, "--db", db)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("name", "sentence"), [("states", "no jobs"), ("goodput", "no jobs"), ("availability", "no node states")]
)
def test_missing_source_exits_with_3(tmp_path: Path, name: str, sentence: str) -> None:
    folder = store_with(tmp_path / "db", {"nodes": [row("nodes", cluster="c1", node="a")], "tickets": [ticket_row()]})
    status, out, err = fleet(name, "--db", folder)
    assert (status, out) == (3, "")
    assert f"the store has {sentence}" in err


def ticket_row() -> Any:
    return row("tickets", cluster="c1", node="a", opened_time=NOVEMBER)


def test_json_pieces_writes_null_for_non_finite_numbers() -> None:
    document = {"a": float("nan"), "b": [1, float("inf"), {"c": (-float("inf"), 2.5)}], "d": "nan", "e": True}
    assert json.loads("".join(json_pieces(document))) == {
        "a": None,
        "b": [1, None, {"c": [None, 2.5]}],
        "d": "nan",
        "e": True,
    }


def test_json_pieces_writes_same_text_as_json_dumps() -> None:
    document = {"jobs": [{"job_id": number, "state": "FAILED"} for number in range(20_000)]}
    pieces = list(json_pieces(document))
    assert max(map(len, pieces)) < len("".join(pieces)) / 4
    assert "".join(pieces) == json.dumps(document, indent=2) + "\n"
