"""guard: unexpected errors of an input are dropped, counted, displayed for a day and logged once."""

from __future__ import annotations

import logging
import time

import pytest

from healthd.common import guard
from healthd.common.guard import DISPLAY_SECONDS, SLURM, SOCKET, never_raises


def test_dropping_errors_counts_and_displays_error_for_a_day(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        with guard.dropping_errors(SOCKET, {"number": number}):
            int("x")
    assert dict(guard.dropped) == {"socket": 3}
    later = time.time()
    (sentence,) = guard.problems(later)
    assert sentence.startswith("socket: 3 inputs were dropped after an internal error, most recently ValueError: ")
    assert list(guard.problems(later + DISPLAY_SECONDS)) == []
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "{'number': 0}" in record.getMessage()
    assert record.exc_info is not None, "logged once with its traceback"


def test_same_error_at_another_boundary_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for boundary in (SOCKET, SLURM, SOCKET):
        with guard.dropping_errors(boundary):
            int("x")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_dropping_errors_lets_exit_exceptions_pass(ends: type[BaseException]) -> None:
    with pytest.raises(ends), guard.dropping_errors(SOCKET):
        raise ends


class Untold:
    def __repr__(self) -> str:
        raise ValueError("no words")


def test_drop_logs_short_printable_text(caplog: pytest.LogCaptureFixture) -> None:
    guard.drop("socket", ValueError("a\x1b[31m\n" + "b" * 10_000), "c\n" * 10_000)
    guard.drop("slurm", ValueError(Untold()), Untold())
    for message in caplog.messages:
        assert message.isprintable()
        assert len(message) < 600
    assert "a Untold that cannot be shown: ValueError" in caplog.messages[1]


def test_drop_limits_logged_locations(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_LOGGED_LOCATIONS", 3)
    for number in range(10):
        program = "\n" * number + "try: 1 / 0\nexcept Exception as error: guard.drop('here', error)"
        exec(compile(program, "made", "exec"))
    assert len(caplog.records) == 3
    assert guard.dropped["here"] == 10


def test_never_raises_returns_none_after_error() -> None:
    @never_raises("socket")
    def number(text: str) -> int | None:
        return int(text)

    assert (number("7"), number("seven")) == (7, None)
    assert dict(guard.dropped) == {"socket": 1}
