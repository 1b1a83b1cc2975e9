"""How much of its time a large job makes progress, as a chapter: figures 9 and 10 of Kokolis, Kuchnik et al. (HPCA
2025)."""

from __future__ import annotations

import altair as alt

from healthd.fleet.answers.document import Document, number, plural, span
from healthd.fleet.chapters.chapter import COLOURS, Chapter, Chart, Table, chart, rows_of


def chapter(ettr: Document) -> Chapter:
    measured = ettr["measured"]
    return Chapter(
        "ettr",
        "How much of its time a large job makes progress",
        _sentences(ettr),
        (
            _grid(ettr, "by_checkpoint", "checkpoint_seconds"),
            _grid(ettr, "by_rate", "rate"),
            *((_runs(ettr),) if measured else ()),
        ),
        (_forms(ettr), *((_table(ettr),) if measured else ())),
        tuple(ettr["notes"]),
    )


def _sentences(ettr: Document) -> tuple[str, ...]:
    with_ = ettr["parameters"]
    interval = ettr["interval"]
    said = [
        f"A job of {with_['gpus']:,} GPUs that writes a checkpoint every {span(with_['checkpoint_seconds'])} and "
        f"restarts in {span(with_['restart_seconds'])} makes progress in {ettr['exact']:.0%} of its time"
        + (f" (95 %: {interval[0]:.0%} to {interval[1]:.0%})" if interval else "")
        + ("" if ettr["mttf_seconds"] is None else f"; it is interrupted every {span(ettr['mttf_seconds'])}")
        + "."
    ]
    other = next(
        (
            one
            for one in ettr["grid"]["by_checkpoint"]
            if one["gpus"] == with_["gpus"] and one["checkpoint_seconds"] == 300
        ),
        None,
    )
    if other is not None and with_["checkpoint_seconds"] > 300:
        said.append(f"With a checkpoint every 5 min it would be {other['ettr']:.0%}.")
    if ettr["daly_young_seconds"] is not None:
        said.append(f"The best interval between checkpoints is {span(ettr['daly_young_seconds'])} (Daly, Young).")
    said += [f"Careful: {one}." for one in ettr["warnings"]]
    return tuple(one.replace("%", " %").replace("  %", " %") for one in said)


def _grid(ettr: Document, name: str, key: str) -> Chart:
    """GPUs beside intervals or rates; each cell says its number, so that colour is not needed."""
    cells = [
        {
            "GPUs": f"{one['gpus'] // 1024}k",
            "other": span(one[key]) if key == "checkpoint_seconds" else number(float(one[key])),
            "ETTR": one["ettr"],
            "dark": one["ettr"] < 0.5,
        }
        for one in ettr["grid"][name]
    ]
    title = "a checkpoint every" if key == "checkpoint_seconds" else "failures per 1000 node-days"
    base = alt.Chart(rows_of(cells)).encode(
        x=alt.X("GPUs:N", sort=None, title="GPUs", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("other:N", sort=None, title=title),
    )
    drawing = alt.LayerChart(
        layer=[
            base.mark_rect().encode(
                color=alt.Color("ETTR:Q", scale=alt.Scale(domain=[0, 1], scheme="viridis"), legend=None)
            ),
            base.mark_text(fontSize=11).encode(
                text=alt.Text("ETTR:Q", format=".2f"),
                color=alt.condition("datum.dark", alt.value("#ffffff"), alt.value("#111111")),
            ),
        ]
    )
    some = [one for one in ettr["grid"][name] if one["gpus"] in (4096, 16_384, 131_072)]
    words = "; ".join(f"{one['gpus']:,} GPUs, {title} {number(float(one[key]))}: {one['ettr']:.2f}" for one in some)
    what = "the interval between checkpoints" if key == "checkpoint_seconds" else "the rate of failures"
    return chart(f"ETTR by size and {what}", words, drawing)


def _runs(ettr: Document) -> Chart:
    """Each size: the mean of its runs with the range of 8 of 10, and what the model expects."""
    rows = ettr["measured"]
    ranges = [{"size": f"{row['gpus_up_to']:,}", "low": row["low"], "high": row["high"]} for row in rows]
    points = [
        {"size": f"{row['gpus_up_to']:,}", "what": what, "ETTR": row[key]}
        for row in rows
        for what, key in (("measured", "mean"), ("expected", "expected"))
        if row[key] is not None
    ]
    x = alt.X("size:N", sort=None, title="GPUs, up to", axis=alt.Axis(labelAngle=0))
    kinds = ["measured", "expected"]
    y = alt.Y("low:Q", title="ETTR", scale=alt.Scale(zero=False))
    drawing = alt.LayerChart(
        layer=[
            alt.Chart(rows_of(ranges)).mark_rule(color="#666666").encode(x=x, y=y, y2="high:Q"),
            alt.Chart(rows_of(points))
            .mark_point(filled=True, size=70)
            .encode(
                x=x,
                y=alt.Y("ETTR:Q", title="ETTR", scale=alt.Scale(zero=False)),
                color=alt.Color("what:N", scale=alt.Scale(domain=kinds, range=[COLOURS[5], COLOURS[0]]), title=None),
                shape=alt.Shape("what:N", scale=alt.Scale(domain=kinds, range=["circle", "diamond"]), title=None),
            ),
        ]
    )
    words = "; ".join(f"up to {plural(row['gpus_up_to'], 'GPU')} {row['mean']:.2f}" for row in rows)
    return chart("Runs of 24 h or more: measured ETTR (lines: 8 of 10 runs) and the expected one", words, drawing)


def _forms(ettr: Document) -> Table:
    simulation = ettr["simulation"]
    return Table(
        "The same job by other forms",
        ("form", "ETTR"),
        (
            ("progress / expected time, for failures at random (used here)", f"{ettr['exact']:.3f}"),
            (f"simulated, standard error {simulation['standard_error']:.2g}", f"{ettr['simulated']:.3f}"),
            ("formula with queue and end, a lower bound", f"{ettr['analytic']:.3f}"),
            ("closed form of the paper, a lower bound", f"{ettr['approximate']:.3f}"),
        ),
        frozenset({1}),
    )


def _table(ettr: Document) -> Table:
    return Table(
        "Runs of 24 h or more",
        ("GPUs up to", "runs", "interruptions", "ETTR", "8 of 10 runs", "expected"),
        tuple(
            (
                f"{row['gpus_up_to']:,}",
                f"{row['runs']:,}",
                f"{row['interruptions']:,}",
                f"{row['mean']:.2f}",
                f"{row['low']:.2f} to {row['high']:.2f}",
                "-" if row["expected"] is None else f"{row['expected']:.2f}",
            )
            for row in ettr["measured"]
        ),
        frozenset(range(6)),
    )
