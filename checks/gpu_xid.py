"""What the kernel log says of GPUs: Xids, GPUs that are gone.

Rules: NVIDIA's Xid catalogue gives each code an immediate action, and the action the severity. What resets or
loses the GPU is CRITICAL; what is an application's doing never drains a node; unknown codes warn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from healthd import codes
from healthd.config import CheckConfig
from healthd.model import Clears, Explain, Finding, Inventory, KernelEvent, Severity

USES = ""

GONE = frozenset({79, 151})
# The catalogue's RESET_GPU class, and 48 (uncorrectable error).
RESET = frozenset({46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
# gpu_row_remap and gpu_recovery_action judge what these announce; 45 follows another Xid.
COMPANIONS = {45: Severity.INFO, 63: Severity.INFO, 94: Severity.WARNING}
# Of the numbers that Xid 154 and NVML's field 230 share; others are unknown or no fault of this node.
RECOVERY: Mapping[int, tuple[Severity, Clears, str]] = {
    1: (Severity.CRITICAL, Clears.GPU_RESET, "reset the GPU"),
    2: (Severity.CRITICAL, Clears.REBOOT, "reboot the node"),
    3: (Severity.WARNING, Clears.GPU_RESET, "drain peer-to-peer traffic"),
    4: (Severity.CRITICAL, Clears.GPU_RESET, "drain and reset the GPU"),
    5: (Severity.WARNING, Clears.GPU_RESET, "recover the IMEX domain"),
    6: (Severity.CRITICAL, Clears.GPU_RESET, "reset the bus"),
    7: (Severity.CRITICAL, Clears.REBOOT, "reboot the system"),
}
SAME_LOSS_SECONDS = 60.0  # a lost GPU is said by its Xid and in other words, at once or when a call notices it
INCIDENT_SECONDS = 5.0  # lines closer than this are one incident, as when events are folded


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """application_window_seconds   how long a code that an application caused stays a warning
    warning_window_seconds       the same for every other warning
    nvlink_repeat_seconds        a second NVLink error (Xid 74) within this is CRITICAL
    """

    application_window_seconds: float = 3600.0
    warning_window_seconds: float = 24 * 3600.0
    nvlink_repeat_seconds: float = 24 * 3600.0


class Rule(NamedTuple):
    severity: Severity
    clears: Clears
    window_seconds: float = 0.0


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding per code and part, resting on all its events."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        name = _name(event)
        if name:
            groups.setdefault((name, event.pci), []).append(event)
    for (name, part), group in groups.items():
        if name == "fallen_off_bus":
            xids = groups.get(("79", part), ())
            group = [event for event in group if not any(_says_the_same(xid, event) for xid in xids)]
        if not group:
            continue
        rule, event = _judge(group, node, config)
        if rule is not None:
            yield Finding(
                severity=rule.severity,
                code=f"gpu_xid/{name}",
                subject=part,
                message=_message(event, part, sum(e.lines for e in group), node),
                clears=rule.clears,
                window_seconds=rule.window_seconds,
                events=tuple(e.sequence for e in group),
            )


def _name(event: KernelEvent) -> str:
    return event.code if event.kind in ("xid", "gpu_fallen_off_bus") else ""


def _says_the_same(xid: KernelEvent, lost: KernelEvent) -> bool:
    apart = max(lost.time - xid.last_time, xid.time - lost.last_time)
    return (xid.boot_id, xid.history) == (lost.boot_id, lost.history) and apart <= SAME_LOSS_SECONDS


def _judge(group: Sequence[KernelEvent], node: Inventory, config: Config) -> tuple[Rule | None, KernelEvent]:
    """(rule, the event that it rests on): the worst of what this boot showed within the warning window.

    A recovery action (154) is a state: the newest counts alone.
    """
    newest = max(group, key=lambda event: (event.last_time, event.sequence))
    if newest.kind == "xid" and newest.code == "154":
        return _recovery(newest, config), newest
    if newest.kind == "xid" and newest.code == "74":
        return _nvlink(group, newest, config), newest
    judged = [
        (rule, event)
        for event in group
        if event.boot_id == newest.boot_id and event.last_time >= newest.last_time - config.warning_window_seconds
        if (rule := _rule(event, node, config)) is not None
    ]
    return max(judged, key=lambda pair: (pair[0].severity, pair[1].last_time), default=(None, newest))


def _rule(event: KernelEvent, node: Inventory, config: Config) -> Rule | None:
    if event.code == "fallen_off_bus":
        return Rule(Severity.CRITICAL, Clears.REBOOT)
    if event.code == "rm_init_failed":
        present = {gpu.pci for gpu in node.gpus} | {device.pci for device in node.devices if device.kind == "gpu"}
        if event.pci in present:
            return Rule(Severity.CRITICAL, Clears.REBOOT)
        return Rule(Severity.WARNING, Clears.REBOOT, config.warning_window_seconds)
    return xid_rule(event, config)


def xid_rule(event: KernelEvent, config: Config) -> Rule:
    code = int(event.code)
    fact = codes.xid(code)
    if code in GONE:
        return Rule(Severity.CRITICAL, Clears.REBOOT)
    if code in RESET:
        return Rule(Severity.CRITICAL, Clears.GPU_RESET)
    if code in COMPANIONS:
        return Rule(COMPANIONS[code], Clears.WINDOW, config.application_window_seconds)
    if 144 <= code <= 150:
        fatal = _decoded(event) == "RESET_GPU" and _field(event, "fatal") == "true"
        if fatal:
            return Rule(Severity.CRITICAL, Clears.GPU_RESET)
        return Rule(Severity.WARNING, Clears.GPU_RESET, config.warning_window_seconds)
    if fact is not None and fact.action in ("RESTART_APP", "IGNORE"):
        severity = Severity.WARNING if fact.action == "RESTART_APP" else Severity.INFO
        return Rule(severity, Clears.WINDOW, config.application_window_seconds)
    return Rule(Severity.WARNING, Clears.WINDOW, config.warning_window_seconds)


def _decoded(event: KernelEvent) -> str:
    """NVIDIA's action for the unit and registers that an Xid 144-150 shows, "" where its table has no such row."""
    unit, info, status = (_field(event, name) for name in ("unit", "intr_info", "error_status"))
    if not (unit and info and status):
        return ""
    row = codes.nvlink5(int(event.code), unit, int(info, 16), int(status, 16))
    return row.action if row is not None else ""


