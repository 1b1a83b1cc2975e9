"""GPUs that NVML has lost or does not show, but that may be in a reset. Such GPUs are reported as missing only after a
delay.

An epilog may reset its job's GPUs (nvidia-smi --gpu-reset), and NVML reports them as lost in the meantime. The duration
has not been measured for healthd, which was developed without a GPU that could be reset. The checks wait 60 s
(`confirm_seconds`). Linux itself gives a device this long to respond after its reset (PCIE_RESET_READY_POLL_MS in
drivers/pci/pci.h), and a GPU that needs longer is lost to the kernel, too. A web page about resets reports 5 to 10 s
(factryze.ai/glossary/gpu-reset), without naming the GPUs. Sites with slower GPUs set a longer time. No epilog runs
before slurmd has started. A GPU that the kernel no longer has, or that has lost its driver, is not in a reset.
"""

from __future__ import annotations

from healthd.common.text import is_decimal
from healthd.host.host import PCI_DEVICES, Host

# Codes for kernel log lines about a GPU that is permanently gone. A reset does not print these lines.
PERMANENT_LOSS_CODES = (
    "gpu_xid/79",
    "gpu_xid/fallen_off_bus",
    "gpu_xid/gpu_is_lost",
    "gpu_xid/rm_init_failed",
    "pcie_hotplug/link_down",
    "pcie_hotplug/power_fault",
)


def may_reset(host: Host) -> bool:
    """Return True if slurmd runs here, because its epilogs may reset GPUs. Any other process with this name can only
    delay a drain.
    """
    try:
        return any(
            is_decimal(pid) and host.read_or_empty(f"/proc/{pid}/comm") == "slurmd" for pid in host.names("/proc")
        )
    except (OSError, ValueError):
        return False  # unknown, for example in an older recording without these files


def has_driver(host: Host, pci: str) -> bool:
    """Return True if the kernel has this GPU and the GPU uses NVIDIA's driver."""
    try:
        return (host.link_target(f"{PCI_DEVICES}/{pci}/driver") or "").endswith("/nvidia")
    except ValueError:
        return False
