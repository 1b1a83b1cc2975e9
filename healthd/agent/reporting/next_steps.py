"""The next commands under each condition of `healthd status`, ready to be pasted into a shell. Pure.

The remedy of a condition (endings.py) decides which they are. Commands that destroy evidence come after `healthd
record`. Subjects and codes may come from users (a mount point, a name in a kernel line): they are quoted, so that none
of them becomes a command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from healthd.agent.reporting.endings import DRAINS, remedy_of
from healthd.common.text import printable, regex

Document = Mapping[str, Any]

PCI = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|PCI")
Step: TypeAlias = "tuple[str, str]"  # when, command


def next_steps(c: Document, others: Sequence[Document], slurm: Sequence[str], flags: str = "") -> Iterator[Step]:
    """Yield (when, command) for an open condition, the next one first.

    others  all open conditions: whether its code alone names it
    slurm   the words of the node's state in Slurm
    flags   the words with which the daemon of this status is reached ("--runtime-dir run"), quoted
    """
    yield "next", f"healthd explain {_quoted(c['code'])}"
    if c["state"] == "pending" or c["history"] or c.get("observed"):
        return
    idle = {"IDLE", "DRAIN"} <= set(slurm) and "COMPLETING" not in slurm
    yield from remedies(c, others, "now that" if idle else "once", flags)


def remedies(c: Document, others: Sequence[Document] = (), when: str = "once", flags: str = "") -> Iterator[Step]:
    """Yield the commands of a condition's remedy; `when`: "once" or "now that" no job runs on the node."""
    remedy = remedy_of(c["clears"], c["severity"], c.get("remedy", ""))
    idle = f"{when} no job runs here"
    # A part is repaired or replaced with the power off. Below degraded the node stays in service.
    if remedy in ("gpu_reset", "reboot", "power_cycle") or (remedy == "repaired" and c["severity"] in DRAINS):
        yield "first, save the evidence", "healthd record"
    if remedy == "check":
        yield "to see whether it is mended", f"healthd check {_quoted(c['check'])}"
    elif remedy == "gpu_reset":
        yield idle, _gpu_reset(c["subject"])
    elif remedy == "reboot":
        yield idle, "systemctl reboot"
    elif remedy == "power_cycle":
        yield f"{idle}, then power on at the BMC", "systemctl poweroff"
    elif remedy == "repaired":
        yield "once it is repaired", repaired(c, others, flags)


def _gpu_reset(subject: str) -> str:
    """Return the reset of one GPU, or of all where the condition does not name one."""
    part = f" -i {subject}" if PCI.fullmatch(subject) else ""
    return f"nvidia-smi --gpu-reset{part}"


def repaired(c: Document, others: Sequence[Document] = (), flags: str = "") -> str:
    """Return the `healthd repaired CODE PART` of this condition alone."""
    several = sum(other["code"] == c["code"] for other in others) > 1
    part = [_quoted(c["subject"])] if c["subject"] or several else []
    end_of_flags = ["--"] if c["subject"].startswith("-") else []
    return " ".join(["healthd repaired", *([flags] if flags else []), *end_of_flags, _quoted(c["code"]), *part])


def _quoted(text: str) -> str:
    return shlex.quote(printable(text))
