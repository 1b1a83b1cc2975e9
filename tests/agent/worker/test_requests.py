"""What the worker can be asked goes over the stream and comes out as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.worker import requests
from healthd.agent.worker.process import Worker
from healthd.agent.worker.requests import OPS, JournalGap, asked_in, table_of
from healthd.common.codec import ConvertError

numbers = st.integers(-(2**63), 2**63)
texts = st.tuples(st.text(), st.text())
FIELDS = {
    "config": st.dictionaries(st.text(), numbers | st.text()),
    "names": texts,
    "lines": texts,
    "paths": texts,
    "keep": st.booleans(),
    "again": st.booleans(),
    "gpus": st.booleans(),
    "history": st.booleans(),
    "gap": st.builds(JournalGap, st.text(), numbers, numbers, numbers, st.booleans()),
}
asked = st.sampled_from([*OPS.values()]).flatmap(
    lambda kind: st.builds(kind, **{name: FIELDS.get(name, st.text()) for name in kind.__dataclass_fields__})
)


@given(asked)
def test_a_request_comes_out_of_the_stream_as_it_went_in(request_: Any) -> None:
    assert asked_in(json.loads(json.dumps(table_of(request_)))) == request_


@given(asked)
def test_what_the_runner_adds_is_no_field(request_: Any) -> None:
    assert asked_in({**table_of(request_), "number": 3, "now": 1.5}) == request_


@pytest.mark.parametrize(
    "table",
    [
        {"op": "save_copy"},
        {"op": "read_journal", "gap": 7},
        {"op": "inventory"},
        {"op": "inventory", "gpus": True, "cpus": 1},
    ],
)
def test_a_table_with_missing_or_unknown_fields_is_refused_in_a_sentence(table: dict[str, Any]) -> None:
    with pytest.raises(ConvertError):
        asked_in(table)


def test_the_worker_has_an_operation_for_each_request_and_no_other() -> None:
    assert {name.removeprefix("do_") for name in vars(Worker) if name.startswith("do_")} == set(OPS)
    assert set(requests.Asked.__args__) == set(OPS.values())
