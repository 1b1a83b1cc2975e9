"""hot_unplug: removed devices as the real kernel reports them. A closed or overflowing socket is replaced."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.host.host import Host
from healthd.host.hot_unplug import (
    KERNEL_GROUP,
    KOBJECT_UEVENT,
    RETRY_SECONDS,
    HotUnplug,
    Uevent,
    Uevents,
    hot_unplug,
    parse_uevent,
)
from tests.e2e.requirements import require, require_root

pytestmark = [pytest.mark.one_python, pytest.mark.alone]  # each daemon on this machine receives the events


@pytest.fixture
def bridge() -> Iterator[str]:
    """A PCI host bridge for which the kernel can repeat events."""
    require_root()
    found = next((pci for pci in Host("/").list("/sys/bus/pci/devices") if _is_host_bridge(pci)), None)
    if found is None:
        require("this machine has no PCI host bridge to report on")
    if not os.access(f"/sys/bus/pci/devices/{found}/uevent", os.W_OK):
        require(f"uevent of {found} cannot be written here")
    try:
        yield found
    finally:
        write_uevent(found, "add")


@pytest.fixture
def unplug(bridge: str) -> Iterator[HotUnplug]:
    found = hot_unplug("/")
    found.open()
    yield found
    found.close()


def write_uevent(pci: str, action: str) -> None:
    """Make the kernel repeat an event. The device stays in place."""
    Path(f"/sys/bus/pci/devices/{pci}/uevent").write_text(action)


def _is_host_bridge(pci: str) -> bool:
    return Path(f"/sys/bus/pci/devices/{pci}/class").read_text().startswith("0x0600")


def socket_of(unplug: HotUnplug) -> int:
    ((descriptor, _),) = unplug.waits()
    return descriptor


def test_hot_unplug_reads_nothing_for_a_tree(tmp_path: Path) -> None:
    unplug = hot_unplug(str(tmp_path))
    unplug.open()
    assert (unplug.read(), list(unplug.waits()), list(unplug.sources)) == ([], [], [])
    assert unplug.deadline == float("inf")


def test_read_returns_removed_device_and_never_blocks(bridge: str, unplug: HotUnplug) -> None:
    assert unplug.read() == []
    write_uevent(bridge, "change")
    write_uevent(bridge, "remove")
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == [bridge]
    assert unplug.read() == []
    assert unplug.status.up
    assert unplug.status.last_read > 0


def test_overflow_is_counted_and_later_events_are_read(bridge: str, unplug: HotUnplug) -> None:
    """A real overflow (ENOBUFS): poll(2) reports it until it is read from the socket."""
    with socket.socket(fileno=os.dup(socket_of(unplug))) as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(3000):
        write_uevent(bridge, "change")
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == [""], "a removal may have been lost"
    assert (unplug.status.overruns_total, unplug.status.restarts_total, unplug.status.up) == (1, 1, True)
    assert select.select([socket_of(unplug)], [], [], 0)[0] == [], "poll does not report it again"
    write_uevent(bridge, "remove")
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == [bridge]


def test_closed_socket_is_opened_again_at_once(bridge: str, unplug: HotUnplug) -> None:
    """The descriptor is replaced by another socket at its end."""
    closed_end, peer = socket.socketpair()
    peer.close()
    os.dup2(closed_end.fileno(), socket_of(unplug))
    closed_end.close()
    assert unplug.read() == [""]
    assert (unplug.status.restarts_total, unplug.status.overruns_total, unplug.status.up) == (1, 0, True)
    write_uevent(bridge, "remove")
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == [bridge]


def test_read_accepts_only_events_of_the_kernel(bridge: str, unplug: HotUnplug) -> None:
    """Another sender to the group has a different address than the kernel."""
    forged = f"remove@/devices/{bridge}\0ACTION=remove\0DEVPATH=/devices/{bridge}\0SUBSYSTEM=pci\0".encode()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, KOBJECT_UEVENT) as sender:
        sender.sendto(forged, (0, KERNEL_GROUP))
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == []
    write_uevent(bridge, "remove")
    assert select.select([socket_of(unplug)], [], [], 60)[0]
    assert unplug.read() == [bridge]


@given(st.binary())
def test_parse_uevent_accepts_any_bytes(message: bytes) -> None:
    parse_uevent(message)


def test_parse_uevent_reads_action_path_and_subsystem() -> None:
    path = "/devices/pci0000:00/0000:00:1f.0"
    message = f"remove@{path}\0ACTION=remove\0DEVPATH={path}\0SUBSYSTEM=pci\0MODALIAS=pci:v=1\0SEQNUM=7\0"
    assert parse_uevent(message.encode()) == Uevent("remove", path, "pci")
    assert parse_uevent(b"libudev\0\xfe\xed\xca\xfe") is None, "a message of udevd"


def test_failed_open_is_retried_with_growing_delay() -> None:
    clock = 1000.0
    tried = []

    def refuse() -> Uevents:
        tried.append(clock)
        raise OSError("no netlink here")

    unplug = HotUnplug(refuse, lambda: clock)
    unplug.open()
    for failures in range(1, len(RETRY_SECONDS) + 2):
        assert (len(tried), unplug.status.restarts_total, unplug.status.up) == (failures, failures, False)
        assert unplug.status.problem == "no netlink here"
        clock = unplug.deadline
        assert unplug.read() == []
    assert tried[-1] - tried[-2] == RETRY_SECONDS[-1]
