"""What a hook of one's own writes, a line a call: time, operation, and if there is one the communicator.

    # rank=3 host=gpu-0412
    1758610505.592849 all_reduce 0x7f01
    1758610505.611203 all_gather

The first line is not needed: else the rank is in the file's name. The same as JSON lines: {"time": ..., "operation":
..., "comm": ...}, where "rank", "host", "duration_us" and "size" may stand too. A time is in seconds, or by its size in
ms, us or ns since 1970. This is what a library put before NCCL with LD_PRELOAD sees (FALCON, arXiv 2410.12588, 2.2).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from healthd.common.text import described, regex
from healthd.failslow.stream import Operation, Stream, StreamError

LINE = regex(r"\s*(\d+(?:\.\d+)?)\s+([A-Za-z_][\w.:<>-]*)(?:\s+(\S+))?\s*")
_HEAD = regex(r"\s*#.*")
_TOLD = regex(r"(rank|host)\s*[=:]\s*([\w.-]+)")
TIMES = ("time", "timestamp", "ts", "time_seconds", "timestamp_us", "timestamp_ns", "time_ns", "time_us")
OPERATIONS = ("operation", "op", "op_type", "coll", "event", "call", "func", "name")


_BESIDE = frozenset(("comm", "rank", "host", "duration_us", "size"))


def is_line(keys: set[str]) -> bool:
    """Whether an object with these keys is a line of such a log, and no row of a table that has more to tell."""
    rest = keys - _BESIDE
    return len(rest) == 2 and bool(rest & set(TIMES)) and bool(rest & set(OPERATIONS))


def seconds(time: float) -> float:
    """Since 1970 in seconds, of a time that may be in ms, us or ns: 10^11 s are 3,169 years."""
    for unit, least in ((1e9, 1e17), (1e6, 1e14), (1e3, 1e11)):
        if time >= least:
            return time / unit
    return time


def read(lines: Iterable[str], source: str, rank: str, notes: list[str]) -> list[Stream]:
    """A stream a rank. Raises StreamError; a last line that breaks off is told in notes."""
    found: dict[str, list[Operation]] = {}
    host, torn = "", ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if torn:
            raise StreamError(torn)
        if _HEAD.fullmatch(line):
            told = dict(_TOLD.findall(line))
            rank, host = told.get("rank", rank), told.get("host", host)
            continue
        whose = rank
        try:
            if line.lstrip().startswith("{"):
                record = json.loads(line)
                whose, host = str(record.get("rank", rank)), str(record.get("host", host))
                one = _of_json(record)
            else:
                one = _of_text(line)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            torn = f"{source}: line {number:,}: is no line of a hook's log (time operation [comm]): " + described(
                line.strip()
            )
            continue
        found.setdefault(whose, []).append(one)
    if torn and not found:
        raise StreamError(torn)
    if torn:
        notes.append(f"{torn.partition(': is no line')[0]} breaks off and was left out")
    if not found:
        raise StreamError(f"{source}: has no operation")
    return [Stream(name, tuple(done), source, host) for name, done in found.items()]


def _of_text(line: str) -> Operation:
    told = LINE.fullmatch(line)
    if told is None:
        raise ValueError
    time, name, group = told.groups()
    return Operation(moment(time), name, group or "")


def _of_json(record: Any) -> Operation:
    time = next(record[key] for key in (*TIMES, None) if key in record or key is None)
    name = next(record[key] for key in (*OPERATIONS, None) if key in record or key is None)
    if not isinstance(name, str) or isinstance(time, bool) or not isinstance(time, int | float):
        raise ValueError
    took = record.get("duration_us")
    duration = math.nan if took is None else float(took) / 1e6
    return Operation(moment(time), name, str(record.get("comm", "")), str(record.get("size", "")), -1, duration)


def moment(told: str | float) -> float:
    """Seconds, of a number of others. Raises TypeError, ValueError."""
    time = float(told)
    if not 0 <= time < math.inf:
        raise ValueError
    return seconds(time)
