"""The ledger: conditions, events, kernel log cursors, and healthd's writes to Slurm.

An event's count and the cursor after the event are stored in one value, so that no event is counted twice after a
restart. All functions are pure.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import field
from msgspec.structs import replace

from healthd.agent.conditions.condition import MAX_SUPPRESSION_SECONDS
from healthd.agent.evidence.case import Case
from healthd.common.model import (
    MAX_HOLD_SECONDS,
    Ack,
    Condition,
    ConditionKey,
    ConditionState,
    DrainRecord,
    FleetHold,
    Gpu,
    Inventory,
    KernelEvent,
)
from healthd.common.moments import MOMENT, PAST, Changes, Moment, PastMoment, change_moments
from healthd.common.repair_plan import RepairRecord
from healthd.common.values import Value, Whole
from healthd.events.emitted import Emitted
from healthd.events.outbox import Outbox

VERSION = 1
EVENT_RETENTION_SECONDS = 24 * 3600.0
MAX_EVENTS = 500
CLEARED_RETENTION_SECONDS = 30 * 24 * 3600.0
MAX_CLEARED = 200
SIGHTING_FIELDS = ("last_seen", "last_level_seen", "count")  # fields of a condition that change with each sighting


class Pause(Value, frozen=True):
    until: Moment
    why: str
    user: str
    requested_at: Moment = 0.0


Suppression = TypeVar("Suppression", Ack, Pause)


class Ledger(Value, frozen=True):
    """State that healthd keeps across restarts.

        born           first start on this node
        trusted_since  earlier reports never drain (first start, change from mode observe, end of a pause)
        paused_at      when the last pause that has ended began
        cursors        position in each kernel log source, by the source's name
        next_sequence  sequence number of the next kernel event
        cleared        the most recently cleared conditions
        whole_gpus     GPUs in the last inventory that had no GPU missing
        repair         the plan for the repair of this node
        outbox         lines of the event stream that may not be on disk yet
        emitted        last state of the event stream
        evidence       case of the last drain (agent/evidence/case.py)

    Declare all times, here or inside a field, as `Moment` or `PastMoment`, so that they move when the clock is set.
    """

    version: Whole = VERSION
    born: Moment = 0.0
    boot_id: str = ""
    mode: str = ""
    trusted_since: PastMoment = 0.0
    paused_at: PastMoment = 0.0
    conditions: tuple[Condition, ...] = ()
    cleared: tuple[Condition, ...] = ()
    events: tuple[KernelEvent, ...] = ()
    next_sequence: Whole = 1
    cursors: dict[str, Any] = field(default_factory=dict)
    slurm: DrainRecord = DrainRecord()
    pause: Pause | None = None
    inventory: Inventory = Inventory()
    whole_gpus: tuple[Gpu, ...] = ()
    repair: RepairRecord = RepairRecord()
    outbox: Outbox = Outbox()
    emitted: Emitted = Emitted()
    evidence: Case | None = None

    def by_key(self) -> dict[ConditionKey, Condition]:
        return {c.key: c for c in self.conditions}


def with_conditions(ledger: Ledger, conditions: dict[ConditionKey, Condition]) -> Ledger:
    """Return the ledger with these conditions. Cleared conditions move to `cleared` (see `trim_history`)."""
    if conditions == ledger.by_key():
        return ledger
    newly_cleared = [c for c in conditions.values() if c.state is ConditionState.CLEARED]
    return replace(
        ledger,
        conditions=tuple(c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        cleared=(*ledger.cleared, *newly_cleared),
    )


def is_only_seen_again(before: Ledger, after: Ledger) -> bool:
    """Return True if the only change is that active conditions were reported again."""
    if len(before.conditions) != len(after.conditions):
        return False
    pairs = zip(before.conditions, after.conditions, strict=True)
    return replace(after, conditions=before.conditions) == before and all(
        previous is current
        or replace(previous, **{name: getattr(current, name) for name in SIGHTING_FIELDS}) == current
        for previous, current in pairs
    )


def trim_history(ledger: Ledger, now: float) -> Ledger:
    """Return the ledger with only the newest of the cleared conditions.

    Call this only after all cleared conditions are in the log and the stream.
    """
    history = [c for c in ledger.cleared if c.cleared_at > now - CLEARED_RETENTION_SECONDS][-MAX_CLEARED:]
    return ledger if len(history) == len(ledger.cleared) else replace(ledger, cleared=tuple(history))


def after_clock_step(ledger: Ledger, seconds: float, since: float = 0.0, until: float = float("inf")) -> Ledger:
    """Return the ledger after the clock was set by `seconds`. Only times between `since` and `until` on the old clock
    move.

    For example, a machine's clock may start in the year 2000 and stay there until NTP answers. Only the times that were
    written in the meantime are wrong, and they are in that range.
    """

    def move(moment: float) -> float:
        return moment + seconds if moment and since <= moment <= until else moment

    def move_suppression(suppression: Suppression) -> Suppression:
        # A suppression lasts as long as requested. If it ends later than a suppression that starts now could end, it
        # was recorded while the clock was right. If it was recorded while the clock was further ahead, it starts now.
        is_old = suppression.until <= until + MAX_SUPPRESSION_SECONDS
        end = suppression.until + seconds if is_old else suppression.until
        return replace(suppression, until=end, requested_at=min(move(suppression.requested_at), until + seconds))

    def move_hold(hold: FleetHold) -> FleetHold:
        if not since <= hold.since <= until:  # it was recorded while the clock was right
            return hold
        return replace(hold, since=hold.since + seconds, until=hold.until + seconds)

    whole: Changes = {Ack: move_suppression, Pause: move_suppression, FleetHold: move_hold}
    moved: Ledger = change_moments(ledger, MOMENT, move, whole)
    return moved


def without_future_times(ledger: Ledger, now: float) -> Ledger:
    """Return the ledger without times in the future, which were recorded while the clock was ahead.

    A pause, an ack or a hold lasts as long as requested, starting now. A `PastMoment` in the future becomes now;
    otherwise nothing would drain before that time. Resumed drains in the future are dropped, because their real times
    are unknown. Otherwise flapping.py would always count them as just before the next drain.
    """

    def end(began: float, until: float) -> float:
        return until - max(began - now, 0.0)

    def limit_suppression(suppression: Suppression) -> Suppression:
        return replace(
            suppression,
            until=end(suppression.requested_at, suppression.until),
            requested_at=min(suppression.requested_at, now),
        )

    def limit_hold(hold: FleetHold) -> FleetHold:
        until = min(end(hold.since, hold.until), now + 2 * MAX_HOLD_SECONDS)  # a later time may be from a wrong clock
        return replace(hold, since=min(hold.since, now), until=until)

    whole: Changes = {Ack: limit_suppression, Pause: limit_suppression, FleetHold: limit_hold}
    without_cleared = replace(ledger, cleared=())
    limited: Ledger = change_moments(without_cleared, PAST, lambda moment: min(moment, now), whole)
    resumed = tuple(drain for drain in limited.slurm.resumed_drains if max(drain.drained_at, drain.resumed_at) <= now)
    return replace(limited, cleared=ledger.cleared, slurm=replace(limited.slurm, resumed_drains=resumed))
