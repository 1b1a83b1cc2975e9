"""Effect of a fault on a job that ended at about the same time. Checks declare the effect in `CAUSES`, `ENDS_JOB` and
`PERMANENT`.

`healthd fleet attribution` and the answers that count hardware failures use these declarations. scripts/fleet_codes.py
writes them to a table, because those commands do not import the checks.
"""

from __future__ import annotations

from enum import Enum


class FailureCause(str, Enum):
    """The part of the system whose fault ended a job. healthd/fleet/answers/causes.py defines each cause's domain and
    rank."""

    PCIE = "pcie"
    IB_LINK = "ib_link"
    GPU_LOST = "gpu_lost"
    NVLINK = "nvlink"
    GPU_MEMORY = "gpu_memory"
    GSP = "gsp"
    GPU = "gpu"
    DISK = "disk"
    MOUNT = "mount"
    MEMORY = "memory"
    POWER = "power"
    KERNEL = "kernel"
    DRIVER = "driver"
    ETHERNET = "ethernet"
    SERVICES = "services"
    DISK_SPACE = "disk_space"
    OTHER = "other"
    USER = "user"


class EndsJob(str, Enum):
    """Conditions under which a fault ends a job.

    ALWAYS       the fault ends jobs, even if the site's settings lower its severity to a warning; its usual severity
                 drains or requeues
    IF_ISOLATES  if the condition is degraded or critical: the default
    IF_NAMED     if the condition names the job (Xid 94: "only the process that used the memory was stopped")
    NEVER        the fault only slows down or delays jobs, or is bookkeeping
    """

    ALWAYS = "always"
    IF_ISOLATES = "if_isolates"
    IF_NAMED = "if_named"
    NEVER = "never"
