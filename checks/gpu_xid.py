"""GPU faults in the kernel log: Xids, GPUs that fell off the bus, and driver messages without an Xid.

With events = true in [nvml], also Xids and GPU Operational Events that NVML reports while a job uses a GPU.

Rules: NVIDIA's Xid catalogue assigns each code an immediate action, which determines the severity. A code is CRITICAL
if the GPU must be reset or is lost. Codes that an application can cause never drain a node, and unknown codes are
warnings. Driver messages about the GSP or NVLink without an Xid are reported only if no Xid within a minute reports the
same fault.

A line "Reset required" that names no GPU is a warning for the whole node, because the line may belong to any GPU.
gpu_access runs at once after such a line and queries each GPU through NVML. If a GPU needs a reset, gpu_access drains
the node (gpu_access/reset_required).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Gpu,
    Inventory,
    KernelEvent,
    Repair,
    Seconds,
    Severity,
    printable,
)
from healthd.nvidia import codes, recovery_action, xid_table
from healthd.nvidia.xid_table import XidMeaning

USES = ""

INCIDENT_SECONDS = 5.0  # lines that are closer together than this belong to one incident, as when events are coalesced
SAME_FAULT_SECONDS = 60.0  # an Xid and a driver message about the same fault are at most this far apart

# An event with this name causes no finding of its own if one of the listed events is on the same GPU, or has no GPU.
COVERED_BY: Mapping[str, frozenset[str]] = {
    "fallen_off_bus": frozenset({"79"}),
    "gpu_is_lost": frozenset({"79", "fallen_off_bus", "rm_init_failed"}),
    "probe_failed": frozenset({"79", "fallen_off_bus", "rm_init_failed"}),
    "gsp": frozenset(
        {*map(str, xid_table.LOST_XIDS | xid_table.RESET_XIDS), "154", "fallen_off_bus", "rm_init_failed"}
    ),
    "rc_watchdog": frozenset({"8", *map(str, xid_table.LOST_XIDS | xid_table.RESET_XIDS), "154", "fallen_off_bus"}),
    "nvlink": frozenset({"74", "79", "136", "155", *map(str, xid_table.NVLINK5)}),
    "operational_event": frozenset(
        {*map(str, xid_table.LOST_XIDS | xid_table.RESET_XIDS | {*xid_table.NVLINK5}), "74", "fallen_off_bus"}
    ),
}
# Xids 171 and 172 add detail to an uncorrectable memory error. With that error's Xid they are only recorded; alone they
# warn.
DETAIL_OF: Mapping[str, frozenset[str]] = dict.fromkeys(
    ("171", "172"), frozenset({"48", "63", "64", "94", "95", "140"})
)


class Config(CheckSettings, frozen=True):
    """application_window_seconds   how long a warning that an application caused stays open
    warning_window_seconds       how long every other warning stays open
    nvlink_repeat_seconds        a second NVLink error (Xid 74) within this time is CRITICAL
    """

    application_window_seconds: Seconds = 3600.0
    warning_window_seconds: Seconds = 24 * 3600.0
    nvlink_repeat_seconds: Seconds = 24 * 3600.0


class Rule(NamedTuple):
    severity: Severity
    clears: Clears
    window_seconds: float = 0.0


Groups = Mapping[tuple[str, str], Sequence[KernelEvent]]  # by name and part


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and part, from all its events."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    parts = _parts_by_number(events, node)
    for event in events:
        name = _name(event)
        if name:
            part = event.pci or parts.get(event.field("gpu"), "")
            groups.setdefault((name, part), []).append(event)
    for (name, part), group in groups.items():
        uncovered = _uncovered_events(group, name, part, groups)
        if not uncovered:
            continue
        rule, event = _judge(uncovered, part, groups, node, config)
        if rule is not None:
            yield Finding(
                severity=rule.severity,
                code=f"gpu_xid/{name}",
                subject=part,
                message=_message(event, part, sum(e.lines for e in uncovered), node),
                clears=rule.clears,
                window_seconds=rule.window_seconds,
                events=tuple(e.sequence for e in uncovered),
            )


def repairs(events: Sequence[KernelEvent]) -> Iterator[Repair]:
    """Yield a repair for each Xid 154 that withdraws a previously requested reset."""
    for event in events:
        previous_action, current_action = event.field("recovery_from"), event.field("recovery_to")
        if (
            event.kind == "xid"
            and event.pci
            and current_action == "0"
            and previous_action in map(str, recovery_action.RESETS)
        ):
            reason = "the driver no longer requests recovery (Xid 154)"
            yield Repair(Clears.GPU_RESET, event.pci, reason, before=event.last_time)


def _name(event: KernelEvent) -> str:
    """Return the text after "gpu_xid/" in the event's code, or "" for events that belong to other checks."""
    if event.kind in ("gsp", "nvlink", "peermem", "rc_watchdog"):
        return event.kind
    if event.kind == "gpu_event":
        return "operational_event"
    return event.code if event.kind in ("xid", "gpu_fallen_off_bus") else ""


