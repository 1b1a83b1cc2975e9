"""Reads records of operations from NCCL Inspector, PyTorch's flight recorder and a site's own hook.

NCCL Inspector writes one JSON object per line and one file per process (NVIDIA/nccl, ext-profiler/inspector:
inspector.cc, README.md, v4.0 to v4.3): `header` (the communicator's id, this process's rank in it, n_ranks), `metadata`
(dump_timestamp_us, hostname, pid) and `coll_perf` or `p2p_perf`. From v4.3 on, header and metadata precede the records
of a dump, in a line with `dump_stats`. dump_timestamp_us is the time when a record was written. The time when the
operation began, `event_trace_ts`, is recorded only with NCCL_INSPECTOR_DUMP_VERBOSE=1. Between two dumps, v4.0 keeps
only the newest operation of each communicator.

PyTorch's flight recorder dumps pickle or JSON (pytorch/pytorch, torch/csrc/distributed/c10d/FlightRecorder.hpp,
versions 2.0 to 2.10): `entries`, with an entry for each collective or send in any group. An entry has
`time_created_ns`, the time of the call, and `duration_ms` (only with TORCH_NCCL_ENABLE_TIMING). `pg_config` has the
groups of this rank. Most dumps do not contain the rank, which is then taken from the file name.

A hook writes a line for each call, with the time, the operation and optionally the communicator.

    # rank=3 host=gpu-0412
    1758610505.592849 all_reduce 0x7f01
    1758610505.611203 all_gather

The first line is optional. Without it, the rank is taken from the file name. JSON lines have the same contents:
{"time": ..., "operation": ..., "comm": ...}, and may have "rank", "host", "duration_us" and "size". A time is in
seconds or, depending on its size, in ms, us or ns since 1970. A library that is loaded before NCCL by LD_PRELOAD can
write such a log (FALCON, arXiv 2410.12588, 2.2).
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthd.common.safe_pickle import UnsafePickle, load_plain
from healthd.common.text import redacted, regex
from healthd.failslow.readers.chunks import open_table
from healthd.failslow.stream import Operation, Stream, StreamError

MAX_BYTES = 1 << 30
SNIFF_BYTES = 1 << 16
_RANK = regex(r"(?i)rank[_\-.=]?(\d{1,7})")
_NUMBER = regex(r"\d{1,7}")
# A table may have columns with the same names. These patterns match only the contents of a record.
_ENTRIES = regex(r'"entries"\s*:\s*\[')
_INSPECTOR = regex(r'"(coll_perf|p2p_perf|dump_stats)"\s*:\s*\{')
# Pickle protocol 0, which is text: a class with its arguments, or a dict or list of plain data.
_OLD_PICKLE = regex(r"c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n(p\d+\n)?\(|\([dl]p\d+\n")
_ENDING = regex(r"(?i)\.(pkl|pickle|json|jsonl|log|txt|out|gz|bin|dump|trace|csv|parquet)$")


def is_record(path: str) -> bool:
    """Return True if a file looks like a record of operations, not like a table of samples."""
    try:
        return bool(_record_kind(_read_begin(path)))
    except (OSError, EOFError, zlib.error):
        return False


def read_streams(path: str, notes: list[str], name: str = "") -> list[Stream]:
    """Return the streams in a record file, and append notes. Raises StreamError; its message is one sentence.

    Args:
        name: the file's name in messages.
    """
    name = name or path
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise StreamError(f"{name}: is not a regular file")
        data = _read_whole(path)
    except (OSError, EOFError, zlib.error) as error:
        raise StreamError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise StreamError(f"{name}: has more than {MAX_BYTES >> 30} GiB")
    if not data:
        raise StreamError(f"{name}: is empty")
    kind = _record_kind(data[:SNIFF_BYTES])
    if kind == "recorder":
        return [read_recorder(data, name, rank_from_name(name))]
    lines = io.StringIO(data.decode("utf-8", "replace"))
    if kind == "inspector":
        return read_inspector(lines, name, notes)
    if kind == "hook log":
        return read_hook_log(lines, name, rank_from_name(name), notes)
    raise StreamError(f"{name}: not a record of operations (NCCL Inspector, flight recorder, a hook's log)")


def read_table_streams(
    path: str, name: str, operation: str = "", time: str = "", series: Sequence[str] = ()
) -> list[Stream]:
    """Return the streams in a table (CSV, JSON lines, Parquet) that has columns with operations and times.

    Raises HealthdError; its message is one sentence.
    """
    found: dict[str, list[Operation]] = {}
    with open_table(path, name) as table:
        columns = [
            _find_column(table.names, operation, OPERATIONS, "operations", name),
            _find_column(table.names, time, TIMES, "times", name),
            *(_find_column(table.names, column, (), "", name) for column in series),
        ]
        for chunk in table.chunks(columns):
            for row, (operation_cell, time_cell, *rank_cells) in enumerate(zip(*chunk.columns, strict=True)):
                try:
                    if (
                        operation_cell is None
                        or time_cell is None
                        or isinstance(time_cell, bool)
                        or operation_cell == ""
                    ):
                        raise ValueError
                    seconds = to_seconds(time_cell)
                except (TypeError, ValueError, OverflowError):
                    at = chunk.where(row)
                    raise StreamError(
                        f"{name}: {at}: has no valid operation and time: {redacted(f'{operation_cell} {time_cell}')}"
                    ) from None
                found.setdefault("/".join(map(str, rank_cells)), []).append(Operation(seconds, str(operation_cell)))
    if not found:
        raise StreamError(f"{name}: has no operations")
    return [Stream(rank, tuple(done), name) for rank, done in found.items()]


def rank_from_name(name: str) -> str:
    """Return the rank in a file name: "3" for "dumps/nccl_trace_rank_3.pkl".

    Without a number, return the name without its ending.
    """
    base = os.path.basename(name)
    while (shorter := _ENDING.sub("", base)) != base:
        base = shorter
    numbers = _RANK.findall(base) or _NUMBER.findall(base)
    return str(int(numbers[-1])) if numbers else base


def _find_column(names: Sequence[str], requested: str, usual: Sequence[str], description: str, file: str) -> int:
    if requested:
        if requested not in names:
            raise StreamError(f'{file}: has no column "{requested}"; columns: {", ".join(names)}')
        if names.count(requested) > 1:
            raise StreamError(f'{file}: has {names.count(requested)} columns "{requested}"')
        return names.index(requested)
    found = next((candidate for candidate in usual if candidate in names), None)
    if found is None:
        flag = "--operation" if description == "operations" else "--time"
        raise StreamError(
            f"{file}: which column contains the {description}? (use {flag} C; columns: {', '.join(names)})"
        )
    return names.index(found)


def _record_kind(begin: bytes) -> str:
    text = begin.decode("utf-8", "replace").removeprefix("\ufeff").lstrip()
    if begin[:1] == b"\x80" or _OLD_PICKLE.match(text):
        return "recorder"
    line = next(
        (text_line for text_line in text.splitlines() if text_line.strip() and not text_line.lstrip().startswith("#")),
        "",
    )
    if text.startswith(("{", "[{")):
        if _ENTRIES.search(text) or ('"profiling_name"' in text and '"time_created_ns"' in text):
            return "recorder"
        if _INSPECTOR.search(text):
            return "inspector"
        try:
            keys = set(json.loads(line))
        except (ValueError, TypeError, RecursionError):
            return ""
        return "hook log" if _is_hook_line(keys) else ""
    return "hook log" if _LINE.fullmatch(line) else ""


def _read_begin(path: str) -> bytes:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return b""
        begin = file.read(SNIFF_BYTES) or b""  # None if a kernel file has no data at present
    if begin[:2] == b"\x1f\x8b":
        with gzip.open(path) as unpacked:
            return unpacked.read(SNIFF_BYTES)
    return begin


def _read_whole(path: str) -> bytes:
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    with gzip.open(path) if packed else open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)


def _parse_lines(
    lines: Iterable[str],
    source: str,
    parse: Callable[[str], Any],
    description: str,
    found: Mapping[Any, Sequence[Operation]],
    notes: list[str],
) -> Iterator[tuple[str, Any]]:
    """Yield the location and contents of each line that is not blank.

    If `parse` rejects the last line, this line is incomplete and is left out with a note. Raises StreamError if `parse`
    rejects any other line, or if no operation was `found`.

    Args:
        description: text that describes a rejected line.
    """
    torn = where = ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if torn:
            raise StreamError(torn)
        where = f"{source}: line {number:,}"
        try:
            record = parse(line)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            torn = f"{where}: {description}: {redacted(line.strip())}"
            continue
        yield where, record
    if torn and not any(found.values()):
        raise StreamError(torn)
    if torn:
        notes.append(f"{where} is incomplete and was left out")


# --- a hook's log

_LINE = regex(r"\s*(\d+(?:\.\d+)?)\s+([A-Za-z_][\w.:<>-]*)(?:\s+(\S+))?\s*")
_HEAD = regex(r"\s*#.*")
_HEAD_FIELD = regex(r"(rank|host)\s*[=:]\s*([\w.-]+)")
TIMES = ("time", "timestamp", "ts", "time_seconds", "timestamp_us", "timestamp_ns", "time_ns", "time_us")
OPERATIONS = ("operation", "op", "op_type", "coll", "event", "call", "func", "name")
_OPTIONAL_KEYS = frozenset(("comm", "rank", "host", "duration_us", "size"))


def read_hook_log(lines: Iterable[str], source: str, rank: str, notes: list[str]) -> list[Stream]:
    """Return one stream for each rank. Raises StreamError."""
    found: dict[str, list[Operation]] = {}
    host, description = "", "is not a line from a hook's log (time operation [comm])"
    for _, (head_fields, operation) in _parse_lines(lines, source, _parse_hook_line, description, found, notes):
        host = head_fields.get("host", host)
        if operation is None:
            rank = head_fields.get("rank", rank)
        else:
            found.setdefault(head_fields.get("rank", rank), []).append(operation)
    if not found:
        raise StreamError(f"{source}: has no operations")
    return [Stream(name, tuple(done), source, host) for name, done in found.items()]


def _parse_hook_line(line: str) -> tuple[dict[str, str], Operation | None]:
    """Return the rank and host in a line, and its operation."""
    if _HEAD.fullmatch(line):
        return dict(_HEAD_FIELD.findall(line)), None
    if not line.lstrip().startswith("{"):
        return {}, _hook_text_operation(line)
    record = json.loads(line)
    return {key: str(record[key]) for key in ("rank", "host") if key in record}, _hook_json_operation(record)


def _hook_text_operation(line: str) -> Operation:
    match = _LINE.fullmatch(line)
    if match is None:
        raise ValueError
    time, name, group = match.groups()
    return Operation(to_seconds(time), name, group or "")


def _hook_json_operation(record: Any) -> Operation:
    time = next(record[key] for key in (*TIMES, None) if key in record or key is None)
    name = next(record[key] for key in (*OPERATIONS, None) if key in record or key is None)
    if not isinstance(name, str) or isinstance(time, bool) or not isinstance(time, int | float):
        raise ValueError
    duration_us = record.get("duration_us")
    duration = math.nan if duration_us is None else float(duration_us) / 1e6
    return Operation(to_seconds(time), name, str(record.get("comm", "")), str(record.get("size", "")), -1, duration)


def to_seconds(value: str | float) -> float:
    """Return a time in seconds. A time since 1970 may be in ms, us or ns (10^11 s are 3,169 years).

    Raises TypeError, ValueError.
    """
    time = float(value)
    if not 0 <= time < math.inf:
        raise ValueError
    return next((time / unit for unit, minimum in ((1e9, 1e17), (1e6, 1e14), (1e3, 1e11)) if time >= minimum), time)


def _is_hook_line(keys: set[str]) -> bool:
    """Return True if these are the keys of a line in a hook's log. A row of a table would have more keys."""
    required = keys - _OPTIONAL_KEYS
    return len(required) == 2 and bool(required & set(TIMES)) and bool(required & set(OPERATIONS))


