"""NVSwitch errors (SXids) in the kernel log.

Rules: the Fabric Manager guide puts an SXid into one of three classes. Always fatal is CRITICAL; potentially fatal is
CRITICAL if the driver's line contains Fatal; non-fatal warns. Codes that are not in the guide are judged by the
driver's word as well: for Fatal it has given up the link or the switch (nvswitch_set_fatal_error()). These are half of
the codes that it may call Fatal (open-gpu-kernel-modules 595.45.04, src/common/nvswitch/kernel: 20035, 22010, 25007,
...). Some lines have no such word, although the switch cannot work after them: they are DEGRADED, by their code, or
because they report a shutdown. All others warn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from healthd.api import (
    CheckSettings,
    Clears,
    Ends,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Seconds,
    Severity,
    is_decimal,
    printable,
    regex,
)
from healthd.nvidia import codes

USES = ""

# Lines of a switch that no longer works, without "Fatal" or "Non-fatal": open-gpu-kernel-modules 595.45.04,
# src/common/nvswitch/kernel: nvswitch.c, ls10/ls10.c (10007: its registers cannot be read), lr10/soe_lr10.c,
# ls10/soe_ls10.c (its controller, SOE), lr10/therm_lr10.c, ls10/therm_ls10.c (it shuts down: under 10006, or with that
# text under 10004, which otherwise reports a slowdown), ls10/heartbeat_ls10.c (28005; 28001 and 28003, hot
# transceivers, warn: "Deactivated", 28002 and 28004, follows when they have cooled down).
UNCLASSIFIED_FAULTS = {
    10006: "the switch is too hot and shuts down",
    10007: "I/O failure: the switch's registers cannot be read",
    26001: "the switch's controller (SOE) could not be reset",
    26002: "the switch's controller (SOE) could not be booted",
    26006: "the switch's controller (SOE) halted",
    28005: "a shutdown by the controller (SOE) because of hot transceivers (OSFP)",
}


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long an SXid that only warns stays open after its last line"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and switch, from all its events; the worst in this boot and window counts."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "sxid":
            groups.setdefault((event.code, event.pci), []).append(event)
    for (code, pci), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        current_events = [
            event
            for event in group
            if event.boot_id == newest.boot_id and event.last_time >= newest.last_time - config.warning_window_seconds
        ]
        worst = max(current_events, key=lambda event: (_severity(event), event.last_time))
        severity = _severity(worst)
        yield Finding(
            severity=severity,
            code=f"sxid/{code}",
            subject=pci,
            message=_message(worst, sum(event.lines for event in group)),
            clears=Clears.REBOOT,
            window_seconds=config.warning_window_seconds if severity is Severity.WARNING else 0.0,
            events=tuple(event.sequence for event in group),
        )


def _severity(event: KernelEvent) -> Severity:
    category = _category(int(event.code))
    if category == "always fatal" or (category != "non-fatal" and event.field("fatal") == "true"):
        return Severity.CRITICAL
    shut_down = int(event.code) in UNCLASSIFIED_FAULTS or event.field("shutdown") == "true"
    return Severity.DEGRADED if shut_down else Severity.WARNING


def _category(code: int) -> str:
    fact = codes.sxid(code)
    return fact.category if fact is not None else ""


def _message(event: KernelEvent, lines: int) -> str:
    found = dict(event.fields)
    driver_text = _driver_text(event)
    parts = [f"SXid {event.code}: {driver_text}" if driver_text else _title(int(event.code))]
    parts += [f"NVSwitch {found['switch']}"] if "switch" in found else []
    parts += [f"link {found['link']}"] if "link" in found else []
    parts += [{"true": "fatal", "false": "not fatal"}[found["fatal"]]] if "fatal" in found else []
    parts += [f"{lines} lines"] if lines > 1 else []
    return ", ".join(parts)


def _title(code: int) -> str:
    fact = codes.sxid(code)
    name = fact.name if fact is not None else UNCLASSIFIED_FAULTS.get(code, "unknown to this version")
    return f"SXid {code}: {name}"


_DRIVER_TEXT = regex(
    r"[^\n)]{0,80}\): \d{1,6}, {0,4}(?:(?:Fatal|Non-fatal), {0,4})?(?:Link -?\d{1,3}(?: |$))?([^\n]{0,80})"
)


def _driver_text(event: KernelEvent) -> str:
    """Return the driver's text for a code in no list, or for a listed code whose line reports a shutdown: "SOE Watchdog
    error". "" if there is none, or if the list has more detail."""
    code = int(event.code)
    if code in UNCLASSIFIED_FAULTS or event.field("further") or (_category(code) and not event.field("shutdown")):
        return ""
    found = _DRIVER_TEXT.match(event.text)
    return printable(found[1].strip()) if found else ""


