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
TIMEOUT_SECONDS = 120.0
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

    def wait_for(self, pattern: str, since: int = 0) -> int:
        """Wait until `pattern` is drawn after position `since`. Return the length of the drawn text."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
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
    watched = Terminal(tmp_path, "--watch", "0.5")
    yield watched
    watched.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StatusDaemon]:
    with StatusDaemon(tmp_path) as status_daemon:
        yield status_daemon


def test_watch_uses_alternate_screen_and_restores_terminal(daemon, terminal):
    terminal.wait_for("n: .*unhealthy")
    assert terminal.drawn.startswith(ENTER)
    daemon.document = {**daemon.document, "health": "warning"}
    terminal.wait_for("n: .*warning")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(TIMEOUT_SECONDS) == 1
    terminal.wait_for(re.escape(LEAVE))
    assert terminal.drawn.endswith(LEAVE)
    assert "Traceback" not in terminal.drawn


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_watch_restores_terminal_on_signal(daemon, terminal, number):
    terminal.wait_for("n: .*unhealthy")
    terminal.process.send_signal(number)
    assert terminal.process.wait(TIMEOUT_SECONDS) == 2
    terminal.wait_for(re.escape(LEAVE))


def test_watch_redraws_after_resize_without_query(daemon, tmp_path):
    watched = Terminal(tmp_path, "--watch", "1h")
    try:
        position = watched.wait_for("Open conditions")
        for rows in (8, 60):
            watched.resize(60, rows)
            watched.process.send_signal(signal.SIGWINCH)
            position = watched.wait_for("more lines" if rows == 8 else "kernel log", position)
        assert daemon.requests == 1
    finally:
        watched.close()


def test_watch_leaves_screen_on_stop_and_returns_on_continue(daemon, terminal):
    position = terminal.wait_for("n: .*unhealthy")
    terminal.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    position = terminal.wait_for(re.escape(LEAVE), position)
    terminal.process.send_signal(signal.SIGCONT)
    terminal.wait_for(re.escape(ENTER) + "(.|\n)*n: .*unhealthy", position)


def test_watch_shows_last_status_while_daemon_is_down(tmp_path):
    with StatusDaemon(tmp_path):
        watched = Terminal(tmp_path, "--watch", "0.5")
        position = watched.wait_for("n: .*unhealthy")
    try:
        position = watched.wait_for("healthd is not running(.|\n)*Last status, (.|\n)*n: .*unhealthy", position)
        with StatusDaemon(tmp_path, node="back"):
            position = watched.wait_for("back: .*unhealthy", position)
        position = watched.wait_for("healthd is not running", position)
        watched.process.send_signal(signal.SIGINT)
        assert watched.process.wait(TIMEOUT_SECONDS) == 3, "the status of the last query"
    finally:
        watched.close()


def test_watch_prints_consecutive_texts_on_dumb_terminal(daemon, tmp_path):
    watched = Terminal(tmp_path, "--watch", "0.5", TERM="dumb")
    try:
        watched.wait_for("(--- healthd status, every 0.5 s, (.|\n)*){2}n: unhealthy")
        assert "\033" not in watched.drawn
    finally:
        watched.close()


@pytest.mark.parametrize(("flags", "first_line"), [((), "--- healthd status, every 0.5 s"), (("--json",), "{")])
def test_watch_prints_consecutive_texts_into_pipe_until_closed(daemon, tmp_path, flags, first_line):
    argv = command(tmp_path, "--watch", "0.5", *flags)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        texts = 0
        while texts < 2:
            line = process.stdout.readline()
            assert line
            assert "\033" not in line
            texts += line.rstrip("\n") == first_line or line.startswith("--- ")
        process.stdout.close()
        assert process.wait(TIMEOUT_SECONDS) == 2
        assert process.stderr.read() == ""


# --- frame


def test_frame_counts_lines_without_room():
    drawn = frame("title", "\n".join(f"line {n}" for n in range(30)), 80, 10)
    assert re.sub(r"\033\[[A-Z]", "", drawn).split("\r\n") == [
        "title", *(f"line {n}" for n in range(8)), "... 22 more lines: healthd status | less"
    ]  # fmt: skip


@given(st.text(), st.integers(1, 200), st.integers(1, 100))
def test_frame_never_scrolls_and_escapes_control_characters(text, columns, rows):
    drawn = frame("title", text, columns, rows)
    remaining = re.sub(r"\033\[(?:[HKJ]|[0-9;]{1,16}m)", "", drawn)
    assert "\033" not in remaining
    assert remaining.count("\r\n") <= max(rows, 3) - 1
