"""Hot-unplug: the kernel tells over netlink which devices are taken out while the node runs."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from healthd.common.guard import HOT_UNPLUG, drop
from healthd.common.model import SourceStatus
from healthd.host.inventory import pci_of
from healthd.host.uevents import Uevents

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
