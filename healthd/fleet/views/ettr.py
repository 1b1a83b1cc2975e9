"""Share of its time that a large job makes progress: figures 9 and 10 of Kokolis, Kuchnik et al. (HPCA 2025)."""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, number, span
from healthd.fleet.answers.ettr import FORMULA_TOO_LOW, OF_EACH_RUN
from healthd.fleet.figures import COLOURS, Figure, Of, Record, category, layer, nominal, points, quantity, records
from healthd.fleet.view import COUNT, HUNDREDTHS, Column, Form, Table, View, described, interval

FORMS = (Column("form", "form"), Column("ETTR", "ettr", Form(lambda ettr: f"{ettr:.3f}")))
KEYS = {
    "exact": "progress / expected time",
    "simulated": "simulated",
    "analytic": "formula with queue and end",
    "approximate": "closed form of the paper",
}
RUNS = (
    Column("GPUs up to", "gpus_up_to", COUNT),
    Column("runs", "runs", COUNT),
    Column("interruptions", "interruptions", COUNT),
    Column("ETTR", "mean", HUNDREDTHS),
    Column("8 of 10 runs", lambda row: (row["low"], row["high"]), interval(HUNDREDTHS)),
    Column("expected", "expected", HUNDREDTHS),
)


def view(ettr: Document) -> View:
    forms = [{"form": words, "ettr": ettr[key]} for key, words in KEYS.items()]
    return described(
        ettr,
        "Effective training time ratio (ETTR) of a large job",
        _sentences(ettr),
        [
            Table("The same job by other methods", FORMS, forms),
            _by_checkpoint(ettr),
            Table("Measured, runs of 24 h or more", RUNS, ettr["measured"]),
        ],
        [_grid(ettr, "by_checkpoint", "checkpoint_seconds"), _grid(ettr, "by_rate", "rate"), _runs(ettr)],
    )


def _by_checkpoint(ettr: Document) -> Table:
    """Return the ETTR with a row per number of GPUs and a column per checkpoint interval."""
    cells = ettr["grid"]["by_checkpoint"]
    times = list(dict.fromkeys(cell["checkpoint_seconds"] for cell in cells))
    columns = [Column("GPUs", "gpus", COUNT), *(Column(span(time), str(time), HUNDREDTHS) for time in times)]
    rows: dict[int, dict[str, Any]] = {}
    for cell in cells:
        rows.setdefault(cell["gpus"], {"gpus": cell["gpus"]})[str(cell["checkpoint_seconds"])] = cell["ettr"]
    return Table("ETTR with a checkpoint every", tuple(columns), list(rows.values()))


def _sentences(ettr: Document) -> list[str]:
    given, ends, of_rate = ettr["parameters"], ettr["interval"], ettr["rate_interval"]
    lasts = given["productive_seconds"]
    two = interval(HUNDREDTHS)
    found = [
        f"ETTR {ettr['exact']:.2f}"
        + (f" (95 %: {two.write(ends)})" if ends else "")
        + f": the share of its waiting and running time in which a job of {given['gpus']:,} GPUs makes progress"
        + (" (unlimited job)." if lasts is None else f" (a job that needs {span(lasts)} of progress)."),
        f"{_failures(ettr['mttf_seconds'])} (r_f {number(given['rate'])} per 1000 node-days"
        + (f", 95 %: {number(of_rate[0])} to {number(of_rate[1])}" if of_rate else "")
        + f"), a checkpoint every {span(given['checkpoint_seconds'])}, written in {span(given['write_seconds'])}; "
        f"restart {span(given['restart_seconds'])}, queue {span(given['queue_seconds'])}.",
    ]
    often = [one for one in ettr["grid"]["by_checkpoint"] if one["checkpoint_seconds"] == 300]
    other = next((one for one in often if one["gpus"] == given["gpus"]), None)
    if other is not None and given["checkpoint_seconds"] > 300:
        found.append(f"With a checkpoint every 5 min it would be {other['ettr']:.2f}.")
    best = ettr["daly_young_seconds"]
    if best is not None:
        found.append(f"Daly and Young's interval is {span(best)}: ETTR {ettr['exact_at_daly_young']:.2f}.")
    found += [f"Warning: {one}." for one in ettr["warnings"]]
    simulation = ettr["simulation"]
    found.append(
        f"The simulation has {simulation['runs']:,} runs of {span(simulation['productive_seconds'])}; its standard "
        f"error is {simulation['standard_error']:.2g}."
    )
    return [*found, FORMULA_TOO_LOW, *([] if simulation["low"] is None else [OF_EACH_RUN])]


