"""NCCL Inspector's records as streams: one JSON object a line, one file a process.

The format: NVIDIA/nccl, ext-profiler/inspector (inspector.cc, README.md), v4.0 to v4.3: `header` (the communicator's
id, this process' rank in it, n_ranks), `metadata` (dump_timestamp_us, hostname, pid) and `coll_perf` or `p2p_perf`.
From v4.3 on header and metadata stand once before the records of a dump, in a line with `dump_stats`. Only with
NCCL_INSPECTOR_DUMP_VERBOSE=1 a record has `event_trace_ts`, when it began; dump_timestamp_us is when it was written,
which is no time of an operation. v4.0 keeps the newest operation of a communicator between two dumps, no other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from healthd.common.text import described
from healthd.failslow.stream import Operation, Stream, StreamError

_KINDS = (("coll_perf", "coll"), ("p2p_perf", "p2p"))
MOST_RANKS = 1 << 20


def read(lines: Iterable[str], source: str, notes: list[str]) -> list[Stream]:
    """One stream a process. Raises StreamError; a last line that breaks off is told in notes."""
    header: Any = None
    metadata: Any = None
    operations: dict[tuple[str, str], list[Operation]] = {}
    place: dict[tuple[str, str], dict[str, tuple[int, int]]] = {}  # of each group: ranks, and which one this is
    torn = ""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if torn:
            raise StreamError(torn)
        where = f"{source}: line {number:,}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            torn = f"{where}: is damaged JSON: {described(line.strip())}"
            continue
        try:
            header, metadata = record.get("header", header), record.get("metadata", metadata)
            if header is None or metadata is None:
                raise StreamError(f"{where}: has no header and metadata of a communicator before it")
            process = (str(metadata["hostname"]), str(int(metadata["pid"])))
            group, rank, ranks = str(header["id"]), int(header["rank"]), int(header["n_ranks"])
            if not 0 <= rank < ranks <= MOST_RANKS:
                raise ValueError
            place.setdefault(process, {})[group] = (ranks, rank)
            operations.setdefault(process, [])
            for part, kind in _KINDS:
                if part in record:
                    operations[process].append(_operation(record[part], kind, group))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise StreamError(
                f"{where}: is no record of NCCL Inspector's, or has text where a number should be"
            ) from None
    if torn and not any(operations.values()):
        raise StreamError(torn)
    if torn:
        notes.append(f"{torn.partition(': is damaged')[0]} breaks off and was left out")
    if not any(operations.values()):
        raise StreamError(f"{source}: has no operation of NCCL Inspector's")
    return [
        Stream(
            _rank(place[process], process),
            tuple(done),
            source,
            process[0],
            {group: ranks for group, (ranks, _) in place[process].items()},
        )
        for process, done in operations.items()
        if done
    ]


def _operation(told: Any, kind: str, group: str) -> Operation:
    began = math.nan
    if "event_trace_ts" in told:
        times = told["event_trace_ts"]
        kernels = [float(one["kernel_start_ts"]) for one in times.get("kernel_events", ())]
        began = float(times[f"{kind}_start_ts"]) if f"{kind}_start_ts" in times else min(kernels)
        if not 0 < began < math.inf:
            raise ValueError
    took = float(told[f"{kind}_exec_time_us"])
    if not 0 <= took < math.inf:
        raise ValueError
    name = str(told[kind]) + (f" {int(told['p2p_peer'])}" if "p2p_peer" in told else "")
    sequence = int(told[f"{kind}_sn"]) if kind == "coll" else -1  # both ends of a send count for themselves
    return Operation(began / 1e6, name, group, str(int(told[f"{kind}_msg_size_bytes"])), sequence, took / 1e6)


def _rank(groups: dict[str, tuple[int, int]], process: tuple[str, str]) -> str:
    """That in the largest communicator, which as a rule is the whole job's; the process, if it is alone in all."""
    ranks, rank = max(groups.values(), key=lambda one: one[0])
    return str(rank) if ranks > 1 else f"{process[0]}/{process[1]}"
