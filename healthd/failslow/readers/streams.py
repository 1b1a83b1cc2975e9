"""Which record of operations a file is, and its streams."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Sequence

from healthd.common.text import described, regex
from healthd.failslow.readers import hook_log, inspector, recorder
from healthd.failslow.readers.chunks import opened
from healthd.failslow.stream import Operation, Stream, StreamError

MOST_BYTES = 1 << 30
BEGIN = 1 << 16
_RANK = regex(r"(?i)rank[_\-.=]?(\d{1,7})")
_NUMBER = regex(r"\d{1,7}")
# What only a record has below these names; a table may have a column that is called so.
_ENTRIES = regex(r'"entries"\s*:\s*\[')
_INSPECTOR = regex(r'"(coll_perf|p2p_perf|dump_stats)"\s*:\s*\{')
# Protocol 0, which is text: a class and what it is called with, or a dict or list of plain data.
_OLD_PICKLE = regex(r"c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n(p\d+\n)?\(|\([dl]p\d+\n")
_ENDING = regex(r"(?i)\.(pkl|pickle|json|jsonl|log|txt|out|gz|bin|dump|trace|csv|parquet)$")


def is_record(path: str) -> bool:
    """Whether a file looks like a record of operations, and not like a table of samples."""
    try:
        return bool(_reader(_begin(path)))
    except (OSError, EOFError, zlib.error):
        return False


def read_streams(path: str, notes: list[str], name: str = "") -> list[Stream]:
    """The streams of one file that is a record, with what reading it told in notes. name: the file's, for people.
    Raises StreamError, one sentence."""
    name = name or path
    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise StreamError(f"{name}: is no regular file")
        begin = _begin(path)
        data = _whole(path)
    except (OSError, EOFError, zlib.error) as error:
        raise StreamError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise StreamError(f"{name}: has more than {MOST_BYTES >> 30} GiB")
    if not data:
        raise StreamError(f"{name}: is empty")
    kind = _reader(begin)
    if kind == "recorder":
        return [recorder.read(data, name, rank_of(name))]
    lines = io.StringIO(data.decode("utf-8", "replace"))
    if kind == "inspector":
        return inspector.read(lines, name, notes)
    if kind == "hook log":
        return hook_log.read(lines, name, rank_of(name), notes)
    raise StreamError(f"{name}: is no record of operations (NCCL Inspector, flight recorder, a hook's log)")


def of_table(path: str, name: str, operation: str = "", time: str = "", series: Sequence[str] = ()) -> list[Stream]:
    """The streams of a table (CSV, JSON lines, Parquet) with a column of operations and one of times. Raises
    HealthdError, one sentence."""
    found: dict[str, list[Operation]] = {}
    with opened(path, name) as table:
        wanted = [
            _column(table.names, operation, hook_log.OPERATIONS, "operations", name),
            _column(table.names, time, hook_log.TIMES, "times", name),
            *(_column(table.names, one, (), "", name) for one in series),
        ]
        for chunk in table.chunks(wanted):
            for row, (what, when, *whose) in enumerate(zip(*chunk.columns, strict=True)):
                try:
                    if what is None or when is None or isinstance(when, bool) or what == "":
                        raise ValueError
                    seconds = hook_log.moment(when)
                except (TypeError, ValueError, OverflowError):
                    at = chunk.where(row)
                    raise StreamError(
                        f"{name}: {at}: has no operation and time in seconds: {described(f'{what} {when}')}"
                    ) from None
                found.setdefault("/".join(map(str, whose)), []).append(Operation(seconds, str(what)))
    if not found:
        raise StreamError(f"{name}: has no operation")
    return [Stream(rank, tuple(done), name) for rank, done in found.items()]


def rank_of(name: str) -> str:
    """ "3" of "dumps/nccl_trace_rank_3.pkl", "_dump_3"; the name without its ending where it has no number."""
    base = os.path.basename(name)
    while (shorter := _ENDING.sub("", base)) != base:
        base = shorter
    numbers = _RANK.findall(base) or _NUMBER.findall(base)
    return str(int(numbers[-1])) if numbers else base


def _column(names: Sequence[str], asked: str, usual: Sequence[str], what: str, file: str) -> int:
    if asked:
        if asked not in names:
            raise StreamError(f'{file}: has no column "{asked}"; it has {", ".join(names)}')
        if names.count(asked) > 1:
            raise StreamError(f'{file}: has {names.count(asked)} columns "{asked}"')
        return names.index(asked)
    found = next((one for one in usual if one in names), None)
    if found is None:
        flag = "--operation" if what == "operations" else "--time"
        raise StreamError(f"{file}: which column has the {what}? ({flag} C; it has {', '.join(names)})")
    return names.index(found)


def _reader(begin: bytes) -> str:
    text = begin.decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    if begin[:1] == b"\x80" or _OLD_PICKLE.match(text):
        return "recorder"
    line = next((one for one in text.splitlines() if one.strip() and not one.lstrip().startswith("#")), "")
    if text.startswith(("{", "[{")):
        if _ENTRIES.search(text) or ('"profiling_name"' in text and '"time_created_ns"' in text):
            return "recorder"
        if _INSPECTOR.search(text):
            return "inspector"
        try:
            keys = set(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return ""
        return "hook log" if hook_log.is_line(keys) else ""
    return "hook log" if hook_log.LINE.fullmatch(line) else ""


def _begin(path: str) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return b""
        begin = file.read(BEGIN) or b""  # None where the kernel's file has nothing to tell now
    if begin[:2] == b"\x1f\x8b":
        with gzip.open(path) as unpacked:
            return unpacked.read(BEGIN)
    return begin


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else open(path, "rb") as file:
        return file.read(MOST_BYTES + 1)
