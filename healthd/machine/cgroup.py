"""Which Slurm job a process belongs to: by the cgroup that slurmd put it into."""

from __future__ import annotations

import re

# cgroup/v2: 0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0 (NODE_slurmstepd.scope with several slurmds)
# cgroup/v1: 9:devices:/slurm/uid_1000/job_123/step_0/task_0 (/slurm_NODE/...)
# A job may give any names to cgroups below its own: the outermost counts.
_JOB = re.compile(r"^[^/\n]*:(?:/[^/\n]*){0,8}?/[^/\n]*slurm[^/\n]*/(?:uid_[0-9]+/)?job_([0-9]{1,10})(?=/|$)", re.M)


def job_in(cgroup: str) -> str:
    """The job in the text of /proc/PID/cgroup; "" if it names none."""
    match = _JOB.search(cgroup)
    return match[1] if match else ""
