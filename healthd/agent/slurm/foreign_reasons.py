"""Reasons on a drained or down node that are not healthd's: origin, meaning, and how the drain ends. Pure.

Slurm's own reasons are in builtin_reasons.py. NHC's begin with "NHC: " (LBNL's Node Health Check, nhc: "MARK_OFFLINE",
helpers/node-mark-offline).
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.slurm.builtin_reasons import Group, copied_reason_group
from healthd.common.slurm.drain_reason import LEMON
from healthd.common.text import regex


class ForeignReason(NamedTuple):
    """`origin`: who set the Reason; `meaning`; `todo`: what to check, and how the node returns to service."""

    origin: str
    meaning: str
    todo: str


_RESUME = "Then: scontrol update NodeName=NODE State=RESUME."
_SLURM = "Slurm's"
_REGISTRATION = ForeignReason(
    _SLURM,
    "When slurmd registered, the node had less than slurm.conf requires: CPUs, memory, disk, or GPUs (gres).",
    "Run slurmd -C and slurmd -G on the node; compare with its line in slurm.conf and with gres.conf. If a GPU is "
    "missing: nvidia-smi -L, healthd check, journalctl -k | grep -i xid. If memory is missing: a failed module "
    f"(healthd explain memory_size/too_small), or a value in slurm.conf that is too high. {_RESUME}",
)
_SLURM_REASONS: dict[Group, ForeignReason] = {
    Group.NOT_RESPONDING: ForeignReason(
        _SLURM,
        "slurmctld could not reach the node's slurmd for SlurmdTimeout, and set the node DOWN.",
        "Check the machine (BMC, ping), slurmd (systemctl status slurmd), munge, the clock, and the network; then "
        "journalctl -u slurmd -b. The node returns by itself if ReturnToService is 1 or 2 and "
        f"slurmd registers. {_RESUME}",
    ),
    Group.REBOOTED: ForeignReason(
        _SLURM,
        "The node booted without a request by Slurm: it crashed, lost power, or was rebooted by an operator.",
        "Find the cause: last -x, journalctl -b -1 -e (end of the previous boot), the BMC's event log (ipmitool sel "
        "elist), healthd events (findings before the reboot). With ReturnToService = 2 Slurm would resume such a node "
        f"by itself. {_RESUME}",
    ),
    Group.UNKILLABLE: ForeignReason(
        _SLURM,
        "Processes of a job did not exit within UnkillableStepTimeout after SIGKILL: they hang in the kernel, in a "
        "driver or a file system that does not answer. Slurm also overwrites healthd's own reason with this one; "
        "healthd still recognises its drain.",
        "Run healthd explain processes/unkillable. ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /D/' lists the processes, "
        "cat /proc/PID/stack shows where each one hangs: nvidia (healthd explain gpu_access/hang), nfs, lustre (the "
        f"server). If they never exit: reboot. {_RESUME}",
    ),
    Group.PROLOG_EPILOG: ForeignReason(
        _SLURM,
        "A prolog or epilog on the node failed. healthd's own prolog refuses jobs while healthd wants to drain "
        "the node; healthd then replaces this reason with its own, or lifts the drain.",
        "Find the script in journalctl -u slurmd around that time, and run it by hand as slurmd does. healthd status "
        f"shows if it was healthd's prolog, and why. {_RESUME}",
    ),
    Group.REGISTRATION: _REGISTRATION,
    Group.TIMED_OUT: ForeignReason(
        _SLURM,
        "Slurm powered the node on or rebooted it, and the node did not register within ResumeTimeout.",
        "Check on the BMC and the console where the boot stops. Run systemctl status slurmd once the node is up. If "
        f"the boot is slow, set a higher ResumeTimeout in slurm.conf. {_RESUME}",
    ),
    Group.REBOOT: ForeignReason(
        _SLURM,
        "A reboot was requested with scontrol reboot; it is pending or has just finished.",
        "scontrol show node NODE shows the user and the time (Reason=... [user@time]). It ends by itself after the "
        f"reboot; scontrol cancel_reboot NODE cancels it. {_RESUME}",
    ),
    Group.BATCH: ForeignReason(
        _SLURM,
        "slurmd could not start or end a batch job on this node (its processes may hang).",
        "Check journalctl -u slurmd for: a full disk of SlurmdSpoolDir (df -h), a file system that does not answer, a "
        f"user who is unknown on the node (id USER), processes that do not exit. {_RESUME}",
    ),
    Group.POWER: ForeignReason(
        _SLURM,
        "An operator requested a power-off (scontrol update State=POWER_DOWN_ASAP).",
        f"It ends by itself once the node is off. {_RESUME}",
    ),
    Group.DUPLICATE: ForeignReason(
        _SLURM,
        "slurmctld sent the node a job whose number slurmd still runs: slurmctld lost its state, or an "
        "earlier run of the job has not ended.",
        "Run scontrol listpids on the node; check journalctl -u slurmd. Kill the processes of the older run, or "
        f"restart slurmd. {_RESUME}",
    ),
    Group.SPOOL: ForeignReason(
        _SLURM,
        "SlurmdSpoolDir on the node is full, so slurmd cannot start jobs.",
        f"Check df -h and df -i of SlurmdSpoolDir (scontrol show config | grep SlurmdSpoolDir); free space. {_RESUME}",
    ),
    Group.ADDRESS: ForeignReason(
        _SLURM,
        "slurmctld could not resolve the node's name when it read slurm.conf.",
        "Run getent hosts NODE on slurmctld's host; check NodeAddr in slurm.conf; then scontrol reconfigure. "
        f"{_RESUME}",
    ),
    Group.INTERNAL: ForeignReason(
        _SLURM,
        "Internal error of Slurm on this node: its core count differs from slurmctld's, or the switch plugin "
        "failed at the end of a job.",
        f"Check journalctl -u slurmd and slurmctld's log around that time; restart slurmd. {_RESUME}",
    ),
}
_OTHER_REASONS: tuple[tuple[str, ForeignReason], ...] = (
    (
        r"NHC: ",
        ForeignReason(
            "NHC's (LBNL Node Health Check)",
            "NHC, the HealthCheckProgram of this site, found the problem in the text. healthd does not change this "
            "drain or its reason.",
            "Run nhc -d by hand on the node: NHC lifts its own drains (only those that begin with NHC:) at its "
            "next run without a problem. healthd check shows healthd's result for the node.",
        ),
    ),
    (
        LEMON.strip(),
        ForeignReason(
            "of healthd fleet lemons --apply, on the head node",
            "The node failed jobs much more often than other nodes, over weeks. No daemon sets or lifts this drain.",
            "healthd fleet lemons, on the host with the store, shows the evidence. Test the node under load, "
            f"repair or replace the parts that it names, and resume the node by hand. {_RESUME}",
        ),
    ),
)
_COMPILED = tuple((regex(f"(?:{pattern})"), foreign) for pattern, foreign in _OTHER_REASONS)
SITE_REASON = ForeignReason(
    "a person or a script: neither healthd nor Slurm nor NHC writes this text",
    "A person or a script of the site drained the node. healthd changes neither the reason nor the "
    "drain, and never resumes the node.",
    "scontrol show node NODE ends the Reason with [user@time]: ask that user. healthd status shows healthd's own "
    "conditions on the node. When the user agrees: scontrol update NodeName=NODE State=RESUME.",
)
SITE_REASON_OR_KERNEL_LINE = ForeignReason(
    "either a Reason by a person or a script, or a kernel line that no rule recognises",
    "As a Reason: a person or a script of the site drained the node, and healthd never resumes such "
    "a node. As a line of the kernel log: healthd has no rule for it.",
    "If it is the Reason of a node (scontrol show node NODE ends it with [user@time]): ask that user, and check "
    "healthd status for healthd's own conditions. When the user agrees: scontrol update "
    "NodeName=NODE State=RESUME.",
)
NO_REASON = ForeignReason(
    "none",
    "The node has no Reason: it is not drained.",
    "No action. If the node gets no jobs all the same: check its State (scontrol show node NODE) and healthd status.",
)


def unknown_code(more: str) -> ForeignReason:
    """Return the meaning of a Reason with healthd's prefix and an unknown code. `more`: a hint, "" = none."""
    return ForeignReason(
        f"healthd, but with a code that this version does not have (a site's own check, or another version){more}",
        "healthd drained the node for a condition that this version does not have: the node has a site's "
        "own check, or another version of healthd.",
        "Run healthd explain with the same text on the node itself, and healthd status. The healthd that set this "
        "drain lifts it when the condition has ended; do not resume the node by hand before that.",
    )


def find_meaning(reason: str) -> ForeignReason | None:
    """Return the meaning of a Reason of Slurm or another tool; None for any other text.

    The Reason may be truncated as by `sinfo -R`, or end with [user@time].
    """
    text = regex(r" \[[^\[\]]*@[^\[\]]*\]").sub("", reason) if reason.endswith("]") else reason
    if group := copied_reason_group(text):
        return _SLURM_REASONS[group]
    if found := next((foreign for pattern, foreign in _COMPILED if pattern.match(text)), None):
        return found
    is_rebooting = text.endswith((" : reboot issued", " : reboot complete"))
    return _SLURM_REASONS[Group.REBOOT] if is_rebooting else None
