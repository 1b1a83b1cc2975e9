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
from browser import Browser, Tab, open_tab, start_browser

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
    with start_browser(tmp_path_factory.mktemp("chromium")) as running_browser:
        yield running_browser


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
    output = excerpts.command_output("healthd fleet report --out shown --price 2 --sla 99.5 && echo done", folder)
    assert output.endswith("done\n"), output
    PICTURES.mkdir(parents=True, exist_ok=True)
    return folder / "shown/report.html"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


def open_page(chromium: Browser, path: Path, width: int = 1200, **media: str) -> Tab:
    """Open the page and wait until everything is drawn."""
    with open_tab(chromium, path, width, **media) as opened_tab:
        opened_tab.evaluate(DRAWN)
        return opened_tab


@pytest.mark.parametrize(
    ("name", "width", "media"),
    [
        ("desk", 1200, {}),
        ("phone", PHONE_PIXELS, {}),
        ("dark", 1200, {"prefers_color_scheme": "dark"}),
        ("forced-colours", 1200, {"forced_colors": "active"}),
    ],
)
def test_report_opens_without_errors_and_draws_each_chart(
    name: str, width: int, media: dict[str, str], report: Path, chromium: Browser
) -> None:
    page = open_page(chromium, report, width, **media)
    page.save_screenshot(PICTURES / f"{name}.png")
    charts = page.evaluate(CHARTS)
    assert charts
    assert [chart["title"] for chart in charts if not chart["marks"]] == []
    assert [chart["title"] for chart in charts if len(chart["label"]) < 40] == [], (
        "each chart has a text for screen readers"
    )
    assert [chart["title"] for chart in charts if not chart["rows"]] == [], "each chart has a table"
    assert (page.console_errors(), page.requested_urls()) == ([], [])


def test_report_opens_with_five_sentences(report: Path, chromium: Browser) -> None:
    sentences = open_page(chromium, report).evaluate(
        "[...document.querySelectorAll('.opening li')].map(li => li.textContent)"
    )
    assert len(sentences) == 5
    assert [sentence for sentence in sentences if not sentence.endswith(".") or "not known" in sentence] == []


