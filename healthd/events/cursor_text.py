"""The text that records how far a stream was read, so that a later process continues there."""

from __future__ import annotations

import json

from healthd.events.parse import Key
from healthd.events.reader import Cursor, Mark
from healthd.events.sequence import ReadSequences, Runs

# maximum number of files to remember for each stream; a node has four, and logrotate on the central machine keeps 24
MAX_MARKS = 64
MAX_STREAMS = 64  # maximum number of streams to remember for each node; a node begins a new stream at each boot


def dump_cursor(cursor: Cursor) -> str:
    """Return the text for a cursor."""
    marks = [[name, mark.position, mark.number, mark.before.hex()] for name, mark in cursor.marks.items()]
    keys = list(cursor.sequences.runs)[-MAX_STREAMS:]
    sequences = [[*key, list(cursor.sequences.runs[key]), list(cursor.sequences.dropped.get(key, ()))] for key in keys]
    return json.dumps([marks[-MAX_MARKS:], sequences], separators=(",", ":"))


def load_cursor(text: str | None, key: bytes = b"") -> Cursor:
    """Return the cursor for a text that `dump_cursor` wrote, or a new cursor. `key` is the key for its marks."""
    cursor = Cursor(ReadSequences(), key=key)
    marks, sequences = json.loads(text) if text else ((), ())
    for name, position, number, before in marks:
        cursor.marks[name] = Mark(position, number, bytes.fromhex(before))
    for cluster, node, stream, runs, dropped_runs in sequences:
        stream_key = Key(cluster, node, stream)
        cursor.sequences.runs[stream_key] = Runs(runs)
        if dropped_runs:
            cursor.sequences.dropped[stream_key] = Runs(dropped_runs)
    return cursor
