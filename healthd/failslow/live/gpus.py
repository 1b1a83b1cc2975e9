"""Which GPU a process of a job works on: by the device files that it has open, and else by its own word.

CUDA opens the device file of each GPU that a process may use, so that one with several says nothing alone: then the
local rank counts, which is the job's word, among those. The numbers are in /proc/driver/nvidia/gpus/PCI/information as
"Device Minor".
"""

from __future__ import annotations

from healthd.common.text import regex
from healthd.host.host import Host
from healthd.host.job_processes import open_gpus

DRIVER = "/proc/driver/nvidia/gpus"
_MINOR = regex(r"(?m)^Device Minor:\s*([0-9]{1,4})\s*$")


def by_minor(host: Host) -> dict[int, str]:
    """N of /dev/nvidiaN -> PCI address. {} without the driver."""
    found = {}
    try:
        names = host.list(DRIVER)
    except OSError:
        return {}
    for pci in names:
        minor = _MINOR.search(host.told(f"{DRIVER}/{pci}/information"))
        if minor:
            found[int(minor[1])] = pci.lower()
    return found


def gpu_of(host: Host, pid: int, job: str, local_rank: int) -> str:
    """The PCI address of its GPU, "" if it cannot be told."""
    pci = by_minor(host)
    held, _ = open_gpus({pid: job}, host.root or "/")
    minors = sorted(held.get(job, frozenset()) & pci.keys())
    if len(minors) == 1:
        return pci[minors[0]]
    return pci[minors[local_rank]] if 0 <= local_rank < len(minors) else ""
