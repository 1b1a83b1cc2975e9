"""Follow a file or a FIFO with kernel lines (a syslog file, a test, the demo)."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Annotated

from msgspec import Meta, ValidationError, convert, to_builtins

from healthd.agent.kernel_log.prefix import Stripped, strip_prefix
from healthd.agent.kernel_log.repeats import BULK_BYTES, count_repeats
from healthd.agent.kernel_log.source import LINES_PER_READ, Cursor, RawLine, Source
from healthd.common.values import Value

CHUNK = 256 << 10
CHUNKS_PER_READ = 16
MAX_LINE = 16 << 10  # bytes; a longer line is truncated
FINGERPRINT = 256  # bytes before the read offset that must not change
ROTATED_SECONDS = 600.0  # how long a writer may still write to a rotated file
MAX_FILES = 3
BOOT_LINES = ("Linux version ", "Command line: ", "Booting Linux on ")  # Linux, start_kernel() and setup_arch()

IN_MODIFY, IN_MOVED_TO, IN_CREATE = 0x2, 0x80, 0x100
IN_MOVE_SELF, IN_UNMOUNT, IN_IGNORED = 0x800, 0x2000, 0x8000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the following name


class _Cursor(Value, frozen=True):
    """Cursor. `files` contains (inode, offset, fingerprint, skipping) for each open file, as in Tail."""

    boot_id: str
    files: tuple[tuple[int, Annotated[int, Meta(ge=0)], int, bool], ...]


class FollowedFile(Source):
    """A log file, followed by its path even after rotation or truncation. The file need not exist yet.

    The first start reads the file from its beginning, as history. Unread lines from an earlier boot are history too,
    because the reboot ended their faults. The earlier boot's lines end at the first line that must be from this boot. A
    rotated file is still read for a while, because its writer may not have noticed the rotation. inotify signals new
    data. On file systems without inotify (NFS), new data is read in the caller's rounds.
    """

    def __init__(
        self,
        path: str,
        cursor: Cursor,
        accept_injected: bool = False,
        now: Callable[[], float] = time.time,
        boot_id: str = "",
    ) -> None:
        self._path = path
        self._accept_injected = accept_injected
        self._now = now
        self._why_missing = "does not exist yet"
        self._inotify = Inotify(os.path.dirname(os.path.abspath(path)))
        self._tails: list[Tail] = []
        try:
            previous = convert(cursor, _Cursor)
            self._is_first_start = False
        except ValidationError:  # no cursor, or a cursor from another source
            previous, self._is_first_start = _Cursor(boot_id, ()), True
        self._boot_id = boot_id
        self._lines_boot_id = previous.boot_id  # boot of the next lines, until the first line from this boot
        try:
            for file in previous.files[:MAX_FILES]:
                self._resume(*file)
            self._open_new_file(old=True)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int | None:
        return self._inotify.fd

    @property
    def cursor(self) -> Cursor:
        files = tuple((tail.inode, tail.offset, tail.fingerprint, tail.skipping) for tail in self._tails)
        cursor: Cursor = to_builtins(_Cursor(self._lines_boot_id, files))
        return cursor

    def close(self) -> None:
        for tail in self._tails:
            tail.close()
        self._inotify.close()

    @property
    def missing(self) -> str:
        return "" if self._tails else f"{self._path} {self._why_missing}"

    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        self._inotify.drain()
        lines: list[RawLine] = []
        self.pending = False
        self._open_new_file()
        try:
            for tail in self._tails:
                self.pending = self._read_tail(tail, lines, limit)
                if self.pending:
                    break
        except OSError:
            if not lines:
                raise
            self.pending = True  # return these lines first, because the cursor points after them
        if not self.pending:
            lines += self._close_rotated()
            self._lines_boot_id = self._boot_id  # the file's initial content has been read
        return lines

    def _read_tail(self, tail: Tail, lines: list[RawLine], limit: int) -> bool:
        """Read one file. Return True if the file has more data than one call may read."""
        if tail.is_truncated():
            self._notes += (f"{self._path} was truncated; reading it again from its beginning",)
            self.rotations += 1
            tail.rewind()
        more = False
        try:
            for _ in range(CHUNKS_PER_READ):
                found, old, more = tail.read(limit - len(lines))
                self.malformed += sum(is_cut(text) for text, _count in found)
                lines += [line for text, count in found if (line := self._line(text, old, tail.modified, count))]
                if not more:
                    break
        finally:
            tail.take_fingerprint()
        return more

    def _line(self, data: bytes, old: bool, modified: float = 0.0, lines: int = 1) -> RawLine | None:
        now = self._now()
        found = strip_prefix(data.decode("utf-8", "replace"), now, self._accept_injected)
        if found is None or not found.text:
            return None
        at = line_time(found, now, modified) if old else now
        history = old and (self._is_first_start or self._is_of_earlier_boot(found, now))
        return RawLine(at, found.text, history, _usec(found), lines=lines * found.lines, unread=found.unread)

    def _is_of_earlier_boot(self, found: Stripped, now: float) -> bool:
        """Return True if a line is from an earlier boot. Call this method for all old lines, in order.

        This boot's lines begin with the kernel's first lines, or with a date after this boot started.
        """
        if self._lines_boot_id != self._boot_id:
            booted = now - time.clock_gettime(time.CLOCK_BOOTTIME)
            if found.text.startswith(BOOT_LINES) or (found.epoch is not None and found.epoch >= booted):
                self._lines_boot_id = self._boot_id
        return self._lines_boot_id != self._boot_id

    def _open_new_file(self, old: bool = False) -> None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            self._why_missing = "does not exist yet"
            return
        except OSError as error:
            self._why_missing = f"cannot be read: {error.strerror or error}"
            return
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "not a regular file")  # if the path is now a FIFO, it is reopened as a FIFO
        if any(tail.inode == status.st_ino for tail in self._tails):
            os.close(fd)
            return
        if self._tails:
            self._notes += (f"{self._path} was rotated",)
            self.rotations += 1
            self._tails[-1].rotated_at = self._tails[-1].rotated_at or self._now()
        self._add(Tail(fd, old_bytes=status.st_size if old else 0))

    def _add(self, tail: Tail) -> None:
        self._tails.append(tail)
        self._inotify.watch(tail.fd)

    def _resume(self, inode: int, offset: int, fingerprint: int, skipping: bool) -> None:
        """Reopen the cursor's file, even if rotation has renamed it."""
        for path in _siblings(self._path, inode):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            size = os.fstat(fd).st_size
            tail = Tail(fd, offset, fingerprint, skipping, old_bytes=size)
            if tail.is_truncated():
                tail.close()
                continue
            if os.path.abspath(path) != os.path.abspath(self._path):
                tail.rotated_at = self._now()
            self._add(tail)
            return
        self.overruns += 1
        self._notes += (f"{self._path} is not the file that was last read; lines may be missing",)

    def _close_rotated(self) -> Iterator[RawLine]:
        """Close files that were rotated long ago. Yield a last line even if it has no newline."""
        now = self._now()
        while len(self._tails) > 1 and (
            len(self._tails) > MAX_FILES or now - self._tails[0].rotated_at > ROTATED_SECONDS
        ):
            tail = self._tails.pop(0)
            if (text := tail.unfinished_line()) and (line := self._line(text, False)):
                yield line
            tail.close()