def _parts_by_number(events: Sequence[KernelEvent], node: Inventory) -> dict[str, str]:
    """Return a dict that maps the driver's GPU numbers to PCI addresses. The pairs come from lines that contain both
    (Xid 119), or else from the inventory's indices.
    """
    by_index = {str(gpu.index): gpu.pci for gpu in node.gpus}
    return by_index | {event.field("gpu"): event.pci for event in events if event.pci and event.field("gpu")}


def _uncovered_events(group: Sequence[KernelEvent], name: str, part: str, groups: Groups) -> list[KernelEvent]:
    """Return a group's events, except those that an Xid or a clearer line about the same fault already covers."""
    covering_events = _events_on_part(COVERED_BY.get(name, frozenset()), part, groups)
    # If a GSP does not boot, consider lines about every GPU, because a missing GPU shifts the other GPUs' indices.
    init_failures = _events_on_part(frozenset({"rm_init_failed"}), "", groups) if name == "gsp" else []
    return [
        event
        for event in group
        if not any(_is_same_fault(covering_event, event) for covering_event in covering_events)
        and not (
            event.code in ("boot_failed", "boot_error")
            and any(_is_same_fault(covering_event, event) for covering_event in init_failures)
        )
    ]


def _events_on_part(names: frozenset[str], part: str, groups: Groups) -> list[KernelEvent]:
    """Return the events with these names on this GPU (`part`). Events without a part are included, because they may be
    about any GPU.
    """
    if part:
        return [event for name in names for event_part in (part, "") for event in groups.get((name, event_part), ())]
    return [event for (name, _), group in groups.items() if name in names for event in group]


def _is_same_fault(first: KernelEvent, second: KernelEvent) -> bool:
    gap = max(second.time - first.last_time, first.time - second.last_time)
    return (first.boot_id, first.history) == (second.boot_id, second.history) and gap <= SAME_FAULT_SECONDS


# --- severity of an event


def _judge(
    group: Sequence[KernelEvent], part: str, groups: Groups, node: Inventory, config: Config
) -> tuple[Rule | None, KernelEvent]:
    """Return the worst rule among the events of this boot and the warning window, and the event to which this rule
    applies.

    A recovery action (154) is a state, so only the newest event counts.
    """
    newest = max(group, key=lambda event: (event.last_time, event.sequence))
    name = _name(newest)
    if name == "154":
        return _recovery(newest, config), newest
    if name == "74":
        return _nvlink(group, newest, config)
    main_events = _events_on_part(DETAIL_OF[name], part, groups) if name in DETAIL_OF else ()
    judged = [
        (_rule(event, part, main_events, node, config), event)
        for event in group
        if event.boot_id == newest.boot_id and event.last_time >= newest.last_time - config.warning_window_seconds
    ]
    return max(judged, key=lambda pair: (pair[0].severity, pair[1].last_time))


