"""Distinguish network cards in sysfs from interfaces that software creates and removes."""

from __future__ import annotations

from healthd.common.text import regex
from healthd.host.host import Host


def is_card(host: Host, path: str) -> bool:
    """Return True if a device in /sys/class is below PCI, virtio or the like. Software devices (bridges, veth, rxe),
    SR-IOV functions and USB devices are not cards. A BMC, for example, has a USB network card that comes and goes.
    """
    device = host.link_target(f"{path}/device")
    usb = device is not None and regex(r"[0-9]+-[0-9.]+:[0-9.]+").fullmatch(device.rpartition("/")[2])
    return device is not None and not usb and host.link_target(f"{path}/device/physfn") is None
