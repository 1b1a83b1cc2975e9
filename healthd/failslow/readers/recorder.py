"""A dump of PyTorch's flight recorder, pickle or JSON, as a stream.

The format: pytorch/pytorch, torch/csrc/distributed/c10d/FlightRecorder.hpp, versions 2.0 to 2.10: `entries`, one a
collective or send of any group, `time_created_ns` when it was called; `duration_ms` only with TORCH_NCCL_ENABLE_TIMING;
`pg_config` the groups of this rank. As a rule a dump does not say whose it is: its file's name does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from healthd.common.safe_pickle import NotPlain, plain
from healthd.failslow.stream import Operation, Stream, StreamError

_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*[\[{]")


def read(data: bytes, source: str, rank: str) -> Stream:
    """rank: as the file's name has it. Raises StreamError."""
    try:
        dump = json.loads(data) if _JSON.match(data[:4096]) else plain(data)
    except NotPlain as error:
        raise StreamError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno:,}: " if isinstance(error, json.JSONDecodeError) else ""
        raise StreamError(f"{source}: {line}is damaged JSON") from None
    entries = dump.get("entries") if isinstance(dump, Mapping) else dump
    if not isinstance(entries, list) or not entries:
        raise StreamError(f"{source}: has no entries of a flight recorder")
    operations = []
    for number, entry in enumerate(entries, 1):
        try:
            operations.append(_operation(entry))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            raise StreamError(f"{source}: entry {number:,} is not a flight recorder's") from None
    own = dump.get("rank") if isinstance(dump, Mapping) else None
    groups = _groups(dump.get("pg_config")) if isinstance(dump, Mapping) else {}
    return Stream(str(own) if type(own) is int else rank, tuple(operations), source, "", groups, dumped=True)


def _operation(entry: Any) -> Operation:
    group = entry["process_group"]
    name = str(entry["profiling_name"]).rpartition(":")[2]
    took = entry.get("duration_ms")
    seconds = int(entry["time_created_ns"]) / 1e9
    alone = entry.get("is_p2p", name.startswith(("send ", "recv ")))
    sequence = -1 if alone else int(entry.get("collective_seq_id", entry.get("seq_id", -1)))
    size = f"{entry.get('input_sizes', '')} {entry.get('input_dtypes', '')}"
    return Operation(
        seconds, name, str(group[0]), size, sequence, math.nan if took is None else max(0.0, float(took)) / 1e3
    )


def _groups(config: Any) -> dict[str, int]:
    """Of how many ranks each is; none where that is not told as expected."""
    found = {}
    for told in config.values() if isinstance(config, Mapping) else ():
        if isinstance(told, Mapping) and isinstance(told.get("ranks"), str):
            found[str(told.get("name"))] = told["ranks"].count(",") + 1
    return found
