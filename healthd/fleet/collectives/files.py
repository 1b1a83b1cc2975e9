"""Reads a folder with ranks' dumps or logs: finds the kind and rank of each file, and reports unreadable files."""

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
from healthd.common.safe_pickle import MAX_CONTAINERS, UnsafePickle, load_plain
from healthd.common.text import regex
from healthd.fleet.collectives import rank_log
from healthd.fleet.collectives.dump import InvalidDump, parse_dump, possible_ranks
from healthd.fleet.collectives.rank_log import Failure, Hang, RankLog
from healthd.fleet.collectives.rank_view import RankView

MAX_DUMP_BYTES = 256 << 20  # maximum bytes per dump; 20,000 entries with their stacks take 50 MiB
MAX_LOG_BYTES = 4 << 30
MAX_FILES = 200_000
MAX_DEPTH = 4  # maximum levels below the given folder; some sites collect one folder per host
HEAD_BYTES = 4096
MAX_LINE_BYTES = 1 << 16

_RANK = regex(r"(?i)rank[_\-.=]?(\d{1,7})")
_NUMBER = regex(r"\d{1,7}")
_NUMBERED = regex(r"([A-Za-z]{0,64})[\-_.=]{0,8}(\d+)")  # pattern for a number and the word before it
_MAX_RANK_DIGITS = 7
_OTHER_NUMBER_WORDS = frozenset(("node", "host", "job", "attempt"))  # words before numbers that are not ranks
_ENDING = regex(r"(?i)\.(pkl|pickle|json|log|txt|out|err|gz|xz|bz2|bin|dump|trace)$")
# Words that occur in dump file names but are not host names. PyTorch's own names: nccl_trace_rank_,
# comm_lib_trace_rank_.
_NOT_HOST_WORDS = frozenset(
    (
        *("nccl", "comm", "comms", "lib", "torch", "pytorch", "distributed", "cuda", "fr", "flight", "recorder"),
        *("trace", "traces", "dump", "dumps", "log", "logs", "debug", "stderr", "stdout", "out", "err", "info", "file"),
        *("rank", "ranks", "worker", "global", "pg", "host", "node", "job", "attempt", "watchdog", "tmp"),
    )
)
_HOST = regex(r"[A-Za-z][A-Za-z0-9]*(?:[.-][A-Za-z0-9]+)*")


class UnreadFile(NamedTuple):
    """A file that was not used. It is named relative to the folder; the reason is a sentence without a full stop."""

    file: str
    reason: str


class UnusableFolder(HealthdError):
    """The folder cannot be read, or the names of its files do not identify the ranks."""


@dataclass(slots=True)
class Folder:
    """The contents of a folder.

    Attributes:
        views: one view for each rank.
        failures, hangs: failed requests and hangs from all logs.
        other_files: unrelated files.
    """

    views: list[RankView]
    unread: list[UnreadFile]
    other_files: list[str]
    failures: list[Failure] = field(default_factory=list)
    hangs: list[Hang] = field(default_factory=list)


def read(folder: str) -> Folder:
    """Read all ranks in a folder. Raises UnusableFolder."""
    with _garbage_collection_disabled():
        return _read_folder(folder)


