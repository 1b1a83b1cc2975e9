"""Notifications to the service manager, and logging to the journal under systemd or otherwise to stderr.

systemd-python is imported only if JOURNAL_STREAM is set. Protocols: sd_notify(3), sd_watchdog_enabled(3),
host/journald.py.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from healthd.common.text import is_decimal, printable, regex
from healthd.host import journald
from healthd.host.journald import journal_entry, stderr_is_the_journal

IDENTIFIER = "healthd"
SEND_TIMEOUT_SECONDS = 1.0  # timeout for messages that are sent once and must arrive; others do not wait


def ready(status: str = "") -> None:
    """Notify the service manager that the start, or a reload announced by `reloading`, has finished."""
    _notify("READY=1", f"STATUS={status}" if status else "", timeout_seconds=SEND_TIMEOUT_SECONDS)


def status(text: str) -> None:
    """Set the status line in `systemctl status`."""
    _notify(f"STATUS={text}")


def reloading() -> None:
    _notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(status: str = "") -> None:
    _notify("STOPPING=1", f"STATUS={status}" if status else "")


def watchdog() -> None:
    """Send a keep-alive message. Call this more often than every `watchdog_seconds`."""
    _notify("WATCHDOG=1")


def is_managed() -> bool:
    """Return True if a service manager started this process and reads its notifications."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def watchdog_seconds() -> float | None:
    """Return the time in seconds without a call to `watchdog` after which systemd aborts this process, or None without
    a watchdog.

    Raises ValueError if the service manager's value is invalid.
    """
    text, pid = os.environ.get("WATCHDOG_USEC"), os.environ.get("WATCHDOG_PID")
    if text is None or (pid is not None and pid != str(os.getpid())):
        return None
    if not (is_decimal(text) and int(text) > 0):
        raise ValueError(f'WATCHDOG_USEC: must be a number of microseconds, got "{text[:60]}"')
    return int(text) / 1e6


def _notify(*assignments: str, timeout_seconds: float = 0.0) -> None:
    """Notify the service manager, if there is one.

    If the manager does not read its socket, this function neither fails nor waits. libsystemd's sd_notify() would wait
    forever if the manager's queue is full.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # A line break would start another assignment.
    lines = (printable(" ".join(line.split())) for line in assignments if line)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(timeout_seconds)
            sender.sendto("\n".join(lines).encode("utf-8", "replace"), regex("^@").sub("\0", path))
    except OSError as error:
        logging.getLogger(__name__).warning("cannot notify the service manager: %s", error)


def set_up_logging(level: int = logging.INFO) -> None:
    """Send all further log messages to one destination."""
    logging.basicConfig(level=level, handlers=[log_handler()], force=True)


def log_handler() -> logging.Handler:
    """Return a handler for the journal (with priority and fields) if stderr is connected to it, otherwise for the
    current stderr.
    """
    if stderr_is_the_journal():
        from systemd import journal

        handler: logging.Handler = journal.JournalHandler(sender_function=JournalSender(), SYSLOG_IDENTIFIER=IDENTIFIER)
        handler.setFormatter(OneLine("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(OneLine("%(levelname)s: %(message)s"))
    return handler


class OneLine(logging.Formatter):
    """Formatter that prints each message as one line, without control characters.

    Messages may contain process names with line breaks or control characters. Without this formatter, a log line could
    begin with a user's text. A traceback keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).splitlines())


class JournalSender:
    """Sends journal entries without ever waiting.

    libsystemd's own sender waits while journald does not read, for example because of a failing disk. Rejected entries
    are counted, and the next accepted entry reports the count.
    """

    def __init__(self, path: str = journald.SOCKET) -> None:
        self._path = path
        self.lost = 0

    def __call__(self, text: str, /, **fields: object) -> None:
        if self.lost:
            text += f" ({self.lost} earlier log lines lost: the journal did not accept them)"
        entry = journal_entry({"MESSAGE": text, **fields})
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(entry, self._path)
        except OSError:  # queue full, no journald, or entry too long: there is no other place to report it
            self.lost += 1
        else:
            self.lost = 0
