"""Finds log lines that may come from the kernel and that a rule may recognise. All functions are pure.

A rule recognises only lines that contain one of its literals. Most lines in a log repeat an earlier line with different
numbers. A line is therefore looked up by its skeleton (the line without digits and the letters a-f), and only new
skeletons are searched for literals. If re2 is installed (optional dependency `healthd[scan]`), the whole text is
searched for all literals at once, without splitting it into lines. Both methods find the same lines
(tests/scan/test_scan_fast.py).

In a storm, only the first line is examined. The lines that repeat it with another time are returned together with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, compress, count, islice, pairwise
from operator import le, lt

from healthd.agent.kernel_log import parse as kernel_parse
from healthd.scan.continuation import PrecedingLines
from healthd.scan.lines import Block, Tally
from healthd.scan.prefixes import JSON, stripped
from healthd.scan.quoted import LEVEL, begins_as_the_kernels

MAX_PREFIX_LINES = 50  # number of lines per block that are tested for a kernel prefix
# re2 is used for logs larger than this (4 MiB): reading a smaller log takes less time than importing re2
BLOCKS_WITHOUT_RE2 = 64

# A date, followed by the line's writer: "kernel", or nothing if the writer was removed. A line with a level near the
# date may come from a program that quotes a kernel line (quoted.py).
_WRITTEN_BY = re.compile(
    rb"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d (?!NVRM: )"
    rb"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:?\d\d) "
    rb"(?!(?:[^ \n]{1,40} {1,4}){0,4}\[?" + LEVEL.encode() + rb"\b)"
)
_BLANK = (b" ", b"\t")


SKELETON_BYTES = 2048  # longer skeletons are not kept
SKELETONS_BYTES = 8 << 20  # maximum for all skeletons
SKELETON_OVERHEAD = 100  # overhead per skeleton in bytes

VARIES = b"0123456789abcdef"
# journalctl -o json writes a message that is not UTF-8 as a list of byte values. These bytes may contain any literal.
IN_NUMBERS = tuple(f'"MESSAGE"{before}:{after}[' for before in ("", " ") for after in ("", " "))


# (number, begins, line, literals, repeats) for a line that may come from the kernel and contains `literals` of rules.
# `begins`: the line's offset in the block's text. `repeats`: the complete lines after it that repeat it within the same
# second, in order.
Candidate = tuple[int, int, bytes, "tuple[str, ...]", bytes]


def candidates(blocks: Iterable[Block], tally: Tally, preceding: PrecedingLines | None = None) -> Iterator[Candidate]:
    """Yield the candidates. Each block is added to `preceding` before its lines are returned."""
    skeletons = Skeletons()
    with_re2: Search | None = None
    owner = b""
    for index, block in enumerate(blocks):
        text = block.text
        if preceding is not None:
            preceding.enter(text, block.size)
        if index == BLOCKS_WITHOUT_RE2:
            with_re2 = make_re2_search()
        tally.lines = block.last
        tally.binary = tally.binary or (b"\0" in text and any(b"\0" in line for line in block.lines[:100]))
        tally.kernel = tally.kernel or _has_kernel_line(block.lines)
        number, counted, at, owner_end = block.first, 0, 0, 0
        found: Iterator[tuple[int, int]] | None = None
        while at <= len(text):
            if found is None:  # in a storm, the next line is also a candidate, so no search is needed
                begins, end = at, text.find(b"\n", at)
                end = len(text) if end < 0 else end
            elif (match := next(found, None)) is not None:
                begins, end = match
            else:
                break
            if begins < at:
                continue
            line = text[begins:end]
            literals = skeletons.literals_in(line) if _may_be_kernel_line(line) else ()
            if literals and literals[-1] in IN_NUMBERS:
                own_literals = tuple([literal for literal in literals if literal not in IN_NUMBERS])
                literals = rule_literals() if line.startswith(JSON) else own_literals
            if not literals:
                found = found or (with_re2 or skeletons.search)(text, at)
                continue
            number, counted, at = number + text.count(b"\n", counted, begins), begins, end + 1
            if line.startswith(_BLANK):
                owner, owner_end = _last_unindented(text, owner_end, begins - 1, owner), begins
                if _continues(line, owner):
                    continue
            repeats = _find_repeats(text, begins, end)
            at += len(repeats)
            if repeats and with_re2:
                found = None
            yield number, begins, line, literals, repeats
        owner = _last_unindented(text, owner_end, len(text), owner)


def _may_be_kernel_line(line: bytes) -> bool:
    return b"kernel" in line or not _WRITTEN_BY.match(line)


def _has_kernel_line(lines: list[bytes]) -> bool:
    possible = [line for line in lines if _may_be_kernel_line(line)]
    return (
        any(_is_kernels(line) for line in lines[:MAX_PREFIX_LINES])
        or any(_is_kernels(line) for line in possible[:MAX_PREFIX_LINES])
        or any(begins_as_the_kernels(line) for line in possible)
    )


def _last_unindented(text: bytes, start: int, end: int, default: bytes) -> bytes:
    """Return the last line between two offsets that is not indented, or `default`."""
    while end >= start:
        begins = text.rfind(b"\n", start, end) + 1 or start
        if not text.startswith(_BLANK, begins, end):
            return text[begins:end]
        end = begins - 1
    return default


def _continues(line: bytes, owner: bytes) -> bool:
    """Return True if a line continues a program's text ("Mar 29 15:38:59 host name[7]: text").

    journalctl indents such lines by the width of the prefix. A service may write anything there, including a date and
    "kernel:". Lines that continue the kernel's own text are read, but are treated as unproven (continuation.py).
    """
    text = owner.find(b": ")
    if not 0 < text <= len(line) - len(line.lstrip()) - 2:
        return False
    writer = owner[:text].rstrip()
    return not (writer.endswith(b" kernel") or writer.startswith((b"kern ", b"kernel")))


def _is_kernels(line: bytes) -> bool:
    found = stripped(line, 0.0)
    return found is not None and (found.uptime is not None or found.epoch is not None or found.host != "")


# Matches a line and the following lines that differ only in the microseconds, or equal lines without an uptime.
# Syslog daemons and dmesg write such lines. In other formats each line is examined.
_SECOND = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
_ZONE = rb"(?:Z|[+-]\d\d:\d\d)"
_DATE = rb"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|" + _SECOND + rb"(?:\.\d{1,9})?" + _ZONE + rb")"
_KERNEL = rb" [\w.-]{1,64} kernel: "
_UPTIME = rb"\[ {0,12}\d{1,10}\."
_REPEATS = re.compile(
    rb"(?:((?:" + _DATE + _KERNEL + rb")?" + _UPTIME + rb")\d{6}(\] [^\n]*\n)(?:\1\d{6}\2)+"
    rb"|(" + _SECOND + rb"\.)\d{6}(" + _ZONE + _KERNEL + _UPTIME + rb")\d{6}(\] [^\n]*\n)(?:\3\d{6}\4\d{6}\5)+"
    rb"|(" + _DATE + _KERNEL + rb"[^\n\[]*\n)\6+)"
)
_TAIL = 24  # number of last bytes of a line to compare first, because most lines differ there


def _find_repeats(text: bytes, begins: int, end: int) -> bytes:
    """Return the lines after a line that repeat it (see Candidate)."""
    size = end + 1 - begins
    if text[end + size : end + size + 1] != b"\n" or text[end + size - _TAIL : end + size] != text[end - _TAIL : end]:
        return b""
    # the range grows only while all lines are equal; otherwise, each line would be compared with all later lines
    lines = 8
    while (stop := _repeats_end(text, begins, begins + size * lines, size)) == begins + size * lines:
        lines *= 8
    return text[begins + size : stop]


def _repeats_end(text: bytes, begins: int, limit: int, size: int) -> int:
    """Return the end offset, at most `limit`, of the lines of `size` bytes that are equal and have rising times."""
    found = _REPEATS.match(text, begins, limit)
    if found is None:
        return begins + size
    stop = found.end()
    dated, uptime = found.end(3), found.end(1 if found.end(1) >= 0 else 4)
    if uptime >= 0:
        stop = begins + size * _count_rising(text, uptime, stop, size, lt)
    if dated >= 0:
        stop = begins + size * _count_rising(text, dated, stop, size, le)
    return stop


def _count_rising(text: bytes, first: int, stop: int, size: int, in_order: Callable[[bytes, bytes], bool]) -> int:
    """Return the number of lines of `size` bytes whose microseconds rise.

    Args:
        first: offset of the first line.
    """
    times = [text[index : index + 6] for index in range(first, stop, size)]
    if all(map(in_order, times, islice(times, 1, None))):
        return len(times)
    return next(index for index, (earlier, later) in enumerate(pairwise(times), 1) if not in_order(earlier, later))


# --- literals


def rule_literals() -> tuple[str, ...]:
    """Return the literals in all rules, including the site's rules."""
    return tuple(kernel_parse.LITERALS)


