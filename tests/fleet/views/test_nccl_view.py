"""Tests of the report chapter of the stuck job."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.fleet.answers import nccl

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.views.nccl import view
except ModuleNotFoundError as error:
    if error.name not in ("numpy",):
        raise

REAL = Path(__file__).parents[2] / "data" / "flight_recorder" / "gpu_error_1st"


def test_chapter_names_suspects_and_draws_ranks() -> None:
    chapter = view(nccl.nccl(str(REAL)))
    assert chapter.sentences[0].startswith("Ranks 12, 14 ")
    (table,) = chapter.tables
    assert table.cell_texts()[0][:2] == ("74 EXPERT_MODEL_PARALLEL_GROUP", "all_to_all 20537")
    (drawn,) = chapter.figures
    (layer,) = drawn.layers
    first = [value for value in layer.records if value["group"].startswith("74 ")]
    assert {value["rank"]: value["stands"] for value in first} == {
        12: "missing",
        13: "waits in it",
        14: "entered",
        15: "waits in it",
    }
