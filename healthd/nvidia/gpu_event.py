"""An event that NVML reports about a GPU (nvml_events.py). The daemon uses it without the modules that call NVML."""

from __future__ import annotations

from healthd.common.values import Value

OPERATIONAL = "operational"


class GpuEvent(Value, frozen=True):
    """An event of one GPU.

    kind         xid, unavailable, recovery_action (event bits), operational
    pci          the GPU's address, or "" if NVML does not report the GPU
    xids         Xids of the same occurrence
    severity     of an operational event: informational, corrected, recoverable, fatal, or "" for a later number
    module, code, category   identify an operational event. NVIDIA may renumber them in each driver
    primary      False for an operational event that follows another one of its group
    uncontained  the error may have affected data outside the part that reports it
    overflow     events before this one were lost
    ignored      an operational event about an error from before, or one that was simulated
    """

    kind: str
    pci: str = ""
    xids: tuple[int, ...] = ()
    severity: str = ""
    module: str = ""
    code: int = 0
    category: int = 0
    primary: bool = False
    uncontained: bool = False
    overflow: bool = False
    ignored: bool = False
