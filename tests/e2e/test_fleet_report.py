"""Tests of `healthd fleet report` in a real browser: no request, no error, and each chart is drawn.

The pictures are saved in build/report: desktop, phone, dark mode, system colours, without colour, printed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Tab, browser, tab

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build/report"
A4_PIXELS = 680  # between the margins of 15 mm: 180 mm at 96 per inch
PHONE_PIXELS = 390
KINDS = 8  # of a categorical scale, healthd/fleet/figures.py; a scale of numbers has more
DRAWN = """new Promise((done, failed) => {
  const look = () => document.documentElement.dataset.drawn ? done(true) : setTimeout(look, 20);
  look();
})"""
BROKEN_CELLS = """[...document.querySelectorAll("td:not(.long)")].filter(cell => {
  const words = document.createRange();
  words.selectNodeContents(cell);
  return new Set([...words.getClientRects()].map(line => line.top)).size > 1;
}).map(cell => cell.textContent)"""
TOOLTIP = """new Promise((done, failed) => {
  const words = () => document.getElementById("vg-tooltip-element")?.textContent;
  const look = () => words() ? done(words()) : setTimeout(look, 20);
  look();
})"""
CHARTS = """[...document.querySelectorAll("figure")].map(figure => {
  const svg = figure.querySelector(".chart svg"), place = figure.querySelector(".chart");
  const mark = "[class*='mark-'][role^=graphics]";
  const marks = svg ? [...svg.querySelectorAll(`${mark} path, ${mark} text, ${mark} line`)] : [];
  const texts = svg ? [...svg.querySelectorAll("text")] : [];
  const box = svg ? svg.getBoundingClientRect() : {width: 0, right: 0};
  return {
    title: figure.querySelector("figcaption").textContent,
    marks: marks.filter(mark => { const b = mark.getBoundingClientRect(); return b.width + b.height > 0; }).length,
    label: figure.querySelector("[role=graphics-document]")?.ariaLabel || "",
    made_for: svg ? Number(svg.getAttribute("width")) : 0,
    width: box.width, right: box.right,
    outside: texts.filter(text => { const b = text.getBoundingClientRect(), around = place.getBoundingClientRect();
      return b.height > 0 && (b.top < around.top - 2 || b.bottom > around.bottom + 2); }).map(text => text.textContent),
    rows: figure.querySelectorAll("details tbody tr").length,
    words: marks.filter(mark => mark.closest(".mark-text")).length,
    fills: [...new Set(marks.filter(mark => mark.closest(".mark-rect, .mark-area, .mark-arc"))
      .map(mark => getComputedStyle(mark).fill))],
  };
})"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the report of the history with a fixed seed that docs/fleet-answers.md shows."""
    spec = importlib.util.spec_from_file_location("fleet_excerpts", ROOT / "scripts/fleet_excerpts.py")
    assert spec is not None
    assert spec.loader is not None
    excerpts: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(excerpts)
    folder = tmp_path_factory.mktemp("report")
    excerpts.make_store(folder)
    said = excerpts.printed("healthd fleet report --out shown --price 2 --sla 99.5 && echo done", folder)
    assert said.endswith("done\n"), said
    PICTURES.mkdir(parents=True, exist_ok=True)
    return folder / "shown/report.html"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def opened(chromium: Browser, path: Path, width: int = 1200, **media: str) -> Tab:
    """Open the page and wait until everything is drawn."""
    with tab(chromium, path, width, **media) as one:
        one.ask(DRAWN)
        return one


@pytest.mark.parametrize(
    ("name", "width", "media"),
    [
        ("desk", 1200, {}),
        ("phone", PHONE_PIXELS, {}),
        ("dark", 1200, {"prefers_color_scheme": "dark"}),
        ("forced-colours", 1200, {"forced_colors": "active"}),
    ],
)
def test_the_report_opens_without_an_error_or_a_request_and_draws_each_chart(
    name: str, width: int, media: dict[str, str], report: Path, chromium: Browser
) -> None:
    shown = opened(chromium, report, width, **media)
    shown.picture(PICTURES / f"{name}.png")
    charts = shown.ask(CHARTS)
    assert charts
    assert [chart["title"] for chart in charts if not chart["marks"]] == []
    assert [chart["title"] for chart in charts if len(chart["label"]) < 40] == [], (
        "each chart has a text for screen readers"
    )
    assert [chart["title"] for chart in charts if not chart["rows"]] == [], "each chart has a table"
    assert (shown.complaints(), shown.requests()) == ([], [])


def test_it_opens_with_five_sentences(report: Path, chromium: Browser) -> None:
    sentences = opened(chromium, report).ask("[...document.querySelectorAll('.opening li')].map(li => li.textContent)")
    assert len(sentences) == 5
    assert [one for one in sentences if not one.endswith(".") or "not known" in one] == []


@pytest.mark.parametrize("width", [320, PHONE_PIXELS])
def test_on_a_phone_nothing_is_cut_and_each_chart_is_drawn_for_its_width(
    width: int, report: Path, chromium: Browser
) -> None:
    shown = opened(chromium, report, width)
    assert shown.ask("document.documentElement.scrollWidth") == width
    charts = shown.ask(CHARTS)
    assert [chart["title"] for chart in charts if chart["right"] > width] == []
    assert [(chart["title"], chart["outside"]) for chart in charts if chart["outside"]] == [], (
        "text overlaps other text"
    )
    assert shown.ask(BROKEN_CELLS) == [], "a name breaks at its hyphen"
    shrunk = [chart["title"] for chart in charts if chart["width"] < 0.85 * chart["made_for"]]
    assert shrunk == [], "the text is too small to read"


