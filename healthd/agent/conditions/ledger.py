"""What healthd remembers: conditions, events, the kernel log's cursor, what it wrote into Slurm, counters' past.

An event's count and the cursor behind it are in one value, so that a restart counts no event twice. Pure.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from healthd.agent.conditions.condition import moved_end, shifted
from healthd.common.model import (
    LONGEST_HOLD_SECONDS,
    Condition,
    ConditionKey,
    ConditionState,
    FleetHold,
    Gpu,
    Inventory,
    KernelEvent,
    SlurmMemory,
)
from healthd.common.values import dataclass
from healthd.events.emitted import Told, moved
from healthd.events.outbox import Outbox

VERSION = 1
KEEP_EVENTS_SECONDS = 24 * 3600.0
KEEP_EVENTS = 500
KEEP_CLEARED_SECONDS = 30 * 24 * 3600.0
KEEP_CLEARED = 200
SEEN = ("last_seen", "last_level_seen", "count")  # of a condition: what another look at it changes


@dataclass(frozen=True, slots=True)
class Pause:
    until: float
    why: str
    who: str
    given: float = 0.0


@dataclass(frozen=True, slots=True)
class Ledger:
    """born: first start ever. trusted_since: what was seen before it never drains (first start, switch from observe,
    end of a pause). cursors: how far each source of the kernel log was read, by its name. next_sequence: of kernel
    events. cleared: the conditions that ended last. whole_gpus: those of the inventory when none was missing.
    outbox: lines of the event stream that are not known to be on the disk; told: what the stream has said.
    """

    version: int = VERSION
    born: float = 0.0
    boot_id: str = ""
    mode: str = ""
    trusted_since: float = 0.0
    conditions: tuple[Condition, ...] = ()
    cleared: tuple[Condition, ...] = ()
    events: tuple[KernelEvent, ...] = ()
    next_sequence: int = 1
    cursors: dict[str, Any] = dataclasses.field(default_factory=dict)
    slurm: SlurmMemory = dataclasses.field(default_factory=SlurmMemory)
    pause: Pause | None = None
    inventory: Inventory = dataclasses.field(default_factory=Inventory)
    whole_gpus: tuple[Gpu, ...] = ()
    outbox: Outbox = dataclasses.field(default_factory=Outbox)
    told: Told = dataclasses.field(default_factory=Told)

    def by_key(self) -> dict[ConditionKey, Condition]:
        return {c.key: c for c in self.conditions}


def with_conditions(ledger: Ledger, conditions: dict[ConditionKey, Condition]) -> Ledger:
    """The ledger with these conditions. Those that were cleared move to `cleared`, all (`with_short_history`)."""
    if conditions == ledger.by_key():
        return ledger
    gone = [c for c in conditions.values() if c.state is ConditionState.CLEARED]
    return dataclasses.replace(
        ledger,
        conditions=tuple(c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        cleared=(*ledger.cleared, *gone),
    )


def is_only_seen_again(before: Ledger, after: Ledger) -> bool:
    """Whether nothing is new but that conditions which stood were seen once more."""
    if len(before.conditions) != len(after.conditions):
        return False
    pairs = zip(before.conditions, after.conditions, strict=True)
    return dataclasses.replace(after, conditions=before.conditions) == before and all(
        one is other or dataclasses.replace(one, **{name: getattr(other, name) for name in SEEN}) == other
        for one, other in pairs
    )


def with_short_history(ledger: Ledger, now: float) -> Ledger:
    """The ledger with the newest of `cleared`, once the log and the stream were told of all that ended."""
    history = [c for c in ledger.cleared if c.cleared_at > now - KEEP_CLEARED_SECONDS][-KEEP_CLEARED:]
    return ledger if len(history) == len(ledger.cleared) else dataclasses.replace(ledger, cleared=tuple(history))


def after_clock_step(ledger: Ledger, seconds: float, since: float = 0.0, until: float = float("inf")) -> Ledger:
    """The clock was set by `seconds`: the moments in `since`..`until` of the old clock move to the new one.

    A machine that boots in the year 2000 until NTP answers wrote only what lies in that range: the rest is right.
    """

    def move(moment: float) -> float:
        return moment + seconds if moment and since <= moment <= until else moment

    slurm, pause = ledger.slurm, ledger.pause
    return dataclasses.replace(
        ledger,
        born=move(ledger.born),
        trusted_since=move(ledger.trusted_since),
        conditions=tuple(shifted(c, seconds, since, until) for c in ledger.conditions),
        cleared=tuple(shifted(c, seconds, since, until) for c in ledger.cleared),
        events=tuple(dataclasses.replace(e, time=move(e.time), last_time=move(e.last_time)) for e in ledger.events),
        slurm=dataclasses.replace(
            slurm,
            written_at=move(slurm.written_at),
            confirmed_at=move(slurm.confirmed_at),
            resumed_at=move(slurm.resumed_at),
            lifted=dataclasses.replace(slurm.lifted, time=move(slurm.lifted.time)) if slurm.lifted else None,
            earlier=tuple(dataclasses.replace(old, time=move(old.time)) for old in slurm.earlier),
            requeued=tuple(dataclasses.replace(r, time=move(r.time)) for r in slurm.requeued),
            drained_at=move(slurm.drained_at),
            clean_since=move(slurm.clean_since),
            resumed=tuple(
                dataclasses.replace(r, drained_at=move(r.drained_at), time=move(r.time)) for r in slurm.resumed
            ),
            hold=shifted_hold(slurm.hold, seconds, since, until) if slurm.hold else None,
            unsaved=dataclasses.replace(slurm.unsaved, time=move(slurm.unsaved.time)) if slurm.unsaved else None,
            counted=dataclasses.replace(slurm.counted, time=move(slurm.counted.time)) if slurm.counted else None,
            uncounted_since=move(slurm.uncounted_since),
            uncounted_at=move(slurm.uncounted_at),
        ),
        pause=dataclasses.replace(
            pause, until=moved_end(pause.until, seconds, until), given=min(move(pause.given), until + seconds)
        )
        if pause
        else None,
        told=moved(ledger.told, move),
    )


def with_none_in_the_future(ledger: Ledger, now: float) -> Ledger:
    """A pause, an ack or a hold that begins in the future was written while the clock stood ahead: it lasts as long as
    was said, from now on. A drain of ours began, or was over, by now, an operator resumed by now, and we are trusted
    since then at the latest: nothing would drain until that moment comes. When those that we lifted in the future
    really came is not known: they count for nothing, or they would be in a row with the next one for ever."""

    def end(began: float, until: float) -> float:
        return until - max(began - now, 0.0)

    def known(condition: Condition) -> Condition:
        if condition.acknowledged_at > now:
            condition = dataclasses.replace(condition, acknowledged_at=now)
        if (ack := condition.ack) is None or ack.given <= now:
            return condition
        return dataclasses.replace(condition, ack=dataclasses.replace(ack, until=end(ack.given, ack.until), given=now))

    pause, slurm, hold = ledger.pause, ledger.slurm, ledger.slurm.hold
    if pause:
        pause = dataclasses.replace(pause, until=end(pause.given, pause.until), given=min(pause.given, now))
    if hold:
        until = min(end(hold.since, hold.until), now + 2 * LONGEST_HOLD_SECONDS)  # the clock was ahead at a later try
        hold = dataclasses.replace(hold, since=min(hold.since, now), until=until)
    return dataclasses.replace(
        ledger,
        trusted_since=min(ledger.trusted_since, now),
        conditions=tuple(known(condition) for condition in ledger.conditions),
        pause=pause,
        slurm=dataclasses.replace(
            slurm,
            hold=hold,
            lifted=dataclasses.replace(slurm.lifted, time=min(slurm.lifted.time, now)) if slurm.lifted else None,
            earlier=tuple(dataclasses.replace(old, time=min(old.time, now)) for old in slurm.earlier),
            drained_at=min(slurm.drained_at, now),
            clean_since=min(slurm.clean_since, now),
            unsaved=dataclasses.replace(slurm.unsaved, time=min(slurm.unsaved.time, now)) if slurm.unsaved else None,
            uncounted_since=min(slurm.uncounted_since, now),
            uncounted_at=min(slurm.uncounted_at, now),
            resumed=tuple(old for old in slurm.resumed if max(old.drained_at, old.time) <= now),
        ),
    )


def shifted_hold(hold: FleetHold, seconds: float, since: float, until: float) -> FleetHold:
    """As with conditions: only a hold that began in that range was written by the old clock."""
    if not since <= hold.since <= until:
        return hold
    return dataclasses.replace(hold, since=hold.since + seconds, until=hold.until + seconds)
