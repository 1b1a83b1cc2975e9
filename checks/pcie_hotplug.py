"""PCI Express slots that lost their link, card or power, as reported by the kernel's hotplug driver.

Rules: if a GPU or network card loses its link, its jobs lose the device, and at best a reboot brings it back. An NVMe
disk may be removed on purpose, so a lost disk is only a warning (block_device reports missing expected disks). If a
person removes a card by button or command, the driver logs that it powers off the slot, and not "Link Down".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Ends,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    PciDevice,
    Remedy,
    Seconds,
    Severity,
)

USES = ""

CRITICAL_KINDS = ("gpu", "nic")
KINDS = {"gpu": "GPU", "nic": "network card", "nvme": "NVMe", "nvswitch": "NVSwitch"}
NAMES = {
    "link_down": "link_down",
    "removed": "link_down",
    "power_fault": "power_fault",
    "no_link": "no_link",
    "inaccessible": "inaccessible",
}
MESSAGES = {
    "link_down": "the link of {slot} is down",
    "removed": "the card in {slot} was removed",
    "power_fault": "the power of {slot} failed",
    "no_link": "the card in {slot} has no link",
    "inaccessible": "does not respond after wake-up",
}


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   a warning clears after this long under load without a further kernel line"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and device, from all its events. The device is the card in the slot, if known."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "pcie_hotplug" and event.code in NAMES:
            device = _device(event, node)
            groups.setdefault((NAMES[event.code], device.pci if device else event.pci), []).append(event)
    for (name, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        device = _device(newest, node)
        is_lost = name in ("link_down", "power_fault") and device is not None and device.kind in CRITICAL_KINDS
        label = f"{KINDS.get(device.kind, 'device')} {device.pci}: " if device else f"{part}: "
        number = newest.field("slot")
        slot = f"slot {number} (port {newest.pci})" if number else f"the slot of port {newest.pci}"
        yield Finding(
            Severity.CRITICAL if is_lost else Severity.WARNING,
            f"pcie_hotplug/{name}",
            part,
            label + MESSAGES[newest.code].format(slot=slot),
            clears=Clears.REBOOT,
            window_seconds=0.0 if is_lost else config.warning_window_seconds,
            events=tuple(event.sequence for event in group),
        )


def _device(event: KernelEvent, node: Inventory) -> PciDevice | None:
    """Return the device in the reporting port's slot, preferably a GPU or network card. If there is none, return the
    device that the line names.
    """
    slot = event.field("slot")
    found = [d for d in node.devices if event.pci and event.pci in (d.upstream, d.pci)]
    found = found or [d for d in node.devices if slot and d.slot == slot]
    return min(found, key=lambda d: (d.kind not in CRITICAL_KINDS, d.pci), default=None)


_TODO = (
    "lspci -vvv -s PCI and the BMC's log show the current state. Power-cycle the node. If the fault recurs, reseat the "
    "card, its riser or its cable."
)

EXPLAIN = {
    "pcie_hotplug/link_down": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "A slot's link went down or its card disappeared without an operator's action. This is critical for a GPU or a "
        "network card, and a warning for all other devices.",
        "Jobs can no longer use the device. A GPU that falls off the bus can cause the same lines.",
        f"If the condition is only a warning, no action is needed tonight. {_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.REBOOT, "warning_window_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_hotplug/power_fault": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The slot's power controller reports a fault. This is critical for a GPU or a network card.",
        "The device has no power or lost power for a moment. Its state is lost.",
        f"Check the power supplies and the card's power cables. {_TODO}",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_hotplug/no_link": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The link to the card in a slot could not be trained.",
        "The device cannot be used. Other checks report whether an expected device is missing.",
        f"No action tonight. At the next maintenance: {_TODO}",
        window="warning_window_seconds",
    ),
    "pcie_hotplug/inaccessible": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "A device did not respond after sleep or a reset; its registers read as all ones.",
        "The device cannot be used until it is reset or power-cycled. Other checks report whether an expected device "
        "is missing.",
        f"No action tonight. At the next maintenance: {_TODO}",
        window="warning_window_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "pcie_hotplug/link_down": EndsJob.ALWAYS,
    "pcie_hotplug/power_fault": EndsJob.ALWAYS,
}
PERMANENT = ("pcie_hotplug/power_fault",)
