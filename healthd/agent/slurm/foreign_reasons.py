"""Origin and meaning of Reasons that healthd did not set, and how these drains end. The functions are pure.

Slurm's own Reasons are in builtin_reasons.py. Reasons from NHC begin with "NHC: " (LBNL's Node Health Check, nhc:
"MARK_OFFLINE", helpers/node-mark-offline).
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.slurm.builtin_reasons import Group, copied_reason_group
from healthd.common.slurm.drain_reason import LEMON
from healthd.common.text import regex


class ForeignReason(NamedTuple):
    """Explanation of a Reason. `origin` is the program that set the Reason. `todo` says what to check and how to return
    the node to service.
    """

    origin: str
    meaning: str
    todo: str


_RESUME = "Then run scontrol update NodeName=NODE State=RESUME."
_SLURM = "Slurm"
_REGISTRATION = ForeignReason(
    _SLURM,
    "When slurmd registered, the node had less than slurm.conf requires: CPUs, memory, disk, or GPUs (gres).",
    "Run slurmd -C and slurmd -G on the node, and compare the output with the node's line in slurm.conf and with "
    "gres.conf. If a GPU is missing, run nvidia-smi -L, healthd check, and journalctl -k | grep -i xid. If memory is "
    "missing, either a memory module failed (healthd explain memory_size/too_small) or the value in slurm.conf is too "
    f"high. {_RESUME}",
)
_SLURM_REASONS: dict[Group, ForeignReason] = {
    Group.NOT_RESPONDING: ForeignReason(
        _SLURM,
        "slurmctld could not reach the node's slurmd for SlurmdTimeout and set the node to DOWN.",
        "Check the machine (BMC, ping), slurmd (systemctl status slurmd), munge, the clock and the network. Then read "
        "journalctl -u slurmd -b. The node returns to service by itself if ReturnToService is 1 or 2 and slurmd "
        f"registers. {_RESUME}",
    ),
    Group.REBOOTED: ForeignReason(
        _SLURM,
        "The node rebooted without a request from Slurm. It crashed, lost power, or was rebooted by an operator.",
        "To find the cause, check last -x, journalctl -b -1 -e (end of the previous boot), the BMC's event log "
        "(ipmitool sel elist) and healthd events (findings before the reboot). With ReturnToService = 2, Slurm would "
        f"resume such a node by itself. {_RESUME}",
    ),
    Group.UNKILLABLE: ForeignReason(
        _SLURM,
        "A job's processes did not exit within UnkillableStepTimeout after SIGKILL. They hang in the kernel, in a "
        "driver or in a file system that does not respond. Slurm sets this Reason even over healthd's own Reason; "
        "healthd still recognises its drain.",
        "Run healthd explain processes/unkillable. ps -eo pid,stat,wchan:32,cmd | awk '$2 ~ /D/' lists the processes, "
        "and cat /proc/PID/stack shows where each one hangs. For nvidia, see healthd explain gpu_access/hang. For nfs "
        f"or lustre, check the file server. If the processes never exit, reboot. {_RESUME}",
    ),
    Group.PROLOG_EPILOG: ForeignReason(
        _SLURM,
        "A prolog or epilog on the node failed. healthd's own prolog rejects jobs while healthd is about to drain the "
        "node. healthd then replaces this Reason with its own or lifts the drain.",
        "Find the script in journalctl -u slurmd around that time, and run it by hand in the same way as slurmd. "
        f"healthd status shows whether it was healthd's prolog, and why. {_RESUME}",
    ),
    Group.REGISTRATION: _REGISTRATION,
    Group.TIMED_OUT: ForeignReason(
        _SLURM,
        "Slurm powered on or rebooted the node, but the node did not register within ResumeTimeout.",
        "Use the BMC and the console to see where the boot stops. Run systemctl status slurmd once the node is up. If "
        f"the boot is slow, set a higher ResumeTimeout in slurm.conf. {_RESUME}",
    ),
    Group.REBOOT: ForeignReason(
        _SLURM,
        "A reboot was requested with scontrol reboot. It is pending or has just finished.",
        "scontrol show node NODE shows the user and the time (Reason=... [user@time]). This state ends by itself after "
        f"the reboot; scontrol cancel_reboot NODE cancels the request. {_RESUME}",
    ),
    Group.BATCH: ForeignReason(
        _SLURM,
        "slurmd could not start or end a batch job on this node (the job's processes may hang).",
        "Read journalctl -u slurmd. Possible causes are a full disk in SlurmdSpoolDir (df -h), a file system that does "
        f"not respond, a user who does not exist on the node (id USER), and processes that do not exit. {_RESUME}",
    ),
    Group.POWER: ForeignReason(
        _SLURM,
        "An operator requested a power-off (scontrol update State=POWER_DOWN_ASAP).",
        f"This state ends by itself once the node is off. {_RESUME}",
    ),
    Group.DUPLICATE: ForeignReason(
        _SLURM,
        "slurmctld sent the node a job whose id slurmd is still running. slurmctld lost its state, or an earlier run "
        "of the job has not ended.",
        "Run scontrol listpids on the node, and check journalctl -u slurmd. Kill the earlier run's processes, or "
        f"restart slurmd. {_RESUME}",
    ),
    Group.SPOOL: ForeignReason(
        _SLURM,
        "SlurmdSpoolDir on the node is full, so slurmd cannot start jobs.",
        "Check df -h and df -i for SlurmdSpoolDir (scontrol show config | grep SlurmdSpoolDir), and free some space. "
        f"{_RESUME}",
    ),
    Group.ADDRESS: ForeignReason(
        _SLURM,
        "slurmctld could not resolve the node's name when it read slurm.conf.",
        "Run getent hosts NODE on slurmctld's host, and check NodeAddr in slurm.conf. Then run scontrol reconfigure. "
        f"{_RESUME}",
    ),
    Group.INTERNAL: ForeignReason(
        _SLURM,
        "Slurm had an internal error on this node. The node's core count differs from slurmctld's, or the switch "
        "plugin failed at the end of a job.",
        f"Check journalctl -u slurmd and slurmctld's log around that time, and restart slurmd. {_RESUME}",
    ),
}
_OTHER_REASONS: tuple[tuple[str, ForeignReason], ...] = (
    (
        r"NHC: ",
        ForeignReason(
            "NHC (LBNL Node Health Check)",
            "NHC, this site's HealthCheckProgram, found the problem in the text. healthd does not change this drain or "
            "its Reason.",
            "Run nhc -d by hand on the node. NHC lifts its own drains (only those that begin with NHC:) after its next "
            "run without a problem. healthd check shows healthd's result for the node.",
        ),
    ),
    (
        LEMON.strip(),
        ForeignReason(
            "the command healthd fleet lemons --apply, on the head node",
            "Over weeks, the node failed jobs much more often than other nodes. No daemon sets or lifts this drain.",
            "healthd fleet lemons, on the host with the store, shows the evidence. Test the node under load, repair or "
            f"replace the suspect parts, and resume the node by hand. {_RESUME}",
        ),
    ),
)
_COMPILED = tuple((regex(f"(?:{pattern})"), foreign) for pattern, foreign in _OTHER_REASONS)
SITE_REASON = ForeignReason(
    "a person or a script (neither healthd nor Slurm nor NHC sets this text)",
    "A person or a site script drained the node. healthd does not change the Reason or the drain, and never resumes "
    "the node.",
    "In scontrol show node NODE, the Reason ends with [user@time]. Ask that user. healthd status shows healthd's own "
    "conditions on the node. Once the user agrees, run scontrol update NodeName=NODE State=RESUME.",
)
SITE_REASON_OR_KERNEL_LINE = ForeignReason(
    "either a Reason set by a person or a script, or a kernel line that no rule recognises",
    "If this is a Reason, a person or a site script drained the node, and healthd never resumes such a node. If it is "
    "a kernel log line, healthd has no rule for it.",
    "If it is a node's Reason, scontrol show node NODE shows [user@time] after it. Ask that user, and check healthd "
    "status for healthd's own conditions. Once the user agrees, run scontrol update NodeName=NODE State=RESUME.",
)
NO_REASON = ForeignReason(
    "none",
    "The node has no Reason, so it is not drained.",
    "No action needed. If the node still gets no jobs, check its State (scontrol show node NODE) and healthd status.",
)


def unknown_code(more: str) -> ForeignReason:
    """Return the meaning of a Reason with healthd's prefix and an unknown code. `more` is a hint, or ""."""
    return ForeignReason(
        f"healthd, but with a code that this version does not have (a site check, or another version){more}",
        "healthd drained the node for a condition that this version does not have. The node has a site check or runs "
        "another version of healthd.",
        "Run healthd explain with the same text, and healthd status, on the node itself. The healthd that set this "
        "drain lifts it when the condition has ended. Do not resume the node by hand before that.",
    )


def find_meaning(reason: str) -> ForeignReason | None:
    """Return the meaning of a Reason from Slurm or another known tool, or None for any other text.

    The Reason may be truncated, as in `sinfo -R`, or end with [user@time].
    """
    text = regex(r" \[[^\[\]]*@[^\[\]]*\]").sub("", reason) if reason.endswith("]") else reason
    if group := copied_reason_group(text):
        return _SLURM_REASONS[group]
    if found := next((foreign for pattern, foreign in _COMPILED if pattern.match(text)), None):
        return found
    is_rebooting = text.endswith((" : reboot issued", " : reboot complete"))
    return _SLURM_REASONS[Group.REBOOT] if is_rebooting else None
