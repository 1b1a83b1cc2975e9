"""Slurm jobs that caused a kernel event, stored in its field "job" ("4711", or "12,13" if jobs share a GPU).

That is the job of the process in the line. If the process is gone or the line names none (Xid 79), it is the jobs that
have the GPU open. Slurm's cgroups give the job within the same pass. Without cgroups, `scontrol listpids` gives it a
moment later: a child process with a deadline that queries only this node's slurmstepds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from healthd.agent.kernel_log.coalesce import with_jobs
from healthd.common.model import Gpu, KernelEvent
from healthd.common.slurm.commands import ENVIRONMENT, listpids
from healthd.common.slurm.output import parse_processes
from healthd.host.child_process import Child
from healthd.host.job_processes import job_of, job_processes, jobs_holding
from healthd.host.wakeup import FOREVER

STILL_THERE_SECONDS = 10.0  # after a line; later its pid may belong to another process
LOOK_AGAIN_SECONDS = 1.0  # limits the rate of cgroup walks in a storm of events
ASK_AGAIN_SECONDS = 2.0  # limits the rate of scontrol calls


class JobAtSource:
    def __init__(self, root: str, node_name: str, monotonic: Callable[[], float]) -> None:
        self._root = root
        self._argv = listpids(node_name)
        self._monotonic = monotonic
        self._looked_at = self._asked_at = -FOREVER
        self._processes: dict[int, str] = {}  # processes of jobs, from their cgroups
        self._holding: dict[int, tuple[str, ...]] = {}  # by minor number
        self._waiting: set[int] = set()  # sequence numbers of events for the next query
        self._asked: set[int] = set()  # ... and of the running query
        self._child: Child | None = None

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    @property
    def deadline(self) -> float:
        if self._child:
            return self._child.deadline
        return self._asked_at + ASK_AGAIN_SECONDS if self._waiting else FOREVER

    def name(
        self, events: Sequence[KernelEvent], touched: Collection[int], gpus: Sequence[Gpu], now: float
    ) -> tuple[KernelEvent, ...]:
        """Return `events` with the jobs of those in `touched`, if the cgroups show them. Slurm is queried for the
        others.
        """
        nodes = device_nodes(gpus)
        jobs, left = {}, []
        for event in events:
            if event.sequence in touched and is_open(event, now):
                job = self._job_of(event.pid) if event.pid else ""
                if job:
                    jobs[event.sequence] = job
                elif event.pid or event.pci in nodes:
                    left.append(event)
        if left:
            self._look({nodes[event.pci] for event in left if event.pci in nodes})
            jobs |= self._jobs_of(left, nodes, self._processes, self._holding)
            if not self._processes:
                self._waiting |= {event.sequence for event in left}
        return with_jobs(events, jobs)

    def step(
        self, events: Sequence[KernelEvent], gpus: Sequence[Gpu], now: float, may_ask_slurm: bool
    ) -> dict[int, str]:
        """Continue the query of Slurm. Return the jobs in its answer, by sequence number of `events`.

        `may_query_slurm`: False in mode observe.
        """
        told = {}
        if self._child is not None and self._child.step():
            child, self._child = self._child, None
            told = self._told(child, events, device_nodes(gpus))
        if self._waiting and self._child is None and self._monotonic() >= self._asked_at + ASK_AGAIN_SECONDS:
            self._waiting &= {event.sequence for event in events if is_open(event, now)}
            self._ask(may_ask_slurm)
        return told

    def _look(self, minors: set[int]) -> None:
        if self._monotonic() >= self._looked_at + LOOK_AGAIN_SECONDS:
            self._looked_at = self._monotonic()
            self._processes, self._holding = job_processes(self._root), {}
        missing = minors - self._holding.keys()
        if missing and self._processes:
            self._holding.update(jobs_holding(missing, self._processes, self._root))

    def _ask(self, may_ask_slurm: bool) -> None:
        if not self._waiting or not may_ask_slurm:
            self._waiting.clear()
            return
        self._asked_at = self._monotonic()
        self._asked, self._waiting = self._waiting, set()
        try:
            deadline = self._asked_at + STILL_THERE_SECONDS
            self._child = Child(self._argv, deadline, self._monotonic, ENVIRONMENT)
        except OSError:
            pass  # without Slurm there is no job

    def _told(self, child: Child, events: Sequence[KernelEvent], nodes: Mapping[str, int]) -> dict[int, str]:
        processes = parse_processes(child.output()[0].decode("utf-8", "replace")) if child.status == 0 else {}
        asked = [event for event in events if event.sequence in self._asked]
        minors = {nodes[event.pci] for event in asked if event.pci in nodes}
        return self._jobs_of(asked, nodes, processes, jobs_holding(minors, processes, self._root))

    def _jobs_of(
        self,
        events: Sequence[KernelEvent],
        nodes: Mapping[str, int],
        processes: Mapping[int, str],
        holding: Mapping[int, tuple[str, ...]],
    ) -> dict[int, str]:
        found = {event.sequence: jobs_of(event, nodes, processes, holding, self._job_of) for event in events}
        return {sequence: job for sequence, job in found.items() if job}

    def _job_of(self, pid: int) -> str | None:
        return job_of(pid, self._root)


def is_open(event: KernelEvent, now: float) -> bool:
    """Return True if the event's job is not known but may still be found.

    Lines from before healthd's start have no job, and a forged line could name any process.
    """
    known = any(name == "job" for name, _ in event.fields)
    return not known and not event.history and not event.observed and now - event.time <= STILL_THERE_SECONDS


def device_nodes(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return PCI address -> N of /dev/nvidiaN."""
    return {gpu.pci: gpu.minor for gpu in gpus if gpu.minor is not None}


def jobs_of(
    event: KernelEvent,
    nodes: Mapping[str, int],
    processes: Mapping[int, str],
    holding: Mapping[int, tuple[str, ...]],
    job_of_pid: Callable[[int], str | None],
) -> str:
    """Return "4711", "12,13", or "". A live process outside of jobs blames no job."""
    if event.pid:
        job = job_of_pid(event.pid)
        if job is not None:
            return job or processes.get(event.pid, "")
    return ",".join(holding.get(nodes.get(event.pci, -1), ()))
