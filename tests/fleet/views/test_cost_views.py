"""Tests of the report chapters of `states`, `goodput` and `availability`."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fleet_history import BEGIN, HOUR, history

from tests.fleet.answers.test_availability import node_state
from tests.fleet.answers.test_goodput import Made, after_a_node_failed, study

pytestmark = pytest.mark.one_python


def views_of(made: Any, folder: Path, **flags: Any) -> list[Any]:
    from healthd.fleet.answers import availability, goodput, states
    from healthd.fleet.views import availability as availability_view
    from healthd.fleet.views import goodput as goodput_view
    from healthd.fleet.views import states as states_view

    with study(made, folder) as asked:
        return [
            states_view.view(states.states(asked, split=BEGIN + HOUR, large=1)),
            goodput_view.view(goodput.goodput(asked, price=2.0)),
            availability_view.view(availability.availability(asked, sla=99.5)),
        ]


@pytest.mark.parametrize("seed", range(4))
def test_each_chart_has_its_data_in_it_and_words_beside_it_and_each_row_its_columns(tmp_path: Path, seed: int) -> None:
    made = history(Random(seed), 40)
    for one in views_of(made, tmp_path):
        assert one.sentences
        for drawn in one.figures:
            assert drawn.description.strip()
            assert all(layer.records for layer in drawn.layers)
            assert '"url"' not in json.dumps(drawn.spec, allow_nan=False)
        for table in one.tables:
            assert {len(row) for row in table.cell_texts()} == {len(table.columns)}


def test_a_store_with_next_to_nothing_has_chapters_all_the_same(tmp_path: Path) -> None:
    made = Made()
    made.job(1, "RUNNING", 0, None)
    made.history["node_states"] = [node_state(-HOUR, None, "DRAIN", "person")]
    states, goodput, availability = views_of(made.history, tmp_path)
    assert states.sentences == ("No job ended in this period.",)
    assert (states.figures, goodput.figures) == ((), ())
    assert "No loss is known." in goodput.sentences
    assert "The 1 node was available for 0.00 % of the known time." in availability.sentences


def test_what_it_cost_is_said_in_money_where_there_is_a_price(tmp_path: Path) -> None:
    made = after_a_node_failed().history
    made["node_states"] = [node_state(0, HOUR, "DOWN*", "slurm")]
    _, goodput, _ = views_of(made, tmp_path)
    assert "At 2 a GPU-hour that is 24." in goodput.sentences
