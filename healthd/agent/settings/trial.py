"""Trial runs of the site's check files in another process, so that a hang or crash does not stop the daemon.

The trial covers the code that a daemon executes: the import, and the validation of settings (Config, validate()).

    python -m healthd.agent.settings SECONDS FILE...
        prints the path of each file before its import, then "done"
    python -m healthd.agent.settings SECONDS --settings SETTINGS...
        the same with [FILE, PLACE, {SETTING: VALUE}], as JSON

Exceptions are not reported here, because the following import in the daemon raises them again. run() is not called,
because it has its own deadline in the worker.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from healthd.agent.settings.config import ConfigError
from healthd.common.codec import ConvertError
from healthd.common.text import regex
from healthd.host.oom import raise_score
from healthd.host.program import ProgramResult, run_program

LOAD_SECONDS = 10.0  # time limit for all files; importing numpy from a cold disk takes 2 s
START_SECONDS = 2.0  # time for starting the process, before its own limit begins
DONE = "done"

SETTINGS = "--settings"

_passed: set[tuple[str, int, int]] = set()  # (argument, inode, change time in ns) of past trials, not to repeat them


class _Trial(NamedTuple):
    """A trial: its argument, the file, and the label that the process prints before the trial begins."""

    argument: str
    path: str
    name: str


def require_loadable(paths: Sequence[str], seconds: float = LOAD_SECONDS) -> None:
    """Raise ConfigError if an import hangs or crashes. The message is one sentence that names the file."""
    _require([_Trial(path, path, path) for path in paths], (), ("imported", "its import"), seconds)


def require_validated(runs: Sequence[tuple[str, str, Mapping[str, Any]]], seconds: float = LOAD_SECONDS) -> None:
    """Raise ConfigError if a Config or its validate() hangs or crashes. The message is one sentence.

    `runs` contains each run's file, the location of its settings ("checks.fan") and the settings.
    """
    trials = [_Trial(json.dumps(run, default=str), run[0], _label(run[0], run[1])) for run in runs]
    _require(trials, (SETTINGS,), ("validated", "its validation"), seconds)


def _label(path: str, where: str) -> str:
    return f"{where} ({path})"


def _require(trials: Sequence[_Trial], flags: Sequence[str], phrases: tuple[str, str], seconds: float) -> None:
    """Run the trials. `phrases` are for messages about a timeout ("imported") and about a crash ("its import")."""
    identities = {}
    for trial in trials:
        status = os.stat(trial.path)
        identities[trial] = (trial.argument, status.st_ino, status.st_mtime_ns)
    new = [trial for trial in trials if identities[trial] not in _passed]
    if not new:
        return
    names = ", ".join(trial.name for trial in new)
    command = [sys.executable, "-m", "healthd.agent.settings", str(seconds), *flags, *(trial.argument for trial in new)]
    try:
        ran = run_program(command, seconds + START_SECONDS, os.environ)
    except TimeoutError:  # the process hangs in the kernel, where its own timer cannot end it
        raise ConfigError(f"{names}: refused: not {phrases[0]} within {seconds:g} s") from None
    except OSError as error:
        raise ConfigError(f"{names}: cannot be tested: {error.strerror}") from None
    *_, last = ran.stdout.splitlines() or [""]
    if last != DONE:
        path = next((trial.path for trial in new if trial.name == last), "")
        raise ConfigError(f"{last or names}: refused: {_describe(ran, path, phrases, seconds)}")
    _passed.update(identities[trial] for trial in new)


def _describe(ran: ProgramResult, path: str, phrases: tuple[str, str], seconds: float) -> str:
    action, subject = phrases
    if "Timeout (" in ran.stderr:
        line = regex(rf'File "{re.escape(path)}", line ([0-9]+)').search(ran.stderr)
        return f"not {action} within {seconds:g} s" + (f"; it hangs at line {line[1]}" if line else "")
    if ran.status < 0:
        return f"{subject} kills the process with {signal.Signals(-ran.status).name}"
    stderr = " ".join(ran.stderr.split())[-200:]
    return f"{subject} ends the process with status {ran.status}" + (f": {stderr}" if stderr else "")


def main(load_site: Callable[[str], Any]) -> None:
    raise_score()
    seconds, arguments = float(sys.argv[1]), sys.argv[2:]
    progress = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard the files' output
    faulthandler.dump_traceback_later(seconds, exit=True)  # runs in a C thread, so it also ends a loop in C code
    if arguments[:1] == [SETTINGS]:
        for path, where, values in map(json.loads, arguments[1:]):
            os.write(progress, f"{_label(path, where)}\n".encode())
            with suppress(ConfigError, ConvertError):
                check = load_site(path)
                check.check_config(check.make_config(values, where), where)
    else:
        for path in arguments:
            os.write(progress, f"{path}\n".encode())
            with suppress(ConfigError):
                load_site(path)
    os.write(progress, f"{DONE}\n".encode())
    os._exit(0)  # do not wait for threads that a file may have started