class Fifo(Source):
    """A FIFO. It is opened for writing too, so that the reader does not get an end of file when writers come and go.

    A line's time is the time at which it was read, and no line is history. A FIFO cannot be read again, so it has no
    cursor. A replaced FIFO, which no writer uses any more, is treated as an error, so that the new file is opened.
    """

    def __init__(self, path: str, accept_injected: bool = False, now: Callable[[], float] = time.time) -> None:
        self._accept_injected = accept_injected
        self._now = now
        self._data = b""
        self._skipping = False
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def read(self, limit: int = LINES_PER_READ) -> list[RawLine]:
        lines: list[RawLine] = []
        self.pending = False
        for _ in range(CHUNKS_PER_READ):
            found, used, self._skipping = counted_lines(self._data, limit - len(lines), self._skipping)
            self._data = self._data[used:]
            self.malformed += sum(is_cut(text) for text, _count in found)
            lines += [line for text, count in found if (line := self._line(text, count))]
            if len(lines) >= limit:
                self.pending = True
                break
            try:
                self._data += os.read(self._fd, CHUNK)
            except BlockingIOError:
                if not lines and self._is_replaced():
                    raise OSError(errno.ESTALE, "it was removed or replaced") from None
                break
            except OSError:
                if lines:
                    break  # return these lines first
                raise
        else:
            self.pending = True
        return lines

    def _line(self, data: bytes, lines: int) -> RawLine | None:
        now = self._now()
        found = strip_prefix(data.decode("utf-8", "replace"), now, self._accept_injected)
        if found is None or not found.text:
            return None
        return RawLine(now, found.text, usec=_usec(found), lines=lines * found.lines, unread=found.unread)

    def _is_replaced(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError:
            return True

    def close(self) -> None:
        os.close(self._fd)


class Tail:
    """An open file and the offset up to which its lines were returned."""

    def __init__(
        self, fd: int, offset: int = 0, fingerprint: int = 0, skipping: bool = False, old_bytes: int = 0
    ) -> None:
        status = os.fstat(fd)
        self.fd = fd
        self.inode = status.st_ino
        self.modified = status.st_mtime
        self.offset = offset
        self.fingerprint = fingerprint
        self.skipping = skipping  # the offset is inside a line that is too long
        self.old_bytes = old_bytes  # the file's size when it was opened: lines before that size may be old
        self.rotated_at = 0.0

    def read(self, limit: int) -> tuple[list[tuple[bytes, int]], bool, bool]:
        """Return (complete lines with their counts, whether they are old, whether more can be read immediately).

        A count is the number of identical lines. Lines are old if they were in the file when it was opened.
        """
        if limit <= 0:
            return [], False, True
        old_left = self.old_bytes - self.offset
        data = os.pread(self.fd, min(CHUNK, old_left) if old_left > 0 else CHUNK, self.offset)
        if data[:1] == b"\0" and not self.skipping:
            # A file that was truncated under a writer without O_APPEND begins with a hole, which is not part of a line.
            hole = len(data)
            data = data.lstrip(b"\0")
            self.offset += hole - len(data)
            if not data:
                return [], False, True
        if old_left > 0:  # each old line has its own time
            found, used, self.skipping = split_lines(data, limit, self.skipping)
            lines = [(text, 1) for text in found]
        else:
            lines, used, self.skipping = counted_lines(data, limit, self.skipping)
        self.offset += used
        if used == 0 and old_left > 0:  # the last line was incomplete when the file was opened
            self.old_bytes = 0
            return [], False, True
        return lines, old_left > 0, used > 0

    def unfinished_line(self) -> bytes:
        return b"" if self.skipping else os.pread(self.fd, MAX_LINE, self.offset)

    def is_truncated(self) -> bool:
        """Return True if the bytes before the offset have changed because the file was truncated or its inode was
        reused."""
        return self.offset > 0 and self._fingerprint() != self.fingerprint

    def rewind(self) -> None:
        self.offset, self.fingerprint, self.skipping, self.old_bytes = 0, 0, False, 0

    def take_fingerprint(self) -> None:
        self.fingerprint = self._fingerprint()

    def _fingerprint(self) -> int:
        length = min(self.offset, FINGERPRINT)
        data = os.pread(self.fd, length, self.offset - length)
        return zlib.crc32(data) if len(data) == length else -1

    def close(self) -> None:
        os.close(self.fd)


def counted_lines(data: bytes, limit: int, skipping: bool) -> tuple[list[tuple[bytes, int]], int, bool]:
    """Split lines as split_lines() does, and count the repeats of each line.

    Repeats are counted only if `data` is large. In that case, either all of `data` is used or none.
    """
    end = data.rfind(b"\n") + 1
    if end >= BULK_BYTES and not skipping:
        first, remainder = count_repeats(data[:end])
        if first:
            other_lines, used, _ = split_lines(remainder, limit - len(first), False)
            if used == len(remainder):
                return [*first, *((text, 1) for text in other_lines)], end, False
    found, used, skipping = split_lines(data, limit, skipping)
    return [(text, 1) for text in found], used, skipping


def is_cut(line: bytes) -> bool:
    """Return True if the line was truncated because it is too long for a kernel line."""
    return len(line) >= MAX_LINE


def split_lines(data: bytes, limit: int, skipping: bool) -> tuple[list[bytes], int, bool]:
    """Return (lines, bytes used, whether the rest of an overlong line must still be skipped).

    At most `limit` lines are returned. A line without its newline waits, unless it is longer than MAX_LINE.
    """
    lines: list[bytes] = []
    offset = 0
    while len(lines) < limit:
        end = data.find(b"\n", offset)
        if end < 0:
            if skipping:
                return lines, len(data), True
            if len(data) - offset > MAX_LINE:
                return [*lines, data[offset : offset + MAX_LINE]], len(data), True
            break
        if not skipping:
            lines.append(data[offset : min(end, offset + MAX_LINE)])
        skipping = False
        offset = end + 1
    return lines, offset, skipping


def _usec(found: Stripped) -> int | None:
    return round(found.uptime * 1e6) if found.uptime is not None else None


def line_time(found: Stripped, now: float, modified: float) -> float:
    """Return an old line's time (epoch seconds) from its prefix.

    If the prefix has no time or an impossible time, return the file's modification time.
    """
    uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    if found.epoch is not None:
        return min(found.epoch, now)
    if found.uptime is not None and found.uptime <= uptime:
        return now - uptime + found.uptime
    return min(modified, now)


def _siblings(path: str, inode: int) -> list[str]:
    """Return files in the same directory that have this inode and a name beginning with this file's name
    ("kern.log.1")."""
    folder, name = os.path.split(os.path.abspath(path))
    with os.scandir(folder) as entries:
        return [e.path for e in entries if e.name.startswith(name) and e.inode() == inode and e.is_file()]


class Inotify:
    """A descriptor that becomes readable when a watched file grows or a file appears in `folder`.

    The standard library has no binding for inotify. If the kernel's limits prevent a watch, `fd` is None.
    """

    def __init__(self, folder: str) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.fd: int | None = fd if fd >= 0 else None
        self._folder = -1
        if self.fd is not None:
            self._folder = self._add(folder, IN_CREATE | IN_MOVED_TO | IN_MOVE_SELF)
        if self.fd is not None and self._folder < 0:
            error = ctypes.get_errno()
            os.close(self.fd)
            self.fd = None
            if not os.path.isdir(folder):
                raise OSError(error, os.strerror(error), folder)

    def watch(self, fd: int) -> None:
        """Watch an open file, even if it is renamed."""
        if self.fd is not None:
            self._add(f"/proc/self/fd/{fd}", IN_MODIFY)

    def drain(self) -> None:
        """Discard pending events. Raises OSError if the folder is gone or was replaced: a new file would be missed."""
        if self.fd is None:
            return
        try:
            while data := os.read(self.fd, 65536):
                offset = 0
                while offset < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, offset)
                    offset += _EVENT.size + length
                    if watch == self._folder and mask & (IN_IGNORED | IN_UNMOUNT | IN_MOVE_SELF):
                        raise OSError(errno.ESTALE, "its directory was removed or moved away")
        except BlockingIOError:
            pass

    def _add(self, path: str, mask: int) -> int:
        return int(self._libc.inotify_add_watch(self.fd, os.fsencode(path), ctypes.c_uint32(mask)))

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
