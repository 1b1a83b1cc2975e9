"""Where the kernel's lines come from: /dev/kmsg, the journal, a file or a fifo.

A source never blocks, gives at most `limit` lines a call, and has a `cursor`: plain data that is stored together
with what was made of the lines, so that after a restart every line is given exactly once. /dev/kmsg is the
live source (0.05 ms from the kernel to the reader); what it no longer holds it names in `gaps`, for the journal.

What a line says is kernel_parse.parse; what of it is one fault is kernel_fold.
"""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from healthd.host import Host
from healthd.kernel_parse import parse
from healthd.kernel_prefix import KERNEL, parse_record
from healthd.model import KernelEvent

LINES_PER_READ = 1000
MAX_RECORD = 16384  # a read with less room than the record fails; the kernel's own limit is 8192 (2048 since 6.6)
MAX_GAPS = 16

__all__ = ["Gap", "Kmsg", "RawLine", "Source", "event_of", "open_source", "parse"]

Cursor = dict[str, Any] | None


class RawLine(NamedTuple):
    """One message of the kernel without its prefix.

    time      epoch seconds, never later than when it was read
    history   it was in the log before healthd ever looked at it (no cursor): known, but no news
    usec      of the kernel's log clock in this boot, where the source knows it
    """

    time: float
    text: str
    history: bool = False
    usec: int | None = None


class Gap(NamedTuple):
    """Lines that the ring buffer lost: those between two times of the kernel's log clock, both exclusive.

    `since_usec` 0 is the boot's start. The journal may still have them: kernel_journal.read_journal.
    history   as of a line: they were written before healthd ever looked
    """

    since_usec: int
    until_usec: int
    history: bool = False


class Source(Protocol):
    """pending: read() stopped at its limit, call it again without waiting. overruns: how often lines were lost;
    lost: how many, where that is known. notes: what a person should know, taken by take_notes()."""

    pending: bool
    overruns: int
    lost: int

    def fileno(self) -> int | None: ...
    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]: ...
    @property
    def cursor(self) -> Cursor: ...
    @property
    def gaps(self) -> tuple[Gap, ...]: ...
    def filled(self, gap: Gap, left: Gap | None = None) -> None: ...
    def take_notes(self) -> list[str]: ...
    def close(self) -> None: ...


def event_of(line: RawLine, boot_id: str) -> KernelEvent | None:
    event = parse(line.text)
    if event is None:
        return None
    return dataclasses.replace(event, time=line.time, last_time=line.time, boot_id=boot_id, history=line.history)


def open_source(
    spec: str,
    root: str = "/",
    cursor: Cursor = None,
    accept_injected: bool = False,
    now: Callable[[], float] = time.time,
) -> Source:
    """The source named by `--kernel-log`: "kmsg", "journal", or the path of a file or fifo to follow.

    `cursor` is what an earlier source of any kind left: one that does not fit is as none. A path need not exist
    yet, its directory must. Raises OSError where it cannot be opened (no root, no such directory).
    """
    boot_id = Host(root).boot_id()
    if spec == "kmsg":
        return Kmsg(root.rstrip("/") + "/dev/kmsg", boot_id, cursor, accept_injected, now)
    if spec == "journal":
        from healthd.kernel_journal import JournalSource

        return JournalSource(boot_id, cursor, accept_injected)
    from healthd.kernel_file import Fifo, FollowedFile

    if os.path.exists(spec) and stat.S_ISFIFO(os.stat(spec).st_mode):
        return Fifo(spec, accept_injected, now)
    return FollowedFile(spec, cursor, accept_injected, now)


class Kmsg:
    """/dev/kmsg, one record a read.

    The log clock counts like CLOCK_MONOTONIC but is not disciplined by NTP: over months of uptime they part by
    minutes. So each time the ring has been read empty, the next record, which is read as it is written, sets
    the offset between log clock and wall clock anew. What was there at the start is dated by CLOCK_MONOTONIC.
    """

    def __init__(
        self, path: str, boot_id: str, cursor: Cursor, accept_injected: bool, now: Callable[[], float] = time.time
    ) -> None:
        self.pending = False
        self.overruns = 0
        self.lost = 0
        self._boot_id = boot_id
        self._accept_injected = accept_injected
        self._now = now
        self._notes: list[str] = []
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._opened = now()
        self._offset = self._opened - time.clock_gettime(time.CLOCK_MONOTONIC)
        self._drained = False
        place = _place(cursor)
        self._first = self._never_read = place is None  # ever, not only in this boot
        if place is None or place.boot_id != boot_id:
            place = _Place(boot_id, -1, 0, ())
        self._sequence, self._usec, self._gaps = place.sequence, place.usec, place.gaps

    def fileno(self) -> int:
        return self._fd

    @property
    def cursor(self) -> Cursor:
        cursor: dict[str, Any] = {"boot_id": self._boot_id, "sequence": self._sequence, "usec": self._usec}
        return {**cursor, "gaps": [list(gap) for gap in self._gaps]} if self._gaps else cursor

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return self._gaps

    def filled(self, gap: Gap, left: Gap | None = None) -> None:
        """The journal gave what it has of this gap (or has none of it), all but what is `left`."""
        self._gaps = tuple(g for g in (left if g == gap else g for g in self._gaps) if g is not None)

    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        lines: list[RawLine] = []
        self.pending = True
        for _ in range(limit):
            try:
                data = os.read(self._fd, MAX_RECORD)
            except BlockingIOError:
                self._drained, self.pending = True, False
                break
            except BrokenPipeError:  # the ring overtook us: the next read gives the oldest record that is left
                self.overruns += 1
                continue
            record = parse_record(data)
            if record is None or record.sequence <= self._sequence:
                continue
            now = self._now()
            if self._drained:
                self._offset, self._drained, self._first = now - record.usec / 1e6, False, False
            when = min(now, self._offset + record.usec / 1e6)
            history = self._first and when < self._opened
            self._count_missing(record.sequence, record.usec, history or self._never_read)
            self._sequence, self._usec, self._never_read = record.sequence, record.usec, False
            if record.facility == KERNEL or self._accept_injected:
                lines.append(RawLine(when, record.text, history, record.usec))
        return lines

    def _count_missing(self, sequence: int, usec: int, history: bool) -> None:
        missing = sequence - self._sequence - 1
        if missing <= 0:
            return
        if self._sequence >= 0:
            self.lost += missing
            self._notes.append(f"{missing} kernel lines were overwritten before they were read")
        if len(self._gaps) < MAX_GAPS:
            self._gaps = (*self._gaps, Gap(self._usec, usec, history))

    def take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        os.close(self._fd)


class _Place(NamedTuple):
    boot_id: str
    sequence: int
    usec: int
    gaps: tuple[Gap, ...]


def _place(cursor: Cursor) -> _Place | None:
    """What a cursor that a Kmsg left says, None if it is none."""
    if not cursor:
        return None
    try:
        gaps = tuple(Gap(int(g[0]), int(g[1]), any(g[2:])) for g in cursor.get("gaps", ()))
        return _Place(str(cursor["boot_id"]), int(cursor["sequence"]), int(cursor["usec"]), gaps)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
