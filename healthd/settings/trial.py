"""Imports the site's check files in another process first, so that one that hangs or crashes there stops nobody else.

    python -m healthd.trial SECONDS FILE...      the path of each before it is imported, then "done"

It does not report what a file raises: the import that follows here does. It does not call run(): that has its deadline
in the worker.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

from healthd.config import ConfigError
from healthd.machine.oom import raise_score
from healthd.machine.program import Ran, run_program
from healthd.text import regex

LOAD_SECONDS = 10.0  # for all of them; numpy from a cold disk takes 2
STARTS_SECONDS = 2.0  # for the process that tries them, before its own time begins
DONE = "done"

_passed: set[tuple[str, int, int]] = set()  # (path, inode, time of change in ns): nothing is tried twice


def require_loadable(paths: Sequence[str], seconds: float = LOAD_SECONDS) -> None:
    """Raises ConfigError, one sentence that names the file."""
    found = [(path, os.stat(path)) for path in paths]
    identities = {path: (path, about.st_ino, about.st_mtime_ns) for path, about in found}
    new = [path for path in paths if identities[path] not in _passed]
    if not new:
        return
    command = [sys.executable, "-m", "healthd.trial", str(seconds), *new]
    try:
        ran = run_program(command, seconds + STARTS_SECONDS, os.environ)
    except TimeoutError:  # it hangs in the kernel, where its own timer cannot end it
        raise ConfigError(f"{', '.join(new)}: refused: not imported within {seconds:g} s") from None
    *_, last = ran.stdout.splitlines() or [""]
    if last != DONE:
        raise ConfigError(f"{last or ', '.join(new)}: refused: {_why(ran, last, seconds)}")
    _passed.update(identities[path] for path in new)


def _why(ran: Ran, path: str, seconds: float) -> str:
    if "Timeout (" in ran.stderr:
        line = regex(rf'File "{re.escape(path)}", line ([0-9]+)').search(ran.stderr)
        return f"not imported within {seconds:g} s" + (f", it is in line {line[1]}" if line else "")
    if ran.status < 0:
        return f"its import ends the process by {signal.Signals(-ran.status).name}"
    words = " ".join(ran.stderr.split())[-200:]
    return f"its import ends the process with status {ran.status}" + (f": {words}" if words else "")


def main(load_site: Callable[[str], object]) -> None:
    raise_score()
    seconds, paths = float(sys.argv[1]), sys.argv[2:]
    told = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # drops what the files print
    faulthandler.dump_traceback_later(seconds, exit=True)  # from a thread of C: also out of a loop in C
    for path in paths:
        os.write(told, f"{path}\n".encode())
        try:
            load_site(path)
        except ConfigError:
            continue
    os.write(told, f"{DONE}\n".encode())
    os._exit(0)  # does not wait for what a file may have started
