"""The chapter of the stuck job."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.fleet.answers import nccl

pytestmark = pytest.mark.one_python

try:  # only .venv has altair; the marked tests run nowhere else
    from healthd.fleet.chapters.nccl import chapter
except ModuleNotFoundError as error:
    if error.name not in ("altair", "numpy"):
        raise

REAL = Path(__file__).parents[2] / "data" / "flight_recorder" / "gpu_error_1st"


def test_the_chapter_names_the_suspects_and_draws_where_the_ranks_stand() -> None:
    shown = chapter(nccl.nccl(str(REAL)))
    assert shown.sentences[0].startswith("Ranks 12, 14 hold up the job")
    (table,) = shown.tables
    assert table.rows[0][:2] == ("74 EXPERT_MODEL_PARALLEL_GROUP", "all_to_all 20537")
    (drawn,) = shown.charts
    values = [value for part in drawn.spec["datasets"].values() for value in part] if "datasets" in drawn.spec else []
    values = values or drawn.spec["data"]["values"]
    first = [value for value in values if value["group"].startswith("74 ")]
    assert {value["rank"]: value["stands"] for value in first} == {
        12: "missing",
        13: "waits in it",
        14: "entered",
        15: "waits in it",
    }
