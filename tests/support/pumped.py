"""Texts that make a regular expression reach each of its repeats and then repeat there, where it could backtrack.

The tree of the pattern is Python's own (re._parser; sre_parse before 3.11).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

if sys.version_info >= (3, 11):
    from re import _parser
else:
    import sre_parse as _parser

CHARACTERS = "1a x-:.,(/_A0f\n\t"  # the first character of each kind that a class admits is repeated
KINDS = (str.isdigit, str.isalpha, str.isspace, lambda character: not character.isalnum() and not character.isspace())
END = "\0"  # a character that no repeat expects next


def repeating_texts(pattern: re.Pattern[str], size: int) -> Iterator[str]:
    """Yield texts of `size` characters: for each repeat, its prefix, its repeated unit, and a character that fails."""
    seen = set()
    for before, units in _repeats(_parser.parse(pattern.pattern, pattern.flags), ""):
        for unit in units:
            if unit and (before, unit) not in seen:
                seen.add((before, unit))
                yield (before + unit * (size // len(unit)))[:size] + END


def repeating_texts_for_search(pattern: re.Pattern[str], size: int) -> Iterator[str]:
    """Yield such texts for a pattern that may match anywhere in a text, with repeated prefixes as well."""
    seen = set()
    for before, units in _repeats(_parser.parse(pattern.pattern, pattern.flags), ""):
        for unit in filter(None, units):
            for first, repeated in ((before, unit), ("", before + unit), ("", before or unit)):
                if (first, repeated) not in seen:
                    seen.add((first, repeated))
                    yield (first + repeated * (size // len(repeated)))[:size] + END


def _repeats(items: Iterable[Any], before: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (prefix, repeatable units) for each repeat in a sequence of a pattern's tree."""
    for item in items:
        name, value = str(item[0]), item[1]
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            yield before, _units(value[2])
            yield from _repeats(value[2], before)
        else:
            for inner in _inner(name, value):
                yield from _repeats(inner, before)
        before += _sample([item])


def _inner(name: str, value: Any) -> list[Any]:
    """Return the sequences inside a node other than a repeat."""
    if name == "SUBPATTERN":
        return [value[3]]
    if name == "BRANCH":
        return list(value[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return [value[1]]
    return [value] if name == "ATOMIC_GROUP" else []


def _units(items: Any) -> list[str]:
    """Return units of a repeat: one character of each kind for a class, else a sample of each branch."""
    if len(items) == 1 and str(items[0][0]) in ("IN", "ANY", "NOT_LITERAL", "LITERAL"):
        admitted = _admitted(items[0])
        return [found for kind in KINDS if (found := next(filter(kind, admitted), ""))] or list(admitted[:1])
    if len(items) == 1 and str(items[0][0]) == "SUBPATTERN":
        return _units(items[0][1][3])
    if len(items) == 1 and str(items[0][0]) == "BRANCH":
        return [_sample(branch) for branch in items[0][1][1]]
    return [_sample(items)]


def _sample(items: Any) -> str:
    """Return a short text that a sequence matches, ignoring its look-aheads."""
    text = ""
    for item in items:
        name, value = str(item[0]), item[1]
        if name in ("LITERAL", "IN", "ANY", "NOT_LITERAL"):
            text += _admitted(item)[:1]
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            text += _sample(value[2]) * value[0]
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            text += _sample(_inner(name, value)[0])
        elif name == "BRANCH":
            text += _sample(value[1][0])
    return text


def _admitted(item: Any) -> str:
    """Return at least one character that the item matches."""
    name, value = str(item[0]), item[1]
    if name == "LITERAL":
        return chr(value)
    if name == "ANY":
        return CHARACTERS
    if name == "NOT_LITERAL":
        return "".join(character for character in CHARACTERS if ord(character) != value)
    negated = str(value[0][0]) == "NEGATE"
    literals = [
        chr(member[1] if str(member[0]) == "LITERAL" else member[1][0])
        for member in value
        if str(member[0]) in ("LITERAL", "RANGE")
    ]
    candidates = CHARACTERS if negated else CHARACTERS + "".join(literals)
    return "".join(
        character for character in candidates if any(_is_in(character, member) for member in value) != negated
    )


def _is_in(character: str, member: Any) -> bool:
    """Return True if the character matches one member of a class."""
    name, value = str(member[0]), member[1]
    if name == "LITERAL":
        return ord(character) == value
    if name == "RANGE":
        return bool(value[0] <= ord(character) <= value[1])
    if name != "CATEGORY":
        return False
    kind = str(value).removeprefix("CATEGORY_")
    ascii_only = {
        "DIGIT": r"\d",
        "SPACE": r"\s",
        "WORD": r"\w",
        "NOT_DIGIT": r"\D",
        "NOT_SPACE": r"\S",
        "NOT_WORD": r"\W",
    }
    return re.fullmatch(ascii_only[kind], character, re.ASCII) is not None
