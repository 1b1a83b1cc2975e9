"""Hostile inputs derived from valid ones: parts of a seed are cut, repeated, spliced or replaced by hostile pieces."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MAX_BYTES = 64 << 10

# Pieces that have broken readers: huge numbers or digits of another script, line and text ends, escapes, partial
# characters, and syntax of shells, JSON, TOML, printf and Prometheus.
HOSTILE = [
    *(b"0", b"-1", b"1e999", b"NaN", b"inf", b"9" * 20, b"9" * 400, b"9" * 5000, b"0x" + b"f" * 40, b"1" + b"0" * 30),
    *("\u0663\u0664", "\u00b2", "\u0967", "\uff11", "\u2028", "\u202e", "\ufeff", "\u00a0", "\u0130"),
    *(b"\x00", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x1b[2J", b"\x1b]0;x\x07", b"\r", b"\n", b"\r\n", b"\t", b"\x7f"),
    *(b"\\x0a", b"\\n", b"\\", b'"', b"'", b"`id`", b"$(id)", b"%s%n", b"{}", b"{", b"[", b"]" * 50, b"[" * 5000),
    *(b"\nNVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus.", b"<2>", b"kernel: ", b": "),
    *(
        b"../" * 20,
        b"/",
        b"=",
        b",",
        b";",
        b"|",
        b"-",
        b"(",
        b")",
        b"null",
        b"true",
        b"N/A",
        b"Unknown",
        b"(null)",
        b"",
    ),
]
PIECES = [piece.encode() if isinstance(piece, str) else piece for piece in HOSTILE]

_NUMBER = re.compile(rb"[0-9]+")
_WORD = re.compile(rb"[A-Za-z_]+|[0-9a-fx]+|[^\w\s]|\s+")

Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def inputs(seeds: Sequence[bytes], number: random.Random) -> bytes:
    """Return one input: a seed with a few changes; rarely an unchanged seed, or only pieces."""
    text = number.choice(seeds) if number.random() > 0.02 else b""
    for _ in range(number.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        text = number.choice(CHANGES)(number, text, seeds)[:MAX_BYTES]
    return text


def _place(number: random.Random, text: bytes) -> tuple[int, int]:
    start = number.randint(0, len(text))
    return start, min(len(text), start + number.choice((0, 1, 1, 2, 5, 20, 200)))


def _put_in(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _place(number, text)
    return text[:start] + number.choice(PIECES) + text[end:]


def _flip(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, _ = _place(number, text)
    return text[:start] + bytes([number.randrange(256)]) + text[start + 1 :]


def _cut(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _place(number, text)
    return number.choice((text[:start], text[start:], text[:start] + text[end:]))


def _repeat(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _place(number, text)
    times = number.choice((2, 3, 20, 200, MAX_BYTES // max(1, end - start)))
    return text[:start] + text[start:end] * times + text[end:]


def _splice(number: random.Random, text: bytes, seeds: Sequence[bytes]) -> bytes:
    other = number.choice(seeds)
    return text[: number.randint(0, len(text))] + other[number.randint(0, len(other)) :]


def _other_number(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    found = list(_NUMBER.finditer(text))
    if not found:
        return text
    one = number.choice(found)
    return text[: one.start()] + number.choice(PIECES[:20]) + text[one.end() :]


def _swap_words(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    words = _WORD.findall(text)
    if len(words) < 2:
        return text
    one, other = number.randrange(len(words)), number.randrange(len(words))
    words[one], words[other] = words[other], words[one]
    return b"".join(words)


def _pump_word(number: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    """Repeat one of the words many times, which is slow for a pattern that tries every length."""
    found = list(_WORD.finditer(text))
    if not found:
        return text
    one = number.choice(found)
    return text[: one.end()] + one[0] * (MAX_BYTES // (2 * len(one[0]))) + text[one.end() :]


CHANGES: list[Change] = [_put_in, _put_in, _flip, _cut, _repeat, _splice, _other_number, _swap_words, _pump_word]
