"""Whether jobs are on this node. Some checks run only on an idle node."""

from __future__ import annotations

from collections.abc import Callable

from healthd.agent.slurm.event_jobs import CGROUP_INTERVAL_SECONDS
from healthd.host.job_processes import has_no_jobs


class JobPresence:
    """Whether jobs are on this node.

    is_drained        Slurm shows this node drained and idle; the daemon sets it
    is_without_jobs   Slurm's cgroups have shown no job since the last job ended
    """

    def __init__(self, root: str, monotonic: Callable[[], float]) -> None:
        self.is_drained = self.is_without_jobs = False
        self._root = root
        self._monotonic = monotonic
        self._read_at = -float("inf")

    @property
    def is_idle(self) -> bool:
        return self.is_drained or self.is_without_jobs

    def read(self) -> None:
        """Read the cgroups after a job has ended."""
        self._read_at = self._monotonic()
        self.is_without_jobs = has_no_jobs(self._root)

    def step(self) -> None:
        """Read the cgroups again if they showed no job, because a new job may start at any time."""
        if self.is_without_jobs and self._monotonic() >= self._read_at + CGROUP_INTERVAL_SECONDS:
            self.read()
