"""Tests of the bounds of every number in the settings. A value out of range is one sentence with file and setting."""

from __future__ import annotations

import math
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings.config import CheckConfig, ConfigError, Settings
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import built_in_checks
from healthd.common.codec import Rule, fields_of, load

FILE = "/etc/healthd/healthd.toml"
CHECKS = built_in_checks()
COMMON = frozenset(field.name for field in fields_of(CheckConfig))


class Number(NamedTuple):
    """A numeric setting.

    `where` has its tables and its name, `cls` declares it, and `container` is dict or tuple if it has several values.
    """

    where: tuple[str, ...]
    cls: type
    kind: type
    rules: tuple[Rule, ...]
    container: Any = None

    @property
    def name(self) -> str:
        return self.where[-1]

    def wrapped(self, value: float) -> Any:
        if self.container is dict:
            return {"mlx5_0/1" if self.where[1] == "ib_link" else "eth0": value}
        return [value] if self.container is tuple else value

    def settings(self, value: float) -> dict[str, Any]:
        table = self.wrapped(value)
        for table_name in reversed(self.where):
            table = {table_name: table}
        return typing.cast("dict[str, Any]", table)


def iter_numbers(cls: type, path: tuple[str, ...], excluded: frozenset[str] = frozenset()) -> Iterator[Number]:
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        if isinstance(hint, type) and typing.get_origin(hint) is None and fields_of(hint):
            yield from iter_numbers(typing.cast(type, hint), (*path, name))
        elif name not in excluded:
            container = typing.get_origin(hint) if typing.get_origin(hint) in (dict, tuple) else None
            kind, rules = number_in(hint)
            if kind in (int, float):
                yield Number((*path, name), cls, kind, rules, container)


def number_in(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    """Return the type and the rules of Annotated[int, Rule], also inside a dict, a tuple, or with None."""
    if typing.get_origin(hint) is typing.Annotated:
        kind, *notes = typing.get_args(hint)
        return kind, tuple(note for note in notes if isinstance(note, Rule))
    inner = [arg for arg in typing.get_args(hint) if arg not in (type(None), str, ...)]
    return number_in(inner[0]) if inner else (hint, ())


NUMBERS = [
    *iter_numbers(Settings, ()),
    *iter_numbers(CheckConfig, ("checks", "gpu_ecc")),
    *(number for name, check in CHECKS.items() for number in iter_numbers(check.config, ("checks", name), COMMON)),
]
EACH = pytest.mark.parametrize("number", NUMBERS, ids=lambda number: ".".join(number.where))


def refusal(number: Number, value: float) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve_settings(number.settings(value), FILE, {}, CHECKS)
    return str(raised.value)


def test_all_numbers_in_settings_are_found():
    names = {".".join(number.where) for number in NUMBERS}
    assert {"interval_seconds", "slurm.max_restarts", "fleet.limit_percent", "checks.gpu_count.expected"} <= names
    assert {"checks.ib_link.expected_gbps", "checks.gpu_pcie.lane_replays_per_minute"} <= names
    assert len(names) == len(NUMBERS) > 90


@EACH
def test_every_number_has_minimum_and_maximum(number: Number):
    assert [(rule.minimum is None, rule.maximum is None) for rule in number.rules] == [(False, False)]


@EACH
def test_minimum_and_maximum_are_accepted(number: Number):
    (rule,) = number.rules
    for bound in (rule.minimum, rule.maximum):
        assert bound is not None
        assert load(number.cls, {number.name: number.wrapped(number.kind(bound))}) is not None


@EACH
def test_number_beyond_range_is_single_sentence(number: Number):
    (rule,) = number.rules
    assert rule.minimum is not None
    assert rule.maximum is not None
    below: float = int(rule.minimum) - 1 if number.kind is int else math.nextafter(rule.minimum, -math.inf)
    above: float = int(rule.maximum) + 1 if number.kind is int else math.nextafter(rule.maximum, math.inf)
    for value in (below, above, number.kind(-(10**15)), number.kind(10**17)):
        sentence = refusal(number, value)
        assert sentence.startswith(f"{FILE}: ")
        assert number.name in sentence
        assert " must be " in sentence
        assert "\n" not in sentence


@EACH
def test_invalid_number_is_single_sentence(number: Number):
    values: list[Any] = [10**30, -(10**30), 10**5000, math.nan, math.inf, -math.inf, True, "60", [[]]]
    for value in values:
        sentence = refusal(number, value)
        assert sentence.startswith(f"{FILE}: ")
        assert number.name in sentence
        assert len(sentence) < 250


@given(st.sampled_from(NUMBERS), st.integers() | st.floats() | st.integers(-10, 10**7))
def test_any_number_is_accepted_or_refused_in_single_sentence(number: Number, value: float):
    (rule,) = number.rules
    try:
        resolve_settings(number.settings(value), FILE, {}, CHECKS)
        sentence = ""
    except ConfigError as error:
        sentence = str(error)
    if sentence:
        assert sentence.startswith(f"{FILE}: ")
        assert "\n" not in sentence
    else:
        assert rule.problem(value) == ""


def test_range_error_shows_plausible_range():
    with pytest.raises(ConfigError) as raised:
        resolve_settings({"checks": {"gpu_count": {"expected": 100_000}}}, FILE, {}, CHECKS)
    assert str(raised.value) == f"{FILE}: checks.gpu_count.expected: must be 0 to 255 GPUs, got 100000"
    with pytest.raises(ConfigError) as raised:
        resolve_settings({"interval_seconds": 0.001}, FILE, {}, CHECKS)
    assert str(raised.value) == f"{FILE}: interval_seconds: must be 0.1 to 604800 seconds (a week), got 0.001"
