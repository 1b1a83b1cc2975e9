"""Errors in the host's memory and processors, from the EDAC drivers' counters and the kernel log.

Rules: an uncorrected error means that a process lost data in that memory (Meta's study counts it as a node fault). The
controller's count includes all errors, even if the hardware did not identify the DIMM. Corrected errors do no harm, and
vendors' limits differ, so many corrected errors in a day are only a warning. Files: Linux,
ABI/testing/sysfs-devices-edac; drivers that use ranks (AMD) have rank0 instead of dimm0. Without an EDAC driver
(virtual machines), no counters are checked.

The counters restart at each boot. A counter above 0 at the first run after a boot is a warning. The error may be from
this boot or from the previous one: the firmware records errors, and its driver ghes_edac counts them when it starts.

The kernel log reports errors at once, even without an EDAC driver. If EDAC names the controller of an uncorrected
error, the error is the same condition as that controller's count. Machine checks, firmware records and pages with bad
data form one condition for the node if no controller is named within five seconds. Errors found by the memory scrubber
drain without a requeue, because no process has read the data yet. When a process reads the data, a machine check
follows. The count of such errors is never more severe than their line. Corrected errors are evaluated by their count
alone. Records from the previous boot in the registers or the firmware (BERT) are not faults of this boot. A record in
the registers is a warning, because it shows why the node went down. A BERT record is ignored, because firmware repeats
it after each boot.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

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
    Seconds,
    Severity,
    is_decimal,
    printable,
    regex,
)

USES = ""
AFTER_EVENTS = ("mce_edac",)

CONTROLLERS = "/sys/devices/system/edac/mc"
CONTROLLER = regex(r"mc[0-9]+")
DIMM = regex(r"(?:dimm|rank)[0-9]+")
ROW = regex(r"csrow[0-9]+")
DAY = 24 * 3600.0
INCIDENT_SECONDS = 5.0  # lines that are closer together than this report the same error, as when events are coalesced
MESSAGES = {
    "fatal": "fatal machine check",
    "uncorrected": "uncorrected machine check",
    "scrubbed": "the memory scrubber found an uncorrected error that no process has read",
    "process_killed": "an uncorrected memory error killed a process",
    "page_not_recovered": "the kernel could not retire a page with bad data",
    "recoverable": "the firmware reports an uncorrected error",
    "page_recovered": "the kernel retired a page with bad data",
    "deferred": "bad data was found that no process has used yet",
    "left_over": "an uncorrected machine check was found in a register, probably from the last boot",
    "pci_parity": "PCI parity or system error",
}
SCRUBBER = "14"  # memory error type "scrub uncorrected error" in CPER
DATA_LOSS_CODES = ("fatal", "uncorrected", "process_killed", "page_not_recovered")
WARNING_CODES = ("page_recovered", "deferred", "left_over", "pci_parity")


class Config(CheckSettings, frozen=True):
    """corrected_per_day  warn at more corrected errors than this on one DIMM within a day
    clean_seconds      errors clear after this long under load without new errors, or after a reboot
    """

    corrected_per_day: Count = 1000
    clean_seconds: Seconds = DAY


def validate(config: Config) -> str | None:
    if config.corrected_per_day < 0:
        return f"corrected_per_day: must not be negative, got {config.corrected_per_day}"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable = []
    controllers = list(filter(CONTROLLER.fullmatch, host.list(CONTROLLERS)))
    if not controllers:
        yield NothingToCheck("no EDAC memory controller")
    for controller in controllers:
        names = host.list(f"{CONTROLLERS}/{controller}")
        dimms = [f"{controller}/{name}" for name in names if DIMM.fullmatch(name)]
        rows = [f"{controller}/{name}" for name in names if ROW.fullmatch(name)]  # Linux before 3.6 has only these
        counts = {
            "ue_count": [controller],
            "ce_noinfo_count": [controller],  # corrected errors whose DIMM the hardware did not name
            "dimm_ce_count": dimms,
            "ce_count": [] if dimms else rows,
        }
        for part, file in ((part, file) for file, parts in counts.items() for part in parts):
            error = "uncorrected" if file == "ue_count" else "corrected"
            try:
                count = parse(host.read(f"{CONTROLLERS}/{part}/{file}"), f"{part}/{file}")
            except (OSError, ValueError) as problem:  # this error must not hide the other DIMMs
                unreadable.append(str(problem))
                continue
            labels = (("part", part),)
            reading = Observation(f"memory_edac_{error}_errors_total", count, ObservationKind.COUNTER, labels)
            yield reading
            new = past.growth(reading, 0.0)  # growth since the last run
            if error == "uncorrected" and count and _is_first_reading_after_boot(reading, past):
                message = f"{count} uncorrected memory errors were counted before the first run of this boot"
                code = "memory_edac/uncorrected_at_boot"
                yield Finding(Severity.WARNING, code, controller, message, clears=Clears.REBOOT)
            if new and error == "uncorrected":
                yield _uncorrected(host, controller, dimms, new)
            elif new:
                # Count only errors of this boot, because another DIMM may have been in that slot before.
                yield from _corrected(host, part, min(count, past.growth(reading, DAY) or 0.0), config)
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _is_first_reading_after_boot(reading: Observation, past: History) -> bool:
    """Return True if this is the first reading after a reboot."""
    return past.last(reading) is None and past.last(reading, any_boot=True) is not None


def parse(text: str | None, file: str) -> int:
    """Parse a 32-bit count. Raises ValueError for anything else, or if the file is missing (None)."""
    if text is None or not (is_decimal(text) and int(text) < 2**32):
        raise ValueError(f"{CONTROLLERS}/{file}: {'is missing' if text is None else f'not a count: {text[:40]!r}'}")
    return int(text)


def _uncorrected(host: Host, controller: str, dimms: list[str], new: float) -> Finding:
    """Return the finding for uncorrected errors. The message includes each DIMM's own count if the hardware identified
    the DIMM."""
    counts = {dimm: _read_or_empty(host, f"{dimm}/dimm_ue_count") for dimm in dimms}
    dimm_texts = [f"{_slot_name(host, dimm)} {count}" for dimm, count in counts.items() if count not in ("", "0")]
    message = f"{new:.0f} new uncorrected memory errors" + (
        f" (since boot: {', '.join(dimm_texts)})" if dimm_texts else ""
    )
    return Finding(
        Severity.CRITICAL, "memory_edac/uncorrected", controller, message, clears=Clears.REBOOT, log_sets_severity=True
    )


def _corrected(host: Host, part: str, daily: float, config: Config) -> Iterator[Finding]:
    if daily > config.corrected_per_day:
        yield Finding(
            Severity.WARNING,
            "memory_edac/corrected",
            part,
            f"{daily:.0f} corrected memory errors within a day on {_slot_name(host, part)}",
            clears=Clears.REBOOT,
            window_seconds=config.clean_seconds,
        )


def _slot_name(host: Host, part: str) -> str:
    """Return the DIMM's name with its slot, which the board's firmware or the driver provides."""
    label = _read_or_empty(host, f"{part}/dimm_label")
    return f"{label} ({part})" if label else part


def _read_or_empty(host: Host, file: str) -> str:
    """Return a file's text for a message. Return "" for an unreadable file, so that the fault is still reported."""
    try:
        return (host.read(f"{CONTROLLERS}/{file}") or "")[:60]
    except OSError:
        return ""


