"""Next commands for each condition in `healthd status`, ready to paste into a shell.

A condition's remedy (endings.py) determines the commands. `healthd record` comes before commands that destroy evidence.
Parts and codes may contain text chosen by users (a mount point, a name in a kernel line). They are quoted so that a
shell never runs them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from healthd.agent.reporting.endings import DRAINS, condition_remedy
from healthd.common.text import printable, regex

Document = Mapping[str, Any]

PCI = regex(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|PCI")
# Parts that `healthd explain CODE PART` recognises: a PCI address, a path, or a numbered name such as mlx5_0/1.
PART = regex(r"[0-9a-f]{4,8}:[0-9a-f:.]+|/[A-Za-z0-9_./-]*|[a-z0-9_][a-z0-9_-]*\d[/.\d]*")
Step: TypeAlias = "tuple[str, str]"  # label, command


def next_steps(
    c: Document, open_conditions: Sequence[Document], slurm: Sequence[str], flags: str = "", evidence: str = ""
) -> Iterator[Step]:
    """Yield (label, command) for an open condition, in the order to run the commands: save evidence, repair, read the
    explanation.

    open_conditions  all open conditions, to determine whether the code alone identifies this one
    slurm            the node's state in Slurm
    flags            quoted options that select the daemon ("--runtime-dir run")
    evidence         id of the evidence that healthd has saved, or ""
    """
    if not (c["state"] == "pending" or c["history"] or c.get("observed")):
        idle = {"IDLE", "DRAIN"} <= set(slurm) and "COMPLETING" not in slurm
        yield from remedy_steps(c, open_conditions, "now that" if idle else "once", flags, evidence)
    yield "details", _explain(c)


def _explain(c: Document) -> str:
    part = f" {c['subject']}" if PART.fullmatch(c["subject"]) else ""
    return f"healthd explain {_quoted(c['code'])}{part}"


def remedy_steps(
    c: Document,
    open_conditions: Sequence[Document] = (),
    when: str = "once",
    flags: str = "",
    evidence: str = "",
) -> Iterator[Step]:
    """Yield (label, command) for a condition's remedy. `when` is "once" or "now that" (no job runs on the node)."""
    remedy = condition_remedy(c["clears"], c["severity"], c.get("remedy", ""))
    idle = f"{when} no job runs here"
    # Repairs require powering off, which destroys evidence. Below severity DEGRADED, the node stays in service.
    if remedy in ("gpu_reset", "reboot", "power_cycle") or (remedy == "repaired" and c["severity"] in DRAINS):
        yield (
            ("evidence", f"healthd evidence show {evidence}")
            if evidence
            else (
                "first, save the evidence",
                "healthd record",
            )
        )
    if remedy == "check":
        yield "to verify the repair", f"healthd check {_quoted(c['check'])}"
    elif remedy == "gpu_reset":
        yield idle, _gpu_reset(c["subject"])
    elif remedy == "reboot":
        yield idle, "systemctl reboot"
    elif remedy == "power_cycle":
        yield f"{idle} (power on again at the BMC)", "systemctl poweroff"
    elif remedy == "repaired":
        yield "after the repair", repaired_command(c, open_conditions, flags)


def _gpu_reset(subject: str) -> str:
    """Return the command that resets one GPU, or all GPUs if the condition names none."""
    part = f" -i {subject}" if PCI.fullmatch(subject) else ""
    return f"nvidia-smi --gpu-reset{part}"


def repaired_command(c: Document, open_conditions: Sequence[Document] = (), flags: str = "") -> str:
    """Return the `healthd repaired CODE PART` command that clears only this condition."""
    has_several = sum(condition["code"] == c["code"] for condition in open_conditions) > 1
    part = [_quoted(c["subject"])] if c["subject"] or has_several else []
    end_of_flags = ["--"] if c["subject"].startswith("-") else []
    return " ".join(["healthd repaired", *([flags] if flags else []), *end_of_flags, _quoted(c["code"]), *part])


def _quoted(text: str) -> str:
    return shlex.quote(printable(text))
