"""Processes of Slurm jobs: the job of a process, and the jobs that use a GPU.

The daemon reads this data when a kernel line arrives, because the process may be gone a second later. It reads only
files that cannot hang. It never reads /proc/PID/environ or cmdline, which wait for the lock on the process's memory. In
/proc/PID/fd it reads only the links' text, because a file behind a link may be on any file system. A job's own file
named ".../dev/nvidia3" is mistaken for the device, which affects no other job.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from healthd.common.text import is_decimal
from healthd.host.cgroup import job_in

SCAN_SECONDS = 0.1  # a node may have 100,000 processes; only those found within this time are used
MAX_DESCRIPTORS = 1 << 14  # descriptors to read per process, lowest first; reading a million of them takes seconds
DEPTH = 8  # job, step, user, task, and cgroups that a job creates below its own
CGROUP = "sys/fs/cgroup"
STEP_DAEMON = "slurmstepd"
# Mount points of cgroups: v2, v2 together with v1, and the v1 controllers that Slurm's plugins use (proctrack, task).
HIERARCHIES = ("", "unified", "freezer", "cpuset", "devices", "memory", "cpu,cpuacct")


def job_of_process(pid: int, root: str) -> str | None:
    """Return a process's job according to its cgroup, "" for a process outside jobs, or None if there is no such
    process.
    """
    try:
        with open(f"{root.rstrip('/')}/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return job_in(file.read(65536))
    except OSError:
        return None


def job_processes(
    root: str, now: Callable[[], float] = time.monotonic, seconds: float = SCAN_SECONDS
) -> dict[int, str]:
    """Return a dict that maps pids to jobs, for all processes in jobs' cgroups that are found within `seconds`. The
    dict is empty if Slurm does not use cgroups.
    """
    top = os.path.join(root, CGROUP)
    until = now() + seconds
    for hierarchy in HIERARCHIES:
        found = {
            pid: job
            for directory in _slurm_directories(os.path.join(top, hierarchy))
            for path, job in _jobs(directory, top)
            for pid in _members(path, DEPTH, until, now)
        }
        if found:
            return found
    return {}


def local_jobs(root: str) -> frozenset[str]:
    """Return the jobs that have a process here. One process of each job is enough, so the cost does not depend on the
    number of processes. Empty cgroups of ended jobs are ignored.
    """
    top = os.path.join(root, CGROUP)
    return frozenset(
        job
        for hierarchy in HIERARCHIES
        for directory in _slurm_directories(os.path.join(top, hierarchy))
        for path, job in _jobs(directory, top)
        if any(True for _ in _members(path, DEPTH, math.inf, time.monotonic))
    )


def has_no_jobs(root: str) -> bool:
    """Return True if Slurm's cgroups show that no job has a process here, or False if Slurm does not use cgroups."""
    return has_slurm_cgroups(root) and not job_processes(root)


def has_slurm_cgroups(root: str) -> bool:
    """Return True if Slurm has a cgroup for jobs. With cgroup/v1, it has none from the boot to the first job."""
    top = os.path.join(root, CGROUP)
    return any(
        not directory.endswith(".service")
        for hierarchy in HIERARCHIES
        for directory in _slurm_directories(os.path.join(top, hierarchy))
    )


def has_job_without_cgroup(root: str) -> bool:
    """Return True if a job step runs although Slurm has no cgroups for jobs."""
    return not has_slurm_cgroups(root) and any(
        _name(root, pid) == STEP_DAEMON for pid in _names(os.path.join(root, "proc")) if is_decimal(pid)
    )


