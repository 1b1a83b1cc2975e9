"""Finds the jobs on this node, by the cgroups of their processes, and the GPUs that these processes have open.

CUDA opens the device file of each GPU that a process may use. If a process has several GPUs open, the local rank that
the job reports selects one of them. The minor numbers of the device files are in
/proc/driver/nvidia/gpus/PCI/information as "Device Minor".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from healthd.host.host import Host
from healthd.host.job_processes import gpus_open_by_job, job_processes, local_jobs
from healthd.host.open_gpus import gpus_by_minor


class RunningJobs(NamedTuple):
    """The running jobs.

    Attributes:
        jobs: all jobs with a process on this node.
        gpu_process: a process with an open GPU, or 0 if none was found.
    """

    jobs: frozenset[str]
    gpu_process: int = 0


def find_jobs(root: str, needs_gpu: bool, last: RunningJobs) -> RunningJobs:
    """Return the jobs on this node and, if there is only one job, one of its processes with an open GPU.

    Args:
        last: the previous result. Its process is tried first, because processes have hundreds of descriptors.
    """
    jobs = local_jobs(root)
    if not needs_gpu or len(jobs) != 1:
        return RunningJobs(jobs)
    processes = job_processes(root)
    if last.gpu_process in processes and _has_open_gpu({last.gpu_process: processes[last.gpu_process]}, root):
        return RunningJobs(jobs, last.gpu_process)
    return RunningJobs(jobs, next((pid for pid, job in processes.items() if _has_open_gpu({pid: job}, root)), 0))


def _has_open_gpu(processes: Mapping[int, str], root: str) -> bool:
    return any(gpus_open_by_job(processes, root)[0].values())


def find_gpu(host: Host, pid: int, job: str, local_rank: int) -> str:
    """Return the PCI address of a process's GPU, or "" if it is ambiguous."""
    pci = gpus_by_minor(host)
    open_by_job, _ = gpus_open_by_job({pid: job}, host.root or "/")
    minors = sorted(open_by_job.get(job, frozenset()) & pci.keys())
    if len(minors) == 1:
        return pci[minors[0]]
    return pci[minors[local_rank]] if 0 <= local_rank < len(minors) else ""
