"""Earlier validations of this node: the values they measured, and the faults that a new one did not test again. Pure.

STATE_DIR/validations.jsonl has one line for each good value. Slow values are not recorded, or a part that stays slow
would be compared with itself. Only the newest `MOST_EACH` values of each test, part and tool are kept. A new version of
a tool starts a new history.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from healthd.common.text import printable
from healthd.common.values import DecodeError, decode
from healthd.validation.assessment import Key
from healthd.validation.document import Result, Validation

FILE = "validations.jsonl"
MOST_EACH = 10
MOST_LINES = 20_000
MOST_LINE_CHARACTERS = 1000

Past = dict[Key, list[float]]


class _Line(Struct):
    test: str
    part: str
    source: str
    value: Annotated[float, Meta(gt=0, lt=1e300)]


def parse(text: str) -> Past:
    """Return the values of each test, part and tool, oldest first. Invalid lines are skipped."""
    past: Past = {}
    for line in text.splitlines()[-MOST_LINES:]:
        if len(line) <= MOST_LINE_CHARACTERS:
            with suppress(DecodeError):
                found = decode(_Line, line)
                key = (printable(found.test), printable(found.part), printable(found.source))
                past.setdefault(key, []).append(found.value)
    return {key: values[-MOST_EACH:] for key, values in past.items()}


def with_new(past: Mapping[Key, Sequence[float]], results: Iterable[Result]) -> Past:
    """Return the history with the good values of a completed validation added."""
    new = {key: list(values) for key, values in past.items()}
    for one in results:
        if one.verdict == "ok" and one.value is not None and one.value > 0:
            new.setdefault((one.test, one.part, one.source), []).append(one.value)
    return {key: values[-MOST_EACH:] for key, values in new.items()}


def as_text(past: Mapping[Key, Sequence[float]]) -> str:
    lines = [
        json.dumps({"test": test, "part": part, "source": source, "value": value})
        for (test, part, source), values in past.items()
        for value in values
    ]
    return "".join(f"{line}\n" for line in lines[-MOST_LINES:])


# --- faults that were found earlier

BAD = ("failed", "slow")
LOOKED = ("ok", *BAD)


def with_unanswered(new: Validation, before: Validation | None) -> Validation:
    """Return `new` with the bad results of `before` that it did not test again.

    A stopped or partial validation replaces the whole document, and a failed GPU would otherwise appear healthy. The
    results of a part are dropped if the same test completed on other parts and this part no longer exists.
    """
    if before is None:
        return new
    looked = {(one.test, one.part) for one in new.results if one.verdict in LOOKED}
    elsewhere = {test for test, _ in looked} if not new.stopped_by else set()
    told = {(one.test, one.part) for one in new.results}
    kept = tuple(
        one
        for one in before.results
        if one.verdict in BAD and (one.test, one.part) not in looked and not _is_gone(one, told, elsewhere)
    )
    if not kept:
        return new
    again = {(one.test, one.part) for one in kept}
    results = tuple(one for one in new.results if (one.test, one.part) not in again)
    words = tuple(f"{one.test} {one.part}: found {one.verdict} before, and not looked at again" for one in kept)
    return replace(new, results=(*results, *kept), not_seen=tuple(dict.fromkeys((*new.not_seen, *words))))


def _is_gone(one: Result, told: Collection[tuple[str, str]], elsewhere: Collection[str]) -> bool:
    return one.test in elsewhere and (one.test, one.part) not in told and bool(one.part)
