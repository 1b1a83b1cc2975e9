"""Generate a history in a folder: the output of the programs, and truth/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from history import slurm_output as slurm
from history.clock import Clock
from history.cluster import Cluster
from history.draw import stream
from history.faults import Faults
from history.hardware import Hardware
from history.outages import Outages
from history.scheduler import Scheduler
from history.size import DAY, GPUS_PER_NODE, Size
from history.slurm_output import Books
from history.streams import Streams
from history.truth import Truth
from history.upkeep import Upkeep
from history.workload import Job, Workload

WARM_UP = 7 * DAY  # days of jobs before the history begins, so that its first day is as full as the others


class _SchedulerListener:
    """Records the scheduler's actions in Slurm's accounting and in the truth."""

    def __init__(self, size: Size, books: Books, truth: Truth) -> None:
        self._start, self._books, self._truth = size.start, books, truth
        self.second_order = 0
        self.ended = books.ended

    def preempted(self, victim: Job, preemptor: Job, now: int) -> None:
        self._books.preempted(victim, preemptor, now)
        if now >= self._start:
            after = preemptor.after_failure
            self.second_order += bool(after)
            self._truth.row(
                *("preemptions", now, victim.row, victim.id, preemptor.row, preemptor.id),
                *(int(bool(after)), after or None),
            )


def make(size: Size, folder: Path) -> dict[str, Any]:
    """Generate the history and return truth/summary.json.

    The folder must not exist; it appears only when it is complete.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    summary = _make(size, unfinished)
    unfinished.rename(folder)
    return summary


def _make(size: Size, folder: Path) -> dict[str, Any]:
    clock, workload, truth, books = Clock(), Workload(size), Truth(folder / "truth"), Books(size, folder)
    cluster = Cluster(size.nodes, stream(size.seed, "places"))
    listener = _SchedulerListener(size, books, truth)
    scheduler = Scheduler(size, clock, workload, cluster, listener)
    hardware = Hardware(size, truth)
    streams = Streams(size, clock, folder / "events", truth, hardware)
    outages = Outages(clock, cluster, scheduler, books, truth, stream(size.seed, "tickets"), folder)
    faults = Faults(size, clock, workload, cluster, scheduler, streams, outages, books, truth, hardware)
    upkeep = Upkeep(size, clock, cluster, scheduler, streams, outages, faults, books, truth)

    scheduler.begin(size.start - WARM_UP)
    clock.run(size.start)
    faults.begin()
    upkeep.begin()
    for day in range(size.start, size.end, DAY):
        books.begin_day(day)
        clock.run(day + DAY)
        books.end_day(scheduler.waiting, scheduler.running)
    books.count_remaining(scheduler.waiting, scheduler.running)
    outages.close()
    streams.end()
    hardware.end()
    books.close()
    slurm.topology(size, folder)
    truth.close()

    summary = {
        "from_time": size.start,
        "to_time": size.end,
        "nodes": size.nodes,
        "records": sum(books.states.values()),
        "sacct_lines": books.lines,
        "states": dict(sorted(books.states.items())),
        "job_nodes": books.job_nodes,
        "utilisation": round(books.gpu_seconds / (size.nodes * GPUS_PER_NODE * (size.end - size.start)), 4),
        "preemptions": books.preemptions,
        "second_order": listener.second_order,
        "excluded": books.exclusions,
        "node_states": outages.states,
        "reservations": upkeep.reserved,
        "tickets": outages.tickets,
        "events": dict(sorted(streams.event_counts.items())),
        "replaced_gpus": hardware.replacements,
        "repeated_lines": streams.repeats,
        "torn_lines": streams.torn,
        "lost_lines": streams.missing["lost"],
        "dropped_lines": streams.missing["dropped"],
        "large_jobs_hit": faults.rate_hits,
        "large_jobs_node_days": round(faults.rate_node_seconds / DAY, 3),
    }
    text = json.dumps(summary, indent=1) + "\n"
    (folder / "truth" / "summary.json").write_text(text, encoding="ascii", newline="\n")
    return summary