def _rule(event: KernelEvent, part: str, main_events: Sequence[KernelEvent], node: Inventory, config: Config) -> Rule:
    if event.kind == "xid":
        if any(_is_same_fault(main_event, event) for main_event in main_events):
            return Rule(Severity.INFO, Clears.WINDOW, config.application_window_seconds)
        return _with_window(xid_table.meaning(event), config)
    if event.kind == "peermem":
        return Rule(Severity.WARNING, Clears.WINDOW, config.application_window_seconds)
    if event.kind == "gpu_event":
        return _operational(event, config)
    if event.kind in ("nvlink", "rc_watchdog"):
        return Rule(Severity.WARNING, Clears.GPU_RESET, config.warning_window_seconds)
    is_present = part in {gpu.pci for gpu in node.gpus} | {d.pci for d in node.devices if d.kind == "gpu"}
    if event.kind == "gsp":
        return _gsp(event, is_present, config)
    if event.code == "fallen_off_bus" or (event.code == "rm_init_failed" and is_present):
        return Rule(Severity.CRITICAL, Clears.REBOOT)
    return Rule(Severity.WARNING, Clears.REBOOT, config.warning_window_seconds)


def _with_window(meaning: XidMeaning, config: Config) -> Rule:
    """Return the rule for a meaning. A finding that drains stays open until it is cleared. A finding that only warns
    also ends after a window.
    """
    if meaning.severity >= Severity.DEGRADED:
        return Rule(meaning.severity, meaning.clears)
    window = config.application_window_seconds if meaning.caused_by_application else config.warning_window_seconds
    return Rule(meaning.severity, meaning.clears, window)


def _operational(event: KernelEvent, config: Config) -> Rule:
    """Return the rule for an operational event without an Xid. It never drains: NVIDIA calls these events a preview,
    whose codes and severities "may change before the interface is declared stable"
    (docs.nvidia.com/deploy/gpu-operational-events). The checks that read the GPU's state run at once and drain. An
    event that follows another one of its group is only recorded.
    """
    is_serious = event.field("severity") == "fatal" or event.field("uncontained") == "true"
    if is_serious and event.field("primary") == "true":
        return Rule(Severity.WARNING, Clears.GPU_RESET, config.warning_window_seconds)
    return Rule(Severity.INFO, Clears.WINDOW, config.application_window_seconds)


def _gsp(event: KernelEvent, is_present: bool, config: Config) -> Rule:
    """Return the rule for a GSP event. The rule is CRITICAL if the driver itself considers a known GPU unusable. Other
    events warn or are only recorded: a crash also has an Xid 120, and a timeout of many calls also has an Xid 119. A
    watchdog report has no Xid.
    """
    if event.code in ("dump", "message"):
        return Rule(Severity.INFO, Clears.WINDOW, config.application_window_seconds)
    if event.code == "boot_failed" and is_present:
        return Rule(Severity.CRITICAL, Clears.REBOOT)
    if event.code in ("pmu_halted", "reset_required") and is_present:
        return Rule(Severity.CRITICAL, Clears.GPU_RESET)
    return Rule(Severity.WARNING, Clears.GPU_RESET, config.warning_window_seconds)


def _recovery(event: KernelEvent, config: Config) -> Rule | None:
    """Return the rule for the action number in the line, or None if the number means no action. The number is used
    because the action's text differs between driver branches.
    """
    number = xid_table.number(event.field("recovery_to"))
    if number == 0:
        return None
    action = recovery_action.UNKNOWN if number is None else recovery_action.ACTIONS.get(number, recovery_action.UNKNOWN)
    return _with_window(XidMeaning(action.severity, action.clears), config)


def _nvlink(group: Sequence[KernelEvent], newest: KernelEvent, config: Config) -> tuple[Rule, KernelEvent]:
    """Return the rule for Xid 74 and its event. The rule is CRITICAL if a line reports a link as down or requests a
    fabric reset, or if there was an earlier incident as well. One incident may have a line for each link. gpu_nvlink
    detects links that went down silently.
    """
    since = newest.last_time - config.nvlink_repeat_seconds
    events = sorted((event for event in group if event.last_time >= since), key=lambda event: event.time)
    for event in reversed(events):
        if event.boot_id == newest.boot_id and _link_is_down(event):
            return Rule(Severity.CRITICAL, Clears.GPU_RESET), event
    for before, after in itertools.pairwise(events):
        if after.time - before.last_time > INCIDENT_SECONDS:
            return Rule(Severity.CRITICAL, Clears.GPU_RESET), newest
    return Rule(Severity.WARNING, Clears.GPU_RESET, config.nvlink_repeat_seconds), newest