# --- NCCL Inspector

_KINDS = (("coll_perf", "coll"), ("p2p_perf", "p2p"))
MAX_RANKS = 1 << 20


def read_inspector(lines: Iterable[str], source: str, notes: list[str]) -> list[Stream]:
    """Return one stream for each process. Raises StreamError."""
    header: Any = None
    metadata: Any = None
    operations: dict[tuple[str, str], list[Operation]] = {}
    ranks_by_group: dict[
        tuple[str, str], dict[str, tuple[int, int]]
    ] = {}  # for each group, the number of ranks and the rank of this process
    for where, record in _parse_lines(lines, source, json.loads, "is damaged JSON", operations, notes):
        try:
            header, metadata = record.get("header", header), record.get("metadata", metadata)
            if header is None or metadata is None:
                raise StreamError(f"{where}: has no preceding communicator header and metadata")
            process = (str(metadata["hostname"]), str(int(metadata["pid"])))
            group, rank, ranks = str(header["id"]), int(header["rank"]), int(header["n_ranks"])
            if not 0 <= rank < ranks <= MAX_RANKS:
                raise ValueError
            ranks_by_group.setdefault(process, {})[group] = (ranks, rank)
            operations.setdefault(process, [])
            for part, kind in _KINDS:
                if part in record:
                    operations[process].append(_inspector_operation(record[part], kind, group))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise StreamError(f"{where}: is not an NCCL Inspector record, or has text instead of a number") from None
    if not any(operations.values()):
        raise StreamError(f"{source}: has no NCCL Inspector operations")
    return [
        Stream(
            _main_rank(ranks_by_group[process], process),
            tuple(done),
            source,
            process[0],
            {group: ranks for group, (ranks, _) in ranks_by_group[process].items()},
        )
        for process, done in operations.items()
        if done
    ]


