"""Builder of small stores with jobs and conditions, for the answers about checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from fleet_history import BEGIN, DAY, END, History, row, write

from healthd.fleet.answers.study import Choice, Study, open_study
from healthd.fleet.tables import TABLES

__all__ = ["BEGIN", "DAY", "END", "Made", "row", "study"]
ALIVE = '{"conditions":[],"checks":["gpu_xid","ib_link","mount"]}'


class Made:
    """A history that grows: each method adds the signal in its name. Times are epoch seconds."""

    def __init__(self) -> None:
        self.history: History = {name: [] for name in TABLES}
        self._number = count(1)

    def job(self, nodes: str, start: int | None, end: int | None, state: str = "COMPLETED", **more: Any) -> int:
        """Add a job and return its db_index. Each letter of `nodes` is a node."""
        index = next(self._number)
        times = {"submit_time": start, "start_time": start, "end_time": end}
        its = {
            "cluster": "c1",
            "db_index": index,
            "job_id": index,
            "state": state,
            "nodes": len(nodes),
            **times,
            **more,
        }
        self.history["jobs"].append(row("jobs", **{"gpus": 8 * len(nodes), **its}))
        self.history["job_nodes"] += [
            row("job_nodes", cluster="c1", db_index=index, node=node, **times) for node in nodes
        ]
        return index

    def seen(
        self, node: str, code: str, time: int, severity: str = "critical", kind: str = "edge", **more: Any
    ) -> None:
        """Add a condition that opens when first seen. `until`: when last seen; `cleared`: when it ends."""
        until, cleared = more.pop("until", None), more.pop("cleared", None)
        life = f"{code}-{node}-{next(self._number)}"
        its = {
            "check_name": code.partition("/")[0],
            "code": code,
            "condition_id": life,
            "severity": severity,
            "kind": kind,
        }
        its |= {"first_time": time, "observed": False, "history": False, "subject": "", **more}
        self.line(node, time, "opened", **its, last_time=time)
        if until is not None:
            self.line(node, until, "seen_again", **its, last_time=until)
        if cleared is not None:
            self.line(node, cleared, "cleared", **its, last_time=until or time)

    def line(self, node: str, time: int, event: str, **more: Any) -> None:
        """Add a line to the node's stream; `mono` follows `time`."""
        number = next(self._number)
        its = {"cluster": "c1", "node": node, "boot_id": "b", "stream_id": f"s{node}", "seq": number, "time": time}
        self.history["events"].append(
            row("events", **{**its, "mono": float(time - BEGIN), "schema_version": 1, "event": event, **more})
        )

    def alive(self, nodes: Iterable[str], begin: int = BEGIN, end: int = END, rest: str = ALIVE) -> None:
        """Add one alive line per day, so that the nodes are observed."""
        for node in nodes:
            for time in (*range(begin, end, DAY), end):
                self.line(node, time, "alive", rest=rest)

    def out(self, node: str, start: int, end: int | None, by: str = "healthd") -> None:
        self.history["node_states"].append(
            row("node_states", cluster="c1", node=node, start_time=start, end_time=end, state="DRAIN", set_by=by)
        )

    def read(self, source: str, begin: int, end: int) -> None:
        """Record an ingest that read this interval of this source."""
        self.history["ingests"].append(
            row("ingests", cluster="c1", source=source, name="f", from_time=begin, to_time=end)
        )

    def node(self, name: str, **more: Any) -> None:
        self.history["nodes"].append(row("nodes", cluster="c1", node=name, **more))

    def in_order(self) -> History:
        """Return the history with sequence numbers in order of time."""
        lines = sorted(self.history["events"], key=lambda one: (one["node"], one["time"], one["seq"]))
        for seq, one in enumerate(lines, 1):
            one["seq"] = seq
        return {**self.history, "events": lines}


@contextmanager
def study(
    made: Made | History, folder: Path, chosen: Choice | None = None, begin: int = BEGIN, end: int = END
) -> Iterator[Study]:
    folder.mkdir(parents=True, exist_ok=True)
    history = made.in_order() if isinstance(made, Made) else made
    with open_study(write(history, folder), begin, end, chosen) as asked:
        yield asked
