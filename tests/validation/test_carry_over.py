"""with_untested: an earlier failure remains until a later validation has tested the part again."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.validation.document import FILE, Result, Validation, Verdict, as_text, parse, with_untested, worst
from healthd.validation.run import save

A, B = "0000:1b:00.0", "0000:43:00.0"


def result(verdict: str, part: str = A, test: str = "gemm_bf16", message: str = "") -> Result:
    return Result(test, part, None, "TFLOPS", verdict, "", None, message, "PyTorch 2.5.1")


def validation(*results: Result, stopped_by: str = "") -> Validation:
    return Validation("n1", "boot", 1.0, 2.0, "manual", stopped_by, results, ())


FAILED = validation(result("failed", message="the product is wrong"), result("ok", B))


@pytest.mark.parametrize(
    "later",
    [
        validation(stopped_by="a job"),
        validation(result("ok", A, "pcie_h2d")),  # --only pcie
        validation(result("not_measured", "")),  # the tool is missing
        validation(result("not_measured")),
        validation(result("ok", B), stopped_by="time"),
    ],
    ids=["stopped", "only", "no_tool", "not_measured", "cut_short"],
)
def test_earlier_failure_remains_if_not_tested_again(later: Validation) -> None:
    found = with_untested(later, FAILED)
    assert worst(found) == "failed"
    assert FAILED.results[0] in found.results, "unchanged, so it is not reported again"
    assert found.unmeasured == (f"gemm_bf16 {A}: found failed earlier and not tested again",)
    assert with_untested(validation(stopped_by="a signal"), found).results == (FAILED.results[0],)


@pytest.mark.parametrize("verdict", ["ok", "slow", "failed"])
def test_new_result_replaces_earlier_failure(verdict: str) -> None:
    later = validation(result(verdict), result("ok", B))
    assert with_untested(later, FAILED) == later


def test_failure_of_a_removed_part_is_dropped() -> None:
    later = validation(result("ok", "0000:99:00.0"), result("ok", B))
    assert with_untested(later, FAILED) == later


def test_first_validation_is_unchanged() -> None:
    assert with_untested(FAILED, None) == FAILED


RESULTS = st.lists(
    st.builds(
        result, st.sampled_from(get_args(Verdict)), st.sampled_from(["", A, B]), st.sampled_from(["gemm_bf16", "nccl"])
    )
)


@given(RESULTS, RESULTS, st.sampled_from(["", "time"]))
def test_failure_disappears_only_if_tested_again_or_removed(
    before: list[Result], after: list[Result], stopped_by: str
) -> None:
    earlier, later = validation(*before), validation(*after, stopped_by=stopped_by)
    found = with_untested(later, earlier)
    assert parse(as_text(found)) == found
    for earlier_result in before:
        same = [r for r in found.results if (r.test, r.part) == (earlier_result.test, earlier_result.part)]
        was_tested = any(r.test == earlier_result.test and r.verdict in ("ok", "slow", "failed") for r in after)
        if earlier_result.verdict in ("failed", "slow") and not (was_tested and (not stopped_by or same)):
            assert any(r.verdict in ("failed", "slow") for r in same)


def test_save_keeps_earlier_failure_of_the_file(tmp_path: Path) -> None:
    save(str(tmp_path), FAILED, {})
    save(str(tmp_path), validation(stopped_by="a job"), {})
    saved = parse((tmp_path / FILE).read_text())
    assert (worst(saved), saved.stopped_by) == ("failed", "a job")
    (tmp_path / FILE).write_text("{")
    save(str(tmp_path), validation(result("ok")), {})
    assert worst(parse((tmp_path / FILE).read_text())) == "ok"
