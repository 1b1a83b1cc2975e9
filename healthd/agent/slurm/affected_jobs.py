"""Jobs that a fault hits. Pure.

fault                                                      victims, on a node with gres/gpu in Slurm
---------------------------------------------------------  --------------------------------------------------------
of one GPU (Xid 79, its memory, its link)                  the jobs on that GPU
of the NVSwitches or the fabric; of the driver, or of a    all jobs with a GPU
GPU that the inventory does not have
of the host (memory, disks, mounts, network, PCIe ports)   all jobs

A job is on the GPUs that Slurm allocated to it, and on those that its processes have open. If a job's GPUs are unknown,
it counts as hit. On a node without gres/gpu in Slurm every job is hit, because Slurm allocates no GPUs there. If the
number of the node's GPUs in Slurm could not be read, a job is hit only if it is proven to be on the GPU: an unreadable
table never causes a requeue of an unaffected job.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from healthd.common.model import Condition, Gpu, PciDevice
from healthd.common.values import Value

# Checks of parts that all GPUs of a node share, although the condition may name one GPU.
SHARED_BY_GPUS = frozenset({"sxid", "gpu_fabric"})


class Reach(Value, frozen=True):
    """Jobs that a fault can hit: all jobs, or the jobs on the GPU `pci` ("" = on any GPU)."""

    everybody: bool = False
    pci: str = ""


EVERYBODY, ANY_GPU = Reach(everybody=True), Reach()


class OnGpus(Value, frozen=True):
    """GPUs of a job, by PCI address.

    has_allocation  Slurm allocated GPUs to it (None: not known); `allocated`: which ones, None: not known
    opened          GPUs that its processes have open; a missing one proves nothing
    is_complete     all its processes were inspected
    """

    has_given: bool | None = None
    given: frozenset[str] | None = None
    has_open: frozenset[str] = frozenset()
    all_seen: bool = False


def reach(cause: Condition, gpus: Collection[Gpu], devices: Sequence[PciDevice]) -> Reach:
    """Return the reach of a fault. `gpus`: all GPUs that NVML has shown, also lost ones.

    The part decides first: a PCIe error of a GPU belongs to that GPU, one of a port to the host.
    """
    kind = next((device.kind for device in devices if device.pci == cause.subject), "")
    if cause.check in SHARED_BY_GPUS or kind == "nvswitch":
        return ANY_GPU
    if any(gpu.pci == cause.subject for gpu in gpus):
        return Reach(pci=cause.subject)
    return ANY_GPU if kind == "gpu" or cause.check.startswith("gpu_") else EVERYBODY


def is_hit(fault: Reach, job: OnGpus, node_gpus: int | None) -> bool:
    """Return True if the fault hits the job. `node_gpus`: the node's gres/gpu in Slurm (not 0), None = not known."""
    if node_gpus is None:
        return is_proven_hit(fault, job)
    if fault.everybody or job.has_given is None:
        return True
    if not job.has_given:
        return bool(job.has_open) or not job.all_seen
    # A job that opened other GPUs does not follow Slurm's allocation.
    if not fault.pci or job.given is None or not job.has_open <= job.given:
        return True
    return fault.pci in job.given


def is_proven_hit(fault: Reach, job: OnGpus) -> bool:
    """Return True if the known GPUs of the job prove that the fault hits it."""
    if fault.everybody:
        return True
    if not fault.pci:
        return bool(job.has_given or job.has_open)
    return fault.pci in job.has_open or fault.pci in (job.given or ())


def is_hit_for_sure(fault: Reach, job: OnGpus, node_gpus: int | None) -> bool:
    """Return True if the fault hits the job regardless of its allocation. `node_gpus`: as for `is_hit`, 0 = none."""
    return fault.everybody or node_gpus == 0 or fault.pci in job.has_open


def on_which(job: OnGpus) -> str:
    """Return why a GPU fault does not hit the job."""
    if not job.has_given:
        return "has no GPU"
    gpus = sorted(job.given or ())
    return f"has GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}, which the fault did not hit"
