"""Describes the share of time in which a large job makes progress.

The figures correspond to figures 9 and 10 of Kokolis, Kuchnik et al. (HPCA 2025).
"""

from __future__ import annotations

from typing import Any

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, format_duration, number
from healthd.fleet.answers.ettr import LOWER_BOUND_NOTE, RUN_MEAN_NOTE
from healthd.fleet.figures import (
    COLOURS,
    Accessor,
    Figure,
    Record,
    category,
    layer,
    make_records,
    nominal,
    points,
    quantity,
)
from healthd.fleet.view import COUNT, HUNDREDTHS, Column, Form, Table, View, describe, interval

FORMS = (Column("form", "form"), Column("ETTR", "ettr", Form(lambda ettr: f"{ettr:.3f}")))
KEYS = {
    "exact": "progress / expected time",
    "simulated": "simulated",
    "analytic": "formula with queue and end",
    "approximate": "the paper's closed form",
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
    forms = [{"form": label, "ettr": ettr[key]} for key, label in KEYS.items()]
    return describe(
        ettr,
        "Effective training time ratio (ETTR) of a large job",
        _sentences(ettr),
        [
            Table("The same job, by other methods", FORMS, forms),
            _by_checkpoint(ettr),
            Table("Measured: runs of 24 h or more", RUNS, ettr["measured"]),
        ],
        [
            _grid_figure(ettr, "by_checkpoint", "checkpoint_seconds"),
            _grid_figure(ettr, "by_rate", "rate"),
            _run_figure(ettr),
        ],
    )


def _by_checkpoint(ettr: Document) -> Table:
    """Return a table of the ETTR with a row for each number of GPUs and a column for each checkpoint interval."""
    cells = ettr["grid"]["by_checkpoint"]
    times = list(dict.fromkeys(cell["checkpoint_seconds"] for cell in cells))
    columns = [Column("GPUs", "gpus", COUNT), *(Column(format_duration(time), str(time), HUNDREDTHS) for time in times)]
    rows: dict[int, dict[str, Any]] = {}
    for cell in cells:
        rows.setdefault(cell["gpus"], {"gpus": cell["gpus"]})[str(cell["checkpoint_seconds"])] = cell["ettr"]
    return Table("ETTR with a checkpoint every", tuple(columns), list(rows.values()))


def _sentences(ettr: Document) -> list[str]:
    parameters, ends, rate_interval = ettr["parameters"], ettr["interval"], ettr["rate_interval"]
    lasts = parameters["productive_seconds"]
    interval_form = interval(HUNDREDTHS)
    found = [
        f"ETTR {ettr['exact']:.2f}"
        + (f" (95 %: {interval_form.write(ends)})" if ends else "")
        + f": the share of waiting and running time in which a job of {parameters['gpus']:,} GPUs makes progress"
        + (" (unlimited job)." if lasts is None else f" (a job that needs {format_duration(lasts)} of progress)."),
        f"{_failure_interval(ettr['mttf_seconds'])} (r_f {number(parameters['rate'])} per 1000 node-days"
        + (f", 95 %: {number(rate_interval[0])} to {number(rate_interval[1])}" if rate_interval else "")
        + f"), a checkpoint every {format_duration(parameters['checkpoint_seconds'])}, "
        f"written in {format_duration(parameters['write_seconds'])}; "
        f"restart {format_duration(parameters['restart_seconds'])}, queue "
        f"{format_duration(parameters['queue_seconds'])}.",
    ]
    every_5_min = [cell for cell in ettr["grid"]["by_checkpoint"] if cell["checkpoint_seconds"] == 300]
    with_5_min = next((cell for cell in every_5_min if cell["gpus"] == parameters["gpus"]), None)
    if with_5_min is not None and parameters["checkpoint_seconds"] > 300:
        found.append(f"With a checkpoint every 5 min, it would be {with_5_min['ettr']:.2f}.")
    best = ettr["daly_young_seconds"]
    if best is not None:
        found.append(f"Daly and Young's interval is {format_duration(best)}: ETTR {ettr['exact_at_daly_young']:.2f}.")
    found += [f"Warning: {cell}." for cell in ettr["warnings"]]
    simulation = ettr["simulation"]
    found.append(
        f"The simulation consists of {simulation['runs']:,} runs of "
        f"{format_duration(simulation['productive_seconds'])}; its standard error is "
        f"{simulation['standard_error']:.2g}."
    )
    return [*found, LOWER_BOUND_NOTE, *([] if simulation["low"] is None else [RUN_MEAN_NOTE])]


def _failure_interval(mttf_seconds: float | None) -> str:
    return "No failures" if mttf_seconds is None else f"A failure every {format_duration(mttf_seconds)}"


# --- figures


def _grid_figure(ettr: Document, name: str, key: str) -> Figure:
    """Draw the ETTR by GPUs and interval or rate. Each cell shows its number, so colour is not needed."""
    is_interval = key == "checkpoint_seconds"
    fields: dict[str, Accessor] = {
        "GPUs": lambda cell: f"{cell['gpus'] // 1024}k",
        "other": lambda cell: format_duration(cell[key]) if is_interval else number(float(cell[key])),
        "ETTR": "ettr",
        "dark": lambda cell: cell["ettr"] < 0.5,
    }
    drawn = make_records(ettr["grid"][name], fields)
    title = "a checkpoint every" if is_interval else "failures per 1000 node-days"
    channels = {"x": category("GPUs", "GPUs", axis={"labelAngle": 0}), "y": category("other", title)}
    shade = quantity("ETTR", legend=None, scale={"domain": [0, 1], "scheme": "viridis"})
    light = {"condition": {"test": "datum.dark", "value": "#ffffff"}, "value": "#111111"}
    described_cells = [cell for cell in ettr["grid"][name] if cell["gpus"] in (4096, 16_384, 131_072)]
    description = "; ".join(
        f"{cell['gpus']:,} GPUs, {title} {number(float(cell[key]))}: {cell['ettr']:.2f}" for cell in described_cells
    )
    return Figure(
        f"ETTR by size and {'checkpoint interval' if is_interval else 'failure rate'}",
        description,
        (
            layer("rect", drawn, **channels, color=shade),
            layer("text", drawn, {"fontSize": 11}, **channels, text=quantity("ETTR", format=".2f"), color=light),
        ),
    )


def _run_figure(ettr: Document) -> Figure | None:
    """Draw, for each job size, the mean ETTR, the range that contains 8 of 10 runs, and the ETTR of the model."""
    rows = ettr["measured"]
    if not rows:
        return None
    ranges: list[Record] = [{"size": f"{row['gpus_up_to']:,}", "low": row["low"], "high": row["high"]} for row in rows]
    means: list[Record] = [
        {"size": f"{row['gpus_up_to']:,}", "what": series, "ETTR": row[key]}
        for row in rows
        for series, key in (("measured", "mean"), ("expected", "expected"))
        if row[key] is not None
    ]
    x = category("size", "GPUs, up to", axis={"labelAngle": 0})
    kinds = ["measured", "expected"]
    y = {name: quantity(name, "ETTR", scale={"zero": False}) for name in ("low", "ETTR")}
    colour = nominal("what", title=None, scale={"domain": kinds, "range": [COLOURS[5], COLOURS[0]]})
    shape = nominal("what", title=None, scale={"domain": kinds, "range": ["circle", "diamond"]})
    description = "; ".join(f"up to {plural(row['gpus_up_to'], 'GPU')} {row['mean']:.2f}" for row in rows)
    return Figure(
        "Runs of 24 h or more: measured ETTR (lines: 8 of 10 runs) and expected ETTR",
        description,
        (
            layer("rule", ranges, {"color": "#666666"}, x=x, y=y["low"], y2={"field": "high"}),
            points(means, x=x, y=y["ETTR"], color=colour, shape=shape),
        ),
    )
