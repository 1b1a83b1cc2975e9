"""Reads event streams from files, for one or many nodes.

Each event appears once, even if lines are repeated or files are rotated.

A stream's files are `events.jsonl` and rotated files (events.jsonl.1, events.jsonl-20261122.gz) in one folder. A folder
of such folders has many streams. All files in a folder are opened before the first is read, so a file that is rotated
in the meantime is still read completely. If there are more than MAX_OPEN_FILES files, only the newest are opened in
advance, because the others are archives. Memory grows with the number of streams (each boot starts a new one) and of
gaps (events/sequence.py), but not with the number of lines.
"""

from __future__ import annotations

import errno
import gzip
import io
import math
import os
import stat
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import IO, NamedTuple

from healthd.common.text import regex
from healthd.events.parse import InvalidLine, Key, StreamEvent, dropped_range, parse
from healthd.events.sequence import ReadSequences
from healthd.events.writer import NAME

BLOCK = 64 << 10
MAX_LINE = 1 << 20
MAX_EXAMPLES = 20
MAX_UNKNOWN = 100
MAX_OPEN_FILES = 32
_STREAM_FILE = regex(r"events\.jsonl([.-][0-9][0-9.-]{0,39})?(\.gz)?")
TOO_LONG = f"is longer than {MAX_LINE >> 20} MiB, so it is not an event"
_HEAD, _BEFORE, _FIRST_LINES = 512, 64, 20
_GZIP = b"\x1f\x8b"
_OTHER_FORMATS = {b"\xfd7zXZ\x00": "xzcat", b"BZh": "bzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
_TRIES = 5  # maximum number of times a folder is listed while its files are being rotated


class LineProblem(NamedTuple):
    """A line that cannot be used. `why` is the reason, worded as a predicate ("is not UTF-8")."""

    path: str
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.path} line {self.number} {self.why}"


@dataclass
class Tally:
    """Counts from reading streams.

    repeats     lines that were read before
    unread      lines that are not events; `examples`: the first such lines
    unknown     kept lines from a newer healthd, such as {"schema 2": 3}
    unfinished  files that ended in the middle of a line
    problems    a sentence for each file that cannot be read completely; `failed`: the streams of these files
    stray       unread lines without a later event in their stream; a gap there would not be visible
    since, until   epoch seconds; problems at other times are not counted
    """

    since: float = -math.inf
    until: float = math.inf
    lines: int = 0
    events: int = 0
    repeats: int = 0
    unread: int = 0
    stray: int = 0
    unfinished: int = 0
    unknown: Counter[str] = field(default_factory=Counter)
    examples: list[LineProblem] = field(default_factory=list)
    problems: dict[str, None] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def count_unknown(self, kind: str) -> None:
        """Count an event that this version does not know.

        After MAX_UNKNOWN names, all further names share one count.
        """
        name = kind[:60]
        self.unknown[name if name in self.unknown or len(self.unknown) < MAX_UNKNOWN else "others"] += 1

    def add_error(self, path: str, error: OSError) -> None:
        """Record that a file or folder cannot be read."""
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        text = "no such file or folder" if is_missing else f"cannot be read: {error.strerror or error}"
        self.problems[f"{path}: {text}"] = None


@dataclass
class _InvalidLines:
    """A stream's unread lines.

    The lines are kept until the next event shows their time. `before` is the time of the previous event.
    """

    before: float = -math.inf
    count: int = 0
    examples: list[LineProblem] = field(default_factory=list)

    def add(self, where: LineProblem) -> None:
        self.count += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(where)

    def flush(self, at: float | None, tally: Tally) -> None:
        if self.count:
            self._note(at, tally)
        self.before = at if at is not None else self.before

    def finish(self, tally: Tally) -> None:
        tally.stray += self._note(None, tally)

    def _note(self, at: float | None, tally: Tally) -> int:
        """Record the lines in `tally`, and return their number."""
        count, self.count = self.count, 0
        examples, self.examples = self.examples, []
        if (at is not None and at < tally.since) or self.before > tally.until:
            return 0
        tally.unread += count
        tally.examples += examples[: MAX_EXAMPLES - len(tally.examples)]
        return count


class Mark(NamedTuple):
    """Position up to which a file was read, which is the end of a line.

    `number` is the next line's number, counted from 1. `before` is the number and the hash of the bytes before the
    position, which show whether another file has taken the name. The bytes themselves are not kept, because they
    contain users' names.
    """

    position: int
    number: int
    before: bytes


@dataclass
class Cursor:
    """Record of the lines that were read before.

    `sequences` ensures that each event appears once. `marks` maps the hash of a file's beginning to a position, so that
    the file is not read again. A renamed or copied file keeps its mark, and a missing mark loses no events. `key` is
    the key for the hashes in the marks, at most 64 bytes. Without the key, a guess cannot be tested against a mark.
    """

    sequences: ReadSequences = field(default_factory=ReadSequences)
    marks: dict[str, Mark] = field(default_factory=dict)
    key: bytes = field(default=b"", repr=False)


