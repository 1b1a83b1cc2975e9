"""Panels of fail-slow as an SVG file: a Vega-Lite chart, rendered by vl-convert without a browser.

Needs the extra healthd[failslow]. The file has no script and fetches nothing. The chart is written as Vega-Lite's JSON
(https://vega.github.io/vega-lite/docs/): altair takes 10 s to build 24 panels, which are rendered in 2 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from healthd.common.text import printable
from healthd.failslow import times
from healthd.failslow.panels import Column, Panel, percent

WIDTH, HEIGHT = 880, 150  # pixels of a plot
MOST_LABELS = 12  # slowdowns written above one plot
FONT = "'Liberation Sans', Arial, sans-serif"  # vl-convert has it: a picture is the same on each machine
SERIES, PEERS, BEFORE, SLOW, JOB = "the series", "its peers", "before", "slow", "the job is slow"
COLOURS = {SERIES: "#0b5cad", PEERS: "#6b7785", BEFORE: "#1b1f24", SLOW: "#c2410c", JOB: "#b08800"}
SHAPES = {"onset": "triangle-up", "known": "diamond", "relief": "triangle-down"}
DASHES = {"onset": [1, 0], "known": [1, 3], "relief": [4, 3]}
# Vega's expression for a label of the time axis: a date at midnight, seconds only where they are not zero.
TIME = (
    "utcFormat(datum.value, utcseconds(datum.value) ? '%H:%M:%S' "
    ": utchours(datum.value) || utcminutes(datum.value) ? '%H:%M' : '%Y-%m-%d')"
)


def svg(panels: Sequence[Panel], title: str, more: str = "") -> str:
    """Draw the panels below each other. more: a sentence below the title."""
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(spec(panels, title, more))
    return text


def spec(panels: Sequence[Panel], title: str, more: str = "") -> dict[str, Any]:
    """Return the chart as Vega-Lite."""
    return {
        "background": "white",
        "config": {
            "font": FONT,
            "view": {"stroke": None},
            "axis": {"labelFontSize": 12},
            "legend": {"labelFontSize": 12, "columnPadding": 24, "labelLimit": 0},
        },
        "title": _title(title, [more] if more else [], 15),
        "spacing": 24,
        "resolve": {"scale": {"color": "shared", "shape": "shared"}},
        "vconcat": [_panel(panel) for panel in panels],
    }


def _title(title: str, words: Sequence[str], size: int) -> dict[str, Any]:
    lines = [printable(line) for line in words]
    return {"text": printable(title), "subtitle": lines, "anchor": "start", "fontSize": size, "limit": WIDTH}


def _panel(panel: Panel) -> dict[str, Any]:
    above = [f"samples above this plot: {panel.above:,}"] if panel.above else []
    y = {"domain": [panel.bottom, panel.top], "zero": False, "nice": False}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "title": _title(panel.title, [*panel.words, *above], 13),
        "encoding": {
            "x": _x_axis(panel),
            "y": {"field": "y", "type": "quantitative", "title": None, "scale": y, "axis": {"tickCount": 4}},
        },
        "layer": [layer for layer in _layers(panel) if layer["data"]["values"]],
    }


def _x_axis(panel: Panel) -> dict[str, Any]:
    domain = [_place(panel, panel.begin), _place(panel, panel.end)]
    if panel.times is None:
        scale = {"domain": domain, "zero": False, "nice": False}
        return {"field": "x", "type": "quantitative", "title": None, "scale": scale}
    scale = {"domain": domain, "type": "utc", "nice": False}
    return {"field": "x", "type": "temporal", "title": None, "scale": scale, "axis": {"labelExpr": TIME}}


def _layers(panel: Panel) -> Iterator[dict[str, Any]]:
    """From the back to the front."""
    slow = [{"x": _place(panel, one.onset), "x2": _place(panel, one.end)} for one in panel.stretches]
    bands = [{"x": _place(panel, one.begin), "x2": _place(panel, one.end)} for one in panel.bands]
    earlier = _place(panel, panel.begin + (panel.end - panel.begin) / 4) - _place(panel, panel.begin)
    before, during = [], []
    for one, at in zip(panel.stretches, slow, strict=True):
        if math.isfinite(one.before):
            before.append({"x": at["x"] - earlier, "x2": at["x2"], "y": one.before})
            during.append({**at, "y": one.level})

    yield _layer(JOB, _SHADE, bands, x2=_X2, y=None)
    yield _layer(SLOW, _SHADE, slow, x2=_X2, y=None)
    yield _layer(PEERS, _EXTENT, _extent(panel, panel.peers), y2={"field": "y2"})
    yield _layer(PEERS, _line(1.2), _lines(panel, panel.thin or [panel.peers]), detail={"field": "line"})
    yield _layer(SERIES, _EXTENT, _extent(panel, panel.line), y2={"field": "y2"})
    yield _layer(SERIES, _line(1.4), _lines(panel, [panel.line]), detail={"field": "line"})
    yield _layer(BEFORE, _rule(2, [5, 3]), before, x2=_X2)
    yield _layer(SLOW, _rule(2, [1, 0]), during, x2=_X2)
    for name in SHAPES:
        moments = [getattr(one, "alarm" if name == "known" else name) for one in panel.stretches]
        rows = [{"x": _place(panel, at)} for at in moments if at is not None]
        yield _layer(SLOW, _rule(1.4, DASHES[name]), rows, y=None)
        mark = {"type": "point", "filled": True, "size": 70, "opacity": 1}
        yield _layer(SLOW, mark, rows, y={"value": HEIGHT}, shape=_look(name, SHAPES))
    labels = [
        {"x": (at["x"] + at["x2"]) / 2, "text": percent(one.slowdown)}
        for one, at in zip(panel.stretches[:MOST_LABELS], slow, strict=False)
    ]
    text = {"type": "text", "dy": -6, "fontWeight": "bold"}
    yield _layer(SLOW, text, labels, y={"value": 0}, text={"field": "text"})


_X2 = {"field": "x2"}
_SHADE = {"type": "rect", "opacity": 0.15, "clip": True}
_EXTENT = {"type": "area", "opacity": 0.25, "clip": True}


def _line(width: float) -> dict[str, Any]:
    return {"type": "line", "strokeWidth": width, "clip": True}


def _rule(width: float, dash: Sequence[int]) -> dict[str, Any]:
    return {"type": "rule", "strokeWidth": width, "strokeDash": dash, "clip": True}


def _layer(
    kind: str, mark: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], **encoding: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a layer with the colour of `kind`. An encoding of None removes the panel's: a mark as high as the plot."""
    return {"data": {"values": rows}, "mark": mark, "encoding": {"color": _look(kind, COLOURS), **encoding}}


def _look(name: str, looks: Mapping[str, str]) -> dict[str, Any]:
    scale = {"domain": list(looks), "range": list(looks.values())}
    legend = {"title": None, "orient": "top", "symbolOpacity": 1}
    return {"datum": name, "type": "nominal", "scale": scale, "legend": legend}


def _lines(panel: Panel, lines: Sequence[Sequence[Column]]) -> list[dict[str, Any]]:
    return [
        {"x": _place(panel, one.x), "y": one.middle, "line": number}
        for number, line in enumerate(lines)
        for one in line
    ]


def _extent(panel: Panel, line: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the area between the least and the largest sample; none where each column is one sample."""
    if all(one.low == one.high for one in line):
        return []
    return [{"x": _place(panel, one.x), "y": one.low, "y2": one.high} for one in line]


def _place(panel: Panel, x: float) -> float:
    """Return `x` as the axis has it: times become milliseconds of the clock in the file's time zone."""
    return x if panel.times is None else 1000 * (x + times.offset(panel.times.zone))
