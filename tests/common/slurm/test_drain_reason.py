"""Reasons of healthd's drains: writing and parsing them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.model import Clears, Condition, ConditionState, Severity
from healthd.common.slurm.drain_reason import MAX_CHARACTERS, names_worst_cause, parse_reason, reason, reason_start

CODES = st.from_regex(r"[a-z][a-z0-9_]{1,20}/[a-z0-9_-]{1,30}", fullmatch=True)
ANY_TEXT = st.text(max_size=400)
# Longer parts are truncated: ten characters are at most 120 bytes in the text.
PARTS = st.one_of(st.sampled_from(["", "0000:1b:00.0", "/data", "/data set", "mlx5_0/1"]), st.text(max_size=10))


def condition(
    code: str = "gpu_xid/79",
    subject: str = "0000:1b:00.0",
    message: str = "fell off the bus",
    severity: Severity = Severity.CRITICAL,
) -> Condition:
    return Condition(
        check="",
        instance="",
        code=code,
        subject=subject,
        severity=severity,
        message=message,
        clears=Clears.PASS,
        state=ConditionState.OPEN,
        first_seen=0,
        last_seen=0,
        count=1,
        boot_id="",
    )


def test_reason_names_worst_cause_and_counts_others() -> None:
    assert reason([condition()]) == "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
    two = [condition(), condition("mount/missing", "/data")]
    assert reason(two) == "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus (+1 more)"
    assert reason([condition(subject="")]) == "healthd: gpu_xid/79: fell off the bus"


def test_reason_has_xid_code_within_width_of_sinfo() -> None:
    assert reason([condition()])[:20].strip() == "healthd: gpu_xid/79"


@given(code=CODES, subject=ANY_TEXT, message=ANY_TEXT, more=st.integers(0, 500))
def test_reason_of_any_causes_is_a_short_ascii_line(code: str, subject: str, message: str, more: int) -> None:
    text = reason([condition(code, subject, message)] * (more + 1))
    assert len(text) <= MAX_CHARACTERS
    assert all(" " <= character <= "~" for character in text)
    assert '"' not in text
    assert text == " ".join(text.split()), "Slurm returns a reason with single spaces"
    assert text.endswith(f" (+{more} more)") or more == 0
    assert names_worst_cause(text, [condition(code, subject, "another message")])


@given(code=CODES, subject=PARTS, message=ANY_TEXT)
def test_parse_reason_reads_code_and_part(code: str, subject: str, message: str) -> None:
    assert parse_reason(reason([condition(code, subject, message)])) == (code, subject)


@given(text=ANY_TEXT)
def test_parse_reason_accepts_any_text(text: str) -> None:
    parse_reason(text)
    parse_reason(f"healthd: {text}")


def test_parse_reason_returns_none_for_other_reasons() -> None:
    for text in (
        "",
        "fan broken",
        "healthd",
        "healthd: broken fan",
        "healthd: broken: fan",
        "healthd is sad: yes",
        "Kill task failed",
    ):
        assert parse_reason(text) is None


def test_names_worst_cause_keeps_text_while_a_worst_cause_is_named() -> None:
    text = reason([condition()])
    mount = condition("mount/missing", "/data")
    assert names_worst_cause(text, [condition(message="something else"), mount])
    assert names_worst_cause(text, [mount, condition()])
    assert not names_worst_cause(text, [mount, condition(severity=Severity.DEGRADED)])
    assert not names_worst_cause(text, [mount])
    assert not names_worst_cause(text, [])
    assert not names_worst_cause(text, [condition(subject="0000:1c:00.0")])


def test_reason_start_is_not_a_prefix_of_another_code() -> None:
    assert not reason_start(condition("gpu_xid/79")).startswith(reason_start(condition("gpu_xid/7")))


@pytest.mark.parametrize("part", [chr(0xD800), chr(0xDCFF), f"/data/{chr(0xDCE9)}t\u00e9", "\x00", "\U0001f600"])
def test_reason_of_part_with_any_characters_is_printable(part: str) -> None:
    """A lone surrogate, or a byte of a path that is no UTF-8, must not break the decision."""
    text = reason([condition(subject=part)])
    assert text.isascii()
    assert text.isprintable()
