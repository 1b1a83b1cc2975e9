"""Reasons on a drained or down node that are not healthd's: whose they are, what they mean, and who lifts them. Pure.

Slurm's own: slurmctld's and slurmd's sources (node_mgr.c, node_scheduler.c, ping_nodes.c, job_mgr.c, slurmd/req.c,
power_save.c) and the man pages of sinfo and slurm.conf. NHC's begin with "NHC: " (LBNL's Node Health Check, nhc:
"MARK_OFFLINE", helpers/node-mark-offline).
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.slurm.reason import LEMON
from healthd.text import regex


class Foreign(NamedTuple):
    """`whose`: who wrote it; `meaning`; `todo`: what to look at, and what gives the node back."""

    whose: str
    meaning: str
    todo: str


_RESUME = "Then: scontrol update NodeName=NODE State=RESUME."
_SLURM = "Slurm's"
_LESS = Foreign(
    _SLURM,
    "slurmd found less on the node than slurm.conf says, when it registered: CPUs, memory, disk, or GPUs (gres).",
    "slurmd -C and slurmd -G on the node show what it finds; compare with its line in slurm.conf and with gres.conf. A "
    "GPU less: nvidia-smi -L, healthd check, journalctl -k | grep -i xid. Memory less: a module that failed (healthd "
    f"explain memory_size/less), or a number in slurm.conf that is too high. {_RESUME}",
)
_ROWS: tuple[tuple[str, Foreign], ...] = (
    (
        r"Not responding",
        Foreign(
            _SLURM,
            "slurmctld did not reach the node's slurmd for SlurmdTimeout, and set it DOWN.",
            "Is the machine up (BMC, ping), slurmd running (systemctl status slurmd), munge too, the clock right, the "
            "network there? journalctl -u slurmd -b. It comes back by itself where ReturnToService is 1 or 2 and "
            f"slurmd registers. {_RESUME}",
        ),
    ),
    (
        r"Node unexpectedly rebooted|Node silently failed",
        Foreign(
            _SLURM,
            "The node booted without Slurm having asked for it: it crashed, lost its power, or somebody rebooted it.",
            "Why: last -x, journalctl -b -1 -e (the end of the boot before), the BMC's event log (ipmitool sel elist). "
            "healthd events shows what healthd saw before it. ReturnToService = 2 would take such a node back without "
            f"being asked. {_RESUME}",
        ),
    ),
    (
        r"Kill task failed",
        Foreign(
            _SLURM,
            "Processes of a job did not end within UnkillableStepTimeout after SIGKILL: they hang in the kernel, in a "
            "driver or a file system that does not answer. Slurm writes this also over healthd's reason, and healthd "
            "knows such a drain as its own.",
            "healthd explain processes/unkillable. ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /D/' shows them, cat "
            "/proc/PID/stack where they hang: nvidia (healthd explain gpu_access/hang), nfs, lustre (the server). If "
            f"they never end: reboot. {_RESUME}",
        ),
    ),
    (
        r"Prolog error|Epilog error",
        Foreign(
            _SLURM,
            "A prolog or epilog on the node ended with an error. healthd's own prolog refuses a job where healthd "
            "wants the node drained: then healthd puts its own reason in the place of this one, or lifts it.",
            "journalctl -u slurmd around that time names the script; run it by hand as slurmd does. healthd status "
            f"says whether it was healthd's prolog, and why. {_RESUME}",
        ),
    ),
    (r"Low socket\*core|Low CPUs|Low RealMemory|Low TmpDisk|CoreSpec differ|gres/|Could not unpack gres data", _LESS),
    (r"RestrictedCoresPerGPU|Reported active features", _LESS),
    (
        r"ResumeTimeout|reboot timed out",
        Foreign(
            _SLURM,
            "Slurm switched the node on or rebooted it, and it did not register within ResumeTimeout.",
            "The BMC and the console: where does the boot stand still? systemctl status slurmd once it is up. A node "
            f"whose boot takes long needs a higher ResumeTimeout in slurm.conf. {_RESUME}",
        ),
    ),
    (
        r"reboot ASAP|Reboot ASAP|.*reboot (issued|requested|complete)",
        Foreign(
            _SLURM,
            "Somebody asked for a reboot with scontrol reboot, and the node waits for it, or has just done it.",
            "scontrol show node NODE says who and when (Reason=... [who@when]). It ends by itself after the reboot; "
            f"scontrol cancel_reboot NODE takes it back. {_RESUME}",
        ),
    ),
    (
        r"batch job complete failure",
        Foreign(
            _SLURM,
            "slurmd could not start a batch job here, or not end it (its processes hang).",
            "journalctl -u slurmd: a full disk of SlurmdSpoolDir (df -h), a file system that does not answer, a user "
            f"that the node does not know (id USER), processes that do not die. {_RESUME}",
        ),
    ),
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
_KNOWN = tuple((regex(f"(?:{pattern})"), foreign) for pattern, foreign in _ROWS)
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
    """What a Reason means that is not a daemon's; None if it begins like none that is known."""
    return next((foreign for pattern, foreign in _KNOWN if pattern.match(reason)), None)
