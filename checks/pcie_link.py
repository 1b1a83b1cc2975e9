"""PCI Express links to network cards, NVMe disks and switches that are narrower or slower than both ends support.

Rules: OCI and DCGM compare a link with its maximum. In healthd the maximum is what both ends support: an x16 card in an
x8 slot is normal. Each link is checked once, at its lower end. In virtual machines there may be no port above, so the
other end is unknown. GPUs lower the speed when idle, so gpu_pcie checks GPUs. Sleeping devices (D3) are not checked.
Findings are warnings, because slots may be built with fewer lanes than their ports support; with `enforce = true` they
drain the node. Files: Linux, sysfs-bus-pci. A dead device's registers read as all ones, which appears as 63 lanes and
speed "Unknown".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    PciFunction,
    Remedy,
    Seconds,
    Severity,
    regex,
)

USES = ""
AFTER_EVENTS = ("pcie_hotplug",)

DEVICES = "/sys/bus/pci/devices"
WATCHED = {"0x02": "network card", "0x0108": "NVMe", "0x0604": "switch"}  # by the prefix of the PCI class
LANES = ("1", "2", "4", "8", "12", "16", "32")
SPEED = regex(r"([0-9]{1,3}(?:\.[0-9])?) GT/s(?: PCIe)?")
NO_LINK = ("0", "255")  # max_link_width of devices integrated into the root complex
DEAD_WIDTHS = ("0", "63")  # current_link_width: no lanes, or all bits of the register


class Config(CheckSettings, frozen=True):
    """confirm_seconds   a problem must last this long before it is reported
    enforce           true: findings drain
    """

    confirm_seconds: Seconds = 120.0
    enforce: bool = False


class Link(NamedTuple):
    lanes: int
    speed: float  # GT/s


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    links = _links(host.pci_functions())
    yield Observation("pcie_link_watched_links", len(links))
    if not links:
        yield NothingToCheck("no PCIe link to a network card, NVMe disk or switch")
    unreadable = []
    for port, (function, label) in links.items():
        try:
            found = _judge(host, function.pci, port)
        except (OSError, ValueError) as error:  # this error must not hide the other links
            unreadable.append(f"{function.pci}: {error}")
            continue
        for code, message in found:
            yield Finding(
                Severity.DEGRADED,
                f"pcie_link/{code}",
                function.pci,
                f"{label} {function.pci} {message}",
                clears=Clears.REBOOT,
                confirm_seconds=config.confirm_seconds,
            )
    if unreadable:
        raise ValueError("; ".join(unreadable))


@functools.lru_cache(maxsize=2)
def _links(on_pci: tuple[PciFunction, ...]) -> Mapping[str, tuple[PciFunction, str]]:
    """Return the first function at each link's lower end, with its description, keyed by the port above the link."""
    functions = {function.pci: function for function in on_pci}
    links: dict[str, tuple[PciFunction, str]] = {}
    for function in functions.values():
        label = next((label for start, label in WATCHED.items() if function.pci_class.startswith(start)), None)
        if label and not function.virtual and _depth(function, functions) % 2:
            links.setdefault(function.upstream, (function, label))
    return links


def _depth(function: PciFunction, functions: Mapping[str, PciFunction]) -> int:
    """Return the number of ports above a function. A root port has depth 0. A device or a switch's upstream port has
    depth 1 and is at the lower end of a link. A switch's downstream ports have depth 2; inside the switch there is no
    link. The devices below these ports have depth 3 and are at the lower end of a link.
    """
    above = functions.get(function.upstream)
    return 1 + _depth(above, functions) if above else 0


