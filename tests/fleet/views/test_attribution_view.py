"""Tests of the report chapter of `attribution`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from fleet_history import BEGIN, DAY

from tests.fleet.answers.test_attribution import ENDED, Made, attribution_of

if TYPE_CHECKING:
    from healthd.fleet.answers.document import Document
    from healthd.fleet.view import View

pytestmark = pytest.mark.one_python


def view_of_history(made: Made) -> View:
    from healthd.fleet.views.attribution import view

    return view(attribution_of(made.history))


def history_with_spike() -> Made:
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


def view_with_weeks(document: Document, days: Sequence[float]) -> View:
    """Return the view of this document with the causes of its first week in weeks with these numbers of days."""
    from healthd.fleet.views.attribution import view

    (first, *_) = document["weeks"]
    weeks = [
        {**first, "week": first["week"] + number * 7 * DAY, "days": day_count} for number, day_count in enumerate(days)
    ]
    return view({**document, "weeks": weeks})


def test_weekly_chart_skips_partial_weeks_and_names_causes():
    document = attribution_of(history_with_spike().history)
    _, weeks = view_with_weeks(document, (2.5, 7, 7, 7, 3)).figures
    points, dates = weeks.layers[0].records, weeks.layers[1].records
    assert len(points) == 3
    assert {point["cause"] for point in points} == {"network file systems"}
    assert [date["words"] for date in dates] == ["mount enabled"]
    assert "mount enabled" in weeks.description


@pytest.mark.parametrize("days", [(2.5, 3), (2.5, 7, 3)])
def test_weekly_chart_needs_two_whole_weeks(days: tuple[float, ...]):
    assert len(view_with_weeks(attribution_of(history_with_spike().history), days).figures) == 1


def test_chapter_has_causes_costs_and_check_dates():
    chapter = view_of_history(history_with_spike())
    assert re.match(r"Of 6 jobs .*, 6 have .*: hardware for 0, system software for 6", chapter.sentences[0])
    assert re.search(r"network file systems .*: 24 GPU-hours, 100\.0 %", chapter.sentences[-1])
    (costs,) = chapter.figures
    assert costs.description == "network file systems 24 GPU-hours"
    tables = {table.title: table for table in chapter.tables}
    assert tables["By cause"].cell_texts()[0][:4] == ("mount: network file systems", "system software", "6", "0")
    assert [row[1:3] for row in tables["Checks enabled, disabled or changed"].cell_texts()] == [("mount", "enabled")]
    assert all(len(row) == len(table.columns) for table in chapter.tables for row in table.cell_texts())


def test_chapter_without_failures_is_one_sentence():
    made = Made("n1", observed=False)
    made.job(1, "n1", state="COMPLETED")
    chapter = view_of_history(made)
    assert (len(chapter.sentences), chapter.figures, chapter.tables) == (1, (), ())


def test_spike_of_few_nodes_is_sentence_with_names():
    from healthd.fleet.views.attribution import view

    document = attribution_of(history_with_spike().history)
    node = {"cluster": "c1", "node": "n1", "incidents": 6}
    spike = {"cause": "mount", "week": BEGIN - BEGIN % DAY, "incidents": 8, "expected": 1.0, "share_of_nodes": 0.75}
    chapter = view({**document, "spikes": [{**spike, "nodes": [node]}, {**spike, "cause": "disk", "nodes": []}]})
    spread, alone = chapter.sentences[-1], chapter.sentences[-2]
    assert alone.endswith("75.0 % occurred on 1 node: n1 (6).")
    assert spread.endswith(" many nodes.")
