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
UNSEEN = Result("ib_loopback", "mlx5_0/1", None, "", "not_measured", "", None, "there is no ib_write_bw", "")
LAST = Validation("gpu-042", "b", 1.0, 2.5, "manual", "", (SLOW, UNSEEN), ("faults that only a combined load shows",))

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
def test_what_is_written_is_read_again(validation):
    assert parse(as_text(validation)) == validation


def test_the_document_has_the_words_that_others_read():
    told = as_document(LAST)
    assert {key: told[key] for key in ("schema", "node", "why", "stopped_by", "verdict")} == {
        "schema": 1,
        "node": "gpu-042",
        "why": "manual",
        "stopped_by": "",
        "verdict": "slow",
    }
    assert told["results"][0]["part"] == "0000:1b:00.0"


def test_the_worst_verdict_counts_and_what_was_not_looked_at_is_no_verdict():
    assert worst(LAST) == "slow"
    assert worst(replace(LAST, results=(SLOW, replace(SLOW, verdict="failed")))) == "failed"
    assert worst(replace(LAST, results=(UNSEEN, replace(SLOW, verdict="ok")))) == "ok"
    assert worst(replace(LAST, results=(UNSEEN,))) == worst(replace(LAST, results=())) == "not_measured"


def test_a_text_that_is_too_long_is_cut_where_it_is_written():
    long = replace(LAST, results=(replace(SLOW, message="x" * 5000),), unmeasured=("y" * 5000,))
    again = parse(as_text(long))
    assert len(again.results[0].message) == len(again.unmeasured[0]) == MAX_CHARACTERS


def test_what_a_later_version_adds_is_passed_over():
    told = as_document(LAST)
    told["more"] = told["results"][0]["more"] = 1
    assert parse(json.dumps(told)) == LAST


@pytest.mark.parametrize(
    ("change", "wrong"),
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
def test_a_document_that_is_not_right_is_refused_whole(change, wrong):
    with pytest.raises(NotAValidation, match=wrong):
        parse(json.dumps({**as_document(LAST), **change}))


@pytest.mark.parametrize("key", ["test", "value", "verdict", "against", "expected"])
def test_a_result_that_is_not_right_is_refused(key):
    told = as_document(LAST)
    told["results"][0][key] = {"a": 1}
    with pytest.raises(NotAValidation, match=key):
        parse(json.dumps(told))


@given(st.text(max_size=200) | st.recursive(st.none() | st.text(), st.lists, max_leaves=5).map(json.dumps))
def test_any_text_is_a_validation_or_one_error(text):
    with pytest.raises(NotAValidation):
        parse(text)


def test_deep_json_is_refused():
    with pytest.raises(NotAValidation):
        parse("[" * 200_000)


def test_what_steers_a_terminal_is_made_printable():
    assert "\x1b" not in parse(as_text(replace(LAST, node="a\x1b[2J"))).node
