"""Text and JSON of `healthd evidence show`. All functions are pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import asdict

from healthd.agent.evidence.hardware import Hardware
from healthd.agent.evidence.manifest import Manifest
from healthd.agent.evidence.sources import Entry
from healthd.common.duration import duration
from healthd.common.page import Page, date, plain

Files = Sequence[tuple[str, int]]  # names and sizes


def document(manifest: Manifest, path: str, size: int, files: Files) -> dict[str, Any]:
    """Return the document for `healthd evidence show --json`."""
    hardware = manifest.hardware
    parts = ("gpus", "nvswitches", "nics")
    return {
        **asdict(manifest),
        "path": path,
        "bytes": size,
        "causes": [asdict(cause) for cause in manifest.causes],
        "parts": [
            {**asdict(part), "entries": [_entry_json(entry) for entry in part.entries]} for part in manifest.parts
        ],
        "hardware": {
            **asdict(hardware),
            "system": asdict(hardware.system),
            "bmc": asdict(hardware.bmc),
            **{name: [asdict(part) for part in getattr(hardware, name)] for name in parts},
        },
        "files": [{"file": name, "bytes": length} for name, length in files],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "argv": list(entry.argv)}


def text(manifest: Manifest, path: str, size: int, files: Files, page: Page) -> str:
    """Return the text of `healthd evidence show`."""
    lines = [page.heading(plain(f"{manifest.id}: {manifest.node or 'node not named'}"))]
    lines += page.wrap(f"{path}, {size_text(size)}, began {date(manifest.began)}", "  ")
    if manifest.reason:
        lines += page.wrap(f"drain: {manifest.reason}", "  ")
    lines += [line for cause in manifest.causes for line in page.wrap(_cause_text(cause.text, cause.event), "  ")]
    lines += [
        "",
        page.heading("Hardware"),
        *(line for row in _hardware_lines(manifest.hardware) for line in page.wrap(row, "  ")),
    ]
    sizes = dict(files)
    for part in manifest.parts:
        what = {"first": "Saved at once", "full": "Saved on the idle node"}.get(part.name, part.name)
        end = f"; stopped: {part.stopped}" if part.stopped else ""
        lines += ["", page.heading(f"{what} ({duration(part.seconds)}){plain(end)}")]
        rows = [
            (entry.file, size_text(sizes.get(f"{part.name}/{entry.file}", 0)), duration(entry.seconds), _outcome(entry))
            for entry in part.entries
        ]
        lines += page.table(("file", "size", "took", ""), rows)
    return "\n".join(lines) + "\n"


def _cause_text(cause: str, event: str) -> str:
    return f"fault: {cause}{f' (condition {event} in the event stream)' if event else ''}"


def _outcome(entry: Entry) -> str:
    if entry.missing:
        return f"{entry.argv[0]} is not installed"
    return plain(entry.problem)


def _hardware_lines(hardware: Hardware) -> Iterator[str]:
    system, bmc = hardware.system, hardware.bmc
    yield _named("machine", f"{system.vendor} {system.product}".strip(), system.serial, system.bios, "BIOS")
    yield _named("board", "", system.board_serial)
    if hardware.chassis_serial or system.chassis_serial:
        yield _named("chassis", "", hardware.chassis_serial or system.chassis_serial)
    yield _named("BMC", bmc.product, bmc.serial, bmc.firmware)
    yield f"driver {hardware.driver or 'unknown'}, kernel {hardware.kernel or 'unknown'}"
    for gpu in hardware.gpus:
        yield _named(f"GPU {gpu.pci}", gpu.name, gpu.serial, gpu.vbios, "VBIOS")
    for switch in hardware.nvswitches:
        yield _named(f"NVSwitch {switch.pci}", "", switch.serial, switch.firmware, "VBIOS")
    for nic in hardware.nics:
        yield _named(f"NIC {nic.pci}", nic.name, nic.serial, nic.firmware)


def _named(what: str, name: str, serial: str, firmware: str = "", firmware_name: str = "firmware") -> str:
    named = f"{what}, {name}" if name else what
    return f"{named}: serial number {serial or 'unknown'}{f', {firmware_name} {firmware}' if firmware else ''}"


def size_text(size: int) -> str:
    """Return a file's size, such as "88 bytes", "24 KiB" or "12 MiB"."""
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.0f} KiB" if size < 10 << 20 else f"{size / (1 << 20):.0f} MiB"
