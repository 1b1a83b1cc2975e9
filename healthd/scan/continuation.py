"""Decides whether a log line begins a kernel record, or may continue the previous record.

A user can put a line break into text that the kernel prints, such as a mount option or a file name (docs/scan.md).
/dev/kmsg keeps the text as one record. Programs that split a record into lines mark the continuation lines in one of
three ways (Linux 6.18, util-linux 2.38):

    the same time in microseconds   syslog(2) and consoles: record_print_text() puts the prefix before each line
    indented by the prefix's width  dmesg since util-linux 2.36, journalctl
    no prefix, unlike other lines   older dmesg, and programs that write the text unchanged
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

# length of the longest record (Linux, PRINTKRB_RECORD_MAX), which limits the distance to a record's first line
RECORD_BYTES = 2048
MAX_LINES = 2100  # number of lines to keep from earlier blocks; a record may consist of line breaks only
MAX_FOREIGN_LINES = 32  # maximum number of lines from other hosts between two lines of a record, in a collected log
CACHE_SIZE = 1000  # number of cached results; they are needed because each line is examined for many later lines
LEADING_BLANKS = 8  # pattern at the start of a record's own text

_BLANK = b" \t"
# The kernel's time as written by dmesg, syslog daemons and consoles. `dmesg --time-format=iso` has microseconds too.
_STAMP = re.compile(
    rb"([^\n]{0,120}?)(\[ {0,12}\d{1,10}\.\d{6}\]|(?<![^ ])\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{6}[+-]\d\d:\d\d )"
)
_NOT_YET = re.compile(rb"\[ {0,12}0\.000000\]")  # early in the boot, the clock is 0 and there are no users yet
_DATE = re.compile(
    rb"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d[T ][\d:.]{8,18}(?:Z|[+-]\d\d:?\d\d)?|\[[^\]]{8,40}\]) ?"
)

PrefixWidth = Callable[[bytes], "int | None"]

# A line's machine (taken from the text before the time), and the kernel's time as written in the line.
Stamp = tuple[bytes, bytes]
Heads = dict[Stamp, tuple[int, bytes]]  # the number of the last line with this stamp, and that line's head


class PrecedingLines:
    """Keeps the lines before the current line, from this block and earlier blocks.

    Args:
        prefix_width: function that returns the number of columns before a line's text: 0 without a prefix, None if
            another program wrote the line.
    """

    def __init__(self, prefix_width: PrefixWidth) -> None:
        self._width = functools.lru_cache(CACHE_SIZE)(prefix_width)
        self._blocks: deque[tuple[bytes, int]] = deque()  # this block and earlier blocks, each with its number of lines
        self._lines = 0
        self._last_bare_head: int | None = None  # number of the last line without a prefix that is its own record
        self._heads: Heads = {}
        self._older_heads: Heads = {}  # heads of lines before the first one in _heads
        self._last_stamp = (-1, (b"", b""))  # number and stamp of the last line with a stamp

    def enter(self, text: bytes, count: int) -> None:
        """Add the next block, which has `count` lines."""
        self._blocks.append((text, count))
        self._lines += count
        while self._lines - count - self._blocks[0][1] >= MAX_LINES:
            self._lines -= self._blocks.popleft()[1]

    def before(self, begins: int) -> Iterator[bytes]:
        """Yield the lines before the line at this offset in the block, nearest first."""
        return islice(self._lines_before(begins), MAX_LINES)

    def _lines_before(self, begins: int) -> Iterator[bytes]:
        for index in range(len(self._blocks) - 1, -1, -1):
            text, _ = self._blocks[index]
            end = begins - 1 if index == len(self._blocks) - 1 else len(text)
            while end >= 0:
                start = text.rfind(b"\n", 0, end) + 1
                yield text[start:end]
                end = start - 1

    def head(self, number: int, begins: int, line: bytes) -> bytes | None:
        """Return the first line of the record that line `number` seems to continue, or None if the line begins a
        record."""
        if line[:1] in (b" ", b"\t"):
            return self._indented_line_head(begins, line)
        stamp = _stamp(line)
        if stamp is not None:
            return self._same_time(number, begins, line, stamp)
        if self._width(line) == 0:
            return self._bare_line_head(number, begins)
        return None

    def _same_time(self, number: int, begins: int, line: bytes, stamp: Stamp) -> bytes | None:
        """Return the first line with this machine and time, if only lines of other machines are between the two."""
        machine, time = stamp
        (last, previous), self._last_stamp = self._last_stamp, (number, stamp)
        if last == number - 1 and previous[0] == machine and previous[1] != time:
            head = line  # the usual case if every line of the log is a fault
        elif _NOT_YET.fullmatch(time):
            return None
        else:
            head = self._first_at_time(number, begins, line, stamp)
        if len(self._heads) > MAX_LINES:  # all entries in _older_heads are too old
            self._older_heads, self._heads = self._heads, {}
        self._heads[stamp] = (number, head)
        return head if head != line else None

    def _first_at_time(self, number: int, begins: int, line: bytes, stamp: Stamp) -> bytes:
        """Search the preceding lines. If many lines from other hosts are in between, use the earlier result."""
        last, recorded = self._heads.get(stamp) or self._older_heads.get(stamp) or (None, line)
        head, foreign_lines, earlier_number = line, 0, number
        for earlier in self.before(begins):
            earlier_number -= 1
            found = _stamp(earlier)
            if found == stamp:
                head, foreign_lines = earlier, 0
                if earlier_number == last:
                    return recorded
            elif found is not None and found[0] == stamp[0]:
                break
            elif foreign_lines == MAX_FOREIGN_LINES:  # many lines from other hosts do not split a record
                return recorded if last is not None and number - last <= MAX_LINES else head
            else:
                foreign_lines += 1
        return head

    def _bare_line_head(self, number: int, begins: int) -> bytes | None:
        room, earlier_number = RECORD_BYTES, number
        for earlier in self.before(begins):
            earlier_number -= 1
            text = earlier.strip()
            if text and self._width(earlier) != 0:
                return earlier
            room -= len(text) + 1
            if room < 0 or earlier_number == self._last_bare_head:
                break
        self._last_bare_head = number
        return None

    def _indented_line_head(self, begins: int, line: bytes) -> bytes | None:
        """Return the line that an indented line continues, or None.

        A line that is indented but has its own prefix may come from a log that was indented when it was pasted. Such a
        line is treated as a continuation only if its indent equals the prefix width of the line that it would continue.
        """
        indent, room = _indent(line), RECORD_BYTES
        for earlier in self.before(begins):
            if earlier.strip() and _indent(earlier) < indent:
                width = self._width(earlier)
                if width == 0:
                    return None
                same = width is not None and 0 <= width - indent < LEADING_BLANKS
                return earlier if same or self._width(line) == 0 else None
            room -= len(earlier.strip()) + 1
            if room < 0:
                break
        return None


@functools.lru_cache(CACHE_SIZE)
def _stamp(line: bytes) -> Stamp | None:
    found = _STAMP.match(line)
    return None if found is None else (_without_date(found[1]), found[2])


def _without_date(before: bytes) -> bytes:
    return before[found.end() :] if (found := _DATE.match(before)) else before


def _indent(line: bytes) -> int:
    return len(line) - len(line.lstrip(_BLANK))
