"""What a network device is, of those that sysfs shows: a card, or something that software makes and takes away."""

from __future__ import annotations

import re

from healthd.host import Host


def is_card(host: Host, path: str) -> bool:
    """Whether a device of /sys/class is below PCI, virtio or the like. Not software (bridges, veth, rxe), not SR-IOV
    functions, not USB: the BMC has a network card there that comes and goes."""
    device = host.link_target(f"{path}/device")
    usb = device is not None and re.fullmatch(r"[0-9]+-[0-9.]+:[0-9.]+", device.rpartition("/")[2])
    return device is not None and not usb and host.link_target(f"{path}/device/physfn") is None
