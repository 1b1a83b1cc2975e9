"""Reasons that slurmctld, slurmd and slurmstepd themselves set on a node. They are matched in full.

Source: github.com/SchedMD/slurm 22.05.8, 24.11.5 and 26.05.3, the callers of drain_nodes(), set_node_down_ptr(),
set_node_reason() and stepd_drain_node(): src/slurmctld/agent.c, job_mgr.c, node_mgr.c, ping_nodes.c, power_save.c,
proc_req.c, read_config.c; src/slurmd/slurmd/cred_context.c, src/slurmd/slurmstepd/mgr.c, step_terminate_monitor.c;
src/interfaces/gres.c (src/common/gres.c in 22.05); src/plugins/select/cons_tres/job_test.c.

A reason that only begins like one of these is the site's own: "Prolog error: 571 xid 13 errors".
"""

from __future__ import annotations

import enum

from healthd.common.text import regex

PROLOG_ERROR = "Prolog error"  # for any prolog, including healthd's
# Suffixes that Slurm appends to any reason at a reboot, and from 24.11 on also if a node goes down by itself.
APPENDED = (
    *(" : reboot issued", " : reboot timed out", " : reboot complete"),
    *(" : Not responding", " : ResumeTimeout reached"),
)
# Suffixes of a node that Slurm has set DOWN after a reboot, and whose drain Slurm may have removed.
REMOVED_DRAIN = (" : reboot timed out", " : reboot complete")
SINFO_R_BYTES = 20  # length of a Reason in `sinfo -R`


class Group(enum.Enum):
    """A group of Slurm's own reasons that have the same meaning."""

    NOT_RESPONDING = "not responding"
    REBOOTED = "rebooted"
    UNKILLABLE = "unkillable"
    PROLOG_EPILOG = "prolog or epilog"
    REGISTRATION = "registration"
    TIMED_OUT = "timed out"
    REBOOT = "reboot requested"
    POWER = "power saving"
    BATCH = "batch job"
    DUPLICATE = "duplicate job id"
    SPOOL = "spool directory"
    ADDRESS = "no address"
    INTERNAL = "internal"


