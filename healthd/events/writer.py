"""The event stream as the worker writes it: files and, for sites that collect it, entries of the journal.

The files are STATE_DIR/events.jsonl, and older ones as events.jsonl.1 to .3. Only the worker writes: a disk or journald
may hang.

A line is acknowledged when it is on the disk. What a kill or a full disk leaves of a line is closed with an end of its
own, so that it spoils no other.
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
MOST_BYTES = 16 << 20  # of a file; only a line that is longer alone has more
LOOK_BACK_BYTES = 1 << 20  # more than an outbox holds
# Of the entries in the journal.
IDENTIFIER = "healthd-events"
PATIENCE_SECONDS = 2.0  # for all lines of a call together
INFO = 6  # as in syslog(3)
ENABLED = "check_enabled"


def append(state_dir: str, lines: Sequence[str], again: bool) -> None:
    """Write these lines behind the others, durably, all or none. `again`: they may have been written before, and those
    that stand at the end already are left out. Raises ownership.Untrusted, OSError that names the file."""
    with ownership.folder(state_dir, make_mode=0o700) as folder, _naming(state_dir):
        descriptor = _open(folder)
        try:
            known = _newest(folder, descriptor) if again else frozenset()
            data = b"".join(line + b"\n" for line in map(str.encode, lines) if line not in known)
            if not data:
                return
            size = os.fstat(descriptor).st_size
            if size and size + len(data) > MOST_BYTES:
                _rotate(folder)
                os.close(descriptor)
                descriptor = _open(folder)
            _write(descriptor, data)
            os.fsync(folder)  # the file itself may be new
        finally:
            os.close(descriptor)


@contextmanager
def _naming(state_dir: str) -> Iterator[None]:
    """An error names the file by its path: a call by a descriptor knows none, one in a folder only its end."""
    try:
        yield
    except OSError as error:
        path = os.path.join(state_dir, os.fsdecode(error.filename or NAME))
        raise OSError(error.errno, error.strerror, path) from error


def name(number: int) -> str:
    """0 is the newest file."""
    return f"{NAME}.{number}" if number else NAME


def _open(folder: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(NAME, flags, 0o600, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Is not a file", NAME)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the worker of a daemon that was killed may still write
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _newest(folder: int, descriptor: int) -> frozenset[bytes]:
    """The lines at the end of the stream, also where that is in the file before."""
    text = _end(descriptor, LOOK_BACK_BYTES)
    if len(text) < LOOK_BACK_BYTES:
        with suppress(FileNotFoundError):
            before = os.open(name(1), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                if stat.S_ISREG(os.fstat(before).st_mode):  # else it holds no line of ours, and _rotate says so
                    text = _end(before, LOOK_BACK_BYTES - len(text)) + b"\n" + text
            finally:
                os.close(before)
    return frozenset(text.split(b"\n"))


def _end(descriptor: int, most: int) -> bytes:
    start = max(os.fstat(descriptor).st_size - most, 0)
    pieces = []
    while piece := os.pread(descriptor, most, start):
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _rotate(folder: int) -> None:
    """Each file gets the next number, up to the first that is free: a kill in between costs no file."""
    free = next((n for n in range(1, FILES) if not _exists(folder, name(n))), FILES - 1)
    for number in reversed(range(free)):
        with suppress(FileNotFoundError):
            os.rename(name(number), name(number + 1), src_dir_fd=folder, dst_dir_fd=folder)


def _exists(folder: int, path: str) -> bool:
    """Raises OSError if it is a folder: no file can take its place."""
    try:
        mode = os.lstat(path, dir_fd=folder).st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return True


def _write(descriptor: int, data: bytes) -> None:
    """All of it, on the disk, or nothing of it."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fdatasync(descriptor)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


# --- the journal: `journalctl SYSLOG_IDENTIFIER=healthd-events HEALTHD_EVENT=opened` finds the entries


def send_to_journal(lines: Iterable[str], path: str = journald.SOCKET) -> int:
    """Send each line as an entry; successive check_enabled lines, which a start has by the dozen, are one entry. Return
    how many lines journald did not take."""
    until, lost = time.monotonic() + PATIENCE_SECONDS, 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for event, same in itertools.groupby(map(json.loads, lines), key=lambda said: str(said.get("event"))):
            group = list(same)
            entries = [_enabled(group)] if event == ENABLED and len(group) > 1 else list(map(_entry, group))
            for fields in entries:
                sender.settimeout(max(until - time.monotonic(), 0.0))
                try:
                    sender.sendto(journald.journal_entry(fields), path)
                except OSError:
                    lost += len(group) // len(entries)
    return lost


def _enabled(group: list[dict[str, Any]]) -> dict[str, object]:
    """Return the one entry of several check_enabled lines. Their fields are in the stream's file."""
    names = ", ".join(f"{said.get('check')} {said.get('instance') or ''}".strip() for said in group)
    message = f"{ENABLED}: {len(group)} checks: {names}"
    return {"MESSAGE": message, "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, "HEALTHD_EVENT": ENABLED}


def _entry(said: Mapping[str, Any]) -> dict[str, object]:
    """The fields of a line's entry: HEALTHD_ and the field's name; texts as they are, ids with blanks between them."""
    fields = {f"HEALTHD_{name.upper()}": _text(value) for name, value in said.items()}
    return {"MESSAGE": _words(said), "PRIORITY": INFO, "SYSLOG_IDENTIFIER": IDENTIFIER, **fields}


def _words(said: Mapping[str, Any]) -> str:
    """A line in words: "opened gpu_xid/79 0000:1b:00.0: Xid 79: ..."."""
    what = " ".join(str(said[name]) for name in ("event", "stage", "check", "code", "subject", "job") if said.get(name))
    why = next((str(said[name]) for name in ("error", "message", "text", "reason", "why") if said.get(name)), "")
    return f"{what}: {why}" if why else what


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(value)
    return "" if value is None else json.dumps(value, separators=(",", ":"))
