"""What the kernel log says of mlx5 network cards: firmware that died, heat, transceivers, links that went down.

Rules: a card whose firmware is dead or was not recovered drains (NVSentinel calls it fatal; jobs may live on another
card) until a reboot. So does one that did not answer a command, where mlx5's driver says that a resource is lost by it:
NVSentinel calls both fatal (docs/nic-health-monitor.md). What the firmware reports
as a warning, transceivers and cables, other time-outs and PCI errors warn.
A link that goes down is recorded only: ib_link, ib_flap and eth_link judge it, and look at once. So are requests that
fail, which an application can cause. Lines of other network cards are judged by nic.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    Ends,
    Explain,
    Finding,
    Inventory,
    KernelEvent,
    Remedy,
    Seconds,
    Severity,
)

USES = ""

INCIDENT_SECONDS = 5.0  # lines of one health report lie closer
FIRMWARE_ERROR = 3  # a health report of this severity (syslog's numbers) or a lower one is an error; 4 is a warning


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long a warning stands after its last line
    link_window_seconds      the same for a link that went down, and for requests that failed
    """

    warning_window_seconds: Seconds = 24 * 3600.0
    link_window_seconds: Seconds = 3600.0


class Rule(NamedTuple):
    """`words`: the message's."""

    severity: Severity
    clears: Clears
    words: str


