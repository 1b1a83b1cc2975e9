"""Hot-unplug: the kernel tells over netlink which devices are taken out while the node runs."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from healthd.guard import HOT_UNPLUG, drop
from healthd.machine.inventory import pci_of
from healthd.model import SourceStatus

log = logging.getLogger("healthd")

RETRY_SECONDS = (0.0, 1.0, 5.0, 30.0, 300.0)
HEARD = ("pci", "net", "infiniband", "nvme")


class HotUnplug:
    """Devices that the kernel reports as removed, over netlink: this works without udevd.

    A socket that lost messages (ENOBUFS) or died is replaced by a new one: at once, then with growing delays.
    """

    def __init__(
        self, open_monitor: Callable[[], Any] | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_monitor` gives pyudev's, started; it raises OSError or ImportError. A captured tree has none."""
        self._open_monitor = open_monitor
        self._monotonic = monotonic
        self._monitor: Any = None
        self._failures = 0
        self._retry_at = 0.0
        self._missed = False
        self.status = SourceStatus("device_removals", up=False)
        if open_monitor is not None:
            self._open()

    @property
    def sources(self) -> Iterator[SourceStatus]:
        if self._open_monitor is not None:
            yield self.status

    def waits(self) -> Iterator[tuple[int, bool]]:
        if self._monitor is not None:
            yield int(self._monitor.fileno()), False

    @property
    def deadline(self) -> float:
        """When to look without being woken: to open the socket again."""
        waits = self._open_monitor is not None and self._monitor is None
        return self._retry_at if waits else float("inf")

    def read(self) -> list[str]:
        """PCI addresses of the devices removed since the last call (a port or disk gives its card's address); "" stands
        for devices that may have been removed unheard."""
        if self.deadline <= self._monotonic():
            self._open()
        removed = set()
        try:
            while self._monitor is not None and (device := self._monitor.poll(0)) is not None:
                if device.action == "remove":
                    removed.add(pci_of(device.device_path))
        except Exception as error:
            if not isinstance(error, OSError | ValueError):  # pyudev raises ValueError for EINVAL
                drop(HOT_UNPLUG, error)
            self._lost(error)
            if self.deadline <= self._monotonic():
                self._open()
        removed.discard("")  # a device below no PCI device
        if self._monitor is not None:
            self._failures = 0 if not self._missed else self._failures
            self.status = replace(self.status, last_read=time.time())
            if self._missed:
                removed.add("")
                self._missed = False
        return sorted(removed)

    def _open(self) -> None:
        assert self._open_monitor is not None
        try:
            self._monitor = self._open_monitor()
        except (OSError, ImportError) as error:
            self._failed(str(error))
            return
        self.status = replace(self.status, up=True, trouble="")

    def _lost(self, error: Exception) -> None:
        """pyudev does not say why: the socket knows, if it is still open."""
        why = 0
        try:
            with socket.socket(fileno=os.dup(self._monitor.fileno())) as monitor:
                why = monitor.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError:
            pass
        self._monitor, self._missed = None, True
        overruns = self.status.overruns_total + (why == errno.ENOBUFS)
        self.status = replace(self.status, overruns_total=overruns)
        self._failed("more was removed at once than could be heard" if why == errno.ENOBUFS else str(error))

    def _failed(self, trouble: str) -> None:
        wait = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = self._monotonic() + wait
        if trouble != self.status.trouble:
            log.warning("device removals are not heard, trying again in %g s: %s", wait, trouble)
        restarts = self.status.restarts_total + 1
        self.status = replace(self.status, up=False, trouble=trouble, restarts_total=restarts)


def hot_unplug(root: str) -> HotUnplug:
    return HotUnplug() if root.rstrip("/") else HotUnplug(_monitor)


def _monitor() -> Any:
    import pyudev

    monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
    for subsystem in HEARD:
        monitor.filter_by(subsystem)
    monitor.start()
    return monitor
