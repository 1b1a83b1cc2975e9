"""Whether slurmd was just started here: it registers within seconds, and then slurmctld may take a drain away."""

from __future__ import annotations

import os
from collections.abc import Callable

from healthd.common.text import is_decimal

LOOK_SECONDS = 1.0


class SlurmdStart:
    """Looks for slurmd, only while that is wanted, among the processes that are new since the last look."""

    def __init__(self, root: str, monotonic: Callable[[], float]) -> None:
        self._proc = os.path.join(root, "proc")
        self._monotonic = monotonic
        self._known: set[str] = set()
        self.deadline = float("inf")

    def watch(self, wanted: bool) -> None:
        if not wanted:
            self.deadline = float("inf")
        elif self.deadline == float("inf"):
            self._known, self.deadline = self._processes(), self._monotonic() + LOOK_SECONDS

    def step(self) -> bool:
        """Whether there is a slurmd that was not there at the last look."""
        if self._monotonic() < self.deadline:
            return False
        before, self._known = self._known, self._processes()
        self.deadline = self._monotonic() + LOOK_SECONDS
        return any(self._name(pid) == "slurmd" for pid in self._known - before)

    def _processes(self) -> set[str]:
        try:
            return {name for name in os.listdir(self._proc) if is_decimal(name)}
        except OSError:
            return set()

    def _name(self, pid: str) -> str:
        try:
            with open(os.path.join(self._proc, pid, "comm"), encoding="utf-8", errors="replace") as file:
                return file.read().strip()
        except OSError:
            return ""
