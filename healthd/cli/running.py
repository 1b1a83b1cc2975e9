"""The daemons that run on this machine, for a command that none of them answered."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from healthd.say.render import duration


def daemons() -> str:
    """ "process 812 (root, for 3 min, sleeping): healthd run --runtime-dir /tmp/h", "" if none is to be seen.

    It looks at every process: so ask only after waiting in vain.
    """
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline", "username", "create_time", "status"]):
        about = process.info  # what we may not see is None
        command = command_of(about["cmdline"] or ())
        if command:
            since = duration(max(0, int(time.time() - (about["create_time"] or time.time()))))
            found.append(f"process {about['pid']} ({about['username']}, for {since}, {about['status']}): {command}")
    return ", ".join(found)


def command_of(words: Sequence[str]) -> str:
    """ "healthd run ..." of a daemon's command line, "" of any other."""
    for place in range(len(words) - 1):
        if words[place + 1] == "run" and os.path.basename(words[place]) == "healthd":
            return " ".join(["healthd", *words[place + 1 :]])
    return ""
