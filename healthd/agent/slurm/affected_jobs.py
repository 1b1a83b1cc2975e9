"""The jobs that a fault hits. The functions are pure.

fault                                                      victims on a node with gres/gpu in Slurm
---------------------------------------------------------  --------------------------------------------------------
one GPU (Xid 79, its memory, its link)                     the jobs on that GPU
the NVSwitches, the fabric, the driver, or a GPU that the  all jobs with a GPU
inventory does not list
the host (memory, disks, mounts, network, PCIe ports)      all jobs

A job is on the GPUs that Slurm allocated to it, and on those that its processes have open. A job whose GPUs are unknown
is considered hit. On a node without gres/gpu in Slurm every job is hit, because Slurm allocates no GPUs there. If the
number of the node's GPUs in Slurm could not be read, a job is hit only if it is proven to be on the GPU. An unreadable
table therefore never causes a requeue of an unaffected job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.common.model import Condition, ConditionKey, Gpu, Inventory, PciDevice, Severity
from healthd.common.values import Value
from healthd.nvidia.xid_table import NVLINK, NVLINK5

# Checks for parts that all of a node's GPUs share, although the condition may name one GPU.
SHARED_BY_GPUS = frozenset({"sxid", "gpu_fabric"})

# Checks for NVLink. The shared cause of their findings is the switches of an NVL72, or the fabric manager.
SWITCH_SIDE_CHECKS = frozenset({"gpu_fabric", "gpu_nvlink"})
# Findings that an NVL72's switches can cause, and that suspect the switch side if all GPUs of the tray have them.
LOST_LINKS = "gpu_nvlink/inactive"
SWITCH_SIDE_CODES = frozenset({LOST_LINKS, "gpu_fabric/not_joined", "gpu_fabric/degraded", "gpu_fabric/unhealthy"})
# On a board with its own NVSwitches, its shared cause is the node's fabric manager: CUDA does not start (error 802).
NOT_JOINED = "gpu_fabric/not_joined"
# A link that goes down writes an Xid on each GPU, whichever end failed: NVIDIA's rows for Xid 149 include
# INVESTIGATE_PEER_DEVICE and "Other end of link: source of link fatal" (healthd/nvidia/facts/nvlink5.csv). An error
# that only a reset ends has an Xid 154 as well, which is not in this set.
LINK_XIDS = frozenset(f"gpu_xid/{number}" for number in (NVLINK, *NVLINK5))
SAME_FAULT_SECONDS = 60.0  # the lines of one switch's fault on a tray's GPUs are at most this far apart


class FaultReach(Value, frozen=True):
    """The jobs that a fault can hit: all jobs, or the jobs on the GPU `pci` ("" for any GPU)."""

    all_jobs: bool = False
    pci: str = ""


ALL_JOBS, ANY_GPU = FaultReach(all_jobs=True), FaultReach()


class JobGpus(Value, frozen=True):
    """A job's GPUs, by PCI address.

    has_allocation  whether Slurm allocated GPUs to the job, or None if unknown
    allocated       the GPUs that Slurm allocated to the job, or None if unknown
    opened          GPUs that its processes have open; may be incomplete
    is_complete     whether all its processes were inspected
    """

    has_allocation: bool | None = None
    allocated: frozenset[str] | None = None
    opened: frozenset[str] = frozenset()
    is_complete: bool = False


def rack_gpus(inventory: Inventory) -> frozenset[str]:
    """Return the PCI addresses of the GPUs that switches outside the node may connect. With MIG there is no NVLink."""
    return frozenset(gpu.pci for gpu in inventory.gpus if not gpu.mig) if inventory.domain else frozenset()


def with_switch_side(
    conditions: Mapping[ConditionKey, Condition], gpus: Collection[str]
) -> Mapping[ConditionKey, Condition]:
    """Record on each CRITICAL Xid for a link of a rack's tray whether all GPUs of the tray have shown its fault.

    The evidence of the other GPUs may end before the Xid does, which stays open until a reset. `gpus` is the result of
    `rack_gpus`.
    """
    found = {
        key: replace(cause, switch_side_at=_began(cause))
        for key, cause in conditions.items()
        if _is_link_xid(cause, gpus)
        and not _is_shown_by_all_gpus(cause)
        and {other.subject for other in conditions.values() if _shows_fault(other, cause)}.issuperset(gpus)
    }
    return {**conditions, **found} if found else conditions


def requeuing(causes: Iterable[Condition], gpus: Collection[str], now: float) -> list[Condition]:
    """Return the causes that requeue the jobs that they hit.

    A fault of NVLink whose cause may be a rack's switches requeues none. The rack's other nodes have this fault too,
    traffic may continue with less bandwidth (Partition Health in the guide of NVIDIA's NMX Manager, adaptive bandwidth
    mode), and a job that cannot continue fails by itself. An Xid for a link of a rack's tray is the tray's own fault
    only if another GPU has not shown this fault within SAME_FAULT_SECONDS (see `with_switch_side`).

    `gpus` is the result of `rack_gpus`.
    """
    return [
        cause
        for cause in causes
        if cause.severity >= Severity.CRITICAL
        and not _is_switch_side(cause, bool(gpus))
        and not (
            _is_link_xid(cause, gpus) and (now < _began(cause) + SAME_FAULT_SECONDS or _is_shown_by_all_gpus(cause))
        )
    ]


def undecided_until(causes: Iterable[Condition], gpus: Collection[str], now: float) -> float:
    """Return the time at which `requeuing` may return another cause without a new report (epoch seconds), or 0."""
    ends = [_began(cause) + SAME_FAULT_SECONDS for cause in causes if _is_link_xid(cause, gpus)]
    return min((end for end in ends if end > now), default=0.0)


def _is_switch_side(cause: Condition, is_in_rack: bool) -> bool:
    return cause.shared_cause and cause.check in SWITCH_SIDE_CHECKS and (is_in_rack or cause.code != NOT_JOINED)


def _is_link_xid(cause: Condition, gpus: Collection[str]) -> bool:
    """Return True for a CRITICAL Xid about a link whose other end is a rack's switch."""
    return len(gpus) > 1 and cause.severity >= Severity.CRITICAL and cause.code in LINK_XIDS


