"""Files of a folder with dumps or logs of ranks: the kind and rank of each, and which could not be read."""

from __future__ import annotations

import gc
import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from healthd.common.errors import HealthdError
from healthd.common.safe_pickle import MOST_CONTAINERS, NotPlain, plain
from healthd.common.text import regex
from healthd.fleet.collectives import rank_log
from healthd.fleet.collectives.dump import NoDump, ranks_possible, view
from healthd.fleet.collectives.rank_log import Failure, Hang, RankLog
from healthd.fleet.collectives.rank_view import View

MOST_BYTES = 256 << 20  # per dump: 20,000 entries with their stacks have 50 MiB
MOST_LOG_BYTES = 4 << 30
MOST_FILES = 200_000
DEEPEST = 4  # levels below the given folder: some sites collect one folder per host
BEGIN = 4096
LONGEST_LINE = 1 << 16

_RANK = regex(r"(?i)rank[_\-.=]?(\d{1,7})")
_NUMBER = regex(r"\d{1,7}")
_NUMBERED = regex(r"([A-Za-z]{0,64})[\-_.=]{0,8}(\d+)")  # a number, and the word before it
_LONGEST_NUMBER = 7
_OF_ELSE = frozenset(("node", "host", "job", "attempt"))  # words before numbers that are not ranks
_ENDING = regex(r"(?i)\.(pkl|pickle|json|log|txt|out|err|gz|xz|bz2|bin|dump|trace)$")
# Words in file names of dumps that are not a host name; PyTorch's own: nccl_trace_rank_, comm_lib_trace_rank_.
_NO_HOST = frozenset(
    (
        *("nccl", "comm", "comms", "lib", "torch", "pytorch", "distributed", "cuda", "fr", "flight", "recorder"),
        *("trace", "traces", "dump", "dumps", "log", "logs", "debug", "stderr", "stdout", "out", "err", "info", "file"),
        *("rank", "ranks", "worker", "global", "pg", "host", "node", "job", "attempt", "watchdog", "tmp"),
    )
)
_HOST = regex(r"[A-Za-z][A-Za-z0-9]*(?:[.-][A-Za-z0-9]+)*")


class Unread(NamedTuple):
    """A file, named relative to the folder, and why it was not used: a sentence without a full stop."""

    file: str
    why: str


class NoFolder(HealthdError):
    """The folder cannot be read, or its file names do not identify the ranks."""


@dataclass(slots=True)
class Folder:
    """Contents of a folder. views: one per rank. failures, hangs: of all logs. other_files: unrelated files."""

    views: list[View]
    unread: list[Unread]
    others: list[str]
    failures: list[Failure] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)


def read(folder: str) -> Folder:
    """Read all ranks of a folder. Raises UnusableFolder."""
    with _no_collector():
        return _read(folder)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable the garbage collector: a dump has ten thousand small dicts without cycles, and would trigger it 100
    times.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _read(folder: str) -> Folder:
    found = Folder([], [], [])
    views: list[View] = []
    texts: dict[str, tuple[int, ...] | None] = {}
    for name in _names(folder, found):
        try:
            seen = _of_file(os.path.join(folder, name), name, texts)
        except (NotPlain, NoDump, OSError) as error:
            why = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            found.unread.append(Unread(name, why))
            continue
        views += seen.views
        found.failures += seen.failures
        found.hangs += seen.hangs
        if not (seen.views or seen.failures or seen.hangs):
            found.others.append(name)
    named = [seen for seen in views if seen.rank < 0]
    _name_ranks(named, {seen.rank for seen in views} - {-1}, found.unread)
    views = [seen for seen in views if seen.rank >= 0]
    _no_local_ranks(folder, [seen for seen in named if seen.rank >= 0], {seen.rank for seen in views})
    found.views = _one_a_rank(views, found.unread)
    return found