_TODO = (
    "The line names switch and link (journalctl -k | grep SXid); read the fabric manager's log as well. Reboot after "
    "the drain. If you reset all GPUs and switches together instead, run healthd repaired CODE PCI afterwards. If it "
    "comes back on the same switch or link, open a case with NVIDIA."
)
_NO_ACTION = (
    "No action tonight: NVLink traffic continues. If it comes back on the same link, or a job on this node hangs in "
    "NCCL, drain the node and reset all GPUs and switches together, or reboot. Repeated errors on one link: open a "
    "case with NVIDIA."
)
_WINDOW = "warning_window_seconds"
_CLASSES = {
    "always fatal": "Jobs that use the switch fail: its links or the whole switch stop.",
    "potentially fatal": (
        "If the line contains Fatal, jobs that use the link or switch fail, and healthd drains the node. For "
        "Non-fatal traffic continues and healthd only warns. If it has neither word but reports a "
        "shutdown of the switch, healthd drains the node and requeues no job."
    ),
    "non-fatal": "The switch recovered from the error: NVLink traffic continues. healthd only warns.",
}


MILDER_SEVERITIES = (Severity.DEGRADED, Severity.WARNING)  # potentially fatal codes whose line does not contain Fatal


def explain(code: str) -> Explain | None:
    """Return the text for one code: "sxid/20034"; None if the code is not one of this check."""
    name = code.rpartition("/")[2]
    if not (is_decimal(name) and len(name) < 7):
        return None
    category = _category(int(name))
    if int(name) in UNCLASSIFIED_FAULTS:
        meaning = f"{_title(int(name))}. NVIDIA's driver logs it without calling it fatal or non-fatal."
        return Explain(Severity.DEGRADED, Clears.REBOOT, meaning, _CLASSES["always fatal"], _TODO)
    if not category:
        meaning = f"SXid {name} is in no list known to this version: an error of an NVSwitch, according to its driver."
        return _potentially_fatal(meaning)
    meaning = f"{_title(int(name))}. An error of an NVSwitch, {category} by NVIDIA's Fabric Manager guide."
    if category == "potentially fatal":
        return _potentially_fatal(meaning)
    if category == "non-fatal":
        return Explain(Severity.WARNING, Clears.REBOOT, meaning, _CLASSES[category], _NO_ACTION, window=_WINDOW)
    return Explain(Severity.CRITICAL, Clears.REBOOT, meaning, _CLASSES[category], _TODO)


def _potentially_fatal(meaning: str) -> Explain:
    """Return the text of a code whose line decides whether it is fatal."""
    todo = f"{_TODO} If it is only a warning: {_NO_ACTION[:1].lower()}{_NO_ACTION[1:]}"
    ends = Ends(Clears.REBOOT, _WINDOW)
    matters = _CLASSES["potentially fatal"]
    return Explain(Severity.CRITICAL, Clears.REBOOT, meaning, matters, todo, MILDER_SEVERITIES, milder=ends)


def known_codes() -> list[str]:
    """Return every SXid of the guide, and those that drain without it; `explain` handles others as well."""
    return [f"sxid/{number}" for number in sorted({*codes.sxid_numbers(), *UNCLASSIFIED_FAULTS})]


def cause(code: str) -> FailureCause:
    return FailureCause.NVLINK


def ends_job(code: str) -> EndsJob:
    """Return when an SXid ends a job, by its class in the Fabric Manager guide, else by the severity of its line."""
    always = _category(int(code.rpartition("/")[2])) == "always fatal"
    return EndsJob.ALWAYS if always else EndsJob.IF_ISOLATES
