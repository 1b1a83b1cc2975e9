"""Data sources for a Host: this machine, or a tree of files below a root. A third source, a recording, is in
recording.py.

Paths are absolute, as on the node. OSErrors are the kernel's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from healthd.common.ownership import Untrusted
from healthd.host.program import ProgramResult, find_program, run_program

MAX_FILE_BYTES = 16 << 20
READ_BYTES = 64 << 10
TIMEDATECTL_COMMAND = ("timedatectl", "show", "--property=NTPSynchronized", "--value")
TIMEDATECTL_SECONDS = 5.0


class FileStat(NamedTuple):
    """Result of stat(2). `mode` includes the type bits. `device` is a device node's (major, minor), or (0, 0)."""

    mode: int
    uid: int
    gid: int  # no check reads it; recordings contain it
    device: tuple[int, int]


class FileSystem(NamedTuple):
    """Space that unprivileged users may still use. File systems that do not count inodes (btrfs) have 0 inodes."""

    size_bytes: int
    available_bytes: int
    inodes: int
    inodes_available: int


class KernelClock(NamedTuple):
    """The result of adjtimex(2): whether the clock is disciplined, and its estimated and maximum error.

    Both errors are None if only the state is known, from systemd, because this process may not query the kernel.
    """

    synchronised: bool
    offset_seconds: float | None
    max_error_seconds: float | None


class Tree:
    """Files below `root`, or on this machine if `root` is "". A tree has no programs and no clock, so `run` and `clock`
    return None. With `anywhere`, one of this machine's programs is run regardless of the root.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def read(self, path: str) -> bytes:
        # Not open(), because a round reads a thousand small files, and creating an object takes longer than reading.
        file = os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Read in pieces, because /proc/sys answers a single read of 4 MiB or more with ENOMEM.
            data = piece = os.read(file, READ_BYTES)
            if path.startswith("/sys/") and len(piece) < READ_BYTES:
                return data  # sysfs returns an attribute as a whole, and a round reads a thousand attributes
            while piece and len(data) < MAX_FILE_BYTES:
                piece = os.read(file, READ_BYTES)
                data += piece
            return data
        finally:
            os.close(file)

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, in no particular order."""
        return os.listdir(self._root + path)

    def scan(self, path: str) -> list[tuple[str, int]]:
        """Return (name, inode number) for each entry in a directory."""
        with os.scandir(self._root + path) as entries:
            return [(entry.name, entry.inode()) for entry in entries]

    def readlink(self, path: str) -> str:
        return os.readlink(self._root + path)

    def stat(self, path: str) -> FileStat:
        found = os.stat(self._root + path)
        device = (os.major(found.st_rdev), os.minor(found.st_rdev))
        return FileStat(found.st_mode, found.st_uid, found.st_gid, device)

    def statvfs(self, path: str) -> FileSystem:
        found = os.statvfs(self._root + path)
        block = found.f_frsize or found.f_bsize
        return FileSystem(found.f_blocks * block, found.f_bavail * block, found.f_files, found.f_favail)

    def run(
        self, argv: Sequence[str], seconds: float, environment: Mapping[str, str], anywhere: bool
    ) -> ProgramResult | None:
        """Run a program. Return None if the program is missing or would describe this machine instead of the tree."""
        if self._root and not anywhere:
            return None
        try:
            return run_program(argv, seconds, environment, find_program(argv[0]))
        except FileNotFoundError:
            return None
        except Untrusted as error:  # raise one of Python's own errors, which a recording can contain
            raise PermissionError(f"refused: {error}") from None

    def clock(self) -> KernelClock | None:
        if self._root:
            return None
        try:
            return adjtimex()
        except PermissionError:  # healthd.service denies all calls that may set the clock
            clock = self._clock_from_systemd()
            if clock is None:
                raise
            return clock

    def _clock_from_systemd(self) -> KernelClock | None:
        """Query systemd-timedated, which calls adjtimex(2). NTPSynchronized means that the maximum error is below 16 s,
        regardless of STA_UNSYNC (systemd, src/basic/time-util.c, ntp_synced). Return None without an answer.
        """
        result = self.run(TIMEDATECTL_COMMAND, TIMEDATECTL_SECONDS, {}, False)
        answer = result.stdout.strip() if result is not None and result.status == 0 else ""
        return KernelClock(answer == "yes", None, None) if answer in ("yes", "no") else None


def adjtimex() -> KernelClock:
    """Read the kernel's clock with adjtimex(2) (modes 0) and the 64-bit Linux ABI's struct timex. Raises OSError."""
    import ctypes

    class Timex(ctypes.Structure):
        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),  # microseconds or, with STA_NANO, nanoseconds
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),  # microseconds
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_char * 256),  # space for all further fields
        )

    timex = Timex()
    if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "adjtimex")
    sta_unsync, sta_nano = 0x0040, 0x2000
    unit = 1e-9 if timex.status & sta_nano else 1e-6
    return KernelClock(not timex.status & sta_unsync, timex.offset * unit, timex.maxerror * 1e-6)
