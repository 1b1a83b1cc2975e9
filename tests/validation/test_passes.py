"""passes: pairs of sender and receiver in each pass."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.main import main
from healthd.validation.passes import ring, tree


def assert_pairs_are_disjoint(passes, parts):
    for pairs in passes:
        assert pairs
        busy = [part for pair in pairs for part in pair]
        assert len(set(busy)) == len(busy)
        assert all(0 <= part < parts for part in busy)


def edges(passes):
    return sorted(pair for pairs in passes for pair in pairs)


def assert_ring(parts):
    passes = ring(parts)
    assert_pairs_are_disjoint(passes, parts)
    assert edges(passes) == sorted((part, (part + 1) % parts) for part in range(parts))
    assert len(passes) == (3 if parts % 2 else 2)


def assert_tree(parts):
    passes = tree(parts)
    assert_pairs_are_disjoint(passes, parts)
    assert edges(passes) == sorted(((child - 1) // 2, child) for child in range(1, parts))
    assert len(passes) <= 4


@pytest.mark.parametrize("parts", range(2, 257))
def test_each_edge_is_in_one_pass_with_disjoint_pairs(parts):
    assert_ring(parts)
    assert_tree(parts)


@given(st.integers(2, 5000))
def test_number_of_passes_does_not_grow_with_parts(parts):
    assert_ring(parts)
    assert_tree(parts)


def test_ring_has_passes_of_the_paper():
    assert ring(6) == (((0, 1), (2, 3), (4, 5)), ((1, 2), (3, 4), (5, 0)))
    assert ring(5) == (((0, 1), (2, 3)), ((1, 2), (3, 4)), ((4, 0),))
    assert len(tree(7)) == 4


def test_two_parts_send_in_turn():
    assert ring(2) == (((0, 1),), ((1, 0),))
    assert tree(2) == (((0, 1),),)


@pytest.mark.parametrize("parts", [0, 1])
def test_one_part_has_no_passes(parts):
    assert ring(parts) == ()
    assert tree(parts) == ()


def test_validate_plan_prints_text_and_json(capsys):
    assert main(["validate", "--plan", "4"]) == 0
    assert capsys.readouterr().out == "pass 1: 0>1 2>3\npass 2: 1>2 3>0\n"
    assert main(["validate", "--plan", "3", "--shape", "tree", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"parts": 3, "shape": "tree", "passes": [[[0, 1]], [[0, 2]]]}
    assert main(["validate", "--plan", "1"]) == 0
    assert "no partner" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["0", "4097", "-3", "two", "", "٣", "9" * 5000])
def test_validate_plan_rejects_invalid_number(number, capsys):
    assert main(["validate", f"--plan={number}"]) == 64
    assert "--plan must be a number of parts, 1 to 4096" in capsys.readouterr().err
