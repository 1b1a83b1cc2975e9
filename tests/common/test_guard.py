"""guard: unexpected errors of an input are dropped, counted, displayed for a day and logged once."""

from __future__ import annotations

import logging
import time

import pytest

from healthd.common import guard
from healthd.common.guard import DISPLAY_SECONDS, SLURM, SOCKET, never_raises


def test_what_raises_is_dropped_counted_and_shown_for_a_day(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        with guard.dropping_errors(SOCKET, {"number": number}):
            int("x")
    assert dict(guard.dropped) == {"socket": 3}
    now = time.time()
    (sentence,) = guard.problems(now)
    assert sentence.startswith("socket: 3 inputs were dropped after an internal error, most recently ValueError: ")
    assert list(guard.problems(now + DISPLAY_SECONDS)) == []
    (said,) = caplog.records
    assert said.levelno == logging.ERROR
    assert "{'number': 0}" in said.getMessage()
    assert said.exc_info is not None, "logged once with its traceback"


def test_the_same_mistake_at_another_boundary_is_told_too(caplog: pytest.LogCaptureFixture) -> None:
    for boundary in (SOCKET, SLURM, SOCKET):
        with guard.dropping_errors(boundary):
            int("x")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_what_is_meant_to_end_the_program_ends_it(ends: type[BaseException]) -> None:
    with pytest.raises(ends), guard.dropping_errors(SOCKET):
        raise ends


class Untold:
    def __repr__(self) -> str:
        raise ValueError("no words")


def test_text_of_others_is_told_short_and_printable_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    guard.drop("socket", ValueError("a\x1b[31m\n" + "b" * 10_000), "c\n" * 10_000)
    guard.drop("slurm", ValueError(Untold()), Untold())
    for said in caplog.messages:
        assert said.isprintable()
        assert len(said) < 600
    assert "a Untold that cannot be shown: ValueError" in caplog.messages[1]


def test_a_mistake_that_moves_through_the_program_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_LOGGED_LOCATIONS", 3)
    for number in range(10):
        program = "\n" * number + "try: 1 / 0\nexcept Exception as error: guard.drop('here', error)"
        exec(compile(program, "made", "exec"))
    assert len(caplog.records) == 3
    assert guard.dropped["here"] == 10


def test_a_reader_that_stumbles_knows_nothing_of_it() -> None:
    @never_raises("socket")
    def number(text: str) -> int | None:
        return int(text)

    assert (number("7"), number("seven")) == (7, None)
    assert dict(guard.dropped) == {"socket": 1}