_BEGIN = Mark(0, 1, b"")


class Line(NamedTuple):
    """A line in a file.

    `number` is counted from 1. `end` is the offset of the next line. `why` is the reason why the line is not kept,
    worded as a predicate. `ended` is True if the line ends with a newline, so that nothing will be appended to it.
    """

    number: int
    content: bytes
    end: int
    why: str = ""
    ended: bool = True


# --- streams


def find(paths: Iterable[str], tally: Tally) -> list[str]:
    """Return the streams at these paths: folders with one stream each, or named files. Record errors in `tally`."""
    found: dict[str, None] = {}
    for path in paths:
        try:
            is_file = path == "-" or not stat.S_ISDIR(os.stat(path).st_mode)
            streams = [path] if is_file else list(_folders(path, tally))
        except OSError as error:
            tally.add_error(path, error)
            continue
        if not streams:
            tally.problems[f"{path}: contains no {NAME}"] = None
        found.update(dict.fromkeys(streams))
    return list(found)


def _folders(top: str, tally: Tally) -> Iterator[str]:
    def report(error: OSError) -> None:
        tally.add_error(str(error.filename), error)

    for folder, subfolders, names in os.walk(top, onerror=report):
        subfolders.sort()
        if any(map(_STREAM_FILE.fullmatch, names)):
            yield folder


def listed(stream: str) -> list[str]:
    """Return a stream's files. If its folder cannot be listed, return the folder: reading it reports the error."""
    try:
        return [os.path.join(stream, name) for name in sorted(os.listdir(stream)) if _STREAM_FILE.fullmatch(name)]
    except OSError:
        return [stream]


# --- reading


def read(stream: str, cursor: Cursor, tally: Tally) -> Iterator[StreamEvent]:
    """Yield a stream's events that the cursor does not contain, in file order.

    A line that was written late therefore appears late.
    """
    invalid = _InvalidLines()
    with ExitStack() as stack:
        for path, file in _in_order(_opened(stream, stack, tally)):
            with ExitStack() as files:
                try:
                    yield from _events(path, file or _open(path, files), cursor, tally, invalid)
                    continue
                except EOFError:
                    tally.problems[f"{path}: ends in the middle of compressed data"] = None
                except zlib.error as error:
                    tally.problems[f"{path}: its compressed data is damaged: {error}"] = None
                except OSError as error:
                    tally.add_error(path, error)
                tally.failed.add(stream)
    invalid.finish(tally)


def _opened(stream: str, stack: ExitStack, tally: Tally) -> list[tuple[str, io.BufferedReader | None]]:
    """Open a stream's files, with the newest MAX_OPEN_FILES files open at the same time.

    Try again if the folder changes in the meantime.

    If files are rotated too fast, use the last files opened, and read the rest next time.
    """
    tries = _TRIES
    while True:
        tries -= 1
        with ExitStack() as opened_files:
            paths = listed(stream)
            archives = set(sorted(paths, key=_changed, reverse=True)[MAX_OPEN_FILES:])
            opened: list[tuple[str, io.BufferedReader | None]] = []
            failed: list[tuple[str, OSError]] = []
            for path in paths:
                try:
                    opened.append((path, None if path in archives else _open(path, opened_files, named=path == stream)))
                except OSError as error:
                    failed.append((path, error))
            if not tries or (listed(stream) == paths and all(_is_same_file(path, file) for path, file in opened)):
                stack.push(opened_files.pop_all())
                for path, problem in failed:
                    tally.add_error(path, problem)
                    tally.failed.add(stream)
                return opened


def _changed(path: str) -> float:
    with suppress(OSError):
        return os.lstat(path).st_mtime
    return 0.0


def _is_same_file(path: str, file: io.BufferedReader | None) -> bool:
    """Return True if the name still belongs to the opened file."""
    if path == "-" or file is None:
        return True
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False


def _in_order(files: Sequence[tuple[str, io.BufferedReader | None]]) -> list[tuple[str, io.BufferedReader | None]]:
    """Sort files, oldest first, by the sequence number of their first event (not by name).

    Sort streams by their first known time.
    """
    first_events = [_first_event(path, file) if len(files) > 1 else None for path, file in files]
    first_times: dict[Key, float] = {}
    for event in first_events:
        if event and event.key and event.at is not None:
            first_times[event.key] = min(event.at, first_times.get(event.key, event.at))

    def age(at: int) -> tuple[float, int]:
        event = first_events[at]
        return (first_times.get(event.key, 0.0), event.seq or 0) if event and event.key else (0.0, 0)

    return [files[at] for at in sorted(range(len(files)), key=age)]