def _judge(host: Host, pci: str, port: str) -> list[tuple[str, str]]:
    """Return the problems with the link between a device and the port above it, as (code, message) pairs. Raises
    ValueError.
    """
    maximum = _link_files(host, pci, "max")
    if maximum[0] in (None, *NO_LINK):
        return []
    actual = _link_files(host, pci, "current")
    if actual[0] in DEAD_WIDTHS:
        return [] if _is_sleeping(host, pci) else [("no_answer", f"does not respond: its link shows {actual[0]} lanes")]
    possible, current = parse(pci, "max", *maximum), parse(pci, "current", *actual)
    if current == possible:
        return []
    slot = _link_files(host, port, "max")
    if slot[0] in (None, *NO_LINK) or _is_sleeping(host, pci):
        return []
    above = parse(port, "max", *slot)
    possible = Link(min(possible.lanes, above.lanes), min(possible.speed, above.speed))
    if current.lanes > possible.lanes or current.speed > possible.speed:
        raise ValueError(
            f"the link has {current.lanes} lanes at {current.speed:g} GT/s, more than the device and its slot support"
        )
    narrow = [("narrow", f"has {current.lanes} lanes of {possible.lanes}")] if current.lanes < possible.lanes else []
    slow = [("slow", f"runs at {current.speed:g} GT/s of {possible.speed:g}")] if current.speed < possible.speed else []
    return narrow + slow


def _link_files(host: Host, pci: str, kind: str) -> tuple[str | None, str | None]:
    return host.read(f"{DEVICES}/{pci}/{kind}_link_width"), host.read(f"{DEVICES}/{pci}/{kind}_link_speed")


def _is_sleeping(host: Host, pci: str) -> bool:
    """Return True if the device is asleep. Its registers may then read as ones and its link may be down."""
    return (host.read(f"{DEVICES}/{pci}/power_state") or "").startswith("D3")


def parse(pci: str, kind: str, width: str | None, speed: str | None) -> Link:
    """Parse a width such as "16" and a speed such as "32.0 GT/s PCIe". Raises ValueError for anything else, including
    "Unknown"."""
    width, speed = width or "", speed or ""
    if width not in LANES:
        raise ValueError(f"{pci}/{kind}_link_width: not a number of lanes: {width[:40]!r}")
    match = SPEED.fullmatch(speed)
    if match is None:
        raise ValueError(f"{pci}/{kind}_link_speed: not a speed: {speed[:40]!r}")
    return Link(int(width), float(match[1]))


_TODO = (
    "If the condition is only a warning, no action is needed tonight. Run lspci -vvv -s PCI | grep -E "
    "'LnkCap|LnkSta' for the device and the port above. Power-cycle the node. If the problem recurs, reseat the "
    "card, its riser or its cable."
)

OBSERVATIONS = {
    "pcie_link_watched_links": Meaning("Number of PCIe links whose width and speed are checked."),
}

EXPLAIN = {
    "pcie_link/narrow": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The link has fewer lanes than the device and the port above it support. By default this is a warning; with "
        "enforce = true it drains the node.",
        "Some lanes failed when the link was trained. The link has less bandwidth, so jobs wait for this node.",
        f"{_TODO} If the machine's slots are built with fewer lanes than their ports, set severity = "
        '{ "pcie_link/narrow" = "info" }. A site without such slots can set enforce = true instead.',
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_link/slow": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The link runs at a lower speed than the device and the port above it support. By default this is a warning; "
        "with enforce = true it drains the node.",
        "Each lower PCI Express generation halves the bandwidth. Slow links often have corrected errors as well "
        "(pcie_aer).",
        f"{_TODO} Some firmware lowers the speed of idle links or is configured for a lower speed, so check the "
        "firmware's settings.",
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "pcie_link/no_answer": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The device is still listed, but its registers read as all ones because its link is down. By default this is "
        "a warning; with enforce = true it drains the node.",
        "Work that uses the device fails. Other checks report the effect on jobs (ib_link, block_device).",
        f"journalctl -k | grep -iE 'pcie|aer' shows when the link failed. {_TODO}",
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "pcie_link/narrow": EndsJob.NEVER,
    "pcie_link/slow": EndsJob.NEVER,
    "pcie_link/no_answer": EndsJob.ALWAYS,
}