def _name(root: str, pid: str) -> str:
    try:
        with open(os.path.join(root, "proc", pid, "comm"), encoding="utf-8", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _slurm_directories(hierarchy: str) -> Iterator[str]:
    """Yield slurm and slurm_NODE (v1) or system.slice/[NODE_]slurmstepd.scope (v2). Skip user.slice, which belongs to
    users."""
    for entry in _directories(hierarchy):
        if "slurm" in entry.name:
            yield entry.path
        elif entry.name.endswith(".slice") and entry.name != "user.slice":
            yield from (below.path for below in _directories(entry.path) if "slurm" in below.name)


def _jobs(directory: str, top: str) -> Iterator[tuple[str, str]]:
    """Yield (cgroup, job) for jobs' cgroups (job_N, or uid_U/job_N)."""
    for entry in _directories(directory):
        below = _directories(entry.path) if entry.name.startswith("uid_") else iter((entry,))
        for found in below:
            if job := job_in(f"0::/{os.path.relpath(found.path, top)}"):
                yield found.path, job


def _members(path: str, depth: int, until: float, now: Callable[[], float]) -> Iterator[int]:
    if now() > until:
        return
    try:
        with open(os.path.join(path, "cgroup.procs"), encoding="ascii") as file:
            yield from map(int, file.read().split())
    except (OSError, ValueError):
        pass  # gone in the meantime; a threaded cgroup has no list
    if depth:
        for entry in _directories(path):
            yield from _members(entry.path, depth - 1, until, now)


def _directories(path: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    yield from found


def jobs_using_gpus(
    minors: Collection[int], processes: Mapping[int, str], root: str, now: Callable[[], float] = time.monotonic
) -> dict[int, tuple[str, ...]]:
    """Return a dict that maps each minor number to the jobs that have /dev/nvidiaMINOR open. `processes` maps pids to
    jobs. Shared GPUs and GPUs with MIG may have several jobs."""
    names = {f"{minor}": minor for minor in minors}
    holding: dict[int, set[str]] = {minor: set() for minor in minors}
    until = now() + SCAN_SECONDS
    for pid, job in processes.items():
        missing_names = {name for name, minor in names.items() if job not in holding[minor]}
        if now() > until:
            break
        if missing_names:
            for name in _open_gpu_names(pid, missing_names, root):
                holding[names[name]].add(job)
    return {minor: tuple(sorted(jobs, key=int)) for minor, jobs in holding.items()}


def gpus_open_by_job(
    processes: Mapping[int, str], root: str, now: Callable[[], float] = time.monotonic
) -> tuple[dict[str, frozenset[int]], bool]:
    """Return a dict that maps each job to the N of each /dev/nvidiaN that it has open, and whether all processes were
    inspected. `processes` maps pids to jobs. Some processes may be skipped for lack of time or permission.
    """
    found: dict[str, set[int]] = {}
    until, is_complete = now() + SCAN_SECONDS, True
    for pid, job in processes.items():
        if now() > until:
            is_complete = False
            break
        try:
            found.setdefault(job, set()).update(int(n) for n in gpu_numbers(pid, root) if is_decimal(n) and len(n) <= 4)
        except (FileNotFoundError, ProcessLookupError):
            pass  # gone in the meantime
        except OSError:
            is_complete = False
    return {job: frozenset(minors) for job, minors in found.items()}, is_complete


def _open_gpu_names(pid: int, names: set[str], root: str) -> set[str]:
    """Return those of `names` for which a process has /dev/nvidiaNAME open."""
    found: set[str] = set()
    try:
        for number in gpu_numbers(pid, root):
            if number in names:
                found.add(number)
                if len(found) == len(names):
                    break
    except OSError:
        pass  # gone in the meantime
    return found


def gpu_numbers(pid: int, root: str) -> Iterator[str]:
    """Yield the text after /dev/nvidia in the name of each file that a process has open. In a container, this is the
    container's path. If the process has more open files than are read, raise OSError after the last one."""
    with os.scandir(f"{root.rstrip('/')}/proc/{pid}/fd") as descriptors:
        for count, descriptor in enumerate(descriptors):
            if count >= MAX_DESCRIPTORS:
                raise OSError(errno.EMFILE, "more files are open than are read")
            try:
                link = os.readlink(descriptor.path)
            except OSError:
                continue  # the file was closed in the meantime
            _, at, number = link.removesuffix(" (deleted)").rpartition("/dev/nvidia")
            if at:
                yield number
