"""Finds the nodes that users excluded from their jobs, in `squeue` output and in each job's command and script.

squeue prints the jobs that slurmctld still has, but not their DBIndex, so (job id, submit time) identifies a job's
record. The nodes are those of --exclude; slurmctld does not add nodes on which a prolog failed.

SubmitLine consists of the command's words, separated by blanks and without quotes (src/common/slurm_opt.c,
slurm_option_get_argv_str). The first word that is not an option begins the job's own command. If a quoted argument of
an option contained blanks, this word may be found too early. A later "-x" then makes the result unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from healthd.common.slurm.hostlist import HostListError, expand
from healthd.common.text import is_decimal, regex
from healthd.fleet.ingest import Run, Source
from healthd.fleet.sources.columns import Columns, rows
from healthd.fleet.sources.common import command_lines, ingest_files, local_reading
from healthd.fleet.sources.reading import Reading

# The column names of `-o` and `-O` (github.com/SchedMD/slurm, src/squeue/print.c; -O has ExcNodes since 24.05).
COLUMNS = Columns(("jobid", "submit_time", "exc_nodes"))
NO_NODES = ("", "(null)", "N/A")

Row: TypeAlias = "tuple[str, None, int, str, str, int]"


def command() -> list[str]:
    """Return the command that lists all jobs in slurmctld, including jobs that ended less than MinJobAge ago.

    %A is the raw id. Without a width, nothing is truncated (src/squeue/print.c, _print_str()). Run it with
    SLURM_TIME_FORMAT=%s.
    """
    return ["squeue", "--all", "--states=all", "--format=%A|%V|%x"]


def parse(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[Row]:
    """Yield the rows of `exclusions`.

    A pending array has one line with the array's own id. Output in padded columns (squeue -O) is read only if a blank
    follows each value. Without the blank, the value may be truncated.
    """
    for number, row in rows(_separated(lines, reading), COLUMNS, reading, "|"):
        if row["exc_nodes"] in NO_NODES:
            continue
        try:
            submitted, nodes = reading.seconds(row["submit_time"]), expand(row["exc_nodes"])
        except ValueError as error:
            reading.unread(number, str(error))
            continue
        if not is_decimal(row["jobid"]):
            reading.unread(number, f'"{row["jobid"]}" is not a job id: use -o %A')
            continue
        reading.read(1)
        for node in nodes if reading.is_in_period(submitted, None) else ():
            yield reading.resolve_cluster(), None, submitted, node, "squeue", int(row["jobid"])


def _separated(lines: Iterable[tuple[int, str]], reading: Reading) -> Iterator[tuple[int, str]]:
    """Insert separators between the columns in -O output. Other lines stay unchanged."""
    starts: list[int] | None = None
    for number, line in lines:
        if starts is None:
            names = [] if "|" in line else line.split()
            starts = [line.index(name) for name in names]
            width = len(line)
            yield number, "|".join(names) or line
        elif not starts:
            yield number, line
        else:
            ends = [*starts[1:], width]
            cells = [line[start:end] for start, end in zip(starts, ends, strict=True)]
            if len(line) > width or any(cell and not cell.endswith(" ") for cell in cells):
                reading.unread(number, "a column may be truncated: make it wider, or use -o '%A|%V|%x'")
            else:
                yield number, "|".join(cell.strip() for cell in cells)


def ingest(run: Run, files: list[str]) -> None:
    ingest_files(run, files, "exclusions", parse)
    if not files:
        reading = local_reading(run, "squeue")
        with run.step(reading.name, run.now, run.now, reading.cluster) as step:
            step.stage("exclusions", parse(command_lines(command(), reading), reading))


SOURCE = Source(
    "exclusions",
    "--exclusions",
    "FILE",
    "output of `squeue -o '%A|%V|%x'`; without FILE, healthd runs it here",
    ingest,
    runs_without_files=True,
)


# --- a job's command and script

# Options of sbatch, salloc and srun whose argument, if any, is not the next word. Source: has_arg in
# src/common/slurm_opt.c, 22.05 to 26.05. An optional argument is part of the same word.
_FLAG_OPTIONS = frozenset(
    (
        *("async", "bcast", "bell", "compress", "consolidate-segments", "contiguous", "debugger-test"),
        *("disable-status", "exact", "exclusive", "external", "external-launcher", "get-user-env", "help"),
        *("hold", "ignore-pbs", "immediate", "interactive", "kill-command", "kill-on-bad-exit", "label"),
        *("multi-prog", "nice", "no-allocate", "no-bell", "no-kill", "no-requeue", "no-shell"),
        *("oom-kill-step", "overcommit", "overlap", "oversubscribe", "parsable", "preserve-env"),
        *("propagate", "pty", "quiet", "quit-on-interrupt", "reboot", "requeue", "resv-ports", "send-libs"),
        *("spread-job", "spread-segments", "stepmgr", "test-only", "unbuffered", "usage", "use-min-nodes"),
        *("verbose", "version", "wait-for-children", "whole", "x11"),
    )
)
_SHORT_FLAG_OPTIONS = frozenset("XhHIKlZkOsEQuvV")
_POSSIBLE_EXCLUDE = regex(r"(?:^|\s)(?:-[A-Za-z]*x|--exclud)")
_SHELL_WORD = regex(r"'([^']*)'|\"([^\"]*)\"|\\(.)|([^\s'\"\\]+)|(\s+)")


class Exclusions(NamedTuple):
    """Excluded nodes. `is_complete` is True if `nodes` has all nodes that were excluded at the job's submission."""

    is_complete: bool
    nodes: tuple[str, ...] = ()


