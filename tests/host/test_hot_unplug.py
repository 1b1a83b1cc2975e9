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
        say(found, "add")


@pytest.fixture
def heard(bridge: str) -> Iterator[HotUnplug]:
    found = hot_unplug("/")
    found.open()
    yield found
    found.close()


def say(pci: str, action: str) -> None:
    """Make the kernel repeat an event. The device stays in place."""
    Path(f"/sys/bus/pci/devices/{pci}/uevent").write_text(action)


def _is_host_bridge(pci: str) -> bool:
    return Path(f"/sys/bus/pci/devices/{pci}/class").read_text().startswith("0x0600")


def socket_of(heard: HotUnplug) -> int:
    ((descriptor, _),) = heard.waits()
    return descriptor


def test_a_captured_tree_has_no_removals(tmp_path: Path) -> None:
    heard = hot_unplug(str(tmp_path))
    heard.open()
    assert (heard.read(), list(heard.waits()), list(heard.sources)) == ([], [], [])
    assert heard.deadline == float("inf")


def test_a_removal_is_heard_from_the_kernel_and_reading_never_blocks(bridge: str, heard: HotUnplug) -> None:
    assert heard.read() == []
    say(bridge, "change")
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == [bridge]
    assert heard.read() == []
    assert heard.status.up
    assert heard.status.last_read > 0


def test_more_than_the_socket_holds_is_counted_and_heard_again_afterwards(bridge: str, heard: HotUnplug) -> None:
    """A real overflow (ENOBUFS): poll(2) reports it until it is read from the socket."""
    with socket.socket(fileno=os.dup(socket_of(heard))) as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(3000):
        say(bridge, "change")
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == [""], "a removal may have been lost"
    assert (heard.status.overruns_total, heard.status.restarts_total, heard.status.up) == (1, 1, True)
    assert select.select([socket_of(heard)], [], [], 0)[0] == [], "poll does not report it again"
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == [bridge]


def test_a_socket_that_no_longer_hears_the_kernel_is_opened_again_at_once(bridge: str, heard: HotUnplug) -> None:
    """The descriptor is replaced by another socket at its end."""
    one, other = socket.socketpair()
    other.close()
    os.dup2(one.fileno(), socket_of(heard))
    one.close()
    assert heard.read() == [""]
    assert (heard.status.restarts_total, heard.status.overruns_total, heard.status.up) == (1, 0, True)
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == [bridge]


def test_only_the_kernel_is_believed(bridge: str, heard: HotUnplug) -> None:
    """Another sender to the group has a different address than the kernel."""
    forged = f"remove@/devices/{bridge}\0ACTION=remove\0DEVPATH=/devices/{bridge}\0SUBSYSTEM=pci\0".encode()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, KOBJECT_UEVENT) as other:
        other.sendto(forged, (0, KERNEL_GROUP))
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == []
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 60)[0]
    assert heard.read() == [bridge]


@given(st.binary())
def test_any_bytes_are_an_event_or_none(message: bytes) -> None:
    parse_uevent(message)


def test_an_event_of_the_kernel_is_taken_apart() -> None:
    path = "/devices/pci0000:00/0000:00:1f.0"
    said = f"remove@{path}\0ACTION=remove\0DEVPATH={path}\0SUBSYSTEM=pci\0MODALIAS=pci:v=1\0SEQNUM=7\0"
    assert parse_uevent(said.encode()) == Uevent("remove", path, "pci")
    assert parse_uevent(b"libudev\0\xfe\xed\xca\xfe") is None, "a message of udevd"


def test_a_netlink_that_is_refused_is_tried_again_ever_more_slowly() -> None:
    now = 1000.0
    tried = []

    def refused() -> Uevents:
        tried.append(now)
        raise OSError("no netlink here")

    heard = HotUnplug(refused, lambda: now)
    heard.open()
    for failures in range(1, len(RETRY_SECONDS) + 2):
        assert (len(tried), heard.status.restarts_total, heard.status.up) == (failures, failures, False)
        assert heard.status.problem == "no netlink here"
        now = heard.deadline
        assert heard.read() == []
    assert tried[-1] - tried[-2] == RETRY_SECONDS[-1]
