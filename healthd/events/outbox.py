"""Event lines that are not yet confirmed to be on disk. All functions are pure.

The outbox is a field in the ledger. Each rendered line stays in the outbox until its write is acknowledged, so no lines
are lost after a kill -9. The outbox is bounded. Lines that do not fit are counted, and a `dropped` event reports the
count as soon as there is room again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from msgspec.structs import replace

from healthd.common.values import Value, Whole
from healthd.events.schema import Event, Source, render

MAX_LINES = 2000
MAX_BYTES = 512 << 10  # including newlines


class Outbox(Value, frozen=True):
    """Pending lines.

    next_seq   number for the next line in this stream; a line that does not fit also takes a number
    lines      lines that are not yet acknowledged, oldest first, without newlines
    dropped    number of lines that did not fit and are not reported yet, including lines from earlier streams
    dropped_from, dropped_to
               first and last number of such lines in this stream (the last assigned numbers, without a gap), or 0
    """

    stream_id: str = ""
    next_seq: Whole = 1
    lines: tuple[str, ...] = ()
    dropped: Whole = 0
    dropped_from: Whole = 0
    dropped_to: Whole = 0


def new_stream(previous: Outbox, stream_id: str) -> Outbox:
    """Begin a new stream.

    The previous stream's pending lines are still written, but only the number of its dropped lines is kept.
    """
    return Outbox(stream_id, lines=previous.lines, dropped=previous.dropped)


def put(outbox: Outbox, events: Iterable[Event], source: Source, time: float, mono: float) -> Outbox:
    """Return the outbox with these events appended. `source.stream_id` is the outbox's own."""
    lines, seq = list(outbox.lines), outbox.next_seq
    size = _bytes(lines)
    dropped, first, last = outbox.dropped, outbox.dropped_from, outbox.dropped_to

    def append(event: Event) -> bool:
        nonlocal seq, size
        line = render(source, seq, time, mono, event)
        if len(lines) >= MAX_LINES or size + len(line) + 1 > MAX_BYTES:
            return False
        lines.append(line)
        seq, size = seq + 1, size + len(line) + 1
        return True

    def append_dropped() -> bool:
        """Append the event about dropped lines if there are any. Return False if the event does not fit."""
        nonlocal dropped, first, last
        if dropped and not append(_dropped(dropped, first, last)):
            return False
        dropped = first = last = 0
        return True

    append_dropped()
    for event in events:
        if not append_dropped() or not append(event):
            dropped, first, last, seq = dropped + 1, first or seq, seq, seq + 1
    return replace(
        outbox,
        next_seq=seq,
        lines=tuple(lines),
        dropped=dropped,
        dropped_from=first,
        dropped_to=last,
    )


def acknowledge(outbox: Outbox, lines: Iterable[str]) -> Outbox:
    """Return the outbox without these lines, which are now on disk."""
    acknowledged = set(lines)
    return replace(outbox, lines=tuple(line for line in outbox.lines if line not in acknowledged))


def truncate(outbox: Outbox, durable: Iterable[str]) -> Outbox:
    """Return the outbox up to the last of these lines.

    All later lines are dropped, including reports about dropped lines.
    """
    durable_lines = set(durable)
    keep_count = next((at for at in range(len(outbox.lines), 0, -1) if outbox.lines[at - 1] in durable_lines), 0)
    removed = [json.loads(line) for line in outbox.lines[keep_count:]]
    if not removed:
        return outbox
    dropped_events = [line for line in removed if line["event"] == "dropped"]
    first = next(  # lines from earlier streams come before all lines from this stream
        (line.get("from_seq") or line["seq"] for line in removed if line["stream_id"] == outbox.stream_id),
        outbox.dropped_from,
    )
    return replace(
        outbox,
        lines=outbox.lines[:keep_count],
        dropped=outbox.dropped + len(removed) + sum(line["count"] + line.get("earlier", 0) for line in dropped_events),
        dropped_from=first,
        dropped_to=outbox.next_seq - 1 if first else 0,
    )


def _dropped(count: int, first: int, last: int) -> Event:
    """Return the `dropped` event.

    `count` includes earlier streams, whose line numbers are meaningless in this stream.
    """
    own_count = last - first + 1 if first else 0
    earlier = {"earlier": count - own_count} if count > own_count else {}
    return Event("dropped", {"count": own_count, "from_seq": first, "to_seq": last, **earlier})


def _bytes(lines: Iterable[str]) -> int:
    return sum(len(line) + 1 for line in lines)  # a line is ASCII
