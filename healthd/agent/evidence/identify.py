"""Program that prints the serial numbers and firmware versions that the kernel shows, as JSON.

    python -m healthd.agent.evidence.identify [--system-only]

It is a separate program with a deadline, because the VPD of a broken device may hang. With `--system-only`, no device
is read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from healthd.agent.evidence.hardware import Hardware, Part, System, device_serial, parse_vpd
from healthd.common.text import regex
from healthd.common.values import encode

_PCI = "/sys/bus/pci/devices"
_NVSWITCH = "/proc/driver/nvidia-nvswitch/devices"
_DRIVER_VERSION = regex(r"Kernel Module(?: for [a-z0-9_]+)?\s+([0-9.]{3,20})\s")
_NETWORK_CLASSES = ("0x0200", "0x0207")  # Ethernet, InfiniBand
_DMI_FIELDS = {
    "vendor": "sys_vendor",
    "product": "product_name",
    "serial": "product_serial",
    "board_serial": "board_serial",
    "chassis_serial": "chassis_serial",
    "bios": "bios_version",
}


def read_hardware(root: str = "", system_only: bool = False) -> Hardware:
    """Return what the kernel shows. A file that cannot be read is ""."""
    dmi = {field: _text(f"{root}/sys/class/dmi/id/{name}") for field, name in _DMI_FIELDS.items()}
    driver = _DRIVER_VERSION.search(_text(f"{root}/proc/driver/nvidia/version"))
    found = Hardware(
        kernel=_text(f"{root}/proc/sys/kernel/osrelease"), driver=driver[1] if driver else "", system=System(**dmi)
    )
    if system_only:
        return found
    return Hardware(
        kernel=found.kernel,
        driver=found.driver,
        system=found.system,
        nvswitches=tuple(_nvswitches(root)),
        nics=tuple(_nics(root)),
    )


def _nvswitches(root: str) -> Iterator[Part]:
    for pci in _names(f"{root}{_NVSWITCH}"):
        label, _, version = _text(f"{root}{_NVSWITCH}/{pci}/information").partition(":")
        firmware = version.strip() if label == "BIOS Version" else ""
        yield Part(
            pci, "NVSwitch", *_pci_identity(f"{root}{_PCI}/{pci}"), firmware="" if firmware == "N/A" else firmware
        )


def _nics(root: str) -> Iterator[Part]:
    for pci in _names(f"{root}{_PCI}"):
        device = f"{root}{_PCI}/{pci}"
        if not _text(f"{device}/class").startswith(_NETWORK_CLASSES) or os.path.exists(f"{device}/physfn"):
            continue
        rdma = _names(f"{device}/infiniband")
        names = [*rdma, *_names(f"{device}/net")]
        firmware = _text(f"{device}/infiniband/{rdma[0]}/fw_ver") if rdma else ""
        yield Part(pci, " ".join(names), *_pci_identity(device), firmware=firmware)


def _pci_identity(device: str) -> tuple[str, str]:
    """Return a device's serial number and part number. Without VPD, use the Device Serial Number."""
    vpd = parse_vpd(_bytes(f"{device}/vpd"))
    return vpd.get("SN") or device_serial(_bytes(f"{device}/config")), vpd.get("PN", "")


def _text(path: str) -> str:
    text = _bytes(path)[:4096].decode("utf-8", "replace").strip()
    return "".join(c if c.isprintable() else " " for c in text)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 16)
    except OSError:
        return b""


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


if __name__ == "__main__":
    sys.stdout.buffer.write(encode(read_hardware(system_only="--system-only" in sys.argv)))
