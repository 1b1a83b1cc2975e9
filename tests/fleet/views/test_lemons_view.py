"""Tests of the report chapter of `lemons`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.answers.test_lemons import BEGIN, DAY, died, empty, fleet, job, told

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.views.lemons import view
except ModuleNotFoundError as error:
    if error.name not in ("numpy",):
        raise


def test_the_chapter_names_the_lemons_and_draws_each_signal_that_there_is(tmp_path: Path) -> None:
    made = fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (6 * week + 3) * DAY, others=63)
    shown = view(told(made, tmp_path))
    assert shown.sentences[0].startswith("1 of 100 nodes fails far more often")
    assert "jobs of more than 128 GPUs" in shown.sentences[1]
    (detail,) = shown.details
    assert detail.lines[0].startswith("scontrol update NodeName=g005")
    (table,) = shown.tables
    assert table.cell_texts()[0][0] == "g005"
    (drawn,) = shown.figures
    values = [record for layer in drawn.layers for record in layer.records]
    assert {value["signal"] for value in values} == {
        "times out of service",
        "multi-node failures",
        "single-node failures",
        "single-node failures per job",
    }
    assert all(0 <= value["nodes"] <= 1 and 0 <= value["part"] <= 1 for value in values)


def test_a_chapter_without_a_lemon_says_so_and_one_without_nodes_draws_nothing(tmp_path: Path) -> None:
    assert view(told(fleet(), tmp_path / "a")).sentences == (
        "None of 100 nodes fails far more often than the others in 26 days.",
    )
    made = empty()
    job(made, [], BEGIN, "FAILED")
    shown = view(told(made, tmp_path / "b"))
    assert (shown.figures, shown.tables) == ((), ())
