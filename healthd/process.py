"""Which Slurm job a process belongs to: by the cgroup that slurmd put it into."""

from __future__ import annotations

import dataclasses
import re

from healthd.model import KernelEvent

STILL_THERE_SECONDS = 10.0  # after a line its process is asked for; later the number may be another's

# cgroup/v2: 0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0 (NODE_slurmstepd.scope with several slurmds)
# cgroup/v1: 9:devices:/slurm/uid_1000/job_123/step_0/task_0 (/slurm_NODE/...)
# A job may name cgroups below its own as it likes: the outermost counts.
_JOB = re.compile(r"^[^/\n]*:(?:/[^/\n]*){0,8}?/[^/\n]*slurm[^/\n]*/(?:uid_\d+/)?job_(\d{1,10})(?=/|$)", re.M)


def job_in(cgroup: str) -> str:
    """The job in the text of /proc/PID/cgroup, "" where there is none."""
    match = _JOB.search(cgroup)
    return match[1] if match else ""


def with_job(event: KernelEvent, root: str, now: float) -> KernelEvent:
    """`event` with the job of its process in the field "job", if the process is still there. A read of /proc cannot
    hang."""
    known = any(name == "job" for name, _ in event.fields)
    if event.pid is None or event.history or known or now - event.time > STILL_THERE_SECONDS:
        return event
    try:
        with open(f"{root.rstrip('/')}/proc/{event.pid}/cgroup", encoding="utf-8", errors="replace") as file:
            job = job_in(file.read(65536))
    except OSError:
        return event
    return dataclasses.replace(event, fields=(*event.fields, ("job", job))) if job else event
