"""values: JSON encoding that is strict and equal after a round trip."""

from __future__ import annotations

import contextlib
import copy
import pickle
from typing import Annotated, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import field

from healthd.common.model import ConditionKey, Finding, Severity
from healthd.common.values import DecodeError, Value, Whole, decode, encode, type_hints


class Pair(NamedTuple):
    left: float
    right: str = ""


class Part(Value, frozen=True):
    name: str
    size: Whole = 0
    severity: Severity = Severity.INFO


class Machine(Value, frozen=True):
    seconds: Annotated[float, "a note"] = 0.0
    parts: tuple[Part, ...] = ()
    pairs: dict[str, Pair] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    maybe: float | None = None


# Any text that Python can read from a file or program. Bytes that are not UTF-8 become lone surrogates (os.fsdecode).
TEXT = st.text() | st.binary(max_size=9).map(lambda data: data.decode("utf-8", "surrogateescape"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.builds(Part, TEXT, st.integers(-(2**63), 2**63 - 1), st.sampled_from(Severity))
MACHINES = st.builds(
    Machine,
    FINITE,
    st.lists(PARTS, max_size=3).map(tuple),
    st.dictionaries(TEXT, st.builds(Pair, FINITE, TEXT), max_size=3),
    st.frozensets(TEXT, max_size=3),
    st.none() | FINITE,
)


@given(MACHINES)
def test_decode_returns_what_encode_was_given(machine: Machine) -> None:
    assert decode(Machine, encode(machine)) == machine
    assert decode(Machine, encode(machine).decode()) == machine


def test_encode_omits_defaults() -> None:
    assert encode(Machine()) == b"{}"
    assert encode(Part("a")) == b'{"name":"a"}'


REFUSED = [
    "",
    "{",
    "[]",
    "7",
    "{} {}",
    '{"second":1}',
    '{"seconds":"1"}',
    '{"seconds":true}',
    '{"seconds":null}',
    '{"seconds":NaN}',
    '{"seconds":Infinity}',
    '{"seconds":-Infinity}',
    '{"seconds":1e999}',
    '{"seconds":' + "9" * 400 + "}",
    '{"parts":[{"size":1}]}',
    '{"parts":[{"name":1}]}',
    '{"parts":[{"name":"a","size":' + "9" * 20 + "}]}",
    '{"parts":[{"name":"a","size":1.5}]}',
    '{"parts":[{"name":"a","severity":9}]}',
    '{"flags":["\\ud800"]}',
    '{"flags":["\\udcff","\\ud800"]}',
    '{"flags":["\\udcff"],"seconds":NaN}',
    '{"flags":["\\udcff"],"seconds":1e999}',
    '{"flags":["\\udcff"],"second":1}',
    '{"pairs":{"a":[1,"b",2]}}',
    "[" * 100_000,
    '{"flags":["\\udcff",' + "[" * 100_000,
]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:40])
def test_decode_rejects_invalid_json(text: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(DecodeError):
            decode(Machine, data)


@given(st.text() | st.binary())
def test_decode_raises_decode_error_for_any_other_text(text: str | bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(Machine, text)


def test_encode_rejects_object_without_json() -> None:
    with pytest.raises(TypeError):
        encode(object())


def test_value_has_immutable_fields_equality_hash_and_repr() -> None:
    assert Part("a") == Part(name="a", size=0)
    assert Part("a") != Part("b")
    assert Part("a") != ("a", 0, Severity.INFO)
    assert hash(Part("a")) == hash(Part("a"))
    assert repr(Part("a", 2)) == f"Part(name='a', size=2, severity={Severity.INFO!r})"
    with pytest.raises(AttributeError):
        Part("a").name = "b"  # type: ignore[misc]


def test_value_can_be_copied_and_pickled() -> None:
    found = Finding(Severity.WARNING, "open_files/many", "", "many", events=(1, 2))
    assert pickle.loads(pickle.dumps(found)) == copy.deepcopy(found) == found


def test_type_hints_has_fields_of_bases_with_annotations() -> None:
    class More(Machine, frozen=True):
        key: ConditionKey = ConditionKey("", "")

    hints = type_hints(More)
    assert list(hints) == [*Machine.__struct_fields__, "key"]
    assert hints["seconds"] == Annotated[float, "a note"]
    assert hints["key"] is ConditionKey
