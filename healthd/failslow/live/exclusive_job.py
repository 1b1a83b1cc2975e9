"""Which job has this node for itself, by the cgroups of its processes, and whether it has a GPU open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from healthd.host.job_processes import job_processes, jobs_here, open_gpus


class Here(NamedTuple):
    """jobs: all that have a process here. gpu_process: one that holds a GPU open, 0 = none was found."""

    jobs: frozenset[str]
    gpu_process: int = 0


def look(root: str, gpus_wanted: bool, last: Here) -> Here:
    """The process that held a GPU at the last look is asked first: it has hundreds of descriptors, all have many."""
    jobs = jobs_here(root)
    if not gpus_wanted or len(jobs) != 1:
        return Here(jobs)
    processes = job_processes(root)
    if last.gpu_process in processes and _holds({last.gpu_process: processes[last.gpu_process]}, root):
        return Here(jobs, last.gpu_process)
    return Here(jobs, next((pid for pid, job in processes.items() if _holds({pid: job}, root)), 0))


def _holds(processes: Mapping[int, str], root: str) -> bool:
    return any(open_gpus(processes, root)[0].values())
