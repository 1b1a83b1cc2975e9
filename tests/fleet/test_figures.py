"""Tests of figures as data."""

from __future__ import annotations

import pytest

from healthd.fleet.answers.document import join_limited
from healthd.fleet.figures import Accessor, get_value, make_records, points, quantity

ROW = {"node": "n1", "repair": {"mean": 5}, "interval": [0.2, 0.5], "ends": (1, 2)}


@pytest.mark.parametrize(
    ("accessor", "value"),
    [
        ("node", "n1"),
        ("repair.mean", 5),
        ("interval.1", 0.5),
        ("ends.0", 1),
        (lambda row: row["repair"]["mean"] * 2, 10),
    ],
)
def test_get_value_follows_keys_and_indexes(accessor: Accessor, value: object) -> None:
    assert get_value(ROW, accessor) == value


@pytest.mark.parametrize(
    ("accessor", "error"), [("rack", KeyError), ("interval.2", IndexError), ("interval.x", ValueError)]
)
def test_get_value_rejects_missing_key(accessor: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        get_value(ROW, accessor)


def test_make_records_keeps_order_of_fields() -> None:
    found = make_records([ROW, {**ROW, "node": "n2"}], {"low": "interval.0", "node": "node"})
    assert [list(record.items()) for record in found] == [[("low", 0.2), ("node", name)] for name in ("n1", "n2")]
    assert make_records([], {"node": "node"}) == []


def test_points_are_filled_and_sized() -> None:
    layer = points([{"x": 1}], 60, x=quantity("x"))
    assert layer.spec == {
        "data": {"values": [{"x": 1}]},
        "mark": {"type": "point", "filled": True, "size": 60},
        "encoding": {"x": {"field": "x", "type": "quantitative"}},
    }


@pytest.mark.parametrize(
    ("names", "limit", "text"), [([], 2, ""), (["a", "b"], 2, "a, b"), (["a", "b", "c"], 1, "a and 2 more")]
)
def test_join_limited_counts_omitted_names(names: list[str], limit: int, text: str) -> None:
    assert join_limited(names, limit) == text
