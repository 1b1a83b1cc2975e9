"""Hot-unplug: the kernel tells over netlink which devices are taken out while the node runs."""

# XXDOC """What the kernel says of its devices, over netlink (lib/kobject_uevent.c): udevd need not run, and libudev is not
# XXDOC loaded, which the daemon would keep 1 MiB of."""
from __future__ import annotations
import errno
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from healthd.common.guard import HOT_UNPLUG, drop
from healthd.common.model import SourceStatus
from healthd.host.inventory import pci_of
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


log = logging.getLogger("healthd")

RETRY_SECONDS = (0.0, 1.0, 5.0, 30.0, 300.0)
HEARD = ("pci", "net", "infiniband", "nvme")


class HotUnplug:
    """Devices that the kernel reports as removed, over netlink: this works without udevd.

    A socket that lost messages (ENOBUFS) or died is replaced by a new one: at once, then with growing delays.
    """

    def __init__(
        self, open_uevents: Callable[[], Uevents] | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_uevents` raises OSError. A captured tree has none. Nothing is heard before `open()`."""
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
        """When to look without being woken: to open the socket again."""
        waits = self._open_uevents is not None and self._uevents is None
        return self._retry_at if waits else float("inf")

    def read(self) -> list[str]:
        """PCI addresses of the devices removed since the last call (a port or disk gives its card's address); "" stands
        for devices that may have been removed unheard."""
        if self.deadline <= self._monotonic():
            self._open()
        removed = set()
        try:
            while self._uevents is not None and (said := self._uevents.read()) is not None:
                if said.action == "remove" and said.subsystem in HEARD:
                    removed.add(pci_of(said.device_path))
        except Exception as error:
            if not isinstance(error, OSError):
                drop(HOT_UNPLUG, error)
            self._lost(error)
            if self.deadline <= self._monotonic():
                self._open()
        removed.discard("")  # a device below no PCI device
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
        self.status = replace(self.status, up=True, trouble="")

    def _lost(self, error: Exception) -> None:
        self.close()
        self._missed = True
        overrun = isinstance(error, OSError) and error.errno == errno.ENOBUFS
        self.status = replace(self.status, overruns_total=self.status.overruns_total + overrun)
        self._failed("more was removed at once than could be heard" if overrun else str(error))

    def _failed(self, trouble: str) -> None:
        wait = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = self._monotonic() + wait
        if trouble != self.status.trouble:
            log.warning("device removals are not heard, trying again in %g s: %s", wait, trouble)
        restarts = self.status.restarts_total + 1
        self.status = replace(self.status, up=False, trouble=trouble, restarts_total=restarts)


def hot_unplug(root: str, monotonic: Callable[[], float] = time.monotonic) -> HotUnplug:
    return HotUnplug(None if root.rstrip("/") else Uevents, monotonic)
