"""`healthd failslow --plot FILE`: draws the series with onset, relief and peers, as SVG or as a page with a table.

Requires the optional dependencies `healthd[failslow]`: vl-convert renders a Vega-Lite chart without a browser. The
files contain no scripts and fetch nothing. The chart is built directly as Vega-Lite JSON
(https://vega.github.io/vega-lite/docs/): altair would take 10 s to build 24 panels that render in 2 s.
"""

from __future__ import annotations

import html
import importlib.util
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from healthd.common.atomic_files import replace_file
from healthd.common.errors import HealthdError
from healthd.common.page import plural
from healthd.common.text import printable
from healthd.failslow import times
from healthd.failslow.model import Diagnosis, Point, Series
from healthd.failslow.panels import Column, Panel, build_panels, format_percent, index_text, series_label

ENDINGS = (".svg", ".html")
MAX_ROWS = 1000  # maximum rows of the table on the page; --json lists all


class InvalidPlotPath(HealthdError):
    """The file name of a plot has an unknown ending, or the file exists and must not be replaced."""


class MissingExtra(HealthdError):
    """The packages for plots are not installed."""


def file_ending(path: str) -> str:
    """Return ".svg" or ".html". Raises InvalidPlotPath."""
    for suffix in ENDINGS:
        if path.lower().endswith(suffix):
            return suffix
    raise InvalidPlotPath(f"{path}: the file name of a plot must end in {' or '.join(ENDINGS)}")


def check_plot(path: str, inputs: Sequence[str]) -> None:
    """Check, before the analysis, that a plot can be drawn and may replace the file at `path`.

    A symbolic link is rejected, because writing would replace the link instead of its target. Raises MissingExtra,
    InvalidPlotPath.
    """
    file_ending(path)
    if importlib.util.find_spec("vl_convert") is None:
        raise MissingExtra("a plot needs the package vl-convert-python (extra failslow): pip install vl-convert-python")
    try:
        existing = os.lstat(path)
    except OSError:
        return  # the file does not exist yet; writing it will report any other problem
    if stat.S_ISLNK(existing.st_mode):
        raise InvalidPlotPath(f"{path}: is a symbolic link; name its target")
    if not stat.S_ISREG(existing.st_mode) and not stat.S_ISDIR(existing.st_mode):
        raise InvalidPlotPath(f"{path}: is not a regular file")
    for input_path in inputs:
        if os.path.exists(input_path) and os.path.samestat(os.stat(input_path), existing):
            raise InvalidPlotPath(f"{path}: is also an input file")


def write_plot(series: Sequence[Series], diagnosis: Diagnosis, path: str) -> None:
    """Write the plot atomically. Raises InvalidPlotPath, ownership.Untrusted, OSError."""
    kind = file_ending(path)
    drawn, hidden = build_panels(series, diagnosis)
    picture = svg(drawn, headline(series, diagnosis), hidden_note(hidden))
    replace_file(path, _page(series, diagnosis, picture) if kind == ".html" else picture, mode=0o644)


def headline(series: Sequence[Series], diagnosis: Diagnosis) -> str:
    """Return the diagnosis as one line."""
    slow = sum(bool(points) for points in diagnosis.points)
    found = [plural(len(diagnosis.suspects), "suspect")] if diagnosis.suspects else []
    found += ["the job is slow"] if diagnosis.slow_jobs else []
    if not found and slow:
        found = [f"{slow:,} slow, no suspect"]
    if diagnosis.slow_throughout:
        found += [f"{len(diagnosis.slow_throughout):,} slower than the peers throughout"]
    if not found:
        found = ["nothing became slow"]
    samples = sum(len(item.value) for item in series)
    return f"{len(series):,} series, {plural(samples, 'sample')}: {', '.join(found)}"


def hidden_note(hidden: int) -> str:
    return f"{plural(hidden, 'more panel')} would not be readable here; --json lists all points." if hidden else ""


PEERS_NOTE = (
    "Grey: the peers' median and middle 80 %, scaled to the level of this series before its onset, "
    "because each series is compared with its own past."
)


# --- the chart

WIDTH, HEIGHT = 880, 150  # size of one panel in pixels
MAX_LABELS = 12  # maximum number of slowdowns written above one panel
# vl-convert contains this font, so a chart looks the same on every machine
FONT = "'Liberation Sans', Arial, sans-serif"
SERIES, PEERS, BEFORE, SLOW, JOB = "the series", "its peers", "before", "slow", "the job is slow"
COLOURS = {SERIES: "#0b5cad", PEERS: "#6b7785", BEFORE: "#1b1f24", SLOW: "#c2410c", JOB: "#b08800"}
SHAPES = {"onset": "triangle-up", "detected": "diamond", "relief": "triangle-down"}
DASHES = {"onset": [1, 0], "detected": [1, 3], "relief": [4, 3]}
# Vega expression for time-axis labels: a date at midnight, and seconds only if they are not zero.
TIME = (
    "utcFormat(datum.value, utcseconds(datum.value) ? '%H:%M:%S' "
    ": utchours(datum.value) || utcminutes(datum.value) ? '%H:%M' : '%Y-%m-%d')"
)