def _recovery(event: KernelEvent, config: Config) -> Rule | None:
    """By the number that the line gives: its words change with the driver's branch. None: no action is needed."""
    action = _field(event, "recovery_to")
    if action == "0":
        return None
    unknown = (Severity.WARNING, Clears.GPU_RESET, "")
    severity, clears, _ = RECOVERY.get(int(action), unknown) if action else unknown
    return Rule(severity, clears, config.warning_window_seconds if severity is Severity.WARNING else 0.0)


def _nvlink(group: Sequence[KernelEvent], newest: KernelEvent, config: Config) -> Rule:
    """CRITICAL if an incident lies before the newest one, which may be several lines: one for each link."""
    since = newest.last_time - config.nvlink_repeat_seconds
    events = sorted((event for event in group if event.last_time >= since), key=lambda event: event.time)
    for before, after in itertools.pairwise(events):
        if after.time - before.last_time > INCIDENT_SECONDS:
            return Rule(Severity.CRITICAL, Clears.GPU_RESET)
    return Rule(Severity.WARNING, Clears.GPU_RESET, config.nvlink_repeat_seconds)


def _field(event: KernelEvent, name: str) -> str:
    return dict(event.fields).get(name, "")


# --- for people


def _message(event: KernelEvent, part: str, lines: int, node: Inventory) -> str:
    gpu = next((gpu for gpu in node.gpus if gpu.pci == part), None)
    parts = [_what(event)]
    if gpu is not None:
        parts.append(f"GPU {gpu.index} ({gpu.uuid})" if gpu.uuid else f"GPU {gpu.index}")
    if event.process or event.pid:
        name = "".join(c if c.isprintable() else "?" for c in event.process or "process")
        parts.append(f"{name} (pid {event.pid})" if event.pid else name)
    if lines > 1:
        parts.append(f"{lines} lines")
    return ", ".join(parts)


def _what(event: KernelEvent) -> str:
    if event.code == "fallen_off_bus":
        return "GPU has fallen off the bus"
    if event.code == "rm_init_failed":
        status = _field(event, "status")
        return "the driver could not initialise the GPU" + (f" ({status})" if status else "")
    found = {name: _field(event, name) for name in ("unit", "link", "fatal", "recovery_to", "gpu_instance")}
    words = [title(int(event.code))]
    if event.kind == "xid" and event.code == "154" and found["recovery_to"]:
        action = RECOVERY.get(int(found["recovery_to"]))
        return f"Xid 154: {action[2] if action else 'unknown recovery action ' + found['recovery_to']}"
    words += [found["unit"]] if found["unit"] else []
    words += [f"link {found['link']}"] if found["link"] else []
    words += [{"true": "fatal", "false": "not fatal"}[found["fatal"]]] if found["fatal"] else []
    words += [f"MIG instance {found['gpu_instance']}"] if found["gpu_instance"] else []
    return ", ".join(words)


def title(code: int) -> str:
    """ "Xid 79: GPU has fallen off the bus"; the driver's own name where the catalogue has no words."""
    fact = codes.xid(code)
    if fact is None:
        return f"Xid {code}"
    words = fact.description if fact.description not in ("", "Reserved", "Unused") else fact.mnemonic
    return f"Xid {code}: {words}"


def explain(code: str) -> Explain | None:
    """The text for one code: "gpu_xid/79"; None if it is none of this check's."""
    from healthd.xid_texts import explain as text_of

    return text_of(code.rpartition("/")[2])


def known_codes() -> list[str]:
    """Every code that a catalogue names; others are explained too."""
    return [f"gpu_xid/{name}" for name in ("fallen_off_bus", "rm_init_failed", *codes.xid_numbers())]
