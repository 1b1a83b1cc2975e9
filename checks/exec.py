"""Any program of the site, by its exit status: 0 ok, 1 warning, 2 critical, 3 unknown (as Nagios plug-ins); or NHC.

The first line of output is the message. Any other end (another status, a signal, no such file, too slow) means that
the program could not check: the run fails, and neither passes nor fails the node.

NHC (LBNL Node Health Check) has other exit statuses, so `kind = "nhc"` reads its output. Every check of nhc.conf that
fails is one critical finding, whatever the status. Rules, from the script `nhc` of github.com/mej/nhc at 9c4a38c0c9f4:

- It ends at the first failure with that check's status, mostly 1. With -a it goes on and ends with their number. But
  with -a a check that is no function of NHC (a script, a misspelt name) is not counted when it fails. So NHC runs
  without -a, and only where it fails runs again with -a, for the other failures.
- With NHC_CHECK_FORKED=1 and -a it ends with 0 after failures. So a line about a failure counts as well.
- Without a settings file it ends with 0 and prints nothing: nothing was checked, which is no pass. -v makes every
  other run print something.
- MARK_OFFLINE=0 keeps it from draining. /etc/default/nhc or /etc/sysconfig/nhc and nhc.conf are read later: they must
  not set it to 1.

The program runs as root. So the program, every directory above it, and every symbolic link on the way must belong to
root, or to the user that healthd runs as, and be writable by nobody else. This is verified here and not when the
settings are read: the file may be on a file server that does not answer. The interpreter of a script, and files among
the arguments, are the site's care.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from enum import Enum

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.machine.program import Ran
from healthd.model import Clears, Explain, Finding, Meaning, NothingToCheck, Observation, Severity
from healthd.past import Past
from healthd.text import printable, regex
from healthd.values import dataclass

USES = ""
PER = "exec"

MAX_MESSAGE = 200
MAX_SUBJECT = 100
ENDING_SECONDS = 1.0  # the part of the timeout that is kept to kill the program, wait for it, and report

NHC_USAGE = 10  # exit status for a wrong command line (`nhcmain_parse_cmdline || exit 10`)
_NHC_CHECK = regex(r'Running check:  "([^\n]*)"(?: \(forked PID [0-9]+\))?')
_NHC_FAILURE = regex(r"ERROR:  \S+:  Health check failed:  ([^\n]*)")
_NHC_STARTED = "Node Health Check starting."


class Kind(Enum):
    """What the program is, which says how its end is read."""

    PROGRAM = "program"
    NHC = "nhc"


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """command             the program, by its absolute path, and its arguments; no shell
    kind                "nhc": the program is NHC, and every check of nhc.conf that fails is critical
    critical_severity   what exit status 2 means, or a failed check of NHC
    timeout_seconds     the program is killed one second before its end (after 80 % of it, if that is later)
    """

    command: tuple[str, ...] = ()
    kind: Kind = Kind.PROGRAM
    critical_severity: Severity = Severity.DEGRADED


def validate(config: Config) -> str | None:
    if not config.command:
        return 'command is missing: command = ["/path/to/program", "argument"]'
    if not config.command[0].startswith("/"):
        return f'command must begin with an absolute path, not "{config.command[0]}"'
    if config.kind is Kind.NHC and "-a" in config.command:
        return 'command must not contain -a with kind = "nhc": healthd adds it where it is needed'
    return "command must not contain NUL" if any("\0" in word for word in config.command) else None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    if config.kind is Kind.NHC:
        yield from _nhc(host, config, seconds / 2)
        return
    ran = _run(host, config, config.command, seconds)
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


def _run(host: Host, config: Config, command: Sequence[str], seconds: float) -> Ran:
    try:
        ran = host.run(command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not from the kernel: others may write the program
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if ran is None:
        raise RuntimeError(f"{config.name}: there is no program {config.command[0]}")
    return ran


def _nhc(host: Host, config: Config, seconds: float) -> Iterator[Finding | Observation | NothingToCheck]:
    """Run NHC and yield one finding for each of its checks that fails. `seconds` is the limit of each of two runs."""
    first = _run(host, config, _nhc_command(config, all_checks=False), seconds)
    yield Observation("exec_exit_status", first.status, labels=(("name", config.name),))
    failed = _nhc_failures(first.stdout)
    if failed:
        with contextlib.suppress(TimeoutError):  # what the first run found is a fault all the same
            failed |= _nhc_failures(_run(host, config, _nhc_command(config, all_checks=True), seconds).stdout)
    elif first.status < 0:
        raise RuntimeError(f"{config.name}: NHC was ended by {_signal_name(-first.status)}")
    elif first.status == NHC_USAGE:
        raise RuntimeError(f"{config.name}: NHC refuses its command line: {_first_line(first.stderr)}")
    elif first.status != 0:
        failed[""] = _first_line(first.stderr) or _first_line(first.stdout) or f"exit status {first.status}"
    elif _NHC_STARTED not in first.stdout:
        raise RuntimeError(
            f"{config.name}: NHC printed nothing: its nhc.conf is missing, or its sysconfig file sets LOGFILE, VERBOSE "
            "or DETACHED_MODE"
        )
    elif not _NHC_CHECK.search(first.stdout):
        yield NothingToCheck("nhc.conf has no check for this node")
    for check, message in failed.items():
        subject = f"{config.name}: {check}" if check else config.name
        yield Finding(config.critical_severity, "exec/critical", printable(subject)[:MAX_SUBJECT], message)


def _nhc_command(config: Config, all_checks: bool) -> list[str]:
    """Options come first: NHC takes everything behind the first VARIABLE=value for another such word."""
    program, *rest = config.command
    return [program, *(["-a"] if all_checks else []), "-v", "-l", "-", *rest, "MARK_OFFLINE=0"]


def _nhc_failures(output: str) -> dict[str, str]:
    """The line of nhc.conf -> why it failed, for each check that failed.

    The line is what stays the same from run to run; a message may hold numbers that change. Where NHC does not print
    its checks (LOGFILE in its sysconfig file) the first word of the message stands for the line.
    """
    check = ""
    failed: dict[str, str] = {}
    for line in output.splitlines():
        if match := _NHC_CHECK.fullmatch(line):
            check = match[1]
        elif match := _NHC_FAILURE.match(line):
            failed[check or match[1].partition(":")[0]] = printable(match[1].strip())[:MAX_MESSAGE]
    return failed


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
        "The exit status of a site's program: 0 healthy, 1 warning, 2 critical, else it could not check; or NHC's own.",
        ("name",),
    ),
}

EXPLAIN = {
    "exec/warning": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A program of the site ended with exit status 1.",
        "The site's program decides what deserves a warning.",
        "The message is the first line that the program printed. Run its command by hand; healthd config show prints "
        "the command.",
    ),
    "exec/critical": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A program of the site ended with exit status 2, or a check of NHC failed. critical_severity in its settings "
        "is the severity.",
        "The site's program, or NHC, decides what is a fault.",
        "The message is the first line that the program printed, or NHC's message for the check. Run its command by "
        "hand; healthd config show prints the command.",
        chosen_by="critical_severity",
    ),
}
