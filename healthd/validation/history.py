"""What earlier validations of this node measured: STATE_DIR/validations.jsonl, a line a value that was fine.

A slow value is not kept: else a part that stays slow would become its own measure. The newest `MOST_EACH` of each test,
part and tool are kept; another version of a tool begins anew.
"""

# XXDOC """What an earlier validation found stands until a later one has looked at it again. Pure.
# XXDOC 
# XXDOC One that was stopped, or that measures only some things, replaces the document of the whole: a GPU that had failed would
# XXDOC be well by that.
# XXDOC """
from __future__ import annotations
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from healthd.common.text import printable
from healthd.validation.assessment import Key
from healthd.validation.document import Result
from collections.abc import Collection
from healthd.validation.document import Result, Validation


FILE = "validations.jsonl"
MOST_EACH = 10
MOST_LINES = 20_000
MOST_LINE_CHARACTERS = 1000

Past = dict[Key, list[float]]


def parse(text: str) -> Past:
    """Oldest first. A line that is none is passed over: what it held is measured again."""
    past: Past = {}
    for line in text.splitlines()[-MOST_LINES:]:
        try:
            told = json.loads(line) if len(line) <= MOST_LINE_CHARACTERS else None
        except (ValueError, RecursionError):
            continue
        if not isinstance(told, dict):
            continue
        words = tuple(told.get(key) for key in ("test", "part", "source"))
        value = told.get("value")
        if not all(isinstance(word, str) for word in words) or isinstance(value, bool):
            continue
        if isinstance(value, int | float) and 0 < value < 1e300 and math.isfinite(value):
            test, part, source = (printable(str(word)) for word in words)
            past.setdefault((test, part, source), []).append(float(value))
    return {key: values[-MOST_EACH:] for key, values in past.items()}


def with_new(past: Mapping[Key, Sequence[float]], results: Iterable[Result]) -> Past:
    """The same with what is fine of a validation that went to its end."""
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


BAD = ("failed", "slow")
LOOKED = ("ok", *BAD)


def with_unanswered(new: Validation, before: Validation | None) -> Validation:
    """`new`, with what `before` found bad and nobody looked at again. A part that is no longer there, while the same
    test went to its end on others, is gone with what was found of it."""
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
    return new._replace(results=(*results, *kept), not_seen=tuple(dict.fromkeys((*new.not_seen, *words))))


def _is_gone(one: Result, told: Collection[tuple[str, str]], elsewhere: Collection[str]) -> bool:
    return one.test in elsewhere and (one.test, one.part) not in told and bool(one.part)
