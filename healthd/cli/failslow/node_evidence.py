"""What the nodes of a job told by themselves, out of the fleet's store: `healthd failslow --db`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from healthd.cli.fleet.answers import CHOICES, at_the_store
from healthd.cli.fleet.ingest import at_the_centre
from healthd.cli.terminal import Stop
from healthd.failslow import times
from healthd.failslow.model import Evidence, Series

WHO = "healthd failslow"


def evidence_of(series: Sequence[Series], folder: str) -> tuple[list[Evidence], str]:
    """What the store in this folder knows of the nodes of these series and their time, its times as in Series.index;
    and a sentence without its end on how much that is. Raises Stop: 64 if nothing names a node or no index is a time, 3
    if the store cannot answer."""
    nodes = sorted({one.node for one in series} - {""})
    if not nodes:
        raise Stop(f"{WHO}: --db: no series has a node: --node names the column that has it")
    first = min(float(one.index[0]) for one in series if one.node)
    last = max(float(one.index[-1]) for one in series if one.node)
    unit = times.units_a_second(first, last)
    if unit is None:
        raise Stop(f"{WHO}: --db: the index is no time: --index names a column with ISO 8601 or the time since 1970")
    with at_the_centre(WHO):
        from healthd.fleet.node_evidence import BEFORE_SECONDS, told_by

    # What a node told before may still slow what begins up to ten minutes later.
    asked = _asked(folder, math.floor(first / unit) - BEFORE_SECONDS, math.floor(last / unit) + 1)
    with at_the_store(asked, who=WHO) as study:
        told = told_by(study, nodes)
    found = [
        Evidence(one.node, one.begin * unit, None if one.end is None else one.end * unit, one.code, one.what)
        for one in told
    ]
    telling, count = len({one.node for one in found}), len(found)
    findings = f"{count:,} finding{'' if count == 1 else 's'}"
    return found, f"the store has {findings} of {telling:,} of its {len(nodes):,} nodes at that time"


def _asked(folder: str, begin: int, end: int) -> argparse.Namespace:
    """The flags that a store is opened by. begin, end: seconds since 1970."""
    flags = dict.fromkeys((*CHOICES, "threads", "memory"), "")
    return argparse.Namespace(**flags, db=folder, from_time=str(begin), to_time=str(end))