# One problem at a registration (node_mgr.c: validate_node_specs(); gres.c: reason_down).
_NUMBERS = r"\([0-9]+ (?:<|!=) [0-9]+\)"
_REGISTRATION = "|".join(
    (
        r"[\w/]+(?::[^ ,]+)? count (?:reported lower than configured|too low|changed and jobs are using them) "
        rf"{_NUMBERS}",
        r"[\w/]+ type changed and jobs are using them",
        r"[\w/]+ type \([^()]*\) reported but not configured",
        r"[\w/]+ GRES (?:autodetected core affinity|core specification) \S+ (?:on|for) node \S+ doesn't match socket "
        r"boundaries\. \(Socket [0-9]+ is cores [0-9]+-[0-9]+\)"
        r"(?:\. See Socket Affinity section of gres\.html for more information\.)?",
        r"Invalid GRES Links value [^\n]+",
        r"Could not unpack gres data",
        r"Low socket\*core\*thread count",
        r"Low CPUs",
        r"Low RealMemory(?: \(reported:[0-9]+ < [0-9.]+% of configured:[0-9]+\))?",
        r"Low TmpDisk",
        r"CoreSpec differ",
        r"RestrictedCoresPerGPU=[0-9]+ but no gpus on node \S+",
        r"RestrictedCoresPerGPU=[0-9]+ but the gpus given don't have any topology on node \S+\.",
        r"RestrictedCoresPerGPU: We can't restrict [0-9]+ core\(s\) per gpu\. [^\n]+ that many unique cores "
        r"\([0-9]+\)\.",
        r"Reported active features \([^()]*\) are not a superset of currently active changeable features \([^()]*\)",
        r"Failed to parse dynamic_conf nodeline",
        r"Failed to set topology '[^']*'",
    )
)
_PATTERNS = {
    Group.NOT_RESPONDING: r"Not responding",
    Group.REBOOTED: r"Node unexpectedly rebooted|Node silently failed and came back",
    Group.UNKILLABLE: r"Kill task failed(?: \(JobId=[^()]*\))?",
    Group.PROLOG_EPILOG: r"Prolog error|Epilog error|Prolog/Epilog failure|Job env setup error",
    Group.REGISTRATION: rf"(?:{_REGISTRATION})(?:, (?:{_REGISTRATION}))*",
    Group.TIMED_OUT: r"ResumeTimeout reached|reboot timed out",
    Group.REBOOT: r"[Rr]eboot ASAP|reboot requested|reboot issued|reboot complete",
    Group.POWER: r"POWER_DOWN_ASAP",
    Group.BATCH: r"batch job complete failure|Job step not running(?: \(JobId=[^()]*\))?",
    Group.DUPLICATE: r"Duplicate jobid",
    Group.SPOOL: r"SlurmdSpoolDir is full",
    Group.ADDRESS: r"NO NETWORK ADDRESS FOUND",
    Group.INTERNAL: r"Bad core count|switch_g_job_postfini failed",
}
_COMPILED = {group: regex(pattern) for group, pattern in _PATTERNS.items()}
# Beginnings of the reasons that do not fit into `sinfo -R`.
_TRUNCATED = (
    ("Node unexpectedly rebooted", Group.REBOOTED),
    ("Node silently failed and came back", Group.REBOOTED),
    ("Kill task failed (JobId=", Group.UNKILLABLE),
    ("Prolog/Epilog failure", Group.PROLOG_EPILOG),
    ("ResumeTimeout reached", Group.TIMED_OUT),
    ("POWER_DOWN_ASAP", Group.POWER),
    ("batch job complete failure", Group.BATCH),
    ("Job step not running (JobId=", Group.BATCH),
    ("SlurmdSpoolDir is full", Group.SPOOL),
    ("NO NETWORK ADDRESS FOUND", Group.ADDRESS),
    ("switch_g_job_postfini failed", Group.INTERNAL),
    ("Could not unpack gres data", Group.REGISTRATION),
    ("Low socket*core*thread count", Group.REGISTRATION),
    ("Low RealMemory (reported:", Group.REGISTRATION),
    ("Reported active features (", Group.REGISTRATION),
    ("RestrictedCoresPerGPU", Group.REGISTRATION),
    ("Failed to parse dynamic_conf nodeline", Group.REGISTRATION),
)
# Reasons that an operator's command sets.
_REQUESTED = frozenset({Group.REBOOT, Group.POWER})


def strip_appended(reason: str) -> str:
    """Return the reason without the suffixes that Slurm appended."""
    while reason.endswith(APPENDED):
        reason = reason[: reason.rindex(" : ")]
    return reason


def reason_group(reason: str) -> Group | None:
    """Return the group that a complete Slurm reason belongs to, or None. Appended suffixes are ignored."""
    text = strip_appended(reason)
    return next((group for group, pattern in _COMPILED.items() if pattern.fullmatch(text)), None)


def copied_reason_group(text: str) -> Group | None:
    """Return the group that a copied reason belongs to. The reason may be complete or truncated by `sinfo -R`."""
    found = reason_group(text)
    if found or len(text) != SINFO_R_BYTES:
        return found
    if regex(r"gres/[\w:.-]+ (?:count|type) [ \w(<)]*").fullmatch(text + " "):
        return Group.REGISTRATION
    return next(
        (group for full_text, group in _TRUNCATED if full_text.startswith(text) or text.startswith(full_text)), None
    )


def is_set_by_slurm(reason: str) -> bool:
    """Return True if Slurm set this reason by itself, without an operator's command."""
    group = reason_group(reason)
    return group is not None and group not in _REQUESTED


def replaces_drain_reason(reason: str) -> bool:
    """Return True if Slurm may replace a drained node's reason with this one.

    slurmstepd replaces the reason if a task has survived SIGKILL for UnkillableStepTimeout. From 24.11 on, slurmctld
    replaces it if a node registers with fewer resources than slurm.conf has. "Prolog error" and "Epilog error" do not
    replace a drained node's reason.
    """
    return reason_group(reason) in (Group.UNKILLABLE, Group.REGISTRATION)
