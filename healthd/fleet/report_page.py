"""Builds the report as one HTML file: text, tables, charts, and the program that draws the charts.

All functions are pure.

The page fetches nothing: its Content-Security-Policy (CSP level 3, https://www.w3.org/TR/CSP3/) forbids all requests,
and allows only its own two scripts, by their digests. External text is escaped (HTML, 13.1.2 and 4.12.1.3:
https://html.spec.whatwg.org/), including in the charts' JSON.
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
from healthd.fleet.figures import COLOURS, Figure
from healthd.fleet.view import Column, Detail, Form, Table, View

# maximum characters of a caption above its chart; a longer caption appears above the table of the chart's numbers
MAX_CAPTION_LENGTH = 260
MAX_ROWS = 400  # maximum rows per table on the page; --json lists all
GENERATOR = "healthd fleet report"
# Defaults for all charts (https://vega.github.io/vega-lite/docs/config.html). Charts have no background, so that the
# page's background is visible. Legends are at the top, where they take no width from a narrow page. Text sizes are
# readable. report.js computes the number of legend columns from the page's width, because Vega reserves no room if it
# computes this number itself.
_CHART_CONFIG: dict[str, Any] = {
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
    """The page's assets.

    Attributes:
        style: CSS.
        bundle: Vega, Vega-Lite and vega-embed as one script.
        script: draws the charts.
    """

    style: str
    bundle: str
    script: str


@dataclass(frozen=True, slots=True)
class Report:
    """The report page's content.

    Attributes:
        coverage: a sentence about the period and the selection.
        opening: sentences for a manager.
        commands: maps each chapter's name to the command that prints its numbers.
        limits: notes about what this store cannot show.
        made_by: a sentence about how the report was made.
        command: the command line.
    """

    title: str
    coverage: str
    opening: tuple[str, ...]
    chapters: tuple[View, ...]
    commands: Mapping[str, str]
    limits: tuple[str, ...]
    sources: Table | None
    made_by: str
    command: str


def render_page(report: Report, assets: Assets) -> str:
    """Return the complete page. Raises ValueError if a chart contains NaN."""
    scripts = [_escape_script(assets.bundle), _escape_script(assets.script)]
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
{assets.style}{_hatch_rules()}</style>
</head>
<body>
{_hatch_patterns()}
{body}
{data}
{code}
</body>
</html>
"""


def is_report(beginning: str) -> bool:
    """Return True if this text is the beginning of a healthd report."""
    return f'<meta name="generator" content="{GENERATOR}">' in beginning


