"""Serial numbers and firmware versions for the manifest. All functions are pure; identify.py reads the files.

Sources: `nvidia-smi -q -x` for GPUs, sysfs (DMI, PCI VPD, RDMA) for the board and network cards, /proc/driver for the
NVSwitches, and `ipmitool mc info` and `fru print` for the BMC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import asdict, replace

from healthd.common.values import Value
from healthd.nvidia.smi_report import parse_smi

# Values that contain no identity, in lower case and without brackets. nvidia-smi prints errors of a lost GPU as values.
_ABSENT = (
    *("", "n/a", "not available", "not supported", "not specified", "to be filled by o.e.m.", "default string"),
    *("unknown error", "gpu is lost", "gpu requires reset", "err!"),
)


class GpuPart(Value, frozen=True):
    pci: str
    name: str = ""
    uuid: str = ""
    serial: str = ""
    board_part_number: str = ""
    vbios: str = ""
    inforom: str = ""


class Part(Value, frozen=True):
    """A network card or an NVSwitch. `firmware` is "" if the kernel does not show it."""

    pci: str
    name: str = ""
    serial: str = ""
    part_number: str = ""
    firmware: str = ""


class System(Value, frozen=True):
    """The machine, from DMI."""

    vendor: str = ""
    product: str = ""
    serial: str = ""
    board_serial: str = ""
    chassis_serial: str = ""
    bios: str = ""


class Bmc(Value, frozen=True):
    serial: str = ""
    firmware: str = ""
    product: str = ""


class Hardware(Value, frozen=True):
    """The hardware of a node. `chassis_serial` is the chassis that the GPUs report (NVLink racks)."""

    kernel: str = ""
    driver: str = ""
    chassis_serial: str = ""
    system: System = System()
    bmc: Bmc = Bmc()
    gpus: tuple[GpuPart, ...] = ()
    nvswitches: tuple[Part, ...] = ()
    nics: tuple[Part, ...] = ()


class SmiReport(Value, frozen=True):
    driver: str = ""
    chassis_serial: str = ""
    gpus: tuple[GpuPart, ...] = ()


def parse_nvidia_smi(text: str) -> SmiReport:
    """Parse the output of `nvidia-smi -q -x`. An element that is missing or "N/A" is ""."""
    report = parse_smi(text)
    serials = (_value(gpu.values, "platformInfo/chassis_serial_number") for gpu in report.gpus)
    return SmiReport(
        report.driver, next(filter(None, serials), ""), tuple(_gpu(gpu.pci, gpu.values) for gpu in report.gpus)
    )


def merge_gpus(before: Iterable[GpuPart], found: Iterable[GpuPart]) -> tuple[GpuPart, ...]:
    """Return all GPUs, by PCI address. A value that is missing in `found` stays as before.

    nvidia-smi omits a GPU that fell off the bus, and this is the GPU whose serial number is needed.
    """
    merged = {gpu.pci: gpu for gpu in before}
    for gpu in found:
        old = merged.get(gpu.pci)
        is_same = old is not None and (not gpu.uuid or not old.uuid or gpu.uuid == old.uuid)
        known = {name: value for name, value in asdict(gpu).items() if value}
        merged[gpu.pci] = replace(old, **known) if old is not None and is_same else gpu
    return tuple(merged[pci] for pci in sorted(merged))


def _gpu(pci: str, values: Mapping[str, str]) -> GpuPart:
    return GpuPart(
        pci,
        _value(values, "product_name"),
        _value(values, "uuid"),
        _value(values, "serial"),
        _value(values, "board_part_number"),
        _value(values, "vbios_version"),
        _value(values, "inforom_version/img_version"),
    )


def _value(values: Mapping[str, str], path: str) -> str:
    return _known(values.get(path, ""))


def _known(text: str) -> str:
    return "" if text.strip("[] ").lower() in _ABSENT else text[:200]


def parse_ipmi(mc_info: str, fru: str) -> Bmc:
    """Parse `ipmitool mc info` and `ipmitool fru print 0`. The serial number is the chassis's, which the BMC stores."""
    info, parts = dict(_ipmi_lines(mc_info)), dict(_ipmi_lines(fru))
    serial = parts.get("Product Serial") or parts.get("Board Serial") or parts.get("Chassis Serial") or ""
    return Bmc(_known(serial), _known(info.get("Firmware Revision", "")), _known(parts.get("Product Name", "")))


def _ipmi_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n"):
        label, colon, value = line.partition(":")
        if colon:
            yield label.strip(), value.strip()


def parse_vpd(data: bytes) -> dict[str, str]:
    """Return the keywords of a device's Vital Product Data, such as {"PN": ..., "SN": ...} (PCI Local Bus 3.0, app. I).

    Invalid data gives the keywords before the first error.
    """
    keywords: dict[str, str] = {}
    position = 0
    while position < len(data):
        tag = data[position]
        if tag & 0x80:
            if position + 3 > len(data):
                break
            length, start = int.from_bytes(data[position + 1 : position + 3], "little"), position + 3
        else:
            length, start = tag & 0x07, position + 1
        if tag >> 3 == 0x0F:  # end tag
            break
        body = data[start : start + length]
        if tag in (0x90, 0x91):  # read-only and read-write fields
            keywords.update(_vpd_fields(body))
        position = start + length
    return keywords


def _vpd_fields(body: bytes) -> Iterator[tuple[str, str]]:
    position = 0
    while position + 3 <= len(body):
        name, length = body[position : position + 2], body[position + 2]
        value = body[position + 3 : position + 3 + length]
        if name.isascii() and name not in (b"RV", b"RW"):
            text = value.split(b"\0")[0].decode("ascii", "replace").strip()
            yield name.decode("ascii"), text if text.isprintable() else ""
        position += 3 + length


def device_serial(config: bytes) -> str:
    """Return the Device Serial Number of a PCIe function from its config space, or "" (PCIe Base 4.0, 7.9.3)."""
    offset = 0x100
    for _ in range(48):
        if offset + 12 > len(config):
            return ""
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return ""
        if header & 0xFFFF == 0x0003:
            raw = config[offset + 4 : offset + 12][::-1]
            return "" if raw in (b"\0" * 8, b"\xff" * 8) else raw.hex("-")
        offset = header >> 20
        if offset < 0x100:
            return ""
    return ""
