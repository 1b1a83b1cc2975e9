"""Slurm's host lists: expanding, folding and searching them, and limits for hostile input."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.hostlist import MAX_NODES, HostListError, contains, expand, to_hostlist

PREFIXES = st.text("abcxyz-._", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-0011]", ["n8", "n9", "n10", "n11"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("rack[1-2]n[01-02,7]", ["rack1n01", "rack1n02", "rack1n7", "rack2n01", "rack2n02", "rack2n7"]),
        ("n[1-2], login1\tlogin2", ["n1", "n2", "login1", "login2"]),
        ("n1,n[1-2],n1", ["n1", "n2"]),
        ("a[1][2]", ["a12"]),
        ("[1-2]n", ["1n", "2n"]),
    ],
)
def test_expand_returns_each_node_once_in_order(text: str, names: list[str]) -> None:
    assert list(expand(text)) == names


@pytest.mark.parametrize(
    "text",
    [
        *("n[1-2", "n1-2]", "n[[1-2]]", "n[1-2]]", "n[]", "n[a-b]", "n[1-]", "n[-1]", "n[2-1]", "n[1--2]", "n[1-2-3]"),
        *("n[1,,2]", "n[٣-٤]", "n\x1b[1]", "n[1234567890123456789]", "[", "]", "n[1-2][", "x" * 2000 + "[1]"),
    ],
)
def test_expand_rejects_invalid_list(text: str) -> None:
    with pytest.raises(HostListError):
        expand(text)


def test_expand_accepts_max_nodes_names_and_rejects_one_more() -> None:
    assert len(expand(f"n[1-{MAX_NODES}]")) == MAX_NODES
    for text in (f"n[0-{MAX_NODES}]", "n[0-255]x[0-255],m", "n[1-65536],n[1-65536]", "n1," * MAX_NODES + "n[1-2]"):
        with pytest.raises(HostListError, match="more than 65536 names"):
            expand(text)
    with pytest.raises(HostListError):
        expand(",".join(f"n{i}" for i in range(MAX_NODES + 1)))


@pytest.mark.parametrize("text", ["n[0-999999999999999999]", "a[1-9999]b[1-9999]c[1-9999]", "a" + "[0-9]" * 400])
def test_expand_of_hostile_range_needs_no_memory(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HostListError):
            expand(text)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Generate a list in Slurm's notation, and its names by definition."""
    text, names = [], []
    for _ in range(draw(st.integers(1, 4))):
        pieces, choices = [], []
        for _ in range(draw(st.integers(1, 3))):
            prefix = draw(PREFIXES)
            width = draw(st.integers(1, 5))
            ranges = draw(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 4)), min_size=1, max_size=3))
            written = [
                (f"{low:0{width}d}" if more == 0 else f"{low:0{width}d}-{low + more:0{width}d}") for low, more in ranges
            ]
            pieces.append(f"{prefix}[{','.join(written)}]")
            choices.append(
                [
                    prefix + str(n).rjust(len(f"{low:0{width}d}"), "0")
                    for low, more in ranges
                    for n in range(low, low + more + 1)
                ]
            )
        text.append("".join(pieces))
        names.extend("".join(parts) for parts in itertools.product(*choices))
    return ",".join(text), list(dict.fromkeys(names))


@given(lists())
def test_expand_returns_names_of_generated_list(made: tuple[str, list[str]]) -> None:
    text, names = made
    assert list(expand(text)) == names
    assert list(expand(",".join(names))) == names


@given(st.text("n01[]-, ,\x00é٣", max_size=40))
def test_expand_accepts_or_rejects_any_text(text: str) -> None:
    with contextlib.suppress(HostListError):
        names = expand(text, limit=1000)
        assert len(set(names)) == len(names) <= 1000
        assert not any(c in name for name in names for c in "[], \n")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["gpu7"], "gpu7"),
        (["gpu9", "gpu10", "gpu11", "gpu13"], "gpu[9-11,13]"),
        (["gpu09", "gpu10", "gpu11"], "gpu[09-11]"),
        (["n1-ib", "n2-ib", "login"], "n[1-2]-ib,login"),
        (["n1", "n01"], "n[1,01]"),
        (["a b", "n[1]"], "a b,n[1]"),
    ],
)
def test_to_hostlist_folds_names(names, text):
    assert to_hostlist(names) == text


@given(st.sets(st.from_regex(r"[a-c._-]{1,3}[0-9]{0,4}[a-c]{0,2}", fullmatch=True), max_size=60))
def test_to_hostlist_keeps_all_names(names):
    assert set(expand(to_hostlist(names))) == names


# --- contains


@pytest.mark.parametrize(
    ("name", "hosts", "is_in"),
    [
        ("n1", "n1", True),
        ("n1", "n[1-2]", True),
        ("n3", "n[1-2]", False),
        ("n10", "n[1-2]", False),
        ("n10", "n1,n10", True),
        ("n5", "m[5],n[1-2,5]", True),
        ("n05", "n[01-10]", True),
        ("n5", "n[01-10]", False),
        ("n100", "n[01-100]", True),
        ("n01", "n[1-10]", False),
        ("r1n02", "r[1-2]n[01-03]", True),
        ("r3n02", "r[1-2]n[01-03]", False),
        ("gpu-1-ib", "gpu-[1-4]-ib", True),
        ("n", "n[1-2]", False),
        ("n.1", "n.[1-2]", True),
        ("nx1", "n.[1-2]", False),
        ("n1", "", False),
        ("n1", "(null)", False),
    ],
)
def test_contains_finds_a_host(name: str, hosts: str, is_in: bool) -> None:
    assert contains(hosts, name) is is_in


@given(st.integers(0, 120), st.integers(0, 120), st.integers(1, 4), st.integers(0, 130))
def test_contains_finds_hosts_of_a_range(first: int, length: int, digits: int, number: int) -> None:
    names = {f"n{i:0{digits}d}" for i in range(first, first + length + 1)}
    hosts = f"n[{first:0{digits}d}-{first + length:0{digits}d}]"
    name = f"n{number:0{digits}d}"
    assert contains(hosts, name) == (name in names)


@pytest.mark.parametrize(("text", "name"), [("n[1-2][01-10]", "n110"), ("a[1-99][1-99]b", "a111b"), ("[1-20]", "12")])
def test_contains_finds_adjacent_numbers(text: str, name: str) -> None:
    assert name in expand(text)
    assert contains(text, name)


@given(lists(), st.data())
def test_contains_agrees_with_expand(made: tuple[str, list[str]], data: st.DataObject) -> None:
    text, names = made
    name = data.draw(st.sampled_from(names) | st.from_regex(r"[abcxyz._-]{1,3}[0-9]{0,4}", fullmatch=True))
    assert contains(text, name) == (name in names)


@given(st.text("n01[]-, ,", max_size=40), st.text("n01", max_size=4))
def test_contains_rejects_what_expand_rejects(text: str, name: str) -> None:
    try:
        names = expand(text, limit=100_000)
    except HostListError as error:
        if "more than" not in str(error):
            with pytest.raises(HostListError):
                contains(text, name)
    else:
        assert contains(text, name) == (name in names)


@pytest.mark.parametrize("text", ["[0-999999999999999999]" * 400, "a" + "[0-9]" * 400, "n[" + "0," * 30_000 + "1]"])
def test_contains_is_fast_for_hostile_list(text: str) -> None:
    assert cpu_seconds(lambda: [contains(text, name) for name in ("1" * 255, "n1", "a")], 5) < 5
