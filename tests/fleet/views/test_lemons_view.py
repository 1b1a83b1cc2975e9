"""Tests of the report chapter of `lemons`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fleet.answers.test_lemons import BEGIN, DAY, died, empty, healthy_fleet, job, lemons_of

pytestmark = pytest.mark.one_python

try:  # only .venv has numpy; the marked tests run nowhere else
    from healthd.fleet.views.lemons import view
except ModuleNotFoundError as error:
    if error.name not in ("numpy",):
        raise


def test_chapter_names_lemons_and_draws_signals(tmp_path: Path) -> None:
    made = healthy_fleet()
    for week in range(4):
        died(made, "g005", BEGIN + (6 * week + 3) * DAY, others=63)
    chapter = view(lemons_of(made, tmp_path))
    assert chapter.sentences[0].startswith("1 of 100 nodes ")
    assert " 128 GPUs" in chapter.sentences[1]
    (detail,) = chapter.details
    assert detail.lines[0].startswith("scontrol update NodeName=g005")
    (table,) = chapter.tables
    assert table.cell_texts()[0][0] == "g005"
    (drawn,) = chapter.figures
    values = [record for layer in drawn.layers for record in layer.records]
    assert {value["signal"] for value in values} == {
        "times out of service",
        "multi-node failures",
        "single-node failures",
        "single-node failures per job",
    }
    assert all(0 <= value["nodes"] <= 1 and 0 <= value["part"] <= 1 for value in values)


def test_chapter_without_lemons_or_nodes(tmp_path: Path) -> None:
    (sentence,) = view(lemons_of(healthy_fleet(), tmp_path / "a")).sentences
    assert re.fullmatch(r"None of 100 nodes .* 26 days\.", sentence)
    made = empty()
    job(made, [], BEGIN, "FAILED")
    chapter = view(lemons_of(made, tmp_path / "b"))
    assert (chapter.figures, chapter.tables) == ((), ())
