"""The Slurm job of the process that a kernel line names."""

from __future__ import annotations

import dataclasses

from healthd.cgroup import job_in
from healthd.model import KernelEvent

STILL_THERE_SECONDS = 10.0  # after a line its process is asked for; later the number may be another's


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
