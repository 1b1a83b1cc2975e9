"""PCI Express links of network cards, NVMe disks and switches that run narrower or slower than both ends can.

Rules: OCI and DCGM compare a link with its maximum. Here that is what both ends can do: a card of 16 lanes in a slot of
8 is as built. Each link is judged once, at its lower end; without a port above (virtual machines) nothing is known of
the other end. gpu_pcie judges GPUs, which lower the speed when idle. A device that sleeps (D3) is not judged. What is
found warns, since slots may be built with fewer lanes than their ports: `enforce = true` lets it drain.
Files: Linux, sysfs-bus-pci; all ones in a dead device's registers read as 63 lanes and speed "Unknown".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    PciFunction,
    Remedy,
    Seconds,
    Severity,
    regex,
)

USES = ""
AFTER_EVENTS = ("pcie_hotplug",)

DEVICES = "/sys/bus/pci/devices"
WATCHED = {"0x02": "network card", "0x0108": "NVMe", "0x0604": "switch"}  # by the beginning of the class
LANES = ("1", "2", "4", "8", "12", "16", "32")
SPEED = regex(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?")
NO_LINK = ("0", "255")  # max_link_width of devices built into the root complex
DEAD = ("0", "63")  # current_link_width: no lane at all, or all bits of the register


class Config(CheckSettings, frozen=True):
    """confirm_seconds   a link must be wrong for so long
    enforce           true: its findings drain
    """

    confirm_seconds: Seconds = 120.0
    enforce: bool = False


class Link(NamedTuple):
    lanes: int
    speed: float  # GT/s


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    links = _links(host.pci_functions())
    yield Observation("pcie_link_watched_links", len(links))
    if not links:
        yield NothingToCheck("no PCIe link of a GPU, network card or NVMe disk")
    unreadable = []
    for port, (function, what) in links.items():
        try:
            found = _judge(host, function.pci, port)
        except (OSError, ValueError) as error:  # it must not hide the other links
            unreadable.append(f"{function.pci}: {error}")
            continue
        for code, message in found:
            yield Finding(
                Severity.DEGRADED,
                f"pcie_link/{code}",
                function.pci,
                f"{what} {function.pci} {message}",
                clears=Clears.REBOOT,
                confirm_seconds=config.confirm_seconds,
            )
    if unreadable:
        raise ValueError("; ".join(unreadable))


@functools.lru_cache(maxsize=2)
def _links(on_pci: tuple[PciFunction, ...]) -> Mapping[str, tuple[PciFunction, str]]:
    """The port above -> (the first function at the link's lower end, words for it)."""
    functions = {function.pci: function for function in on_pci}
    links: dict[str, tuple[PciFunction, str]] = {}
    for function in functions.values():
        what = next((what for start, what in WATCHED.items() if function.pci_class.startswith(start)), None)
        if what and not function.virtual and _depth(function, functions) % 2:
            links.setdefault(function.upstream, (function, what))
    return links


def _depth(function: PciFunction, functions: Mapping[str, PciFunction]) -> int:
    """How many ports lie above. Below a root port (0) is the lower end of a link (1): a device, or a switch's upper
    port. The switch's lower ports (2) are inside it, without a link between; below them is a link again."""
    above = functions.get(function.upstream)
    return 1 + _depth(above, functions) if above else 0


def _judge(host: Host, pci: str, port: str) -> list[tuple[str, str]]:
    """(code, message) of what is wrong with the link between a device and the port above it. Raises ValueError."""
    can = _texts(host, pci, "max")
    if can[0] in (None, *NO_LINK):
        return []
    runs = _texts(host, pci, "current")
    if runs[0] in DEAD:
        return [] if _sleeps(host, pci) else [("no_answer", f"does not answer: its link shows {runs[0]} lanes")]
    most, now = parse(pci, "max", *can), parse(pci, "current", *runs)
    if now == most:
        return []
    slot = _texts(host, port, "max")
    if slot[0] in (None, *NO_LINK) or _sleeps(host, pci):
        return []
    above = parse(port, "max", *slot)
    most = Link(min(most.lanes, above.lanes), min(most.speed, above.speed))
    if now.lanes > most.lanes or now.speed > most.speed:
        raise ValueError(f"its link has {now.lanes} lanes at {now.speed:g} GT/s: more than it and its slot can")
    narrow = [("narrow", f"has {now.lanes} lanes of {most.lanes}")] if now.lanes < most.lanes else []
    slow = (
        [("slow", f"runs at {now.speed:g} GT/s, it and its slot can {most.speed:g}")] if now.speed < most.speed else []
    )
    return narrow + slow


def _texts(host: Host, pci: str, which: str) -> tuple[str | None, str | None]:
    return host.read(f"{DEVICES}/{pci}/{which}_link_width"), host.read(f"{DEVICES}/{pci}/{which}_link_speed")


def _sleeps(host: Host, pci: str) -> bool:
    """Whether it sleeps: its registers may read as ones, and its link be down. Asked only if something looks wrong."""
    return (host.read(f"{DEVICES}/{pci}/power_state") or "").startswith("D3")


def parse(pci: str, which: str, width: str | None, speed: str | None) -> Link:
    """From "16" and "32.0 GT/s PCIe". Raises ValueError for anything else, "Unknown" too."""
    width, speed = width or "", speed or ""
    if width not in LANES:
        raise ValueError(f"{pci}/{which}_link_width: not a number of lanes: {width[:40]!r}")
    match = SPEED.fullmatch(speed)
    if match is None:
        raise ValueError(f"{pci}/{which}_link_speed: not a speed: {speed[:40]!r}")
    return Link(int(width), float(match[1]))


_TODO = (
    "lspci -vvv -s PCI | grep -E 'LnkCap|LnkSta' here and at the port above. Power the node off and on; if it stays, "
    "reseat the card, its riser or cable."
)

OBSERVATIONS = {
    "pcie_link_watched_links": Meaning("PCIe links whose width and speed are compared with what both ends can."),
}

EXPLAIN = {
    "pcie_link/narrow": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The link has fewer lanes than the device and the port above it can have. It warns, unless enforce = true.",
        "Lanes failed when the link was trained: it has that part of its bandwidth less, and jobs wait for this node.",
        f'{_TODO} Built so (a slot with fewer lanes than its port): severity = {{ "pcie_link/narrow" = "info" }}; '
        "a site without such slots writes enforce = true instead.",
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_link/slow": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The link runs at a lower speed than the device and the port above it can. It warns, unless enforce = true.",
        "Each step halves the bandwidth. It often comes with corrected errors (pcie_aer).",
        f"{_TODO} Some firmware lowers the speed of idle links, or is set to a lower one: look at its set-up.",
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_link/no_answer": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The device is still listed, but its registers read as all ones: its link is down. It warns, unless "
        "enforce = true.",
        "Whatever uses the device fails. Other checks say what that means for jobs (ib_link, block_device).",
        f"journalctl -k | grep -iE 'pcie|aer' says since when. {_TODO}",
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
}
