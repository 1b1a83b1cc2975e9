"""What the kernel log says of NVSwitches: SXids.

Rules: the Fabric Manager guide puts each SXid into one of three classes. Always fatal is CRITICAL; potentially fatal is
CRITICAL if the driver's line says Fatal; all others warn, and so do codes that are not in the guide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from healthd.config import CheckConfig, Seconds
from healthd.model import Clears, Explain, Finding, Inventory, KernelEvent, Severity
from healthd.nvidia import codes

USES = ""


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """warning_window_seconds   how long an SXid that is no fault of all links stays a warning"""

    warning_window_seconds: Seconds = 24 * 3600.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding for each code and switch, resting on all its events; the worst in this boot and window counts."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "sxid":
            groups.setdefault((event.code, event.pci), []).append(event)
    for (code, pci), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        counting = [
            event
            for event in group
            if event.boot_id == newest.boot_id and event.last_time >= newest.last_time - config.warning_window_seconds
        ]
        worst = max(counting, key=lambda event: (_severity(event), event.last_time))
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
    fatal = event.field("fatal") == "true"
    if category == "always fatal" or (category == "potentially fatal" and fatal):
        return Severity.CRITICAL
    return Severity.WARNING


def _category(code: int) -> str:
    fact = codes.sxid(code)
    return fact.category if fact is not None else ""


def _message(event: KernelEvent, lines: int) -> str:
    found = dict(event.fields)
    words = [_title(int(event.code))]
    words += [f"NVSwitch {found['switch']}"] if "switch" in found else []
    words += [f"link {found['link']}"] if "link" in found else []
    words += [{"true": "fatal", "false": "not fatal"}[found["fatal"]]] if "fatal" in found else []
    words += [f"{lines} lines"] if lines > 1 else []
    return ", ".join(words)


def _title(code: int) -> str:
    fact = codes.sxid(code)
    return f"SXid {code}: {fact.name}" if fact is not None else f"SXid {code}: unknown to this version"


_TODO = (
    "See which switch and link the line names (journalctl -k | grep SXid), and the fabric manager's log. Stop all GPU "
    "work on the node and reset all GPUs and switches together, or reboot. A switch or link that fails again is a case "
    "for NVIDIA."
)
_CLASSES = {
    "always fatal": "Jobs that use the switch fail: its links or the whole switch stop.",
    "potentially fatal": (
        "If the line says Fatal, jobs that use the link or switch fail, and healthd drains. If it says Non-fatal it "
        "is a warning."
    ),
    "non-fatal": "Traffic goes on. It is a warning.",
}


def explain(code: str) -> Explain | None:
    """The text for one code: "sxid/20034"; None if the code is none of this check's."""
    name = code.rpartition("/")[2]
    if not (name.isascii() and name.isdecimal() and len(name) < 7):
        return None
    category = _category(int(name))
    if not category:
        meaning = f"SXid {name} is in no list known to this version: an error of an NVSwitch that newer drivers report."
        matters = "Unknown: healthd only warns of codes that it cannot justify to drain for."
        return Explain(Severity.WARNING, Clears.REBOOT, meaning, matters, _TODO)
    worst = Severity.WARNING if category == "non-fatal" else Severity.CRITICAL
    meaning = f"{_title(int(name))}. An error of an NVSwitch, {category} by NVIDIA's Fabric Manager guide."
    return Explain(worst, Clears.REBOOT, meaning, _CLASSES[category], _TODO)


def known_codes() -> list[str]:
    """Every SXid of the guide; others are explained too."""
    return [f"sxid/{number}" for number in codes.sxid_numbers()]
