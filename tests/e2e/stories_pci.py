"""Rows of PCI Express."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from machine import NICS
from stories import (
    GPU,
    PCI,
    WINDOW_SECONDS,
    Row,
    Step,
    kernel,
    nothing,
    put_back,
    rebooted,
    repaired,
    rounds,
    steps,
    taken_out,
    writes,
)
from trees import aer_file

from healthd.common.model import Severity

NIC, DRIVE = NICS[0], "0000:06:00.0"
PORT, DRIVE_PORT = "0000:00:01.1", "0000:00:02.1"  # the ports above them
WIDE = {"width": "16", "speed": "32.0 GT/s PCIe"}


def error_counts(pci: str, kind: str, **counts: int) -> Step:
    return writes({f"{PCI}/{pci}/aer_dev_{kind}": aer_file(kind, **counts)})


def bus_error(pci: str, driver: str) -> str:
    return f"{driver} {pci}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)"


def slot(port: str, text: str) -> Step:
    return kernel(f"pcieport {port}: pciehp: Slot(7): {text}")


def link(width: str = WIDE["width"], speed: str = WIDE["speed"]) -> Step:
    texts = {"width": width, "speed": speed}
    return writes({f"{PCI}/{NIC}/current_link_{name}": f"{text}\n" for name, text in texts.items()})


def model(device: str) -> Step:
    """Replace the NIC by another card while the node is off."""
    return steps(writes({f"{PCI}/{NIC}/device": f"{device}\n"}), rebooted)


def warns(code: str, part: str, fault: Step, **settings: float) -> Row:
    """Return a row that warns for some time under load."""
    check_settings: Mapping[str, Mapping[str, Any]] = {code.partition("/")[0]: settings}
    return Row(code, part, fault, repair=nothing, settings=check_settings, severity=Severity.WARNING, how="warns")


BAD_LINKS = (
    ("pcie_link/narrow", link(width="8")),
    ("pcie_link/slow", link(speed="16.0 GT/s PCIe")),
    ("pcie_link/no_answer", link(width="63", speed="Unknown")),
)

ROWS = [
    Row(
        "pcie_aer/fatal",
        GPU,
        fault=error_counts(GPU, "fatal", DLP=1),
        meanwhile=error_counts(GPU, "fatal"),
        repair=rebooted,
    ),
    Row(
        "pcie_aer/fatal",
        NIC,
        how="is logged only",
        fault=kernel(bus_error(NIC, "mlx5_core")),
        repair=rebooted,
    ),
    Row(
        "pcie_aer/not_recovered",
        PORT,
        fault=kernel(f"pcieport {PORT}: AER: subordinate device reset failed"),
        repair=rebooted,
    ),
    Row(
        "pcie_aer/nonfatal_repeated",
        NIC,
        fault=steps(error_counts(NIC, "nonfatal", CmpltTO=1), rounds(2), error_counts(NIC, "nonfatal", CmpltTO=2)),
        repair=steps(error_counts(NIC, "nonfatal"), rebooted),
        also=frozenset({"pcie_aer/nonfatal"}),
        settings={"pcie_aer": {"clean_seconds": 5.0}},  # only seconds under load count
    ),
    warns("pcie_aer/nonfatal", NIC, error_counts(NIC, "nonfatal", CmpltTO=1), clean_seconds=WINDOW_SECONDS),
    warns("pcie_aer/correctable", GPU, error_counts(GPU, "correctable", RxErr=101), clean_seconds=WINDOW_SECONDS),
    Row(
        "pcie_devices/gone",
        NIC,
        fault=taken_out(NIC),
        meanwhile=rebooted,
        repair=put_back(NIC),
        settings={"pcie_devices": {"confirm_seconds": 1.0}},
    ),
    Row(
        "pcie_devices/changed",
        NIC,
        fault=model("0x1017"),
        repair=model("0x1021"),
        settings={"pcie_devices": {"confirm_seconds": 1.0}},
    ),
    Row(
        "pcie_hotplug/link_down",
        NIC,
        fault=slot(PORT, "Link Down"),
        repair=rebooted,
    ),
    Row(
        "pcie_hotplug/power_fault",
        NIC,
        fault=slot(PORT, "Power fault"),
        repair=rebooted,
    ),
    *(
        warns(f"pcie_hotplug/{code}", part, kernel(line), warning_window_seconds=WINDOW_SECONDS)
        for code, part, line in (
            ("link_down", DRIVE, f"pcieport {DRIVE_PORT}: pciehp: Slot(33): Link Down"),
            ("no_link", NIC, f"pcieport {PORT}: pciehp: Slot(7): No link"),
            (
                "inaccessible",
                NIC,
                f"mlx5_core {NIC}: Unable to change power state from D3cold to D0, device inaccessible",
            ),
        )
    ),
    *(
        Row(
            code,
            NIC,
            fault=bad,
            meanwhile=link(),
            repair=rebooted,
            settings={"pcie_link": {"confirm_seconds": 1.0, "enforce": True}},
        )
        for code, bad in BAD_LINKS
    ),
    *(
        Row(
            code,
            NIC,
            how="warns without enforce",
            fault=bad,
            meanwhile=link(),
            repair=repaired,
            settings={"pcie_link": {"confirm_seconds": 1.0}},
            severity=Severity.WARNING,
        )
        for code, bad in BAD_LINKS
    ),
]

# Codes that drain and have no story, and why.
UNTESTED: dict[str, str] = {}
