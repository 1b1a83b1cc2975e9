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


def series_with_slow_worker(name: str = "6", group: str = "", peers: int = 9) -> tuple[list[Series], Diagnosis]:
    series = [worker(name, slow=SLOW_SAMPLES, group=group), *(worker(f"peer {at}", group=group) for at in range(peers))]
    suspect = Suspect(name, "worker", Cause.COMPUTE, Confidence.HIGH, ("its peers were not",), (name,), POINT)
    return series, Diagnosis(((POINT,), *[()] * peers), (suspect,))


def panels_of(series: Sequence[Series], judgement: Diagnosis) -> list[dict[str, Any]]:
    """Return the panels of the chart, in Vega-Lite."""
    found, hidden_count = build_panels(series, judgement)
    return list(spec(found, headline(series, judgement), hidden_note(hidden_count))["vconcat"])


def rows_of(panel: dict[str, Any], kind: str, mark: str) -> list[dict[str, Any]]:
    """Return the rows of the layers with this colour and mark."""
    return [
        row
        for layer in panel["layer"]
        if layer["mark"]["type"] == mark and layer["encoding"]["color"]["datum"] == kind
        for row in layer["data"]["values"]
    ]


def panel_text(panel: dict[str, Any]) -> list[str]:
    return [panel["title"]["text"], *panel["title"]["subtitle"]]


def marked_positions(panel: dict[str, Any]) -> dict[str, float]:
    points = [layer for layer in panel["layer"] if layer["mark"]["type"] == "point"]
    return {layer["encoding"]["shape"]["datum"]: row["x"] for layer in points for row in layer["data"]["values"]}


def test_slow_series_has_interval_levels_and_peers() -> None:
    (panel,) = panels_of(*series_with_slow_worker())
    assert marked_positions(panel) == {"onset": 180, "detected": 186, "relief": 195}
    assert rows_of(panel, SLOW, "rect") == [{"x": 180, "x2": 195}]
    assert [row["text"] for row in rows_of(panel, SLOW, "text")] == ["+60 %"]
    (before,), (level,) = rows_of(panel, BEFORE, "rule"), [row for row in rows_of(panel, SLOW, "rule") if "x2" in row]
    assert before["y"] == pytest.approx(100, rel=0.02)
    assert level["y"] == pytest.approx(160, rel=0.02)
    assert rows_of(panel, PEERS, "area")
    assert max(row["y"] for row in rows_of(panel, SERIES, "line")) > 150
    title, suspect, interval = panel_text(panel)
    assert title == "worker 6"
    assert re.match(r"suspect: compute, high .* 9 peers", suspect)
    assert " 180 to 195, +60 %" in interval


def test_lasting_slowness_reaches_end_without_relief() -> None:
    series, judgement = series_with_slow_worker()
    lasting = Point(180, 186, 0.6, 0.99)
    (panel,) = panels_of(series, Diagnosis(((lasting,), *judgement.points[1:])))
    assert marked_positions(panel) == {"onset": 180, "detected": 186}
    assert rows_of(panel, SLOW, "rect") == [{"x": 180, "x2": 299}]
    _, suspect, interval = panel_text(panel)
    assert re.match("no suspect; .* 9 peers", suspect)
    assert " 180 on, +60 %" in interval


def test_healthy_series_is_shown_among_peers() -> None:
    (panel,) = panels_of([worker(str(at)) for at in range(5)], Diagnosis(((),) * 5))
    _, caption = panel_text(panel)
    assert re.match("nothing became slow; .* 4 peers", caption)
    assert rows_of(panel, PEERS, "area")
    assert marked_positions(panel) == {}


def test_fewer_than_four_peers_have_own_lines() -> None:
    (panel,) = panels_of(*series_with_slow_worker(peers=3))
    assert {row["line"] for row in rows_of(panel, PEERS, "line")} == {0, 1, 2}
    assert rows_of(panel, PEERS, "area") == []


