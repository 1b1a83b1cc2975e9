"""Describes links that fail more often than others."""

from __future__ import annotations

from healthd.common.page import plural
from healthd.fleet.answers.document import Document, format_time, number, percent
from healthd.fleet.figures import COLOURS, Accessor, Figure, bars, intervals, make_records, nominal, points, quantity
from healthd.fleet.view import COUNT, NUMBER, SPACED, TEXT, TWO_DIGITS, Column, Row, Table, View, describe, interval

MAX_ROWS = 20
KINDS = (
    Column("kind", "kind", SPACED),
    Column("episodes", "episodes", COUNT),
    Column("ports", "ports", COUNT),
    Column("nodes", "nodes", COUNT),
    Column("per 1000 port-days", "per_1000_port_days", NUMBER),
    Column("95 % interval", "interval", interval(NUMBER)),
)
PORTS = (
    Column("port", lambda row: f"{row['node']} {row['port']}".rstrip()),
    Column("kind", "kind", SPACED),
    Column("episodes", "episodes", COUNT),
    Column("expected", "expected", TWO_DIGITS),
    Column("p, adjusted", "adjusted", TWO_DIGITS),
    Column("switch", "switch", TEXT),
)
SWITCHES = (
    Column("switch", "switch"),
    Column("kind", "kind", SPACED),
    Column("nodes hit", "nodes_hit", COUNT),
    Column("nodes", "nodes", COUNT),
    Column("episodes", "episodes", COUNT),
    Column("expected", "expected", TWO_DIGITS),
    Column("p, adjusted", "adjusted", TWO_DIGITS),
)


def view(links: Document) -> View:
    ports, switches = ([row for row in links[key] if row["outlier"]] for key in ("ports", "switches"))
    return describe(
        links,
        "Links: flaps, errors and lost speed, by port and switch",
        _sentences(links, ports, switches),
        [
            Table("All links", KINDS, links["kinds"]),
            Table("Outlier ports", PORTS, ports, MAX_ROWS),
            Table("Outlier switches", SWITCHES, switches, MAX_ROWS),
        ],
        [_rate_figure(links), _switch_figure(links)],
    )


def _sentences(links: Document, ports: list[Row], switches: list[Row]) -> list[str]:
    if not any(row["episodes"] for row in links["kinds"]):
        return ["No link problem was observed in this period."]
    if not ports and not switches:
        found = ["No port or switch has more problems than chance explains."]
    else:
        found = [
            f"{plural(len(ports), 'port')} and {plural(len(switches), 'switch', 'switches')} have more problems than "
            f"chance explains. On average at most {percent(links['level'])} of these findings are false."
        ]
    if ports:
        worst = ports[0]
        found.append(
            f"The worst is {worst['node']}{worst['port'] and ' '}{worst['port']}, {worst['kind'].replace('_', ' ')}: "
            f"{plural(worst['episodes'], 'time')}, against {number(worst['expected'], 2)} expected."
        )
    if links["together"]:
        last = links["together"][-1]
        found.append(
            f"Several nodes of one switch lost their links within a minute {plural(len(links['together']), 'time')}, "
            f"most recently {len(last['nodes'])} nodes of {last['switch']} at {format_time(last['time'])}. Check the "
            "switch."
        )
    return found


def _kind(row: Row) -> str:
    return str(row["kind"]).replace("_", " ")


def _rate_figure(links: Document) -> Figure | None:
    kinds = [row for row in links["kinds"] if row["interval"] is not None and row["episodes"]]
    if not kinds:
        return None
    drawn = make_records(
        kinds, {"kind": _kind, "rate": "per_1000_port_days", "low": "interval.0", "high": "interval.1"}
    )
    rate = quantity("rate", "episodes per 1000 port-days")
    description = "; ".join(f"{record['kind']} {number(record['rate'])}" for record in drawn) + ", per 1000 port-days"
    layers = (bars(drawn, rate, "kind"), intervals(drawn, "kind"))
    return Figure("Rate of link problems", description, layers)


def _switch_figure(links: Document) -> Figure | None:
    if not links["switches"]:
        return None
    fields: dict[str, Accessor] = {name: name for name in ("switch", "kind", "expected", "episodes")}
    drawn = make_records(links["switches"], {**fields, "stands out": lambda row: "yes" if row["outlier"] else "no"})
    worst = ", ".join(row["switch"] for row in links["switches"] if row["outlier"])
    marks = points(
        drawn,
        x=quantity("expected", "expected episodes"),
        y=quantity("episodes", "episodes"),
        shape=nominal("stands out", legend={} if worst else None),
        color=nominal("kind", scale={"range": list(COLOURS)}, title=None),
        tooltip=[nominal("switch"), nominal("kind"), quantity("episodes"), quantity("expected")],
    )
    description = f"Episodes on each switch's nodes, and the number expected by chance. Outliers: {worst or 'none'}."
    return Figure("Switches", description, (marks,))
