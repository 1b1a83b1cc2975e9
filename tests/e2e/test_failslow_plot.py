"""Tests of `healthd failslow --plot` in a real browser: no request, no error, all texts visible.

The pictures are saved in build/failslow.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, open_tab, start_browser

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "build/failslow"
HOSTILE = '</svg><script>document.title = "taken"</script>'
TEXTS = """[...document.querySelectorAll("svg text")].filter(text => text.checkVisibility()).map(text => {
  const b = text.getBoundingClientRect(), all = text.ownerSVGElement.getBoundingClientRect();
  return {words: text.textContent, inside: b.left >= all.left - 1 && b.right <= all.right + 1, height: b.height};
})"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with start_browser(tmp_path_factory.mktemp("chromium")) as running_browser:
        yield running_browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create plot.svg and plot.html of ten workers; one, with a hostile name, takes 60 % longer for 60 of 400
    iterations."""
    plots_dir = tmp_path_factory.mktemp("plots")
    rng = random.Random(14)
    rows = ["worker,step,seconds"]
    for step in range(400):
        for worker in range(10):
            slow = 1.6 if worker == 6 and 240 <= step < 300 else 1
            name = f'"{HOSTILE.replace(chr(34), chr(34) * 2)}"' if worker == 6 else f"{worker}"
            rows.append(f"{name},{step},{slow * rng.uniform(0.97, 1.03):.4f}")
    (plots_dir / "job.csv").write_text("\n".join(rows) + "\n")
    for kind in ("svg", "html"):
        command = [sys.executable, "-m", "healthd", "failslow", "job.csv", "--series", "worker", "--index", "step"]
        command += ["--value", "seconds", "--plot", f"plot.{kind}"]
        result = subprocess.run(command, cwd=plots_dir, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (1, ""), result.stdout
    PICTURES.mkdir(parents=True, exist_ok=True)
    return plots_dir


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("name", ["plot.svg", "plot.html"])
def test_plot_sends_no_request_and_shows_each_text(name: str, width: int, chromium: Browser, folder: Path) -> None:
    with open_tab(chromium, folder / name, width) as page:
        page.save_screenshot(PICTURES / f"{name}-{width}.png")
        texts = page.evaluate(TEXTS)
        assert (page.console_errors(), page.requested_urls()) == ([], [])
        if name == "plot.html":  # the picture scrolls in its own box
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert min(text["height"] for text in texts if text["words"]) > 10, "the text is large enough to read"
        assert "taken" not in page.evaluate("document.title || ''")
    assert [text["words"] for text in texts if not text["inside"]] == []
    words = [text["words"] for text in texts]
    assert {"+61 %", "onset", "detected", "relief", "its peers"} <= set(words)
    assert "script" in "".join(words), "the name is displayed unchanged"
