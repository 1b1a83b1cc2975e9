"""What the service manager is told, and where the log goes: to systemd if it started us, else to plain stderr.

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
PATIENCE_SECONDS = 1.0  # for messages that are sent once and must arrive; no other waits


def ready(status: str = "") -> None:
    """Start-up, or a reload that `reloading` announced, is over."""
    _notify("READY=1", f"STATUS={status}" if status else "", patience_seconds=PATIENCE_SECONDS)


def status(text: str) -> None:
    """One line for `systemctl status`."""
    _notify(f"STATUS={text}")


def reloading() -> None:
    _notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(status: str = "") -> None:
    _notify("STOPPING=1", f"STATUS={status}" if status else "")


def watchdog() -> None:
    """We live. Due more often than every `watchdog_seconds`."""
    _notify("WATCHDOG=1")


def is_managed() -> bool:
    """Whether a service manager started us and listens to us."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def watchdog_seconds() -> float | None:
    """The time without `watchdog` after which systemd aborts us; None if nobody watches this process.

    ValueError if the service manager wrote nonsense.
    """
    text, pid = os.environ.get("WATCHDOG_USEC"), os.environ.get("WATCHDOG_PID")
    if text is None or (pid is not None and pid != str(os.getpid())):
        return None
    if not (is_decimal(text) and int(text) > 0):
        raise ValueError(f'WATCHDOG_USEC: must be a number of microseconds, got "{text[:60]}"')
    return int(text) / 1e6


def _notify(*assignments: str, patience_seconds: float = 0.0) -> None:
    """Tell the service manager, if there is one. If it does not listen, we neither stop nor wait: libsystemd's own
    sd_notify() waits for ever if the manager's queue is full."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    # A line break would begin another assignment.
    lines = (printable(" ".join(line.split())) for line in assignments if line)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(patience_seconds)
            sender.sendto("\n".join(lines).encode("utf-8", "replace"), regex("^@").sub("\0", path))
    except OSError as error:
        logging.getLogger(__name__).warning("the service manager does not listen: %s", error)


def set_up_logging(level: int = logging.INFO) -> None:
    """Send everything that the program logs to one place from now on."""
    logging.basicConfig(level=level, handlers=[log_handler()], force=True)


def log_handler() -> logging.Handler:
    """A handler for the journal, with priority and fields, if stderr leads there; else for stderr as it is now."""
    if stderr_is_the_journal():
        from systemd import journal

        handler: logging.Handler = journal.JournalHandler(sender_function=JournalSender(), SYSLOG_IDENTIFIER=IDENTIFIER)
        handler.setFormatter(OneLine("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(OneLine("%(levelname)s: %(message)s"))
    return handler


class OneLine(logging.Formatter):
    """A message is one line without control characters, whatever a process's name in it holds: what begins a line of
    the log is healthd's. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).splitlines())


class JournalSender:
    """Sends entries to journald without ever waiting for it.

    libsystemd's own sender waits when journald does not read, which a journald on a dying disk does not. Entries
    that are not taken are counted, and the next one that is taken says how many.
    """

    def __init__(self, path: str = journald.SOCKET) -> None:
        self._path = path
        self.lost = 0

    def __call__(self, text: str, /, **fields: object) -> None:
        if self.lost:
            text += f" ({self.lost} earlier log lines lost: the journal did not take them)"
        entry = journal_entry({"MESSAGE": text, **fields})
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(entry, self._path)
        except OSError:  # queue full, no journald, entry too long: there is nobody left to tell
            self.lost += 1
        else:
            self.lost = 0