def test_workers_of_different_levels_are_scaled_to_one_level() -> None:
    series, judgement = series_with_slow_worker()
    series[1:] = [Series(s.name, [4 * value for value in s.value], s.index, "worker") for s in series[1:]]
    (panel,), _ = build_panels(series, judgement)
    assert panel.top < 200
    assert all(90 < column.middle < 110 for column in panel.peers)


def test_slow_job_is_shaded_and_shown_once() -> None:
    series = [worker(str(at), slow=SLOW_SAMPLES) for at in range(8)]
    names = tuple(entry.name for entry in series)
    job = SlowJob("", 180, POINT, names, 8, Cause.IMBALANCE, "all became slower at the same time")
    (panel,) = panels_of(series, Diagnosis(((POINT,),) * 8, (), (job,)))
    assert rows_of(panel, JOB, "rect") == [{"x": 180, "x2": 195}]
    assert job.reason in panel_text(panel)[1]


def test_suspect_with_busy_time_has_second_panel() -> None:
    busy = [50.0 * (1.9 if at in SLOW_SAMPLES else 1) for at in range(300)]
    series, judgement = series_with_slow_worker()
    series[0] = worker("6", slow=SLOW_SAMPLES, busy=busy)
    found = panels_of(series, judgement)
    assert [rows_of(panel, SLOW, "text")[0]["text"] for panel in found] == ["+60 %", "+90 %"]
    assert [panel_text(panel)[0] for panel in found] == ["worker 6", "worker 6, busy time"]


def test_incomplete_busy_time_is_drawn_partly() -> None:
    busy = [float("nan") if at % 3 else 50.0 for at in range(300)]
    series, judgement = series_with_slow_worker()
    series[0] = worker("6", slow=SLOW_SAMPLES, busy=busy)
    (_, panel), _ = build_panels(series, judgement)
    assert {column.middle for column in panel.line} == {50.0}
    assert len(panel.line) == 100


def test_waiting_ranks_are_peers_without_own_panel() -> None:
    series, judgement = series_with_slow_worker()
    late = Point(188, 194, 0.2, 0.9, 195)
    other_point = Point(40, 50, 0.2, 0.9, 70)
    waited = Diagnosis((*judgement.points[:7], (late,), (late,), (late, other_point)), judgement.suspects)
    assert [panel_text(panel)[0] for panel in panels_of(series, waited)] == ["worker 6", "worker peer 8"]


def test_hidden_panels_are_counted() -> None:
    series = [worker(str(at), 200, slow=SLOW_SAMPLES) for at in range(MAX_PANELS + 7)]
    found, hidden_count = build_panels(series, Diagnosis(((POINT,),) * len(series)))
    assert (len(found), hidden_count) == (MAX_PANELS, 7)
    assert spec(found, "title", hidden_note(hidden_count))["title"]["subtitle"][0].startswith("7 more panels")


def test_restarted_iterations_are_drawn_by_order() -> None:
    series, judgement = series_with_slow_worker()
    restarted_index = [*range(200), *range(150, 250)]
    series[0] = Series("6", series[0].value, restarted_index, "worker", starts=(0, 200))
    (panel,), _ = build_panels(series, judgement)
    assert (panel.begin, panel.end) == (0, 299)
    assert " 180 to 195, +60 %" in panel.captions[1]


def test_long_series_is_reduced_and_keeps_single_spike(tmp_path: Path) -> None:
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


def test_axis_shows_times_in_zone_of_file(tmp_path: Path) -> None:
    begin = 1_700_000_000.0
    series, judgement = series_with_slow_worker()
    style = TimeStyle("T", 0, "+01:00")
    timed = [Series(s.name, s.value, [begin + 60 * at for at in s.index], "worker", times=style) for s in series]
    write_plot(timed, judgement, str(tmp_path / "plot.svg"))
    texts = ["".join(element.itertext()) for element in xml.parse(tmp_path / "plot.svg").getroot().iter(f"{SVG}text")]
    assert " 2023-11-15T02:13:20+01:00 to 2023-11-15T02:28:20+01:00, +60 %" in "".join(texts)
    assert {"02:00", "2023-11-15"} <= set(texts), "the axis must use the time zone of the file"


