"""The request is a typed value: a text that is not one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.evidence.case import Cause, Result
from healthd.agent.evidence.request import Request, parse_request, parse_result
from healthd.common.values import DecodeError, encode

REQUEST = Request("20261129T060000Z-gpu_xid-79", "full", "/state", 2, causes=(Cause("gpu_xid/79", "a-1"),))


def test_parse_request_returns_the_written_request() -> None:
    assert parse_request(encode(REQUEST).decode()) == REQUEST


@pytest.mark.parametrize(
    "changes", [{"id": "../../etc/x"}, {"id": ""}, {"part": "all"}, {"state_dir": "state"}, {"unknown": 1}]
)
def test_parse_request_refuses_other_values(changes: dict[str, object]) -> None:
    import json

    with pytest.raises(DecodeError):
        parse_request(json.dumps({**json.loads(encode(REQUEST)), **changes}))


@given(st.text())
def test_parsers_survive_any_text(text: str) -> None:
    assert parse_result(text) is None
    with pytest.raises(DecodeError):
        parse_request(text)


def test_parse_result_returns_the_written_result() -> None:
    result = Result(REQUEST.id, "full", 2, "/state/x", 7, 1.5, ("a problem",))
    assert parse_result(encode(result).decode()) == result