@contextmanager
def _garbage_collection_disabled() -> Iterator[None]:
    """Disable the garbage collector.

    A dump has ten thousand small dicts without cycles, which would start the collector 100 times.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _read_folder(folder: str) -> Folder:
    found = Folder([], [], [])
    views: list[RankView] = []
    texts: dict[str, tuple[int, ...] | None] = {}
    for name in _file_names(folder, found):
        try:
            contents = _read_file(os.path.join(folder, name), name, texts)
        except (UnsafePickle, InvalidDump, OSError) as error:
            why = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            found.unread.append(UnreadFile(name, why))
            continue
        views += contents.views
        found.failures += contents.failures
        found.hangs += contents.hangs
        if not (contents.views or contents.failures or contents.hangs):
            found.other_files.append(name)
    unranked = [contents for contents in views if contents.rank < 0]
    _assign_ranks(unranked, {contents.rank for contents in views} - {-1}, found.unread)
    views = [contents for contents in views if contents.rank >= 0]
    _require_global_ranks(
        folder, [contents for contents in unranked if contents.rank >= 0], {contents.rank for contents in views}
    )
    found.views = _newest_per_rank(views, found.unread)
    return found


def _file_names(folder: str, found: Folder) -> Iterator[str]:
    """Yield the files below the folder, without following links to folders."""
    try:
        os.listdir(folder)
    except OSError as error:
        raise UnusableFolder(f"{folder}: cannot be read: {error.strerror or error}") from None
    count = 0
    for directory, folders, files in os.walk(folder):
        below = os.path.relpath(directory, folder)
        folders.sort()
        if below.count(os.sep) + (below != ".") >= MAX_DEPTH:
            folders.clear()
        for file in sorted(files):
            count += 1
            if count > MAX_FILES:
                raise UnusableFolder(f"{folder}: has more than {MAX_FILES:,} files")
            yield os.path.normpath(os.path.join(below, file))


def _read_file(path: str, name: str, texts: dict[str, tuple[int, ...] | None]) -> RankLog:
    """Return the view in a dump, or the records in a log. Raises NotPlain, InvalidDump, OSError."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidDump("is not a regular file")
    if not status.st_size:
        raise InvalidDump("is empty")
    # the path may have become a pipe since the first check
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InvalidDump("is not a regular file")
        head = file.read(HEAD_BYTES)
        first = head.lstrip()
        if head[:1] == b"\x80" or first.startswith((b"{", b"[{")):
            if status.st_size > MAX_DUMP_BYTES:
                raise InvalidDump(f"has {status.st_size:,} bytes; dumps larger than {MAX_DUMP_BYTES:,} are not read")
            data = head + file.read(MAX_DUMP_BYTES)
            dump_view = parse_dump(load_plain(data) if head[:1] == b"\x80" else _json(data), name, texts)
            dump_view.host = _host_name(name)
            possible = possible_ranks(dump_view)
            if dump_view.rank < 0 and possible is not None and len(possible) == 1:
                dump_view.rank = next(iter(possible))
            return RankLog([dump_view])
        if status.st_size > MAX_LOG_BYTES:
            raise InvalidDump(f"has {status.st_size:,} bytes; logs larger than {MAX_LOG_BYTES:,} are not read")
        if not any(head) and status.st_blocks * 512 < status.st_size // 2:
            raise InvalidDump("has holes instead of data")
        file.seek(0)
        labelled, numbers = (
            _labelled_numbers(name),
            [found_number for found_number in _numbers(name) if found_number is not None],
        )
        rank, number = (next(iter(candidates), None) for candidates in (labelled[::-1], (labelled or numbers)[::-1]))
        return rank_log.parse_log(_log_lines(file), name, _host_name(name), rank, number)


