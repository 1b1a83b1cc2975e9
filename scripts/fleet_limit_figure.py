"""Draw docs/fleet-limit.svg: how many of 10,000 nodes healthd's own code drains on a simulated bad day.

Run it after the fleet limit changes. The simulation (bench/simulate.py) takes half a minute. It needs matplotlib
(`pip install -e '.[docs]'`; .venv has it). The same simulation gives the same file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import matplotlib  # noqa: E402

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from simulate import HOUR, NODES, STEP, Outcome, Scenario, scenarios, simulate  # noqa: E402

FIGURE = ROOT / "docs/fleet-limit.svg"
DRAWN = 4  # the scenarios to draw; the fifth, a bug that affects all nodes, would need another scale
CURVE, LIMIT, LABEL, DEAD, AWAY = "#1f5f9f", "#222222", "#555555", "#eeeeee", "#dddddd"
# Write text as text, and no date, so that the same simulation gives the same bytes.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fleet limit", "font.family": "sans-serif", "font.size": 9.0}
METADATA = {"Date": None, "Creator": None}


def draw(scenes: Sequence[tuple[Scenario, Outcome]]) -> Figure:
    """Return a figure with one panel per scenario. A shaded area is an outage; a dotted line marks the loss of GPUs."""
    with matplotlib.rc_context(STYLE):
        figure, panels = pyplot.subplots(2, 2, figsize=(9.0, 5.4), sharex=True, sharey=True)
        figure.subplots_adjust(left=0.08, right=0.985, top=0.94, bottom=0.06, wspace=0.06, hspace=0.22)
        for panel, (scenario, outcome) in zip(panels.flat, scenes, strict=True):
            _draw_panel(panel, scenario, outcome)
        for panel in panels[:, 0]:
            panel.set_ylabel("drained nodes")
    return figure


def _draw_panel(panel: Any, scenario: Scenario, outcome: Outcome) -> None:
    limit, hours = outcome.shared_limit, len(outcome.drained) * STEP / HOUR
    panel.set_title(scenario.name, loc="left", fontsize=9.5)
    panel.set(xlim=(0, hours), ylim=(0, 1.3 * limit), xticks=[half / 2 for half in range(int(2 * hours))])
    panel.xaxis.set_major_formatter("{x:g} h")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.spines[["top", "right"]].set_visible(False)
    for fault in scenario.faults:
        start, end = fault.start / HOUR, fault.end / HOUR
        if fault.shared:
            panel.axvspan(start, end, color=DEAD, linewidth=0)
            _label(panel, "the file server\nis dead", end - 0.03, 0.04 * limit, "right")
        else:
            panel.vlines(start, 1.12 * limit, 1.3 * limit, color=LABEL, linewidth=1.0, linestyle=":")
            _label(panel, "GPUs are lost", start + 0.02, 1.18 * limit, "left")
    away_from, away_until = (moment / HOUR for moment in scenario.slurmctld_away)
    if away_until:
        panel.axvspan(away_from, away_until, color=AWAY, linewidth=0)
        _label(panel, "slurmctld\nis away", (away_from + away_until) / 2, 0.3 * limit, "center")
    panel.axhline(limit, color=LIMIT, linewidth=0.9, linestyle=(0, (6, 4)))
    _label(panel, f"limit for shared causes: {limit:,}", hours - 0.03, 1.04 * limit, "right")
    panel.plot([(i + 1) * STEP / HOUR for i in range(len(outcome.drained))], outcome.drained, color=CURVE)


def _label(panel: Any, text: str, hour: float, nodes: float, side: str) -> None:
    panel.text(hour, nodes, text, color=LABEL, fontsize=7.5, horizontalalignment=side, verticalalignment="bottom")


def labels_on_lines(figure: Figure) -> list[str]:
    """Return the labels that overlap a line."""
    return [
        text.get_text()
        for panel in figure.axes
        for text in panel.texts
        for path in _lines(panel)
        if path.intersects_bbox(text.get_window_extent(), filled=False)
    ]


def _lines(panel: Any) -> list[Any]:
    curves = [line.get_transform().transform_path(line.get_path()) for line in panel.lines]
    marks = [panel.transData.transform_path(path) for marks in panel.collections for path in marks.get_paths()]
    return curves + marks


def write(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format="svg", metadata=METADATA)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the number of drained nodes on a bad day.")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--to", type=Path, default=FIGURE)
    args = parser.parse_args()
    names = [f"n{i:05d}" for i in range(args.nodes)]
    figure = draw([(scenario, simulate(scenario, names)) for scenario in scenarios(names)[:DRAWN]])
    write(figure, args.to)
    overlapping = labels_on_lines(figure)
    print(f"{args.to}: these labels overlap a line: {', '.join(overlapping)}" if overlapping else f"{args.to}: written")
    return 1 if overlapping else 0


if __name__ == "__main__":
    sys.exit(main())