@pytest.mark.parametrize("name", ["plot.png", "plot", "svg", "plot.html.gz", ""])
def test_write_plot_rejects_other_file_types(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidPlotPath, match=r"the file name of a plot must end in \.svg or \.html"):
        write_plot(*series_with_slow_worker(), str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_headline_counts_suspects_or_states_none(tmp_path: Path) -> None:
    series, judgement = series_with_slow_worker()
    job = SlowJob("", 180, POINT, ("6",), 10, Cause.UNKNOWN, "too few")
    assert headline(series, judgement) == "10 series, 3,000 samples: 1 suspect"
    assert headline(series, Diagnosis(judgement.points, (), (job,))).endswith(" job is slow")
    assert headline(series, Diagnosis(judgement.points)).endswith(": 1 slow, no suspect")
    assert headline(series, Diagnosis(((),) * 10)).endswith(": nothing became slow")


def test_write_plot_replaces_file_without_leftovers(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").write_text("old")
    write_plot(*series_with_slow_worker(), str(tmp_path / "plot.svg"))
    assert [path.name for path in tmp_path.iterdir()] == ["plot.svg"]


class ParsedPage(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)


@settings(max_examples=20, deadline=None)
@given(name=NAMES, group=NAMES, evidence=NAMES, note=NAMES)
def test_plot_is_well_formed_for_any_name(
    name: str, group: str, evidence: str, note: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plot")
    series, judgement = series_with_slow_worker(name, group)
    suspect = Suspect(name, group, Cause.COMPUTE, Confidence.HIGH, (evidence,), (name,), POINT)
    job = SlowJob(group, 180, POINT, (name,), 9, Cause.UNKNOWN, evidence)
    hostile = Diagnosis(judgement.points, (suspect,), (job,), (note,))
    write_plot(series, hostile, str(folder / "plot.svg"))
    root = xml.parse(folder / "plot.svg").getroot()
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "style", "defs", "clipPath", "rect", "g", "path", "text", "tspan", "title", "line"),
    }
    write_plot(series, hostile, str(folder / "plot.html"))
    text = (folder / "plot.html").read_text("utf-8")
    page = ParsedPage()
    page.feed(text)
    assert not {"script", "img", "a", "iframe", "foreignobject"} & set(page.tags)
    assert not [element for element in page.attributes if element.startswith("on")]
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text) is None


NUMBERS = st.floats(min_value=1e-6, max_value=1e9)


@settings(max_examples=60, deadline=None)
@given(value=st.lists(NUMBERS, min_size=1, max_size=40), data=st.data())
def test_plot_numbers_are_finite_for_any_samples(value: list[float], data: st.DataObject) -> None:
    last = len(value) - 1
    onset = data.draw(st.integers(0, last))
    relief = data.draw(st.one_of(st.none(), st.integers(onset, last)))
    point = Point(onset, data.draw(st.integers(onset, last)), 0.5, 0.9, relief)
    index = data.draw(st.lists(NUMBERS, min_size=len(value), max_size=len(value)))
    panels, _ = build_panels([Series("1", value, index)], Diagnosis(((point,),)))
    json.dumps(spec(panels, "one series"), allow_nan=False)


def test_table_of_page_is_limited_and_states_total(tmp_path: Path) -> None:
    points = tuple(Point(at, at, 0.2, 0.9, at + 1) for at in range(0, 2 * MAX_ROWS + 20, 2))
    write_plot([worker("1", 3000)], Diagnosis((points,)), str(tmp_path / "plot.html"))
    text = (tmp_path / "plot.html").read_text("utf-8")
    assert text.count("<tr>") == 1 + MAX_ROWS
    assert "The first 1,000 of 1,010" in text


def test_missing_extra_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else found(name))
    with pytest.raises(MissingExtra):
        check_plot(str(tmp_path / "plot.svg"), ())
    assert main(["failslow", str(tmp_path / "none.csv"), "--plot", str(tmp_path / "plot.svg")]) == 3
    assert "pip install vl-convert-python" in capsys.readouterr().err
