"""Output of Slurm's programs: one sacct file per day, slurmctld's log, sacctmgr's events and reservations.

sacct: --parsable2 --duplicates --allocations with SLURM_TIME_FORMAT=%s, called right after each day, as for `healthd
fleet ingest --sacct`. If a job waits or runs at the end of a day, its record is in the file of that day, with its state
at that time. Its final record is in the file of the day on which it ended. The other formats are described next to
their readers in healthd/fleet/sources/.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from history.size import GPUS_PER_NODE, NODES_PER_POD, Size, node_name
from history.streams import CLUSTER
from history.workload import Job

COLUMNS = (
    "JobIDRaw|JobID|Cluster|State|ExitCode|Submit|Eligible|Start|End|Suspended|NNodes|NodeList|AllocCPUS|"
    "AllocTRES|Partition|Account|QOS|Priority|User|Reservation|TimelimitRaw|Restarts|JobName|WorkDir|SubmitLine|DBIndex"
)
EXITS = {"FAILED": "1:0", "OUT_OF_MEMORY": "0:125", "CANCELLED": "0:15", "NODE_FAIL": "1:0"}
CPUS_PER_GPU = 12


class Books:
    """Writes the files. `states`, `job_nodes` and `gpu_seconds` are totals of the printed records, each counted once.

    `gpu_seconds` includes only time within the history.
    """

    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._sacct = folder / "sacct"
        self._sacct.mkdir()
        self._log = (folder / "slurmctld.log").open("w", encoding="ascii", newline="\n")
        self._day: TextIO | None = None
        self._node_states: list[str] = []
        self._reservations: list[str] = []
        self._folder = folder
        self.states = Counter[str]()
        self.job_nodes = self.gpu_seconds = self.lines = self.preemptions = self.exclusions = 0

    # sacct

    def begin_day(self, begin: int) -> None:
        """Begin the file of a day."""
        self._day = (self._sacct / f"{_date(begin)}.txt").open("w", encoding="ascii", newline="\n", buffering=1 << 16)
        self._day.write(COLUMNS + "\n")

    def end_day(self, waiting: Iterable[Job], running: Iterable[Job]) -> None:
        assert self._day
        for job in waiting:
            self._line(job, "PENDING", None)
        for job in running:
            self._line(job, "RUNNING", None)
        self._day.close()

    def ended(self, job: Job, state: str, now: int) -> None:
        """Write a record that ended, unless it ended before the history."""
        if now >= self._size.start:
            self._count(job, state, now)
            self._line(job, state, now)

    def count_remaining(self, waiting: Iterable[Job], running: Iterable[Job]) -> None:
        """Count the jobs that are left at the end of the history."""
        for job in waiting:
            self._count(job, "PENDING", None)
        for job in running:
            self._count(job, "RUNNING", None)

    def _count(self, job: Job, state: str, end: int | None) -> None:
        self.states[state] += 1
        if job.nodes:
            self.job_nodes += len(job.nodes)
            first, last = max(job.started, self._size.start), min(end or self._size.end, self._size.end)
            self.gpu_seconds += job.gpus * max(0, last - first)
        self.exclusions += len(job.excluded)

    def _line(self, job: Job, state: str, end: int | None) -> None:
        assert self._day
        gpus, user = job.gpus, job.user
        displayed_id = f"{job.array}_{job.task}" if job.array else job.id
        if job.nodes:
            start, nodes, cpus, node_count = job.started, job.node_list, gpus * CPUS_PER_GPU, len(job.nodes)
            tres = f"billing={cpus},cpu={cpus},gres/gpu={gpus},mem={gpus * 120}G,node={node_count}"
        else:
            start, nodes, cpus, node_count, tres = "Unknown", "None assigned", 0, job.wants or 1, ""
        unwanted = f" --exclude={','.join(map(node_name, job.excluded))}" if job.excluded else ""
        by = f" by {10000 + user}" if state == "CANCELLED" else ""
        self.lines += 1
        self._day.write(
            f"{job.id}|{displayed_id}|{CLUSTER}|{state}{by}|{EXITS.get(state, '0:0')}|"
            f"{job.submitted}|{job.eligible}|"
            f"{start}|{'Unknown' if end is None else end}|00:00:00|{node_count}|{nodes}|{cpus}|{tres}|"
            f"gpu|a{user % 20:02d}|"
            f"{job.qos}|{job.priority}|u{user:04d}||{job.limit // 60}|{job.restarts}|{job.name}|{job.folder}|"
            f"sbatch --gpus={gpus} --time={job.limit // 60}{unwanted} run.sh|{job.row}\n"
        )

    # slurmctld's log

    def preempted(self, victim: Job, preemptor: Job, now: int) -> None:
        if now >= self._size.start:
            self.preemptions += 1
            did = "requeued" if victim.may_requeue else "killed"
            self._log_line(now, f"preempted {_p_j(victim)} has been {did} to reclaim resources for {_p_j(preemptor)}")

    def not_responding(self, now: int, node: int) -> None:
        self._log_line(now, f"error: Nodes {node_name(node)} not responding, setting DOWN")

    def returned(self, now: int, node: int) -> None:
        self._log_line(now, f"Node {node_name(node)} now responding")

    def _log_line(self, now: int, message: str) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        self._log.write(f"[{at}.{now * 37 % 1000:03d}] {message}\n")

    # sacctmgr

    def node_state(self, node: int, start: int, end: int | None, state: str, reason: str, user: str) -> None:
        until = "Unknown" if end is None else end
        self._node_states.append(f"{start:010d}|{CLUSTER}|{node_name(node)}|{start}|{until}|{state}|{user}|{reason}")

    def reservation(self, name: str, nodes: str, start: int, end: int) -> None:
        self._reservations.append(f"{CLUSTER}|{name}|{start}|{end}|MAINT,IGNORE_JOBS,SPEC_NODES|{nodes}")

    def close(self) -> None:
        self._log.close()
        states = [line[11:] for line in sorted(self._node_states)]
        _write(self._folder / "node_states.txt", "Cluster|NodeName|TimeStart|TimeEnd|State|User|Reason", states)
        _write(
            *(self._folder / "reservations.txt", "Cluster|Name|TimeStart|TimeEnd|Flags|NodeName", self._reservations)
        )


def topology(size: Size, folder: Path) -> None:
    pods = range((size.nodes + NODES_PER_POD - 1) // NODES_PER_POD)
    leaves = [f"SwitchName=leaf{pod + 1:03d} Nodes={pod_list(size, pod)}" for pod in pods]
    _write(
        folder / "topology.conf",
        "# 10 racks of 2 nodes behind a leaf",
        [*leaves, f"SwitchName=spine Switches=leaf[001-{len(pods):03d}]"],
    )
    facts = [
        f"{node_name(n)},a100,{GPUS_PER_NODE},gpu,leaf{n // NODES_PER_POD + 1:03d},r{n // 2 + 1:04d}"
        for n in range(size.nodes)
    ]
    _write(folder / "nodes.csv", "node,gpu_model,gpus,partitions,switch,rack", facts)


def pod_list(size: Size, pod: int) -> str:
    first, last = pod * NODES_PER_POD + 1, min(size.nodes, (pod + 1) * NODES_PER_POD)
    return f"n[{first:04d}-{last:04d}]" if first < last else f"n{first:04d}"


def _p_j(job: Job) -> str:
    """Format a job like slurmctld's %pJ."""
    return f"JobId={job.array}_{job.task}({job.id})" if job.array else f"JobId={job.id}"


def _date(at: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))


def _write(path: Path, header: str, lines: list[str]) -> None:
    path.write_text("\n".join([header, *lines]) + "\n", encoding="ascii", newline="\n")
