"""Programs of the site, by exit status (0 ok, 1 warning, 2 critical, 3 unknown, like Nagios plug-ins), and NHC.

The first line of the output is the message. With any other exit status, after a signal, at the timeout or without the
program, the check itself has failed: the node neither passes nor fails.

NHC (LBNL Node Health Check) has other exit statuses, so `kind = "nhc"` reads its output. Each check of nhc.conf that
fails is one finding, whatever the exit status. From the script `nhc` of github.com/mej/nhc at 9c4a38c0c9f4:

- NHC stops at the first failure with the status of that check, mostly 1. With -a it goes on, and its status is the
  number of failures. With -a, however, it does not count a failed check that is not a function of NHC (a script, a
  misspelt name). healthd therefore runs NHC without -a, and again with -a after a failure, to find the others.
- With NHC_CHECK_FORKED=1 and -a its status is 0 after failures, and lines about failures may come before the name of
  their check. healthd passes NHC_CHECK_FORKED=0, and counts the lines about failures whatever the status.
- Without a settings file its status is 0 and it prints nothing. That is not a pass, because no check ran. With -v every
  other run prints something.
- MARK_OFFLINE=0 keeps NHC from draining. /etc/default/nhc or /etc/sysconfig/nhc and nhc.conf are read later and must
  not set it to 1.

The program runs as root. The program, every directory above it and every symbolic link on the way must therefore belong
to root, or to the user that healthd runs as, and no other user may have write access. healthd verifies this before
each run and not when it reads the settings, because the file may be on a file server that does not answer. The site
must protect the interpreter of a script and the files among the arguments.
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
ENDING_SECONDS = 1.0  # part of the timeout reserved to kill the program, wait for it, and report

NHC_USAGE = 10  # exit status for a wrong command line (`nhcmain_parse_cmdline || exit 10`)
_NHC_CHECK = regex(r'Running check:  "([^\n]*)"( \(forked PID [0-9]+\))?')
_NHC_FAILURE = regex(r"ERROR:  \S+:  Health check failed:  ([^\n]*)")
_NHC_ALL = regex(r"-[dfhqvx]*a.*|NHC_CHECK_ALL=1")  # also among other options: -va
_NHC_STARTED = "Node Health Check starting."


class Kind(Enum):
    """Kind of the program, which decides how its result is read."""

    PROGRAM = "program"
    NHC = "nhc"


class Config(CheckSettings, frozen=True):
    """command             the program, by its absolute path, and its arguments; no shell
    kind                "nhc": the program is NHC, and each check of nhc.conf that fails is a finding
    critical_severity   severity of exit status 2, and of a failed check of NHC
    timeout_seconds     the program is killed one second before this time (after 80 % of this time, if that is later)
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
        return 'command must not contain -a or NHC_CHECK_ALL=1 with kind = "nhc": healthd adds -a where it is needed'
    if "" in arguments:  # such as the MARK_OFFLINE=0 that keeps NHC from draining
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
        ending = f"was ended by {_signal_name(-status)}" if status < 0 else f"exit status {status} is not 0, 1, 2 or 3"
        raise RuntimeError(f"{config.name}: {ending}: {message}")


def _run(host: Host, config: Config, command: Sequence[str], seconds: float) -> ProgramResult:
    try:
        result = host.run(command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not from the kernel: other users may write to the program
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if result is None:
        raise RuntimeError(f"{config.name}: there is no program {config.command[0]}")
    return result


def _nhc(host: Host, config: Config, seconds: float) -> Iterator[Finding | Observation | NothingToCheck]:
    """Run NHC and yield one finding for each of its checks that fails. `seconds` is the limit of each of two runs.

    If the second run fails, the findings of the first one count all the same. The error is raised after them, so that
    the checks that were not reached do not pass.
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
        raise RuntimeError(f"{config.name}: NHC was ended by {_signal_name(-first.status)}")
    elif first.status == NHC_USAGE:
        raise RuntimeError(f"{config.name}: NHC refuses its command line: {_first_line(first.stderr)}")
    elif first.status != 0:
        failed[""] = _first_line(first.stderr) or _first_line(first.stdout) or f"exit status {first.status}"
    elif _NHC_STARTED not in first.stdout:
        raise RuntimeError(
            f"{config.name}: no output of NHC's checks: nhc.conf is missing, or NHC's sysconfig file sets LOGFILE, "
            "VERBOSE or DETACHED_MODE"
        )
    elif not _NHC_CHECK.search(first.stdout):
        yield NothingToCheck("nhc.conf has no check for this node")
    for check, message in failed.items():
        subject = f"{config.name}: {check}" if check else config.name
        yield Finding(config.critical_severity, "exec/critical", printable(subject)[:MAX_SUBJECT], message)
    if problem is not None:
        raise problem


def _nhc_command(config: Config, all_checks: bool) -> list[str]:
    """Put options first: NHC takes all arguments after the first VARIABLE=value for further assignments."""
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
    """Return the reason of failure by line of nhc.conf, for each check that failed.

    The line is what stays the same from run to run; a message may hold numbers that change. The first word of the
    message replaces the line if NHC does not print its checks (LOGFILE in its sysconfig file) or forks them
    (NHC_CHECK_FORKED=1 there): a forked check may print its failure before NHC prints its line.
    """
    check = ""
    failed: dict[str, str] = {}
    for line in output.split("\n"):  # only a newline ends a line of NHC; process names may contain other separators
        if match := _NHC_CHECK.fullmatch(line):
            check = "" if match[2] else match[1]
        elif match := _NHC_FAILURE.match(line):
            failed[check or match[1].partition(":")[0]] = printable(match[1].strip())[:MAX_MESSAGE]
    return failed


def _first_line(output: str) -> str:
    """Return the first line that is not blank, printable, at most MAX_MESSAGE characters; "" if there is none."""
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
        "Exit status of a site's program: 0 healthy, 1 warning, 2 critical, else it could not check; or NHC's own "
        "status.",
        ("name",),
    ),
}

EXPLAIN = {
    "exec/warning": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A program of the site ended with exit status 1.",
        "The site's program decides what deserves a warning.",
        "No action tonight. The message is the first line that the program printed. Run its command by hand; healthd "
        "config show prints the command.",
    ),
    "exec/critical": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A program of the site ended with exit status 2, or a check of NHC failed. Its setting critical_severity is "
        "the severity.",
        "The site's program, or NHC, decides what is a fault.",
        "The message is the first line that the program printed, or NHC's message for the check. Run its command by "
        "hand; healthd config show prints the command.",
        chosen_by="critical_severity",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.OTHER)
