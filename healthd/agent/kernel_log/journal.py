"""Kernel lines from the systemd journal, which fill gaps in the ring buffer or serve as the live source.

The usual live source is /dev/kmsg, because journald writes a line 400 to 500 ms after the kernel, and every service's
lines wake up its reader. read_journal() may block on a dying disk and is therefore called in the worker.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from healthd.agent.kernel_log.prefix import KERNEL
from healthd.agent.kernel_log.source import LINES_PER_READ, Cursor, RawLine, Source
from healthd.common.guard import KERNEL_LOG, never_raises


class JournalLine(NamedTuple):
    """A line from the journal. `time` is in epoch seconds, `usec` is the kernel's log clock (as in /dev/kmsg), and
    `cursor` is the journal's cursor."""

    time: float
    text: str
    usec: int
    cursor: str


def read_journal(
    boot_id: str, since_usec: int, until_usec: int, limit: int, accept_injected: bool = False
) -> list[JournalLine]:
    """Return kernel lines from boot `boot_id` between two times on the log clock (both exclusive), oldest first.

    Returns [] if there is no journal. Raises OSError if the journal cannot be read.
    """
    reader = _open(boot_id)
    try:
        # The seek uses the time at which journald received a line, which is never before the kernel wrote it.
        reader.seek_monotonic(since_usec / 1e6, boot_id.replace("-", ""))
        new_lines = (line for line in _lines(reader, accept_injected) if line.usec > since_usec)
        return list(itertools.islice(itertools.takewhile(lambda line: line.usec < until_usec, new_lines), limit))
    finally:
        reader.close()


def _open(boot_id: str) -> Any:
    from systemd import journal

    # Other fields are left as received, to avoid converting unused data.
    reader = journal.Reader(converters={"MESSAGE": _text, "SYSLOG_IDENTIFIER": _text})
    reader.add_match(_TRANSPORT="kernel")
    if boot_id:
        reader.add_match(_BOOT_ID=boot_id.replace("-", ""))
    return reader


def journal_invalidated() -> int:
    """Return the value by which process() reports that journal files were added or removed (sd_journal_process(3))."""
    from systemd import journal

    return int(journal.INVALIDATE)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _lines(reader: Any, accept_injected: bool) -> Iterator[JournalLine]:
    while entry := reader.get_next():
        line = parse_entry(entry, accept_injected)
        if line is not None:
            yield line


@never_raises(KERNEL_LOG)
def parse_entry(entry: Mapping[str, Any], accept_injected: bool) -> JournalLine | None:
    """Return a journal entry as a line, or None if the kernel did not write it.

    journald itself records an entry's transport, which no client can forge (systemd.journal-fields(7), Trusted
    Journal Fields). A line that a program wrote to /dev/kmsg has another facility. journald splits a line such as
    "NVRM: Xid ..." into an identifier and the rest. This function joins the two parts again.
    """
    message, identifier = entry.get("MESSAGE"), entry.get("SYSLOG_IDENTIFIER", "kernel")
    facility = entry.get("SYSLOG_FACILITY", KERNEL)
    if (
        entry.get("_TRANSPORT") != "kernel"
        or not isinstance(message, str)
        or (facility != KERNEL and not accept_injected)
    ):
        return None
    text = message if identifier == "kernel" else f"{identifier}: {message}"
    received = entry["__MONOTONIC_TIMESTAMP"].timestamp
    written = entry.get("_SOURCE_MONOTONIC_TIMESTAMP", received)
    late = max(0.0, (received - written).total_seconds())
    usec = round(written.total_seconds() * 1e6)
    return JournalLine(entry["__REALTIME_TIMESTAMP"].timestamp() - late, text, usec, entry["__CURSOR"])


class JournalSource(Source):
    """The journal as the live source, read from the start of this boot or from the cursor."""

    def __init__(self, boot_id: str, cursor: Cursor, accept_injected: bool = False) -> None:
        self.pending = True
        self._accept_injected = accept_injected
        self._reader = _open(boot_id)
        position = cursor.get("journal") if isinstance(cursor, dict) else None
        self._position = position if isinstance(position, str) else ""
        self._is_first_start = not self._position
        self._resumed = False
        try:
            self._reader.seek_cursor(self._position)
        except (OSError, ValueError):  # the cursor is empty or from another journal
            self._position, self._is_first_start = "", True
            self._reader.seek_head()

    def fileno(self) -> int:
        return int(self._reader.fileno())

    @property
    def cursor(self) -> Cursor:
        return {"journal": self._position} if self._position else None

    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        if self._reader.process() == journal_invalidated():
            self.rotations += 1
        lines: list[RawLine] = []
        self.pending = False
        for _ in range(limit):
            try:
                entry = self._reader.get_next()
            except OSError:
                if lines:
                    self.pending = True  # return these lines first, because the cursor points after them
                    break
                raise
            if not entry:
                self._is_first_start = False
                break
            # After seek_cursor, the next entry is the one at the cursor, if it still exists.
            if not self._resumed and self._position and self._reader.test_cursor(self._position):
                self._resumed = True
                continue
            self._resumed = True
            self._position = entry["__CURSOR"]
            line = parse_entry(entry, self._accept_injected)
            if line is not None:
                lines.append(RawLine(line.time, line.text, self._is_first_start, line.usec))
        else:
            self.pending = True
        return lines

    def close(self) -> None:
        self._reader.close()
