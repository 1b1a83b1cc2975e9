"""What healthd remembers: conditions, events, the kernel log's cursor, what it wrote into Slurm, counters' past.

An event's count and the cursor behind it are in one value, so that a restart counts no event twice. Pure.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import field
from msgspec.structs import replace

from healthd.agent.conditions.condition import LONGEST_WISH_SECONDS
from healthd.common.model import (
    LONGEST_HOLD_SECONDS,
    Ack,
    Condition,
    ConditionKey,
    ConditionState,
    FleetHold,
    Gpu,
    Inventory,
    KernelEvent,
    SlurmMemory,
)
from healthd.common.moments import MOMENT, PAST, Changes, Moment, PastMoment, with_moments
from healthd.common.values import Value, Whole
from healthd.events.emitted import Told
from healthd.events.outbox import Outbox

VERSION = 1
KEEP_EVENTS_SECONDS = 24 * 3600.0
KEEP_EVENTS = 500
KEEP_CLEARED_SECONDS = 30 * 24 * 3600.0
KEEP_CLEARED = 200
SEEN = ("last_seen", "last_level_seen", "count")  # of a condition: what another look at it changes


class Pause(Value, frozen=True):
    until: Moment
    why: str
    who: str
    given: Moment = 0.0


Wish = TypeVar("Wish", Ack, Pause)


class Ledger(Value, frozen=True):
    """born: first start ever. trusted_since: what was seen before it never drains (first start, switch from observe,
    end of a pause). cursors: how far each source of the kernel log was read, by its name. next_sequence: of kernel
    events. cleared: the conditions that ended last. whole_gpus: those of the inventory when none was missing.
    outbox: lines of the event stream that are not known to be on the disk; told: what the stream has said.

    A time that is added here, or below, is a `Moment` or a `PastMoment`: it then moves when the clock is set.
    """

    version: Whole = VERSION
    born: Moment = 0.0
    boot_id: str = ""
    mode: str = ""
    trusted_since: PastMoment = 0.0
    conditions: tuple[Condition, ...] = ()
    cleared: tuple[Condition, ...] = ()
    events: tuple[KernelEvent, ...] = ()
    next_sequence: Whole = 1
    cursors: dict[str, Any] = field(default_factory=dict)
    slurm: SlurmMemory = SlurmMemory()
    pause: Pause | None = None
    inventory: Inventory = Inventory()
    whole_gpus: tuple[Gpu, ...] = ()
    outbox: Outbox = Outbox()
    told: Told = Told()

    def by_key(self) -> dict[ConditionKey, Condition]:
        return {c.key: c for c in self.conditions}


def with_conditions(ledger: Ledger, conditions: dict[ConditionKey, Condition]) -> Ledger:
    """The ledger with these conditions. Those that were cleared move to `cleared`, all (`with_short_history`)."""
    if conditions == ledger.by_key():
        return ledger
    gone = [c for c in conditions.values() if c.state is ConditionState.CLEARED]
    return replace(
        ledger,
        conditions=tuple(c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        cleared=(*ledger.cleared, *gone),
    )


def is_only_seen_again(before: Ledger, after: Ledger) -> bool:
    """Whether nothing is new but that conditions which stood were seen once more."""
    if len(before.conditions) != len(after.conditions):
        return False
    pairs = zip(before.conditions, after.conditions, strict=True)
    return replace(after, conditions=before.conditions) == before and all(
        one is other or replace(one, **{name: getattr(other, name) for name in SEEN}) == other for one, other in pairs
    )


def with_short_history(ledger: Ledger, now: float) -> Ledger:
    """The ledger with the newest of `cleared`, once the log and the stream were told of all that ended."""
    history = [c for c in ledger.cleared if c.cleared_at > now - KEEP_CLEARED_SECONDS][-KEEP_CLEARED:]
    return ledger if len(history) == len(ledger.cleared) else replace(ledger, cleared=tuple(history))


def after_clock_step(ledger: Ledger, seconds: float, since: float = 0.0, until: float = float("inf")) -> Ledger:
    """Return the ledger after the clock was set by `seconds`: moments in `since`..`until` of the old clock move too.

    A machine that boots in the year 2000 until NTP answers wrote only what lies in that range: the rest is right.
    """

    def move(moment: float) -> float:
        return moment + seconds if moment and since <= moment <= until else moment

    def moved_wish(wish: Wish) -> Wish:
        # It lasts as long as requested. An end further away than a wish can last was recorded while the clock was
        # right; a wish that was recorded while the clock stood further ahead had begun by now.
        is_old = wish.until <= until + LONGEST_WISH_SECONDS
        end = wish.until + seconds if is_old else wish.until
        return replace(wish, until=end, given=min(move(wish.given), until + seconds))

    def moved_hold(hold: FleetHold) -> FleetHold:
        if not since <= hold.since <= until:  # it was recorded while the clock was right
            return hold
        return replace(hold, since=hold.since + seconds, until=hold.until + seconds)

    whole: Changes = {Ack: moved_wish, Pause: moved_wish, FleetHold: moved_hold}
    moved: Ledger = with_moments(ledger, MOMENT, move, whole)
    return moved


def with_none_in_the_future(ledger: Ledger, now: float) -> Ledger:
    """Return the ledger without beginnings that lie in the future: they were recorded while the clock stood ahead.

    A pause, an ack or a hold lasts as long as requested, from now on. A `PastMoment` is now at the latest: nothing
    would drain before that moment. Drains that were lifted in the future are dropped: when that really was is not
    known, and they would be in a row with the next one for ever.
    """

    def end(began: float, until: float) -> float:
        return until - max(began - now, 0.0)

    def wish_by_now(wish: Wish) -> Wish:
        return replace(wish, until=end(wish.given, wish.until), given=min(wish.given, now))

    def hold_by_now(hold: FleetHold) -> FleetHold:
        until = min(end(hold.since, hold.until), now + 2 * LONGEST_HOLD_SECONDS)  # the clock was ahead at a later try
        return replace(hold, since=min(hold.since, now), until=until)

    whole: Changes = {Ack: wish_by_now, Pause: wish_by_now, FleetHold: hold_by_now}
    standing = replace(ledger, cleared=())
    found: Ledger = with_moments(standing, PAST, lambda moment: min(moment, now), whole)
    resumed = tuple(old for old in found.slurm.resumed if max(old.drained_at, old.time) <= now)
    return replace(found, cleared=ledger.cleared, slurm=replace(found.slurm, resumed=resumed))
