"""What healthd remembers: conditions, events, the kernel log's cursor, what it wrote into Slurm, counters' past.

An event's count and the cursor behind it are in one value, so that a restart counts no event twice. Pure.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from healthd.judge.condition import moved_end, shifted
from healthd.model import (
    LONGEST_HOLD_SECONDS,
    Condition,
    ConditionKey,
    ConditionState,
    FleetHold,
    Inventory,
    KernelEvent,
    SlurmMemory,
)

VERSION = 1
KEEP_EVENTS_SECONDS = 24 * 3600.0
KEEP_EVENTS = 500
KEEP_CLEARED_SECONDS = 30 * 24 * 3600.0
KEEP_CLEARED = 200


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
    events. cleared: the conditions that ended last.
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

    def by_key(self) -> dict[ConditionKey, Condition]:
        return {c.key: c for c in self.conditions}


def with_conditions(ledger: Ledger, conditions: dict[ConditionKey, Condition], now: float) -> Ledger:
    """The ledger with these conditions. Those that were cleared move to `cleared`, which is bounded."""
    if conditions == ledger.by_key():
        return ledger
    gone = [c for c in conditions.values() if c.state is ConditionState.CLEARED]
    history = [c for c in (*ledger.cleared, *gone) if c.cleared_at > now - KEEP_CLEARED_SECONDS]
    return dataclasses.replace(
        ledger,
        conditions=tuple(c for c in conditions.values() if c.state is not ConditionState.CLEARED),
        cleared=tuple(history[-KEEP_CLEARED:]),
    )


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
            requeued=tuple(dataclasses.replace(r, time=move(r.time)) for r in slurm.requeued),
            hold=shifted_hold(slurm.hold, seconds, since, until) if slurm.hold else None,
        ),
        pause=dataclasses.replace(pause, until=moved_end(pause.until, seconds, until), given=move(pause.given))
        if pause
        else None,
    )


def with_none_in_the_future(ledger: Ledger, now: float) -> Ledger:
    """A pause, an ack or a hold that begins in the future was written while the clock stood ahead: it lasts as long as
    was said, from now on."""

    def end(began: float, until: float) -> float:
        return until - max(began - now, 0.0)

    def known(condition: Condition) -> Condition:
        if (ack := condition.ack) is None or ack.given <= now:
            return condition
        return dataclasses.replace(condition, ack=dataclasses.replace(ack, until=end(ack.given, ack.until), given=now))

    pause, hold = ledger.pause, ledger.slurm.hold
    if pause:
        pause = dataclasses.replace(pause, until=end(pause.given, pause.until), given=min(pause.given, now))
    if hold:
        until = min(end(hold.since, hold.until), now + 2 * LONGEST_HOLD_SECONDS)  # the clock was ahead at a later try
        hold = dataclasses.replace(hold, since=min(hold.since, now), until=until)
    return dataclasses.replace(
        ledger,
        conditions=tuple(known(condition) for condition in ledger.conditions),
        pause=pause,
        slurm=dataclasses.replace(ledger.slurm, hold=hold),
    )


def shifted_hold(hold: FleetHold, seconds: float, since: float, until: float) -> FleetHold:
    """As with conditions: only a hold that began in that range was written by the old clock."""
    if not since <= hold.since <= until:
        return hold
    return dataclasses.replace(hold, since=hold.since + seconds, until=hold.until + seconds)
