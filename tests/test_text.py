"""Text of others on its way into a message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from healthd.text import printable


def test_what_ends_a_line_or_steers_a_terminal_becomes_a_question_mark() -> None:
    assert printable("a\nb\x1b[31mc\u2028d\x00") == "a?b?[31mc?d?"


@given(st.text())
def test_whatever_it_is_given_is_printable_and_as_long(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)
    assert printable(printable(text)) == printable(text)
