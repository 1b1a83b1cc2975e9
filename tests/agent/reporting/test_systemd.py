"""Tests of sd_notify, the watchdog and the journal with real sockets."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.reporting import systemd
from healthd.host.journald import journal_entry


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the notify socket of the service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listener


def received(listener: socket.socket) -> list[str]:
    return listener.recv(1 << 16).decode().split("\n")


def test_ready_sends_status_line(manager: socket.socket) -> None:
    systemd.ready("healthy, 11 checks")
    assert received(manager) == ["READY=1", "STATUS=healthy, 11 checks"]


def test_status_is_single_line(manager: socket.socket) -> None:
    systemd.status("GPU is\nREADY=1 lost")
    assert received(manager) == ["STATUS=GPU is READY=1 lost"]


def test_watchdog_and_stopping_are_sent(manager: socket.socket) -> None:
    systemd.watchdog()
    systemd.stopping()
    assert [received(manager), received(manager)] == [["WATCHDOG=1"], ["STOPPING=1"]]


def test_reloading_sends_monotonic_time(manager: socket.socket) -> None:
    systemd.reloading()
    first, second = received(manager)
    assert first == "RELOADING=1"
    assert re.fullmatch(r"MONOTONIC_USEC=[0-9]+", second)


def test_ready_without_service_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.ready()


def test_send_failure_is_logged(manager: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    manager.close()
    systemd.watchdog()
    assert "cannot notify" in caplog.text


def fill_queue() -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender,
        contextlib.suppress(BlockingIOError),
    ):
        while True:
            sender.sendto(b"STATUS=of another service", os.environ["NOTIFY_SOCKET"])


def test_full_queue_does_not_block(
    manager: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "SEND_TIMEOUT_SECONDS", 120.0)
    fill_queue()
    started = time.monotonic()
    systemd.watchdog()
    systemd.status("healthy")
    assert time.monotonic() - started < systemd.SEND_TIMEOUT_SECONDS
    assert "cannot notify" in caplog.text
    monkeypatch.setattr(systemd, "SEND_TIMEOUT_SECONDS", 0.5)
    started = time.monotonic()
    systemd.ready()
    assert time.monotonic() - started < 120


def test_ready_waits_for_full_queue(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "SEND_TIMEOUT_SECONDS", 120.0)
    fill_queue()
    thread = threading.Thread(target=systemd.ready)
    thread.start()
    while (lines := received(manager)) != ["READY=1"]:
        assert lines == ["STATUS=of another service"]
    thread.join()


def test_abstract_socket_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"healthd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        systemd.watchdog()
        assert received(listener) == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    ("usec", "pid", "seconds"),
    [
        ("180000000", None, 180.0),
        ("500000", "ours", 0.5),
        ("500000", "1", None),  # meant for the parent process
        (None, None, None),
    ],
)
def test_watchdog_seconds_applies_only_to_own_pid(
    monkeypatch: pytest.MonkeyPatch, usec: str | None, pid: str | None, seconds: float | None
) -> None:
    for name, value in (("WATCHDOG_USEC", usec), ("WATCHDOG_PID", str(os.getpid()) if pid == "ours" else pid)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert systemd.watchdog_seconds() == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "1s", "1_0", "٣"])
def test_watchdog_seconds_rejects_invalid_value(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", text)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    with pytest.raises(ValueError, match=r'^WATCHDOG_USEC: must be a number of microseconds, got ".*"$'):
        systemd.watchdog_seconds()


def parse_entry(data: bytes) -> dict[str, bytes]:
    """Return the fields of an entry as journald reads them."""
    fields = {}
    while data:
        line, _, remaining = data.partition(b"\n")
        name, separator, value = line.partition(b"=")
        if separator:
            data = remaining
        else:
            size = int.from_bytes(remaining[:8], "little")
            value, data = remaining[8 : 8 + size], remaining[9 + size :]
        fields[name.decode()] = value
    return fields


@given(st.dictionaries(st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True), st.text()))
def test_journal_entry_is_read_back(fields: dict[str, str]) -> None:
    parsed = parse_entry(journal_entry(fields))
    assert parsed == {name: value.encode("utf-8", "replace") for name, value in fields.items()}


def test_journal_sender_does_not_block_on_full_queue(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        send = systemd.JournalSender(str(tmp_path / "journal"))
        sent_count = 0
        while not send.lost:  # a blocking sender would hang here
            send("a line" * 1000)
            sent_count += 1
        send("one more")
        lost = send.lost
        assert lost == 2
        for _ in range(sent_count - 1):
            journald.recv(1 << 16)
        send("the journal is back")
        assert parse_entry(journald.recv(1 << 16))["MESSAGE"] == (
            b"the journal is back (2 earlier log lines lost: the journal did not accept them)"
        )
        assert send.lost == 0


def test_journal_sender_without_journal_counts_lost_line(tmp_path: Path) -> None:
    send = systemd.JournalSender(str(tmp_path / "journal"))
    send("no journal")
    assert send.lost == 1


def test_log_record_has_priority_and_fields(tmp_path: Path) -> None:
    journal = pytest.importorskip("systemd.journal")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(str(tmp_path / "journal"))
        handler = journal.JournalHandler(sender_function=systemd.JournalSender(str(tmp_path / "journal")))
        record = logging.LogRecord("healthd.agent.slurm", logging.WARNING, "slurm.py", 7, "drain %s", ("n1",), None)
        record.HEALTHD_CODE = "gpu_xid/79"
        handler.handle(record)
        fields = parse_entry(journald.recv(1 << 16))
    assert (fields["MESSAGE"], fields["PRIORITY"], fields["LOGGER"]) == (b"drain n1", b"4", b"healthd.agent.slurm")
    assert fields["HEALTHD_CODE"] == b"gpu_xid/79"
    assert all(name.isupper() for name in fields)


HANDLER_CHOICE = """
import os, sys
stderr = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{stderr.st_dev}:{stderr.st_ino + int(sys.argv[1])}"
from healthd.agent.reporting import systemd
print(type(systemd.log_handler()).__name__, "systemd" in sys.modules)
"""


@pytest.mark.parametrize(("shift", "expected"), [("0", "JournalHandler True"), ("1", "StreamHandler False")])
def test_log_handler_uses_journal_only_if_stderr_does(shift: str, expected: str) -> None:
    command = [sys.executable, "-c", HANDLER_CHOICE, shift]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert completed.stdout.strip() == expected


def test_log_on_terminal_is_plain_text() -> None:
    program = """
