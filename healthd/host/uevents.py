"""What the kernel says of its devices, over netlink (lib/kobject_uevent.c): udevd need not run, and libudev is not
loaded, which the daemon would keep 1 MiB of."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

KOBJECT_UEVENT = 15  # linux/netlink.h
OF_THE_KERNEL = 1  # the group of its own messages; those of udevd have another
KERNEL = 0  # its netlink address, which no program can have
SO_RCVBUFFORCE = 33  # asm-generic/socket.h; root may go beyond net.core.rmem_max
WAITING_BYTES = 8 << 20  # of messages that wait: `udevadm trigger` makes thousands at once
MOST_BYTES = 16 << 10  # of a message: the kernel's have 4 KiB at most (UEVENT_BUFFER_SIZE and a path)


class Uevent(NamedTuple):
    """device_path: below /sys, "/devices/pci0000:00/0000:00:1f.0"."""

    action: str
    device_path: str
    subsystem: str


class Uevents:
    """From now on. Raises OSError where netlink is refused."""

    def __init__(self, waiting_bytes: int = WAITING_BYTES) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, KOBJECT_UEVENT)
        try:
            for option in (socket.SO_RCVBUF, SO_RCVBUFFORCE):  # as far as we may
                with suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, waiting_bytes)
            self._socket.bind((0, OF_THE_KERNEL))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Uevent | None:
        """The next one, None if none waits. Raises OSError: ENOBUFS where some were lost, any other where no more can
        come."""
        with suppress(BlockingIOError):
            while True:
                message, sender = self._socket.recvfrom(MOST_BYTES)
                if not message:
                    raise OSError("netlink has ended")
                if sender[0] == KERNEL and (said := parse(message)) is not None:
                    return said
        return None

    def close(self) -> None:
        self._socket.close()


def parse(message: bytes) -> Uevent | None:
    """ "remove@/devices/...", then KEY=VALUE, each ended by a zero byte. None: no such message."""
    head, *pairs = message.split(b"\0")
    fields = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    if b"@" not in head:
        return None
    return Uevent(*(os.fsdecode(fields.get(name, b"")) for name in (b"ACTION", b"DEVPATH", b"SUBSYSTEM")))
