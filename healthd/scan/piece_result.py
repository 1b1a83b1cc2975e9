"""What the lines of a piece say, as bytes from one process to another, and whether it is what one reader of the whole
log finds. Pure.

A piece is read with the lines before it at hand, but without what was remembered of them: of times at which a line was
looked at (continuation.py). What it would have asked of these is noted: where the pieces before it know something of
that, it is read again, with it.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from healthd.common.model import KernelEvent
from healthd.scan.continuation import Heads, Neighbours, Stamp, known_heads
from healthd.scan.lines import Tally
from healthd.scan.messages import MESSAGE_BYTES, MESSAGES_BYTES, Known, Message, Told

_event = attrgetter(*KernelEvent.__struct_fields__)


class Heard(NamedTuple):
    """What a piece says.

    asked     of which times it would have known more with other `heads`
    heads     what it knows for the piece behind it
    trouble   why it was not read to its end; "" if it was
    """

    told: Sequence[Told]
    tally: Tally
    asked: set[Stamp]
    heads: Heads
    trouble: str


def encoded(told: Iterable[Told], tally: Tally, near: Neighbours, trouble: str) -> bytes:
    """Heard, as bytes. `near`: it was told with these."""
    places: dict[Message, int] = {}
    rows = [(*row[:5], places.setdefault(row[5], len(places))) for row in told]
    messages = [(_event(one.event), one.fault, one.part, one.judged, one.slots, one.device, one.name) for one in places]
    counted = (tally.lines, tally.kernel, tally.binary, tally.drivers, tally.texts)
    return marshal.dumps((messages, rows, counted, near.asked or set(), near.heads(tally.lines), trouble))


def decoded(data: bytes, known: Known, before: int) -> Heard:
    """`known`: messages that came before, by what they are made of; `before`: how many lines stand before the piece."""
    messages, rows, tally, asked, heads, trouble = marshal.loads(data)
    found = [_message(one, known) for one in messages]
    return Heard(
        [
            (before + number, uptime, epoch, host, lines, found[place])
            for number, uptime, epoch, host, lines, place in rows
        ],
        Tally(*tally),
        asked,
        heads,
        trouble,
    )


def _message(parts: tuple[Any, ...], known: Known) -> Message:
    try:
        message: Message = known[parts]
    except KeyError:
        event, *rest = parts
        message = Message(KernelEvent(*event), *rest)
        known.keep(parts, message, len(message.event.text) + MESSAGE_BYTES)
    return message


def known_messages() -> Known:
    return Known(MESSAGES_BYTES)


def heads_behind(heads: Heads, heard: Heard) -> Heads:
    """What is known behind a piece that stands behind `heads`."""
    return {**known_heads(heads, heard.tally.lines), **heard.heads}
