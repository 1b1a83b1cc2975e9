"""Tests of the report chapters of `states`, `goodput` and `availability`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, HOUR, history

from tests.fleet.answers.test_availability import node_state
from tests.fleet.answers.test_goodput import Made, history_after_node_fail, study

pytestmark = pytest.mark.one_python


def views_of(made: Any, folder: Path, **flags: Any) -> list[Any]:
    from healthd.fleet.answers import availability, goodput, states
    from healthd.fleet.views import availability as availability_view
    from healthd.fleet.views import goodput as goodput_view
    from healthd.fleet.views import states as states_view

    with study(made, folder) as opened:
        return [
            states_view.view(states.states(opened, split=BEGIN + HOUR, large=1)),
            goodput_view.view(goodput.goodput(opened, price=2.0)),
            availability_view.view(availability.availability(opened, sla=99.5)),
        ]


@pytest.mark.parametrize("seed", range(4))
def test_charts_have_data_and_descriptions_and_rows_fit_columns(tmp_path: Path, seed: int) -> None:
    made = history(Random(seed), 40)
    for chapter in views_of(made, tmp_path):
        assert chapter.sentences
        for drawn in chapter.figures:
            assert drawn.description.strip()
            assert all(layer.records for layer in drawn.layers)
            assert '"url"' not in json.dumps(drawn.spec, allow_nan=False)
        for table in chapter.tables:
            assert {len(row) for row in table.cell_texts()} == {len(table.columns)}


def test_chapters_exist_for_nearly_empty_store(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "RUNNING", 0, None)
    made.history["node_states"] = [node_state(-HOUR, None, "DRAIN", "person")]
    states, goodput, availability = views_of(made.history, tmp_path)
    assert len(states.sentences) == 1
    assert (states.figures, goodput.figures) == ((), ())
    assert any(sentence.startswith("No loss ") for sentence in goodput.sentences)
    assert any(re.search(r"1 node .* 0\.00 % ", sentence) for sentence in availability.sentences)


def test_goodput_chapter_states_cost_with_price(tmp_path: Path) -> None:
    made = history_after_node_fail().history
    made["node_states"] = [node_state(0, HOUR, "DOWN*", "slurm")]
    _, goodput, _ = views_of(made, tmp_path)
    assert any(re.fullmatch(r"At 2 .* 24\.", sentence) for sentence in goodput.sentences)