def svg(panels: Sequence[Panel], title: str, note: str = "") -> str:
    """Draw the panels below each other.

    Args:
        note: a sentence below the title.
    """
    import vl_convert

    text: str = vl_convert.vegalite_to_svg(spec(panels, title, note))
    return text


def spec(panels: Sequence[Panel], title: str, note: str = "") -> dict[str, Any]:
    """Return the chart as a Vega-Lite specification."""
    return {
        "background": "white",
        "config": {
            "font": FONT,
            "view": {"stroke": None},
            "axis": {"labelFontSize": 12},
            "legend": {"labelFontSize": 12, "columnPadding": 24, "labelLimit": 0},
        },
        "title": _title(title, [note] if note else [], 15),
        "spacing": 24,
        "resolve": {"scale": {"color": "shared", "shape": "shared"}},
        "vconcat": [_panel(panel) for panel in panels],
    }


def _title(title: str, subtitle: Sequence[str], size: int) -> dict[str, Any]:
    lines = [printable(line) for line in subtitle]
    return {"text": printable(title), "subtitle": lines, "anchor": "start", "fontSize": size, "limit": WIDTH}


def _panel(panel: Panel) -> dict[str, Any]:
    above = [f"samples above this plot: {panel.above:,}"] if panel.above else []
    y = {"domain": [panel.bottom, panel.top], "zero": False, "nice": False}
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "title": _title(panel.title, [*panel.captions, *above], 13),
        "encoding": {
            "x": _x_axis(panel),
            "y": {"field": "y", "type": "quantitative", "title": None, "scale": y, "axis": {"tickCount": 4}},
        },
        "layer": [layer for layer in _layers(panel) if layer["data"]["values"]],
    }


def _x_axis(panel: Panel) -> dict[str, Any]:
    domain = [_axis_value(panel, panel.begin), _axis_value(panel, panel.end)]
    if panel.times is None:
        scale = {"domain": domain, "zero": False, "nice": False}
        return {"field": "x", "type": "quantitative", "title": None, "scale": scale}
    scale = {"domain": domain, "type": "utc", "nice": False}
    return {"field": "x", "type": "temporal", "title": None, "scale": scale, "axis": {"labelExpr": TIME}}


