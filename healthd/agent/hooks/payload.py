"""The JSON document that a hook gets on standard input. All functions are pure.

docs/hooks.md is the contract with programs. A new field may be added at any time; any other change needs a new VERSION.

The event of a drain does not name its conditions. `follow` therefore collects the open conditions from the events
before it. The event of a resume may be missing: Slurm can end a drain at a reboot, and lines can be dropped. A drain
whose conditions have all been cleared therefore ends with the next drain, and any drain ends with `dropped`.

Events of a newer healthd may have further fields, which are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import field
from msgspec.structs import replace

from healthd.common.values import Value

VERSION = 1
# For each event and stage that runs a hook, the hook.
HOOK_BY_EVENT = {
    ("drain", "confirmed"): "on_drain",
    ("resume", "confirmed"): "on_resume",
    ("repair", "succeeded"): "on_repair",
    ("repair", "gave_up"): "on_repair_failed",
}
SEVERITIES = ("critical", "degraded")  # of conditions that drain, worst first
MAX_CONDITIONS = 64
Fields = Mapping[str, Any]


class OpenCondition(Value, frozen=True):
    """An open condition. `since` is the time of the first observation, as text. `serial` is "" if it is unknown."""

    code: str
    check: str = ""
    subject: str = ""
    serial: str = ""
    severity: str = ""
    text: str = ""
    since: str = ""
    jobs: tuple[str, ...] = ()
    acknowledged: bool = False
    observed: bool = False


class DrainView(Value, frozen=True):
    """healthd's drain: its Reason, the time of its first Reason as text, and the conditions that caused it."""

    reason: str
    time: str
    conditions: tuple[OpenCondition, ...] = ()


class View(Value, frozen=True):
    """State of the node after the events so far.

    conditions  the open conditions, by id
    drain       healthd's drain in force, or None
    evidence    path of the newest evidence file since the drain, or ""
    """

    conditions: dict[str, OpenCondition] = field(default_factory=dict)
    drain: DrainView | None = None
    evidence: str = ""


# --- events


def hook_for_event(fields: Fields) -> str:
    """Return the hook that belongs to an event, or ""."""
    return HOOK_BY_EVENT.get((_text(fields, "event"), _text(fields, "stage")), "")


def follow(view: View, fields: Fields) -> View:
    """Return the view after an event."""
    event, name = _text(fields, "event"), _text(fields, "condition")
    if event in ("opened", "seen_again", "worsened", "acknowledged") and name and _text(fields, "code"):
        was = view.conditions.get(name)
        others = {key: value for key, value in view.conditions.items() if key != name}
        kept = dict(list(others.items())[-(MAX_CONDITIONS - 1) :])
        return replace(view, conditions={**kept, name: _condition(event, fields, was)})
    if event == "cleared":
        return replace(view, conditions={key: value for key, value in view.conditions.items() if key != name})
    if event == "alive" and "conditions_more" not in fields:
        return replace(view, conditions=_still_open(view.conditions, fields.get("conditions")))
    if event == "evidence" and (path := _text(fields, "path")):
        return replace(view, evidence=path)
    if hook_for_event(fields) == "on_drain":
        current = view.drain if view.drain and not _has_ended(view.drain, view.conditions) else None
        first = current.time if current else _text(fields, "time")
        causes = _causes(view.conditions, _text(fields, "reason"))
        evidence = view.evidence if current else ""
        return replace(view, drain=DrainView(_text(fields, "reason"), first, causes), evidence=evidence)
    if hook_for_event(fields) == "on_resume" or event == "dropped":
        return replace(view, drain=None, evidence="")
    return view


def _condition(event: str, fields: Fields, was: OpenCondition | None) -> OpenCondition:
    is_acknowledged = event == "acknowledged" or (event != "opened" and was is not None and was.acknowledged)
    jobs = fields.get("jobs")
    return OpenCondition(
        code=_text(fields, "code"),
        check=_text(fields, "check"),
        subject=_text(fields, "subject"),
        serial=_text(fields, "serial") or (was.serial if was else ""),
        severity=_text(fields, "severity"),
        text=_text(fields, "message"),
        since=_text(fields, "first"),
        jobs=tuple(job for job in jobs if isinstance(job, str)) if isinstance(jobs, list) else (),
        acknowledged=is_acknowledged,
        observed=fields.get("observed") is True,
    )