@pytest.mark.parametrize("width", [320, PHONE_PIXELS])
def test_report_fits_phone_and_draws_charts_for_its_width(width: int, report: Path, chromium: Browser) -> None:
    page = open_page(chromium, report, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    charts = page.evaluate(CHARTS)
    assert [chart["title"] for chart in charts if chart["right"] > width] == []
    assert [(chart["title"], chart["outside"]) for chart in charts if chart["outside"]] == [], (
        "text overlaps other text"
    )
    assert page.evaluate(BROKEN_CELLS) == [], "a name breaks at its hyphen"
    shrunk = [chart["title"] for chart in charts if chart["width"] < 0.85 * chart["made_for"]]
    assert shrunk == [], "the text is too small to read"


def test_report_prints_without_cutting_chart(report: Path, chromium: Browser) -> None:
    page = open_page(chromium, report)
    page.save_pdf(PICTURES / "printed.pdf")
    assert (PICTURES / "printed.pdf").read_bytes().startswith(b"%PDF")
    # The paper is narrower than the window for which the page was drawn.
    page.call("Emulation.setEmulatedMedia", media="print")
    page.call("Emulation.setDeviceMetricsOverride", width=A4_PIXELS, height=900, deviceScaleFactor=1, mobile=False)
    assert [chart["title"] for chart in page.evaluate(CHARTS) if chart["right"] > A4_PIXELS] == []
    script = "[...document.querySelectorAll('figure')].every(f => getComputedStyle(f).breakInside === 'avoid')"
    assert page.evaluate(script)


def test_bars_differ_without_colour(report: Path, chromium: Browser) -> None:
    page = open_page(chromium, report)
    page.emulate_colour_blindness()
    page.save_screenshot(PICTURES / "without-colour.png")
    charts = page.evaluate(CHARTS)
    kinds = {chart["title"]: chart["fills"] for chart in charts if 1 < len(chart["fills"]) <= KINDS}
    assert kinds
    similar = {
        title: pair
        for title, fills in kinds.items()
        for pair in combinations([fill for fill in fills if "url(" not in fill], 2)
        if contrast_of(*pair) < 1.5
    }
    assert similar == {}, "bars without hatching must differ in their greys"
    scales = [chart for chart in charts if len(chart["fills"]) > KINDS]
    assert [chart["title"] for chart in scales if not chart["words"]] == [], "the squares must contain their numbers"


def contrast_of(first: str, second: str) -> float:
    """Return the contrast of two colours ("rgb(0, 114, 178)"), 1 to 21 (WCAG 2.2, "contrast ratio")."""

    def luminance(colour: str) -> float:
        shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (
            channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4 for channel in shares
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_hostile_names_are_displayed_and_never_executed(pages: Path, chromium: Browser) -> None:
    from fleet_page import HOSTILE, hostile_page

    from healthd.fleet.report import load_assets

    path = pages / "hostile.html"
    path.write_text(hostile_page(HOSTILE, load_assets()), "utf-8")
    page = open_page(chromium, path)
    assert page.evaluate("window.taken") is None
    assert (page.console_errors(), page.requested_urls()) == ([], [])
    text = page.evaluate("document.body.textContent")
    assert [name for name in HOSTILE if name.replace("\u2028", "?") not in text] == []
    labels = page.evaluate("[...document.querySelectorAll('.chart svg text')].map(text => text.textContent).join(' ')")
    assert "window.taken" in labels
    # Tooltips are HTML.
    page.call("Page.bringToFront")
    bar = page.evaluate(
        "(() => {const bar = [...document.querySelectorAll('.chart svg .mark-rect path')].at(-1);"
        "bar.scrollIntoView({block: 'center', behavior: 'instant'});"
        "const {x, y} = bar.getBoundingClientRect(); return {x: x + 3, y: y + 3}})()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", **bar)
    assert "window.taken" in page.evaluate(TOOLTIP)
    assert page.evaluate("window.taken") is None
    assert (page.console_errors(), page.requested_urls()) == ([], [])


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
def test_page_blocks_injected_code_and_requests(smuggled: str, pages: Path, chromium: Browser) -> None:
    """This protects if a text were not escaped. It also proves that errors are recorded."""
    from fleet_page import hostile_page

    from healthd.fleet.report import load_assets

    path = pages / "smuggled.html"
    path.write_text(hostile_page(assets_used=load_assets()).replace("</main>", f"{smuggled}</main>"), "utf-8")
    page = open_page(chromium, path)
    assert page.evaluate("window.taken") is None
    assert [message for message in page.console_errors() if "Content Security Policy" in message] != []
    assert [chart["title"] for chart in page.evaluate(CHARTS) if not chart["marks"]] == []


def test_request_is_recorded_if_page_allows_it(pages: Path, chromium: Browser) -> None:
    path = pages / "open.html"
    path.write_text("<!doctype html><html data-drawn=yes><img src='http://127.0.0.1:9/x.png'><p>open</html>", "utf-8")
    assert open_page(chromium, path).requested_urls() == ["http://127.0.0.1:9/x.png"]


def test_failing_chart_is_reported_and_others_are_drawn(pages: Path, chromium: Browser) -> None:
    from fleet_page import hostile_page

    from healthd.fleet.report import load_assets

    path = pages / "broken.html"
    path.write_text(
        hostile_page(assets_used=load_assets()).replace('"mark":{"type":"bar"', '"mark":{"type":"no such"', 1), "utf-8"
    )
    page = open_page(chromium, path)
    assert "could not be drawn" in page.evaluate("document.querySelector('.undrawn').textContent")
    assert [chart["marks"] > 0 for chart in page.evaluate(CHARTS)] == [False, True, True, True]


def test_report_command_needs_no_network(report: Path, tmp_path: Path) -> None:
    command = ["unshare", "--net", sys.executable, "-m", "healthd", "fleet", "report", "--out", str(tmp_path / "out")]
    result = subprocess.run([*command, "--db", str(report.parents[1] / "db")], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")
    assert (tmp_path / "out/report.html").stat().st_size > 800_000
