"""What was really so, beside what the programs print: CSV files below truth/; the first line names the columns."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

COLUMNS = {
    # Each record that did not end as it should. cause: one of causes.py, "user", "crash_loop", "false_alarm", "limit".
    "failures": "db_index,job_id,state,end_time,gpus,cause,node,fault",
    # second_order: the pre-emptor is the requeue of a record that the hardware ended (`after`).
    "preemptions": "time,victim_db_index,victim_job_id,preemptor_db_index,preemptor_job_id,second_order,after",
    # Each thing that broke. seen: by a check that ran there and then; hit: records that it ended.
    "faults": "fault,node,time,cause,effect,seen,hit",
    # Faults a day, and when the node was a lemon ("" = never).
    "nodes": "node,faults_a_day,factor,lemon_from,lemon_until",
    # Each condition: its fault, "user", "harmless" or "false_alarm". onset: since when; opened: told ("" = never).
    "conditions": "condition,node,code,subject,kind,severity,onset,opened,cleared,because",
    # why: daemon_off, node_down, lost (the lines are gone), dropped (a line says how many did not fit)
    "not_observed": "node,from_time,until_time,why",
    "checks": "node,check,event,time",
    # why: fault (the node was to blame), superstition
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
        """None is an empty cell. No value has a comma."""
        self._files[table].write(",".join("" if value is None else str(value) for value in values) + "\n")

    def close(self) -> None:
        for file in self._files.values():
            file.close()
