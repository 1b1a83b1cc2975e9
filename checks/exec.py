"""The site's own programs, which report by exit status like Nagios plug-ins, and NHC.

Exit status 0 is ok, 1 a warning, 2 critical and 3 unknown. The first line of the output is the message. The check
itself fails if the exit status is any other number, or if the program is missing, times out or is killed by a signal.
The node then neither passes nor fails.

NHC (LBNL Node Health Check) has other exit statuses, so `kind = "nhc"` reads its output. Each failed check from
nhc.conf is a finding, regardless of the exit status. Source: the script `nhc` of github.com/mej/nhc at 9c4a38c0c9f4:

- NHC stops at the first failure and exits with the status of that check, mostly 1. With -a it continues and exits with
  the number of failures, but does not count failed checks that are not NHC functions (a script, a misspelt name).
  healthd therefore runs NHC without -a. After a failure it runs NHC again with -a to find the other failures.
- With NHC_CHECK_FORKED=1 and -a, NHC exits with 0 even after failures, and may print a failure before the name of the
  failed check. healthd passes NHC_CHECK_FORKED=0, and counts the failure lines regardless of the exit status.
- Without a settings file NHC exits with 0 and prints nothing. That is not a pass, because no check ran. healthd passes
  -v, so that a run with checks always prints something.
- MARK_OFFLINE=0 keeps NHC from draining. /etc/default/nhc or /etc/sysconfig/nhc and nhc.conf are read later and must
  not set it to 1.

The program runs as root. The program, every directory above it and every symbolic link in its path must therefore
belong to root or to healthd's own user, and no other user may have write access. healthd verifies this before each run.
It does not do so when it reads the settings, because the file may be on a file server that does not respond. The site
itself must protect a script's interpreter and any files named in the arguments.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from enum import Enum

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    ProgramResult,
    Severity,
    printable,
    regex,
)

USES = ""
PER = "exec"

MAX_MESSAGE = 200
MAX_SUBJECT = 100
ENDING_SECONDS = 1.0  # part of the timeout that is reserved for killing the program, waiting for it and reporting

NHC_USAGE = 10  # exit status for a wrong command line (`nhcmain_parse_cmdline || exit 10`)
_NHC_CHECK = regex(r'Running check:  "([^\n]*)"( \(forked PID [0-9]+\))?')
_NHC_FAILURE = regex(r"ERROR:  \S+:  Health check failed:  ([^\n]*)")
_NHC_ALL = regex(r"-[dfhqvx]*a.*|NHC_CHECK_ALL=1")  # also combined with other options: -va
_NHC_STARTED = "Node Health Check starting."


class Kind(Enum):
    """Kind of program, which determines how healthd reads the result."""

    PROGRAM = "program"
    NHC = "nhc"


class Config(CheckSettings, frozen=True):
    """command             absolute path of the program, and its arguments; no shell is used
    kind                "nhc": the program is NHC, and each failed check from nhc.conf is a finding
    critical_severity   severity of exit status 2 and of failed NHC checks
    timeout_seconds     the program is killed one second before this time, or at 80 % of this time if it is below 5 s
    """

    command: tuple[str, ...] = ()
    kind: Kind = Kind.PROGRAM
    critical_severity: Severity = Severity.DEGRADED


def validate(config: Config) -> str | None:
    if not config.command:
        return 'command is missing: command = ["/path/to/program", "argument"]'
    if not config.command[0].startswith("/"):
        return f'command must begin with an absolute path, not "{config.command[0]}"'
    if config.kind is Kind.NHC and (problem := _nhc_problem(config.command[1:])):
        return problem
    return "command must not contain NUL" if any("\0" in word for word in config.command) else None


def _nhc_problem(arguments: Sequence[str]) -> str | None:
    if any(_NHC_ALL.fullmatch(word) for word in arguments):
        return 'command must not contain -a or NHC_CHECK_ALL=1 with kind = "nhc": healthd adds -a when needed'
    if "" in arguments:  # NHC would ignore MARK_OFFLINE=0 after the empty argument, and might drain the node itself
        return 'command must not contain an empty argument with kind = "nhc": NHC ignores what follows it'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    if config.kind is Kind.NHC:
        yield from _nhc(host, config, seconds / 2)
        return
    result = _run(host, config, config.command, seconds)
    status, message = result.status, _first_line(result.stdout) or _first_line(result.stderr)
    yield Observation("exec_exit_status", status, labels=(("name", config.name),))
    if status == 1:
        yield Finding(Severity.WARNING, "exec/warning", config.name, message or "exit status 1")
    elif status == 2:
        yield Finding(config.critical_severity, "exec/critical", config.name, message or "exit status 2")
    elif status == 3:
        raise RuntimeError(f"{config.name}: exit status 3 (unknown): {message}")
    elif status != 0:
        ending = f"was killed by {_signal_name(-status)}" if status < 0 else f"exit status {status} is not 0, 1, 2 or 3"
        raise RuntimeError(f"{config.name}: {ending}: {message}")


def _run(host: Host, config: Config, command: Sequence[str], seconds: float) -> ProgramResult:
    try:
        result = host.run(command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not raised by the kernel; other users may write to the program
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if result is None:
        raise RuntimeError(f"{config.name}: {config.command[0]} does not exist")
    return result


def _nhc(host: Host, config: Config, seconds: float) -> Iterator[Finding | Observation | NothingToCheck]:
    """Run NHC and yield one finding for each failed check. `seconds` is the time limit for each of the two runs.

    If the second run fails, the first run's findings are still yielded, and then the error is raised. Without the
    error, NHC checks that did not run would pass.
    """
    first = _run(host, config, _nhc_command(config, all_checks=False), seconds)
    yield Observation("exec_exit_status", first.status, labels=(("name", config.name),))
    failed = _nhc_failures(first.stdout)
    problem: Exception | None = None
    if failed:
        try:
            failed |= _nhc_failures(_run(host, config, _nhc_command(config, all_checks=True), seconds).stdout)
        except (OSError, RuntimeError) as error:
            problem = error
    elif first.status < 0:
        raise RuntimeError(f"{config.name}: NHC was killed by {_signal_name(-first.status)}")
    elif first.status == NHC_USAGE:
        raise RuntimeError(f"{config.name}: NHC rejects its command line: {_first_line(first.stderr)}")
    elif first.status != 0:
        failed[""] = _first_line(first.stderr) or _first_line(first.stdout) or f"exit status {first.status}"
    elif _NHC_STARTED not in first.stdout:
        raise RuntimeError(
            f"{config.name}: NHC's checks printed nothing: nhc.conf is missing, or NHC's sysconfig file sets LOGFILE, "
            "VERBOSE or DETACHED_MODE"
        )
    elif not _NHC_CHECK.search(first.stdout):
        yield NothingToCheck("nhc.conf has no checks for this node")
    for check, message in failed.items():
        subject = f"{config.name}: {check}" if check else config.name
        yield Finding(config.critical_severity, "exec/critical", printable(subject)[:MAX_SUBJECT], message)
    if problem is not None:
        raise problem


def _nhc_command(config: Config, all_checks: bool) -> list[str]:
    """Return the command with all options first, because NHC treats every argument after the first VARIABLE=value as an
    assignment."""
    program, *arguments = config.command
    return [
        program,
        *(["-a"] if all_checks else []),
        "-v",
        "-l",
        "-",
        *arguments,
        "NHC_CHECK_FORKED=0",
        "MARK_OFFLINE=0",
    ]


def _nhc_failures(output: str) -> dict[str, str]:
    """Return a dict that maps each failed check's nhc.conf line to the reason for the failure.

    The line is the key because it stays the same from run to run. A message may contain numbers that change. If NHC
    does not print its checks (LOGFILE in its sysconfig file), the first word of the message is the key. This word is
    also the key if NHC forks its checks (NHC_CHECK_FORKED=1 in that file), because a forked check may print its failure
    before NHC prints the line.
    """
    check = ""
    failed: dict[str, str] = {}
    for line in output.split("\n"):  # NHC ends lines only with a newline; process names may contain other separators
        if match := _NHC_CHECK.fullmatch(line):
            check = "" if match[2] else match[1]
        elif match := _NHC_FAILURE.match(line):
            failed[check or match[1].partition(":")[0]] = printable(match[1].strip())[:MAX_MESSAGE]
    return failed


def _first_line(output: str) -> str:
    """Return the first nonblank line as printable text of at most MAX_MESSAGE characters, or "" if there is none."""
    for line in output.split("\n"):
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
        "Exit status of a site's program (0 healthy, 1 warning, 2 critical, other values: the program could not "
        "check) or of NHC.",
        ("name",),
    ),
}

EXPLAIN = {
    "exec/warning": Explain(
        Severity.WARNING,
        Clears.PASS,
        "One of the site's own programs exited with status 1.",
        "The meaning depends on the site's program.",
        "No action tonight. The message is the first line that the program printed. Run the command by hand; healthd "
        "config show prints it.",
    ),
    "exec/critical": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "One of the site's own programs exited with status 2, or an NHC check failed. The severity is the setting "
        "critical_severity.",
        "The meaning depends on the site's program or on NHC.",
        "The message is the first line that the program printed, or NHC's message for the check. Run the command by "
        "hand; healthd config show prints it.",
        chosen_by="critical_severity",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.OTHER)
