"""Processes of Slurm jobs: which job a process belongs to, and which jobs hold a GPU.

The daemon asks at the moment of a kernel line, since the process may be gone a second later. So only files that cannot
hang are read: never /proc/PID/environ or cmdline (they wait for the lock of the process's memory), and of /proc/PID/fd
only the links' text, never a file behind one (its file system would be asked). A job that opens a file of its own named
".../dev/nvidia3" is named, too: that accuses nobody else.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from healthd.common.text import is_decimal
from healthd.host.cgroup import job_in

LOOK_SECONDS = 0.1  # a node may have 100,000 processes: those found until then count
MOST_DESCRIPTORS = 1 << 14  # of one process, lowest first: one may have a million open, which take seconds to read
DEPTH = 8  # job, step, user, task, and the cgroups that a job makes below its own
CGROUP = "sys/fs/cgroup"
# Where cgroups are mounted: v2, v2 beside v1, and the v1 controllers of Slurm's plugins (proctrack, then task).
HIERARCHIES = ("", "unified", "freezer", "cpuset", "devices", "memory", "cpu,cpuacct")


def job_of(pid: int, root: str) -> str | None:
    """The job of a process, by its cgroup; "" = it is in none; None: there is no such process."""
    try:
        with open(f"{root.rstrip('/')}/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return job_in(file.read(65536))
    except OSError:
        return None


def job_processes(root: str, now: Callable[[], float] = time.monotonic) -> dict[int, str]:
    """pid -> job of all processes in the cgroups of jobs. {} also where Slurm does not use cgroups."""
    top = os.path.join(root, CGROUP)
    until = now() + LOOK_SECONDS
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


def jobs_here(root: str) -> frozenset[str]:
    """The jobs that have a process here, however many processes there are and however busy the node is: of each job one
    process is looked for. A cgroup that a job left behind empty is none."""
    top = os.path.join(root, CGROUP)
    return frozenset(
        job
        for hierarchy in HIERARCHIES
        for directory in _slurm_directories(os.path.join(top, hierarchy))
        for path, job in _jobs(directory, top)
        if any(True for _ in _members(path, DEPTH, math.inf, time.monotonic))
    )


def has_no_jobs(root: str) -> bool:
    """Whether Slurm's cgroups show that no process of a job is here. False where Slurm uses none: nobody knows."""
    top = os.path.join(root, CGROUP)
    used = any(
        not directory.endswith(".service")
        for hierarchy in HIERARCHIES
        for directory in _slurm_directories(os.path.join(top, hierarchy))
    )
    return used and not job_processes(root)


def _slurm_directories(hierarchy: str) -> Iterator[str]:
    """v1: slurm, slurm_NODE; v2: system.slice/slurmstepd.scope, system.slice/NODE_slurmstepd.scope. user.slice has
    users' own."""
    for entry in _directories(hierarchy):
        if "slurm" in entry.name:
            yield entry.path
        elif entry.name.endswith(".slice") and entry.name != "user.slice":
            yield from (below.path for below in _directories(entry.path) if "slurm" in below.name)


def _jobs(directory: str, top: str) -> Iterator[tuple[str, str]]:
    """The cgroups of jobs and their jobs: job_N, or uid_U/job_N."""
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
        pass  # gone meanwhile; a threaded cgroup has no list
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


def jobs_holding(
    minors: Collection[int], processes: Mapping[int, str], root: str, now: Callable[[], float] = time.monotonic
) -> dict[int, tuple[str, ...]]:
    """Minor number -> the jobs that hold /dev/nvidiaMINOR open by one of their `processes` (pid -> job). Shared GPUs
    and MIG have several."""
    names = {f"{minor}": minor for minor in minors}
    holding: dict[int, set[str]] = {minor: set() for minor in minors}
    until = now() + LOOK_SECONDS
    for pid, job in processes.items():
        wanted = {name for name, minor in names.items() if job not in holding[minor]}
        if now() > until:
            break
        if wanted:
            for name in _open_gpus(pid, wanted, root):
                holding[names[name]].add(job)
    return {minor: tuple(sorted(jobs, key=int)) for minor, jobs in holding.items()}


def open_gpus(
    processes: Mapping[int, str], root: str, now: Callable[[], float] = time.monotonic
) -> tuple[dict[str, frozenset[int]], bool]:
    """Job -> the N of each /dev/nvidiaN that one of its `processes` (pid -> job) has open; and whether there was time,
    and a right, to look at all of them."""
    found: dict[str, set[int]] = {}
    until, all_seen = now() + LOOK_SECONDS, True
    for pid, job in processes.items():
        if now() > until:
            all_seen = False
            break
        try:
            found.setdefault(job, set()).update(int(n) for n in _numbers(pid, root) if is_decimal(n) and len(n) <= 4)
        except (FileNotFoundError, ProcessLookupError):
            pass  # gone meanwhile
        except OSError:
            all_seen = False
    return {job: frozenset(minors) for job, minors in found.items()}, all_seen


def _open_gpus(pid: int, wanted: set[str], root: str) -> set[str]:
    """Which of the `wanted` N a process has open as /dev/nvidiaN."""
    found: set[str] = set()
    try:
        for number in _numbers(pid, root):
            if number in wanted:
                found.add(number)
                if len(found) == len(wanted):
                    break
    except OSError:
        pass  # gone meanwhile
    return found


def _numbers(pid: int, root: str) -> Iterator[str]:
    """What stands behind /dev/nvidia in the name of each file that a process has open. In a container the path is the
    container's. Raises OSError, behind what was found, where it has more than are looked at."""
    with os.scandir(f"{root.rstrip('/')}/proc/{pid}/fd") as descriptors:
        for looked_at, descriptor in enumerate(descriptors):
            if looked_at >= MOST_DESCRIPTORS:
                raise OSError(errno.EMFILE, "more files are open than are looked at")
            try:
                link = os.readlink(descriptor.path)
            except OSError:
                continue  # it was closed meanwhile
            _, at, number = link.removesuffix(" (deleted)").rpartition("/dev/nvidia")
            if at:
                yield number