def _still_open(conditions: dict[str, OpenCondition], listed: object) -> dict[str, OpenCondition]:
    """Drop conditions that `alive` does not list: their `cleared` was lost with the ledger."""
    if not isinstance(listed, list):
        return conditions
    names = {_text(entry, "condition") for entry in listed if isinstance(entry, Mapping)}
    return {name: condition for name, condition in conditions.items() if name in names}


def _has_ended(drain: DrainView, conditions: Mapping[str, OpenCondition]) -> bool:
    """Return True if all conditions of a drain have been cleared. A drain without recorded conditions is in force."""
    still_open = {(c.code, c.subject, c.since) for c in conditions.values()}
    return bool(drain.conditions) and all((c.code, c.subject, c.since) not in still_open for c in drain.conditions)


def _causes(conditions: Mapping[str, OpenCondition], reason: str) -> tuple[OpenCondition, ...]:
    """Return the conditions that drain, with the one that the Reason names first, then the worst."""
    found = [c for c in conditions.values() if c.severity in SEVERITIES and not c.acknowledged and not c.observed]
    found.sort(key=lambda c: (c.code not in reason, SEVERITIES.index(c.severity), c.since))
    return tuple(found)


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


# --- the document


def document(hook: str, fields: Fields, before: View, after: View) -> dict[str, Any]:
    """Return the document for an event. `before` and `after` are the views before and after the event."""
    event = _text(fields, "event")
    drain = after.drain or before.drain
    is_new_drain = bool(after.drain and before.drain and after.drain.time != before.drain.time)
    conditions = drain.conditions if drain else _causes(before.conditions, "")
    found: dict[str, Any] = {
        "v": VERSION,
        "hook": hook,
        "event": event,
        "id": f"{_text(fields, 'stream_id')}-{fields.get('seq')}",
        "time": _text(fields, "time"),
        "cluster": _text(fields, "cluster"),
        "node": _text(fields, "node"),
        "reason": _text(fields, "reason") or (drain.reason if drain else ""),
    }
    if drain:
        found["drained_at"] = drain.time
    if event == "drain" and before.drain and not is_new_drain and before.drain.reason != found["reason"]:
        found["previous_reason"] = before.drain.reason
    if who := _text(fields, "who"):
        found["who"] = who
    if event == "repair":
        names = ("stage", "step", "id", "problem")
        found["repair"] = {name: fields[name] for name in names if isinstance(fields.get(name), str | int)}
    if evidence := _text(fields, "evidence") or (after if is_new_drain else before).evidence:
        found["evidence"] = evidence
    found["conditions"] = [_condition_document(condition) for condition in conditions]
    found["jobs"] = sorted({job for condition in conditions for job in condition.jobs})
    return found


def _condition_document(c: OpenCondition) -> dict[str, Any]:
    return {
        "code": c.code,
        "check": c.check,
        "subject": c.subject,
        **({"serial": c.serial} if c.serial else {}),
        "severity": c.severity,
        "text": c.text,
        "since": c.since,
        "jobs": list(c.jobs),
        "next_step": f"healthd explain {c.code}",
    }


def sample(hook: str, cluster: str, node: str, time: str) -> dict[str, Any]:
    """Return a document for `healthd hooks test`, with `"test": true`."""
    condition = OpenCondition(
        code="gpu_xid/79",
        check="gpu_xid",
        subject="0000:1b:00.0",
        serial="1650522012345",
        severity="critical",
        text="Xid 79: GPU has fallen off the bus",
        since=time,
        jobs=("4711",),
    )
    drain = DrainView("healthd: gpu_xid/79 0000:1b:00.0: Xid 79: GPU has fallen off the bus", time, (condition,))
    event, stage = next(pair for pair, name in HOOK_BY_EVENT.items() if name == hook)
    fields: dict[str, Any] = {
        "event": event,
        "stage": stage,
        "time": time,
        "cluster": cluster,
        "node": node,
        "reason": drain.reason,
    }
    fields |= {"stream_id": "test", "seq": 1}
    fields |= {"step": "reboot", "id": "20261129T060000Z-reboot"} if event == "repair" else {}
    view = View(drain=drain)
    after = View() if hook == "on_resume" else view
    return {**document(hook, fields, View() if hook == "on_drain" else view, after), "test": True}
