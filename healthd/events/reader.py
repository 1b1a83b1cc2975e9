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
from healthd.events.parse import Key, Told, Unread, dropped, parse
from healthd.events.sequence import Seen
from healthd.events.writer import NAME

BLOCK = 64 << 10
MAX_LINE = 1 << 20
MOST_EXAMPLES = 20
MOST_UNKNOWN = 100
HELD = 32
_OF_STREAM = regex(r"events\.jsonl([.-][0-9][0-9.-]{0,39})?(\.gz)?")
TOO_LONG = f"is longer than {MAX_LINE >> 20} MiB: it is no event"
_HEAD, _BEFORE, _FIRST_LINES = 512, 64, 20
_GZIP = b"\x1f\x8b"
_OTHERS = {b"\xfd7zXZ\x00": "xzcat", b"BZh": "bzcat", b"\x28\xb5\x2f\xfd": "zstdcat"}
_TRIES = 5  # maximum number of listings of a folder while its files are rotated


class Where(NamedTuple):
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
    examples: list[Where] = field(default_factory=list)
    problem: dict[str, None] = field(default_factory=dict)
    troubled: set[str] = field(default_factory=set)

    def newer(self, what: str) -> None:
        """Count an event that this version does not know. Names beyond MAX_UNKNOWN are counted together."""
        name = what[:60]
        self.unknown[name if name in self.unknown or len(self.unknown) < MOST_UNKNOWN else "others"] += 1

    def cannot(self, path: str, error: OSError) -> None:
        """Record that a file or folder cannot be read."""
        gone = error.errno in (errno.ENOENT, errno.ENOTDIR)
        words = "no such file or folder" if gone else f"cannot be read: {error.strerror or error}"
        self.problem[f"{path}: {words}"] = None


@dataclass
class _Doubt:
    """Unread lines of a stream, until its next event shows their time. `before`: time of the previous event."""

    before: float = -math.inf
    count: int = 0
    examples: list[Where] = field(default_factory=list)

    def line(self, where: Where) -> None:
        self.count += 1
        if len(self.examples) < MOST_EXAMPLES:
            self.examples.append(where)

    def event(self, at: float | None, tally: Tally) -> None:
        if self.count:
            self._note(at, tally)
        self.before = at if at is not None else self.before

    def end(self, tally: Tally) -> None:
        tally.stray += self._note(None, tally)

    def _note(self, at: float | None, tally: Tally) -> int:
        """Record the lines and return how many were recorded."""
        count, self.count = self.count, 0
        examples, self.examples = self.examples, []
        if (at is not None and at < tally.since) or self.before > tally.until:
            return 0
        tally.unread += count
        tally.examples += examples[: MOST_EXAMPLES - len(tally.examples)]
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

    seen: Seen = field(default_factory=Seen)
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


def find(places: Iterable[str], tally: Tally) -> list[str]:
    """Return the streams at these paths: folders whose files are one stream, or named files. Errors go to `tally`."""
    found: dict[str, None] = {}
    for place in places:
        try:
            named = place == "-" or not stat.S_ISDIR(os.stat(place).st_mode)
            mine = [place] if named else list(_folders(place, tally))
        except OSError as error:
            tally.cannot(place, error)
            continue
        if not mine:
            tally.problem[f"{place}: contains no {NAME}"] = None
        found.update(dict.fromkeys(mine))
    return list(found)


def _folders(top: str, tally: Tally) -> Iterator[str]:
    def untold(error: OSError) -> None:
        tally.cannot(str(error.filename), error)

    for folder, below, names in os.walk(top, onerror=untold):
        below.sort()
        if any(map(_OF_STREAM.fullmatch, names)):
            yield folder


def listed(stream: str) -> list[str]:
    """Return the files of a stream; for a folder that cannot be listed the folder itself, which then cannot be read
    either.
    """
    try:
        return [os.path.join(stream, name) for name in sorted(os.listdir(stream)) if _OF_STREAM.fullmatch(name)]
    except OSError:
        return [stream]


# --- reading


def read(stream: str, cursor: Cursor, tally: Tally) -> Iterator[Told]:
    """Yield the events of one stream that the cursor does not have, in the order of the files.

    A line that was written late appears late.
    """
    doubt = _Doubt()
    with ExitStack() as stack:
        for path, held in _in_order(_opened(stream, stack, tally)):
            with ExitStack() as once:
                try:
                    yield from _events(path, held or _open(path, once), cursor, tally, doubt)
                    continue
                except EOFError:
                    tally.problem[f"{path}: ends in the middle of compressed data"] = None
                except zlib.error as error:
                    tally.problem[f"{path}: its compressed data is damaged: {error}"] = None
                except OSError as error:
                    tally.cannot(path, error)
                tally.troubled.add(stream)
    doubt.end(tally)


def _opened(stream: str, stack: ExitStack, tally: Tally) -> list[tuple[str, io.BufferedReader | None]]:
    """Open the files of a stream, the newest MAX_OPEN_FILES at the same time, until the folder did not change
    meanwhile.

    If files are rotated too fast, the current ones are used: the next reading has the rest.
    """
    tries = _TRIES
    while True:
        tries -= 1
        with ExitStack() as mine:
            paths = listed(stream)
            archives = set(sorted(paths, key=_changed, reverse=True)[HELD:])
            opened: list[tuple[str, io.BufferedReader | None]] = []
            failed: list[tuple[str, OSError]] = []
            for path in paths:
                try:
                    opened.append((path, None if path in archives else _open(path, mine, named=path == stream)))
                except OSError as error:
                    failed.append((path, error))
            if not tries or (listed(stream) == paths and all(_still(path, file) for path, file in opened)):
                stack.push(mine.pop_all())
                for path, problem in failed:
                    tally.cannot(path, problem)
                    tally.troubled.add(stream)
                return opened