def _inspector_operation(record: Any, kind: str, group: str) -> Operation:
    started_us = math.nan
    if "event_trace_ts" in record:
        times = record["event_trace_ts"]
        kernels = [float(kernel["kernel_start_ts"]) for kernel in times.get("kernel_events", ())]
        started_us = float(times[f"{kind}_start_ts"]) if f"{kind}_start_ts" in times else min(kernels)
        if not 0 < started_us < math.inf:
            raise ValueError
    duration_us = float(record[f"{kind}_exec_time_us"])
    if not 0 <= duration_us < math.inf:
        raise ValueError
    name = str(record[kind]) + (f" {int(record['p2p_peer'])}" if "p2p_peer" in record else "")
    sequence = int(record[f"{kind}_sn"]) if kind == "coll" else -1  # sender and receiver number a send differently
    return Operation(
        started_us / 1e6, name, group, str(int(record[f"{kind}_msg_size_bytes"])), sequence, duration_us / 1e6
    )


def _main_rank(groups: dict[str, tuple[int, int]], process: tuple[str, str]) -> str:
    """Return the rank in the largest communicator, which usually spans the whole job.

    If the process is alone in all its communicators, return the name of the process.
    """
    ranks, rank = max(groups.values(), key=lambda entry: entry[0])
    return str(rank) if ranks > 1 else f"{process[0]}/{process[1]}"


