"""Reader of event streams in files, of one or many nodes: every event once, regardless of repeated or rotated lines.

A stream's files are `events.jsonl` and rotated ones (events.jsonl.1, events.jsonl-20261122.gz) in one folder; a folder
of such folders has many streams. The files of a folder are opened before the first one is read, so a file that is
rotated meanwhile is read to its end; if there are more than MAX_OPEN_FILES, only the newest, because the others are
archives. Memory grows with streams (a new one at each boot) and with gaps (events/sequence.py), not with lines.
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
TOO_LONG = f"is longer than {MAX_LINE >> 20} MiB: it is no event"
_HEAD, _BEFORE, _FIRST_LINES = 512, 64, 20
_GZIP = b"\x1f\x8b"
_OTHER_FORMATS = {b"\xfd7zXZ\x00": "xzcat", b"BZh": "bzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
_TRIES = 5  # maximum number of listings of a folder while its files are rotated


class LineProblem(NamedTuple):
    """A line of a file. `why`: the end of a sentence."""

    path: str
    number: int
    why: str

    def __str__(self) -> str:
        return f"{self.path} line {self.number} {self.why}"


@dataclass
class Tally:
    """Counts of a reading.

    repeats     lines that were read before
    unread      lines that are no event; `examples`: the first of them
    unknown     kept lines of a newer healthd: {"schema 2": 3}
    unfinished  files that ended in the middle of a line
    problems    files that cannot be read, or not to their end, a sentence each; `failed`: their streams
    stray       unread lines without a later event in their stream, so that a gap would not be visible
    since, until (epoch seconds): problems at other times are not counted
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
        """Count an event that this version does not know. Names beyond MAX_UNKNOWN are counted together."""
        name = kind[:60]
        self.unknown[name if name in self.unknown or len(self.unknown) < MAX_UNKNOWN else "others"] += 1

    def add_error(self, path: str, error: OSError) -> None:
        """Record that a file or folder cannot be read."""
        is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        text = "no such file or folder" if is_missing else f"cannot be read: {error.strerror or error}"
        self.problems[f"{path}: {text}"] = None


@dataclass
class _InvalidLines:
    """Unread lines of a stream, until its next event shows their time. `before`: time of the previous event."""

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
        """Record the lines and return how many were recorded."""
        count, self.count = self.count, 0
        examples, self.examples = self.examples, []
        if (at is not None and at < tally.since) or self.before > tally.until:
            return 0
        tally.unread += count
        tally.examples += examples[: MAX_EXAMPLES - len(tally.examples)]
        return count


class Mark(NamedTuple):
    """Position up to which a file was read: the end of a line.

    number: of the next line, from 1. before: the number of bytes before the position and their hash, to recognise
    another file with the same name; not the bytes, because they name people.
    """

    position: int
    number: int
    before: bytes


@dataclass
class Cursor:
    """Lines that were read before.

    sequences: makes each event appear once. marks (hash of a file's beginning -> position) save reading a file again: a
    file keeps its mark when it is renamed or copied, and without a mark nothing is lost. key: for the hashes of the
    marks, at most 64 bytes, so that nobody can test guesses against a mark.
    """

    sequences: ReadSequences = field(default_factory=ReadSequences)
    marks: dict[str, Mark] = field(default_factory=dict)
    key: bytes = field(default=b"", repr=False)


_BEGIN = Mark(0, 1, b"")


class Line(NamedTuple):
    """number: from 1. end: offset of the next line. why: it is not kept, the end of a sentence. ended: by a newline, so
    that nothing will be appended to it.
    """

    number: int
    content: bytes
    end: int
    why: str = ""
    ended: bool = True


# --- streams


def find(paths: Iterable[str], tally: Tally) -> list[str]:
    """Return the streams at these paths: folders whose files are one stream, or named files. Errors go to `tally`."""
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
    """Return the files of a stream; for a folder that cannot be listed the folder itself, which then cannot be read
    either.
    """
    try:
        return [os.path.join(stream, name) for name in sorted(os.listdir(stream)) if _STREAM_FILE.fullmatch(name)]
    except OSError:
        return [stream]


# --- reading


def read(stream: str, cursor: Cursor, tally: Tally) -> Iterator[StreamEvent]:
    """Yield the events of one stream that the cursor does not have, in the order of the files.

    A line that was written late appears late.
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
    """Open the files of a stream, the newest MAX_OPEN_FILES at the same time, until the folder did not change
    meanwhile.

    If files are rotated too fast, the current ones are used: the next reading has the rest.
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
    """Sort files, oldest first: by the number of their first event, not by name; streams by their first known time."""
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
    """Return the first event among the first lines."""
    try:
        with ExitStack() as files:
            head = (file or _open(path, files)).peek(BLOCK)
    except (OSError, EOFError, zlib.error):  # reported when the file is read
        return None
    found = map(parse, head.split(b"\n", _FIRST_LINES)[:_FIRST_LINES])
    return next((event for event in found if isinstance(event, StreamEvent)), None)


# --- one file


def _open(path: str, stack: ExitStack, named: bool = False) -> io.BufferedReader:
    """Open a file, decompressed; `stack` closes it. Raises OSError.

    In a folder it must be a regular file: a user who may write there could create a link to an endless device. `named`:
    the user named the file, so it may be a FIFO.
    """
    # Non-blocking, because a FIFO may never have a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if named else os.O_NOFOLLOW)
    try:
        descriptor = os.dup(0) if path == "-" else os.open(path, flags)
    except OSError as error:
        raise OSError(errno.EINVAL, "a symbolic link") if error.errno == errno.ELOOP and not named else error from None
    stack.callback(os.close, descriptor)
    os.set_blocking(descriptor, True)
    mode = os.fstat(descriptor).st_mode
    if not named and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a directory gives its own error below
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
    """Yield the new events of one file, and set its mark."""
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
            cursor.marks.pop(name, None)  # the order of the marks is that of the readings
            cursor.marks[name] = mark


def _hash_tail(text: bytes, key: bytes) -> bytes:
    return bytes((len(text),)) + blake2b(text, digest_size=16, key=key).digest()


def _matches_mark(file: io.BufferedReader, mark: Mark, key: bytes) -> bool:
    """Return True, with the file at the mark, if it is still the marked file."""
    size = mark.before[0] if mark.before else 0
    if 0 < size <= mark.position:
        file.seek(mark.position - size)
        if _hash_tail(file.read(size), key) == mark.before:
            return True
    file.seek(0)
    return False


def lines(file: IO[bytes], begin: Mark, block: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[Line]:
    """Yield the lines of a file from `begin` on, without empty ones.

    A line longer than `max_line` is not kept. Zero bytes before a line are left by a file system after a crash, and are
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
