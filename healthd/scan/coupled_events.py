"""Finds events that must be evaluated together, because a check's result for one event depends on the others.

All functions are pure.

The daemon passes all recent events to a check at once. `healthd scan` evaluates an event as soon as no more lines can
be merged into it, together with only the nearby events that can change the result:

    a firmware record        its severity and its device are two events with one record number (GHES, CPER)
    recovery_failed          belongs to the PCIe error before it (checks/pcie_aer.py)
    a machine check          belongs to the memory error that EDAC reported (checks/memory_edac.py)
    an IOMMU fault           without a device, belongs to a fault with a device (checks/iommu.py)
"""

from __future__ import annotations

from healthd.common.model import KernelEvent

KINDS = frozenset({"pcie_aer", "mce_edac", "iommu"})
MAX_NEARBY = 64  # maximum number of events of these kinds kept for each host
MAX_COUPLED = 8  # more events would not change a result, and a storm must remain cheap

INCIDENT_SECONDS = 5.0  # as in checks/memory_edac.py
RECOVERY_SECONDS = 60.0  # as in checks/pcie_aer.py
SAME_FAULT_SECONDS = 60.0  # as in checks/iommu.py
_ERRORS = frozenset({"fatal", "nonfatal", "contained", "reset_failed"})


def may_be_coupled(event: KernelEvent) -> bool:
    """Return True if `are_coupled` can be true for `event`. For all other events, no search for events is needed."""
    if event.kind not in KINDS:
        return False
    if event.field("record"):
        return True
    if event.kind == "pcie_aer":
        return event.code == "recovery_failed"
    return not (event.field("part") if event.kind == "mce_edac" else event.pci)


def are_coupled(event: KernelEvent, other: KernelEvent, apart: float) -> bool:
    """Return True if `event` must be evaluated with `other`, which is `apart` seconds later (earlier if negative).

    Both events must have kinds in KINDS and come from the same host and boot.
    """
    if event.observed != other.observed:
        return False
    if event.field("record") and other.field("record") == event.field("record"):
        return True
    if event.kind != other.kind:
        return False
    if event.kind == "pcie_aer":
        return event.code == "recovery_failed" and other.code in _ERRORS and -RECOVERY_SECONDS <= apart <= 0
    if event.kind == "mce_edac":
        return not event.field("part") and abs(apart) <= INCIDENT_SECONDS
    return not event.pci and bool(other.pci) and abs(apart) <= SAME_FAULT_SECONDS
