"""Reasons of healthd's drains: writing and parsing them."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.model import Clears, Condition, ConditionState, RepairStep, Severity
from healthd.common.slurm.builtin_reasons import APPENDED
from healthd.common.slurm.drain_reason import (
    MAX_CHARACTERS,
    claim_note,
    domain_id,
    names_worst_cause,
    parse_claim,
    parse_domain,
    parse_reason,
    reason,
    reason_start,
    with_claim,
)

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


# --- the claim of a repair

STEPS = st.sampled_from(list(RepairStep))
SUFFIXES = st.lists(st.sampled_from(APPENDED), max_size=3).map("".join)


@pytest.mark.parametrize("step", RepairStep)
def test_claim_is_the_end_of_the_reason(step: RepairStep) -> None:
    text = reason([condition()])
    claimed = with_claim(text, step)
    assert claimed == f"{text} ({claim_note(step)})"
    assert parse_claim(claimed) is step
    assert parse_claim(f"{claimed} : reboot issued : reboot timed out") is step
    assert with_claim(f"{claimed} : reboot issued", None) == text


def test_claim_notes_are_public() -> None:
    """Sites and other versions of healthd read them in Slurm."""
    assert [claim_note(step) for step in RepairStep] == [
        *("repair: gpu_reset", "repair: reboot", "repair: power_cycle"),
        "repair failed: a person must act",
    ]


@pytest.mark.parametrize(
    "text",
    [
        *("", "fan", "fan (repair: reboot)", "healthd: x (repair: reboot)", "healthd: gpu_xid/79: x"),
        *("healthd: gpu_xid/79: x (repair: reboot) y", "healthd: gpu_xid/79: x (repair: other)"),
        *("healthd: gpu_xid/79: x(repair: reboot)", "lemon: 3 Xids (repair: reboot)"),
    ],
)
def test_parse_claim_rejects_other_text(text: str) -> None:
    assert parse_claim(text) is None


@given(code=CODES, subject=ANY_TEXT, message=ANY_TEXT, more=st.integers(0, 500), step=STEPS, suffix=SUFFIXES)
def test_claim_of_any_reason_is_read_back(
    code: str, subject: str, message: str, more: int, step: RepairStep, suffix: str
) -> None:
    cause = condition(code, subject, message)
    text = reason([cause] * (more + 1), "3 times in an hour: an operator must resume it" if more % 2 else "")
    claimed = with_claim(text, step)
    assert len(claimed) <= MAX_CHARACTERS
    assert parse_claim(claimed + suffix) is step
    assert parse_reason(claimed) == parse_reason(text)
    assert names_worst_cause(claimed, [cause])
    assert with_claim(claimed + suffix, step) == claimed
    assert parse_claim(with_claim(claimed + suffix, None)) is None
    assert with_claim(with_claim(claimed, RepairStep.REBOOT), step) == with_claim(claimed, step)


LONG_CODES = st.from_regex(r"[a-z][a-z0-9_]{1,60}/[a-z0-9_-]{1,60}", fullmatch=True)
LONG_PARTS = st.one_of(st.just(""), st.from_regex(r"[!-~]{1,200}", fullmatch=True), st.text(max_size=60))


@given(
    code=LONG_CODES,
    subject=LONG_PARTS,
    message=ANY_TEXT,
    more=st.integers(0, 99_999),
    note=st.from_regex(r"[!-~]( ?[!-~]){0,300}", fullmatch=True) | st.just(""),
    step=STEPS,
    suffix=SUFFIXES,
)
def test_claim_survives_the_longest_cause_and_note(
    code: str, subject: str, message: str, more: int, note: str, step: RepairStep, suffix: str
) -> None:
    cause = condition(code, subject, message)
    text = reason([cause] * (more + 1), note)
    claimed = with_claim(text, step)
    assert max(len(text), len(claimed)) <= MAX_CHARACTERS
    assert claimed.endswith(f" ({claim_note(step)})")
    assert parse_claim(claimed + suffix) is step
    assert text.startswith(reason_start(cause))
    assert claimed.startswith(reason_start(cause))


def test_reason_shortens_note_if_cause_leaves_too_little_room() -> None:
    text = reason([condition("a" * 79 + "/x", "p" * 130)] * 2, "3 times in an hour: an operator must resume it")
    assert len(text) == MAX_CHARACTERS
    assert " (+1 more) (3 times " in text
    assert text.endswith("...)")


@given(text=ANY_TEXT, step=STEPS)
def test_text_outside_healthd_format_never_claims(text: str, step: RepairStep) -> None:
    assert parse_claim(f"{text} ({claim_note(step)})") is None or text.startswith("healthd: ")


# --- the NVLink domain

DOMAINS = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)


def test_reason_ends_with_domain() -> None:
    """Sites and other versions of healthd read it in Slurm."""
    text = reason([condition(), condition()], "an operator must resume it", "1a2b3c4d")
    head = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus (+1 more)"
    assert text == f"{head} (an operator must resume it) (domain 1a2b3c4d)"
    assert parse_domain(text) == "1a2b3c4d"
    assert with_claim(text, RepairStep.REBOOT) == f"{text} (repair: reboot)"


def test_domain_id_of_a_public_capture() -> None:
    assert domain_id("00000001-0000-0000-0000-000000000001") == "9551333b"
    assert domain_id("4F9A1B2C-0000-0000-0000-00000000000A") == domain_id("4f9a1b2c-0000-0000-0000-00000000000a")
    assert (domain_id(""), domain_id(None)) == ("", "")


@given(uuid=st.uuids(), place=st.integers(0, 32), digits=st.from_regex(r"[0-9a-f]{4}", fullmatch=True))
def test_domain_id_differs_for_uuids_that_differ_in_adjacent_digits(uuid: UUID, place: int, digits: str) -> None:
    first = str(uuid)
    second = first[:place] + digits + first[place + 4 :]
    assert (domain_id(first) == domain_id(second)) == (first == second)


@pytest.mark.parametrize(
    "text",
    [
        *("", "fan (domain 1a2b3c4d)", "lemon: 3 Xids (domain 1a2b3c4d)", "healthd: gpu_xid/79: x"),
        *("healthd: gpu_xid/79: x (domain 1a2b3c4d) y", "healthd: gpu_xid/79: x (domain 1a2b3c4)"),
        *("healthd: gpu_xid/79: x (domain 1a2b3c4d)\n", "healthd: gpu_xid/79: x(domain 1a2b3c4d)"),
    ],
)
def test_parse_domain_rejects_other_text(text: str) -> None:
    assert parse_domain(text) == ""


@given(text=ANY_TEXT)
def test_parse_domain_accepts_any_text(text: str) -> None:
    parse_domain(text)
    parse_domain(f"healthd: gpu_xid/79: {text}")


@given(
    code=CODES,
    subject=PARTS,
    message=ANY_TEXT,
    more=st.integers(0, 500),
    note=st.sampled_from(["", "3 times in an hour: an operator must resume it", "x" * 300]),
    domain=DOMAINS,
    step=STEPS,
    suffix=SUFFIXES,
)
def test_domain_and_claim_of_any_reason_are_read_back(
    code: str, subject: str, message: str, more: int, note: str, domain: str, step: RepairStep, suffix: str
) -> None:
    cause = condition(code, subject, message)
    text = reason([cause] * (more + 1), note, domain)
    claimed = with_claim(text, step)
    assert max(len(text), len(claimed)) <= MAX_CHARACTERS
    assert [parse_domain(line) for line in (text, text + suffix, claimed, claimed + suffix)] == [domain] * 4
    assert parse_claim(claimed + suffix) is step
    assert parse_reason(text) == parse_reason(claimed) == parse_reason(reason([cause]))
    assert names_worst_cause(claimed, [cause])
    assert with_claim(claimed + suffix, step) == claimed
    assert parse_domain(with_claim(claimed + suffix, None)) == domain


@given(code=LONG_CODES, subject=LONG_PARTS, message=ANY_TEXT, more=st.integers(0, 99_999), domain=DOMAINS, step=STEPS)
def test_cause_and_claim_survive_the_longest_cause_with_a_domain(
    code: str, subject: str, message: str, more: int, domain: str, step: RepairStep
) -> None:
    cause = condition(code, subject, message)
    text = reason([cause] * (more + 1), "3 times in an hour: an operator must resume it", domain)
    claimed = with_claim(text, step)
    assert max(len(text), len(claimed)) <= MAX_CHARACTERS
    assert parse_domain(text) == domain
    assert parse_claim(claimed) is step
    assert claimed.startswith(reason_start(cause))
    assert parse_domain(claimed) in (domain, "")
