"""Slots whose link went down or whose card went away while nobody took it out, as the kernel's hotplug driver says.

Rules: a GPU or network card that loses its link is lost to the jobs and comes back with a reboot at best; an NVMe disk
may be taken out on purpose, so it warns (block_device says where one is missed). The driver is silent of what a person
takes out by button or command: it says then that it powers the slot off, and no "Link Down".
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

CRITICAL = ("gpu", "nic")
KINDS = {"gpu": "GPU", "nic": "network card", "nvme": "NVMe", "nvswitch": "NVSwitch"}
NAMES = {
    "link_down": "link_down",
    "removed": "link_down",
    "power_fault": "power_fault",
    "no_link": "no_link",
    "inaccessible": "inaccessible",
}
WORDS = {
    "link_down": "the link of {slot} is down",
    "removed": "the card in {slot} went away",
    "power_fault": "the power of {slot} failed",
    "no_link": "the card in {slot} has no link",
    "inaccessible": "does not answer when it is woken",
}


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long a warning lasts without another such line, under load"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding for each code and part, resting on all its events. The part is the slot's device, if it is known."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "pcie_hotplug" and event.code in NAMES:
            device = _device(event, node)
            groups.setdefault((NAMES[event.code], device.pci if device else event.pci), []).append(event)
    for (name, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        device = _device(newest, node)
        lost = name in ("link_down", "power_fault") and device is not None and device.kind in CRITICAL
        what = f"{KINDS.get(device.kind, 'device')} {device.pci}: " if device else f"{part}: "
        number = newest.field("slot")
        slot = f"slot {number} (port {newest.pci})" if number else f"the slot of port {newest.pci}"
        yield Finding(
            Severity.CRITICAL if lost else Severity.WARNING,
            f"pcie_hotplug/{name}",
            part,
            what + WORDS[newest.code].format(slot=slot),
            clears=Clears.REBOOT,
            window_seconds=0.0 if lost else config.warning_window_seconds,
            events=tuple(event.sequence for event in group),
        )


def _device(event: KernelEvent, node: Inventory) -> PciDevice | None:
    """The device in the slot of the port that reports: a GPU or network card first. Else the named device itself."""
    slot = event.field("slot")
    found = [d for d in node.devices if event.pci and event.pci in (d.upstream, d.pci)]
    found = found or [d for d in node.devices if slot and d.slot == slot]
    return min(found, key=lambda d: (d.kind not in CRITICAL, d.pci), default=None)


_TODO = (
    "lspci -vvv -s PCI and the BMC's log say what is there now. Power the node off and on; if it stays, reseat the "
    "card, its riser or cable."
)

EXPLAIN = {
    "pcie_hotplug/link_down": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The link of a slot went down, or its card went away, and nobody took it out. It is critical where a GPU or a "
        "network card is in it, and warns for all else.",
        "The device is gone for whatever uses it. A GPU falls off the bus with it.",
        _TODO,
        also=(Severity.WARNING,),
        milder=Ends(Clears.REBOOT, "warning_window_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_hotplug/power_fault": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The slot's power controller reports a fault. It is critical where a GPU or a network card is in the slot.",
        "The device has no power, or had none for a moment: what it held is lost.",
        f"Look at the power supplies and the card's power cables. {_TODO}",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_hotplug/no_link": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "A card was found in a slot, and its link could not be trained.",
        "The device cannot be used. Other checks say whether it is missed.",
        _TODO,
        window="warning_window_seconds",
    ),
    "pcie_hotplug/inaccessible": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "A device that slept, or was reset, does not answer: its registers read as all ones.",
        "It cannot be used until it is reset or the power is cycled. Other checks say whether it is missed.",
        _TODO,
        window="warning_window_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "pcie_hotplug/link_down": EndsJob.ALWAYS,
    "pcie_hotplug/power_fault": EndsJob.ALWAYS,
}
PERMANENT = ("pcie_hotplug/power_fault",)