def _names(folder: str, found: Folder) -> Iterator[str]:
    """Yield the files below the folder, without following links to folders."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise NoFolder(f"{folder}: cannot be read: {error.strerror or error}") from None
    count = 0
    for place, folders, files in os.walk(folder):
        below = os.path.relpath(place, folder)
        folders.sort()
        if below.count(os.sep) + (below != ".") >= DEEPEST:
            folders.clear()
        for file in sorted(files):
            count += 1
            if count > MOST_FILES:
                raise NoFolder(f"{folder}: has more than {MOST_FILES:,} files")
            yield os.path.normpath(os.path.join(below, file))


def _of_file(path: str, name: str, texts: dict[str, tuple[int, ...] | None]) -> RankLog:
    """Return a dump's view, or the records of a log. Raises NotPlain, InvalidDump, OSError."""
    about = os.stat(path)
    if not stat.S_ISREG(about.st_mode):
        raise NoDump("is not a regular file")
    if not about.st_size:
        raise NoDump("is empty")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # it may have become a pipe
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NoDump("is not a regular file")
        begin = file.read(BEGIN)
        first = begin.lstrip()
        if begin[:1] == b"\x80" or first.startswith((b"{", b"[{")):
            if about.st_size > MOST_BYTES:
                raise NoDump(f"has {about.st_size:,} bytes; dumps of more than {MOST_BYTES:,} are not read")
            data = begin + file.read(MOST_BYTES)
            seen = view(plain(data) if begin[:1] == b"\x80" else _json(data), name, texts)
            seen.host = _host(name)
            possible = ranks_possible(seen)
            if seen.rank < 0 and possible is not None and len(possible) == 1:
                seen.rank = next(iter(possible))
            return RankLog([seen])
        if about.st_size > MOST_LOG_BYTES:
            raise NoDump(f"has {about.st_size:,} bytes; logs of more than {MOST_LOG_BYTES:,} are not read")
        if not any(begin) and about.st_blocks * 512 < about.st_size // 2:
            raise NoDump("has holes instead of content")
        file.seek(0)
        labelled, numbers = _labelled(name), [one for one in _numbers(name) if one is not None]
        rank, number = (next(iter(some), None) for some in (labelled[::-1], (labelled or numbers)[::-1]))
        return rank_log.read(_lines(file), name, _host(name), rank, number)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a log, plain or gzip. Very long lines are split. Raises InvalidDump, OSError."""
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    left = MOST_LOG_BYTES
    try:
        with gzip.GzipFile(fileobj=file) if packed else nullcontext(file) as unpacked:
            while left > 0 and (line := unpacked.readline(LONGEST_LINE)):
                left -= len(line)
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise NoDump("has damaged compressed data") from None


def _json(data: bytes) -> Any:
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise NoDump("is JSON that needs too much memory")
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        raise NoDump("is damaged or incomplete JSON") from None


def _name_ranks(views: Sequence[View], others: set[int], unread: list[Unread]) -> None:
    """Set the ranks of dumps that do not record theirs, from one position in all file names.

    That is the number after "rank" if all names have one. Otherwise it is the number (not a host's) that differs most
    between the files, then one that yields ranks from 0 on, then the last one. known_ranks: ranks that are known
    already.
    """
    possible = [ranks_possible(one) for one in views]

    def ranks(numbers: Sequence[Sequence[int | None]], place: int) -> list[int | None]:
        """Return the number at this position of each file name, or None if it is not a rank of the file's groups."""
        found = []
        for some, among in zip(numbers, possible, strict=True):
            number = some[place] if -len(some) <= place < len(some) else None
            found.append(number if among is None or number in among else None)
        return found

    def worth(told: Sequence[int | None]) -> tuple[int, bool]:
        known = {rank for rank in told if rank is not None}
        return len(known), known | others == set(range(len(known | others)))

    labelled, numbers = [_labelled(one.source) for one in views], [_numbers(one.source) for one in views]
    ways = [ranks(labelled, place) for place in _places(labelled)]
    if not any(None not in way for way in ways):
        hosts = [ranks(numbers, place) for place in _places(numbers) if _of_hosts(views, place)]
        ways += [ranks(numbers, place) for place in _places(numbers) if not _of_hosts(views, place)] + hosts
    best = max(ways, key=worth, default=[None] * len(views))
    for at, seen in enumerate(views):
        among, rank = possible[at], best[at]
        if rank is None:  # a file whose name differs from most others
            likely = [*labelled[at][::-1], *numbers[at][::-1]]
            rank = next((one for one in likely if one is not None and (among is None or one in among)), None)
        if rank is None:
            unread.append(Unread(seen.source, "is a dump whose rank neither its name nor its groups show"))
        else:
            seen.rank = rank


def _places(numbers: Sequence[Sequence[int | None]]) -> list[int]:
    """Return positions counted from the end, last first, then from the start."""
    most = min(max(map(len, numbers), default=0), 8)
    return [*range(-1, -most - 1, -1), *range(most)]


def _of_hosts(views: Sequence[View], place: int) -> bool:
    """Return True if in most names the word before this number is a host's, or another word that precedes no rank."""
    count = 0
    for seen in views:
        words = [word.lower() for word, _ in _NUMBERED.findall(_bare(os.path.basename(seen.source)))]
        word = words[place] if -len(words) <= place < len(words) else ""
        count += bool(word) and (word in _OF_ELSE or word not in _NO_HOST)
    return count * 2 > len(views)


def _no_local_ranks(folder: str, named: Sequence[View], known: set[int]) -> None:
    """Raise UnusableFolder if file names contain local ranks.

    Dumps of one rank by their names, from the same time, in different folders, while other ranks have none, are for
    example of the first GPU of each node. Their global ranks are unknown.
    """
    members = {rank for seen in named for group in seen.groups.values() for rank in group.ranks or ()}
    before: dict[int, View] = {}
    for seen in named if members - known else ():
        other = before.setdefault(seen.rank, seen)
        together = seen.first_ns <= other.last_ns and other.first_ns <= seen.last_ns
        apart = os.path.dirname(seen.source) != os.path.dirname(other.source) or not _labelled(seen.source)
        if other is not seen and together and apart:
            raise NoFolder(
                f"{folder}: {other.source} and {seen.source} both have rank {seen.rank} in their names, and "
                f"{len(members - known):,} other ranks have no file: name each file by the global rank of the job, not "
                "by the local rank of its node"
            )


def _labelled(name: str) -> list[int]:
    """Return the numbers after "rank" in a file's name."""
    return [int(number) for number in _RANK.findall(_bare(os.path.basename(name)))]


def _numbers(name: str) -> list[int | None]:
    """Return all numbers in a file's name; None for one that cannot be a rank: a date, a time."""
    found = _NUMBERED.findall(_bare(os.path.basename(name)))
    return [int(number) if len(number) <= _LONGEST_NUMBER else None for _, number in found]


def _bare(base: str) -> str:
    while (shorter := _ENDING.sub("", base)) != base:
        base = shorter
    return base


def _host(name: str) -> str:
    """Return "gpu-0412" for gpu-0412_rank3.pkl or gpu-0412/_dump_3, and "" for dump-3.pkl, whose number is the rank."""
    base = _bare(os.path.basename(name))
    words = _RANK.sub("_", base).split("_")
    alone = len(_NUMBER.findall(base)) == 1 and not _RANK.search(base)
    for word in (*([] if alone else words), *reversed(name.split(os.sep)[:-1])):
        host = word.strip(".-")
        parts = set(host.lower().replace("-", " ").replace(".", " ").split())
        if _HOST.fullmatch(host) and parts - _NO_HOST and _NUMBER.search(host):
            return host
    return ""


def _one_a_rank(views: list[View], unread: list[Unread]) -> list[View]:
    """Keep one view per rank: a dump before a log, then the newest.

    A process may restart, or write both a log and a dump.
    """
    best: dict[int, View] = {}
    for seen in sorted(views, key=lambda view: (bool(view.version or view.pairs), view.last_ns, view.source)):
        older = best.get(seen.rank)
        if older is not None and older.source != seen.source:
            unread.append(Unread(older.source, f"is of rank {seen.rank} too, but {seen.source} is newer"))
        best[seen.rank] = seen
    return [best[rank] for rank in sorted(best)]