def embed_json(value: Any) -> str:
    """Return JSON in which no text can end the script element that contains it (HTML, 4.12.1.3)."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- parts of the page


def _body(report: Report, specs: list[str]) -> Iterator[str]:
    yield f"<header>\n<h1>{_text(report.title)}</h1>\n<p class=soft>{_text(report.coverage)}</p>\n</header>\n<main>"
    items = "\n".join(f"<li>{_text_with_units(sentence)}</li>" for sentence in report.opening)
    yield f'<section class="opening" aria-label="In short">\n<ol>\n{items}\n</ol>\n</section>'
    links = [
        *((f"chapter-{chapter_link.name}", chapter_link.title) for chapter_link in report.chapters),
        ("limits", LIMITS),
    ]
    listed = "\n".join(f'<li><a href="#{_text(name)}">{_text(title)}</a></li>' for name, title in links)
    yield f'<nav aria-label="Chapters">\n<ul>\n{listed}\n</ul>\n</nav>'
    for chapter in report.chapters:
        yield from _chapter(chapter, report.commands.get(chapter.name, ""), specs)
    yield f'<section class="chapter" id="limits">\n<h2>{LIMITS}</h2>'
    yield from _notes(report.limits)
    if report.sources is not None:
        yield from _table(report.sources)
    yield "</section>\n</main>\n<footer>"
    yield f"<p class=soft>{_text(report.made_by)} <code>{_text(report.command)}</code></p>"
    yield f"<p class=soft>{_NO_NETWORK}</p>\n</footer>"


LIMITS = "Limits of this report"
_NO_NETWORK = "This file needs no network: the program that draws the charts is in the file and fetches nothing."


def _chapter(chapter: View, command: str, specs: list[str]) -> Iterator[str]:
    yield f'<section class="chapter" id="chapter-{_text(chapter.name)}">\n<h2>{_text(chapter.title)}</h2>'
    yield from (f"<p>{_text_with_units(sentence)}</p>" for sentence in chapter.sentences)
    for figure in chapter.figures:
        yield from _figure(figure, specs)
    for table in chapter.tables:
        yield from _table(table)
    for detail in chapter.details:
        yield from _detail(detail)
    yield from _notes(chapter.notes)
    if command:
        yield f"<p class=soft>As numbers: <code>{_text(command)}</code></p>"
    yield "</section>"


def _notes(notes: Iterable[str]) -> Iterator[str]:
    items = "\n".join(f"<li>{_text_with_units(note)}</li>" for note in notes)
    if items:
        yield f'<ul class="notes">\n{items}\n</ul>'


def _figure(figure: Figure, specs: list[str]) -> Iterator[str]:
    name = f"chart-{len(specs)}"
    specs.append(embed_json(figure_spec(figure)))
    yield f"<figure>\n<figcaption>{_text(figure.title)}</figcaption>"
    caption = f"<p>{_text_with_units(figure.description)}</p>"
    if len(figure.description) <= MAX_CAPTION_LENGTH:
        yield caption
    yield f'<div class="chart" data-chart="{name}"></div>'
    yield "<details>\n<summary>The numbers in this chart</summary>"
    if len(figure.description) > MAX_CAPTION_LENGTH:
        yield caption
    yield from _table(figure_table(figure))
    yield "</details>\n</figure>"


def _detail(detail: Detail) -> Iterator[str]:
    lines = "\n".join(_text(line) for line in detail.lines)
    items = "\n".join(f"<li>{_text_with_units(item)}</li>" for item in detail.items)
    yield f"<details>\n<summary>{_text_with_units(detail.title)}</summary>\n<pre>{lines}</pre>"
    yield f"<ul>\n{items}\n</ul>\n</details>" if items else "</details>"


def _table(table: Table) -> Iterator[str]:
    """Yield a table in a region that can be scrolled sideways, including by keyboard. The page itself then does not
    scroll."""
    label = _text(table.title)
    right_aligned = frozenset(number for number, column in enumerate(table.columns) if column.form.right_aligned)
    titles = [column.title for column in table.columns]
    cell_rows = table.cell_texts()
    yield f'<div class="wide" tabindex="0" role="region" aria-label="{label}">\n<table>'
    yield f"<caption>{label}</caption>"
    yield f"<thead><tr>{''.join(_cells('th scope=col', titles, right_aligned))}</tr></thead>\n<tbody>"
    for row in cell_rows[:MAX_ROWS]:
        yield f"<tr>{''.join(_cells('td', row, right_aligned))}</tr>"
    yield "</tbody>\n</table>\n</div>"
    if len(cell_rows) > MAX_ROWS:
        yield f"<p class=soft>The first {MAX_ROWS} of {len(table.rows):,} rows.</p>"
    elif table.hidden_rows_note:
        yield f"<p class=soft>{_text(table.hidden_rows_note)}</p>"


def _cells(tag: str, cells: Sequence[str], numbers: frozenset[int]) -> Iterator[str]:
    for number, cell in enumerate(cells):
        kind = (
            " class=number"
            if number in numbers
            else " class=long"
            if tag == "td" and len(cell) > LONG_CELL_LENGTH
            else ""
        )
        yield f"<{tag}{kind}>{_text(cell)}</{tag.partition(' ')[0]}>"


# a cell with more characters gets a minimum width, because on a phone it could become one word wide
LONG_CELL_LENGTH = 40


# --- charts


def figure_spec(figure: Figure) -> dict[str, Any]:
    """Return the figure's Vega-Lite specification with the page's style, and its description for screen readers."""
    description = f"{figure.title}. {figure.description}"
    fit = {"type": "fit-x", "contains": "padding", "resize": True}
    return {**figure.spec, "description": description, "config": _CHART_CONFIG, "autosize": fit}


def figure_table(figure: Figure) -> Table:
    """Return the records in the figure's largest layer as a table."""
    records = max((layer.records for layer in figure.layers), key=len)
    names = tuple(dict.fromkeys(name for record in records for name in record))
    return Table(figure.title, tuple(_column(name, [item.get(name) for item in records]) for name in names), records)


def _column(name: str, values: Sequence[Any]) -> Column:
    present = [value for value in values if value is not None]
    is_numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in present)
    return Column(name.replace("_", " "), lambda record: record.get(name), Form(_value, is_numeric))


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


# Bars and areas can be distinguished without colour, because each colour except the first has its own hatching. Vega
# has no patterns, so these CSS rules select the fill colours that Vega writes.
_STROKES = (
    "M-1,1L1,-1M0,8L8,0M7,9L9,7",
    "M2,2h1M6,6h1",
    "M4,0V8",
    "M-1,7L1,9M0,0L8,8M7,-1L9,1",
    "M0,4H8",
    "M0,4H8M4,0V8",
)
_HATCHES = tuple(enumerate(zip(COLOURS[1:], _STROKES, strict=False), 1))


def _hatch_patterns() -> str:
    patterns = "".join(
        f'<pattern id="hatch-{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{colour}"/>'
        f'<path d="{stroke}" stroke="#000" stroke-opacity=".45" stroke-width="1.3" fill="none"/></pattern>'
        for number, (colour, stroke) in _HATCHES
    )
    return f'<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>{patterns}</defs></svg>'


def _hatch_rules() -> str:
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


def _text_with_units(text: str) -> str:
    """Insert non-breaking spaces between numbers and their units in a sentence."""
    return _UNIT.sub("&nbsp;", _text(text))


_UNIT = regex(r"(?<=\d) (?=%|(?:s|min|h|d)\b)")


def _escape_script(script: str) -> str:
    """Return the script in a form that does not end its element (HTML, 4.12.1.3).

    Line ends are normalised as in an HTML parser, because the digest is computed from the parsed text.
    """
    text = script.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