import logging
from healthd.agent.reporting import systemd
systemd.set_up_logging()
logging.info('two GPUs')
"""
    environment = {k: v for k, v in os.environ.items() if k != "JOURNAL_STREAM"}
    command = [sys.executable, "-c", program]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True, env=environment)
    assert completed.stderr == "INFO: two GPUs\n"


def test_log_handler_escapes_control_characters(capfd, monkeypatch):
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    handler = systemd.log_handler()
    name = "sh\x1b[2J\nERROR: healthd: node is fine\r\x9b1m"
    handler.emit(logging.makeLogRecord({"levelname": "WARNING", "msg": "process %s hangs", "args": (name,)}))
    assert capfd.readouterr().err == "WARNING: process sh?[2J?ERROR: healthd: node is fine??1m hangs\n"


def test_log_handler_indents_traceback(capfd, monkeypatch):
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    handler = systemd.log_handler()
    try:
        raise ValueError("a\x1b[1m\nERROR: forged")
    except ValueError as error:
        exc_info = (type(error), error, error.__traceback__)
    handler.emit(logging.makeLogRecord({"levelname": "ERROR", "msg": "dropped", "exc_info": exc_info}))
    first, *rest = capfd.readouterr().err.splitlines()
    assert first == "ERROR: dropped"
    assert len(rest) > 2
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
