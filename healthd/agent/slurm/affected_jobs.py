"""Which jobs a fault hits. Pure.

the fault                                                  its victims, on a node with gres/gpu in Slurm
---------------------------------------------------------  --------------------------------------------------------
of one GPU (Xid 79, its memory, its link)                  the jobs on that GPU
of the NVSwitches, of the fabric; of the driver, or of a   all jobs with a GPU
GPU that the inventory does not know
of the host (memory, disks, mounts, network, PCIe ports)   all jobs

A job is on the GPUs that Slurm gave it, and on those that its processes have open. What is not known of a job counts as
a hit. On a node without gres/gpu in Slurm every job is hit, because there Slurm gives no GPU to a job. If the number of
the node's GPUs in Slurm could not be read, only a job that is proven to be on the GPU is hit: a job that the fault did
not touch is never requeued because of a table that healthd failed to read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from healthd.common.model import Condition, Gpu, PciDevice
from healthd.common.values import Value

# What all GPUs of a node share, though the part that is named may be one of them.
SHARED_BY_GPUS = frozenset({"sxid", "gpu_fabric"})


class Reach(Value, frozen=True):
    """Whom a fault can hit. `everybody`: all jobs. Else the jobs on the GPU `pci`; "" = on any GPU."""

    everybody: bool = False
    pci: str = ""


EVERYBODY, ANY_GPU = Reach(everybody=True), Reach()


class OnGpus(Value, frozen=True):
    """A job's GPUs, by PCI address.

    given      has_given: whether Slurm gave it any (None: not known); which, None: not known
    has_open   those that its processes have open; what is missing here proves nothing
    all_seen   whether all its processes were looked at
    """

    has_given: bool | None = None
    given: frozenset[str] | None = None
    has_open: frozenset[str] = frozenset()
    all_seen: bool = False


def reach(cause: Condition, gpus: Collection[Gpu], devices: Sequence[PciDevice]) -> Reach:
    """`gpus`: those that NVML has shown, also before one was lost. By the part first: a PCIe error of a GPU is of that
    GPU, one of a port is of the host."""
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
    # What it has open beside its own GPUs shows that Slurm does not say what it uses.
    if not fault.pci or job.given is None or not job.has_open <= job.given:
        return True
    return fault.pci in job.given


def is_proven_hit(fault: Reach, job: OnGpus) -> bool:
    """Return True if what is known of the job proves that the fault hits it."""
    if fault.everybody:
        return True
    if not fault.pci:
        return bool(job.has_given or job.has_open)
    return fault.pci in job.has_open or fault.pci in (job.given or ())


def is_hit_for_sure(fault: Reach, job: OnGpus, node_gpus: int | None) -> bool:
    """Return True if the fault hits the job, whatever Slurm gave it. `node_gpus`: as for `is_hit`, 0 = none."""
    return fault.everybody or node_gpus == 0 or fault.pci in job.has_open


def on_which(job: OnGpus) -> str:
    """Why a fault of GPUs does not hit it."""
    if not job.has_given:
        return "has no GPU"
    gpus = sorted(job.given or ())
    return f"has GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}, which no such fault hit"
