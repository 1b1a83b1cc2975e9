"""Tests of a condition when the clock is set."""

from __future__ import annotations

import typing
from typing import Any

from life import (
    FEWER,
    GONE,
    LINK,
    PENDING,
    Node,
)
from msgspec.structs import replace

from healthd.agent.conditions.ledger import Ledger, after_clock_step
from healthd.common.codec import fields_of
from healthd.common.model import Condition

# --- a clock step


def shifted(condition: Condition, seconds: float) -> Condition:
    (shifted_condition,) = after_clock_step(Ledger(conditions=(condition,)), seconds).conditions
    return shifted_condition


def test_clock_step_moves_moments_and_no_durations() -> None:
    hints = typing.get_type_hints(Condition)
    numbers: dict[str, Any] = {f.name: 100.0 for f in fields_of(Condition) if hints[f.name] is float}
    condition = replace(Node().run(GONE).only, **numbers)
    shifted_condition = shifted(condition, 50.0)
    durations = {"confirm_seconds", "window_seconds", "quiet_seconds"}
    assert {name: getattr(shifted_condition, name) for name in numbers} == {
        name: 100.0 if name in durations else 150.0 for name in numbers
    }


def test_clock_step_keeps_unset_moments() -> None:
    assert shifted(Node().run(FEWER).only, 50.0).critical_at == 0.0


def test_clock_step_does_not_shorten_confirm_time() -> None:
    node = Node().run(LINK)
    node.now += 3600
    node.conditions = {key: shifted(c, 3600) for key, c in node.conditions.items()}
    assert node.run(LINK, after=30).only.state is PENDING
