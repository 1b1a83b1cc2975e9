"""A rule of the site: a line that a command's output or a file must have, or must not have.

Rule: check_cmd_output and check_file_contents of NHC compare each line with a pattern. Here each pattern is a regular
expression that is searched in one line at a time. What cannot be read (no such command, another exit status, too much
output, no regular file) is no match and no mismatch: the run fails, which neither passes nor fails the node. Only a
missing file lacks the line that it must have.

The command runs as root, so it must belong to root as a program of checks.exec must. A pattern that takes for ever, or
a file on a server that does not answer, holds up this check alone: the worker is ended after its timeout.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.machine.program import MAX_OUTPUT_BYTES
from healthd.model import Clears, Explain, Finding, Meaning, Observation, Severity
from healthd.past import Past
from healthd.plausible import AbsolutePathOrNone, ExitStatus
from healthd.text import printable, regex
from healthd.values import dataclass

USES = ""
PER = "match"

MAX_FILE_CHARACTERS = 4 << 20  # more is a log: its lines belong into [kernel_log.patterns] or a program of the site
MAX_LINE = 4096  # characters of a line that are searched
MAX_PATTERN = 1000
MAX_SHOWN = 120
ENDING_SECONDS = 1.0  # the part of the timeout that is kept to kill the command and report


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """command          the program, by its absolute path, and its arguments; no shell. Its standard output is searched
    statuses         the exit statuses with which the output counts; any other means that the command failed
    file             the file that is searched, instead of a command
    requires         a regular expression that at least one line must match, "" = none
    forbids          a regular expression that no line may match, "" = none
    fault_severity   how bad it is if the file or output is not so
    timeout_seconds  the command is killed one second before its end (after 80 % of it, if that is later)
    """

    command: tuple[str, ...] = ()
    statuses: tuple[ExitStatus, ...] = (0,)
    file: AbsolutePathOrNone = ""
    requires: str = ""
    forbids: str = ""
    fault_severity: Severity = Severity.DEGRADED


def validate(config: Config) -> str | None:
    if bool(config.command) == bool(config.file):
        return "needs either a command or a file" + (", not both" if config.file else "")
    if config.command and not config.command[0].startswith("/"):
        return f'command must begin with an absolute path, not "{config.command[0]}"'
    if any("\0" in word for word in config.command):
        return "command must not contain NUL"
    if not config.requires and not config.forbids:
        return "needs a pattern: requires or forbids"
    for setting in ("requires", "forbids"):
        if problem := _pattern_problem(getattr(config, setting)):
            return f"{setting}: {problem}"
    return None


def _pattern_problem(pattern: str) -> str:
    """Return what is wrong with a regular expression, "" if nothing is."""
    if len(pattern) > MAX_PATTERN:
        return f"must have at most {MAX_PATTERN} characters"
    try:
        regex(pattern).search("")
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return ""


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    source = printable(" ".join(config.command) or config.file)[:MAX_SHOWN]
    lines, whole = _output(host, config) if config.command else _lines_of_file(host, config)
    if config.requires:
        found = None if lines is None else _first_match(config.requires, lines)
        if found is None and not whole:
            raise RuntimeError(f"{config.name}: {source} printed more than is read ({MAX_OUTPUT_BYTES >> 10} KiB)")
        yield Observation("match_required_found", int(found is not None), labels=(("name", config.name),))
        if found is None:
            why = f"has no line that matches {_quoted(config.requires)}" if lines is not None else "does not exist"
            yield Finding(config.fault_severity, "match/missing", config.name, f"{source} {why}")
    if config.forbids:
        if lines is None:
            raise RuntimeError(f"{config.name}: there is no file {config.file}")
        found = _first_match(config.forbids, lines)
        if found is None and not whole:
            raise RuntimeError(f"{config.name}: {source} printed more than is read ({MAX_OUTPUT_BYTES >> 10} KiB)")
        yield Observation("match_forbidden_found", int(found is not None), labels=(("name", config.name),))
        if found is not None:
            message = f"{source} has a line that matches {_quoted(config.forbids)}: {_quoted(found)}"
            yield Finding(config.fault_severity, "match/found", config.name, message)


def _output(host: Host, config: Config) -> tuple[list[str] | None, bool]:
    """The lines of the command's output, and whether that is all of it."""
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    try:
        ran = host.run(config.command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not from the kernel: others may write the program
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if ran is None:
        raise RuntimeError(f"{config.name}: there is no program {config.command[0]}")
    if ran.status not in config.statuses:
        error_output = printable(ran.stderr.strip().partition("\n")[0])[:MAX_SHOWN]
        raise RuntimeError(f"{config.name}: {config.command[0]} ended with status {ran.status}: {error_output}")
    return ran.stdout.splitlines(), len(ran.stdout.encode()) < MAX_OUTPUT_BYTES


def _lines_of_file(host: Host, config: Config) -> tuple[list[str] | None, bool]:
    """The lines of the file, None if there is none; and whether these are all."""
    about = host.stat(config.file)
    if about is None:
        return None, True
    if not stat.S_ISREG(about.mode):  # a FIFO would never end
        raise RuntimeError(f"{config.name}: {config.file} is not a regular file")
    text = host.read(config.file)
    if text is not None and len(text) > MAX_FILE_CHARACTERS:
        raise RuntimeError(f"{config.name}: {config.file} is larger than {MAX_FILE_CHARACTERS >> 20} MiB")
    return None if text is None else text.splitlines(), True


def _first_match(pattern: str, lines: list[str]) -> str | None:
    search = regex(pattern).search
    return next((line for line in lines if search(line[:MAX_LINE])), None)


def _quoted(text: str) -> str:
    return f'"{printable(text.strip())[:MAX_SHOWN]}"'


OBSERVATIONS = {
    "match_required_found": Meaning("1 if a line matches the pattern that is required, else 0.", ("name",)),
    "match_forbidden_found": Meaning("1 if a line matches the pattern that is forbidden, else 0.", ("name",)),
}

_TODO = "healthd config show has the command or file and the pattern. Run the command by hand, or read the file."

EXPLAIN = {
    "match/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "No line of a file or of a command's output matches what a rule of the site requires. fault_severity in its "
        "settings is the severity.",
        "What the site made the rule for.",
        _TODO,
        chosen_by="fault_severity",
    ),
    "match/found": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A line of a file or of a command's output matches what a rule of the site forbids. fault_severity in its "
        "settings is the severity.",
        "What the site made the rule for.",
        _TODO,
        chosen_by="fault_severity",
    ),
}
