"""Stream events, computed from the ledger before and after a change. All functions are pure.

Three kinds of changes to the ledger produce events here: conditions, healthd's drain as Slurm shows it, and a pause.
store.py calls `change_events` in the only place where it replaces a ledger. Events that are not in the ledger (a
decision, a command, the daemon's start and stop) are emitted where they happen, with the fields of events/schema.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from healthd.agent.conditions.condition import ACTIVE_STATES
from healthd.agent.conditions.ledger import Ledger, Pause
from healthd.common.model import Condition, ConditionState, Decision, DrainRecord, Gpu, RunName
from healthd.common.repair_plan import Plan
from healthd.common.slurm.drain_reason import parse_claim, with_claim
from healthd.events.emitted import Emitted, EmittedCheck, EmittedCondition
from healthd.events.schema import Event

REPEAT_SECONDS = 3600.0  # a repeated sighting gets another line if the last line is this old
ALIVE_SECONDS = 24 * 3600.0
GPUS_SECONDS = 30 * 24 * 3600.0  # the node's GPUs are listed again, in case the last list was lost
FLUSH_SECONDS = 300.0  # from a job's end until the sightings around it are written
BEFORE_JOB_END_SECONDS = 600.0  # sightings within this time before a job's end may explain it
OPERATOR = "an operator"  # user who resumed the node, or ran `healthd repaired` for a flag that is still set
OVERFLOW = "others"  # the condition is counted in the overflow condition from now on (bounds.py)
UNCONFIRMED = "unconfirmed"  # the ack has ended for a condition that had not lasted for its confirm time


def change_events(before: Ledger, after: Ledger, now: float) -> tuple[list[Event], Emitted]:
    """Return the events for a change to the ledger, and the new state of the stream."""
    events: list[Event] = []
    emitted = after.emitted
    if after.conditions is not before.conditions or after.cleared is not before.cleared:
        entries = dict(emitted.conditions)
        events += _condition_events(before, after, entries, now)
        if events:
            emitted = replace(emitted, conditions=entries)
    if after.slurm is not before.slurm:
        events += _drain_events(before.slurm, after.slurm, _domain_field(after))
    if after.pause != before.pause:
        events += [_pause_event("ended", before.pause)] if before.pause else []
        events += [_pause_event("begun", after.pause)] if after.pause else []
    if after.repair != before.repair:
        events += _repair_events(before.repair.plan, after.repair.plan)
    return events, emitted


def _pause_event(stage: str, pause: Pause) -> Event:
    return Event("pause", {"stage": stage, "who": pause.user, "why": pause.why, "until": pause.until})


def _repair_events(before: Plan | None, after: Plan | None) -> list[Event]:
    """Return the event for a new plan, or for the end of the last one. Changed obstacles alone make no new plan."""
    if after is None:
        return [Event("repair", {"stage": "withdrawn", **_plan_fields(before)})] if before is not None else []
    if before is not None and replace(before, obstacles=after.obstacles) == after:
        return []
    return [Event("repair", {"stage": "advised", **_plan_fields(after)})]


def _plan_fields(plan: Plan) -> dict[str, object]:
    return {
        "step": plan.step.value,
        "next": plan.next.value,
        "why": plan.causes[0].reason.value,
        "causes": tuple(f"{cause.code} {cause.subject}".strip() for cause in plan.causes),
    }


def _drain_events(before: DrainRecord, after: DrainRecord, domain_field: dict[str, object]) -> list[Event]:
    # A changed claim of a repair is no new drain. The claim may have shortened the rest of the Reason.
    if not after.reason or with_claim(before.reason, parse_claim(after.reason)) == after.reason:
        return []
    return [Event("drain", {"stage": "confirmed", "reason": with_claim(after.reason, None), **domain_field})]


# --- conditions


def _condition_events(before: Ledger, after: Ledger, entries: dict[str, EmittedCondition], now: float) -> list[Event]:
    """Return the events for changed conditions. `entries` holds the last emitted state of each condition and is updated
    in place."""
    events: list[Event] = []
    previous = {c.key: c for c in before.conditions}
    history = set(map(id, before.cleared))
    cleared = [c for c in after.cleared if id(c) not in history]
    for c in cleared:
        if str(c.key) not in entries and c.opened_at:  # opened and cleared in one change
            events += _active_events(None, replace(c, state=ConditionState.OPEN), entries, after, now)
        events += _cleared_events(c, c.cleared_by, entries, after)
    cleared_keys = {c.key for c in cleared}
    for c in after.conditions:
        was = previous.pop(c.key, None)
        if was is c and c.key not in cleared_keys:
            continue
        if c.state in ACTIVE_STATES:
            events += _active_events(was, c, entries, after, now)
        else:
            events += _cleared_events(c, UNCONFIRMED, entries, after)
    for c in previous.values():
        events += _cleared_events(c, OVERFLOW, entries, after)
    return events


def _cleared_events(c: Condition, by: str, entries: dict[str, EmittedCondition], ledger: Ledger) -> list[Event]:
    entry = entries.pop(str(c.key), None)
    return [Event("cleared", {**_fields(c, entry.condition, entry.serial, ledger), "cleared_by": by})] if entry else []


def _active_events(
    was: Condition | None, c: Condition, entries: dict[str, EmittedCondition], ledger: Ledger, now: float
) -> list[Event]:
    """Return the events for an active condition that may have changed. `ledger` is the new ledger."""
    key, is_acknowledged = str(c.key), c.state is ConditionState.ACKNOWLEDGED
    entry = entries.get(key)
    new_events: list[tuple[str, dict[str, object]]] = []  # (name, fields in addition to the condition's own)
    if entry is None:
        new_events.append(("opened", {}))
    elif entry.acknowledged and not is_acknowledged:
        new_events.append(("opened", {"was": "acknowledged"}))
    if entry is not None and c.severity > entry.worst:
        new_events.append(("worsened", {"was": entry.worst.name.lower()}))
    is_new_ack = was is not None and c.ack is not None and c.ack != was.ack
    if is_acknowledged and (entry is None or not entry.acknowledged or is_new_ack):
        user_fields = {"who": c.ack.user, "why": c.ack.why, "until": c.ack.until} if c.ack else {"who": OPERATOR}
        new_events.append(("acknowledged", {**user_fields}))
    if not new_events and entry is not None and _is_repeat_due(entry, c, now):
        new_events.append(("seen_again", {}))
    if not new_events:
        return []
    name = entry.condition if entry else _condition_name(c)
    worst = max(c.severity, entry.worst) if entry else c.severity
    serial = _serial(c, entry, ledger)
    entries[key] = EmittedCondition(name, worst, is_acknowledged, c.count, c.last_seen, now, serial)
    fields = _fields(c, name, serial, ledger)
    return [Event(event, {**fields, **extra_fields}) for event, extra_fields in new_events]


def _is_repeat_due(entry: EmittedCondition, c: Condition, now: float) -> bool:
    """Return True if a repeat gets a line: at the 10th, 100th, ... sighting, or an hour after the last line."""
    return len(str(c.count)) > len(str(entry.count)) or (
        _is_unwritten(entry, c) and not 0.0 <= now - entry.at < REPEAT_SECONDS
    )


def _is_unwritten(entry: EmittedCondition, c: Condition) -> bool:
    return c.count > entry.count or c.last_seen > entry.last


def _condition_name(c: Condition) -> str:
    """Return the condition's name in the stream. The name is derived from the key and the first sighting, so it stays
    the same even if the ledger is lost.
    """
    return f"{zlib.crc32(str(c.key).encode('utf-8', 'replace')):08x}-{int(c.first_seen * 1000)}"


def _serial(c: Condition, entry: EmittedCondition | None, ledger: Ledger) -> str:
    """Return the serial number of the condition's GPU, or "" if it is unknown or the condition is about another part.

    It is unknown if the fault may be older than the GPU: it was only in log lines from before healthd's first start, or
    no fault was seen since the boot. It is also unknown until an inventory of this boot contains the GPU, because the
    slot may have another GPU since the boot.
    """
    if entry is not None and entry.serial:
        return entry.serial
    emitted = ledger.emitted
    if c.history or not c.boot_id == ledger.boot_id == emitted.gpus_boot_id or c.subject not in emitted.gpu_slots:
        return ""
    return next((gpu.serial for gpu in ledger.whole_gpus if gpu.pci == c.subject), "")


def _fields(c: Condition, name: str, serial: str, ledger: Ledger) -> dict[str, object]:
    return {
        "condition": name,
        "check": c.check,
        "instance": c.instance,
        "code": c.code,
        "subject": c.subject,
        "severity": c.severity.name.lower(),
        "kind": "level" if c.last_level_seen else "edge",
        "first": c.first_seen,
        "last": c.last_seen,
        "count": c.count,
        "jobs": tuple(c.job.split(",")) if c.job else (),
        "message": c.message,
        **({"history": True} if c.history else {}),
        **({"observed": True} if c.observed else {}),
        **({"slowdown": round(c.slowness.slowdown, 3), "onset": c.slowness.onset} if c.slowness else {}),
        **({"serial": serial} if serial else {}),
        **_domain_field(ledger),
    }


def _domain_field(ledger: Ledger) -> dict[str, object]:
    return {"domain": ledger.inventory.domain} if ledger.inventory.domain else {}


def renamed_part_events(before: Ledger, after: Ledger, now: float) -> tuple[list[Event], Emitted]:
    """Return events for active conditions whose message changed, or whose GPU's serial number became known, when the
    first inventory arrived (intake.take_inventory)."""
    messages = {c.key: c.message for c in before.conditions}
    entries, events = dict(after.emitted.conditions), []
    for c in after.conditions:
        entry = entries.get(str(c.key))
        if entry is None:
            continue
        serial = _serial(c, entry, after)
        if messages.get(c.key, c.message) != c.message or serial != entry.serial:
            events.append(Event("seen_again", _fields(c, entry.condition, serial, after)))
            entries[str(c.key)] = replace(entry, count=c.count, last=c.last_seen, at=now, serial=serial)
    return events, replace(after.emitted, conditions=entries)


# --- the node's GPUs


def gpus(ledger: Ledger, present: Sequence[Gpu], now: float) -> tuple[list[Event], Emitted]:
    """Return the event for the node's GPUs if they changed or were last listed long ago. `present` contains the GPUs of
    the newest inventory.

    The list contains a missing GPU, because only its replacement shows whether it was removed, unless the GPU is in
    another slot now.
    """
    if not ledger.whole_gpus:
        return [], ledger.emitted
    emitted = _with_read_slots(ledger, present)
    slots = {gpu.pci for gpu in present}
    uuids = {gpu.uuid for gpu in present if gpu.uuid}
    listed = tuple(
        {"subject": gpu.pci, "serial": gpu.serial, "uuid": gpu.uuid, "name": gpu.name}
        for gpu in sorted(ledger.whole_gpus, key=lambda gpu: gpu.pci)
        if gpu.pci in slots or gpu.uuid not in uuids
    )
    checksum = f"{zlib.crc32(repr(listed).encode('utf-8', 'replace')):08x}"
    if checksum == emitted.gpus and 0.0 <= now - emitted.gpus_at < GPUS_SECONDS:
        return [], emitted
    return [Event("gpus", {"gpus": listed})], replace(emitted, gpus=checksum, gpus_at=now)


def _with_read_slots(ledger: Ledger, present: Iterable[Gpu]) -> Emitted:
    """Return the state of the stream after an inventory with these GPUs was read."""
    emitted = ledger.emitted
    read_before = emitted.gpu_slots if emitted.gpus_boot_id == ledger.boot_id else ()
    slots = tuple(sorted({*read_before, *(gpu.pci for gpu in present)}))
    return replace(emitted, gpus_boot_id=ledger.boot_id, gpu_slots=slots)


# --- a job's end


def after_job_end(emitted: Emitted, now: float) -> Emitted:
    """Return the state of the stream after a job ended.

    Sightings in the five minutes after the job's end may explain the end. If another job ends before these sightings
    are written, one more flush follows and covers all such jobs.
    """
    return replace(emitted, ended_again=now) if emitted.job_ended else replace(emitted, job_ended=now)


def flush_time(emitted: Emitted) -> float:
    """Return the time to write the sightings around a job's end (epoch seconds), or infinity if no job has ended."""
    return emitted.job_ended + FLUSH_SECONDS if emitted.job_ended else float("inf")