WARNS = (Severity.WARNING, Clears.WINDOW)
RECORDED = (Severity.INFO, Clears.WINDOW)
RULES = {
    "health_fatal": Rule(Severity.DEGRADED, Clears.REBOOT, "the card's firmware failed"),
    "health_warning": Rule(*WARNS, "the card's firmware reports a problem"),
    "health_recovery": Rule(*WARNS, "the driver stopped the card"),
    "temperature": Rule(*WARNS, "the card is hot"),
    "module_temperature": Rule(*WARNS, "a transceiver is hot"),
    "module_power": Rule(*WARNS, "a transceiver needs more power than the port may give"),
    "module_error": Rule(*WARNS, "a transceiver or cable does not work"),
    "command_timeout": Rule(*WARNS, "the card's firmware did not answer"),
    "slot_power": Rule(*WARNS, "the card's slot gives too little power"),
    "tx_timeout": Rule(*WARNS, "packets were not sent in time"),
    "pci_error": Rule(*WARNS, "the card had a PCI Express error"),
    "load_failed": Rule(Severity.WARNING, Clears.REBOOT, "the driver could not start the card"),
    "port_failed": Rule(*WARNS, "a port could not be opened"),
    "bond_down": Rule(*WARNS, "a bond had no member that is up"),
    "link_down": Rule(*RECORDED, "the link went down"),
    "request_failed": Rule(*RECORDED, "requests failed"),
    "pcie_limited": Rule(*RECORDED, "the slot limits the card's bandwidth"),
}
# mlx5/core/cmd.c: "Will cause a leak of a command resource".
LEAKS = Rule(Severity.DEGRADED, Clears.REBOOT, "the card's firmware did not answer, and what was asked for is lost")
REQUESTS = frozenset({"command_failed", "cq_error", "cqe_error", "send_failed"})
LINK_ENDS = "link_up"
SAID = ("issue", "error", "command")  # fields that say what it was


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """One finding for each code and part, resting on all its events. A link that is up again is over."""
    heard = [event for event in events if _is_mlx5(event)]
    reports = _reports(heard)
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in heard:
        if code := _code(event, reports):
            groups.setdefault((code, _part(event)), []).append(event)
    for (code, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        rule = LEAKS if any(e.field("leaks") and e.boot_id == newest.boot_id for e in group) else RULES[code]
        if newest.code == LINK_ENDS and len(group) == sum(event.code == LINK_ENDS for event in group):
            continue  # it was not seen going down
        yield Finding(
            severity=rule.severity,
            code=f"mlx5/{code}",
            subject=part,
            message=_message(rule, _telling(group), sum(event.lines for event in group if event.code != LINK_ENDS)),
            clears=rule.clears,
            window_seconds=_window_seconds(code, rule, config),
            events=tuple(event.sequence for event in group),
            over=newest.code == LINK_ENDS,
        )


def _is_mlx5(event: KernelEvent) -> bool:
    """Return True for a line of mlx5's driver, and for InfiniBand's own line about one of its devices (checks/nic.py
    has the others)."""
    return event.kind == "mlx5" or (event.kind == "ib" and event.field("ibdev").startswith("mlx5_"))


Reports = Mapping[tuple[str, str], Sequence[tuple[float, int]]]


def _reports(heard: Sequence[KernelEvent]) -> Reports:
    """(boot, card) -> (time, severity) of each health report that has one, in the order of time."""
    reports: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for event in heard:
        if severity := event.field("severity"):
            reports.setdefault((event.boot_id, event.pci), []).append((event.time, int(severity)))
    return {card: sorted(found) for card, found in reports.items()}


def _code(event: KernelEvent, reports: Reports) -> str:
    """The finding's code; "" = the event is not judged."""
    if event.code in REQUESTS:
        return "request_failed"
    if event.code == LINK_ENDS:
        return "link_down"
    if event.code != "health":
        return event.code if event.code in RULES else ""
    severity = event.field("severity")
    worst = int(severity) if severity else _severity_beside(event, reports)
    return "health_fatal" if worst <= FIRMWARE_ERROR else "health_warning"


def _severity_beside(event: KernelEvent, reports: Reports) -> int:
    """The severity of the report that a line without one belongs to. Older drivers give none and report only errors."""
    found = reports.get((event.boot_id, event.pci), ())
    near = bisect.bisect_left(found, (event.time - INCIDENT_SECONDS, 0))
    beside = [severity for time, severity in found[near : near + 8] if time <= event.time + INCIDENT_SECONDS]
    return min(beside, default=FIRMWARE_ERROR)


def _part(event: KernelEvent) -> str:
    """The card's address; without one the interface or device that the line names."""
    fields = dict(event.fields)
    return event.pci or next((fields[name] for name in ("netdev", "ibdev", "bond", "device") if name in fields), "")


def _window_seconds(code: str, rule: Rule, config: Config) -> float:
    if rule.severity is Severity.INFO:
        return config.link_window_seconds
    return config.warning_window_seconds if rule.severity is Severity.WARNING else 0.0


def _telling(group: Sequence[KernelEvent]) -> KernelEvent:
    """The newest event that says what it was; if none does, the newest."""
    return max(
        group, key=lambda event: (any(name in SAID for name, _ in event.fields), event.last_time, event.sequence)
    )


def _message(rule: Rule, event: KernelEvent, lines: int) -> str:
    fields = dict(event.fields)
    said = [fields[name] for name in SAID if name in fields]
    named = [fields[name] for name in ("bond", "netdev", "ibdev") if name in fields]
    named += [f"{name} {fields[name]}" for name in ("port", "module") if name in fields]
    words = rule.words + (f": {', '.join(said)}" if said else "")
    return "".join(
        (words, f" ({', '.join(named)})" if named else "", f", {lines} lines" if lines > 1 else ""),
    )


_CARD_TODO = (
    "journalctl -k | grep mlx5; mstdump PCI and mlxfwmanager --query for the vendor. Reboot with the power off for a "
    "moment; update the firmware. If it comes again: replace the card."
)
_CABLE_TODO = (
    "mlxlink -d DEVICE -m shows the transceiver. Reseat it, then exchange it or the cable; look at the airflow."
)
_LOST = "What goes over this card fails: jobs over several nodes, and mounts."

EXPLAIN = {
    "mlx5/health_fatal": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The network card's driver says that its firmware is dead or in error, or could not recover it.",
        _LOST,
        _CARD_TODO,
        remedy=Remedy.POWER_CYCLE,
    ),
    "mlx5/health_warning": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The card's firmware reports a problem that it calls no error.",
        "The card works on; worse may follow.",
        "The line names the problem. Update the firmware at the next maintenance.",
        window="warning_window_seconds",
    ),
    "mlx5/health_recovery": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The driver stopped the card, to recover it or because it was switched off or reset (mlxfwreset, SR-IOV).",
        "While it lasts nothing goes over the card. If nobody reset it, its firmware failed.",
        "journalctl -k | grep mlx5 shows what led to it, and whether the card came back.",
        window="warning_window_seconds",
    ),
    "mlx5/temperature": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A sensor of the card is above its limit.",
        "The card switches itself off at the next limit.",
        "mget_temp -d DEVICE. Look at fans, filters and blanking panels; the card's own fan if it has one.",
        window="warning_window_seconds",
    ),
    "mlx5/module_temperature": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A transceiver or active cable is above its temperature limit.",
        "It is switched off if it gets hotter: the link goes down.",
        _CABLE_TODO,
        window="warning_window_seconds",
    ),
    "mlx5/module_power": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A transceiver or cable asks for more power than the port or the slot may give.",
        "The port does not come up with it.",
        f"Use one of a lower power class, or a card and slot that give more. {_CABLE_TODO}",
        window="warning_window_seconds",
    ),
    "mlx5/module_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The card cannot work with a transceiver or cable: shorted, unreadable, unknown or not admitted.",
        "The port does not come up, or goes down.",
        _CABLE_TODO,
        window="warning_window_seconds",
    ),
    "mlx5/slot_power": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The slot told the card that it gives less power than the card may need. Some machines say so at each boot. "
        "Or the card has switched ports off for it: then the line says so.",
        "The card, or an active cable in it, may be slowed down; a port that was switched off has no link.",
        "Compare the card's speed with its neighbours' (ib_link, eth_link). Look at the slot's power in the BIOS, and "
        "at the card's own power cable.",
        window="warning_window_seconds",
    ),
    "mlx5/command_timeout": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The card's firmware did not answer a command of the driver. It drains where the driver says that this leaks a "
        "resource, or takes no further command; else it warns.",
        "Queues cannot be made or destroyed: jobs that start or end on it hang for a minute at each. Each one leaks.",
        _CARD_TODO,
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "mlx5/tx_timeout": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets waited in a queue of the card for seconds; the driver restarted the queue.",
        "Connections stall or break. Once it may be the switch (pause frames), repeated it is card or driver.",
        "ethtool -S INTERFACE | grep -E 'pause|timeout|err'; journalctl -k | grep mlx5 for what stands around it.",
        window="warning_window_seconds",
    ),
    "mlx5/pci_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel told the card's driver of a PCI Express error and reset the card.",
        "What used the card has failed. pcie_aer judges the error itself.",
        "journalctl -k | grep -E 'AER|mlx5'. Reseat the card, look at riser and cables.",
        window="warning_window_seconds",
    ),
    "mlx5/load_failed": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The driver could not start a network card (or a virtual function of it).",
        "The card is not there for anybody. Where ports are expected ib_link and eth_link drain the node.",
        "The lines before it in journalctl -k say why: firmware older than the driver, firmware dead, no resources.",
        window="warning_window_seconds",
    ),
    "mlx5/port_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel could not open a port of an RDMA device for management packets.",
        "The port stays in INIT: no subnet manager can reach it. SELinux can be the cause, or a dying device.",
        "journalctl -k and ausearch -m avc around that time; ibstat.",
        window="warning_window_seconds",
    ),
    "mlx5/bond_down": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "No member of a bond was up.",
        "Everything that goes over the bond stood still. eth_link judges whether it still does.",
        "cat /proc/net/bonding/BOND; the switch that its cables go to.",
        window="warning_window_seconds",
    ),
    "mlx5/link_down": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The link of a network card's port went down.",
        "None if somebody did it, or if it is back. ib_link, ib_flap and eth_link judge it.",
        "mlxlink -d DEVICE tells why the port is down (Troubleshooting Info).",
        window="link_window_seconds",
    ),
    "mlx5/request_failed": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The card refused or failed a request: a completion queue ran over, a command was not possible.",
        "Mostly an application's fault, or the other node's.",
        "Nothing, unless jobs of several users see it on this node.",
        window="link_window_seconds",
    ),
    "mlx5/pcie_limited": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "At its start the driver found that the PCI Express link gives the card less than it could use.",
        "The card may be slower than its port. So it is in many slots by design; pcie_link judges it.",
        "lspci -vv -s PCI: LnkCap and LnkSta, also of the port above.",
        window="link_window_seconds",
    ),
}
