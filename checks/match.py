"""Site rules for lines that a command's output or a file must or must not contain.

Rule: NHC's check_cmd_output and check_file_contents compare each line with a pattern. In healthd each pattern is a
regular expression that is searched for in one line at a time. If the input cannot be searched completely, the result is
neither a match nor a mismatch. The run fails, and the node neither passes nor fails. Possible reasons are a missing
command, another exit status, too much output, a line that is too long, or a file that is not regular. A missing file,
however, is treated as a file without the required line.

The command runs as root, so it must belong to root, as for checks.exec. A pattern may take forever, or a file server
may not respond. That delays only this check, because its worker is killed after the timeout.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from healthd.api import (
    AbsolutePathOrNone,
    CheckSettings,
    Clears,
    ExitStatus,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    Observation,
    Severity,
    compile_patterns_eagerly,
    printable,
    regex,
)
from healthd.host.program import MAX_OUTPUT_BYTES

USES = ""
PER = "match"

MAX_FILE_CHARACTERS = 4 << 20  # a larger file is probably a log; for logs use [kernel_log.patterns] or a site program
MAX_LINE = 16 << 10  # maximum length in characters; a pattern's run time may be quadratic in the line length
MAX_PATTERN = 1000
MAX_QUOTED = 120
ENDING_SECONDS = 1.0  # part of the timeout that is reserved for killing the command and reporting


class Config(CheckSettings, frozen=True):
    """command          absolute path of a program, and its arguments; no shell is used. Its standard output is searched
    exit_statuses    exit statuses that mean success; with any other exit status of the command the run fails
    file             the file to search, instead of a command
    requires         regular expression that at least one line must match; "" = none
    forbids          regular expression that no line may match; "" = none
    fault_severity   severity of a finding
    timeout_seconds  the command is killed one second before this time, or at 80 % of this time if it is below 5 s
    """

    command: tuple[str, ...] = ()
    exit_statuses: tuple[ExitStatus, ...] = (0,)
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
    """Return the problem with a regular expression, or "" if it is valid."""
    if len(pattern) > MAX_PATTERN:
        return f"must have at most {MAX_PATTERN} characters"
    try:
        # only compile the pattern, because a search can take forever even in an empty text
        with compile_patterns_eagerly():
            regex(pattern)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return ""


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation]:
    source = printable(" ".join(config.command) or config.file)[:MAX_QUOTED]
    text = _output(host, config) if config.command else _file_text(host, config)
    if config.requires:
        found = None if text is None else _first_match(config, config.requires, text)
        yield Observation("match_required_found", int(found is not None), labels=(("name", config.name),))
        if found is None:
            mismatch = f"has no line that matches {_quoted(config.requires)}" if text is not None else "does not exist"
            yield Finding(config.fault_severity, "match/missing", config.name, f"{source} {mismatch}")
    if config.forbids:
        if text is None:
            raise RuntimeError(f"{config.name}: {config.file} does not exist")
        found = _first_match(config, config.forbids, text)
        yield Observation("match_forbidden_found", int(found is not None), labels=(("name", config.name),))
        if found is not None:
            message = f"{source} has a line that matches {_quoted(config.forbids)}: {_quoted(found)}"
            yield Finding(config.fault_severity, "match/found", config.name, message)


class _Text(NamedTuple):
    """Lines to search. `truncation` is the reason why lines may be missing, or "" if the lines are complete."""

    lines: list[str]
    truncation: str


def _output(host: Host, config: Config) -> _Text:
    """Return the command's output. Raises RuntimeError or OSError."""
    seconds = max(config.timeout_seconds - ENDING_SECONDS, config.timeout_seconds * 0.8)
    try:
        result = host.run(config.command, seconds, {"HEALTHD_CHECK": config.name}, anywhere=True)
    except PermissionError as error:
        if error.errno is None:  # not raised by the kernel; other users may write to the program
            raise RuntimeError(f"{config.name}: command: {error}") from None
        raise
    if result is None:
        raise RuntimeError(f"{config.name}: {config.command[0]} does not exist")
    if result.status not in config.exit_statuses:
        error_output = printable(result.stderr.strip().partition("\n")[0])[:MAX_QUOTED]
        raise RuntimeError(f"{config.name}: {config.command[0]} exited with status {result.status}: {error_output}")
    is_complete = len(result.stdout.encode()) < MAX_OUTPUT_BYTES
    return _Text(
        _lines(result.stdout), "" if is_complete else f"printed more than healthd reads ({MAX_OUTPUT_BYTES >> 10} KiB)"
    )


def _file_text(host: Host, config: Config) -> _Text | None:
    """Return the file's text, or None if there is no such file. Raises RuntimeError or OSError."""
    file_stat = host.stat(config.file)
    if file_stat is None:
        return None
    if not stat.S_ISREG(file_stat.mode):  # reading a FIFO would never end
        raise RuntimeError(f"{config.name}: {config.file} is not a regular file")
    text = host.read(config.file, strip=False)
    if text is not None and len(text) > MAX_FILE_CHARACTERS:
        raise RuntimeError(f"{config.name}: {config.file} is larger than {MAX_FILE_CHARACTERS >> 20} MiB")
    return None if text is None else _Text(_lines(text), "")


def _lines(text: str) -> list[str]:
    """Split a text into lines at newlines only. str.splitlines() would also split at form feeds."""
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    return [line.removesuffix("\r") for line in lines]


def _first_match(config: Config, pattern: str, text: _Text) -> str | None:
    """Return the first matching line, or None if none matches. Raises RuntimeError if not all lines could be
    searched."""
    search = regex(pattern).search
    too_long = False
    for line in text.lines:
        if len(line) > MAX_LINE:  # searching a part of the line would be wrong: "$" would match at the cut
            too_long = True
        elif search(line):
            return line
    source = config.command[0] if config.command else config.file
    if text.truncation:
        raise RuntimeError(f"{config.name}: {source} {text.truncation}")
    if too_long:
        raise RuntimeError(f"{config.name}: {source} has a line of more than {MAX_LINE:,} characters")
    return None


def _quoted(text: str) -> str:
    return f'"{printable(text.strip())[:MAX_QUOTED]}"'


OBSERVATIONS = {
    "match_required_found": Meaning("1 if a line matches the required pattern, else 0.", ("name",)),
    "match_forbidden_found": Meaning("1 if a line matches the forbidden pattern, else 0.", ("name",)),
}

_TODO = "healthd config show prints the command or file and the pattern. Run the command by hand, or read the file."

EXPLAIN = {
    "match/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "No line in a file or in a command's output matches the pattern that a site rule requires. The rule's setting "
        "fault_severity determines the severity.",
        "The effect depends on the site's rule.",
        _TODO,
        chosen_by="fault_severity",
    ),
    "match/found": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A line in a file or in a command's output matches the pattern that a site rule forbids. The rule's setting "
        "fault_severity determines the severity.",
        "The effect depends on the site's rule.",
        _TODO,
        chosen_by="fault_severity",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.OTHER)
