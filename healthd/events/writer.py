"""Writer for the event stream, used in the worker: files and, for sites that collect events from the journal, journal
entries.

The newest file is STATE_DIR/events.jsonl, and older files are events.jsonl.1 to .3. Only the worker writes, because a
disk or journald may hang.

A line is acknowledged when it is on disk. A partial line that a kill or a full disk left behind is ended with a
newline, so that it does not damage another line.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from healthd.common import ownership
from healthd.host import journald

NAME = "events.jsonl"
FILES = 4
MAX_BYTES = 16 << 20  # maximum size of a file; only a single longer line may exceed it
TAIL_BYTES = 1 << 20  # more than the maximum size of an outbox
# Journal entries.
IDENTIFIER = "healthd-events"
PATIENCE_SECONDS = 2.0  # maximum time for all lines in one call
INFO = 6  # as in syslog(3)
ENABLED = "check_enabled"


def append(state_dir: str, lines: Sequence[str], may_repeat: bool) -> None:
    """Append either all or none of these lines durably.

    With `may_repeat`, the lines may have been written before, so lines that are already at the end of the stream are
    skipped. Raises ownership.Untrusted, and OSError with the name of the file.
    """
    with ownership.open_folder(state_dir, make_mode=0o700) as folder, _naming(state_dir):
        descriptor = _open(folder)
        try:
            recent = _recent_lines(folder, descriptor) if may_repeat else frozenset()
            data = b"".join(line + b"\n" for line in map(str.encode, lines) if line not in recent)
            if not data:
                return
            size = os.fstat(descriptor).st_size
            if size and size + len(data) > MAX_BYTES:
                _rotate(folder)
                os.close(descriptor)
                descriptor = _open(folder)
            _write(descriptor, data)
            os.fsync(folder)  # the file itself may be new
        finally:
            os.close(descriptor)


@contextmanager
def _naming(state_dir: str) -> Iterator[None]:
    """Add the full path to an OSError.

    Calls with a descriptor report no path, and calls relative to a folder only a name.
    """
    try:
        yield
    except OSError as error:
        path = os.path.join(state_dir, os.fsdecode(error.filename or NAME))
        raise OSError(error.errno, error.strerror, path) from error


def name(number: int) -> str:
    """Return the name of a stream file. File 0 is the newest."""
    return f"{NAME}.{number}" if number else NAME


def _open(folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(NAME, flags, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Is not a file", NAME)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a killed daemon's worker may still be writing
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _recent_lines(folder: int, descriptor: int) -> frozenset[bytes]:
    """Return the lines at the end of the stream, including lines from the previous file."""
    text = _end(descriptor, TAIL_BYTES)
    if len(text) < TAIL_BYTES:
        with suppress(FileNotFoundError):
            previous = os.open(name(1), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                if stat.S_ISREG(
                    os.fstat(previous).st_mode
                ):  # any other file type has no lines from healthd, and _rotate reports it
                    text = _end(previous, TAIL_BYTES - len(text)) + b"\n" + text
            finally:
                os.close(previous)
    return frozenset(text.split(b"\n"))


def _end(descriptor: int, limit: int) -> bytes:
    start = max(os.fstat(descriptor).st_size - limit, 0)
    pieces = []
    while piece := os.pread(descriptor, limit, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _rotate(folder: int) -> None:
    """Rename each file to the next number, up to the first unused number. No file is lost if the process is killed in
    between.
    """
    free = next((n for n in range(1, FILES) if not _exists(folder, name(n))), FILES - 1)
    for number in reversed(range(free)):
        with suppress(FileNotFoundError):
            os.rename(name(number), name(number + 1), src_dir_fd=folder, dst_dir_fd=folder)


def _exists(folder: int, path: str) -> bool:
    """Return True if the file exists. Raises OSError for a folder, which a file cannot replace."""
    try:
        mode = os.lstat(path, dir_fd=folder).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return True


def _write(descriptor: int, data: bytes) -> None:
    """Write either all of the data or nothing to disk."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fdatasync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


# --- the journal: `journalctl SYSLOG_IDENTIFIER=healthd-events HEALTHD_EVENT=opened` finds the entries


def send_to_journal(lines: Iterable[str], path: str = journald.SOCKET) -> int:
    """Send each line as a journal entry. Return the number of lines that journald did not accept.

    Successive check_enabled lines, of which there are dozens when healthd starts, become one entry.
    """
    until, lost = time.monotonic() + PATIENCE_SECONDS, 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for event, same_event in itertools.groupby(map(json.loads, lines), key=lambda line: str(line.get("event"))):
            group = list(same_event)
            entries = [_enabled(group)] if event == ENABLED and len(group) > 1 else list(map(_entry, group))
            for fields in entries:
                sender.settimeout(max(until - time.monotonic(), 0.0))
                try:
                    sender.sendto(journald.journal_entry(fields), path)
                except OSError:
                    lost += len(group) // len(entries)
    return lost


def _enabled(group: list[dict[str, Any]]) -> dict[str, object]:
    """Return one entry for several check_enabled lines. Their fields are only in the stream's file."""
    names = ", ".join(f"{line.get('check')} {line.get('instance') or ''}".strip() for line in group)
    message = f"{ENABLED}: {len(group)} checks: {names}"
    return {"MESSAGE": message, "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, "HEALTHD_EVENT": ENABLED}


def _entry(line: Mapping[str, Any]) -> dict[str, object]:
    """Return the journal entry for a line.

    The fields are named HEALTHD_NAME. Texts are unchanged, and ids are separated by blanks.
    """
    fields = {f"HEALTHD_{name.upper()}": _text(value) for name, value in line.items()}
    return {"MESSAGE": _summary(line), "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, **fields}


def _summary(line: Mapping[str, Any]) -> str:
    """Return the message for a line, such as "opened gpu_xid/79 0000:1b:00.0: Xid 79: ..."."""
    subject = " ".join(
        str(line[name]) for name in ("event", "stage", "check", "code", "subject", "job") if line.get(name)
    )
    why = next((str(line[name]) for name in ("error", "message", "text", "reason", "why") if line.get(name)), "")
    return f"{subject}: {why}" if why else subject


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return "" if value is None else json.dumps(value, separators=(",", ":"))
