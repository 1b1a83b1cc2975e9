"""The command that drains a lemon, and the Reason that it sets. Pure."""

from __future__ import annotations

import shlex

from healthd.common.slurm import commands
from healthd.common.slurm.drain_reason import LEMON, MAX_CHARACTERS
from healthd.common.text import regex

# What Slurm takes for one node's name, and a shell for one word: never an option, a host list or "ALL". It came of a
# store, and may be anything.
_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_node_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.upper() not in ("ALL", "NODESET")


def reason(words: str) -> str:
    """One line of printable ASCII that slurmdbd does not cut, without a quote or what a shell reads in quotes."""
    return (LEMON + regex(r"[^A-Za-z0-9 ,;:()./%_+=-]+").sub(" ", words).strip())[:MAX_CHARACTERS].rstrip()


def line(name: str, words: str) -> str | None:
    """The command for a shell; None for a name that is none."""
    if not is_node_name(name):
        return None
    *first, last = commands.drain(name, reason(words))
    key, _, value = last.partition("=")
    return f'{shlex.join(first)} {key}="{value}"'
