"""Interface for a source of kernel lines. The sources are kmsg, journal and file.

A source never blocks, returns at most `limit` lines per call, and has a `cursor`. The cursor is plain data that is
stored together with the lines' events, so that every line is returned exactly once even after a restart.

parse.parse parses a line; coalesce.coalesce_events joins the lines of one fault.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from healthd.agent.kernel_log.parse import parse, unread
from healthd.agent.kernel_log.repeats import fault_head
from healthd.common.model import KernelEvent

LINES_PER_READ = 1000
SAME_SECONDS = 1.0  # lines with the same head within this time are counted as one; coalesce's window is longer

Cursor = dict[str, Any] | None


class RawLine(NamedTuple):
    """A kernel message without its prefix.

    time      epoch seconds, never later than the time of reading
    history   True if the line was in the log before healthd first read it (no cursor); it is recorded, without effect
    usec      the kernel's log clock in this boot, if the source has it
    lines     number of lines about one fault that this line represents; the last came at `last_time`
    unread    True if the prefix could not be parsed, so `text` is the whole line
    """

    time: float
    text: str
    history: bool = False
    usec: int | None = None
    lines: int = 1
    last_time: float = 0.0
    unread: bool = False


class Gap(NamedTuple):
    """Lines that the ring buffer lost, between two times of the kernel's log clock, both exclusive.

    A `since_usec` of 0 is the start of the boot. The journal may still have the lines (journal.read_journal). `history`
    is as in RawLine.
    """

    since_usec: int
    until_usec: int
    history: bool = False


class Source(ABC):
    """An open source of kernel lines.

    `pending` is True if read() stopped at its limit and must be called again without waiting. `overruns` is the number
    of times that lines were lost, and `lost` the number of lost lines, if known. `rotations` is the number of times
    that the file was replaced or truncated. `malformed` is the number of records that were invalid or too long.
    """

    pending = False
    overruns = 0
    lost = 0
    rotations = 0
    malformed = 0
    _notes: tuple[str, ...] = ()

    @abstractmethod
    def fileno(self) -> int | None: ...

    @abstractmethod
    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        """Return lines. Lines from before an error are returned first, so OSError is only raised if no line is left."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def cursor(self) -> Cursor:
        """Position after the returned lines, or None if the source cannot be read again."""
        return None

    @property
    def missing(self) -> str:
        """The reason why there is nothing to read yet, or "" if there is something."""
        return ""

    def take_notes(self) -> list[str]:
        """Return the notes for the log, and clear them."""
        notes, self._notes = self._notes, ()
        return list(notes)


def make_event(line: RawLine, boot_id: str, observed: bool = False) -> KernelEvent | None:
    """Return the event for a line. `observed` is True if users can forge its source's lines."""
    event = unread(line.text) if line.unread else parse(line.text)
    if event is None:
        return None
    return replace(
        event,
        time=line.time,
        last_time=max(line.time, line.last_time),
        boot_id=boot_id,
        lines=line.lines,
        history=line.history,
        uptime=None if line.usec is None else line.usec / 1e6,
        observed=observed,
    )


def merge_repeats(lines: Iterable[RawLine]) -> list[RawLine]:
    """Merge the repeated lines in one read into their first line, so that each is parsed once.

    An Xid may repeat any earlier Xid with the same head. Any other line can repeat only the line just before it: an
    "OK" may come between two "not responding" lines, and their order determines the current state.
    """
    merged: list[RawLine] = []
    indexes: dict[tuple[str, bool], int] = {}
    for line in lines:
        common = fault_head(line.text)
        if common:
            index = indexes.get((common, line.history))
        else:
            same = bool(merged) and (merged[-1].text, merged[-1].history) == (line.text, line.history)
            index = len(merged) - 1 if same else None
        if index is not None and abs(line.time - merged[index].time) <= SAME_SECONDS:
            first = merged[index]
            last = max(line.time, line.last_time, first.last_time)
            merged[index] = first._replace(lines=first.lines + line.lines, last_time=last)
            continue
        if common:
            indexes[common, line.history] = len(merged)
        merged.append(line)
    return merged
