"""Tests of `healthd status --watch` on a terminal and in a pipe: the real program with a fake daemon."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from status_daemon import StatusDaemon

from healthd.cli.watch import frame

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 120.0
ENTER, LEAVE = "\033[?1049h", "\033[?1049l"


def command(folder: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "healthd", "status", "--runtime-dir", str(folder), *arguments]


class Terminal:
    """The program on a terminal, and everything that it has drawn so far."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.master, slave = os.openpty()
        self.resize(100, 30)
        env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **environment}
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            command(folder, *arguments), stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True
        )
        os.close(slave)
        self.drawn = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, pattern: str, since: int = 0) -> int:
        """Wait until `pattern` is drawn after position `since`. Return the length of the drawn text."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.drawn[since:]):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.drawn[since:]!r}"
            if select.select([self.master], [], [], 1.0)[0]:
                try:
                    self.drawn += os.read(self.master, 1 << 16).decode("utf-8", "replace")
                except OSError:  # the program has ended
                    assert re.search(pattern, self.drawn[since:]), self.drawn[since:]
        return len(self.drawn)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    shown = Terminal(tmp_path, "--watch", "0.5")
    yield shown
    shown.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StatusDaemon]:
    with StatusDaemon(tmp_path) as answering:
        yield answering


def test_it_draws_on_a_screen_of_its_own_and_gives_the_terminal_back_with_the_last_status(daemon, terminal):
    terminal.until("n: .*unhealthy")
    assert terminal.drawn.startswith(ENTER)
    daemon.document = {**daemon.document, "health": "warning"}
    terminal.until("n: .*warning")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(PATIENCE_SECONDS) == 1
    terminal.until(re.escape(LEAVE))
    assert terminal.drawn.endswith(LEAVE)
    assert "Traceback" not in terminal.drawn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_whatever_ends_it_the_terminal_is_as_it_was(daemon, terminal, number):
    terminal.until("n: .*unhealthy")
    terminal.process.send_signal(number)
    assert terminal.process.wait(PATIENCE_SECONDS) == 2
    terminal.until(re.escape(LEAVE))


def test_a_window_of_another_size_is_drawn_anew_without_asking_the_daemon(daemon, tmp_path):
    shown = Terminal(tmp_path, "--watch", "1h")
    try:
        seen = shown.until("Open conditions")
        for rows in (8, 60):
            shown.resize(60, rows)
            shown.process.send_signal(signal.SIGWINCH)
            seen = shown.until("more lines" if rows == 8 else "kernel log", seen)
        assert daemon.asked == 1
    finally:
        shown.close()


def test_stopped_it_leaves_the_screen_and_comes_back_to_it(daemon, terminal):
    seen = terminal.until("n: .*unhealthy")
    terminal.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    seen = terminal.until(re.escape(LEAVE), seen)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.until(re.escape(ENTER) + "(.|\n)*n: .*unhealthy", seen)


def test_a_daemon_that_goes_is_told_above_what_it_said_last_and_one_that_comes_back_is_shown(tmp_path):
    with StatusDaemon(tmp_path):
        shown = Terminal(tmp_path, "--watch", "0.5")
        seen = shown.until("n: .*unhealthy")
    try:
        seen = shown.until("healthd is not running(.|\n)*Last status, (.|\n)*n: .*unhealthy", seen)
        with StatusDaemon(tmp_path, node="back"):
            seen = shown.until("back: .*unhealthy", seen)
        seen = shown.until("healthd is not running", seen)
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(PATIENCE_SECONDS) == 3, "the status of the last query"
    finally:
        shown.close()


def test_a_dumb_terminal_gets_one_text_after_another(daemon, tmp_path):
    shown = Terminal(tmp_path, "--watch", "0.5", TERM="dumb")
    try:
        shown.until("(--- healthd status, every 0.5 s, (.|\n)*){2}n: unhealthy")
        assert "\033" not in shown.drawn
    finally:
        shown.close()


@pytest.mark.parametrize(("flags", "begins"), [((), "--- healthd status, every 0.5 s"), (("--json",), "{")])
def test_a_pipe_gets_one_text_after_another_until_nobody_reads(daemon, tmp_path, flags, begins):
    argv = command(tmp_path, "--watch", "0.5", *flags)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = 0
        while seen < 2:
            line = process.stdout.readline()
            assert line
            assert "\033" not in line
            seen += line.rstrip("\n") == begins or line.startswith("--- ")
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 2
        assert process.stderr.read() == ""


# --- frame


def test_what_has_no_room_is_counted():
    drawn = frame("title", "\n".join(f"line {n}" for n in range(30)), 80, 10)
    assert re.sub(r"\033\[[A-Z]", "", drawn).split("\r\n") == [
        "title", *(f"line {n}" for n in range(8)), "... 22 more lines: healthd status | less"
    ]  # fmt: skip


@given(st.text(), st.integers(1, 200), st.integers(1, 100))
def test_no_text_steers_the_terminal_or_makes_it_scroll(text, columns, rows):
    drawn = frame("title", text, columns, rows)
    left = re.sub(r"\033\[(?:[HKJ]|[0-9;]{1,16}m)", "", drawn)
    assert "\033" not in left
    assert left.count("\r\n") <= max(rows, 3) - 1
