"""Finds the daemons on this machine, for the error message when no daemon answers."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from healthd.common.duration import duration

MAX_LISTED, MAX_WIDTH = 3, 80  # number of processes; characters per command line

if TYPE_CHECKING:
    import psutil


def find_daemons() -> list[psutil.Process]:
    """Return all `healthd run` processes. `.info` contains a process's attributes, with None for an unreadable
    attribute.

    This inspects every process on the machine.
    """
    import psutil

    attributes = ["pid", "cmdline", "username", "create_time", "status"]
    return [process for process in psutil.process_iter(attributes) if daemon_command(process.info["cmdline"] or ())]


def running_processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes that still exist."""
    import psutil

    processes = []
    for pid in pids:
        with suppress(psutil.Error):
            processes.append(psutil.Process(pid))
    return processes


def describe_daemons() -> str:
    """Return text about the running daemons, or "" if none are visible.

    Call this function only after a timeout, because it inspects every process on the machine.
    """
    return describe([process.info for process in find_daemons()])


def describe(processes: Sequence[Mapping[str, Any]]) -> str:
    """Describe at most three processes: "process 812 (root, for 3 min, sleeping): healthd run --runtime-dir /tmp/h"."""
    descriptions = []
    for info in processes[:MAX_LISTED]:
        since = duration(max(0, int(time.time() - (info["create_time"] or time.time()))))
        command = textwrap.shorten(daemon_command(info["cmdline"]), MAX_WIDTH, placeholder=" ...")
        descriptions.append(f"process {info['pid']} ({info['username']}, for {since}, {info['status']}): {command}")
    more = f", and {len(processes) - MAX_LISTED} more" if len(processes) > MAX_LISTED else ""
    return f"{', '.join(descriptions)}{more}"


def daemon_command(words: Sequence[str]) -> str:
    """Return "healthd run ..." for a daemon's command line, or "" for any other."""
    for index in range(len(words) - 1):
        if words[index + 1] == "run" and os.path.basename(words[index]) == "healthd":
            return " ".join(["healthd", *words[index + 1 :]])
    return ""
