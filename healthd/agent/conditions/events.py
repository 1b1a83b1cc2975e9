"""What the stream is told: from the ledger before and after a change to events. Pure.

What the ledger holds is told here, wherever it changes (store.py calls `changes` in the one place where a ledger is
replaced): conditions, our drain as Slurm shows it, a pause. What it does not hold (a decision, a command, the daemon's
own life) is told by who knows it, in the words of events/schema.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from healthd.agent.conditions.condition import STANDING
from healthd.agent.conditions.ledger import Ledger, Pause
from healthd.common.model import Condition, ConditionState, Decision, RunName, SlurmMemory
from healthd.events.emitted import Told, ToldCheck, ToldCondition
from healthd.events.schema import Event

AGAIN_SECONDS = 3600.0  # so long after its last line a sight has a line again
ALIVE_SECONDS = 24 * 3600.0
FLUSH_SECONDS = 300.0  # after a job's end
JOBS_LAST_SECONDS = 600.0  # what was seen so long before a job's end may be why it ended
OPERATOR = "an operator"  # in Slurm, or by `healthd repaired` of what is still read
OTHERS = "others"  # it is counted among others from now on (bounds.py)
UNCONFIRMED = "unconfirmed"  # an ack of what had not lasted for its confirm time is over


def changes(before: Ledger, after: Ledger, now: float) -> tuple[list[Event], Told]:
    """The events in a change of the ledger, and what is told with them."""
    events: list[Event] = []
    told = after.told
    if after.conditions is not before.conditions or after.cleared is not before.cleared:
        known = dict(told.conditions)
        events += _of_conditions(before, after, known, now)
        if events:
            told = replace(told, conditions=known)
    if after.slurm is not before.slurm:
        events += _of_drain(before.slurm, after.slurm)
    if after.pause != before.pause:
        events += [_pause("ended", before.pause)] if before.pause else []
        events += [_pause("begun", after.pause)] if after.pause else []
    return events, told


def _pause(stage: str, pause: Pause) -> Event:
    return Event("pause", {"stage": stage, "who": pause.who, "why": pause.why, "until": pause.until})


def _of_drain(before: SlurmMemory, after: SlurmMemory) -> list[Event]:
    if after.reason in ("", before.reason):
        return []
    return [Event("drain", {"stage": "confirmed", "reason": after.reason})]


# --- conditions


def _of_conditions(before: Ledger, after: Ledger, known: dict[str, ToldCondition], now: float) -> list[Event]:
    """`known`: what was told of each condition that stood, changed here to what is told now."""
    events: list[Event] = []
    were = {c.key: c for c in before.conditions}
    history = set(map(id, before.cleared))
    over = [c for c in after.cleared if id(c) not in history]
    for c in over:
        if str(c.key) not in known and c.opened_at:  # it opened and cleared in one change
            events += _stands(None, replace(c, state=ConditionState.OPEN), known, now)
        events += _over(c, c.cleared_by, known)
    begun = {c.key for c in over}
    for c in after.conditions:
        was = were.pop(c.key, None)
        if was is c and c.key not in begun:
            continue
        if c.state in STANDING:
            events += _stands(was, c, known, now)
        else:
            events += _over(c, UNCONFIRMED, known)
    for c in were.values():
        events += _over(c, OTHERS, known)
    return events


def _over(c: Condition, by: str, known: dict[str, ToldCondition]) -> list[Event]:
    said = known.pop(str(c.key), None)
    return [Event("cleared", {**_fields(c, said.condition), "cleared_by": by})] if said else []


def _stands(was: Condition | None, c: Condition, known: dict[str, ToldCondition], now: float) -> list[Event]:
    """The events of a condition that stands and may have changed."""
    key, is_known = str(c.key), c.state is ConditionState.ACKNOWLEDGED
    said = known.get(key)
    news: list[tuple[str, dict[str, object]]] = []  # its name, and what it says besides the condition
    if said is None:
        news.append(("opened", {}))
    elif said.acknowledged and not is_known:
        news.append(("opened", {"was": "acknowledged"}))
    if said is not None and c.severity > said.worst:
        news.append(("worsened", {"was": said.worst.name.lower()}))
    is_new_ack = was is not None and c.ack is not None and c.ack != was.ack
    if is_known and (said is None or not said.acknowledged or is_new_ack):
        who = {"who": c.ack.who, "why": c.ack.why, "until": c.ack.until} if c.ack else {"who": OPERATOR}
        news.append(("acknowledged", {**who}))
    if not news and said is not None and _is_due(said, c, now):
        news.append(("seen_again", {}))
    if not news:
        return []
    name = said.condition if said else _name(c)
    worst = max(c.severity, said.worst) if said else c.severity
    known[key] = ToldCondition(name, worst, is_known, c.count, c.last_seen, now)
    fields = _fields(c, name)
    return [Event(event, {**fields, **also}) for event, also in news]


def _is_due(said: ToldCondition, c: Condition, now: float) -> bool:
    """Whether a sight has a line: the 10th, 100th, ..., and one an hour after the last line."""
    return len(str(c.count)) > len(str(said.count)) or (
        _is_unwritten(said, c) and not 0.0 <= now - said.at < AGAIN_SECONDS
    )


def _is_unwritten(said: ToldCondition, c: Condition) -> bool:
    return c.count > said.count or c.last_seen > said.last


def _name(c: Condition) -> str:
    """By its part and its first sight: also a ledger that lost what was told gives it the same name."""
    return f"{zlib.crc32(str(c.key).encode('utf-8', 'replace')):08x}-{int(c.first_seen * 1000)}"


def _fields(c: Condition, name: str) -> dict[str, object]:
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
    }


def named(before: Ledger, after: Ledger, now: float) -> tuple[list[Event], Told]:
    """Of what stands the message became another with the first inventory (intake.with_inventory)."""
    said = {c.key: c.message for c in before.conditions}
    known, events = dict(after.told.conditions), []
    for c in after.conditions:
        told = known.get(str(c.key))
        if told and said.get(c.key, c.message) != c.message:
            events.append(Event("seen_again", _fields(c, told.condition)))
            known[str(c.key)] = replace(told, count=c.count, last=c.last_seen, at=now)
    return events, replace(after.told, conditions=known)


# --- a job's end


def after_job_end(told: Told, now: float) -> Told:
    """A job ended. One that ends before the flush of another has one of its own behind that: what is seen within five
    minutes after its end may be why it ended. One flush serves all of these."""
    return replace(told, ended_again=now) if told.job_ended else replace(told, job_ended=now)


def flush_at(told: Told) -> float:
    """When what was seen around a job's end is written (epoch); infinity: no job has ended."""
    return told.job_ended + FLUSH_SECONDS if told.job_ended else float("inf")


