"""Daemons that run on this machine, for an error message when none of them answered."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from healthd.common.duration import duration

MOST_NAMED, WIDEST = 3, 80  # processes; characters of each command line

if TYPE_CHECKING:
    import psutil


def found() -> list[psutil.Process]:
    """Return the processes that are a `healthd run`, with their attributes in `.info`; unreadable ones are None there.

    This inspects every process.
    """
    import psutil

    about = ["pid", "cmdline", "username", "create_time", "status"]
    return [process for process in psutil.process_iter(about) if command_of(process.info["cmdline"] or ())]


def of_pids(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those of these processes that still exist."""
    import psutil

    there = []
    for pid in pids:
        with suppress(psutil.Error):
            there.append(psutil.Process(pid))
    return there


def daemons() -> str:
    """Return the running daemons as text, "" if none is visible.

    This inspects every process, so call it only after a timeout.
    """
    return described([process.info for process in found()])


def described(processes: Sequence[Mapping[str, Any]]) -> str:
    """Return at most three: "process 812 (root, for 3 min, sleeping): healthd run --runtime-dir /tmp/h"."""
    words = []
    for about in processes[:MOST_NAMED]:
        since = duration(max(0, int(time.time() - (about["create_time"] or time.time()))))
        command = textwrap.shorten(command_of(about["cmdline"]), WIDEST, placeholder=" ...")
        words.append(f"process {about['pid']} ({about['username']}, for {since}, {about['status']}): {command}")
    more = f", and {len(processes) - MOST_NAMED} more" if len(processes) > MOST_NAMED else ""
    return f"{', '.join(words)}{more}"


def command_of(words: Sequence[str]) -> str:
    """Return "healthd run ..." for a daemon's command line, "" for any other."""
    for place in range(len(words) - 1):
        if words[place + 1] == "run" and os.path.basename(words[place]) == "healthd":
            return " ".join(["healthd", *words[place + 1 :]])
    return ""