def _link_is_down(event: KernelEvent) -> bool:
    return "true" in (event.field("inactive"), event.field("reset"))


def _registers(event: KernelEvent) -> list[int]:
    return [xid_table.register_value(text) or 0 for text in event.field("register").split()]


# --- messages and texts


def _message(event: KernelEvent, part: str, lines: int, node: Inventory) -> str:
    gpu = next((gpu for gpu in node.gpus if gpu.pci == part), None)
    parts = [_event_text(event), *_gpu_text(event, part, gpu)]
    if event.process or event.pid:
        name = printable(event.process or "process")
        parts.append(f"{name} (pid {event.pid})" if event.pid else name)
    if lines > 1:
        parts.append(f"{lines} lines")
    return ", ".join(parts)


def _gpu_text(event: KernelEvent, part: str, gpu: Gpu | None) -> list[str]:
    if gpu is not None:
        return [f"GPU {gpu.index} ({gpu.uuid})" if gpu.uuid else f"GPU {gpu.index}"]
    number = event.field("gpu")
    return [f"the driver's GPU{number}"] if number and not part else []


_TEXT_CODES = {
    "fallen_off_bus": "GPU has fallen off the bus",
    "gpu_is_lost": "calls fail because the GPU is lost",
    "rm_init_failed": "the driver could not initialise the GPU",
    "probe_failed": "the driver could not take over a GPU when it was loaded",
    "invalid_context": "nvidia-peermem was called for unknown memory",
    "rpc_timeout": "the GPU's system processor (GSP) does not respond in time",
    "crash": "the GPU's system processor (GSP) reports a crash or a watchdog timeout",
    "pmu_halted": "the GPU's power management unit (PMU) has halted",
    "boot_failed": "the GPU's system processor (GSP) does not boot",
    "boot_error": "error while the GPU's system processor (GSP) was booting",
    "reset_required": "the driver rejects the GPU until it is reset",
    "dump": "register and history dump of the GPU's system processor (GSP)",
    "locked": "the driver's watchdog found the GPU locked",
    "message": "driver message about the GPU's system processor (GSP)",
    "rx_detect": "NVLink: the driver does not detect the other end of a link",
    "training": "NVLink: a link failed to train",
    "error": "NVLink: driver error",
}


def _event_text(event: KernelEvent) -> str:
    names = ("status", "unit", "link", "fatal", "recovery_to", "gpu_instance", "caused_by")
    found = {name: event.field(name) for name in names}
    if event.kind == "gpu_event":
        words = [event.field("severity"), *(name for name in ("uncontained",) if event.field(name))]
        return f"operational event {printable(event.code)} without an Xid ({', '.join(words)})"
    if event.kind != "xid":
        texts = [_TEXT_CODES.get(event.code, event.code)]
        texts[0] += f" ({found['status']})" if found["status"] else ""
        return ", ".join([*texts, f"link {found['link']}"] if found["link"] else texts)
    code = xid_table.number(event.code)
    if code is None:
        return f"Xid {printable(event.code[:20])}: unknown to this version"
    if code == 154 and found["recovery_to"]:
        action = recovery_action.ACTIONS.get(xid_table.number(found["recovery_to"]) or 0)
        return f"Xid 154: {action.text if action else 'unknown recovery action ' + found['recovery_to']}"
    texts = [xid_table.title(code)]
    texts += [found["unit"]] if found["unit"] else []
    if (info := xid_table.register_value(event.field("intr_info"))) is not None:
        texts += [f"{code}:{codes.sub_code(info)}"]
        texts += [] if xid_table.nvlink5_row(event) is not None else ["unknown to this version"]
    texts += [f"link {found['link']}"] if found["link"] else []
    texts += [{"true": "fatal", "false": "not fatal"}.get(found["fatal"], found["fatal"])] if found["fatal"] else []
    texts += ["the link is down"] if event.field("inactive") else []
    texts += [bits.means for bits in codes.nvlink4(_registers(event))[:1]]
    texts += [f"MIG instance {found['gpu_instance']}"] if found["gpu_instance"] else []
    texts += [f"after Xid {found['caused_by']}"] if found["caused_by"] else []
    return ", ".join(texts)