# --- kernel log


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and part, from all its events."""
    pcie_records = {(event.boot_id, event.field("record")) for event in events if event.kind == "pcie_aer"}
    edac_events = [event for event in events if event.kind == "mce_edac"]
    named = [event for event in edac_events if event.code in ("uncorrected", "scrubbed") and _part(event)]
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in named:
        groups.setdefault(("uncorrected", _part(event)), []).append(event)
    covers, covers_data_loss = (
        _same_time_as(named),
        _same_time_as(event for event in named if event.code == "uncorrected"),
    )
    machine_checks = [
        event
        for event in edac_events
        if (severity := _severity(event, pcie_records))
        and not (covers_data_loss if severity is Severity.CRITICAL else covers)(event)
    ]
    if machine_checks:
        groups["machine_check", ""] = machine_checks
    covers = _same_time_as([*named, *machine_checks])
    for event in edac_events:
        if event.code in WARNING_CODES and not covers(event):
            groups.setdefault((event.code, event.pci), []).append(event)
    for (name, part), group in groups.items():
        rated = [
            (_severity(event, pcie_records) or Severity.WARNING, event.last_time, event.sequence) for event in group
        ]
        severity, _, sequence = max(rated)
        yield Finding(
            severity,
            f"memory_edac/{name}",
            part,
            _message(next(event for event in group if event.sequence == sequence)),
            clears=Clears.REBOOT,
            window_seconds=0.0 if severity >= Severity.DEGRADED else config.clean_seconds,
            events=tuple(event.sequence for event in group),
        )


def _severity(event: KernelEvent, pcie_records: set[tuple[str, str]]) -> Severity | None:
    """Return the severity of an uncorrected error, or None for other events and for records that pcie_aer handles.

    A recoverable error in memory or a processor has lost data. In other hardware, it is only a warning.
    """
    number = event.field("record")
    if number and (event.boot_id, number) in pcie_records:
        return None
    if event.code in DATA_LOSS_CODES:
        return Severity.CRITICAL
    if event.code == "scrubbed":
        return Severity.DEGRADED
    if event.code != "recoverable":
        return None
    section = event.field("section")
    if "memory" in section and event.field("error_type") == SCRUBBER:
        return Severity.DEGRADED
    return Severity.CRITICAL if "memory" in section or "processor" in section else Severity.WARNING


def _same_time_as(events: Iterable[KernelEvent]) -> Callable[[KernelEvent], bool]:
    """Return a function that tests whether an event occurred close enough to one of `events` to be about the same
    error.
    """
    boots: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        boots.setdefault(event.boot_id, []).append((event.time, event.last_time))
    starts = {boot: sorted(start for start, _ in times) for boot, times in boots.items()}
    ends = {boot: list(itertools.accumulate((end for _, end in sorted(times)), max)) for boot, times in boots.items()}

    def covers(event: KernelEvent) -> bool:
        before = bisect.bisect_right(starts.get(event.boot_id, ()), event.last_time + INCIDENT_SECONDS)
        return before > 0 and ends[event.boot_id][before - 1] >= event.time - INCIDENT_SECONDS

    return covers


def _message(event: KernelEvent) -> str:
    summary = "uncorrected memory error" if _part(event) and event.code == "uncorrected" else MESSAGES[event.code]
    dimm = event.field("dimm")
    details = [f"{dimm} ({_part(event)})" if dimm else _part(event), event.pci, event.field("section")]
    details.append(f"bank {event.field('bank')}" if event.field("bank") else "")
    if event.pid:
        name = printable(event.process or "process")
        details.append(f"{name} (pid {event.pid})")
    details.append(f"{event.lines} lines" if event.lines > 1 else "")
    return ", ".join(text for text in (summary, *details) if text)


def _part(event: KernelEvent) -> str:
    return event.field("part")


_FIND_TODO = "The label in the message names the slot. dmidecode -t memory and the BMC's log show the slot as well. "

OBSERVATIONS = {
    "memory_edac_corrected_errors_total": Meaning("Memory errors that ECC has corrected since boot.", ("part",)),
    "memory_edac_uncorrected_errors_total": Meaning(
        "Memory errors since boot that ECC could not correct.",
        ("part",),
    ),
}

EXPLAIN = {
    "memory_edac/uncorrected": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "ECC found an error in the host's memory that it could not correct.",
        "Data was lost. Either a process was killed, or a process or the kernel computes with wrong bytes. If the "
        "memory scrubber found the error, no process has read the data yet, and the node only drains.",
        f"{_FIND_TODO}Reboot after the drain, then test the memory. If the error recurs, replace the DIMM.",
        also=(Severity.DEGRADED,),
    ),
    "memory_edac/uncorrected_at_boot": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "Uncorrected errors in the host's memory were already counted when the check first ran in this boot. The "
        "errors are from this boot or from the previous boot, and may have caused the reboot.",
        "If the errors are from this boot, a process or the kernel may be computing with wrong bytes.",
        "No action tonight. journalctl -k | grep -iE 'edac|mce|hardware error' shows when they occurred. "
        f"{_FIND_TODO}Test the memory at the next maintenance. If errors recur, replace the DIMM.",
    ),
    "memory_edac/machine_check": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "A processor, the firmware or the kernel reported an uncorrected memory or processor error. No driver named "
        "the memory controller.",
        "Data was lost in memory, in a cache or on a bus. A process was killed or computes with wrong bytes.",
        "journalctl -k | grep -iE 'mce|hardware error|memory failure' and the BMC's log name the processor, bank or "
        "DIMM. If the condition is only a warning, no action is needed tonight. Otherwise reboot after the drain. If "
        "the error recurs, replace that processor or DIMM.",
        also=(Severity.DEGRADED, Severity.WARNING),
        milder=Ends(Clears.REBOOT, "clean_seconds"),
    ),
    "memory_edac/page_recovered": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The kernel retired a page of memory that contained bad data.",
        "No data was lost unnoticed: the page was clean, or its process was notified. The same DIMM may have more "
        "errors.",
        f"No action tonight. {_FIND_TODO}Test the memory at the next maintenance. If errors recur, replace the DIMM.",
        window="clean_seconds",
    ),
    "memory_edac/deferred": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The hardware found data that it could not correct, and marked this data as bad. No process has used the "
        "data yet.",
        "A process that reads the data gets a machine check and is killed.",
        f"No action tonight. {_FIND_TODO}Drain the node at the next opportunity and test the memory.",
        window="clean_seconds",
    ),
    "memory_edac/left_over": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "A register contained an uncorrected machine check that raised no exception. The error is usually from "
        "unused memory or from the previous boot, and may have caused the reboot.",
        "The error may happen again.",
        "No action tonight. The BMC's log shows the time. mcelog --ascii or rasdaemon decodes the record. If it "
        "happens again, replace the DIMM or processor.",
        window="clean_seconds",
    ),
    "memory_edac/pci_parity": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "A device on the PCI bus reported a parity or system error. EDAC polling or an interrupt (NMI) detected the "
        "error.",
        "A transfer had wrong data. Many devices set these error bits without reason, so healthd only warns.",
        "No action tonight. Check lspci -vvv -s PCI, and look for errors from the device's driver at the same time. If "
        "the error recurs, reseat the card.",
        window="clean_seconds",
    ),
    "memory_edac/corrected": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "One DIMM had far more corrected errors in a day than healthy DIMMs have.",
        "No effect yet, because all errors were corrected. DIMMs often start to fail this way. A storm of errors "
        "also costs CPU time.",
        f"No action tonight. {_FIND_TODO}Reseat or replace that DIMM at the next maintenance. The warning also clears "
        "after a day under load without further errors.",
        window="clean_seconds",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.MEMORY),
    "memory_edac/pci_parity": FailureCause.PCIE,
}
ENDS_JOB = {
    "memory_edac/uncorrected": EndsJob.ALWAYS,
    "memory_edac/uncorrected_at_boot": EndsJob.NEVER,
    "memory_edac/machine_check": EndsJob.ALWAYS,
    "memory_edac/left_over": EndsJob.NEVER,
}
