"""The next command to type under each condition of `healthd status`, ready to be pasted into a shell. Pure.

What a condition waits for says which it is (docs/severity.md): a run of its check, time, a reset, a reboot, a person.
Its texts are of others (a mount point, a name in a kernel line): they are quoted, so that none of them is a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from healthd.text import printable

Document = Mapping[str, Any]

DRAINS = ("degraded", "critical")
IDLE = {"IDLE", "DRAIN"}
Step: TypeAlias = "tuple[str, str]"  # when, command


def next_steps(c: Document, others: Sequence[Document], slurm: Sequence[str], flags: str = "") -> Iterator[Step]:
    """(when, command) for a condition that stands, the next one first.

    others  all conditions that stand: whether its code alone names it
    slurm   the words of the node's state in Slurm
    flags   the words with which the daemon of this status is reached ("--runtime-dir run"), quoted
    """
    yield "next", f"healthd explain {_quoted(c['code'])}"
    if c["state"] == "pending" or c["history"] or c.get("observed"):
        return
    if c["clears"] == "pass":
        yield "to see whether it is mended", f"healthd check {_quoted(c['check'])}"
    elif c["clears"] == "reboot" and c["severity"] in DRAINS:
        yield "now that no job runs here" if set(slurm) >= IDLE else "once no job runs here", "systemctl reboot"
    elif c["clears"] == "operator":
        yield "once it is repaired", repaired(c, others, flags)


def repaired(c: Document, others: Sequence[Document] = (), flags: str = "") -> str:
    """healthd repaired CODE PART: of this condition alone."""
    several = sum(other["code"] == c["code"] for other in others) > 1
    part = [_quoted(c["subject"])] if c["subject"] or several else []
    end_of_flags = ["--"] if c["subject"].startswith("-") else []
    return " ".join(["healthd repaired", *([flags] if flags else []), *end_of_flags, _quoted(c["code"]), *part])


def _quoted(text: str) -> str:
    return shlex.quote(printable(text))
