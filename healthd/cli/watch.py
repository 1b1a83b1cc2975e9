"""`healthd status --watch`: refresh the status on a separate screen.

On a terminal it uses the alternate screen, as less and top do. Each text is drawn over the previous text and truncated
at the last row. Otherwise (a pipe, TERM=dumb) the texts are printed one after another. Each refresh is one request to
the daemon.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from healthd.cli.terminal import harmless
from healthd.common.text import regex
from healthd.host.wakeup import poll, signals

# xterm control sequences (ctlseqs): ?1049 alternate screen, ?25 cursor, H home, K erase to end of line, J erase below.
_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\033[H", "\033[K", "\033[J"
_COLOUR = regex(r"\x1b\[[0-9;]*m")


class Refresh(NamedTuple):
    """One refresh. `text` is called only for display, because the terminal size may have changed."""

    status: int
    text: Callable[[], str]


def watch(refresh: Callable[[], Refresh], period_seconds: float, title: str, plain: bool) -> int:
    """Display `refresh()` every `period_seconds` until a signal arrives or the output is closed.

    With `plain`, print the texts one after another without a title, for programs. Return the last refresh's exit
    status.
    """
    screen = not plain and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    current = Refresh(0, str)

    def show() -> None:
        time_text = time.strftime("%H:%M:%S")
        if screen:
            size = shutil.get_terminal_size()
            _write(frame(f"{title}, {time_text}; Ctrl-C to quit", current.text(), size.columns, size.lines))
        else:
            _write(current.text() if plain else f"--- {title}, {time_text}\n{current.text()}\n")

    with suppress(KeyboardInterrupt, BrokenPipeError), _screen(screen), _woken() as woken:
        while True:
            due = time.monotonic() + period_seconds
            current = refresh()
            show()
            while (remaining := due - time.monotonic()) > 0:
                poll([(woken, False)], remaining)
                received = signals(woken) if screen else b""
                if signal.SIGTSTP in received:
                    _write(_LEAVE)
                    os.kill(os.getpid(), signal.SIGSTOP)
                    _write(_ENTER)
                if received:
                    show()
    return current.status


def frame(title: str, text: str, columns: int, rows: int) -> str:
    """Return the text to draw over the previous text: the lines that fit, and the number of lines that do not fit."""
    room, visible = max(rows, 3) - 2, []  # excludes the title and the line with the number of hidden lines
    lines = harmless(text).rstrip("\n").split("\n")
    for line in lines:
        room -= max(1, -(-len(_COLOUR.sub("", line)) // max(columns, 1)))
        if room < 0:
            break
        visible.append(line)
    more = len(lines) - len(visible)
    last = [f"... {more} more lines: healthd status | less"[:columns]] if more else []
    return _HOME + "".join(f"{line}{_END_OF_LINE}\r\n" for line in (title[:columns], *visible)) + "".join(last) + _BELOW


@contextmanager
def _screen(alternate: bool) -> Iterator[None]:
    """Use the alternate screen, and restore the terminal at the end."""
    if alternate:
        _write(_ENTER)
    try:
        yield
    finally:
        if alternate:
            _write(_LEAVE)


@contextmanager
def _woken() -> Iterator[int]:
    """Yield a descriptor that receives a byte after a resize or Ctrl-Z. Terminating signals raise KeyboardInterrupt."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGWINCH, signal.SIGTSTP):
        before[number] = signal.signal(number, lambda _number, _frame: None)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
