"""Measure saving the ledger (encode and write) with the maximum number of conditions, while faults arrive one by one.

    PYTHONPATH=. python bench/ledger_save.py

The times are user and system time of this process. The file is on the tmpfs of /dev/shm, because /run is a tmpfs too.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Iterator

from figure import Figure, table
from msgspec.structs import replace

from healthd.agent.conditions import bounds
from healthd.agent.conditions.ledger import MAX_CLEARED, MAX_EVENTS, Ledger
from healthd.agent.conditions.store import ConditionStore
from healthd.common import values
from healthd.common.model import Clears, Condition, ConditionState, KernelEvent, Mode, Severity

CONDITIONS = bounds.MAX_CONDITIONS
SAVES = 50
NOW = 1_800_000_000.0
BOOT_ID = "2f6c8f0e-9d7b-4f6e-8b1a-3c5d7e9f1a2b"


def rows() -> list[Figure]:
    """Return the figures; the medians count."""
    logging.disable()
    saves = {kind: list(saved(clears, observed)) for kind, clears, observed in KINDS}
    ledger = full(Clears.REBOOT)
    encoded = [ms(lambda: values.encode(ledger)) for _ in range(10)]
    return [
        *(
            Figure(f"save after an event, {CONDITIONS} conditions{kind}", "ms", values, 3)
            for kind, values in saves.items()
        ),
        Figure("  encoding", "ms", encoded),
    ]


KINDS = (
    (" that wait for a reboot", Clears.REBOOT, False),
    (" that end by themselves", Clears.WINDOW, False),
    (" of a followed file", Clears.REBOOT, True),
)


def saved(clears: Clears, observed: bool) -> Iterator[float]:
    """Save after each of several events on different conditions.

    Before each event, the quiet time after an event has passed.
    """
    with tempfile.TemporaryDirectory(prefix="healthd-bench.", dir="/dev/shm") as folder:
        now = NOW + 3600
        memory = ConditionStore(folder, lambda: now)
        memory.load(dict, BOOT_ID, Mode.OBSERVE)
        memory.commit(replace(full(clears, observed), outbox=memory.ledger.outbox, emitted=memory.ledger.emitted))
        memory.stream.mark_written(memory.ledger.outbox.lines)
        memory.save()
        memory.save_all()
        for number in range(SAVES):
            now += 0.01
            memory.count_quiet_time(0.01, under_load=True)
            memory.commit(with_event(memory.ledger, number * 37 % CONDITIONS, now))
            assert memory.unsaved
            yield ms(memory.save)
            memory.stream.mark_written(memory.ledger.outbox.lines)


def ms(function: object) -> float:
    assert callable(function)
    began = time.process_time()
    function()
    return (time.process_time() - began) * 1000


# --- the ledger


def full(clears: Clears, observed: bool = False) -> Ledger:
    conditions = tuple(condition(number, clears, observed) for number in range(CONDITIONS))
    ended = {"state": ConditionState.CLEARED, "cleared_at": NOW + 3600, "cleared_by": "reboot"}
    return Ledger(
        born=NOW,
        boot_id=BOOT_ID,
        mode=Mode.OBSERVE.value,
        conditions=conditions,
        cleared=tuple(replace(c, subject=f"{c.subject}.0", **ended) for c in conditions[:MAX_CLEARED]),
        events=tuple(event(number, NOW + number, observed) for number in range(MAX_EVENTS)),
        next_sequence=MAX_EVENTS,
        cursors={"kmsg": {"sequence": 12, "boot_id": BOOT_ID}},
    )


def condition(number: int, clears: Clears, observed: bool) -> Condition:
    check = f"check_{number % 2}"
    return Condition(
        check=check,
        instance="",
        code=f"{check}/{number % 4}",
        subject=f"{number:04x}:1b:00.0",
        severity=Severity.CRITICAL,
        message=f"Xid {number}: a fault, GPU 3 (GPU-5e3a2b1c-0000-1111-2222-333344445555), python3 (pid 4711)",
        clears=clears,
        state=ConditionState.OPEN,
        first_seen=NOW + number,
        last_seen=NOW + number,
        count=1,
        boot_id=BOOT_ID,
        window_seconds=86400.0 if clears is Clears.WINDOW else 0.0,
        last_event=NOW + number,
        last_sequence=number,
        persists_since=NOW + number,
        opened_at=NOW + number,
        critical_at=NOW + number,
        observed=observed,
    )


def event(number: int, when: float, observed: bool) -> KernelEvent:
    text = f"NVRM: Xid (PCI:{number:04x}:1b:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
    pci = f"{number:04x}:1b:00.0"
    return KernelEvent(
        "xid", "79", pci, when, text, 4711, "python3", (), BOOT_ID, when, sequence=number, observed=observed
    )


def with_event(ledger: Ledger, number: int, now: float) -> Ledger:
    """Return the ledger after one condition was seen again and its new event replaced the oldest event."""
    updated = replace(ledger.conditions[number], last_seen=now, last_event=now, count=2, severity=Severity.CRITICAL)
    conditions = (*ledger.conditions[:number], updated, *ledger.conditions[number + 1 :])
    events = (*itertools.islice(ledger.events, 1, None), event(ledger.next_sequence, now, updated.observed))
    return replace(ledger, conditions=conditions, events=events, next_sequence=ledger.next_sequence + 1)


if __name__ == "__main__":
    print(table(rows()))
