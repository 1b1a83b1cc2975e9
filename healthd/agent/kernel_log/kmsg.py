"""/dev/kmsg, the live source. A line reaches the reader 0.05 ms after the kernel writes it.

`gaps` lists the ranges of lines that the ring buffer lost. The journal may still have these lines.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import ValidationError, convert, to_builtins

from healthd.agent.kernel_log.prefix import KERNEL, parse_record
from healthd.agent.kernel_log.source import LINES_PER_READ, Cursor, Gap, RawLine, Source
from healthd.common.values import Value, Whole

MAX_RECORD = 16384  # a read with a smaller buffer than the record fails; the kernel's limit is 8192 (2048 since 6.6)
MAX_GAPS = 16


class _Cursor(Value, frozen=True):
    """Cursor of /dev/kmsg."""

    boot_id: str
    sequence: Whole
    usec: Whole
    gaps: tuple[Gap, ...] = ()


class Kmsg(Source):
    """/dev/kmsg, which returns one record per read.

    The log clock counts like CLOCK_MONOTONIC, but without NTP's corrections, so the two drift apart by minutes over
    months of uptime. The first record after the ring buffer has been read completely is read as soon as it is written.
    Its time resets the offset between the log clock and the wall clock. Records from before the start are dated by
    CLOCK_MONOTONIC.
    """

    def __init__(
        self, path: str, boot_id: str, cursor: Cursor, accept_injected: bool, now: Callable[[], float] = time.time
    ) -> None:
        self._boot_id = boot_id
        self._accept_injected = accept_injected
        self._now = now
        self._path = path
        self._probe = -1
        self._expected_sequence = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._opened = now()
        self._offset = self._opened - time.clock_gettime(time.CLOCK_MONOTONIC)
        self._drained = False
        position = _Cursor(boot_id, -1, 0)
        self._is_history = self._is_first_record = True  # since healthd's installation, not only in this boot
        with suppress(ValidationError):  # no cursor, or a cursor from another source
            previous = convert(cursor, _Cursor)
            self._is_history = self._is_first_record = False
            position = previous if previous.boot_id == boot_id else position
        self._sequence, self._usec, self._gaps = position.sequence, position.usec, position.gaps

    def fileno(self) -> int:
        return self._fd

    @property
    def cursor(self) -> Cursor:
        cursor: Cursor = to_builtins(_Cursor(self._boot_id, self._sequence, self._usec, self._gaps))
        return cursor

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return self._gaps

    def fill_gap(self, gap: Gap, remaining: Gap | None = None) -> None:
        """Remove a gap after the journal has returned its lines, if any. The ranges in `remaining` are kept."""
        self._gaps = tuple(g for g in (remaining if g == gap else g for g in self._gaps) if g is not None)

    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        lines: list[RawLine] = []
        self.pending = True
        malformed = 0
        for _ in range(limit):
            try:
                data = os.read(self._fd, MAX_RECORD)
            except BlockingIOError:
                self._drained, self.pending = True, False
                if self._sequence < self._expected_sequence and not lines:
                    raise OSError(errno.ENODATA, "open, but it misses lines that another reader gets") from None
                break
            except BrokenPipeError:  # records were overwritten; the next read returns the oldest remaining one
                self.overruns += 1
                continue
            except OSError:
                if lines:
                    break  # return these lines first, because the cursor points after them
                raise
            record = parse_record(data)
            if record is None:
                malformed += 1
                self.malformed += 1
                if not data and lines:
                    break
                if not data or malformed == limit:  # /dev/null or another file in its place would be read forever
                    raise OSError(errno.EINVAL, "it returns no kernel log records")
                continue
            if record.sequence <= self._sequence:
                continue
            now = self._now()
            if self._drained:
                self._offset, self._drained, self._is_history = now - record.usec / 1e6, False, False
            when = min(now, self._offset + record.usec / 1e6)
            history = self._is_history and when < self._opened
            self._count_missing(record.sequence, record.usec, history or self._is_first_record)
            self._sequence, self._usec, self._is_first_record = record.sequence, record.usec, False
            if record.facility == KERNEL or self._accept_injected:
                lines.append(RawLine(when, record.text, history, record.usec))
        return lines

    def _count_missing(self, sequence: int, usec: int, history: bool) -> None:
        missing = sequence - self._sequence - 1
        if missing <= 0:
            return
        if self._sequence >= 0:
            self.lost += missing
            self._notes += (f"{missing} kernel lines were overwritten before they were read",)
        if len(self._gaps) < MAX_GAPS:
            self._gaps = (*self._gaps, Gap(self._usec, usec, history))

    def check_delivery(self) -> None:
        """Check once per round that the reader still receives records. Without this check, a broken reader would look
        like a quiet machine.

        The first record that a second descriptor has received since the last call must reach the reader by its next
        read. Later records are not compared, so the check costs only one record even in a storm.
        """
        if self._probe >= 0:
            for _ in range(2):  # the first read returns EPIPE if the ring has wrapped in the meantime
                try:
                    record = parse_record(os.read(self._probe, MAX_RECORD))
                except BrokenPipeError:
                    continue
                except OSError:  # EAGAIN: the second descriptor has not received anything either
                    break
                if record is not None:
                    self._expected_sequence = record.sequence
                break
            os.close(self._probe)
            self._probe = -1
        self._probe = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._probe, 0, os.SEEK_END)

    def close(self) -> None:
        for descriptor in (self._fd, self._probe):
            if descriptor >= 0:
                os.close(descriptor)