def flushed(ledger: Ledger, now: float) -> tuple[list[Event], Told]:
    """The sights since ten minutes before a job's end that have no line yet, once five minutes have passed since."""
    told = ledger.told
    if not told.job_ended or 0.0 <= now - told.job_ended < FLUSH_SECONDS:
        return [], told
    known, events = dict(told.conditions), []
    for c in ledger.conditions:
        said = known.get(str(c.key))
        if said and _is_unwritten(said, c) and c.last_seen >= told.job_ended - JOBS_LAST_SECONDS:
            events.append(Event("seen_again", _fields(c, said.condition)))
            known[str(c.key)] = replace(said, count=c.count, last=c.last_seen, at=now)
    return events, replace(told, conditions=known, job_ended=told.ended_again, ended_again=0.0)


# --- the daemon's own life


def started(told: Told, version: str, mode: str, last_alive: float) -> tuple[list[Event], Told]:
    """`last_alive`: 0 = not known."""
    fields = {"version": version, "mode": mode, "last_alive": last_alive or None, "clean": told.stopped}
    return [Event("started", fields)], replace(told, stopped=False)


def stopped(told: Told, why: str) -> tuple[list[Event], Told]:
    return [Event("stopped", {"why": why})], replace(told, stopped=True)


def alive(ledger: Ledger, checks: Iterable[str], now: float) -> tuple[list[Event], Told]:
    """`checks`: those whose runs completed."""
    conditions = tuple(
        {
            "condition": said.condition,
            "check": c.check,
            "instance": c.instance,
            "code": c.code,
            "subject": c.subject,
            "severity": c.severity.name.lower(),
            "state": c.state.value,
        }
        for c in ledger.conditions
        if (said := ledger.told.conditions.get(str(c.key)))
    )
    fields = {"conditions": conditions, "checks": tuple(sorted(checks))}
    return [Event("alive", fields)], replace(ledger.told, alive_at=now)


def decision(taken: Decision, words: str) -> Event:
    return Event("decision", {"decision": type(taken).__name__.lower(), "text": words})


def is_alive_due(told: Told, now: float) -> bool:
    return not 0.0 <= now - told.alive_at < ALIVE_SECONDS


def checks(told: Told, configured: Mapping[RunName, tuple[str, str]], now: float) -> tuple[list[Event], Told]:
    """What a start or a reload changed. `configured`: (version, checksum of the settings) of each run."""
    before = {RunName(known.check, known.instance): known for known in told.checks}
    after = []
    events = [_of_check("check_disabled", known) for name, known in before.items() if name not in configured]
    for name, (version, settings) in configured.items():
        known = before.get(name)
        check = ToldCheck(*name, version, settings, known.since if known else now)
        after.append(check)
        if check != known:
            events.append(_of_check("check_changed" if known else "check_enabled", check))
    return events, replace(told, checks=tuple(after)) if events else told


def _of_check(event: str, check: ToldCheck) -> Event:
    fields = {name: getattr(check, name) for name in ("check", "instance", "settings", "since")}
    return Event(event, {**fields, "version": check.of_version})