def explain(code: str) -> Explain | None:
    """Return the explanation of one code ("gpu_xid/79"), or None if the code does not belong to this check."""
    from healthd.nvidia.xid_texts import explain as text_of

    check, _, name = code.partition("/")
    return text_of(name) if check == "gpu_xid" else None


def known_codes() -> list[str]:
    """Return every code in the catalogues. `explain` also handles codes that are in no catalogue."""
    text_codes = (
        "fallen_off_bus",
        "gpu_is_lost",
        "rm_init_failed",
        "probe_failed",
        "gsp",
        "nvlink",
        "operational_event",
        "peermem",
        "rc_watchdog",
    )
    return [f"gpu_xid/{name}" for name in (*text_codes, *codes.xid_numbers())]


def explain_more(code: str) -> Explain | None:
    """Return the explanation of a name that appears in messages but is not a condition ("nvlink5/149:4")."""
    from healthd.nvidia.nvlink5_texts import explain as text_of

    return text_of(code)


def known_more() -> list[str]:
    from healthd.nvidia.nvlink5_texts import all_names

    return all_names()


# Source: NVIDIA's Xid catalogue (healthd/nvidia/facts/xid.csv: names, descriptions, immediate actions).
_XIDS = {
    FailureCause.PCIE: (18, 167, 176),
    FailureCause.GPU_LOST: (79,),
    FailureCause.NVLINK: (74, 121, 136, *xid_table.NVLINK5, 155, 166, 170, 173),
    FailureCause.GPU_MEMORY: (48, 57, 58, 63, 64, 92, 94, 95, 140, 160, 161, 168, 171, 172),
    FailureCause.GSP: (119, 120, 175),
    FailureCause.DRIVER: (78,),
    FailureCause.POWER: (54,),
}
CAUSES = {
    "gpu_xid/fallen_off_bus": FailureCause.GPU_LOST,
    "gpu_xid/gpu_is_lost": FailureCause.GPU_LOST,
    "gpu_xid/rm_init_failed": FailureCause.GPU,
    "gpu_xid/probe_failed": FailureCause.DRIVER,
    "gpu_xid/gsp": FailureCause.GSP,
    "gpu_xid/nvlink": FailureCause.NVLINK,
    "gpu_xid/operational_event": FailureCause.GPU,
    "gpu_xid/peermem": FailureCause.DRIVER,
    "gpu_xid/rc_watchdog": FailureCause.GPU,
    **{f"gpu_xid/{number}": cause for cause, numbers in _XIDS.items() for number in numbers},
}
ENDS_JOB = {
    "gpu_xid/fallen_off_bus": EndsJob.ALWAYS,
    "gpu_xid/rm_init_failed": EndsJob.ALWAYS,
    "gpu_xid/gsp": EndsJob.ALWAYS,
    "gpu_xid/94": EndsJob.IF_NAMED,
}
PERMANENT = ("gpu_xid/54", "gpu_xid/64")


def cause(code: str) -> FailureCause:
    """Return the cause of an Xid that is not in CAUSES: either the user's program or a GPU fault."""
    number = int(code.rpartition("/")[2])
    return (
        FailureCause.USER
        if _requires_restart(number) or xid_table.worst_meaning(number).caused_by_application
        else FailureCause.GPU
    )


def ends_job(code: str) -> EndsJob:
    """Return the EndsJob value of an Xid that is not in ENDS_JOB."""
    number = int(code.rpartition("/")[2])
    if code not in CAUSES and (_requires_restart(number) or xid_table.worst_meaning(number).caused_by_application):
        return EndsJob.ALWAYS if _requires_restart(number) else EndsJob.NEVER
    return EndsJob.ALWAYS if xid_table.worst_meaning(number).severity >= Severity.DEGRADED else EndsJob.IF_ISOLATES


def _requires_restart(number: int) -> bool:
    """Return True if the program must be restarted: either NVIDIA's action requires that, or the program's own fault
    caused the Xid.
    """
    fact = codes.xid(number)
    return number in xid_table.AFTER_PROGRAM or (fact is not None and fact.action == "RESTART_APP")
