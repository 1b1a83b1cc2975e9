"""Hot-unplug: devices that the kernel reports as removed, over netlink (lib/kobject_uevent.c).

udevd does not have to be running. libudev is not loaded, because it would take 1 MiB of the daemon's memory.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from healthd.common.guard import HOT_UNPLUG, drop
from healthd.common.model import SourceStatus
from healthd.host.inventory import pci_address

KOBJECT_UEVENT = 15  # linux/netlink.h
KERNEL_GROUP = 1  # the multicast group for the kernel's messages; udevd has a different one
KERNEL_ADDRESS = 0  # the kernel's netlink address, which a program cannot have
SO_RCVBUFFORCE = 33  # asm-generic/socket.h; root may exceed net.core.rmem_max
RECEIVE_BUFFER_BYTES = 8 << 20  # the receive buffer: `udevadm trigger` causes thousands of messages at once
MAX_MESSAGE_BYTES = 16 << 10  # per message; the kernel's have at most 4 KiB (UEVENT_BUFFER_SIZE and a path)
RETRY_SECONDS = (0.0, 1.0, 5.0, 30.0, 300.0)
SUBSYSTEMS = ("pci", "net", "infiniband", "nvme")

log = logging.getLogger("healthd")


class Uevent(NamedTuple):
    """A message from the kernel. `device_path` is a path below /sys, such as "/devices/pci0000:00/0000:00:1f.0"."""

    action: str
    device_path: str
    subsystem: str


class Uevents:
    """Receiver for the kernel's messages, from its creation on. The constructor raises OSError if netlink is not
    allowed.
    """

    def __init__(self, receive_buffer_bytes: int = RECEIVE_BUFFER_BYTES) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, KOBJECT_UEVENT)
        try:
            for option in (socket.SO_RCVBUF, SO_RCVBUFFORCE):  # SO_RCVBUFFORCE needs root
                with suppress(OSError):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, receive_buffer_bytes)
            self._socket.bind((0, KERNEL_GROUP))
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> Uevent | None:
        """Return the next message, or None if none is waiting.

        Raises OSError. ENOBUFS means that messages were lost. After any other error, no more messages arrive.
        """
        with suppress(BlockingIOError):
            while True:
                message, sender = self._socket.recvfrom(MAX_MESSAGE_BYTES)
                if not message:
                    raise OSError("the netlink socket was closed")
                if sender[0] == KERNEL_ADDRESS and (uevent := parse_uevent(message)) is not None:
                    return uevent
        return None

    def close(self) -> None:
        self._socket.close()


def parse_uevent(message: bytes) -> Uevent | None:
    """Parse "remove@/devices/..." and the KEY=VALUE pairs after it, which end with a zero byte. Return None for other
    text."""
    head, *pairs = message.split(b"\0")
    fields = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
    if b"@" not in head:
        return None
    return Uevent(*(os.fsdecode(fields.get(name, b"")) for name in (b"ACTION", b"DEVPATH", b"SUBSYSTEM")))


class HotUnplug:
    """Devices that the kernel reports as removed, over netlink. This works without udevd.

    If the socket loses messages (ENOBUFS) or fails, it is replaced at once, and after repeated failures with growing
    delays.
    """

    def __init__(
        self, open_uevents: Callable[[], Uevents] | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_uevents` raises OSError, and is None for a captured tree. No message is received before `open()`."""
        self._open_uevents = open_uevents
        self._monotonic = monotonic
        self._uevents: Uevents | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._missed = False
        self.status = SourceStatus("device_removals", up=False)

    @property
    def sources(self) -> Iterator[SourceStatus]:
        if self._open_uevents is not None:
            yield self.status

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._uevents is not None:
            yield self._uevents.fileno(), False

    @property
    def deadline(self) -> float:
        """Return the time of the next attempt to open the socket, or infinity if none is due."""
        waits = self._open_uevents is not None and self._uevents is None
        return self._retry_at if waits else float("inf")

    def read(self) -> list[str]:
        """Return the PCI addresses of devices removed since the last call. For a port or disk, this is the card's
        address. An address of "" means that removals may have been missed.
        """
        if self.deadline <= self._monotonic():
            self._open()
        removed = set()
        try:
            while self._uevents is not None and (uevent := self._uevents.read()) is not None:
                if uevent.action == "remove" and uevent.subsystem in SUBSYSTEMS:
                    removed.add(pci_address(uevent.device_path))
        except Exception as error:
            if not isinstance(error, OSError):
                drop(HOT_UNPLUG, error)
            self._lost(error)
            if self.deadline <= self._monotonic():
                self._open()
        removed.discard("")  # a device that does not belong to a PCI device
        if self._uevents is not None:
            self._failures = 0 if not self._missed else self._failures
            self.status = replace(self.status, last_read=time.time())
            if self._missed:
                removed.add("")
                self._missed = False
        return sorted(removed)

    def open(self) -> None:
        if self._open_uevents is not None:
            self._open()

    def close(self) -> None:
        if self._uevents is not None:
            self._uevents.close()
            self._uevents = None

    def _open(self) -> None:
        assert self._open_uevents is not None
        try:
            self._uevents = self._open_uevents()
        except OSError as error:
            self._failed(str(error))
            return
        self.status = replace(self.status, up=True, problem="")

    def _lost(self, error: Exception) -> None:
        self.close()
        self._missed = True
        overrun = isinstance(error, OSError) and error.errno == errno.ENOBUFS
        self.status = replace(self.status, overruns_total=self.status.overruns_total + overrun)
        self._failed("too many devices were removed at once, and messages were lost" if overrun else str(error))

    def _failed(self, problem: str) -> None:
        wait = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = self._monotonic() + wait
        if problem != self.status.problem:
            log.warning("device removals cannot be received, retrying in %g s: %s", wait, problem)
        restarts = self.status.restarts_total + 1
        self.status = replace(self.status, up=False, problem=problem, restarts_total=restarts)


def hot_unplug(root: str, monotonic: Callable[[], float] = time.monotonic) -> HotUnplug:
    return HotUnplug(None if root.rstrip("/") else Uevents, monotonic)
