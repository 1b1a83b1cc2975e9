"""Search for the GPUs that processes of Slurm jobs have open, at a bounded cost.

A node may have thousands of job processes with hundreds of open files each. Therefore a process that has a GPU open is
remembered and inspected in each search. New processes follow, and then the others in turn, within a time limit. A GPU
whose process has closed it counts as open until all other processes were inspected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from healthd.common.text import is_decimal, regex
from healthd.host.host import Host
from healthd.host.job_processes import gpu_numbers, job_processes

# CPU time per search
LIST_SECONDS = 0.1  # to list the jobs' processes
SEARCH_SECONDS = 0.01  # for new processes, and for all processes after a GPU was closed
TURN_SECONDS = 0.003  # for the others, which rarely open another GPU
DRIVER = "/proc/driver/nvidia/gpus"
_MINOR = regex(r"(?m)^Device Minor:\s*([0-9]{1,4})\s*$")


class OpenGpus(NamedTuple):
    """Result of a search, which the next search continues. The numbers are the N of /dev/nvidiaN.

    users      processes that have a GPU open, at least one for each of these GPUs
    closed     GPUs that no longer have a known user; the search for another user is incomplete
    waiting    processes to inspect soon: they are new, or may use a GPU of `closed`
    processes  all processes of jobs
    last_pid   the process that was inspected last in turn
    """

    users: Mapping[int, frozenset[int]] = {}
    closed: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    processes: frozenset[int] = frozenset()
    last_pid: int = 0

    @property
    def minors(self) -> frozenset[int]:
        return self.closed.union(*self.users.values())


def find_open_gpus(root: str, last: OpenGpus, now: Callable[[], float] = time.process_time) -> OpenGpus:
    """Continue the search. `now` returns CPU seconds."""
    until = now() + LIST_SECONDS
    processes = frozenset(job_processes(root, now, LIST_SECONDS))
    if now() > until:  # the list is incomplete
        processes |= last.processes
    users = {pid: minors for pid in last.users if pid in processes and (minors := _open_minors(pid, root))}
    found = frozenset[int]().union(*users.values())
    closed = last.minors - found
    waiting = set(processes if not closed <= last.closed else (processes - last.processes) | last.waiting)
    waiting = (waiting & processes) - users.keys()
    others = sorted(processes - users.keys() - waiting, key=lambda pid: (pid <= last.last_pid, pid))
    last_pid = last.last_pid
    began = now()
    for pid in [*sorted(waiting), *others]:
        if now() - began > (SEARCH_SECONDS if waiting else TURN_SECONDS):
            break
        if not waiting:
            last_pid = pid
        waiting.discard(pid)
        minors = _open_minors(pid, root)
        if not minors <= found:
            users[pid] = minors
            found |= minors
    closed = closed - found if waiting else frozenset()
    return OpenGpus(users, closed, frozenset(waiting), processes, last_pid)


def _open_minors(pid: int, root: str) -> frozenset[int]:
    found: set[int] = set()
    with suppress(OSError):  # the process is gone, or has too many open files
        for number in gpu_numbers(pid, root):
            if is_decimal(number) and len(number) <= 4:
                found.add(int(number))
    return frozenset(found)


def gpus_by_minor(host: Host) -> dict[int, str]:
    """Return a map from N in /dev/nvidiaN to the GPU's PCI address. Without the driver, it is empty."""
    found = {}
    try:
        names = host.list(DRIVER)
    except OSError:
        return {}
    for pci in names:
        minor = _MINOR.search(host.read_or_empty(f"{DRIVER}/{pci}/information"))
        if minor:
            found[int(minor[1])] = pci.lower()
    return found
