"""DMA and interrupts that the IOMMU blocked, and IOMMUs that do not complete commands, from the kernel log.

Rules: the IOMMU blocks a device's access to an address that is not mapped for that device. NVIDIA's NCCL guide
(troubleshooting, "PCI Access Control Services") names the IOMMU as a cause of slow or hanging GPUDirect. Peer-to-peer
writes between GPUs, NICs and NVMe devices go through the root complex. A blocked write never arrives, so the receiver
reads old data or zeros. Faults by GPUs, network cards, NVSwitches and NVMe devices are only warnings. The kernel
continues after a fault (Documentation/arch/x86/iommu.rst), and a job with a wrong address can cause faults too. Faults
by other devices are only recorded: firmware often leaves a USB controller or the BMC unmapped, and no job uses these
devices. A fault by an unnamed or unknown device is a warning, because the device may be a GPU.

An IOMMU that does not complete commands (arm-smmu CMD_SYNC timeout, AMD Completion-Wait, VT-d invalidation errors)
stops the unmapping of DMA for all devices behind it. Such an IOMMU is only a warning, until a reboot, because no source
reports that jobs always fail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Seconds,
    Severity,
)

USES = ""

SAME_FAULT_SECONDS = 60.0  # a line without a device belongs to a fault with a device if both lines are this close
KINDS = {"gpu": "GPU", "nic": "network card", "nvme": "NVMe device", "nvswitch": "NVSwitch"}  # in the inventory
# The kernel prints the driver's name before AMD-Vi faults. "pci" and "vfio-pci" do not identify the device.
DRIVERS = {
    "nvidia": "GPU",
    "nvidia-nvswitch": "NVSwitch",
    "nvme": "NVMe device",
    **dict.fromkeys(("mlx5_core", "mlx4_core", "bnxt_en", "ice", "i40e", "ixgbe", "ena", "efa"), "network card"),
}
UNSPECIFIC_DRIVERS = ("", "pci", "vfio-pci", "pcieport")
OTHER_DEVICE = "device"


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long a warning about a blocked access stays open without a further kernel line"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and device, from all its events."""
    faults = [event for event in events if event.kind == "iommu" and event.code in MESSAGES]
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in faults:
        if event.pci or not _has_named_fault(event, faults):
            groups.setdefault((event.code, _part(event, node)), []).append(event)
    for (code, part), group in groups.items():
        kind = _kind(part, group, node)
        severity = Severity.INFO if kind == OTHER_DEVICE and code != "stuck" else Severity.WARNING
        yield Finding(
            severity,
            f"iommu/{code}",
            part,
            _message(code, kind, part, group),
            clears=Clears.REBOOT if code == "stuck" else Clears.WINDOW,
            window_seconds=0.0 if code == "stuck" else config.warning_window_seconds,
            events=tuple(event.sequence for event in group),
        )


def _has_named_fault(event: KernelEvent, faults: Sequence[KernelEvent]) -> bool:
    """Return True if `event` occurred close enough to a fault with a named device to belong to that fault."""
    return event.code == "dma_fault" and any(
        fault.pci
        and fault.code != "stuck"
        and fault.boot_id == event.boot_id
        and max(fault.time - event.last_time, event.time - fault.last_time) <= SAME_FAULT_SECONDS
        for fault in faults
    )


def _part(event: KernelEvent, node: Inventory) -> str:
    """Return the device's address in the inventory. If it is unknown, return the IOMMU's name, or "" if that is unknown
    too.

    Another function of a GPU or card is treated as function 0. Older kernels print no segment for Intel IOMMUs. In that
    case all segments are searched, and a device is used if it is the only one with this bus and device number.
    """
    if not event.pci:
        return event.field("iommu")
    listed = [device.pci for device in node.devices if device.kind in KINDS]
    first = f"{event.pci[:-1]}0"
    if event.pci in listed or first in listed:
        return event.pci if event.pci in listed else first
    elsewhere = [pci for pci in listed if pci.partition(":")[2] in (event.pci[5:], first[5:])]
    return elsewhere[0] if event.pci.startswith("0000:") and len(elsewhere) == 1 else event.pci


