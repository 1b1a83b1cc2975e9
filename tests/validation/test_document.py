"""The file of the last validation: it is read back unchanged, and other content is rejected."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.validation.document import (
    MAX_CHARACTERS,
    Against,
    NotAValidation,
    Result,
    StoppedBy,
    Validation,
    Verdict,
    Why,
    as_document,
    as_text,
    parse,
    worst,
)

SLOW = Result("gemm_bf16", "0000:1b:00.0", 412.5, "TFLOPS", "slow", "peers", 640.0, "412 of 711", "PyTorch 2.5.1")
UNMEASURED = Result("ib_loopback", "mlx5_0/1", None, "", "not_measured", "", None, "ib_write_bw was not found", "")
LAST = Validation(
    "gpu-042", "b", 1.0, 2.5, "manual", "", (SLOW, UNMEASURED), ("faults that only a combined load shows",)
)

PRINTED = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
RESULTS = st.builds(
    Result,
    *(
        PRINTED,
        PRINTED,
        NUMBERS,
        PRINTED,
        st.sampled_from(get_args(Verdict)),
        st.sampled_from(get_args(Against)),
        NUMBERS,
    ),
    *(PRINTED, PRINTED),
)
VALIDATIONS = st.builds(
    Validation,
    *(
        PRINTED,
        PRINTED,
        st.floats(0, 4e9),
        st.floats(0, 4e9),
        st.sampled_from(get_args(Why)),
        st.sampled_from(get_args(StoppedBy)),
    ),
    *(st.lists(RESULTS, max_size=4).map(tuple), st.lists(PRINTED, max_size=3).map(tuple)),
)


@given(VALIDATIONS)
def test_parse_returns_what_as_text_wrote(validation):
    assert parse(as_text(validation)) == validation


def test_as_document_has_documented_keys():
    document = as_document(LAST)
    assert {key: document[key] for key in ("schema", "node", "why", "stopped_by", "verdict")} == {
        "schema": 1,
        "node": "gpu-042",
        "why": "manual",
        "stopped_by": "",
        "verdict": "slow",
    }
    assert document["results"][0]["part"] == "0000:1b:00.0"


def test_worst_verdict_counts_and_unmeasured_is_no_verdict():
    assert worst(LAST) == "slow"
    assert worst(replace(LAST, results=(SLOW, replace(SLOW, verdict="failed")))) == "failed"
    assert worst(replace(LAST, results=(UNMEASURED, replace(SLOW, verdict="ok")))) == "ok"
    assert worst(replace(LAST, results=(UNMEASURED,))) == worst(replace(LAST, results=())) == "not_measured"


def test_as_text_truncates_long_text():
    long = replace(LAST, results=(replace(SLOW, message="x" * 5000),), unmeasured=("y" * 5000,))
    again = parse(as_text(long))
    assert len(again.results[0].message) == len(again.unmeasured[0]) == MAX_CHARACTERS


def test_parse_ignores_keys_of_later_versions():
    document = as_document(LAST)
    document["more"] = document["results"][0]["more"] = 1
    assert parse(json.dumps(document)) == LAST


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"schema": 2}, "schema"),
        ({"schema": True}, "schema"),
        ({"results": {}}, "results"),
        ({"results": [1]}, "results"),
        ({"unmeasured": None}, "unmeasured"),
        ({"unmeasured": [1]}, "unmeasured"),
        ({"began": None}, "began"),
        ({"began": -1}, "began"),
        ({"ended": 1e300}, "ended"),
        ({"ended": True}, "ended"),
        ({"ended": 10**400}, "ended"),
        ({"why": "fun"}, "why"),
        ({"stopped_by": []}, "stopped_by"),
        ({"node": 3}, "node"),
        ({"node": "n" * 401}, "node"),
    ],
)
def test_parse_rejects_invalid_document(change, key):
    with pytest.raises(NotAValidation, match=key):
        parse(json.dumps({**as_document(LAST), **change}))


@pytest.mark.parametrize("key", ["test", "value", "verdict", "against", "expected"])
def test_parse_rejects_invalid_result(key):
    document = as_document(LAST)
    document["results"][0][key] = {"a": 1}
    with pytest.raises(NotAValidation, match=key):
        parse(json.dumps(document))


@given(st.text(max_size=200) | st.recursive(st.none() | st.text(), st.lists, max_leaves=5).map(json.dumps))
def test_parse_of_any_text_raises_only_one_error(text):
    with pytest.raises(NotAValidation):
        parse(text)


def test_parse_rejects_deeply_nested_json():
    with pytest.raises(NotAValidation):
        parse("[" * 200_000)


def test_parse_replaces_control_characters():
    assert "\x1b" not in parse(as_text(replace(LAST, node="a\x1b[2J"))).node
