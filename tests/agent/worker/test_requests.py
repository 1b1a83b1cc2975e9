"""Tests of the messages between the daemon and its worker: each is decoded as it was encoded."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.worker.process import Worker
from healthd.agent.worker.requests import ANSWERS, CloseNvml, Message, Operation, Response, WriteFile, operation_name
from healthd.common.values import DecodeError, decode, encode

NUMBERS = st.integers(-(2**63), 2**63)
TEXTS = st.tuples(st.text(), st.text())
FIELDS = {
    "config": st.dictionaries(st.text(), NUMBERS | st.text()),
    "names": TEXTS,
    "lines": TEXTS,
    "paths": TEXTS,
    "keep_old": st.booleans(),
    "may_repeat": st.booleans(),
    "gpus": st.booleans(),
    "history": st.booleans(),
    **dict.fromkeys(("since_usec", "until_usec", "limit"), NUMBERS),
    "accept_injected": st.booleans(),
}
KINDS = typing.get_args(Operation)
operation_values = st.sampled_from(KINDS).flatmap(
    lambda kind: st.builds(kind, **{name: FIELDS.get(name, st.text()) for name in kind.__struct_fields__})
)
# A byte that is not UTF-8 is a lone surrogate in a path or in text from Slurm.
NON_UTF8 = "/data/\udcff"


@given(operation_values, st.integers(0, 2**31), st.none() | st.floats(0, 1e10))
def test_message_decoding_reverses_encoding(request_: Any, number: int, now: float | None) -> None:
    message = Message(number, request_, now)
    assert decode(Message, encode(message)) == message


def test_message_keeps_non_utf8_path_bytes() -> None:
    message = Message(1, WriteFile(NON_UTF8, NON_UTF8))
    assert decode(Message, encode(message)) == message


@pytest.mark.parametrize(
    "table",
    [
        {"op": "save_copy"},
        {"op": "read_journal", "boot_id": 7},
        {"op": "inventory"},
        {"op": "inventory", "gpus": True, "cpus": 1},
        {"op": "no_such_request"},
    ],
)
def test_message_with_missing_or_unknown_fields_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(DecodeError):
        decode(Message, json.dumps({"number": 1, "asked": table}))


@pytest.mark.parametrize("line", [b"", b"{}", b'{"number":"1"}', b'{"number":1,"error":null}', b'{"number":1} x'])
def test_invalid_response_is_refused(line: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(Response, line)


def test_worker_has_operation_for_each_request_and_no_other() -> None:
    operations = {name.removeprefix("do_") for name in vars(Worker) if name.startswith("do_")}
    assert operations == {operation_name(kind) for kind in KINDS}
    assert set(ANSWERS) == set(KINDS)


def test_operation_name_for_request() -> None:
    assert operation_name(CloseNvml) == "close_nvml"
