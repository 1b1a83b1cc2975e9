"""Devices that are taken out, heard from the real kernel; a socket that dies or overflows is replaced."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from healthd.host import Host
from healthd.machine.hot_unplug import RETRY_SECONDS, HotUnplug, hot_unplug
from tests.e2e.requirements import require, require_root


@pytest.fixture
def bridge() -> Iterator[str]:
    """A PCI host bridge that the kernel can be told to report on."""
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


def say(pci: str, action: str) -> None:
    """The kernel repeats what it would say: the device stays where it is."""
    Path(f"/sys/bus/pci/devices/{pci}/uevent").write_text(action)


def _is_host_bridge(pci: str) -> bool:
    return Path(f"/sys/bus/pci/devices/{pci}/class").read_text().startswith("0x0600")


def socket_of(heard: HotUnplug) -> int:
    ((descriptor, _),) = heard.waits()
    return descriptor


def test_a_captured_tree_has_no_removals(tmp_path: Path) -> None:
    heard = hot_unplug(str(tmp_path))
    assert (heard.read(), list(heard.waits()), list(heard.sources)) == ([], [], [])
    assert heard.deadline == float("inf")


def test_a_removal_is_heard_from_the_kernel_and_reading_never_blocks(bridge: str) -> None:
    heard = hot_unplug("/")
    assert heard.read() == []
    say(bridge, "change")
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 5)[0]
    assert heard.read() == [bridge]
    assert heard.read() == []
    assert heard.status.up
    assert heard.status.last_read > 0


def test_more_than_the_socket_holds_is_counted_and_heard_again_afterwards(bridge: str) -> None:
    """The real overflow (ENOBUFS): poll(2) would report it for ever to who does not take it from the socket."""
    heard = hot_unplug("/")
    with socket.socket(fileno=os.dup(socket_of(heard))) as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # some versions of libudev ask for 128 MiB
    for _ in range(3000):
        say(bridge, "change")
    assert select.select([socket_of(heard)], [], [], 5)[0]
    assert heard.read() == [""], "something may have been removed unheard"
    assert (heard.status.overruns_total, heard.status.restarts_total, heard.status.up) == (1, 1, True)
    assert select.select([socket_of(heard)], [], [], 0)[0] == [], "nobody is woken for it again"
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 5)[0]
    assert heard.read() == [bridge]


def test_a_socket_that_no_longer_hears_the_kernel_is_opened_again_at_once(bridge: str) -> None:
    """Another socket in its place, at its end: libudev itself ends the program if its descriptor is closed."""
    heard = hot_unplug("/")
    one, other = socket.socketpair()
    other.close()
    os.dup2(one.fileno(), socket_of(heard))
    one.close()
    assert heard.read() == [""]
    assert (heard.status.restarts_total, heard.status.overruns_total, heard.status.up) == (1, 0, True)
    say(bridge, "remove")
    assert select.select([socket_of(heard)], [], [], 5)[0]
    assert heard.read() == [bridge]


def test_a_netlink_that_is_refused_is_tried_again_ever_more_slowly() -> None:
    now = 1000.0
    tried = []

    def refused() -> object:
        tried.append(now)
        raise OSError("no netlink here")

    heard = HotUnplug(refused, lambda: now)
    for failures in range(1, len(RETRY_SECONDS) + 2):
        assert (len(tried), heard.status.restarts_total, heard.status.up) == (failures, failures, False)
        assert heard.status.trouble == "no netlink here"
        now = heard.deadline
        assert heard.read() == []
    assert tried[-1] - tried[-2] == RETRY_SECONDS[-1]
