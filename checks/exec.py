"""Any program of the site, by its exit status: 0 ok, 1 warning, 2 critical, 3 unknown (as Nagios plug-ins and NHC).

The first line that it prints is the message. Everything else than these four (another status, a signal, no such file,
too slow) means that it could not look: the run fails, which neither passes nor fails the node.

It runs as root. So the program, every directory above it, and every symbolic link on the way must belong to root, or
to the user that healthd runs as, and be writable by nobody else. That is looked at here and not when the settings are
read: the file may be on a file server that does not answer. The interpreter of a script, and files among the arguments,
are the site's care.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Meaning, Observation, Severity
from healthd.past import Past
from healthd.text import printable
from healthd.values import dataclass

USES = ""
PER = "exec"

MAX_MESSAGE = 200
ENDING_SECONDS = 1.0  # so much of the timeout is kept to kill the program, wait for it, and say so


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """command             the program, by its absolute path, and its arguments; no shell
    critical_severity   what exit status 2 means
    timeout_seconds     the program is killed one second before its end (after 80 % of it, if that is later)
    """

    command: tuple[str, ...] = ()
    critical_severity: Severity = Severity.DEGRADED


def validate(config: Config) -> str | None:
    if not config.command:
        return 'command is missing: command = ["/path/to/program", "argument"]'
    if not config.command[0].startswith("/"):
        return f'command must begin with an absolute path, not "{config.command[0]}"'
    return "command must not contain NUL" if any("\0" in word for word in config.command) else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    try:
        ran = host.run(config.command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not the kernel's word: others may write it
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if ran is None:
        raise RuntimeError(f"{config.name}: there is no program {config.command[0]}")
    status, message = ran.status, _first_line(ran.stdout) or _first_line(ran.stderr)
    yield Observation("exec_exit_status", status, labels=(("name", config.name),))
    if status == 1:
        yield Finding(Severity.WARNING, "exec/warning", config.name, message or "exit status 1")
    elif status == 2:
        yield Finding(config.critical_severity, "exec/critical", config.name, message or "exit status 2")
    elif status == 3:
        raise RuntimeError(f"{config.name} says unknown: {message}")
    elif status != 0:
        how = f"was ended by {_signal_name(-status)}" if status < 0 else f"exit status {status} is none of 0, 1, 2, 3"
        raise RuntimeError(f"{config.name}: {how}: {message}")


def _first_line(output: str) -> str:
    """The first line, printable, at most 200 characters."""
    for line in output.splitlines():
        if line.strip():
            return printable(line.strip())[:MAX_MESSAGE]
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


OBSERVATIONS = {
    "exec_exit_status": Meaning(
        "The exit status of a site's program: 0 healthy, 1 warning, 2 critical; else it could not look.",
        ("name",),
    ),
}

EXPLAIN = {
    "exec/warning": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A program of the site ended with exit status 1.",
        "What the program says.",
        "The message is the first line that it printed. Run its command by hand; healthd config show has it.",
    ),
    "exec/critical": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A program of the site ended with exit status 2. critical_severity in its settings says what that means.",
        "What the program says.",
        "The message is the first line that it printed. Run its command by hand; healthd config show has it.",
        chosen_by="critical_severity",
    ),
}
