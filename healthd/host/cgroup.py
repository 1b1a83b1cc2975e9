"""Find a process's Slurm job, by the cgroup in which slurmd placed the process.

v2: 0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0
v1: 9:devices:/slurm/uid_1000/job_123/step_0/task_0

Sources: Slurm's cgroup_v2.c (_set_int_cg_ns: SLICE/slurmstepd.scope; NODE_slurmstepd.scope if several slurmds may run;
the slice is system.slice, or CgroupSlice in cgroup.conf from 25.05 on) and interfaces/cgroup.c (v1: /slurm,
/slurm_NODE). CgroupMountpoint is not part of these paths. If slurmd runs in a container, the container's cgroup comes
before them.
"""

from __future__ import annotations

import re

from healthd.common.text import regex

# Users may choose names only below a cgroup that systemd delegated to them: user.slice, or a service with User= and
# Delegate=. Nothing below one of these belongs to a job. (systemd-nspawn is a service, and root's container.)
_NO_USERS = r"(?!user[-/.@]|(?!systemd-nspawn@)[^/\n]*\.service/)"
# A job may choose any names for cgroups below its own, so the outermost match is used.
_JOB = regex(
    r"^[0-9]{1,10}:[^:/\n]*:"
    rf"(?:/{_NO_USERS}[^/\n]*){{0,8}}?"
    rf"/{_NO_USERS}(?:slurm(?:_[^/\n]+)?/uid_[0-9]{{1,10}}|[^/\n]+\.slice/(?:[^/\n]+_)?slurmstepd\.scope)"
    r"/job_([0-9]{1,10})(?=/|$)",
    re.M,
)


def job_in(cgroup: str) -> str:
    """Return the job in the text of /proc/PID/cgroup, or "" if there is none."""
    match = _JOB.search(cgroup)
    return match[1] if match else ""
