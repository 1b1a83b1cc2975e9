"""Panels of fail-slow as SVG (https://www.w3.org/TR/SVG11/): no library, no script, nothing that is fetched. Pure.

What a colour says, a shape or a word says too. Dark where the reader's system is (prefers-color-scheme, Media Queries
Level 5: https://www.w3.org/TR/mediaqueries-5/), also where a page shows the file as an image.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

from healthd.common.text import printable
from healthd.failslow import times
from healthd.failslow.panels import Column, Panel, Stretch, number, percent

STYLE = """
:root, svg { --paper: #fff; --ink: #1b1f24; --soft: #59636e; --grid: #e3e7ec; --line: #0b5cad; --peers: #6b7785;
  --slow: #c2410c; --job: #7a5a00; }
@media (prefers-color-scheme: dark) { :root, svg { --paper: #14181d; --ink: #e8ebef; --soft: #a6b0bb; --grid: #2b333c;
  --line: #7db8f5; --peers: #97a3b0; --slow: #ff9a66; --job: #e2bd5a; } }
svg text { font: 12px system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; fill: var(--soft); }
svg text.title { font-size: 14px; font-weight: 600; fill: var(--ink); }
svg text.slow { font-weight: 600; fill: var(--slow); }
.paper { fill: var(--paper); }
.grid { stroke: var(--grid); fill: none; }
.line { stroke: var(--line); stroke-width: 1.4; stroke-linejoin: round; fill: none; }
.extent { fill: var(--line); fill-opacity: .28; }
.peers { fill: var(--peers); fill-opacity: .22; }
.median, .peer { stroke: var(--peers); stroke-width: 1.2; fill: none; }
.peer { stroke-opacity: .75; }
.stretch { fill: var(--slow); fill-opacity: .13; }
.before { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 5 3; }
.level { stroke: var(--slow); stroke-width: 2.4; }
.onset, .relief { stroke: var(--slow); stroke-width: 1.4; }
.relief { stroke-dasharray: 4 3; }
.alarm { stroke: var(--slow); stroke-width: 1; stroke-dasharray: 1 3; }
.sign { fill: var(--slow); stroke: var(--slow); stroke-width: 1.2; }
.hollow { fill: var(--paper); }
.job { fill: var(--job); fill-opacity: .16; }
.edge { stroke: var(--job); stroke-width: 3; }
"""
LINE_HEIGHT = 16
LETTER = 6.6  # pixels of an ordinary one at 12 px: what a line of words is broken by
LEFT, RIGHT = 58, 14  # of a plot: room for its numbers
STRIP = 18  # above a plot: "+65 %"
SIGNS = 12  # below a plot: onset, alarm, relief
AXIS = 18  # below that: numbers
LONGEST = 160  # characters of a name that are shown; hovering shows all


def picture(panels: Sequence[Panel], width: int, title: str, more: str = "", of_page: bool = False) -> str:
    """An <svg> of that many pixels. more: a sentence below it. of_page: a page has STYLE and the title already."""
    inner = width - LEFT - RIGHT
    height = 130 if width < 500 else 150
    parts: list[str] = []
    y = 6.0
    for words in () if of_page else _broken(_cut(title), width, LETTER * 1.25):
        y += LINE_HEIGHT + 2
        parts.append(_text(words, 8, y, "title"))
    for row in _legend(panels, width):
        y += LINE_HEIGHT + 2
        parts.append(f'<g class="legend" transform="translate(0 {_number(y)})">{row}</g>')
    for panel in panels:
        y += 14
        parts.append(f'<g class="panel" role="group" aria-label="{_escaped(_cut(panel.title))}">')
        for words, kind in _above(panel, width):
            y += LINE_HEIGHT
            parts.append(_text(words, 8, y, kind))
        y += STRIP + 2
        parts += [
            f'<g transform="translate({LEFT} {_number(y)})">',
            *_plot(panel, inner, height, width),
            "</g>",
            "</g>",
        ]
        y += height + SIGNS + AXIS
    for words in _broken(more, width):
        y += LINE_HEIGHT + 2
        parts.append(_text(words, 8, y, "soft"))
    total = _number(y + 12)
    style = "" if of_page else f"<style>{STYLE}</style>"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}" '
            f'role="group" aria-label="{_escaped(title)}" style="max-width: 100%; height: auto">{style}',
            f'<defs><clipPath id="plot-{width}"><rect width="{inner}" height="{height}"/></clipPath></defs>',
            f'<rect class="paper" width="{width}" height="{total}"/>',
            *parts,
            "</svg>",
            "",
        )
    )


# --- words


def _above(panel: Panel, width: int) -> Iterator[tuple[str, str]]:
    for part in _broken(_cut(panel.title), width, LETTER * 1.25):
        yield part, "title"
    for number_, words in enumerate(panel.words):
        for part in _broken(_cut(words), width):
            yield part, "slow" if number_ == 1 else "soft"


def _broken(text: str, width: int, letter: float = LETTER) -> list[str]:
    return textwrap.wrap(printable(text), max(20, int((width - 16) / letter)))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _text(words: str, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{_number(x)}" y="{_number(y)}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    return f'<text class="{kind}" {place}>{_escaped(words)}</text>'


def _escaped(text: str) -> str:
    """Printable characters, which XML 1.0 has all, with its markup escaped."""
    return html.escape(printable(text), quote=True)


def _title(words: str) -> str:
    return f"<title>{_escaped(words)}</title>"


def _number(value: float) -> str:
    """Of pixels: a tenth is enough."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def _legend(panels: Sequence[Panel], width: int) -> Iterator[str]:
    """What each sign means that is there, in rows."""
    stretches = [stretch for panel in panels for stretch in panel.stretches]
    signs = [
        (True, '<path class="line" d="M0,-4H16"/>', "the series"),
        (any(p.peers for p in panels), f'{_BLOCK.format("peers")}<path class="median" d="M0,-4H16"/>', "its peers"),
        (any(p.thin for p in panels), '<path class="peer" d="M0,-4H16"/>', "a peer"),
        (bool(stretches), '<path class="before" d="M0,-4H16"/>', "before"),
        (bool(stretches), '<path class="level" d="M0,-4H16"/>', "slow"),
        (bool(stretches), '<path class="sign" d="M8,-9L13,0H3Z"/>', "onset"),
        (bool(stretches), '<path class="sign" d="M8,-10L13,-5L8,0L3,-5Z"/>', "known"),
        (any(one.relief is not None for one in stretches), '<path class="sign hollow" d="M8,-9L13,0H3Z"/>', "relief"),
        (any(p.bands for p in panels), f'{_BLOCK.format("job")}<path class="edge" d="M0,-9H16"/>', "the job is slow"),
    ]
    row, x = "", 8.0
    for there, sign, word in signs:
        wide = 22 + len(word) * LETTER + 12
        if not there:
            continue
        if row and x + wide > width:
            yield row
            row, x = "", 8.0
        row += f'<g transform="translate({_number(x)} 0)">{sign}{_text(word, 22, 0)}</g>'
        x += wide
    yield row


_BLOCK = '<rect class="{}" y="-9" width="16" height="10"/>'


# --- one plot: its corner is 0, 0


def _plot(panel: Panel, width: int, height: int, of: int) -> Iterator[str]:
    def across(x: float) -> float:
        return (min(max(x, panel.begin), panel.end) - panel.begin) / (panel.end - panel.begin) * width

    def down(y: float) -> float:
        return (panel.top - y) / (panel.top - panel.bottom) * height

    yield from _grid(panel, across, down, width, height)
    yield f'<g clip-path="url(#plot-{of})">'
    for band in panel.bands:
        left, right = across(band.begin), across(band.end)
        wide = max(2.0, right - left)
        yield (
            f'<g>{_title(band.words)}<rect class="job" x="{_number(left)}" width="{_number(wide)}" height="{height}"/>'
            f'<path class="edge" d="M{_number(left)},1.5h{_number(wide)}"/></g>'
        )
    for stretch in panel.stretches:
        left, right = across(stretch.onset), across(stretch.end)
        yield (
            f'<rect class="stretch" x="{_number(left)}" width="{_number(max(1.0, right - left))}" height="{height}">'
            f"{_title(stretch.words)}</rect>"
        )
    if panel.peers:
        yield f"<g>{_title('its peers: their median, and four fifths of them')}"
        yield f'<path class="peers" d="{_extent(panel.peers, across, down)}"/>'
        yield f'<path class="median" d="{_path(panel.peers, across, down)}"/></g>'
    for thin in panel.thin:
        yield f'<path class="peer" d="{_path(thin, across, down)}"/>'
    yield f"<g>{_title(panel.title)}"
    if any(column.low != column.high for column in panel.line):
        yield f'<path class="extent" d="{_extent(panel.line, across, down)}"/>'
    if len(panel.line) == 1:
        x, y = across(panel.line[0].x), down(panel.line[0].middle)
        yield f'<circle class="line" cx="{_number(x)}" cy="{_number(y)}" r="2"/>'
    yield f'<path class="line" d="{_path(panel.line, across, down)}"/></g>'
    for stretch in panel.stretches:
        yield from _levels(stretch, panel, across, down)
    yield "</g>"
    for stretch in panel.stretches:
        yield from _signs(stretch, panel, across, height)
    yield from _labels(panel, across, width)


def _path(line: Sequence[Column], across: Callable[[float], float], down: Callable[[float], float]) -> str:
    places = [f"{_number(across(one.x))},{_number(down(one.middle))}" for one in line]
    return f"M{'L'.join(places)}" if places else ""


def _extent(line: Sequence[Column], across: Callable[[float], float], down: Callable[[float], float]) -> str:
    """There along what is highest, and back along what is lowest."""
    there = [f"{_number(across(one.x))},{_number(down(one.high))}" for one in line]
    back = [f"{_number(across(one.x))},{_number(down(one.low))}" for one in reversed(line)]
    return f"M{'L'.join((*there, *back))}Z" if there else ""


def _levels(
    stretch: Stretch, panel: Panel, across: Callable[[float], float], down: Callable[[float], float]
) -> Iterator[str]:
    if not math.isfinite(stretch.before):
        return
    left, right = across(stretch.onset), across(stretch.end)
    before, level = down(stretch.before), down(stretch.level)
    said = _title(f"before: {number(stretch.before)}")
    from_ = max(0.0, left - (across(panel.end) - across(panel.begin)) / 4)
    yield f'<path class="before" d="M{_number(from_)},{_number(before)}H{_number(right)}">{said}</path>'
    said = _title(f"{stretch.words}: {number(stretch.level)}")
    yield f'<path class="level" d="M{_number(left)},{_number(level)}H{_number(max(right, left + 2))}">{said}</path>'


def _signs(stretch: Stretch, panel: Panel, across: Callable[[float], float], height: int) -> Iterator[str]:
    marks = [("alarm", stretch.alarm, "known at", "M0,0l5,5l-5,5l-5,-5Z", "sign")]
    marks.append(("onset", stretch.onset, "onset", "M0,0l5,9h-10Z", "sign"))
    if stretch.relief is not None:
        marks.append(("relief", stretch.relief, "relief", "M0,0l5,9h-10Z", "sign hollow"))
    for kind, x, word, shape, sign in marks:
        yield (
            f'<g class="mark" transform="translate({_number(across(x))} 0)">'
            f"{_title(f'{word} {number(x, panel.times)}: {stretch.words}')}"
            f'<path class="{kind}" d="M0,0V{height}"/><path class="{sign}" transform="translate(0 {height + 1})" '
            f'd="{shape}"/></g>'
        )


def _labels(panel: Panel, across: Callable[[float], float], width: int) -> Iterator[str]:
    """How much slower, above the plot; where two would lie on one another, hovering tells the second."""
    free = -math.inf
    for stretch in sorted(panel.stretches, key=lambda one: one.onset):
        words = percent(stretch.slowdown)
        half = len(words) * LETTER / 2
        middle = min(max((across(stretch.onset) + across(stretch.end)) / 2, half), width - half)
        if middle - half >= free:
            yield _text(words, middle, -5, "slow", "middle")
            free = middle + half + 6
    words = f"{panel.above:,} {'sample' if panel.above == 1 else 'samples'} above"
    if panel.above and free < width - len(words) * LETTER:
        yield _text(words, width, -5, "", "end")


def _grid(
    panel: Panel, across: Callable[[float], float], down: Callable[[float], float], width: int, height: int
) -> Iterator[str]:
    for y in ticks(panel.bottom, panel.top, 4):
        place = _number(down(y))
        yield f'<path class="grid" d="M0,{place}H{width}"/>'
        yield _text(f"{y:.6g}", -6, down(y) + 4, "", "end")
    yield f'<path class="grid" d="M0,{height}H{width}"/>'
    free = -math.inf
    for x, words in _below(panel, max(3, width // (70 if panel.times is None else 90))):
        half = len(words) * LETTER / 2
        middle = min(max(across(x), half - LEFT / 2), width - half + RIGHT - 2)
        if middle - half >= free:
            yield f'<path class="grid" d="M{_number(across(x))},{height}v4"/>'
            yield _text(words, middle, height + SIGNS + 13, "", "middle")
            free = middle + half + 8


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between low and high: steps of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next((step * times_ for times_ in (1, 2, 5) if (high - low) / (step * times_) <= about), step * 10)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [at * step for at in range(first, last + 1)] if last - first < 4 * about else []


STEPS_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def _below(panel: Panel, about: int) -> Iterator[tuple[float, str]]:
    """Where the axis has a number or a time, and which."""
    if panel.times is None:
        yield from ((x, f"{x:.10g}") for x in ticks(panel.begin, panel.end, about))
        return
    span = panel.end - panel.begin
    step = next((one for one in STEPS_SECONDS if span / one <= about), 86400 * math.ceil(span / about / 86400))
    for at in range(math.ceil(panel.begin / step), math.floor(panel.end / step) + 1):
        text = times.text(at * step, panel.times._replace(digits=0, separator="T"))
        yield at * step, text[:10] if step >= timedelta(days=1).total_seconds() else text[11 : 16 if step >= 60 else 19]