def _first_event(path: str, file: io.BufferedReader | None) -> StreamEvent | None:
    """Return the first event in the first lines of a file."""
    try:
        with ExitStack() as files:
            head = (file or _open(path, files)).peek(BLOCK)
    except (OSError, EOFError, zlib.error):  # the error is reported when the file is read
        return None
    found = map(parse, head.split(b"\n", _FIRST_LINES)[:_FIRST_LINES])
    return next((event for event in found if isinstance(event, StreamEvent)), None)


# --- one file


def _open(path: str, stack: ExitStack, named: bool = False) -> io.BufferedReader:
    """Open a file for reading decompressed data. `stack` closes it. Raises OSError.

    A file found in a folder must be a regular file, because a user with write access to the folder could create a link
    to an endless device. With `named`, the user named the file, which may therefore be a FIFO.
    """
    # Non-blocking, because a FIFO may never get a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if named else os.O_NOFOLLOW)
    try:
        descriptor = os.dup(0) if path == "-" else os.open(path, flags)
    except OSError as error:
        raise OSError(errno.EINVAL, "a symbolic link") if error.errno == errno.ELOOP and not named else error from None
    stack.callback(os.close, descriptor)
    os.set_blocking(descriptor, True)
    mode = os.fstat(descriptor).st_mode
    if not named and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a directory causes its own error below
        raise OSError(errno.EINVAL, "not a regular file")
    file: io.BufferedReader = io.BufferedReader(io.FileIO(descriptor, closefd=False), BLOCK)
    stack.enter_context(file)
    begins = file.peek(8)[:8]
    for magic, program in _OTHER_FORMATS.items():
        if begins.startswith(magic):
            raise OSError(errno.EINVAL, f"only gzip is supported; run: {program} {path} | healthd events -")
    if not begins.startswith(_GZIP):
        return file
    return stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK))


def _events(
    path: str, file: io.BufferedReader, cursor: Cursor, tally: Tally, invalid: _InvalidLines
) -> Iterator[StreamEvent]:
    """Yield the new events in one file, and set its mark."""
    head = file.peek(_HEAD)[:_HEAD]
    name = sha256(head).hexdigest() if len(head) == _HEAD and path != "-" else ""
    mark = cursor.marks.get(name, _BEGIN)
    if mark.position and not _matches_mark(file, mark, cursor.key):
        mark = _BEGIN
    try:
        for line in lines(file, mark):
            event = InvalidLine(line.why) if line.why else parse(line.content)
            if line.ended:
                mark = Mark(line.end, line.number + 1, _hash_tail((line.content + b"\n")[-_BEFORE:], cursor.key))
            elif isinstance(event, InvalidLine):  # an incomplete line, which may be completed later
                tally.unfinished += 1
                return
            tally.lines += 1
            if isinstance(event, InvalidLine):
                invalid.add(LineProblem(path, line.number, event.why))
                continue
            invalid.flush(event.at, tally)
            if event.key is not None and event.seq is not None and not cursor.sequences.is_new(event.key, event.seq):
                tally.repeats += 1
            else:
                if (numbers := dropped_range(event)) and event.key is not None:
                    cursor.sequences.drop(event.key, *numbers)
                if event.unknown:
                    tally.count_unknown(event.unknown)
                tally.events += 1
                yield event
    finally:
        if name:
            cursor.marks.pop(name, None)  # marks are kept in the order in which files were last read
            cursor.marks[name] = mark


def _hash_tail(text: bytes, key: bytes) -> bytes:
    return bytes((len(text),)) + blake2b(text, digest_size=16, key=key).digest()


def _matches_mark(file: io.BufferedReader, mark: Mark, key: bytes) -> bool:
    """Return True if this is still the marked file. The file is then positioned at the mark."""
    size = mark.before[0] if mark.before else 0
    if 0 < size <= mark.position:
        file.seek(mark.position - size)
        if _hash_tail(file.read(size), key) == mark.before:
            return True
    file.seek(0)
    return False


def lines(file: IO[bytes], begin: Mark, block: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[Line]:
    """Yield a file's lines from `begin`, except empty lines.

    A line longer than `max_line` is not kept. Zero bytes before a line, which a file system leaves after a crash, are
    skipped.
    """
    number, end, remainder, skipped, why = begin.number, begin.position, b"", 0, ""
    while data := file.read1(block) if isinstance(file, io.BufferedReader) else file.read(block):
        *whole, remainder = (remainder + data).split(b"\n")
        for content in whole:
            end += skipped + len(content) + 1
            content = content.lstrip(b"\0")
            if content or why:
                yield Line(number, content[:max_line], end, why or (TOO_LONG if len(content) > max_line else ""))
            number, skipped, why = number + 1, 0, ""
        unfinished = remainder.lstrip(b"\0")
        if why or len(unfinished) > max_line:
            unfinished, why = b"", TOO_LONG
        skipped, remainder = skipped + len(remainder) - len(unfinished), unfinished
    if remainder or why:
        yield Line(number, remainder, end + skipped + len(remainder), why, ended=False)
