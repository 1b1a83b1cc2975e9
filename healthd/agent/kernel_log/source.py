"""What a source of the kernel's lines is, and what it gives. The sources are kmsg, journal and file.

A source never blocks, gives at most `limit` lines a call, and has a `cursor`: plain data that is stored together
with the events made of the lines, so that after a restart every line is given exactly once.

parse.parse tells what a line says; coalesce.coalesce_events tells which lines are one fault.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from healthd.agent.kernel_log.parse import parse, unread
from healthd.agent.kernel_log.repeats import head
from healthd.common.model import KernelEvent

LINES_PER_READ = 1000
SAME_SECONDS = 1.0  # lines of one head within this are counted as one: short beside coalesce's window

Cursor = dict[str, Any] | None


class RawLine(NamedTuple):
    """One message of the kernel without its prefix.

    time      epoch seconds, never later than when it was read
    history   the line was in the log before healthd ever looked at it (no cursor): known, but no news
    usec      the kernel's log clock in this boot, where the source knows it
    lines     how many lines of the same fault this line stands for; the last was at `last_time`
    unread    what stands before the message could not be read: `text` is the whole line
    """

    time: float
    text: str
    history: bool = False
    usec: int | None = None
    lines: int = 1
    last_time: float = 0.0
    unread: bool = False


class Gap(NamedTuple):
    """Lines that the ring buffer lost: those between two times of the kernel's log clock, both exclusive.

    `since_usec` 0 is the boot's start. The journal may still have them: journal.read_journal.
    history   as in RawLine: the lines were written before healthd ever looked
    """

    since_usec: int
    until_usec: int
    history: bool = False


class Source(ABC):
    """A source of the kernel's lines, open since it was made.

    pending: read() stopped at its limit, call it again without waiting.
    overruns: how often lines were lost; lost: how many lines, where that is known; rotations: how often the file was
    replaced or cut; malformed: how often the data was no record, or too long for a line.
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
        """Raise OSError only if there are no lines to give: lines that were read before the error come first."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def cursor(self) -> Cursor:
        """None: what was read cannot be read again."""
        return None

    @property
    def missing(self) -> str:
        """Why there is nothing to read yet; "" if there is something."""
        return ""

    def take_notes(self) -> list[str]:
        """What a person should know, each note once."""
        notes, self._notes = self._notes, ()
        return list(notes)


def event_of(line: RawLine, boot_id: str, observed: bool = False) -> KernelEvent | None:
    """`observed`: the line's source can be forged."""
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


def unrepeated(lines: Iterable[RawLine]) -> list[RawLine]:
    """The lines of one read. A line that repeats an earlier one is counted into it, so that a parser sees each once.

    An Xid may repeat any earlier one of its head; any other line only the line just before it: between two "not
    responding" there may be an "OK", and the order tells the present state.
    """
    kept: list[RawLine] = []
    places: dict[tuple[str, bool], int] = {}
    for line in lines:
        common = head(line.text)
        if common:
            place = places.get((common, line.history))
        else:
            same = bool(kept) and (kept[-1].text, kept[-1].history) == (line.text, line.history)
            place = len(kept) - 1 if same else None
        if place is not None and abs(line.time - kept[place].time) <= SAME_SECONDS:
            first = kept[place]
            last = max(line.time, line.last_time, first.last_time)
            kept[place] = first._replace(lines=first.lines + line.lines, last_time=last)
            continue
        if common:
            places[common, line.history] = len(kept)
        kept.append(line)
    return kept