def _failures(mttf_seconds: float | None) -> str:
    return "No failures" if mttf_seconds is None else f"A failure every {span(mttf_seconds)}"


# --- figures


def _grid(ettr: Document, name: str, key: str) -> Figure:
    """Draw GPUs over intervals or rates. Each cell has its number, so that colour is not needed."""
    is_interval = key == "checkpoint_seconds"
    fields: dict[str, Of] = {
        "GPUs": lambda one: f"{one['gpus'] // 1024}k",
        "other": lambda one: span(one[key]) if is_interval else number(float(one[key])),
        "ETTR": "ettr",
        "dark": lambda one: one["ettr"] < 0.5,
    }
    drawn = records(ettr["grid"][name], fields)
    title = "a checkpoint every" if is_interval else "failures per 1000 node-days"
    place = {"x": category("GPUs", "GPUs", axis={"labelAngle": 0}), "y": category("other", title)}
    shade = quantity("ETTR", legend=None, scale={"domain": [0, 1], "scheme": "viridis"})
    light = {"condition": {"test": "datum.dark", "value": "#ffffff"}, "value": "#111111"}
    some = [one for one in ettr["grid"][name] if one["gpus"] in (4096, 16_384, 131_072)]
    words = "; ".join(f"{one['gpus']:,} GPUs, {title} {number(float(one[key]))}: {one['ettr']:.2f}" for one in some)
    return Figure(
        f"ETTR by size and {'the interval between checkpoints' if is_interval else 'the rate of failures'}",
        words,
        (
            layer("rect", drawn, **place, color=shade),
            layer("text", drawn, {"fontSize": 11}, **place, text=quantity("ETTR", format=".2f"), color=light),
        ),
    )


def _runs(ettr: Document) -> Figure | None:
    """Draw the mean of the runs of each size with the range of 8 of 10, and the model's expectation."""
    rows = ettr["measured"]
    if not rows:
        return None
    ranges: list[Record] = [{"size": f"{row['gpus_up_to']:,}", "low": row["low"], "high": row["high"]} for row in rows]
    means: list[Record] = [
        {"size": f"{row['gpus_up_to']:,}", "what": what, "ETTR": row[key]}
        for row in rows
        for what, key in (("measured", "mean"), ("expected", "expected"))
        if row[key] is not None
    ]
    x = category("size", "GPUs, up to", axis={"labelAngle": 0})
    kinds = ["measured", "expected"]
    y = {name: quantity(name, "ETTR", scale={"zero": False}) for name in ("low", "ETTR")}
    colour = nominal("what", title=None, scale={"domain": kinds, "range": [COLOURS[5], COLOURS[0]]})
    shape = nominal("what", title=None, scale={"domain": kinds, "range": ["circle", "diamond"]})
    words = "; ".join(f"up to {plural(row['gpus_up_to'], 'GPU')} {row['mean']:.2f}" for row in rows)
    return Figure(
        "Runs of 24 h or more: measured ETTR (lines: 8 of 10 runs) and the expected one",
        words,
        (
            layer("rule", ranges, {"color": "#666666"}, x=x, y=y["low"], y2={"field": "high"}),
            points(means, x=x, y=y["ETTR"], color=colour, shape=shape),
        ),
    )
