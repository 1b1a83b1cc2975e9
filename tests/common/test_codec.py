"""codec: plain data to and from frozen dataclasses. No coercion, errors name their place, dumped data loads
unchanged."""

from __future__ import annotations

import enum
import json
import math
import re
import typing
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.agent.settings.config import Loaded, Settings
from healthd.api import CheckConfig
from healthd.common.codec import ConvertError, dump, load, show, spelling_hint
from healthd.common.model import CheckResult, Condition, DrainRecord, Entry, Inventory, KernelEvent
from healthd.common.values import type_hints


class Colour(enum.Enum):
    RED = "r"
    DARK_BLUE = 2


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class Everything:
    whole: int
    number: float = 1.5
    text: str = ""
    truth: bool = False
    colour: Colour = Colour.RED
    maybe: float | None = None
    point: Point | None = None
    many: tuple[Point, ...] = ()
    pair: tuple[str, int] = ("", 0)
    names: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)
    nested: dict[str, tuple[float, ...]] = field(default_factory=dict)


def refusal(data: object, cls: type = Everything, where: str = "here") -> str:
    with pytest.raises(ConvertError) as raised:
        load(cls, data, where)
    return str(raised.value)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "here: missing whole"),
        (3, "here: must be a table, got 3"),
        ({"whole": "3"}, 'here.whole: must be a whole number, got "3"; write a number without quotes'),
        ({"whole": 3.0}, "here.whole: must be a whole number, got 3.0"),
        ({"whole": True}, "here.whole: must be a whole number, got true"),
        ({"whole": None}, "here.whole: must be a whole number, got None"),
        ({"whole": 1, "number": True}, "here.number: must be a number, got true"),
        ({"whole": 1, "number": float("inf")}, "here.number: must be a finite number, got inf"),
        ({"whole": 1, "text": 3}, "here.text: must be text, got 3"),
        ({"whole": 1, "truth": 1}, "here.truth: must be true or false, got 1"),
        ({"whole": 1, "truth": "yes"}, 'here.truth: must be true or false, got "yes"'),
        ({"whole": 1, "colour": "r"}, 'here.colour: "r" is not one of red, dark_blue'),
        (
            {"whole": 1, "colour": "dark_blu"},
            'here.colour: "dark_blu" is not one of red, dark_blue; did you mean "dark_blue"?',
        ),
        ({"whole": 1, "colour": ["red"]}, "here.colour: a list is not one of red, dark_blue"),
        ({"whole": 1, "many": {"x": 1}}, "here.many: must be a list, got a table"),
        (
            {"whole": 1, "many": [{"x": 1}, {"x": "1"}]},
            'here.many[1].x: must be a whole number, got "1"; write a number without quotes',
        ),
        ({"whole": 1, "pair": ["a"]}, "here.pair: must have 2 items, but has 1"),
        ({"whole": 1, "counts": {"a": 1, "b": 1.5}}, "here.counts.b: must be a whole number, got 1.5"),
        ({"whole": 1, "texts": ""}, 'here: unknown setting "texts"; did you mean "text"?'),
        ({"whole": 1, "point": {"z": 1}}, 'here.point: unknown setting "z"; valid names: x, y'),
    ],
)
def test_load_rejects_invalid_data_with_its_place(data, sentence):
    assert refusal(data) == sentence


def test_load_names_the_top_level():
    assert refusal({}, where="") == "top level: missing whole"
    assert refusal({"whole": "x"}, where="").startswith("whole: ")


@dataclass(frozen=True, slots=True)
class Timed:
    interval_seconds: float = 1.0


def test_load_explains_how_to_write_a_time():
    sentence = 'here.interval_seconds: must be a number, got "5m"; write a plain number of seconds, like 300'
    assert refusal({"interval_seconds": "5m"}, Timed) == sentence


def test_load_accepts_whole_number_as_number():
    assert load(Timed, {"interval_seconds": 300}) == Timed(300.0)
    assert type(load(Timed, {"interval_seconds": 300}).interval_seconds) is float


@pytest.mark.parametrize("number", [10**400, -(10**400), 16**6000], ids=["big", "small", "huge"])
def test_load_rejects_number_beyond_float(number):
    assert "here.interval_seconds: " in refusal({"interval_seconds": number}, Timed)


def test_show_shortens_long_value():
    assert len(refusal({"whole": "x" * 10000})) < 200
    assert len(show("x" * 10000)) < 100


def test_spelling_hint_has_nearest_word_or_the_list():
    assert spelling_hint("fstyp", ["fstype", "read_only"]) == '; did you mean "fstype"?'
    assert spelling_hint("zzz", ["b", "a"]) == "; valid names: a, b"
    assert spelling_hint("zzz", []) == ""


def test_spelling_hint_omits_long_list():
    assert spelling_hint("zzz", map(str, range(1000))) == ""


def test_dump_omits_defaults():
    assert dump(Everything(1)) == {"whole": 1}
    assert dump(Everything(1, number=2.0, colour=Colour.DARK_BLUE)) == {
        "whole": 1,
        "number": 2.0,
        "colour": "dark_blue",
    }


