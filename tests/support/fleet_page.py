"""A report of made-up chapters with every kind of mark, and with names that try to inject code."""

from __future__ import annotations

from healthd.fleet.figures import COLOURS, Figure, Layer, category, layer, quantity
from healthd.fleet.report_page import Assets, Report, render_page
from healthd.fleet.view import COUNT, Column, Detail, Table, View

HOSTILE = (
    "</script><script>window.taken=1</script>",
    "<img src=https://example.org/x onerror=window.taken=1>",
    '"><svg onload=window.taken=1>',
    "<!--<script>",
    "]]>'; window.taken=1; '",
    "\u2028{{constructor.constructor('window.taken=1')()}}",
)


def layers_by_kind(names: tuple[str, ...]) -> dict[str, tuple[Layer, ...]]:
    """Return the layers of a figure of each kind, with these names as its categories and tooltips."""
    rows = [{"name": name, "n": place, "of": f"of {place % 2}"} for place, name in enumerate(names, 1)]
    n, name, group = quantity("n"), category("name"), {"field": "of", "type": "nominal"}
    colour = {**group, "scale": {"range": list(COLOURS[:2])}}
    return {
        "bars": (layer("bar", rows, {"tooltip": True}, x=n, y=name, color=colour),),
        "line": (layer("line", rows, {"point": True}, x=n, y=n, strokeDash=group, color=colour),),
        "points": (layer("point", rows, x=n, y=name, shape=group, color=colour),),
        "layers": (layer("rule", rows, x=n, y=name), layer("text", rows, x=n, y=name, text=name)),
    }


EMPTY_ASSETS = Assets("", "1;", "2;")


def hostile_page(names: tuple[str, ...] = ("gpu-1", "gpu-2", "gpu-3"), assets_used: Assets = EMPTY_ASSETS) -> str:
    """Return the page with these names wherever text from outside can occur.

    Pass assets() as `assets_used` to draw it.
    """
    figures = tuple(
        Figure(f"{kind} of {names[0]}", " ".join(names), figure_layers)
        for kind, figure_layers in layers_by_kind(names).items()
    )
    columns = (Column("node", "node"), Column(names[0], "n", COUNT))
    table = Table(names[0], columns, [{"node": name, "n": 1} for name in names])
    details = (Detail(names[0], names, names),)
    chapter = View("made", f"Made of {names[0]}", names, (table,), figures, details, names)
    return render_page(
        Report(
            title="A made report",
            coverage=names[0],
            opening=names,
            chapters=(chapter,),
            commands={"made": names[0]},
            limits=names,
            sources=table,
            made_by=names[0],
            command=names[0],
        ),
        assets_used,
    )