def _layers(panel: Panel) -> Iterator[dict[str, Any]]:
    """Yield the layers from back to front."""
    slow = [{"x": _axis_value(panel, span.onset), "x2": _axis_value(panel, span.end)} for span in panel.spans]
    bands = [{"x": _axis_value(panel, begin), "x2": _axis_value(panel, end)} for begin, end in panel.job_spans]
    earlier = _axis_value(panel, panel.begin + (panel.end - panel.begin) / 4) - _axis_value(panel, panel.begin)
    before, during = [], []
    for span, at in zip(panel.spans, slow, strict=True):
        if math.isfinite(span.before):
            before.append({"x": at["x"] - earlier, "x2": at["x2"], "y": span.before})
            during.append({**at, "y": span.level})

    yield _layer(JOB, _SHADE, bands, x2=_X2, y=None)
    yield _layer(SLOW, _SHADE, slow, x2=_X2, y=None)
    yield _layer(PEERS, _EXTENT, _extent(panel, panel.peers), y2={"field": "y2"})
    yield _layer(PEERS, _line(1.2), _lines(panel, panel.peer_lines or [panel.peers]), detail={"field": "line"})
    yield _layer(SERIES, _EXTENT, _extent(panel, panel.line), y2={"field": "y2"})
    yield _layer(SERIES, _line(1.4), _lines(panel, [panel.line]), detail={"field": "line"})
    yield _layer(BEFORE, _rule(2, [5, 3]), before, x2=_X2)
    yield _layer(SLOW, _rule(2, [1, 0]), during, x2=_X2)
    for name in SHAPES:
        moments = [getattr(span, "alarm" if name == "detected" else name) for span in panel.spans]
        rows = [{"x": _axis_value(panel, at)} for at in moments if at is not None]
        yield _layer(SLOW, _rule(1.4, DASHES[name]), rows, y=None)
        mark = {"type": "point", "filled": True, "size": 70, "opacity": 1}
        yield _layer(SLOW, mark, rows, y={"value": HEIGHT}, shape=_scale_encoding(name, SHAPES))
    labels = [
        {"x": (at["x"] + at["x2"]) / 2, "text": format_percent(span.slowdown)}
        for span, at in zip(panel.spans[:MAX_LABELS], slow, strict=False)
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
    """Return a layer with the colour of `kind`.

    An encoding that is None removes the panel's encoding. Without an encoding for y, a mark is as high as the plot.
    """
    return {"data": {"values": rows}, "mark": mark, "encoding": {"color": _scale_encoding(kind, COLOURS), **encoding}}


def _scale_encoding(name: str, values: Mapping[str, str]) -> dict[str, Any]:
    scale = {"domain": list(values), "range": list(values.values())}
    legend = {"title": None, "orient": "top", "symbolOpacity": 1}
    return {"datum": name, "type": "nominal", "scale": scale, "legend": legend}


def _lines(panel: Panel, lines: Sequence[Sequence[Column]]) -> list[dict[str, Any]]:
    return [
        {"x": _axis_value(panel, column.x), "y": column.middle, "line": number}
        for number, line in enumerate(lines)
        for column in line
    ]


def _extent(panel: Panel, line: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the area between the smallest and largest samples, or [] if each column is a single sample."""
    if all(column.low == column.high for column in line):
        return []
    return [{"x": _axis_value(panel, column.x), "y": column.low, "y2": column.high} for column in line]


def _axis_value(panel: Panel, x: float) -> float:
    """Return `x` as an axis value: times become milliseconds in the file's time zone."""
    return x if panel.times is None else 1000 * (x + times.offset(panel.times.zone))


# --- the page

# The page may use only its own style (CSP Level 3: https://www.w3.org/TR/CSP3/).
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: #fff; color: #1b1f24;
  font: 1rem/1.5 system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } .wide:focus-visible { outline: 2px solid #0b5cad; }
table { border-collapse: collapse; font-size: .9rem; overflow-wrap: normal; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #e3e7ec;
  vertical-align: top; white-space: nowrap; }
.soft { color: #59636e; }
"""


def _page(series: Sequence[Series], diagnosis: Diagnosis, picture: str) -> str:
    title = headline(series, diagnosis)
    body = "\n".join((*_result_paragraphs(diagnosis), *_pictures(picture), *_table(series, diagnosis)))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="generator" content="healthd failslow">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{_text(title)}</h1>
{body}
<p class="soft">Made by healthd failslow. This file contains no scripts and loads no other files.</p> </body> </html>
"""


def _pictures(picture: str) -> Iterator[str]:
    yield f'<h2>Charts</h2>\n<p class="soft">{PEERS_NOTE}</p>'
    yield f'<div class="wide" tabindex="0" role="region" aria-label="Charts">\n{picture}\n</div>'


def _result_paragraphs(diagnosis: Diagnosis) -> Iterator[str]:
    for suspect in diagnosis.suspects:
        subject = f"{suspect.subject_kind} {suspect.subject}".strip()
        evidence = "".join(f"<li>{_text(sentence)}</li>" for sentence in suspect.evidence)
        cause = suspect.cause.value.replace("_", " ")
        yield f"<p>Suspect: {cause} on <bdi>{_text(subject)}</bdi>, {suspect.confidence.value} confidence.</p>"
        yield f"<ul>{evidence}</ul>" if evidence else ""
    for job in diagnosis.slow_jobs:
        subject = f" in group {job.group}" if job.group else ""
        yield (
            f"<p>The job{_text(subject)} is slow, {format_percent(job.point.slowdown)}, without a suspect: "
            f"{_text(job.reason)} ({len(job.series):,} of {job.peers:,} series).</p>"
        )
    for slow in diagnosis.slow_throughout:
        subject = f"{slow.series_kind} {slow.series}".strip()
        yield (
            f"<p><bdi>{_text(subject)}</bdi> is slower than its {slow.peers:,} peers throughout ({slow.ratio:.2f} x): "
            "the time when it became slow is unknown.</p>"
        )
    if not diagnosis.suspects and not diagnosis.slow_jobs:
        yield "<p>No suspects, and no job is slow as a whole.</p>"
    for note in diagnosis.notes:
        yield f'<p class="soft">{_text(note)}</p>'


COLUMNS = ("series", "group", "onset", "detected at", "relief", "slowdown", "confidence")


def _table(series: Sequence[Series], diagnosis: Diagnosis) -> Iterator[str]:
    rows = [(item, point) for item, points in zip(series, diagnosis.points, strict=True) for point in points]
    if not rows:
        return
    yield "<h2>Everything that slowed down</h2>"
    yield '<div class="wide" tabindex="0" role="region" aria-label="Points">\n<table>'
    yield f"<thead><tr>{''.join(f'<th scope=col>{name}</th>' for name in COLUMNS)}</tr></thead>\n<tbody>"
    for item, point in rows[:MAX_ROWS]:
        yield f"<tr>{''.join(f'<td><bdi>{_text(cell)}</bdi></td>' for cell in _cells(item, point))}</tr>"
    yield "</tbody>\n</table>\n</div>"
    if len(rows) > MAX_ROWS:
        yield f'<p class="soft">The first {MAX_ROWS:,} of {len(rows):,} rows; --json lists all.</p>'


def _cells(series: Series, point: Point) -> tuple[str, ...]:
    return (
        series_label(series),
        series.group,
        index_text(series, point.onset_index),
        index_text(series, point.alarm_index),
        "ongoing" if point.relief_index is None else index_text(series, point.relief_index),
        format_percent(point.slowdown),
        f"{point.confidence:.2f}",
    )


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)