UNKNOWN = Exclusions(False)
NO_EXCLUSIONS = Exclusions(True)


def parse_submit_line(line: str) -> Exclusions:
    """Return the exclusions in a job's command.

    A batch script may exclude further nodes, unless the command has --exclude (which overrides the script's option) or
    there is no script.
    """
    program, _, options = line.partition(" ")
    program = program.rpartition("/")[2]
    if program not in ("sbatch", "srun", "salloc"):
        return UNKNOWN
    if "x" not in options or not _POSSIBLE_EXCLUDE.search(options):  # most commands: nothing to parse
        if program != "sbatch":
            return NO_EXCLUSIONS
        if "--wrap" not in options:
            return UNKNOWN
    command_words = line.split()
    hosts, arguments, wrapped = _find_options(command_words[1:], wait_is_alone=program == "sbatch")
    if (wrapped or hosts is None) and _POSSIBLE_EXCLUDE.search(" ".join(arguments)):
        return UNKNOWN  # an option of the job's own command, or of the submit command after an argument with a blank
    if hosts is not None:
        return _expand_exclusions(hosts)
    return NO_EXCLUSIONS if wrapped or program != "sbatch" else UNKNOWN


def parse_script(script: str) -> Exclusions:
    """Return the exclusions in a batch script. They are in the #SBATCH lines above the script's first command.

    Source: src/sbatch/opt.c, _opt_batch_script. If a script describes a heterogeneous job, it is unknown to which
    component the exclusions belong.
    """
    option_words: list[str] = []
    for line in script.split("\n"):
        if line.startswith(("#SBATCH", "#SLURM")):
            option_words += _split_words(line.removeprefix("#SBATCH").removeprefix("#SLURM").strip())
        elif line.strip() and not line.strip().startswith("#"):
            break
    if {"hetjob", "packjob"} & {word.lower() for word in option_words}:
        return UNKNOWN
    hosts, _, _ = _find_options(option_words, wait_is_alone=True)
    return NO_EXCLUSIONS if hosts is None else _expand_exclusions(hosts)


def _expand_exclusions(hosts: str) -> Exclusions:
    if "/" in hosts:  # the names are in a file, which was not stored
        return UNKNOWN
    try:
        return Exclusions(True, expand(hosts))
    except HostListError:
        return UNKNOWN


def _find_options(arguments: list[str], wait_is_alone: bool) -> tuple[str | None, list[str], bool]:
    """Return the last --exclude option, the words after the options, and True if the options include --wrap."""
    hosts: str | None = None
    has_wrap = False
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if word == "--" or not word.startswith("-") or word == "-":
            return hosts, arguments[index - (word != "--") :], has_wrap
        next_argument = arguments[index] if index < len(arguments) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes_value = not equals and name not in _FLAG_OPTIONS and not (name == "wait" and wait_is_alone)
            if takes_value:
                value = next_argument
            index += takes_value
            if len(name) >= len("exclud") and "exclude".startswith(name):
                hosts = value
            if name == "wrap":
                return hosts, arguments[index:], True
            continue
        for position, letter in enumerate(word[1:], 2):
            if letter in _SHORT_FLAG_OPTIONS or (letter == "W" and wait_is_alone):
                if letter in "IKk":  # the rest of this word is its argument
                    break
                continue
            value = word[position:]
            if not value:
                value = next_argument
                index += 1
            if letter == "x":
                hosts = value
            break
    return hosts, [], has_wrap


def _split_words(text: str) -> list[str]:
    """Split a #SBATCH line into words. Quotes and backslashes work as in a shell, and "#" begins a comment."""
    parsed: list[str] = []
    current: str | None = None
    for single, double, escaped, plain, blank in _SHELL_WORD.findall(text):
        if blank:
            if current is not None:
                parsed.append(current)
            current = None
        elif current is None and plain.startswith("#"):
            break
        else:
            current = (current or "") + (single or double or escaped or plain)
    return parsed if current is None else [*parsed, current]
