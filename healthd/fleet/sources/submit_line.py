"""Which nodes a job's user did not want, by the command that submitted it, or by its script.

SubmitLine is the words of the command with blanks between them, without quotes (src/common/slurm_opt.c,
slurm_option_get_argv_str). What stands behind the first word that is no option is the job's own. Where a quoted text
had blanks, that word may come too early: then a later "-x" makes the answer "not known".
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.slurm.hostlist import HostListError, expand
from healthd.common.text import regex

# Options of sbatch, salloc and srun that take no word behind them: has_arg in src/common/slurm_opt.c, 22.05 to 26.05.
# An optional argument stands in the same word.
_ALONE = frozenset(
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
_SHORT_ALONE = frozenset("XhHIKlZkOsEQuvV")
_SUSPECT = regex(r"(?:^|\s)(?:-[A-Za-z]*x|--exclud)")
_QUOTED = regex(r"'([^']*)'|\"([^\"]*)\"|\\(.)|([^\s'\"\\]+)|(\s+)")


class Exclusions(NamedTuple):
    """`known`: whether `nodes` is all that was excluded when the job was submitted."""

    known: bool
    nodes: tuple[str, ...] = ()


UNKNOWN = Exclusions(False)
NONE = Exclusions(True)


def of_submit_line(line: str) -> Exclusions:
    """What the command excludes. A batch script may exclude more, unless the command does it itself, or has no script:
    its options go before those in the script."""
    program, _, options = line.partition(" ")
    program = program.rpartition("/")[2]
    if program not in ("sbatch", "srun", "salloc"):
        return UNKNOWN
    if "x" not in options or not _SUSPECT.search(options):  # as most: there is nothing to be told apart
        if program != "sbatch":
            return NONE
        if "--wrap" not in options:
            return UNKNOWN
    words = line.split()
    hosts, rest, wrapped = _option(words[1:], wait_is_alone=program == "sbatch")
    if (wrapped or hosts is None) and _SUSPECT.search(" ".join(rest)):
        return UNKNOWN  # of the job, or of the command behind a name with a blank
    if hosts is not None:
        return _named(hosts)
    return NONE if wrapped or program != "sbatch" else UNKNOWN


def of_script(script: str) -> Exclusions:
    """What the #SBATCH lines of a batch script exclude: those above its first command (src/sbatch/opt.c,
    _opt_batch_script). Of a script for several components it is not known whose they are."""
    words: list[str] = []
    for line in script.split("\n"):
        if line.startswith(("#SBATCH", "#SLURM")):
            words += _words(line.removeprefix("#SBATCH").removeprefix("#SLURM").strip())
        elif line.strip() and not line.strip().startswith("#"):
            break
    if {"hetjob", "packjob"} & {word.lower() for word in words}:
        return UNKNOWN
    hosts, _, _ = _option(words, wait_is_alone=True)
    return NONE if hosts is None else _named(hosts)


def _named(hosts: str) -> Exclusions:
    if "/" in hosts:  # a file with the names, which nobody kept
        return UNKNOWN
    try:
        return Exclusions(True, expand(hosts))
    except HostListError:
        return UNKNOWN


def _option(words: list[str], wait_is_alone: bool) -> tuple[str | None, list[str], bool]:
    """The last --exclude among the options, the words that are no options, and whether --wrap is one of them."""
    hosts: str | None = None
    wrapped = False
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--" or not word.startswith("-") or word == "-":
            return hosts, words[at - (word != "--") :], wrapped
        following = words[at] if at < len(words) else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            takes = not equals and name not in _ALONE and not (name == "wait" and wait_is_alone)
            if takes:
                value = following
            at += takes
            if len(name) >= len("exclud") and "exclude".startswith(name):
                hosts = value
            if name == "wrap":
                return hosts, words[at:], True
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in _SHORT_ALONE or (letter == "W" and wait_is_alone):
                if letter in "IKk":  # what follows in this word is its argument
                    break
                continue
            value = word[place:]
            if not value:
                value = following
                at += 1
            if letter == "x":
                hosts = value
            break
    return hosts, [], wrapped


def _words(text: str) -> list[str]:
    """The words of a #SBATCH line: quotes and backslashes as in a shell; "#" begins a comment."""
    words: list[str] = []
    word: str | None = None
    for single, double, escaped, plain, blank in _QUOTED.findall(text):
        if blank:
            if word is not None:
                words.append(word)
            word = None
        elif word is None and plain.startswith("#"):
            break
        else:
            word = (word or "") + (single or double or escaped or plain)
    return words if word is None else [*words, word]
