"""Whether a network device in sysfs is a card, or something that software makes and takes away."""

from __future__ import annotations

from healthd.common.text import regex
from healthd.host.host import Host


def is_card(host: Host, path: str) -> bool:
    """Whether a device of /sys/class is below PCI, virtio or the like. Software (bridges, veth, rxe), SR-IOV functions
    and USB are none: on USB the BMC has a network card that comes and goes."""
    device = host.link_target(f"{path}/device")
    usb = device is not None and regex(r"[0-9]+-[0-9.]+:[0-9.]+").fullmatch(device.rpartition("/")[2])
    return device is not None and not usb and host.link_target(f"{path}/device/physfn") is None
