"""Tests of fail-slow plots: the content of panels, well-formed files for any name, and their size."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.cli.main import main
from healthd.failslow.model import Cause, Confidence, Diagnosis, Point, Series, SlowJob, Suspect
from healthd.failslow.panels import MAX_COLUMNS, MAX_PANELS, build_panels
from healthd.failslow.plot import (
    BEFORE,
    JOB,
    MAX_ROWS,
    PEERS,
    SERIES,
    SLOW,
    InvalidPlotPath,
    MissingExtra,
    check_plot,
    headline,
    hidden_note,
    spec,
    write_plot,
)
from healthd.failslow.times import TimeStyle

pytestmark = pytest.mark.one_python  # vl-convert is part of healthd[failslow]

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "</svg><script>alert(1)</script>",
    "a\x00b\x1b[31m\u202egnp\u2028",
    "\ud800\ufffe",
    '" onload="x',
    "&amp;]]>",
)
NAMES = st.one_of(st.text(max_size=30), st.sampled_from(HOSTILE))


def worker(name: str, count: int = 300, slow: Sequence[int] = (), **more: object) -> Series:
    noise = random.Random(name.encode("utf-8", "replace"))
    value = [100 * noise.uniform(0.97, 1.03) * (1.6 if at in slow else 1) for at in range(count)]
    return Series(name, value, list(range(count)), label="worker", **more)  # type: ignore[arg-type]


POINT = Point(180, 186, 0.6, 0.99, 195)
SLOW_SAMPLES = range(180, 195)


def one_slow(name: str = "6", group: str = "", peers: int = 9) -> tuple[list[Series], Diagnosis]:
    series = [worker(name, slow=SLOW_SAMPLES, group=group), *(worker(f"peer {at}", group=group) for at in range(peers))]
    suspect = Suspect(name, "worker", Cause.COMPUTE, Confidence.HIGH, ("its peers were not",), (name,), POINT)
    return series, Diagnosis(((POINT,), *[()] * peers), (suspect,))


def drawn(series: Sequence[Series], judgement: Diagnosis) -> list[dict[str, Any]]:
    """Return the panels of the chart, in Vega-Lite."""
    found, left = build_panels(series, judgement)
    return list(spec(found, headline(series, judgement), hidden_note(left))["vconcat"])


def rows(panel: dict[str, Any], kind: str, mark: str) -> list[dict[str, Any]]:
    """Return the rows of the layers with this colour and mark."""
    return [
        row
        for layer in panel["layer"]
        if layer["mark"]["type"] == mark and layer["encoding"]["color"]["datum"] == kind
        for row in layer["data"]["values"]
    ]


def words(panel: dict[str, Any]) -> list[str]:
    return [panel["title"]["text"], *panel["title"]["subtitle"]]


def moments(panel: dict[str, Any]) -> dict[str, float]:
    points = [layer for layer in panel["layer"] if layer["mark"]["type"] == "point"]
    return {layer["encoding"]["shape"]["datum"]: row["x"] for layer in points for row in layer["data"]["values"]}


def test_a_slow_series_is_drawn_with_its_interval_levels_and_peers() -> None:
    (panel,) = drawn(*one_slow())
    assert moments(panel) == {"onset": 180, "detected": 186, "relief": 195}
    assert rows(panel, SLOW, "rect") == [{"x": 180, "x2": 195}]
    assert [row["text"] for row in rows(panel, SLOW, "text")] == ["+60 %"]
    (before,), (level,) = rows(panel, BEFORE, "rule"), [row for row in rows(panel, SLOW, "rule") if "x2" in row]
    assert before["y"] == pytest.approx(100, rel=0.02)
    assert level["y"] == pytest.approx(160, rel=0.02)
    assert rows(panel, PEERS, "area")
    assert max(row["y"] for row in rows(panel, SERIES, "line")) > 150
    assert words(panel) == [
        "worker 6",
        "suspect: compute, high confidence; compared with 9 peers",
        "slow from 180 to 195, +60 %, recovered",
    ]


def test_a_slowness_that_lasts_has_no_relief_and_reaches_the_end() -> None:
    series, judgement = one_slow()
    lasting = Point(180, 186, 0.6, 0.99)
    (panel,) = drawn(series, Diagnosis(((lasting,), *judgement.points[1:])))
    assert moments(panel) == {"onset": 180, "detected": 186}
    assert rows(panel, SLOW, "rect") == [{"x": 180, "x2": 299}]
    assert words(panel)[1:] == ["no suspect; compared with 9 peers", "slow from 180 on, +60 %"]


def test_where_nothing_is_slow_a_series_is_shown_among_its_peers() -> None:
    (panel,) = drawn([worker(str(at)) for at in range(5)], Diagnosis(((),) * 5))
    assert words(panel)[1:] == ["nothing became slow; compared with 4 peers"]
    assert rows(panel, PEERS, "area")
    assert moments(panel) == {}


def test_fewer_than_four_peers_have_a_line_each() -> None:
    (panel,) = drawn(*one_slow(peers=3))
    assert {row["line"] for row in rows(panel, PEERS, "line")} == {0, 1, 2}
    assert rows(panel, PEERS, "area") == []


def test_workers_that_differ_at_rest_are_brought_to_one_level() -> None:
    series, judgement = one_slow()
    series[1:] = [Series(s.name, [4 * value for value in s.value], s.index, "worker") for s in series[1:]]
    (panel,), _ = build_panels(series, judgement)
    assert panel.top < 200
    assert all(90 < column.middle < 110 for column in panel.peers)


def test_a_job_that_is_slow_as_a_whole_is_shaded_and_shown_once() -> None:
    series = [worker(str(at), slow=SLOW_SAMPLES) for at in range(8)]
    names = tuple(one.name for one in series)
    job = SlowJob("", 180, POINT, names, 8, Cause.IMBALANCE, "all became slower at the same time")
    (panel,) = drawn(series, Diagnosis(((POINT,),) * 8, (), (job,)))
    assert rows(panel, JOB, "rect") == [{"x": 180, "x2": 195}]
    assert "all became slower at the same time" in words(panel)[1]


def test_a_suspect_that_reported_its_busy_time_has_a_panel_of_it() -> None:
    busy = [50.0 * (1.9 if at in SLOW_SAMPLES else 1) for at in range(300)]
    series, judgement = one_slow()
    series[0] = worker("6", slow=SLOW_SAMPLES, busy=busy)
    found = drawn(series, judgement)
    assert [rows(panel, SLOW, "text")[0]["text"] for panel in found] == ["+60 %", "+90 %"]
    assert [words(panel)[0] for panel in found] == ["worker 6", "worker 6, busy time"]


def test_a_busy_time_that_is_not_told_everywhere_is_drawn_where_it_is() -> None:
    busy = [float("nan") if at % 3 else 50.0 for at in range(300)]
    series, judgement = one_slow()
    series[0] = worker("6", slow=SLOW_SAMPLES, busy=busy)
    (_, panel), _ = build_panels(series, judgement)
    assert {column.middle for column in panel.line} == {50.0}
    assert len(panel.line) == 100


def test_ranks_that_only_waited_for_a_suspect_are_its_peers_and_have_no_panel() -> None:
    series, judgement = one_slow()
    late = Point(188, 194, 0.2, 0.9, 195)
    other = Point(40, 50, 0.2, 0.9, 70)
    waited = Diagnosis((*judgement.points[:7], (late,), (late,), (late, other)), judgement.suspects)
    assert [words(panel)[0] for panel in drawn(series, waited)] == ["worker 6", "worker peer 8"]


def test_panels_that_do_not_fit_are_counted() -> None:
    series = [worker(str(at), 200, slow=SLOW_SAMPLES) for at in range(MAX_PANELS + 7)]
    found, left = build_panels(series, Diagnosis(((POINT,),) * len(series)))
    assert (len(found), left) == (MAX_PANELS, 7)
    assert spec(found, "title", hidden_note(left))["title"]["subtitle"][0].startswith("7 more panels")


def test_iterations_that_begin_anew_are_drawn_by_their_order() -> None:
    series, judgement = one_slow()
    again = [*range(200), *range(150, 250)]
    series[0] = Series("6", series[0].value, again, "worker", starts=(0, 200))
    (panel,), _ = build_panels(series, judgement)
    assert (panel.begin, panel.end) == (0, 299)
    assert panel.captions[1] == "slow from 180 to 195, +60 %, recovered"


def test_a_long_series_becomes_few_points_and_keeps_a_spike_of_one_sample(tmp_path: Path) -> None:
    long = worker("6", 100_000)
    spiked = [*long.value]
    spiked[70_001] = 300.0
    series = [Series("6", spiked, long.index, "worker"), *(worker(str(at), 100_000) for at in range(5))]
    (panel,), _ = build_panels(series, Diagnosis(((),) * 6))
    assert len(panel.line) == MAX_COLUMNS
    assert max(column.high for column in panel.line) == 300.0
    assert panel.above == 1
    write_plot(series, Diagnosis(((),) * 6), str(tmp_path / "plot.svg"))
    assert (tmp_path / "plot.svg").stat().st_size < 100_000


def test_times_stand_on_the_axis_as_times(tmp_path: Path) -> None:
    begin = 1_700_000_000.0
    series, judgement = one_slow()
    style = TimeStyle("T", 0, "+01:00")
    timed = [Series(s.name, s.value, [begin + 60 * at for at in s.index], "worker", times=style) for s in series]
    write_plot(timed, judgement, str(tmp_path / "plot.svg"))
    texts = ["".join(one.itertext()) for one in xml.parse(tmp_path / "plot.svg").getroot().iter(f"{SVG}text")]
    assert "slow from 2023-11-15T02:13:20+01:00 to 2023-11-15T02:28:20+01:00, +60 %, recovered" in "".join(texts)
    assert {"02:00", "2023-11-15"} <= set(texts), "the axis must use the time zone of the file"


@pytest.mark.parametrize("name", ["plot.png", "plot", "svg", "plot.html.gz", ""])
def test_another_ending_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlotPath, match=r"the name of a plot must end in \.svg or \.html"):
        write_plot(*one_slow(), str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_the_headline_counts_suspects_or_says_that_there_are_none(tmp_path: Path) -> None:
    series, judgement = one_slow()
    job = SlowJob("", 180, POINT, ("6",), 10, Cause.UNKNOWN, "too few")
    assert headline(series, judgement) == "10 series, 3,000 samples: 1 suspect"
    assert headline(series, Diagnosis(judgement.points, (), (job,))).endswith(": the job is slow")
    assert headline(series, Diagnosis(judgement.points)).endswith(": 1 slow, no suspect")
    assert headline(series, Diagnosis(((),) * 10)).endswith(": nothing became slow")


def test_a_file_is_replaced_whole_and_no_leftover_stays(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").write_text("old")
    write_plot(*one_slow(), str(tmp_path / "plot.svg"))
    assert [one.name for one in tmp_path.iterdir()] == ["plot.svg"]


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)


@settings(max_examples=20, deadline=None)
@given(name=NAMES, group=NAMES, evidence=NAMES, note=NAMES)
def test_whatever_a_name_is_the_file_is_well_formed_and_the_page_has_nothing_of_it_as_markup(
    name: str, group: str, evidence: str, note: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plot")
    series, judgement = one_slow(name, group)
    suspect = Suspect(name, group, Cause.COMPUTE, Confidence.HIGH, (evidence,), (name,), POINT)
    job = SlowJob(group, 180, POINT, (name,), 9, Cause.UNKNOWN, evidence)
    hostile = Diagnosis(judgement.points, (suspect,), (job,), (note,))
    write_plot(series, hostile, str(folder / "plot.svg"))
    root = xml.parse(folder / "plot.svg").getroot()
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {
        *("svg", "style", "defs", "clipPath", "rect", "g", "path", "text", "tspan", "title", "line"),
    }
    write_plot(series, hostile, str(folder / "plot.html"))
    text = (folder / "plot.html").read_text("utf-8")
    page = Page()
    page.feed(text)
    assert not {"script", "img", "a", "iframe", "foreignobject"} & set(page.tags)
    assert not [one for one in page.attributes if one.startswith("on")]
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text) is None


NUMBERS = st.floats(min_value=1e-6, max_value=1e9)


@settings(max_examples=60, deadline=None)
@given(value=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
def test_whatever_the_samples_are_every_number_of_the_picture_is_one(value: list[float], data: st.DataObject) -> None:
    last = len(value) - 1
    onset = data.draw(st.integers(0, last))
    relief = data.draw(st.one_of(st.none(), st.integers(onset, last)))
    point = Point(onset, data.draw(st.integers(onset, last)), 0.5, 0.9, relief)
    index = data.draw(st.lists(NUMBERS, min_size=len(value), max_size=len(value)))
    shown, _ = build_panels([Series("1", value, index)], Diagnosis(((point,),)))
    json.dumps(spec(shown, "one series"), allow_nan=False)


def test_a_page_has_a_table_of_so_many_points_and_says_how_many_there_are(tmp_path: Path) -> None:
    points = tuple(Point(at, at, 0.2, 0.9, at + 1) for at in range(0, 2 * MAX_ROWS + 20, 2))
    write_plot([worker("1", 3000)], Diagnosis((points,)), str(tmp_path / "plot.html"))
    text = (tmp_path / "plot.html").read_text("utf-8")
    assert text.count("<tr>") == 1 + MAX_ROWS
    assert "The first 1,000 of 1,010" in text


def test_without_the_extra_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else found(name))
    with pytest.raises(MissingExtra):
        check_plot(str(tmp_path / "plot.svg"), ())
    assert main(["failslow", str(tmp_path / "none.csv"), "--plot", str(tmp_path / "plot.svg")]) == 3
    assert "pip install 'healthd[failslow]'" in capsys.readouterr().err