def _log_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a log, plain or gzip. Very long lines are split. Raises InvalidDump, OSError."""
    is_gzip = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    remaining = MAX_LOG_BYTES
    try:
        with gzip.GzipFile(fileobj=file) if is_gzip else nullcontext(file) as unpacked:
            while remaining > 0 and (line := unpacked.readline(MAX_LINE_BYTES)):
                remaining -= len(line)
                yield line
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InvalidDump("has damaged compressed data") from None


def _json(data: bytes) -> Any:
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise InvalidDump("is JSON that needs too much memory")
    try:
        return json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        raise InvalidDump("is damaged or incomplete JSON") from None


def _assign_ranks(views: Sequence[RankView], known_ranks: set[int], unread: list[UnreadFile]) -> None:
    """Set the ranks of dumps that do not record them. The rank is at the same position in all file names.

    If all names have a number after "rank", this number is the rank. Otherwise, the rank is the number that differs
    most between the files and is not part of a host name. Among several such numbers, one that yields ranks from 0 is
    preferred, otherwise the last.

    Args:
        known_ranks: ranks that are already known.
    """
    possible = [possible_ranks(dump_view) for dump_view in views]

    def ranks(numbers: Sequence[Sequence[int | None]], position: int) -> list[int | None]:
        """Return the number at this position in each file's name, or None if the file's groups lack this rank."""
        found = []
        for file_numbers, allowed in zip(numbers, possible, strict=True):
            number = file_numbers[position] if -len(file_numbers) <= position < len(file_numbers) else None
            found.append(number if allowed is None or number in allowed else None)
        return found

    def worth(assigned: Sequence[int | None]) -> tuple[int, bool]:
        distinct = {rank for rank in assigned if rank is not None}
        return len(distinct), distinct | known_ranks == set(range(len(distinct | known_ranks)))

    labelled, numbers = (
        [_labelled_numbers(dump_view.source) for dump_view in views],
        [_numbers(dump_view.source) for dump_view in views],
    )
    assignments = [ranks(labelled, position) for position in _positions(labelled)]
    if not any(None not in assignment for assignment in assignments):
        hosts = [ranks(numbers, position) for position in _positions(numbers) if _is_host_number(views, position)]
        assignments += [
            ranks(numbers, position) for position in _positions(numbers) if not _is_host_number(views, position)
        ] + hosts
    best = max(assignments, key=worth, default=[None] * len(views))
    for at, unranked_view in enumerate(views):
        allowed, rank = possible[at], best[at]
        if rank is None:  # a file whose name differs from most others
            likely = [*labelled[at][::-1], *numbers[at][::-1]]
            rank = next(
                (number for number in likely if number is not None and (allowed is None or number in allowed)), None
            )
        if rank is None:
            unread.append(
                UnreadFile(unranked_view.source, "is a dump, but neither its name nor its groups show its rank")
            )
        else:
            unranked_view.rank = rank


def _positions(numbers: Sequence[Sequence[int | None]]) -> list[int]:
    """Return positions counted from the end (last first), then positions counted from the start."""
    count = min(max(map(len, numbers), default=0), 8)
    return [*range(-1, -count - 1, -1), *range(count)]


def _is_host_number(views: Sequence[RankView], position: int) -> bool:
    """Return True if, in most names, the word before this number shows that it is not a rank, such as a host name."""
    count = 0
    for dump_view in views:
        preceding_words = [
            word.lower() for word, _ in _NUMBERED.findall(_strip_endings(os.path.basename(dump_view.source)))
        ]
        word = preceding_words[position] if -len(preceding_words) <= position < len(preceding_words) else ""
        count += bool(word) and (word in _OTHER_NUMBER_WORDS or word not in _NOT_HOST_WORDS)
    return count * 2 > len(views)


def _require_global_ranks(folder: str, named_views: Sequence[RankView], known_ranks: set[int]) -> None:
    """Raise UnusableFolder if file names contain local ranks.

    The names must contain local ranks if dumps in different folders seem to belong to the same rank and time, but other
    ranks have no dump. For example, each dump may come from the first GPU on its node. The global ranks of these dumps
    are unknown.
    """
    members = {rank for dump_view in named_views for group in dump_view.groups.values() for rank in group.ranks or ()}
    first_by_rank: dict[int, RankView] = {}
    for dump_view in named_views if members - known_ranks else ():
        earlier = first_by_rank.setdefault(dump_view.rank, dump_view)
        is_simultaneous = dump_view.first_ns <= earlier.last_ns and earlier.first_ns <= dump_view.last_ns
        is_separate = os.path.dirname(dump_view.source) != os.path.dirname(earlier.source) or not _labelled_numbers(
            dump_view.source
        )
        if earlier is not dump_view and is_simultaneous and is_separate:
            raise UnusableFolder(
                f"{folder}: {earlier.source} and {dump_view.source} both have rank {dump_view.rank} in their names, "
                f"and {len(members - known_ranks):,} other ranks have no file. Name each file by its global rank in "
                "the job, not by its local rank on the node"
            )


def _labelled_numbers(name: str) -> list[int]:
    """Return the numbers after "rank" in a file's name."""
    return [int(number) for number in _RANK.findall(_strip_endings(os.path.basename(name)))]


def _numbers(name: str) -> list[int | None]:
    """Return the numbers that follow "rank" in a file's name."""
    found = _NUMBERED.findall(_strip_endings(os.path.basename(name)))
    return [int(number) if len(number) <= _MAX_RANK_DIGITS else None for _, number in found]


def _strip_endings(base: str) -> str:
    while (shorter := _ENDING.sub("", base)) != base:
        base = shorter
    return base


def _host_name(name: str) -> str:
    """Return the host name in a file's name: "gpu-0412" for gpu-0412_rank3.pkl and gpu-0412/_dump_3.

    For dump-3.pkl, whose number is the rank, return "".
    """
    base = _strip_endings(os.path.basename(name))
    parts_of_name = _RANK.sub("_", base).split("_")
    is_only_number = len(_NUMBER.findall(base)) == 1 and not _RANK.search(base)
    for word in (*([] if is_only_number else parts_of_name), *reversed(name.split(os.sep)[:-1])):
        host = word.strip(".-")
        host_parts = set(host.lower().replace("-", " ").replace(".", " ").split())
        if _HOST.fullmatch(host) and host_parts - _NOT_HOST_WORDS and _NUMBER.search(host):
            return host
    return ""


def _newest_per_rank(views: list[RankView], unread: list[UnreadFile]) -> list[RankView]:
    """Keep one view for each rank: a dump is preferred to a log, and a newer file to an older one.

    A rank may have several files because its process restarted, or because it wrote both a log and a dump.
    """
    best: dict[int, RankView] = {}
    for rank_view in sorted(views, key=lambda view: (bool(view.version or view.pairs), view.last_ns, view.source)):
        older = best.get(rank_view.rank)
        if older is not None and older.source != rank_view.source:
            unread.append(
                UnreadFile(older.source, f"is also from rank {rank_view.rank}, but {rank_view.source} is newer")
            )
        best[rank_view.rank] = rank_view
    return [best[rank] for rank in sorted(best)]