def _searched() -> tuple[tuple[bytes, bytes, str], ...]:
    """Return (skeleton, bytes, text) for each literal."""
    return tuple(
        (text.encode().translate(None, VARIES), text.encode(), text) for text in (*rule_literals(), *IN_NUMBERS)
    )


Search = Callable[[bytes, int], "Iterator[tuple[int, int]]"]


class Skeletons:
    """Cache that maps a line's skeleton to the literals in the line. `search` is a Search."""

    def __init__(self) -> None:
        self._literals = _searched()
        self._cache: dict[bytes, tuple[tuple[bytes, str], ...]] = {}
        self._size = 0

    def literals_in(self, line: bytes) -> tuple[str, ...]:
        """Return the literals in a line, in their fixed order."""
        skeleton = line.translate(None, VARIES)
        literals = self._cache.get(skeleton)
        if literals is None:
            literals = self._add(skeleton)
        return tuple([text for literal, text in literals if literal in line]) if literals else ()

    def search(self, text: bytes, start: int) -> Iterator[tuple[int, int]]:
        """Yield the begin and end of each line that contains a literal.

        Args:
            start: offset of the first line to search.
        """
        remainder = text[start:] if start else text
        skeletons = remainder.translate(None, VARIES).split(b"\n")
        present, cache = set(skeletons), self._cache
        matching = {skeleton for skeleton in present if cache.get(skeleton)}
        new = present.difference(cache)
        if not new and not matching:
            return
        matching.update(skeleton for skeleton in new if self._add(skeleton))
        if matching:
            lines = remainder.split(b"\n")
            ends = list(accumulate(map(len, lines)))  # without line ends
            for index in compress(count(), map(matching.__contains__, skeletons)):
                line, literals = lines[index], cache.get(skeletons[index])
                if literals is not None:  # None: not cached
                    for literal, _ in literals:
                        if literal in line:
                            break
                    else:
                        continue
                end = start + ends[index] + index
                yield end - len(line), end

    def _add(self, skeleton: bytes) -> tuple[tuple[bytes, str], ...]:
        literals = tuple(
            (literal, text) for literal_skeleton, literal, text in self._literals if literal_skeleton in skeleton
        )
        if self._has_room(skeleton):
            self._cache[skeleton] = literals
        return literals

    def _has_room(self, skeleton: bytes) -> bool:
        if len(skeleton) > SKELETON_BYTES:
            return False
        self._size += len(skeleton) + SKELETON_OVERHEAD
        if self._size > SKELETONS_BYTES:
            self._cache.clear()
            self._size = len(skeleton) + SKELETON_OVERHEAD
        return True


def make_re2_search() -> Search | None:
    """Return a Search that looks for the literals directly, or None if google-re2 is not installed."""
    try:
        import re2

        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # match single bytes
        pattern = re2.compile(b"|".join(re.escape(literal) for _, literal, _ in _searched()), options)
    except (ImportError, AttributeError, TypeError):  # other packages (pyre2, fb-re2) also have a module with this name
        return None

    def search(text: bytes, start: int) -> Iterator[tuple[int, int]]:
        while (found := pattern.search(text, start)) is not None:
            begins, end = text.rfind(b"\n", 0, found.start()) + 1, text.find(b"\n", found.end())
            end = len(text) if end < 0 else end
            yield begins, end
            if end == len(text):
                return
            start = end + 1

    return search