def flush_events(ledger: Ledger, now: float) -> tuple[list[Event], Emitted]:
    """Return the sightings around a job's end that are not in the stream yet.

    This covers the time from ten minutes before the job's end until five minutes after it, when the sightings are
    written.
    """
    emitted = ledger.emitted
    if not emitted.job_ended or 0.0 <= now - emitted.job_ended < FLUSH_SECONDS:
        return [], emitted
    entries, events = dict(emitted.conditions), []
    for c in ledger.conditions:
        entry = entries.get(str(c.key))
        if entry and _is_unwritten(entry, c) and c.last_seen >= emitted.job_ended - BEFORE_JOB_END_SECONDS:
            serial = _serial(c, entry, ledger)
            events.append(Event("seen_again", _fields(c, entry.condition, serial, ledger)))
            entries[str(c.key)] = replace(entry, count=c.count, last=c.last_seen, at=now, serial=serial)
    return events, replace(emitted, conditions=entries, job_ended=emitted.ended_again, ended_again=0.0)


# --- the daemon's own life cycle


def started(emitted: Emitted, version: str, mode: str, last_alive: float) -> tuple[list[Event], Emitted]:
    """Return the event for a start. `last_alive` is 0 if it is unknown."""
    fields = {"version": version, "mode": mode, "last_alive": last_alive or None, "clean": emitted.stopped}
    return [Event("started", fields)], replace(emitted, stopped=False)