def _changed(path: str) -> float:
    with suppress(OSError):
        return os.lstat(path).st_mtime
    return 0.0


def _still(path: str, file: io.BufferedReader | None) -> bool:
    """Return True if the name still belongs to the opened file."""
    if path == "-" or file is None:
        return True
    with suppress(OSError):
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    return False


def _in_order(files: Sequence[tuple[str, io.BufferedReader | None]]) -> list[tuple[str, io.BufferedReader | None]]:
    """Sort files, oldest first: by the number of their first event, not by name; streams by their first known time."""
    begins = [_first(path, file) if len(files) > 1 else None for path, file in files]
    began: dict[Key, float] = {}
    for told in begins:
        if told and told.key and told.at is not None:
            began[told.key] = min(told.at, began.get(told.key, told.at))

    def age(at: int) -> tuple[float, int]:
        told = begins[at]
        return (began.get(told.key, 0.0), told.seq or 0) if told and told.key else (0.0, 0)

    return [files[at] for at in sorted(range(len(files)), key=age)]


def _first(path: str, file: io.BufferedReader | None) -> Told | None:
    """Return the first event among the first lines."""
    try:
        with ExitStack() as once:
            head = (file or _open(path, once)).peek(BLOCK)
    except (OSError, EOFError, zlib.error):  # reported when the file is read
        return None
    found = map(parse, head.split(b"\n", _FIRST_LINES)[:_FIRST_LINES])
    return next((told for told in found if isinstance(told, Told)), None)


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
    for magic, program in _OTHERS.items():
        if begins.startswith(magic):
            raise OSError(errno.EINVAL, f"only gzip is supported; run: {program} {path} | healthd events -")
    if not begins.startswith(_GZIP):
        return file
    return stack.enter_context(io.BufferedReader(gzip.GzipFile(fileobj=file), BLOCK))


def _events(path: str, file: io.BufferedReader, cursor: Cursor, tally: Tally, doubt: _Doubt) -> Iterator[Told]:
    """Yield the new events of one file, and set its mark."""
    head = file.peek(_HEAD)[:_HEAD]
    name = sha256(head).hexdigest() if len(head) == _HEAD and path != "-" else ""
    here = cursor.marks.get(name, _BEGIN)
    if here.position and not _stands(file, here, cursor.key):
        here = _BEGIN
    try:
        for line in lines(file, here):
            told = Unread(line.why) if line.why else parse(line.content)
            if line.ended:
                here = Mark(line.end, line.number + 1, _trace((line.content + b"\n")[-_BEFORE:], cursor.key))
            elif isinstance(told, Unread):  # an incomplete line, which may be completed later
                tally.unfinished += 1
                return
            tally.lines += 1
            if isinstance(told, Unread):
                doubt.line(Where(path, line.number, told.why))
                continue
            doubt.event(told.at, tally)
            if told.key is not None and told.seq is not None and not cursor.seen.is_new(told.key, told.seq):
                tally.repeats += 1
            else:
                if (numbers := dropped(told)) and told.key is not None:
                    cursor.seen.drop(told.key, *numbers)
                if told.unknown:
                    tally.newer(told.unknown)
                tally.events += 1
                yield told
    finally:
        if name:
            cursor.marks.pop(name, None)  # the order of the marks is that of the readings
            cursor.marks[name] = here


def _trace(text: bytes, key: bytes) -> bytes:
    return bytes((len(text),)) + blake2b(text, digest_size=16, key=key).digest()


def _stands(file: io.BufferedReader, mark: Mark, key: bytes) -> bool:
    """Return True, with the file at the mark, if it is still the marked file."""
    size = mark.before[0] if mark.before else 0
    if 0 < size <= mark.position:
        file.seek(mark.position - size)
        if _trace(file.read(size), key) == mark.before:
            return True
    file.seek(0)
    return False


def lines(file: IO[bytes], begin: Mark, block: int = BLOCK, max_line: int = MAX_LINE) -> Iterator[Line]:
    """Yield the lines of a file from `begin` on, without empty ones.

    A line longer than `max_line` is not kept. Zero bytes before a line are left by a file system after a crash, and are
    skipped.
    """
    number, end, rest, cut, why = begin.number, begin.position, b"", 0, ""
    while data := file.read1(block) if isinstance(file, io.BufferedReader) else file.read(block):
        *whole, rest = (rest + data).split(b"\n")
        for content in whole:
            end += cut + len(content) + 1
            content = content.lstrip(b"\0")
            if content or why:
                yield Line(number, content[:max_line], end, why or (TOO_LONG if len(content) > max_line else ""))
            number, cut, why = number + 1, 0, ""
        kept = rest.lstrip(b"\0")
        if why or len(kept) > max_line:
            kept, why = b"", TOO_LONG
        cut, rest = cut + len(rest) - len(kept), kept
    if rest or why:
        yield Line(number, rest, end + cut + len(rest), why, ended=False)
