"""PCI Express errors that the kernel counts for GPUs, network cards, NVMe disks and the ports above them.

Rules: Meta's study counts PCIe errors as high severity. The kernel's documentation (sysfs-bus-pci-devices-aer) says
that the port above a device may count its errors instead, so both are watched. Where the firmware handles AER, in
virtual machines and with pci=noaer the files are absent: nothing is judged then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host, PciFunction
from healthd.model import Clears, Explain, Finding, Observation, ObservationKind, Severity
from healthd.past import Past

USES = ""
AFTER_EVENTS = ("pcie_aer",)

DEVICES = "/sys/bus/pci/devices"
WATCHED = {"0x0300": "GPU", "0x0302": "GPU", "0x02": "network card", "0x0108": "NVMe"}  # by the beginning of the class
TOTALS = {"correctable": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """correctable_per_hour     more corrected errors than this within an hour warn
    nonfatal_repeat_seconds  a non-fatal error after another within this time is degraded; a single one warns
    clean_seconds            these are forgotten after so long without new ones under load
    """

    correctable_per_hour: int = 100
    nonfatal_repeat_seconds: float = 3600.0
    clean_seconds: float = 24 * 3600.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    watched = 0
    unreadable = []
    for pci, what in _watched(host.pci_functions()).items():
        for kind, total in TOTALS.items():
            try:
                text = host.read(f"{DEVICES}/{pci}/aer_dev_{kind}")
                if text is None:
                    continue
                counts = parse(text, total)
            except (OSError, ValueError) as error:  # must not hide the other devices
                unreadable.append(f"{pci}/aer_dev_{kind}: {error}")
                continue
            watched += kind == "fatal"
            labels = (("pci", pci),)
            reading = Observation(f"pcie_aer_{kind}_total", counts[total], ObservationKind.COUNTER, labels)
            yield reading
            if not reading.value:
                continue
            names = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != total)
            yield from _judge(kind, pci, what, names, reading, config, past)
    yield Observation("pcie_aer_watched_devices", watched)
    if unreadable:
        raise ValueError("; ".join(unreadable))


@functools.lru_cache(maxsize=2)
def _watched(on_pci: tuple[PciFunction, ...]) -> Mapping[str, str]:
    """PCI address -> what it is: the devices, and the port above each ("port above GPU 0000:1b:00.0")."""
    functions = {function.pci: function for function in on_pci}
    devices: dict[str, str] = {}
    ports: dict[str, str] = {}
    for pci, function in functions.items():
        kind = next((kind for start, kind in WATCHED.items() if function.pci_class.startswith(start)), None)
        if kind is None or function.virtual or (kind == "GPU" and function.vendor != "0x10de"):
            continue
        devices[pci] = kind
        if function.upstream in functions:
            ports.setdefault(function.upstream, f"port above {kind} {pci}")
    return {**ports, **devices}


@functools.lru_cache(maxsize=256)  # a healthy node has hundreds of these files, and three texts
def parse(text: str, total: str) -> Mapping[str, int]:
    """{"RxErr": 2, ..., "TOTAL_ERR_COR": 2}. In Linux 4.19 names have blanks ("Receiver Error 2").

    Raises ValueError for anything else, and when the total is not there (a file cut short).
    """
    counts = {}
    for line in text.splitlines():
        name, _, count = line.rpartition(" ")
        number = int(count) if count.isascii() and count.isdigit() else -1
        if not name or not 0 <= number < 2**64:
            raise ValueError(f"not a name and a count: {line[:60]!r}")
        counts[name] = number
    if total not in counts:
        raise ValueError(f"has no {total}")
    return counts


def _judge(
    kind: str, pci: str, what: str, names: str, reading: Observation, config: Config, past: Past
) -> Iterator[Finding]:
    new = past.growth(reading, 0.0) or 0.0  # since the last run
    counted = f" (since boot: {names})" if names else ""
    if kind == "fatal" and new:
        message = f"{new:.0f} new fatal PCIe errors on {what}{counted}"
        yield Finding(Severity.CRITICAL, "pcie_aer/fatal", pci, message, clears=Clears.REBOOT)
    if kind == "nonfatal" and new:
        again = (past.growth(reading, config.nonfatal_repeat_seconds) or 0.0) > new
        yield Finding(
            Severity.DEGRADED if again else Severity.WARNING,
            "pcie_aer/nonfatal_repeated" if again else "pcie_aer/nonfatal",
            pci,
            f"{new:.0f} new uncorrected PCIe errors{' again' if again else ''} on {what}{counted}",
            clears=Clears.WINDOW,
            window_seconds=config.clean_seconds,
        )
    if kind == "correctable" and new:
        hourly = past.growth(reading, 3600.0) or 0.0
        if hourly > config.correctable_per_hour:
            message = f"{hourly:.0f} corrected PCIe errors within an hour on {what}{counted}"
            yield Finding(
                Severity.WARNING,
                "pcie_aer/correctable",
                pci,
                message,
                clears=Clears.WINDOW,
                window_seconds=config.clean_seconds,
            )


_CARD_TODO = (
    "lspci -vvv -s PCI and journalctl -k | grep -i aer say which error. Reseat the card, look at riser and cables, "
    "update firmware. The part at fault may be at either end of the link."
)

EXPLAIN = {
    "pcie_aer/fatal": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel counted a fatal PCI Express error on this device or the port above it.",
        "The link was reset or is dead: what used the device has failed, and data on its way was lost.",
        f"Reboot, with the power off for a moment. {_CARD_TODO}",
    ),
    "pcie_aer/nonfatal_repeated": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "Uncorrected PCI Express errors came again within an hour.",
        "Single transactions fail: jobs that use the device may die, or the device falls off the bus next.",
        _CARD_TODO,
    ),
    "pcie_aer/nonfatal": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel counted an uncorrected, non-fatal PCI Express error.",
        "A single transaction failed. Once it may be harmless (a probe of the device); repeated it is not.",
        _CARD_TODO,
    ),
    "pcie_aer/correctable": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The link corrects errors by sending again, more often than good links do.",
        "None yet but some bandwidth. It often comes before a link that gets slower or fails.",
        f"At the next maintenance: {_CARD_TODO}",
    ),
}