def stopped(emitted: Emitted, why: str) -> tuple[list[Event], Emitted]:
    return [Event("stopped", {"why": why})], replace(emitted, stopped=True)


def alive(ledger: Ledger, checks: Iterable[str], now: float) -> tuple[list[Event], Emitted]:
    """Return the daily "alive" event. `checks` contains the checks whose runs completed."""
    conditions = tuple(
        {
            "condition": entry.condition,
            "check": c.check,
            "instance": c.instance,
            "code": c.code,
            "subject": c.subject,
            "severity": c.severity.name.lower(),
            "state": c.state.value,
        }
        for c in ledger.conditions
        if (entry := ledger.emitted.conditions.get(str(c.key)))
    )
    fields = {"conditions": conditions, "checks": tuple(sorted(checks))}
    return [Event("alive", fields)], replace(ledger.emitted, alive_at=now)


def decision(taken: Decision, text: str) -> Event:
    return Event("decision", {"decision": type(taken).__name__.lower(), "text": text})


def is_alive_due(emitted: Emitted, now: float) -> bool:
    return not 0.0 <= now - emitted.alive_at < ALIVE_SECONDS


def checks(emitted: Emitted, configured: Mapping[RunName, tuple[str, str]], now: float) -> tuple[list[Event], Emitted]:
    """Return the checks that a start or a reload changed. `configured` maps each run to its version and its settings'
    checksum.
    """
    before = {RunName(previous.check, previous.instance): previous for previous in emitted.checks}
    after = []
    events = [_check_event("check_disabled", previous) for name, previous in before.items() if name not in configured]
    for name, (version, settings) in configured.items():
        previous = before.get(name)
        check = EmittedCheck(*name, version, settings, previous.since if previous else now)
        after.append(check)
        if check != previous:
            events.append(_check_event("check_changed" if previous else "check_enabled", check))
    return events, replace(emitted, checks=tuple(after)) if events else emitted


def _check_event(event: str, check: EmittedCheck) -> Event:
    fields = {name: getattr(check, name) for name in ("check", "instance", "settings", "since")}
    return Event(event, {**fields, "version": check.version})
