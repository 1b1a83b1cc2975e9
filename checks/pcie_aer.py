"""PCI Express errors (AER) on GPUs, network cards, NVMe disks and the ports above them.

Rules: Meta's study counts PCIe errors as high severity. According to the kernel's documentation
(sysfs-bus-pci-devices-aer) the port above a device may count its errors instead, so both are monitored. The counters
are absent if the firmware handles AER, in virtual machines and with pci=noaer. Only the log then reports errors.

An error in the kernel log and its count are one condition (same code and part). Corrected errors are evaluated by their
counts alone. A later "device recovery successful" does not end a condition: the drivers have restarted, but data in
flight is lost and the cause is still present. Containment (DPC) is a fatal error that was stopped at the port.

Repeated non-fatal errors clear after a day without further errors. On a drained node that day starts only after a
repair, such as a reboot. Some platforms log the same few errors at each boot, while devices are probed. If these errors
counted as repeats, each reboot would restart the day, and healthd would never resume the node. Errors in the first
minutes of a boot are therefore only warnings.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Count,
    Ends,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Inventory,
    KernelEvent,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    PciFunction,
    Remedy,
    Seconds,
    Severity,
    is_decimal,
)

USES = ""
AFTER_EVENTS = ("pcie_aer",)

DEVICES = "/sys/bus/pci/devices"
WATCHED = {"0x0300": "GPU", "0x0302": "GPU", "0x02": "network card", "0x0108": "NVMe"}  # by the prefix of the PCI class
KINDS = {"gpu": "GPU", "nic": "network card", "nvme": "NVMe", "nvswitch": "NVSwitch"}  # kinds in the inventory
DRIVERS = {
    "nvidia": "GPU",
    "nvidia-nvswitch": "NVSwitch",
    "nvme": "NVMe",
    **dict.fromkeys(("mlx5_core", "bnxt_en", "ice", "efa", "ena"), "network card"),
}
FINDING_NAMES = {
    "fatal": "fatal",
    "contained": "fatal",
    "nonfatal": "nonfatal",
    "reset_failed": "not_recovered",
    "recovery_failed": "not_recovered",
}
FIRMWARE_SEVERITIES = {"fatal": "fatal", "recoverable": "nonfatal"}  # severity in a firmware record -> AER's severity
RECOVERY_SECONDS = 60.0  # time that links may take to come back
BOOT_SECONDS = 300.0  # errors in the first minutes may occur at every boot, while devices are probed
INCIDENT_SECONDS = 5.0  # lines that are closer together than this report the same error, as when events are coalesced
TOTALS = {"correctable": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}


class Config(CheckSettings, frozen=True):
    """correctable_per_hour     warn at more corrected errors than this within an hour
    nonfatal_repeat_seconds  degraded if two non-fatal errors occur within this time; a single error warns
    clean_seconds            errors clear after this long under load without new errors
    """

    correctable_per_hour: Count = 100
    nonfatal_repeat_seconds: Seconds = 3600.0
    clean_seconds: Seconds = 24 * 3600.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    watched = 0
    unreadable = []
    for pci, label in _watched(host.pci_functions()).items():
        for kind, total in TOTALS.items():
            try:
                text = host.read(f"{DEVICES}/{pci}/aer_dev_{kind}")
                if text is None:
                    continue
                counts = parse(text, total)
            except (OSError, ValueError) as error:  # this error must not hide the other devices
                unreadable.append(f"{pci}/aer_dev_{kind}: {error}")
                continue
            watched += kind == "fatal"
            labels = (("pci", pci),)
            reading = Observation(f"pcie_aer_{kind}_total", counts[total], ObservationKind.COUNTER, labels)
            yield reading
            if not reading.value:
                continue
            names = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != total)
            yield from _judge(kind, pci, label, names, reading, config, past)
    yield Observation("pcie_aer_watched_devices", watched)
    if not watched and not unreadable:
        yield NothingToCheck("no GPU, network card or NVMe disk with PCIe error counters")
    if unreadable:
        raise ValueError("; ".join(unreadable))


@functools.lru_cache(maxsize=2)
def _watched(on_pci: tuple[PciFunction, ...]) -> Mapping[str, str]:
    """Return a dict that maps PCI addresses to descriptions, for the devices and the ports above them ("port above GPU
    0000:1b:00.0")."""
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


@functools.lru_cache(maxsize=256)  # a healthy node has hundreds of these files, but only three different texts
def parse(text: str, total: str) -> Mapping[str, int]:
    """Parse text such as {"RxErr": 2, ..., "TOTAL_ERR_COR": 2}. In Linux 4.19 names contain spaces ("Receiver Error
    2").

    Raises ValueError for anything else, or if the total is missing (a truncated file).
    """
    counts = {}
    for line in text.split("\n"):
        name, _, count = line.rpartition(" ")
        number = int(count) if is_decimal(count) else -1
        if not name or not 0 <= number < 2**64:
            raise ValueError(f"not a name and a count: {line[:60]!r}")
        counts[name] = number
    if total not in counts:
        raise ValueError(f"has no {total}")
    return counts


def _judge(
    kind: str, pci: str, label: str, names: str, reading: Observation, config: Config, past: History
) -> Iterator[Finding]:
    new = past.growth(reading, 0.0) or 0.0  # growth since the last run
    counted = f" (since boot: {names})" if names else ""
    if kind == "fatal" and new:
        message = f"{new:.0f} new fatal PCIe errors on {label}{counted}"
        yield Finding(Severity.CRITICAL, "pcie_aer/fatal", pci, message, clears=Clears.REBOOT)
    if kind == "nonfatal" and new:
        is_repeated = (past.growth(reading, config.nonfatal_repeat_seconds) or 0.0) > new
        yield Finding(
            Severity.DEGRADED if is_repeated else Severity.WARNING,
            "pcie_aer/nonfatal_repeated" if is_repeated else "pcie_aer/nonfatal",
            pci,
            f"{new:.0f} new uncorrected PCIe errors{' again' if is_repeated else ''} on {label}{counted}",
            clears=Clears.WINDOW,
            window_seconds=config.clean_seconds,
        )
    if kind == "correctable" and new:
        hourly = past.growth(reading, 3600.0) or 0.0
        if hourly > config.correctable_per_hour:
            message = f"{hourly:.0f} corrected PCIe errors within an hour on {label}{counted}"
            yield Finding(
                Severity.WARNING,
                "pcie_aer/correctable",
                pci,
                message,
                clears=Clears.WINDOW,
                window_seconds=config.clean_seconds,
            )


# --- kernel log


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and part, from all its events."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for name, pci, event in _errors(events):
        groups.setdefault((name, _part(pci, node)), []).append(event)
    for (name, part), group in groups.items():
        label = _label(part, group, node)
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        severity, clears = Severity.WARNING, Clears.REBOOT
        if name == "nonfatal":
            clears = Clears.WINDOW
            if label and _is_repeated(group, newest, config):
                severity, name = Severity.DEGRADED, "nonfatal_repeated"
        elif label and (name == "fatal" or any(event.code == "reset_failed" for event in group)):
            severity = Severity.CRITICAL
        yield Finding(
            severity,
            f"pcie_aer/{name}",
            part,
            _message(name, label or f"device {part}", newest),
            clears=clears,
            window_seconds=0.0 if severity is Severity.CRITICAL else config.clean_seconds,
            events=tuple(event.sequence for event in group),
        )


def _errors(events: Sequence[KernelEvent]) -> Iterator[tuple[str, str, KernelEvent]]:
    """Yield (name, address of the faulty device, event). In a firmware record, the severity and the device are two
    separate events.
    """
    devices = {
        (event.boot_id, event.field("record")): event.pci for event in events if event.code == "record" and event.pci
    }
    last_error_at: dict[str, float] = {}  # time of the last line about an uncorrected error, by boot
    for event in events:
        if event.kind == "pcie_aer" and event.code in FINDING_NAMES:
            if event.code != "recovery_failed":
                last_error_at[event.boot_id] = max(event.last_time, last_error_at.get(event.boot_id, 0.0))
            elif event.time - last_error_at.get(event.boot_id, -math.inf) <= RECOVERY_SECONDS:
                continue  # a failed recovery usually ends an earlier error and is not a second error
            yield FINDING_NAMES[event.code], event.pci, event
        record = (event.boot_id, event.field("record"))
        if event.kind == "mce_edac" and event.code in FIRMWARE_SEVERITIES and record in devices:
            yield FIRMWARE_SEVERITIES[event.code], devices[record], event


def _part(pci: str, node: Inventory) -> str:
    """Return the device that a line blames. If the inventory does not list that function (such as audio), return the
    device's function 0.
    """
    listed = {device.pci for device in node.devices}
    first = f"{pci[:-1]}0"
    return first if pci not in listed and first in listed else pci


def _label(part: str, group: Sequence[KernelEvent], node: Inventory) -> str:
    """Return the description of a device, or "" if the device is not monitored. If the inventory is incomplete, as for
    another machine's log, the description comes from the driver.
    """
    for device in node.devices:
        if device.pci == part and device.kind in KINDS:
            return f"{KINDS[device.kind]} {part}"
    for device in node.devices:
        if part and device.upstream == part and device.kind in KINDS:
            return f"port above {KINDS[device.kind]} {device.pci}"
    drivers = [event.field("driver") for event in group if not node.is_complete]
    return next((f"{DRIVERS[driver]} {part}" for driver in drivers if driver in DRIVERS), "")


def _is_repeated(group: Sequence[KernelEvent], newest: KernelEvent, config: Config) -> bool:
    """Return True if an earlier error occurred within the repeat time in the same boot. Errors in the first minutes of
    a boot are ignored.
    """
    since = newest.last_time - config.nonfatal_repeat_seconds
    recent = [e for e in group if e.boot_id == newest.boot_id and e.last_time >= since and not _is_at_boot(e)]
    recent.sort(key=lambda event: event.time)
    return any(after.time - before.last_time > INCIDENT_SECONDS for before, after in itertools.pairwise(recent))


def _is_at_boot(event: KernelEvent) -> bool:
    return event.uptime is not None and event.uptime < BOOT_SECONDS


def _message(name: str, label: str, event: KernelEvent) -> str:
    found = {field: event.field(field) for field in ("bit", "layer", "reporter", "record")}
    summary = {
        "fatal": "fatal PCIe error on",
        "nonfatal": "uncorrected PCIe error on",
        "nonfatal_repeated": "uncorrected PCIe errors again on",
        "not_recovered": "the link was reset after an error and did not come back:"
        if event.code == "reset_failed"
        else "no recovery from a PCIe error:",
    }[name]
    details = [text for text in (found["bit"], found["layer"]) if text]
    details += ["contained by DPC"] if event.code == "contained" else []
    details += [f"reported by {found['reporter']}"] if found["reporter"] not in ("", event.pci) else []
    details += ["reported by the firmware"] if found["record"] else []
    details += [f"{event.lines} lines"] if event.lines > 1 else []
    return f"{summary} {label}" + (f" ({', '.join(details)})" if details else "")


_CARD_TODO = (
    "lspci -vvv -s PCI and journalctl -k | grep -i aer show the error. Reseat the card, check the riser and cables, "
    "and update the firmware. The fault may be at either end of the link."
)

OBSERVATIONS = {
    "pcie_aer_correctable_total": Meaning("Correctable PCIe errors that the device has reported since boot.", ("pci",)),
    "pcie_aer_nonfatal_total": Meaning(
        "Uncorrectable, non-fatal PCIe errors since boot; the link remained reliable after each of these errors.",
        ("pci",),
    ),
    "pcie_aer_fatal_total": Meaning("Fatal PCIe errors that the device has reported since boot.", ("pci",)),
    "pcie_aer_watched_devices": Meaning("Number of PCI devices whose error counters are read."),
}

EXPLAIN = {
    "pcie_aer/fatal": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The kernel counted or logged a fatal PCI Express error on this device or the port above it. If jobs do not "
        "depend on the device, this is only a warning.",
        "The link was reset or is dead. Work that used the device has failed, and data in flight was lost.",
        f"If the condition is only a warning, no action is needed tonight. Power-cycle the node. {_CARD_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.REBOOT, "clean_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_aer/nonfatal_repeated": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "An uncorrected PCI Express error was followed by another within an hour. Errors logged in the first five "
        "minutes of a boot do not count, because some platforms log such errors at each boot.",
        "Single transactions fail. Jobs that use the device may be killed, or the device may soon fall off the bus.",
        _CARD_TODO,
        window="clean_seconds",
    ),
    "pcie_aer/nonfatal": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel counted or logged an uncorrected, non-fatal PCI Express error.",
        "A single transaction failed. A single error may be harmless (a probe of the device). Repeated errors are "
        "not harmless.",
        f"No action tonight. If the error repeats: {_CARD_TODO}",
        window="clean_seconds",
    ),
    "pcie_aer/not_recovered": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "After a PCI Express error, the kernel could not bring the device back. The condition is critical if the "
        "link was reset and stayed down. If a driver merely does not support recovery, the condition is a warning.",
        "The device is cut off or in an unknown state. Work that uses it fails.",
        f"If the condition is only a warning, no action is needed tonight. Power-cycle the node. {_CARD_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.REBOOT, "clean_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_aer/correctable": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The link corrects errors by retransmission more often than healthy links do.",
        "Some bandwidth is lost, with no other effect yet. Such links often get slower or fail later.",
        f"No action tonight. At the next maintenance: {_CARD_TODO}",
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "pcie_aer/fatal": EndsJob.ALWAYS,
    "pcie_aer/nonfatal_repeated": EndsJob.ALWAYS,
    "pcie_aer/not_recovered": EndsJob.ALWAYS,
}
