"""The report as one HTML file: text, tables, charts, and the program that draws them. Pure.

Nothing is fetched: the page's own Content-Security-Policy (CSP level 3, https://www.w3.org/TR/CSP3/) forbids each
request, and runs the two scripts that are in it by their digests and nothing else. Text of others is escaped (HTML,
13.1.2 and 4.12.1.3: https://html.spec.whatwg.org/), also in the JSON of the charts.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthd.common.text import printable, regex
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table

MOST_WORDS = 260  # characters of what a chart shows that stand above it; more stand with its numbers
MOST_ROWS = 400  # of a table on the page; --json has all
GENERATOR = "healthd fleet report"
# What a chart says nothing of. Vega-Lite's config (https://vega.github.io/vega-lite/docs/config.html): no background,
# so that the page's is seen; legends above, where they take no width from a narrow page; text that can be read there.
# report.js sets the legend's columns by the width of the page: Vega reserves no room for rows of a computed number.
_LOOK: dict[str, Any] = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal", "labelLimit": 150},
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelLimit": 280,
    },
    "header": {"labelFontSize": 12, "titleFontSize": 12},
    "range": {"category": list(COLOURS)},
}


@dataclass(frozen=True, slots=True)
class Assets:
    """style: CSS. bundle: Vega, Vega-Lite and vega-embed, as one script. script: what draws with them."""

    style: str
    bundle: str
    script: str


@dataclass(frozen=True, slots=True)
class Report:
    """covered   a sentence: of what time and of what it is
    opening   what a manager reads first
    ways      name of a chapter -> the command that tells the same as numbers
    limits    what nobody can know from this store
    made_by   how it was made: a sentence; command: with what
    """

    title: str
    covered: str
    opening: tuple[str, ...]
    chapters: tuple[Chapter, ...]
    ways: Mapping[str, str]
    limits: tuple[str, ...]
    sources: Table | None
    made_by: str
    command: str


def page(report: Report, assets: Assets) -> str:
    """The file, whole. Raises ValueError for a chart with a number that is none (NaN)."""
    scripts = [_closed(assets.bundle), _closed(assets.script)]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    specs: list[str] = []
    body = "\n".join(_body(report, specs))
    data = "\n".join(
        f'<script type="application/json" id="chart-{number}">{spec}</script>' for number, spec in enumerate(specs)
    )
    code = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="generator" content="{GENERATOR}">
<meta name="referrer" content="no-referrer">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{_text(report.title)}</title>
<style>
{assets.style}{_hatched()}</style>
</head>
<body>
{_hatches()}
{body}
{data}
{code}
</body>
</html>
"""


def is_report(beginning: str) -> bool:
    """Whether a file that begins so is one of ours."""
    return f'<meta name="generator" content="{GENERATOR}">' in beginning


