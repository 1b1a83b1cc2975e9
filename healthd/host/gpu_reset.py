"""Whether a GPU that NVML lost or does not show may only be in a reset: then it must be missed for a while to count.

An epilog may reset the GPUs of its job (nvidia-smi --gpu-reset), and NVML has them lost meanwhile. How long that takes
was not measured for healthd: it was developed without a GPU that may be reset. The 60 s that the checks wait
(`confirm_seconds`) are what Linux itself gives a device to answer after its reset (PCIE_RESET_READY_POLL_MS in
drivers/pci/pci.h): a GPU that needs longer is lost to the kernel, too. A page that tells of resets has 5 to 10 s
(factryze.ai/glossary/gpu-reset), without saying of which GPUs; whose take longer sets more. Before slurmd has started
no epilog runs; and a GPU that the kernel no longer has, or that has lost its driver, is in no reset.
"""

from __future__ import annotations

from healthd.common.text import is_decimal
from healthd.host.host import PCI_DEVICES, Host

# What the kernel log says of a GPU that is gone for good, as the codes of its conditions: no reset prints these.
GONE = (
    "gpu_xid/79",
    "gpu_xid/fallen_off_bus",
    "gpu_xid/gpu_is_lost",
    "gpu_xid/rm_init_failed",
    "pcie_hotplug/link_down",
    "pcie_hotplug/power_fault",
)


def may_reset(host: Host) -> bool:
    """Whether slurmd runs here: its epilogs may. A process of another's that is called so puts a drain off, no more."""
    try:
        return any(is_decimal(pid) and host.told(f"/proc/{pid}/comm") == "slurmd" for pid in host.names("/proc"))
    except (OSError, ValueError):
        return False  # nobody can tell: also a recording of before this was asked


def has_driver(host: Host, pci: str) -> bool:
    """Whether the kernel has this GPU, and the driver has it too."""
    try:
        return (host.link_target(f"{PCI_DEVICES}/{pci}/driver") or "").endswith("/nvidia")
    except ValueError:
        return False
