"""NVSwitch errors (SXids) in the kernel log.

Rules: the Fabric Manager guide assigns each SXid to one of three classes. An always fatal SXid is CRITICAL. A
potentially fatal SXid is CRITICAL if the driver's line contains Fatal. A non-fatal SXid is a warning. For codes that
are not in the guide, the driver's word is used as well: Fatal means that the driver has given up on the link or the
switch (nvswitch_set_fatal_error()). Half of the codes that the driver may mark as Fatal are not in the guide
(open-gpu-kernel-modules 595.45.04, src/common/nvswitch/kernel: 20035, 22010, 25007, ...). Some lines do not contain
Fatal although the switch cannot work afterwards. Such a line is DEGRADED, because of its code or because it reports a
shutdown. All other lines are warnings.
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

# Lines without "Fatal" or "Non-fatal" about a switch that no longer works: open-gpu-kernel-modules 595.45.04,
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
    28005: "the switch's controller (SOE) shuts down because of hot transceivers (OSFP)",
}


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long an SXid that only warns stays open after its last line"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and switch, from all its events. The worst event counts, among the events of this
    boot and of the window.
    """
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
    """Return the driver's own text ("SOE Watchdog error") for a code that is not listed, or a line that reports a
    shutdown.
    """
    code = int(event.code)
    if code in UNCLASSIFIED_FAULTS or event.field("further") or (_category(code) and not event.field("shutdown")):
        return ""
    found = _DRIVER_TEXT.match(event.text)
    return printable(found[1].strip()) if found else ""


_TODO = (
    "The kernel line names the switch and the link (journalctl -k | grep SXid). Read the fabric manager's log as "
    "well. Reboot after the drain. If you reset all GPUs and switches together instead of rebooting, run healthd "
    "repaired CODE PCI afterwards. If the error recurs on the same switch or link, open a case with NVIDIA."
)
_NO_ACTION = (
    "No action tonight, because NVLink traffic continues. If the error recurs on the same link, or a job on this node "
    "hangs in NCCL, drain the node and reset all GPUs and switches together, or reboot. If errors repeat on one link, "
    "open a case with NVIDIA."
)
_WINDOW = "warning_window_seconds"
_CLASSES = {
    "always fatal": "The switch or some of its links stop working, so jobs that use the switch fail.",
    "potentially fatal": (
        "If the kernel line contains Fatal, jobs that use the link or switch fail, and healthd drains the node. If "
        "the line contains Non-fatal, traffic continues and healthd only warns. If the line has neither word but "
        "reports a shutdown of the switch, healthd drains the node and requeues no job."
    ),
    "non-fatal": "The switch recovered from the error, and NVLink traffic continues. healthd only warns.",
}


MILDER_SEVERITIES = (Severity.DEGRADED, Severity.WARNING)  # potentially fatal codes whose line does not contain Fatal


def explain(code: str) -> Explain | None:
    """Return the explanation of one code ("sxid/20034"), or None if the code does not belong to this check."""
    name = code.rpartition("/")[2]
    if not (is_decimal(name) and len(name) < 7):
        return None
    category = _category(int(name))
    if int(name) in UNCLASSIFIED_FAULTS:
        meaning = f"{_title(int(name))}. NVIDIA's driver logs this error without calling it fatal or non-fatal."
        return Explain(Severity.DEGRADED, Clears.REBOOT, meaning, _CLASSES["always fatal"], _TODO)
    if not category:
        meaning = f"SXid {name} is an NVSwitch error according to its driver, and unknown to this version."
        return _potentially_fatal(meaning)
    meaning = f"{_title(int(name))}. An NVSwitch error, {category} according to NVIDIA's Fabric Manager guide."
    if category == "potentially fatal":
        return _potentially_fatal(meaning)
    if category == "non-fatal":
        return Explain(Severity.WARNING, Clears.REBOOT, meaning, _CLASSES[category], _NO_ACTION, window=_WINDOW)
    return Explain(Severity.CRITICAL, Clears.REBOOT, meaning, _CLASSES[category], _TODO)


def _potentially_fatal(meaning: str) -> Explain:
    """Return the explanation of a code that is fatal only if its line contains Fatal."""
    todo = f"{_TODO} If the condition is only a warning: {_NO_ACTION[:1].lower()}{_NO_ACTION[1:]}"
    ends = Ends(Clears.REBOOT, _WINDOW)
    matters = _CLASSES["potentially fatal"]
    return Explain(Severity.CRITICAL, Clears.REBOOT, meaning, matters, todo, MILDER_SEVERITIES, milder=ends)


def known_codes() -> list[str]:
    """Return every SXid in the guide, and other SXids that drain. `explain` also handles codes that are not in this
    list.
    """
    return [f"sxid/{number}" for number in sorted({*codes.sxid_numbers(), *UNCLASSIFIED_FAULTS})]


def cause(code: str) -> FailureCause:
    return FailureCause.NVLINK


def ends_job(code: str) -> EndsJob:
    """Return the EndsJob value for an SXid, from its class in the Fabric Manager guide. If the guide does not list the
    SXid, use the line's severity.
    """
    always = _category(int(code.rpartition("/")[2])) == "always fatal"
    return EndsJob.ALWAYS if always else EndsJob.IF_ISOLATES