def inlined(value: Any) -> str:
    """JSON that cannot end the script element in which it stands, whatever is in it (HTML, 4.12.1.3)."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- the parts


def _body(report: Report, specs: list[str]) -> Iterator[str]:
    yield f"<header>\n<h1>{_text(report.title)}</h1>\n<p class=soft>{_text(report.covered)}</p>\n</header>\n<main>"
    items = "\n".join(f"<li>{_prose(sentence)}</li>" for sentence in report.opening)
    yield f'<section class="opening" aria-label="In short">\n<ol>\n{items}\n</ol>\n</section>'
    links = [*((f"chapter-{one.name}", one.title) for one in report.chapters), ("limits", LIMITS)]
    listed = "\n".join(f'<li><a href="#{_text(name)}">{_text(title)}</a></li>' for name, title in links)
    yield f'<nav aria-label="Chapters">\n<ul>\n{listed}\n</ul>\n</nav>'
    for chapter in report.chapters:
        yield from _chapter(chapter, report.ways.get(chapter.name, ""), specs)
    yield f'<section class="chapter" id="limits">\n<h2>{LIMITS}</h2>'
    yield from _notes(report.limits)
    if report.sources is not None:
        yield from _table(report.sources)
    yield "</section>\n</main>\n<footer>"
    yield f"<p class=soft>{_text(report.made_by)} <code>{_text(report.command)}</code></p>"
    yield f"<p class=soft>{_NO_NETWORK}</p>\n</footer>"


LIMITS = "What this report cannot know"
_NO_NETWORK = "This file needs no network: the program inside it draws the charts and fetches nothing."


def _chapter(chapter: Chapter, way: str, specs: list[str]) -> Iterator[str]:
    yield f'<section class="chapter" id="chapter-{_text(chapter.name)}">\n<h2>{_text(chapter.title)}</h2>'
    yield from (f"<p>{_prose(sentence)}</p>" for sentence in chapter.sentences)
    for chart in chapter.charts:
        yield from _chart(chart, specs)
    for table in chapter.tables:
        yield from _table(table)
    yield from _notes(chapter.notes)
    if way:
        yield f"<p class=soft>As numbers: <code>{_text(way)}</code></p>"
    yield "</section>"


def _notes(notes: Iterable[str]) -> Iterator[str]:
    items = "\n".join(f"<li>{_prose(note)}</li>" for note in notes)
    if items:
        yield f'<ul class="notes">\n{items}\n</ul>'


def _chart(chart: Chart, specs: list[str]) -> Iterator[str]:
    name = f"chart-{len(specs)}"
    specs.append(inlined(drawn(chart)))
    yield f"<figure>\n<figcaption>{_text(chart.title)}</figcaption>"
    words = f"<p>{_prose(chart.words)}</p>"
    if len(chart.words) <= MOST_WORDS:
        yield words
    yield f'<div class="chart" data-chart="{name}"></div>'
    numbers = behind(chart)
    if numbers is not None:
        yield "<details>\n<summary>The numbers of this chart</summary>"
        if len(chart.words) > MOST_WORDS:
            yield words
        yield from _table(numbers)
        yield "</details>"
    yield "</figure>"


def _table(table: Table) -> Iterator[str]:
    """In a region of its own that scrolls sideways, also by the keyboard, so that a narrow page does not."""
    label = _text(table.title)
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{label}">\n<table>'
    yield f"<caption>{label}</caption>"
    yield f"<thead><tr>{''.join(_cells('th scope=col', table.columns, table.numbers))}</tr></thead>\n<tbody>"
    for row in table.rows[:MOST_ROWS]:
        yield f"<tr>{''.join(_cells('td', row, table.numbers))}</tr>"
    yield "</tbody>\n</table>\n</div>"
    if len(table.rows) > MOST_ROWS:
        yield f"<p class=soft>The first {MOST_ROWS} of {len(table.rows):,} rows.</p>"


def _cells(tag: str, cells: Sequence[str], numbers: frozenset[int]) -> Iterator[str]:
    for number, cell in enumerate(cells):
        kind = " class=number" if number in numbers else " class=long" if tag == "td" and len(cell) > LONG_CELL else ""
        yield f"<{tag}{kind}>{_text(cell)}</{tag.partition(' ')[0]}>"


LONG_CELL = 40  # characters: a sentence, which must not be one word wide on a phone


# --- charts


def drawn(chart: Chart) -> dict[str, Any]:
    """The chart's Vega-Lite with the page's look below its own, and its words for who does not see it."""
    spec = dict(chart.spec)
    spec["description"] = f"{chart.title}. {chart.words}"
    spec["config"] = _over(_LOOK, {k: v for k, v in spec.get("config", {}).items() if (k, v) not in _ALTAIRS})
    spec["autosize"] = {"type": "fit-x", "contains": "padding", "resize": True}
    spec.pop("$schema", None)  # an address, which nobody is to ask
    return spec


# What Altair says of each chart: it is no choice of the chart's.
_ALTAIRS = (("view", {"continuousWidth": 300, "continuousHeight": 300}),)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _over(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def behind(chart: Chart) -> Table | None:
    """The data that the chart draws, as a table: the largest of its parts. None if it has none in it."""
    found = max(_data(chart.spec), key=len, default=[])
    columns = tuple(dict.fromkeys(name for row in found for name in row))
    if not columns:
        return None
    kinds = {column: [row[column] for row in found if row.get(column) is not None] for column in columns}
    numbers = frozenset(
        number
        for number, column in enumerate(columns)
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in kinds[column])
    )
    rows = tuple(tuple(_value(row.get(column)) for column in columns) for row in found)
    return Table(chart.title, tuple(column.replace("_", " ") for column in columns), rows, numbers)


def _data(spec: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows that stand in a Vega-Lite specification, of itself and of its layers."""
    if isinstance(spec, list):
        for one in spec:
            yield from _data(one)
    elif isinstance(spec, dict):
        data = spec.get("data")
        values = data.get("values") if isinstance(data, dict) else None
        if isinstance(values, list):
            yield [row for row in values if isinstance(row, dict)]
        yield from spec.get("datasets", {}).values()
        for key in ("layer", "hconcat", "vconcat", "concat", "spec"):
            yield from _data(spec.get(key))


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


# Bars and areas are told apart without colour: each colour but the first is hatched in a way of its own. By the fill
# that Vega writes, since Vega itself has no patterns.
_STROKES = (
    "M-1,1L1,-1M0,8L8,0M7,9L9,7",
    "M2,2h1M6,6h1",
    "M4,0V8",
    "M-1,7L1,9M0,0L8,8M7,-1L9,1",
    "M0,4H8",
    "M0,4H8M4,0V8",
)
_HATCHES = tuple(enumerate(zip(COLOURS[1:], _STROKES, strict=False), 1))


def _hatches() -> str:
    patterns = "".join(
        f'<pattern id="hatch-{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{colour}"/>'
        f'<path d="{stroke}" stroke="#000" stroke-opacity=".45" stroke-width="1.3" fill="none"/></pattern>'
        for number, (colour, stroke) in _HATCHES
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{patterns}</defs></svg>'


def _hatched() -> str:
    rules = []
    for number, (colour, _) in _HATCHES:
        fill = f'[fill="{colour}" i]'
        marks = [f".mark-{mark} path{fill}" for mark in ("rect", "area", "arc")]
        places = [f".chart svg {mark}" for mark in marks] + [
            f".chart:has({mark}) .role-legend-symbol path{fill}" for mark in marks
        ]
        rules.append(f"{', '.join(places)} {{ fill: url(#hatch-{number}); }}\n")
    return "".join(rules)


# --- text


def _text(text: str) -> str:
    return html.escape(printable(text), quote=True)


def _prose(text: str) -> str:
    """A sentence in which a line never breaks between a number and its unit."""
    return _UNIT.sub("&nbsp;", _text(text))


_UNIT = regex(r"(?<=\d) (?=%|(?:s|min|h|d)\b)")


def _closed(script: str) -> str:
    """The same program in a form that does not end its element (HTML, 4.12.1.3), with the line ends that a parser
    makes of it, as its digest is of what is parsed."""
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
