"""The Slurm jobs at the source of a kernel event, put into its field "job" ("4711", or "12,13" where jobs share a GPU).

It is the job of the process that the line names; if that is gone or the line names none (Xid 79), the jobs that hold
the GPU. Slurm's cgroups tell it within the same pass. Where Slurm uses none, `scontrol listpids` tells it a moment
later: a child process with a deadline that asks only this node's slurmstepds.
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

STILL_THERE_SECONDS = 10.0  # how long after a line its pid is looked up; later the pid may belong to another process
LOOK_AGAIN_SECONDS = 1.0  # a storm of events does not walk the cgroups in a storm
ASK_AGAIN_SECONDS = 2.0  # nor does it start scontrol in a storm


class JobAtSource:
    def __init__(self, root: str, node_name: str, monotonic: Callable[[], float]) -> None:
        self._root = root
        self._argv = listpids(node_name)
        self._monotonic = monotonic
        self._looked_at = self._asked_at = -FOREVER
        self._processes: dict[int, str] = {}  # of jobs, by their cgroups
        self._holding: dict[int, tuple[str, ...]] = {}  # by minor number
        self._waiting: set[int] = set()  # sequences of events that Slurm is to be asked about
        self._asked: set[int] = set()  # ... and about which it is being asked
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
        """`events`; those `touched` have their jobs if the cgroups tell them. Slurm is asked about the others."""
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
        """Go on with asking Slurm. Returns the jobs that it told, by the sequences of `events`.

        `may_ask_slurm`: never in mode observe.
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
            pass  # no Slurm here: no job either

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
    """Whether the event's job is not known but may still be found. History has none; who can forge a line could name
    anybody's process in it."""
    known = any(name == "job" for name, _ in event.fields)
    return not known and not event.history and not event.observed and now - event.time <= STILL_THERE_SECONDS


def device_nodes(gpus: Sequence[Gpu]) -> dict[str, int]:
    """PCI address -> N of /dev/nvidiaN."""
    return {gpu.pci: gpu.minor for gpu in gpus if gpu.minor is not None}


def jobs_of(
    event: KernelEvent,
    nodes: Mapping[str, int],
    processes: Mapping[int, str],
    holding: Mapping[int, tuple[str, ...]],
    job_of_pid: Callable[[int], str | None],
) -> str:
    """ "4711", "12,13", or "" where there is none: a live process that is in no job accuses no job."""
    if event.pid:
        job = job_of_pid(event.pid)
        if job is not None:
            return job or processes.get(event.pid, "")
    return ",".join(holding.get(nodes.get(event.pci, -1), ()))
