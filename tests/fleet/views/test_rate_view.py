"""Tests of the report chapters of `rate` and `ettr`: sentences, and charts with the data of the documents."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from healthd.fleet.tables import TABLES
from tests.fleet.answers.test_ettr import add_run
from tests.fleet.answers.test_ettr import ettr_of as ettr_document
from tests.fleet.answers.test_rate import add_job, empty_history, small_history
from tests.fleet.answers.test_rate import rate_of as rate_document

pytestmark = pytest.mark.one_python

try:  # only .venv has these; the marked tests run nowhere else
    import vl_convert

    from healthd.fleet.answers import ettr as ettr_answer
    from healthd.fleet.views import ettr, rate
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy", "vl_convert"):
        raise


def svg_of(chart) -> str:
    """Return the chart as SVG; an invalid chart raises."""
    return vl_convert.vegalite_to_svg(json.dumps({**chart.spec, "width": 600}))


def test_rate_chapter_has_sentences_chart_and_tables(tmp_path: Path) -> None:
    chapter = rate.view(rate_document(small_history(), tmp_path))
    assert re.search(r"r_f 30\.0 .*\(95 %: 6\.19 to 87\.7\)", chapter.sentences[0])
    assert re.match(r"2 NODE_FAIL, 1 FAILED .*, 0 REQUEUED ", chapter.sentences[1])
    assert "every 23 min" in chapter.sentences[2]
    assert [table.title for table in chapter.tables] == ["Measured, by size", "Projected: MTTF = 1 / (N r_f)"]
    (chart,) = chapter.figures
    assert "measured" in svg_of(chart)


def test_rate_chapter_without_failures_has_no_chart(tmp_path: Path) -> None:
    made = empty_history()
    add_job(made, 1, "COMPLETED", 10, nodes=1, gpus=8)
    chapter = rate.view(rate_document(made, tmp_path / "small"))
    assert (chapter.figures, len(chapter.sentences)) == ((), 1)
    add_job(made, 2, "COMPLETED", 10)
    without_failure = rate.view(rate_document(made, tmp_path / "large"))
    assert without_failure.figures == ()
    assert "0 failures" in without_failure.sentences[0]


def test_ettr_grids_print_their_numbers(tmp_path: Path) -> None:
    chapter = ettr.view(ettr_answer.ettr_for_rate(16_384, 6.5))
    assert "ETTR 0.71" in chapter.sentences[0]
    assert "0.93" in chapter.sentences[2]
    assert [">0.71<" in svg_of(chart) for chart in chapter.figures] == [True, True]


def test_measured_runs_have_chart_and_table(tmp_path: Path) -> None:
    made = {name: [] for name in TABLES}
    add_run(made, "long", [(1, 20, "NODE_FAIL"), (0, 10, "COMPLETED")])
    chapter = ettr.view(ettr_document(made, tmp_path))
    assert chapter.tables[-1].cell_texts()[0][0] == "256"
    assert "measured" in svg_of(chapter.figures[-1])
