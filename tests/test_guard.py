"""What a reader of others' text did not think of: dropped, counted, shown for a day, told once."""

from __future__ import annotations

import logging

import pytest

from healthd import guard
from healthd.guard import SHOWN_SECONDS, SLURM, SOCKET, Guard, never_raises, tell_once


@pytest.fixture(autouse=True)
def nothing_was_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_told", set())


def test_what_raises_is_dropped_counted_and_shown_for_a_day(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    guarded = Guard(lambda: now)
    for number in range(3):
        with guarded.at(SOCKET, {"asked": number}):
            int("x")
    assert dict(guarded.dropped) == {"socket": 3}
    (sentence,) = guarded.troubles()
    assert sentence.startswith("socket: 3 inputs were dropped by a mistake in healthd, the last by ValueError: ")
    now += SHOWN_SECONDS
    assert list(guarded.troubles()) == []
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert "{'asked': 0}" in said.getMessage()
    assert said.exc_info is not None, "with its traceback, once"


def test_a_mistake_at_another_place_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    guarded = Guard(lambda: 0.0)
    with guarded.at(SOCKET):
        int("x")
    with guarded.at(SLURM):
        int("x")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_program_ends_it(ends: type[BaseException]) -> None:
    with pytest.raises(ends), Guard(lambda: 0.0).at(SOCKET):
        raise ends


def test_text_of_others_is_told_short_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    tell_once("socket", ValueError("a\x1b[31m\n" + "b" * 10_000), "c\n" * 10_000)
    (said,) = caplog.messages
    assert said.isprintable()
    assert len(said) < 600


def test_a_mistake_that_moves_through_the_program_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MOST_TOLD", 3)
    for number in range(10):
        exec(compile("\n" * number + "try: 1 / 0\nexcept Exception as error: tell_once('here', error)", "made", "exec"))
    assert len(caplog.records) == 3


def test_a_reader_that_stumbles_knows_nothing_of_it() -> None:
    @never_raises("socket")
    def number(text: str) -> int | None:
        return int(text)

    assert (number("7"), number("seven")) == (7, None)