def _kind(part: str, group: Sequence[KernelEvent], node: Inventory) -> str:
    """Return the kind of a device. OTHER_DEVICE means that jobs do not use it; "" means that it is unknown."""
    for device in node.devices:
        if device.pci == part and device.kind in KINDS:
            return KINDS[device.kind]
    drivers = {event.field("driver") for event in group}.difference(UNSPECIFIC_DRIVERS)
    if drivers:
        return next((DRIVERS[driver] for driver in sorted(drivers) if driver in DRIVERS), OTHER_DEVICE)
    # A complete inventory lists all devices of the kinds above.
    return OTHER_DEVICE if node.is_complete and any(event.pci for event in group) else ""


MESSAGES = {
    "dma_fault": "the IOMMU blocked DMA{operation} by {device}",
    "interrupt_fault": "the IOMMU blocked an interrupt from {device}",
    "stuck": "the IOMMU{behind} does not complete commands",
}


def _message(code: str, kind: str, part: str, group: Sequence[KernelEvent]) -> str:
    operations = sorted({event.field("operation") for event in group} - {""})
    is_named = any(event.pci for event in group)
    device = f"{kind or OTHER_DEVICE} {part}" if is_named else f"a device behind {part}" if part else "a device"
    text = MESSAGES[code].format(
        operation=f" {' and '.join(operations)}" if operations else "",
        device=device,
        behind=f" for {part}" if is_named else f" {part}" if part else "",
    )
    if code == "dma_fault" and kind != OTHER_DEVICE:
        text += ": peer-to-peer or GPUDirect data may not have arrived"
    lines = sum(event.lines for event in group)
    return text + (f" ({lines} lines)" if lines > 1 else "")


_P2P_TODO = (
    "If bare-metal jobs use peer-to-peer transfers or GPUDirect, boot with iommu=pt (Intel: intel_iommu=on iommu=pt, "
    "or off). Switch ACS off on the PCI bridges above the device (lspci -vvv | grep ACSCtl; BIOS or setpci). Then "
    "check with `nvidia-smi topo -p2p r` and p2pBandwidthLatencyTest."
)

EXPLAIN = {
    "iommu/dma_fault": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The IOMMU blocked a memory read or write by this device because the address was not mapped for it. Faults by "
        "a GPU, network card, NVSwitch or NVMe device warn; faults by other devices are only recorded.",
        "The data did not arrive. After a peer-to-peer copy between GPUs, or a GPUDirect RDMA or Storage transfer, the "
        "receiver has old data or zeros, and NCCL may hang.",
        f"No action tonight. {_P2P_TODO} If the fault happened once, at a job's start or end, the job or its driver "
        "used a wrong address.",
        also=(Severity.INFO,),
        window="warning_window_seconds",
    ),
    "iommu/interrupt_fault": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The IOMMU blocked an interrupt message from this device (interrupt remapping). For devices that jobs do not "
        "use, this is only recorded.",
        "The driver misses the interrupt, so requests time out or the device is reset.",
        "No action tonight. Look for kernel lines about timeouts of the device's driver at the same time. Update the "
        "BIOS. If the device does not work, reboot the node once no job is running here.",
        also=(Severity.INFO,),
        window="warning_window_seconds",
    ),
    "iommu/stuck": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "An IOMMU did not complete a command in time, or reports an internal error. With AMD's IOTLB_INV_TIMEOUT, the "
        "device in the message did not respond to the IOMMU.",
        "The drivers of all devices behind this IOMMU wait for it, so GPUs, network cards and disks may hang.",
        "No action tonight unless jobs hang. Reboot the node once no job is running here. Look for an earlier error "
        "from a device behind this IOMMU (Xid, AER, NVMe). If the fault recurs, update the firmware and the kernel.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
