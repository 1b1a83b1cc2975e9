"""Measure the size of a node's event stream. Months pass on a simulated clock; the ledger and the files are real.

    PYTHONPATH=. .venv/bin/python bench/event_size.py

typical   a boot and an upgrade; three warnings of one day each; a fault that drains and is repaired. (Meta counts 6.5
          failures per 1,000 node-days, arxiv.org/abs/2410.21680, table 2, or one failure of a node in five months.)
bad       a boot each day, two faults a day that drain and recover, eight conditions that stay open all month
worst     the maximum number of conditions of one code, open all month and seen in each round
"""

from __future__ import annotations

import gzip
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

import healthd
from healthd.agent.conditions import events
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control import commands
from healthd.common.model import Clears, Condition, ConditionState, Drain, DrainRecord, Leave, Mode, RunName, Severity
from healthd.events import writer
from healthd.events.reader import Cursor, Tally, find, read
from healthd.events.schema import Event

DAY, ROUND = 86400, 300
DAYS = 30
CHECKS = [RunName(f"check_number_{n:02d}") for n in range(40)]
MONTHS = {  # numbers of: conditions open all month, warnings of one day, faults that drain, boots
    "typical": (0, 3, 1, 1),
    "bad": (8, 0, 2 * DAYS, DAYS),
    "worst": (64, 0, 0, 1),
}


class Node:
    """A node: its ledger, its clock and its disk."""

    def __init__(self, folder: Path) -> None:
        self.run, self.state, self.now, self.boots, self.faults = folder / "run", folder / "state", 1763769600.0, 0, 0
        self.run.mkdir()
        self.boot()

    def boot(self) -> None:
        self.boots += 1
        self.is_new = True  # lines that are unwritten according to the ledger may already be in the file
        boot_id = f"00000000-0000-4000-8000-{self.boots:012d}"
        self.memory = ConditionStore(str(self.run), lambda: self.now, lambda: self.now % DAY, "gpu-0042", "cluster")
        self.memory.load(dict, boot_id, Mode.ACT, self.now - ROUND)
        self.memory.stream.emit_checks(dict.fromkeys(CHECKS, (healthd.__version__, "0123abcd")))
        self.memory.stream.emit_alive([run.check for run in CHECKS], force=True)
        self.memory.stream.emit([events.decision(Leave("nothing to do"), "nothing to do")])
        self.write()

    def write(self) -> None:
        """Save the ledger, append its lines to the file and mark them as written, as the daemon and its worker do."""
        self.memory.save()
        lines = self.memory.ledger.outbox.lines
        if lines:
            writer.append(str(self.state), lines, may_repeat=self.is_new)
            self.memory.stream.mark_written(lines)
            self.is_new = False

    def set_conditions(self, conditions: list[Condition]) -> None:
        self.memory.set_conditions({c.key: c for c in conditions})
        self.write()

    def drain_and_resume(self) -> None:
        self.faults += 1
        part = f"0000:{self.faults % 8 * 16 + 27:02x}:00.0"
        open_conditions = list(self.memory.conditions.values())
        fault = condition("gpu_xid/79", part, self.now, Severity.CRITICAL, "Xid 79: GPU has fallen off the bus")
        self.set_conditions(
            [*open_conditions, replace(fault, last_level_seen=0.0, last_event=self.now, job="4711,4712")]
        )
        reason = f"healthd: gpu_xid/79 {part}: Xid 79: GPU has fallen off the bus"
        self.memory.stream.emit([events.decision(Drain(reason, requeue=True), f"drain and requeue: {reason}")])
        self.memory.stream.emit([Event("drain", {"stage": "sent", "reason": reason})])
        self.memory.change(slurm=DrainRecord(reason=reason))
        for stage in ("sent", "confirmed"):
            self.memory.stream.emit([Event("requeue", {"stage": stage, "job": "4711"})])
        self.memory.stream.emit([events.decision(Leave("drained"), "the drain stays")])
        commands.repaired(self.memory, {"code": "gpu_xid/79", "why": "reseated"}, "ann (uid 1000)", self.now)
        self.memory.stream.emit(
            [Event("resume", {"stage": "sent"}), Event("resume", {"stage": "confirmed", "reason": reason})]
        )
        self.memory.change(slurm=DrainRecord())
        self.write()


def condition(code: str, part: str, now: float, severity: Severity, message: str) -> Condition:
    return Condition(
        check=code.partition("/")[0],
        instance="",
        code=code,
        subject=part,
        severity=severity,
        message=message,
        clears=Clears.OPERATOR,
        state=ConditionState.OPEN,
        first_seen=now,
        last_seen=now,
        count=1,
        boot_id="b",
        opened_at=now,
        last_level_seen=now,
    )


def month(node: Node, permanent_count: int, warnings: int, faults: int, boots: int) -> None:
    begun, conditions = node.now, list[Condition]()
    text = "Retired pages: 12 of 64 because of double bit errors; the GPU needs a reset before the next job"
    for round_ in range(DAYS * DAY // ROUND):
        node.now = begun + round_ * ROUND
        day, round_of_day = divmod(round_, DAY // ROUND)
        if round_of_day == 0 and day < boots:
            node.memory.stream.emit_stopped("requested")
            node.write()
            node.boot()
        wanted_count = permanent_count + (1 if day % 10 == 3 and day // 10 < warnings else 0)
        if len(conditions) > wanted_count:
            del conditions[wanted_count:]
        while len(conditions) < wanted_count:
            part = f"0000:{len(conditions) + 1:02x}:00.0"
            conditions.append(condition("gpu_retired_pages/pending", part, node.now, Severity.WARNING, text))
        conditions = [replace(c, count=c.count + 1, last_seen=node.now, last_level_seen=node.now) for c in conditions]
        node.set_conditions(conditions)
        node.memory.stream.emit_alive([run.check for run in CHECKS], force=False)
        for part_of_day in range(2):
            if round_of_day == 100 + part_of_day * 100 and day + DAYS * part_of_day < faults:
                node.drain_and_resume()


def measured(name: str, month_shape: tuple[int, int, int, int]) -> tuple[str, int, int, int, float]:
    """Return (month, lines, bytes, compressed bytes, CPU seconds to read the stream)."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        before = sum(path.stat().st_size for path in node.state.glob(f"{writer.NAME}*"))
        month(node, *month_shape)
        files = sorted(node.state.glob(f"{writer.NAME}*"))
        size = sum(path.stat().st_size for path in files) - before
        packed = sum(len(gzip.compress(path.read_bytes())) for path in files)
        tally, cursor, began = Tally(), Cursor(), time.process_time()
        lines = sum(1 for stream in find([str(node.state)], tally) for _ in read(stream, cursor, tally))
        seconds = time.process_time() - began
        if list(cursor.sequences.gaps()) or tally.unread or tally.repeats:
            sys.exit(f"{name}: the stream is incomplete")
        return name, lines, size, packed, seconds


def main() -> None:
    logging.disable()
    os.umask(0o077)
    print("month       lines      size    per line   as .gz   read in (CPU)")
    for named_month in MONTHS.items():
        name, lines, size, packed, seconds = measured(*named_month)
        mean = size / lines
        print(f"{name:8} {lines:8,} {size / 1e6:6.2f} MB {mean:6.0f} B {packed / 1e6:6.2f} MB {seconds:8.2f} s")


if __name__ == "__main__":
    main()