def test_dump_writes_required_fields():
    assert dump(Point(0)) == {"x": 0}


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
# Only values that JSON can represent and the settings accept: finite numbers.
CLASSES = [Everything, CheckResult, Condition, Inventory, KernelEvent, DrainRecord]
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_dump_and_load_round_trip_through_json(cls, data):
    value = data.draw(st.from_type(cls))
    assert load(cls, json.loads(json.dumps(dump(value)))) == value


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@given(data=ANY)
def test_load_of_any_data_gives_a_value_or_error(cls, data):
    try:
        value = load(cls, data, "here")
    except ConvertError as error:
        sentence = str(error)
    else:
        sentence = "here"
        assert load(cls, dump(value), "here") == value
    assert sentence.startswith("here")


@given(st.from_type(Everything), st.sampled_from(["whole", "number", "text", "truth", "many", "counts"]), ANY)
def test_load_rejects_wrong_field_at_its_place(value, name, replacement):
    data = {**dump(value), name: replacement}
    try:
        loaded = load(Everything, data, "here")
    except ConvertError as error:
        sentence = str(error)
    else:
        sentence = f"here.{name}"
        assert dump(loaded).get(name, replacement) == replacement
    assert sentence.startswith(f"here.{name}")


@pytest.mark.parametrize("number", [2**64, -(2**64), 10**400])
def test_load_rejects_number_above_64_bits(number):
    """Otherwise a calculation raises OverflowError elsewhere."""
    with pytest.raises(ConvertError, match=r"here\.whole: must be a number of at most 64 bits, got "):
        load(Everything, {"whole": number}, "here")


@pytest.mark.parametrize("number", [2**64 - 1, 1 - 2**64])
def test_load_accepts_largest_64_bit_numbers(number):
    assert load(KernelEvent, {"kind": "xid", "pid": number}).pid == number


def test_dump_keeps_1_if_default_is_true() -> None:
    """They are equal in Python, but "expected = 1" of a node with one GPU must not become "expected = true"."""
    for value in (1, 1.0, True):
        loaded = load(Entry, json.loads(json.dumps(dump(Entry("gpu_count", "expected", value)))))
        assert (loaded.value, type(loaded.value)) == (value, type(value))


def test_type_hints_equals_typing_get_type_hints():
    """values.py evaluates what healthd's classes have in common only once."""
    classes = [
        Settings,
        Loaded,
        CheckResult,
        Condition,
        *(check.config for check in registry.built_in_checks().values()),
    ]
    for cls in classes:
        by_typing = typing.get_type_hints(cls, include_extras=True)
        assert list(type_hints(cls)) == list(by_typing)
        assert normalised_repr(type_hints(cls)) == normalised_repr(by_typing)


def normalised_repr(kinds):
    """Return the representation without memory addresses, because each rule is a separate object."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(kinds))


def test_load_reads_classes_of_sites():
    @dataclass(frozen=True, slots=True)
    class Config(CheckConfig):
        share: "float | None" = None  # noqa: UP037
        counts: "dict[str, int]" = field(default_factory=dict)  # noqa: UP037

    assert load(Config, {"share": 0.5, "counts": {"a": 1}, "enforce": False}).counts == {"a": 1}
    with pytest.raises(ConvertError, match="share: must be a number"):
        load(Config, {"share": "a"})


@dataclass(frozen=True, slots=True)
class Lists:
    items: tuple[float, ...] = ()
    subs: tuple[Point, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    names: frozenset[str] = frozenset()
    severity: dict[str, Colour] = field(default_factory=dict)
    patterns: dict[str, Point] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("data", "places"),
    [
        ({"items": [1.0, float("inf"), "x", float("nan")]}, ["items[1]", "items[2]", "items[3]"]),
        ({"subs": [{"x": float("inf")}, {"z": 1}]}, ["subs[1]", "subs[0].x", "subs[1]"]),
        ({"pair": ["a", float("nan")]}, ["pair[0]", "pair[1]"]),
        ({"names": ["a", 1, 2]}, ["names[1]", "names[2]"]),
        ({"severity": {"a": "rad", "b": "dark"}}, ["severity.a", "severity.b"]),
        ({"patterns": {"A": {"x": "1"}, "B": {}, "C": {"y": 1.5}}}, ["A.x", "B", "C.y", "C"]),
        ({"items": ["x"], "pair": [1], "nmes": []}, ["here", "items[0]", "pair"]),
    ],
)
def test_load_reports_every_mistake_of_lists_and_tables(data, places):
    with pytest.raises(ConvertError) as raised:
        load(Lists, data, "here")
    found = [mistake.partition(": ")[0] for mistake in raised.value.mistakes]
    assert [path.removeprefix("here.").removeprefix("patterns.") for path in found] == places


def test_load_reports_missing_field_with_other_mistakes_and_wrong_field_once():
    with pytest.raises(ConvertError) as raised:
        load(Point, {"y": "1"}, "here")
    assert [mistake.partition(": ")[2].split()[0] for mistake in raised.value.mistakes] == ["must", "missing"]
    with pytest.raises(ConvertError) as raised:
        load(Point, {"x": "1"}, "here")
    assert [mistake.partition(": ")[0] for mistake in raised.value.mistakes] == ["here.x"]


@given(st.lists(st.floats() | st.text(max_size=3), max_size=6))
def test_load_names_exactly_the_wrong_items_of_a_list(items):
    wrong_indexes = [i for i, item in enumerate(items) if isinstance(item, str) or not math.isfinite(item)]
    found: tuple[str, ...] = ()
    try:
        load(Lists, {"items": items}, "here")
    except ConvertError as error:
        found = error.mistakes
    assert [mistake.partition(": ")[0] for mistake in found] == [f"here.items[{i}]" for i in wrong_indexes]
