"""moments: changing all time fields of a value."""

from __future__ import annotations

from typing import Any

from msgspec import field
from msgspec.structs import replace

from healthd.common.moments import MOMENT, PAST, Moment, PastMoment, change_moments
from healthd.common.values import Value


class Inner(Value, frozen=True):
    at: Moment
    since: PastMoment = 0.0
    seconds: float = 5.0


class Outer(Value, frozen=True):
    one: Inner | None = None
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)
    at: Moment = 0.0
    text: str = ""
    cursor: dict[str, Any] = field(default_factory=dict)


def later(moment: float) -> float:
    return moment + 10.0


INNER = Inner(1.0, 2.0)
MOVED = Inner(11.0, 12.0)
OUTER = Outer(INNER, (INNER, INNER), {"a": INNER}, 3.0, "text", {"position": 4.0, "of": [1, "b"]})


def test_change_moments_changes_each_moment_at_any_depth() -> None:
    expected = replace(OUTER, one=MOVED, several=(MOVED, MOVED), named={"a": MOVED}, at=13.0)
    assert change_moments(OUTER, MOMENT, later, {}) == expected


def test_change_moments_changes_only_fields_with_the_marker() -> None:
    assert change_moments(OUTER, PAST, later, {}).one == Inner(1.0, 12.0)
    assert change_moments(OUTER, PAST, later, {}).at == OUTER.at


def test_change_moments_applies_given_function_to_a_type() -> None:
    found = change_moments(OUTER, MOMENT, later, {Inner: lambda inner: replace(inner, seconds=inner.at)})
    assert found.one == Inner(1.0, 2.0, 1.0)
    assert found.at == 13.0
