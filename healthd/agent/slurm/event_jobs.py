"""Slurm jobs that caused a kernel event, stored in the event's field "job" ("4711", or "12,13" if jobs share a GPU).

Normally this is the job of the process in the line. If the process is gone or the line names no process (Xid 79), all
jobs that have the GPU open are stored. Slurm's cgroups show the job at once. Without cgroups, `scontrol listpids` shows
it a moment later. `scontrol` runs as a child process with a deadline, and queries only this node's slurmstepds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from healthd.agent.kernel_log.coalesce import with_jobs
from healthd.common.model import Gpu, KernelEvent
from healthd.common.slurm.commands import ENVIRONMENT, listpids
from healthd.common.slurm.output import parse_processes
from healthd.host.child_process import Child
from healthd.host.job_processes import job_of_process, job_processes, jobs_using_gpus
from healthd.host.wakeup import FOREVER

PID_VALID_SECONDS = 10.0  # maximum age of a line; later its pid may belong to another process
CGROUP_INTERVAL_SECONDS = 1.0  # limits the rate of cgroup walks in a storm of events
QUERY_INTERVAL_SECONDS = 2.0  # limits the rate of scontrol calls


class EventJobFinder:
    def __init__(self, root: str, node_name: str, monotonic: Callable[[], float]) -> None:
        self._root = root
        self._argv = listpids(node_name)
        self._monotonic = monotonic
        self._cgroups_read_at = self._queried_at = -FOREVER
        self._processes: dict[int, str] = {}  # processes of jobs, from their cgroups
        self._jobs_by_gpu: dict[int, tuple[str, ...]] = {}  # jobs that have /dev/nvidiaN open, by N
        self._unresolved: set[int] = set()  # sequence numbers of events for the next query
        self._queried: set[int] = set()  # sequence numbers of events for the running query
        self._child: Child | None = None

    def waits(self) -> Iterator[tuple[int, bool]]:
        return self._child.waits() if self._child else iter(())

    @property
    def deadline(self) -> float:
        if self._child:
            return self._child.deadline
        return self._queried_at + QUERY_INTERVAL_SECONDS if self._unresolved else FOREVER

    def add_jobs(
        self, events: Sequence[KernelEvent], touched: Collection[int], gpus: Sequence[Gpu], now: float
    ) -> tuple[KernelEvent, ...]:
        """Return `events` with jobs added to those in `touched` if the cgroups show them.

        Slurm is queried for the other events.
        """
        nodes = gpu_minors(gpus)
        jobs, unresolved = {}, []
        for event in events:
            if event.sequence in touched and may_find_job(event, now):
                job = self._find_job(event.pid) if event.pid else ""
                if job:
                    jobs[event.sequence] = job
                elif event.pid or event.pci in nodes:
                    unresolved.append(event)
        if unresolved:
            self._read_cgroups({nodes[event.pci] for event in unresolved if event.pci in nodes})
            jobs |= self._match_jobs(unresolved, nodes, self._processes, self._jobs_by_gpu)
            if not self._processes:
                self._unresolved |= {event.sequence for event in unresolved}
        return with_jobs(events, jobs)

    def step(
        self, events: Sequence[KernelEvent], gpus: Sequence[Gpu], now: float, may_query_slurm: bool
    ) -> dict[int, str]:
        """Continue the Slurm query. Return a dict that maps the events' sequence numbers to the jobs in the answer.

        `may_query_slurm` is False in mode observe.
        """
        found = {}
        if self._child is not None and self._child.step():
            child, self._child = self._child, None
            found = self._read_answer(child, events, gpu_minors(gpus))
        if self._unresolved and self._child is None and self._monotonic() >= self._queried_at + QUERY_INTERVAL_SECONDS:
            self._unresolved &= {event.sequence for event in events if may_find_job(event, now)}
            self._start_query(may_query_slurm)
        return found

    def _read_cgroups(self, minors: set[int]) -> None:
        if self._monotonic() >= self._cgroups_read_at + CGROUP_INTERVAL_SECONDS:
            self._cgroups_read_at = self._monotonic()
            self._processes, self._jobs_by_gpu = job_processes(self._root), {}
        missing = minors - self._jobs_by_gpu.keys()
        if missing and self._processes:
            self._jobs_by_gpu.update(jobs_using_gpus(missing, self._processes, self._root))

    def _start_query(self, may_query_slurm: bool) -> None:
        if not self._unresolved or not may_query_slurm:
            self._unresolved.clear()
            return
        self._queried_at = self._monotonic()
        self._queried, self._unresolved = self._unresolved, set()
        try:
            deadline = self._queried_at + PID_VALID_SECONDS
            self._child = Child(self._argv, deadline, self._monotonic, ENVIRONMENT)
        except OSError:
            pass  # without Slurm there are no jobs

    def _read_answer(self, child: Child, events: Sequence[KernelEvent], nodes: Mapping[str, int]) -> dict[int, str]:
        processes = parse_processes(child.output()[0].decode("utf-8", "replace")) if child.status == 0 else {}
        queried = [event for event in events if event.sequence in self._queried]
        minors = {nodes[event.pci] for event in queried if event.pci in nodes}
        return self._match_jobs(queried, nodes, processes, jobs_using_gpus(minors, processes, self._root))

    def _match_jobs(
        self,
        events: Sequence[KernelEvent],
        nodes: Mapping[str, int],
        processes: Mapping[int, str],
        jobs_by_gpu: Mapping[int, tuple[str, ...]],
    ) -> dict[int, str]:
        found = {event.sequence: find_jobs(event, nodes, processes, jobs_by_gpu, self._find_job) for event in events}
        return {sequence: job for sequence, job in found.items() if job}

    def _find_job(self, pid: int) -> str | None:
        return job_of_process(pid, self._root)


def may_find_job(event: KernelEvent, now: float) -> bool:
    """Return True if the event's job is unknown but may still be found.

    Lines from before healthd's start have no job. Lines that users can forge are excluded, because they could name any
    process.
    """
    has_job = any(name == "job" for name, _ in event.fields)
    return not has_job and not event.history and not event.observed and now - event.time <= PID_VALID_SECONDS


def gpu_minors(gpus: Sequence[Gpu]) -> dict[str, int]:
    """Return a dict that maps each PCI address to the N in /dev/nvidiaN."""
    return {gpu.pci: gpu.minor for gpu in gpus if gpu.minor is not None}


def find_jobs(
    event: KernelEvent,
    nodes: Mapping[str, int],
    processes: Mapping[int, str],
    jobs_by_gpu: Mapping[int, tuple[str, ...]],
    find_job: Callable[[int], str | None],
) -> str:
    """Return the jobs that caused an event, such as "4711" or "12,13", or "". A live process outside jobs means that no
    job caused the event.
    """
    if event.pid:
        job = find_job(event.pid)
        if job is not None:
            return job or processes.get(event.pid, "")
    return ",".join(jobs_by_gpu.get(nodes.get(event.pci, -1), ()))
