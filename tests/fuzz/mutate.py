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


def inputs(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return one input: a seed with a few changes; rarely an unchanged seed, or only pieces."""
    text = rng.choice(seeds) if rng.random() > 0.02 else b""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 5))):
        text = rng.choice(CHANGES)(rng, text, seeds)[:MAX_BYTES]
    return text


def _random_range(rng: random.Random, text: bytes) -> tuple[int, int]:
    start = rng.randint(0, len(text))
    return start, min(len(text), start + rng.choice((0, 1, 1, 2, 5, 20, 200)))


def _insert_piece(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _random_range(rng, text)
    return text[:start] + rng.choice(PIECES) + text[end:]


def _flip(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, _ = _random_range(rng, text)
    return text[:start] + bytes([rng.randrange(256)]) + text[start + 1 :]


def _cut(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _random_range(rng, text)
    return rng.choice((text[:start], text[start:], text[:start] + text[end:]))


def _repeat(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    start, end = _random_range(rng, text)
    times = rng.choice((2, 3, 20, 200, MAX_BYTES // max(1, end - start)))
    return text[:start] + text[start:end] * times + text[end:]


def _splice(rng: random.Random, text: bytes, seeds: Sequence[bytes]) -> bytes:
    other = rng.choice(seeds)
    return text[: rng.randint(0, len(text))] + other[rng.randint(0, len(other)) :]


def _replace_number(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return text
    number_match = rng.choice(matches)
    return text[: number_match.start()] + rng.choice(PIECES[:20]) + text[number_match.end() :]


def _swap_words(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    words = _WORD.findall(text)
    if len(words) < 2:
        return text
    first, second = rng.randrange(len(words)), rng.randrange(len(words))
    words[first], words[second] = words[second], words[first]
    return b"".join(words)


def _repeat_word(rng: random.Random, text: bytes, _seeds: Sequence[bytes]) -> bytes:
    """Repeat one of the words many times, which is slow for a pattern that tries every length."""
    matches = list(_WORD.finditer(text))
    if not matches:
        return text
    word = rng.choice(matches)
    return text[: word.end()] + word[0] * (MAX_BYTES // (2 * len(word[0]))) + text[word.end() :]


CHANGES: list[Change] = [
    _insert_piece,
    _insert_piece,
    _flip,
    _cut,
    _repeat,
    _splice,
    _replace_number,
    _swap_words,
    _repeat_word,
]
