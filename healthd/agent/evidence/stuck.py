"""Processes that SIGKILL did not end, because they hang in the kernel. A GPU reset must wait for their end."""

from __future__ import annotations

from collections.abc import Iterable

from healthd.agent.evidence.case import Process


def alive(processes: Iterable[Process]) -> list[Process]:
    """Return the processes that still exist. This reads /proc/PID/stat, which never hangs."""
    return [process for process in processes if _is_alive(process)]


def has_ended(state: str, threads: int) -> bool:
    """Return True if a process only waits for its parent. While another thread hangs, the main thread is a zombie."""
    return state in ("Z", "X") and threads <= 1


def _is_alive(process: Process) -> bool:
    try:
        with open(f"/proc/{process.pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]) == process.start and not has_ended(fields[0], int(fields[17]))
    except (OSError, ValueError, IndexError):
        return False
