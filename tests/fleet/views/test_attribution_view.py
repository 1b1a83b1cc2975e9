"""Tests of the report chapter of `attribution`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from fleet_history import BEGIN, DAY

from tests.fleet.answers.test_attribution import ENDED, Made, asked_of

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document
    from healthd.fleet.view import View

pytestmark = pytest.mark.one_python


def described(made: Made) -> View:
    from healthd.fleet.views.attribution import view

    return view(asked_of(made.history))


def spiked() -> Made:
    """Return a history where one node loses its mount five times in one day, and another node once."""
    made = Made("n1", "n2")
    for number in range(6):
        node, end = ("n1" if number else "n2"), ENDED + 7200 * number
        made.job(number + 1, node, end=end, start_time=end - 7200)
        made.seen(node, "mount/missing", end)
    made.job(9, "n2", state="COMPLETED", end=BEGIN + DAY // 2, start_time=BEGIN)
    for number, node in enumerate(("n1", "n2")):
        made.line(node, ENDED + number, "check_enabled", check_name="mount", version="0.2")
    return made


def weekly(document: Document, days: Sequence[float]) -> View:
    """Return the view of this document with the causes of its first week in weeks with these numbers of days."""
    from healthd.fleet.views.attribution import view

    (first, *_) = document["weeks"]
    weeks = [{**first, "week": first["week"] + number * 7 * DAY, "days": long} for number, long in enumerate(days)]
    return view({**document, "weeks": weeks})


def test_the_chart_by_week_leaves_out_part_weeks_and_names_causes_in_words():
    document = asked_of(spiked().history)
    _, weeks = weekly(document, (2.5, 7, 7, 7, 3)).figures
    points, dates = weeks.layers[0].records, weeks.layers[1].records
    assert len(points) == 3
    assert {point["cause"] for point in points} == {"network file systems"}
    assert [date["words"] for date in dates] == ["mount enabled"]
    assert "mount enabled" in weeks.description


@pytest.mark.parametrize("days", [(2.5, 3), (2.5, 7, 3)])
def test_less_than_two_whole_weeks_are_no_chart(days: tuple[float, ...]):
    assert len(weekly(asked_of(spiked().history), days).figures) == 1


def test_the_chapter_says_what_failed_and_draws_the_dates_of_checks():
    told = described(spiked())
    assert told.sentences[0].startswith(
        "Of 6 jobs that failed or lost a node, 6 have a most likely cause: 0 hardware, 6"
    )
    assert "network file systems cost most: 24 GPU-hours, 100.0 %" in told.sentences[-1]
    (costs,) = told.figures
    assert costs.description == "network file systems 24 GPU-hours"
    tables = {table.title: table for table in told.tables}
    assert tables["By cause"].cell_texts()[0][:4] == ("mount: network file systems", "system software", "6", "0")
    assert [row[1:3] for row in tables["Checks enabled, disabled or changed"].cell_texts()] == [("mount", "enabled")]
    assert all(len(row) == len(table.columns) for table in told.tables for row in table.cell_texts())


def test_a_chapter_of_nothing_has_a_sentence_and_no_charts():
    made = Made("n1", observed=False)
    made.job(1, "n1", state="COMPLETED")
    told = described(made)
    assert (told.sentences, told.figures, told.tables) == (("No job failed in this period.",), (), ())


def test_a_spike_that_few_nodes_made_is_a_sentence_with_their_names():
    from healthd.fleet.views.attribution import view

    document = asked_of(spiked().history)
    node = {"cluster": "c1", "node": "n1", "incidents": 6}
    spike = {"cause": "mount", "week": BEGIN - BEGIN % DAY, "incidents": 8, "expected": 1.0, "share_of_nodes": 0.75}
    told = view({**document, "spikes": [{**spike, "nodes": [node]}, {**spike, "cause": "disk", "nodes": []}]})
    spread, alone = told.sentences[-1], told.sentences[-2]
    assert alone.endswith("75.0 % were on 1 node: n1 (6).")
    assert spread.endswith("They are spread over many nodes.")
