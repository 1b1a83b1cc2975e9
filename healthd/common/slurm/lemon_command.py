"""The command that drains a lemon, and the Reason for the drain."""

from __future__ import annotations

import shlex

from healthd.common.slurm import commands
from healthd.common.slurm.drain_reason import LEMON, MAX_CHARACTERS
from healthd.common.text import regex

# Matches a single node's name that a shell reads as one word, and never an option, a host list or "ALL". The name comes
# from a store and may be anything.
_NAME = regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def is_node_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name.upper() not in ("ALL", "NODESET")


def lemon_reason(text: str) -> str:
    """Return a Reason that slurmdbd does not truncate: one line of printable ASCII without quotes or shell syntax."""
    return (LEMON + regex(r"[^A-Za-z0-9 ,;:()./%_+=-]+").sub(" ", text).strip())[:MAX_CHARACTERS].rstrip()


def shell_command(name: str, text: str) -> str | None:
    """Return the command as shell text, or None for an invalid name."""
    if not is_node_name(name):
        return None
    *first, last = commands.drain(name, lemon_reason(text))
    key, _, value = last.partition("=")
    return f'{shlex.join(first)} {key}="{value}"'
