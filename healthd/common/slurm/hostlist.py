"""Slurm's host lists: "rack[1-2]n[01-04,7],login1" names ten nodes in two racks and one other node.

Rule: src/common/hostlist.c of https://github.com/SchedMD/slurm. Commas and blanks separate the parts. Brackets contain
numbers and ranges, and one name may have several brackets. A number is padded with zeros to the width of the range's
first number.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from healthd.common.errors import HealthdError
from healthd.common.text import is_decimal, redacted, regex

MAX_NODES = 65_536  # the limit for a Slurm cluster: MAX_SLURM_NODES, 64K
MAX_DIGITS = 18
MAX_NAME = 1_024  # maximum length of one name

_PART = regex(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BETWEEN = regex(r"[\s,]*")
_PIECE = regex(r"\[([^\[\]]*)\]|([^\[\]]+)")
_LAST_NUMBER = regex(r"([^\s,\[\]]*?)([0-9]{1,18})([^\s,\[\]0-9]*)")
_UNPRINTABLE = regex(r"[\x00-\x08\x0b-\x1f\x7f]")  # all except separators


class HostListError(HealthdError, ValueError):
    """Raised if a text is not a host list."""


def expand(text: str, limit: int = MAX_NODES) -> tuple[str, ...]:
    """Return the names without duplicates, in the order of their first occurrence. "" names none.

    Raises HostListError. For more than `limit` names, this happens before any name is created.
    """
    return tuple(dict.fromkeys(expand_all(text, limit)))


def expand_all(text: str, limit: int = MAX_NODES) -> list[str]:
    """Return the names in order, including duplicates. Raises HostListError like `expand`."""
    if "[" not in text and "]" not in text and not _UNPRINTABLE.search(text):
        names = text.replace(",", " ").split()
        if len(names) > limit:
            raise HostListError(f"more than {limit} names in one list")
        return names
    found: list[str] = []
    remaining = limit
    for part in _parts(text):
        pieces = [_piece(match[1], match[2]) for match in _PIECE.finditer(part)]
        count = 1
        for piece in pieces:
            count *= sum(len(numbers) for numbers, _ in piece)
            if count > remaining:
                raise HostListError(f"more than {limit} names in one list")
        remaining -= count
        places = ([_pad(number, width) for numbers, width in piece for number in numbers] for piece in pieces)
        found += map("".join, itertools.product(*places))
    return found


def contains(text: str, name: str) -> bool:
    """Return True if the list names this host. The list is not expanded. Raises HostListError."""
    return any(_part_names(part, name) for part in _parts(text))


def _part_names(part: str, name: str) -> bool:
    """Return True if this part of a host list names `name`.

    The name is matched piece by piece. `ends` contains the offsets where the pieces so far may end.
    """
    ends = {0}
    for match in _PIECE.finditer(part):
        piece = _piece(match[1], match[2])
        ends = {end for begin in ends for numbers, width in piece for end in _ends(name, begin, numbers, width)}
    return len(name) in ends


def _ends(name: str, begin: int, numbers: range | tuple[str], width: int) -> Iterator[int]:
    if isinstance(numbers, tuple):
        if name.startswith(numbers[0], begin):
            yield begin + len(numbers[0])
        return
    for end in range(begin + 1, min(begin + MAX_DIGITS, len(name)) + 1):
        digits = name[begin:end]
        if not is_decimal(digits):
            return
        if int(digits) in numbers and digits == _pad(int(digits), width):
            yield end


def _parts(text: str) -> list[str]:
    if _UNPRINTABLE.search(text):
        raise HostListError("the host list has control characters")
    parts, offset = [], _BETWEEN.match(text).end()  # type: ignore[union-attr]  # it also matches the empty text
    while offset < len(text):
        part = _PART.match(text, offset)
        if part is None:
            raise HostListError(f"unclosed brackets in {redacted(text)}")
        if len(part[0].partition("[")[0]) > MAX_NAME:
            raise HostListError(f"a name of more than {MAX_NAME} characters")
        between = _BETWEEN.match(text, part.end())
        assert between is not None
        if part.end() < len(text) and between.end() == part.end():
            raise HostListError(f"unclosed brackets in {redacted(text)}")
        parts.append(part[0])
        offset = between.end()
    return parts


def _piece(ranges: str | None, plain: str | None) -> list[tuple[range | tuple[str], int]]:
    """Return the allowed texts at one position in a name: ranges of numbers with their widths, or one text."""
    if plain is not None:
        return [((plain,), 0)]
    assert ranges is not None
    found: list[tuple[range | tuple[str], int]] = []
    for text in ranges.split(","):
        first, dash, last = text.strip().partition("-")
        if not dash:
            last = first
        if not (is_decimal(first) and is_decimal(last) and len(first) <= MAX_DIGITS and len(last) <= MAX_DIGITS):
            raise HostListError(f"not a number or range of numbers: {redacted(text)}")
        numbers = range(int(first), int(last) + 1)
        if not numbers:
            raise HostListError(f"a range that ends before it begins: {redacted(text)}")
        found.append((numbers, len(first)))
    return found


def _pad(number: int | str, width: int) -> str:
    return f"{number:0{width}d}" if isinstance(number, int) else number


def to_hostlist(names: Iterable[str]) -> str:
    """Return the host list for these names, in the order of their numbers: "gpu[1-3,7],login1".

    Ranges use the last number in a name, with its leading zeros: gpu09 and gpu10 are one range. A name that no host
    list can contain (a blank, a comma, a bracket) is listed unchanged.
    """
    digits: dict[tuple[str, str], set[str]] = {}  # maps (before, after) to the numbers as written
    plain: list[str] = []
    for name in set(names):
        if found := _LAST_NUMBER.fullmatch(name):
            digits.setdefault((found[1], found[3]), set()).add(found[2])
        else:
            plain.append(name)
    parts = []
    for (before, after), numbers in sorted(digits.items()):
        padded = {len(number) for number in numbers if number.startswith("0")}
        numbers_by_width: dict[int, list[int]] = {}
        for number in numbers:
            numbers_by_width.setdefault(len(number) if len(number) in padded else 1, []).append(int(number))
        inside = ",".join(
            text for width in sorted(numbers_by_width) for text in _ranges(sorted(numbers_by_width[width]), width)
        )
        parts.append(f"{before}{inside if is_decimal(inside) else f'[{inside}]'}{after}")
    return ",".join([*parts, *sorted(plain)])


def _ranges(numbers: Sequence[int], width: int) -> Iterator[str]:
    """Yield ranges for sorted numbers, such as "01-03" and "07"."""
    first = 0
    for index, number in enumerate(numbers):
        if index + 1 == len(numbers) or numbers[index + 1] != number + 1:
            begin = _pad(numbers[first], width)
            yield begin if first == index else f"{begin}-{_pad(number, width)}"
            first = index + 1