def test_it_is_printed_with_no_chart_cut(report: Path, chromium: Browser) -> None:
    shown = opened(chromium, report)
    shown.printed(PICTURES / "printed.pdf")
    assert (PICTURES / "printed.pdf").read_bytes().startswith(b"%PDF")
    # The paper is narrower than the window for which the page was drawn.
    shown.call("Emulation.setEmulatedMedia", media="print")
    shown.call("Emulation.setDeviceMetricsOverride", width=A4_PIXELS, height=900, deviceScaleFactor=1, mobile=False)
    assert [chart["title"] for chart in shown.ask(CHARTS) if chart["right"] > A4_PIXELS] == []
    whole = "[...document.querySelectorAll('figure')].every(f => getComputedStyle(f).breakInside === 'avoid')"
    assert shown.ask(whole)


def test_without_colour_the_bars_of_a_chart_still_differ(report: Path, chromium: Browser) -> None:
    shown = opened(chromium, report)
    shown.colourless()
    shown.picture(PICTURES / "without-colour.png")
    charts = shown.ask(CHARTS)
    kinds = {chart["title"]: chart["fills"] for chart in charts if 1 < len(chart["fills"]) <= KINDS}
    assert kinds
    alike = {
        title: pair
        for title, fills in kinds.items()
        for pair in combinations([fill for fill in fills if "url(" not in fill], 2)
        if contrast(*pair) < 1.5
    }
    assert alike == {}, "bars without hatching must differ in their greys"
    scales = [chart for chart in charts if len(chart["fills"]) > KINDS]
    assert [chart["title"] for chart in scales if not chart["words"]] == [], "the squares must contain their numbers"


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours ("rgb(0, 114, 178)"), 1 to 21 (WCAG 2.2, "contrast ratio")."""

    def luminance(colour: str) -> float:
        shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_what_others_named_is_shown_and_never_run(pages: Path, chromium: Browser) -> None:
    from fleet_page import HOSTILE, made

    from healthd.fleet.report import load_assets

    path = pages / "hostile.html"
    path.write_text(made(HOSTILE, load_assets()), "utf-8")
    shown = opened(chromium, path)
    assert shown.ask("window.taken") is None
    assert (shown.complaints(), shown.requests()) == ([], [])
    text = shown.ask("document.body.textContent")
    assert [name for name in HOSTILE if name.replace("\u2028", "?") not in text] == []
    labels = shown.ask("[...document.querySelectorAll('.chart svg text')].map(text => text.textContent).join(' ')")
    assert "window.taken" in labels
    # Tooltips are HTML.
    shown.call("Page.bringToFront")
    bar = shown.ask(
        "(() => {const bar = [...document.querySelectorAll('.chart svg .mark-rect path')].at(-1);"
        "bar.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const {x, y} = bar.getBoundingClientRect(); return {x: x + 3, y: y + 3}})()"
    )
    shown.call("Input.dispatchMouseEvent", type="mouseMoved", **bar)
    assert "window.taken" in shown.ask(TOOLTIP)
    assert shown.ask("window.taken") is None
    assert (shown.complaints(), shown.requests()) == ([], [])


@pytest.mark.parametrize(
    "smuggled",
    [
        "<script>window.taken = 1</script>",
        "<img src='https://example.org/x.png'>",
        "<img src='x' onerror='window.taken = 1'>",
        "<link rel=stylesheet href='https://example.org/x.css'>",
        "<iframe src='https://example.org/'></iframe>",
    ],
)
def test_the_page_itself_forbids_what_would_run_or_leave(smuggled: str, pages: Path, chromium: Browser) -> None:
    """This protects if a text were not escaped. It also proves that errors are recorded."""
    from fleet_page import made

    from healthd.fleet.report import load_assets

    path = pages / "smuggled.html"
    path.write_text(made(with_=load_assets()).replace("</main>", f"{smuggled}</main>"), "utf-8")
    shown = opened(chromium, path)
    assert shown.ask("window.taken") is None
    assert [one for one in shown.complaints() if "Content Security Policy" in one] != []
    assert [chart["title"] for chart in shown.ask(CHARTS) if not chart["marks"]] == []


def test_a_request_is_seen_where_the_page_does_not_forbid_it(pages: Path, chromium: Browser) -> None:
    path = pages / "open.html"
    path.write_text("<!doctype html><html data-drawn=yes><img src='http://127.0.0.1:9/x.png'><p>open</html>", "utf-8")
    assert opened(chromium, path).requests() == ["http://127.0.0.1:9/x.png"]


def test_a_chart_that_cannot_be_drawn_says_so_and_the_others_are_drawn(pages: Path, chromium: Browser) -> None:
    from fleet_page import made

    from healthd.fleet.report import load_assets

    path = pages / "broken.html"
    path.write_text(made(with_=load_assets()).replace('"mark":{"type":"bar"', '"mark":{"type":"no such"', 1), "utf-8")
    shown = opened(chromium, path)
    assert "could not be drawn" in shown.ask("document.querySelector('.undrawn').textContent")
    assert [chart["marks"] > 0 for chart in shown.ask(CHARTS)] == [False, True, True, True]


def test_the_command_needs_no_network(report: Path, tmp_path: Path) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "healthd", "fleet", "report", "--out", str(tmp_path / "out")]
    done = subprocess.run([*command, "--db", str(report.parents[1] / "db")], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out/report.html").stat().st_size > 800_000