def _is_shown_by_all_gpus(cause: Condition) -> bool:
    return cause.switch_side_at == _began(cause)


def _shows_fault(other: Condition, cause: Condition) -> bool:
    """Return True if a condition shows the same fault as a link's Xid.

    The lines of one fault have different severities (docs/runbooks/gpu_xid.md). As long as all GPUs have lost links to
    a switch, an Xid for a link has this cause: a GPU that loses a further link has a finding of its own. The other
    findings may have another cause, unless they began at the same time.
    """
    began = _began(cause)
    if other.key == cause.key:
        return True
    if other.code in LINK_XIDS:
        times = (other.first_seen, _began(other), other.last_event)
        return min(abs(at - began) for at in times) <= SAME_FAULT_SECONDS
    if not other.shared_cause or other.code not in SWITCH_SIDE_CODES:
        return False
    is_near = abs(other.first_seen - began) <= SAME_FAULT_SECONDS
    return is_near or (other.code == LOST_LINKS and other.first_seen < began <= other.last_seen + SAME_FAULT_SECONDS)


def _began(cause: Condition) -> float:
    """Return the time of a condition's first CRITICAL line since an operator last resumed the node."""
    return cause.critical_at if cause.critical_at > cause.acknowledged_at else cause.last_event


def fault_reach(cause: Condition, gpus: Collection[Gpu], devices: Sequence[PciDevice]) -> FaultReach:
    """Return the jobs that a fault can hit. `gpus` contains all GPUs that NVML has reported, including lost ones.

    The part determines the jobs: a GPU's PCIe error affects that GPU, and a port's PCIe error the host.
    """
    kind = next((device.kind for device in devices if device.pci == cause.subject), "")
    if cause.check in SHARED_BY_GPUS or kind == "nvswitch":
        return ANY_GPU
    if any(gpu.pci == cause.subject for gpu in gpus):
        return FaultReach(pci=cause.subject)
    return ANY_GPU if kind == "gpu" or cause.check.startswith("gpu_") else ALL_JOBS


def is_hit(fault: FaultReach, job: JobGpus, node_gpus: int | None) -> bool:
    """Return True if the fault hits the job. `node_gpus` is the node's number of gres/gpu in Slurm (not 0), or None if
    unknown.
    """
    if node_gpus is None:
        return is_proven_hit(fault, job)
    if fault.all_jobs or job.has_allocation is None:
        return True
    if not job.has_allocation:
        return bool(job.opened) or not job.is_complete
    # A job that opened other GPUs does not respect Slurm's allocation.
    if not fault.pci or job.allocated is None or not job.opened <= job.allocated:
        return True
    return fault.pci in job.allocated


def is_proven_hit(fault: FaultReach, job: JobGpus) -> bool:
    """Return True if the GPUs that the job is known to use prove that the fault hits the job."""
    if fault.all_jobs:
        return True
    if not fault.pci:
        return bool(job.has_allocation or job.opened)
    return fault.pci in job.opened or fault.pci in (job.allocated or ())


def is_certain_hit(fault: FaultReach, job: JobGpus, node_gpus: int | None) -> bool:
    """Return True if the fault hits the job regardless of its allocation. `node_gpus` is as for `is_hit`, or 0."""
    return fault.all_jobs or node_gpus == 0 or fault.pci in job.opened


def describe_gpus(job: JobGpus) -> str:
    """Return text on why a GPU fault does not hit the job."""
    if not job.has_allocation:
        return "has no GPU"
    gpus = sorted(job.allocated or ())
    return f"has GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}, which the fault did not hit"
