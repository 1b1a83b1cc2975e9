"""safe_pickle: a foreign pickle gives plain data or is rejected with one sentence."""

from __future__ import annotations

import pickle
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.safe_pickle import UnsafePickle, load_plain

LEAVES = st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=30,
)


class Made:
    """An object with a state in its pickle."""

    def __init__(self) -> None:
        self.value = 1


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_load_plain_returns_plain_data(value, protocol):
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("value", [Made(), Made, print, {"entries": [Made()]}, {1, 2}, b"bytes", complex(1, 2)])
def test_load_plain_rejects_other_objects(value, protocol):
    with pytest.raises(UnsafePickle):
        load_plain(pickle.dumps(value, protocol))


@given(st.binary(max_size=200))
def test_load_plain_of_any_bytes_gives_data_or_error(data):
    with suppress(UnsafePickle):
        load_plain(b"\x80\x02" + data)


@pytest.mark.parametrize("opcodes", [b"]", b"}", b"\x85", b"(l", b"(t", b"NN\x86", b"N\x94"])
def test_load_plain_rejects_pickle_of_too_many_containers_before_loading(opcodes):
    with pytest.raises(UnsafePickle, match="memory"):
        load_plain(b"\x80\x04(N" + opcodes * 8_000_001 + b"t.")


def test_load_plain_does_not_count_letters_as_containers():
    assert load_plain(pickle.dumps(["t" * 9_000_000], 2)) == ["t" * 9_000_000]
