"""Tests of the text of a validation: failures come first, and parts that were not measured are listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.validate import text
from healthd.common.page import Page
from healthd.validation.document import Result, Validation, as_document
from tests.validation.test_document import VALIDATIONS


def gpu(
    number: int, value: float | None, verdict: str, message: str = "", test: str = "memory", source: str = "PyTorch 2"
) -> Result:
    return Result(
        test, f"0000:{number:02x}:00.0", value, "GB/s", verdict, "peers" if value else "", None, message, source
    )


def text_of(*results: Result, stopped_by: str = "") -> str:
    validation = Validation("gpu-042", "b", 1.8e9, 1.8e9 + 41, "manual", stopped_by, results, ("links between nodes",))
    return text(as_document(validation), Page(100))


def test_text_lists_failures_first_and_one_row_per_good_test():
    good = [gpu(number, 2230.0 + number, "ok") for number in range(7)]
    passed = [gpu(number, None, "ok", test="dcgm_pcie", source="DCGM 4.5.2") for number in range(8)]
    lines = text_of(
        *good, *passed, gpu(7, 1634.0, "slow", "27 % below the median"), gpu(8, None, "failed", "wrong")
    ).splitlines()
    assert lines[0] == "gpu-042: failed; 1 failed, 1 slow, 15 good, 41 s, 2027-01-15 08:00 UTC"
    assert lines.index("Failed") < lines.index("Slow") < lines.index("Not covered")
    (row,) = [line.split() for line in lines if line.startswith("memory")]
    assert row == ["memory", "7", "2,230", "2,233", "GB/s", "peers", "PyTorch", "2"]
    assert "Passed by DCGM 4.5.2: dcgm_pcie (8)" in lines


def test_text_groups_unmeasured_parts_by_reason():
    printed = text_of(gpu(0, 2000.0, "ok"), *(gpu(number, None, "not_measured", "no room") for number in range(1, 8)))
    assert "; 1 good, 7 not measured" in printed.splitlines()[0]
    assert "memory 0000:01:00.0, memory 0000:02:00.0, memory 0000:03:00.0, 4 more: no room" in " ".join(printed.split())


def test_text_names_cause_of_stop():
    assert "Stopped by a job" in text_of(stopped_by="a job")


@given(VALIDATIONS, st.integers(20, 200))
def test_text_of_any_validation_is_printable(validation, width):
    printed = text(as_document(validation), Page(width))
    assert all(line.isprintable() for line in printed.splitlines())
