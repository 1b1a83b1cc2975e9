"""The truth behind the programs' output: CSV files below truth/. The first line of a file has the names of the
columns."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

COLUMNS = {
    # Each record that ended abnormally. cause: one of causes.py, "user", "crash_loop", "false_alarm", "limit".
    "failures": "db_index,job_id,state,end_time,gpus,cause,node,fault",
    # second_order: True if the pre-emptor is the requeue of a record that hardware ended (`after`).
    "preemptions": "time,victim_db_index,victim_job_id,preemptor_db_index,preemptor_job_id,second_order,after",
    # Each fault. seen: True if a check detected it then and there. hit: number of records that it ended.
    "faults": "fault,node,time,cause,effect,seen,hit",
    # Each node: faults per day, and when it was a lemon ("" = never).
    "nodes": "node,faults_a_day,factor,lemon_from,lemon_until",
    # Each condition: its fault, "user", "harmless" or "false_alarm". onset: true start. opened: when reported ("" =
    # never).
    "conditions": "condition,node,code,subject,kind,severity,onset,opened,cleared,because",
    # The GPU in each node and slot ("" = until the end).
    "gpus": "node,subject,serial,from_time,until_time",
    # why: daemon_off, node_down, lost (the lines are missing), dropped (a line reports how many did not fit)
    "not_observed": "node,from_time,until_time,why",
    "checks": "node,check,event,time",
    # why: fault (the node had a fault), superstition (it had none)
    "exclusions": "user,node,from_time,until_time,why",
    # why: fault, false_alarm, person, node_fail, crash_loop
    "outages": "node,from_time,until_time,state,why",
}


class Truth:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        for name, columns in COLUMNS.items():
            self._files[name] = (folder / f"{name}.csv").open("w", encoding="utf-8", newline="\n")
            self._files[name].write(columns + "\n")

    def row(self, table: str, *values: object) -> None:
        """Write a row. None is an empty cell. No value contains a comma."""
        self._files[table].write(",".join("" if value is None else str(value) for value in values) + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
