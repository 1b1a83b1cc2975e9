"""What an earlier validation found stands until a later one has looked at it again. Pure.

One that was stopped, or that measures only some things, replaces the document of the whole: a GPU that had failed would
be well by that.
"""

from __future__ import annotations

from collections.abc import Collection

from healthd.validation.document import Result, Validation

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
