"""Builder of small stores with jobs and conditions, for the answers about checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from fleet_history import BEGIN, DAY, END, History, row, write_parquet

from healthd.fleet.answers.study import Choice, Study, open_study
from healthd.fleet.tables import TABLES

__all__ = ["BEGIN", "DAY", "END", "HistoryBuilder", "row", "study"]
ALIVE = '{"conditions":[],"checks":["gpu_xid","ib_link","mount"]}'


class HistoryBuilder:
    """A history that grows: each method adds the signal in its name. Times are epoch seconds."""

    def __init__(self) -> None:
        self.history: History = {name: [] for name in TABLES}
        self._number = count(1)

    def job(self, nodes: str, start: int | None, end: int | None, state: str = "COMPLETED", **extra: Any) -> int:
        """Add a job and return its db_index. Each letter of `nodes` is a node."""
        index = next(self._number)
        times = {"submit_time": start, "start_time": start, "end_time": end}
        columns = {
            "cluster": "c1",
            "db_index": index,
            "job_id": index,
            "state": state,
            "nodes": len(nodes),
            **times,
            **extra,
        }
        self.history["jobs"].append(row("jobs", **{"gpus": 8 * len(nodes), **columns}))
        self.history["job_nodes"] += [
            row("job_nodes", cluster="c1", db_index=index, node=node, **times) for node in nodes
        ]
        return index

    def condition(
        self, node: str, code: str, time: int, severity: str = "critical", kind: str = "edge", **extra: Any
    ) -> None:
        """Add a condition that opens when first seen. `until`: when last seen; `cleared`: when it ends."""
        until, cleared = extra.pop("until", None), extra.pop("cleared", None)
        condition_id = f"{code}-{node}-{next(self._number)}"
        columns = {
            "check_name": code.partition("/")[0],
            "code": code,
            "condition_id": condition_id,
            "severity": severity,
            "kind": kind,
        }
        columns |= {"first_time": time, "observed": False, "history": False, "subject": "", **extra}
        self.line(node, time, "opened", **columns, last_time=time)
        if until is not None:
            self.line(node, until, "seen_again", **columns, last_time=until)
        if cleared is not None:
            self.line(node, cleared, "cleared", **columns, last_time=until or time)

    def line(self, node: str, time: int, event: str, **extra: Any) -> None:
        """Add a line to the node's stream; `mono` follows `time`."""
        number = next(self._number)
        columns = {"cluster": "c1", "node": node, "boot_id": "b", "stream_id": f"s{node}", "seq": number, "time": time}
        self.history["events"].append(
            row("events", **{**columns, "mono": float(time - BEGIN), "schema_version": 1, "event": event, **extra})
        )

    def alive(self, nodes: Iterable[str], begin: int = BEGIN, end: int = END, rest: str = ALIVE) -> None:
        """Add one alive line per day, so that the nodes are observed."""
        for node in nodes:
            for time in (*range(begin, end, DAY), end):
                self.line(node, time, "alive", rest=rest)

    def outage(self, node: str, start: int, end: int | None, by: str = "healthd") -> None:
        self.history["node_states"].append(
            row("node_states", cluster="c1", node=node, start_time=start, end_time=end, state="DRAIN", set_by=by)
        )

    def ingest(self, source: str, begin: int, end: int) -> None:
        """Record an ingest that read this interval of this source."""
        self.history["ingests"].append(
            row("ingests", cluster="c1", source=source, name="f", from_time=begin, to_time=end)
        )

    def node(self, name: str, **extra: Any) -> None:
        self.history["nodes"].append(row("nodes", cluster="c1", node=name, **extra))

    def in_order(self) -> History:
        """Return the history with sequence numbers in order of time."""
        lines = sorted(self.history["events"], key=lambda line: (line["node"], line["time"], line["seq"]))
        for seq, line in enumerate(lines, 1):
            line["seq"] = seq
        return {**self.history, "events": lines}


@contextmanager
def study(
    source: HistoryBuilder | History, folder: Path, chosen: Choice | None = None, begin: int = BEGIN, end: int = END
) -> Iterator[Study]:
    folder.mkdir(parents=True, exist_ok=True)
    history = source.in_order() if isinstance(source, HistoryBuilder) else source
    with open_study(write_parquet(history, folder), begin, end, chosen) as opened_study:
        yield opened_study
