"""Reasons on a drained or down node that are not healthd's: whose they are, what they mean, and who lifts them. Pure.

Slurm's own are in builtin_reasons.py. NHC's begin with "NHC: " (LBNL's Node Health Check, nhc:
"MARK_OFFLINE", helpers/node-mark-offline).
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.slurm.builtin_reasons import Group, group_of_shown
from healthd.common.slurm.drain_reason import LEMON
from healthd.common.text import regex


class Foreign(NamedTuple):
    """`origin`: who wrote it; `meaning`; `todo`: what to look at, and what gives the node back."""

    origin: str
    meaning: str
    todo: str


_RESUME = "Then: scontrol update NodeName=NODE State=RESUME."
_SLURM = "Slurm's"
_LESS = Foreign(
    _SLURM,
    "slurmd found less on the node than slurm.conf says, when it registered: CPUs, memory, disk, or GPUs (gres).",
    "slurmd -C and slurmd -G on the node show what it finds; compare with its line in slurm.conf and with gres.conf. A "
    "GPU less: nvidia-smi -L, healthd check, journalctl -k | grep -i xid. Memory less: a module that failed (healthd "
    f"explain memory_size/too_small), or a number in slurm.conf that is too high. {_RESUME}",
)
_OF_SLURM: dict[Group, Foreign] = {
    Group.NOT_RESPONDING: Foreign(
        _SLURM,
        "slurmctld did not reach the node's slurmd for SlurmdTimeout, and set it DOWN.",
        "Is the machine up (BMC, ping), slurmd running (systemctl status slurmd), munge too, the clock right, the "
        "network there? journalctl -u slurmd -b. It comes back by itself where ReturnToService is 1 or 2 and "
        f"slurmd registers. {_RESUME}",
    ),
    Group.REBOOTED: Foreign(
        _SLURM,
        "The node booted without Slurm having asked for it: it crashed, lost its power, or somebody rebooted it.",
        "Why: last -x, journalctl -b -1 -e (the end of the boot before), the BMC's event log (ipmitool sel elist). "
        "healthd events shows what healthd saw before it. ReturnToService = 2 would take such a node back without "
        f"being asked. {_RESUME}",
    ),
    Group.UNKILLABLE: Foreign(
        _SLURM,
        "Processes of a job did not end within UnkillableStepTimeout after SIGKILL: they hang in the kernel, in a "
        "driver or a file system that does not answer. Slurm writes this also over healthd's reason, and healthd "
        "knows such a drain as its own.",
        "healthd explain processes/unkillable. ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /D/' shows them, cat "
        "/proc/PID/stack where they hang: nvidia (healthd explain gpu_access/hang), nfs, lustre (the server). If "
        f"they never end: reboot. {_RESUME}",
    ),
    Group.PROLOG_EPILOG: Foreign(
        _SLURM,
        "A prolog or epilog on the node ended with an error. healthd's own prolog refuses a job where healthd "
        "wants the node drained: then healthd puts its own reason in the place of this one, or lifts it.",
        "journalctl -u slurmd around that time names the script; run it by hand as slurmd does. healthd status "
        f"says whether it was healthd's prolog, and why. {_RESUME}",
    ),
    Group.REGISTRATION: _LESS,
    Group.TIMED_OUT: Foreign(
        _SLURM,
        "Slurm switched the node on or rebooted it, and it did not register within ResumeTimeout.",
        "The BMC and the console: where does the boot stand still? systemctl status slurmd once it is up. A node "
        f"whose boot takes long needs a higher ResumeTimeout in slurm.conf. {_RESUME}",
    ),
    Group.REBOOT: Foreign(
        _SLURM,
        "Somebody asked for a reboot with scontrol reboot, and the node waits for it, or has just done it.",
        "scontrol show node NODE says who and when (Reason=... [who@when]). It ends by itself after the reboot; "
        f"scontrol cancel_reboot NODE takes it back. {_RESUME}",
    ),
    Group.BATCH: Foreign(
        _SLURM,
        "slurmd could not start a batch job here, or not end it (its processes hang).",
        "journalctl -u slurmd: a full disk of SlurmdSpoolDir (df -h), a file system that does not answer, a user "
        f"that the node does not know (id USER), processes that do not die. {_RESUME}",
    ),
    Group.POWER: Foreign(
        _SLURM,
        "A person asked for the node to be switched off (scontrol update State=POWER_DOWN_ASAP).",
        f"It ends by itself once the node is off. {_RESUME}",
    ),
    Group.DUPLICATE: Foreign(
        _SLURM,
        "slurmctld sent the node a job that slurmd still runs under the same number: slurmctld lost its state, or an "
        "earlier run of the job has not ended.",
        "scontrol listpids on the node; journalctl -u slurmd. End the processes of the older run first, or restart "
        f"slurmd. {_RESUME}",
    ),
    Group.SPOOL: Foreign(
        _SLURM,
        "SlurmdSpoolDir on the node has no room, so slurmd cannot start jobs.",
        f"df -h and df -i of SlurmdSpoolDir (scontrol show config | grep SlurmdSpoolDir); make room. {_RESUME}",
    ),
    Group.ADDRESS: Foreign(
        _SLURM,
        "slurmctld could not resolve the node's name when it read slurm.conf.",
        f"getent hosts NODE on slurmctld's host; NodeAddr in slurm.conf; then scontrol reconfigure. {_RESUME}",
    ),
    Group.INTERNAL: Foreign(
        _SLURM,
        "Slurm met an error of its own on this node: its core count differs from slurmctld's, or the switch plugin "
        "failed at a job's end.",
        f"journalctl -u slurmd and slurmctld's log around that time; restart slurmd. {_RESUME}",
    ),
}
_OF_OTHERS: tuple[tuple[str, Foreign], ...] = (
    (
        r"NHC: ",
        Foreign(
            "NHC's (LBNL Node Health Check)",
            "NHC, the HealthCheckProgram of this site, found what stands behind it. healthd leaves drain and words to "
            "it.",
            "Run nhc -d by hand on the node: it takes its own drains back (only those that begin with NHC:) at its "
            "next run that finds nothing. healthd check shows what healthd thinks of the node.",
        ),
    ),
    (
        LEMON.strip(),
        Foreign(
            "of healthd fleet lemons --apply, on the head node",
            "The node failed jobs much more often than others over weeks. No daemon set this drain, and none lifts it.",
            "healthd fleet lemons, where the store is, shows the evidence. Test the node under load, "
            f"repair or replace what it names, and resume it by hand. {_RESUME}",
        ),
    ),
)
_KNOWN = tuple((regex(f"(?:{pattern})"), foreign) for pattern, foreign in _OF_OTHERS)
SOMEBODYS = Foreign(
    "somebody's: not healthd's, and none that Slurm or NHC is known to write",
    "A person or a script of the site drained the node in their own words. healthd changes neither the words nor the "
    "drain, and never resumes such a node.",
    "scontrol show node NODE ends the Reason with [who@when]: ask them. healthd status says what healthd itself holds "
    "against the node. When they agree: scontrol update NodeName=NODE State=RESUME.",
)
PERHAPS_SOMEBODYS = Foreign(
    "either somebody's Reason, or a kernel line that no rule reads",
    "As a Reason: a person or a script of the site drained the node in their own words, and healthd never resumes such "
    "a node. As a line of the kernel log: it is none of the faults that healthd knows.",
    "If it is the Reason of a node (scontrol show node NODE ends it with [who@when]): ask them, and healthd status "
    "says what healthd itself holds against the node. Only then, and when they agree: scontrol update "
    "NodeName=NODE State=RESUME.",
)
NONE = Foreign(
    "nobody's",
    "The node has no Reason: it is not drained by anybody.",
    "Nothing. If it takes no jobs all the same: scontrol show node NODE has its State, healthd status what healthd "
    "knows of it.",
)


def of_another_version(more: str) -> Foreign:
    """A Reason with healthd's prefix, and a code that is not known here. `more`: what it may be, "" if nothing."""
    return Foreign(
        f"healthd's words, but no code of this version (a site's own check, or another version){more}",
        "A healthd drained the node for a condition that this one does not know: the node has a check of the site's "
        "own, or healthd has another version there.",
        "On the node itself: healthd explain with the same words, and healthd status. The healthd that set this drain "
        "lifts it when the condition has ended; do not resume the node by hand before that is known.",
    )


def known(reason: str) -> Foreign | None:
    """Return what a Reason means that is not a daemon's; None if it is neither Slurm's nor begins like another's.

    The Reason may be cut as `sinfo -R` does, or end with [who@when]."""
    words = regex(r" \[[^\[\]]*@[^\[\]]*\]").sub("", reason) if reason.endswith("]") else reason
    if group := group_of_shown(words):
        return _OF_SLURM[group]
    if found := next((foreign for pattern, foreign in _KNOWN if pattern.match(words)), None):
        return found
    is_rebooting = words.endswith((" : reboot issued", " : reboot complete"))
    return _OF_SLURM[Group.REBOOT] if is_rebooting else None
