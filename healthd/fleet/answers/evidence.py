"""Which checks are known to have looked."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from healthd.fleet.answers.study import Study


class Listed(NamedTuple):
    """Columns of looked.sql. checks: names in double quotes with commas between them."""

    cluster: str
    node: str
    checks: str
    node_days: int
    first_time: int


class Looked(NamedTuple):
    """How many nodes and node-days completed a check, and when the first did."""

    nodes: int
    node_days: int
    first_time: int


def looked_at(study: Study) -> dict[str, Looked]:
    """Return the checks that completed on chosen nodes in the period, by name. Empty if no stream was read."""
    by_check: dict[str, list[Listed]] = defaultdict(list)
    for row in study.ask("looked", Listed):
        for name in row.checks.split(","):
            by_check[name.strip(' "')].append(row)
    return {
        check: Looked(
            len({(row.cluster, row.node) for row in rows}),
            sum(row.node_days for row in rows),
            min(row.first_time for row in rows),
        )
        for check, rows in sorted(by_check.items())
    }