# --- the flight recorder

_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{]")


def read_recorder(data: bytes, source: str, rank: str) -> Stream:
    """Return the stream in a dump. Raises StreamError.

    Args:
        rank: rank from the file name.
    """
    try:
        dump = json.loads(data) if _JSON.match(data[:4096]) else load_plain(data)
    except UnsafePickle as error:
        raise StreamError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno:,}: " if isinstance(error, json.JSONDecodeError) else ""
        raise StreamError(f"{source}: {line}is damaged JSON") from None
    entries = dump.get("entries") if isinstance(dump, Mapping) else dump
    if not isinstance(entries, list) or not entries:
        raise StreamError(f"{source}: has no flight recorder entries")
    operations = []
    for number, entry in enumerate(entries, 1):
        try:
            operations.append(_recorder_operation(entry))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            raise StreamError(f"{source}: entry {number:,} is not a flight recorder entry") from None
    own = dump.get("rank") if isinstance(dump, Mapping) else None
    groups = _group_sizes(dump.get("pg_config")) if isinstance(dump, Mapping) else {}
    return Stream(str(own) if type(own) is int else rank, tuple(operations), source, "", groups, dumped=True)


def _recorder_operation(entry: Any) -> Operation:
    group = entry["process_group"]
    name = str(entry["profiling_name"]).rpartition(":")[2]
    duration_ms = entry.get("duration_ms")
    seconds = int(entry["time_created_ns"]) / 1e9
    is_p2p = entry.get("is_p2p", name.startswith(("send ", "recv ")))
    sequence = -1 if is_p2p else int(entry.get("collective_seq_id", entry.get("seq_id", -1)))
    size = f"{entry.get('input_sizes', '')} {entry.get('input_dtypes', '')}"
    return Operation(
        seconds,
        name,
        str(group[0]),
        size,
        sequence,
        math.nan if duration_ms is None else max(0.0, float(duration_ms)) / 1e3,
    )


def _group_sizes(config: Any) -> dict[str, int]:
    """Return the number of ranks in each group. A group with unexpected contents is left out."""
    found = {}
    for group in config.values() if isinstance(config, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("ranks"), str):
            found[str(group.get("name"))] = group["ranks"].count(",") + 1
    return found
