"""Faults of mlx5 network cards in the kernel log: failed firmware, heat, bad transceivers and lost links.

Rules: if a card's firmware is dead or was not recovered, the node is drained until a reboot (NVSentinel calls it fatal;
jobs may survive on another card). An unanswered command also drains the node if the driver reports a lost resource.
NVSentinel calls unanswered commands and lost resources fatal (docs/nic-health-monitor.md). Firmware warnings,
transceiver and cable problems, other timeouts and PCI errors are warnings. A link that goes down is only recorded;
ib_link, ib_flap and eth_link then run at once and evaluate the link. Failed requests are also only recorded, because an
application can cause them. The check nic handles other network cards.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from healthd.api import (
    CheckSettings,
    Clears,
    Ends,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Inventory,
    KernelEvent,
    Remedy,
    Seconds,
    Severity,
)

USES = ""

INCIDENT_SECONDS = 5.0  # lines of one health report are closer together than this
FIRMWARE_ERROR = 3  # health reports with this severity (syslog's numbers) or a lower number are errors; 4 is a warning


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long a warning stays open after its last line
    link_window_seconds      a link that went down, or a failed request, stays recorded for this long
    """

    warning_window_seconds: Seconds = 24 * 3600.0
    link_window_seconds: Seconds = 3600.0


class Rule(NamedTuple):
    """Properties of the finding for one code. The message starts with `text`."""

    severity: Severity
    clears: Clears
    text: str


WARNING_ENDING = (Severity.WARNING, Clears.WINDOW)
RECORDED_ENDING = (Severity.INFO, Clears.WINDOW)
RULES = {
    "health_fatal": Rule(Severity.DEGRADED, Clears.REBOOT, "the card's firmware failed"),
    "health_warning": Rule(*WARNING_ENDING, "the card's firmware reports a problem"),
    "health_recovery": Rule(*WARNING_ENDING, "the driver stopped the card"),
    "temperature": Rule(*WARNING_ENDING, "the card is hot"),
    "module_temperature": Rule(*WARNING_ENDING, "a transceiver is hot"),
    "module_power": Rule(*WARNING_ENDING, "a transceiver needs more power than the port can supply"),
    "module_error": Rule(*WARNING_ENDING, "a transceiver or cable does not work"),
    "command_timeout": Rule(*WARNING_ENDING, "the card's firmware did not respond"),
    "slot_power": Rule(*WARNING_ENDING, "the card's slot supplies too little power"),
    "tx_timeout": Rule(*WARNING_ENDING, "packets were not sent in time"),
    "pci_error": Rule(*WARNING_ENDING, "the card had a PCI Express error"),
    "load_failed": Rule(Severity.WARNING, Clears.REBOOT, "the driver could not start the card"),
    "port_failed": Rule(*WARNING_ENDING, "a port could not be opened"),
    "bond_down": Rule(*WARNING_ENDING, "no member of a bond was up"),
    "link_down": Rule(*RECORDED_ENDING, "the link went down"),
    "request_failed": Rule(*RECORDED_ENDING, "requests failed"),
    "pcie_limited": Rule(*RECORDED_ENDING, "the slot limits the card's bandwidth"),
}
# mlx5/core/cmd.c: "Will cause a leak of a command resource".
LEAK_RULE = Rule(
    Severity.DEGRADED, Clears.REBOOT, "the card's firmware did not respond, and the driver lost a resource"
)
REQUEST_CODES = frozenset({"command_failed", "cq_error", "cqe_error", "send_failed"})
LINK_UP = "link_up"
DETAIL_FIELDS = ("issue", "error", "command")  # fields with details


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and part, from all its events. A finding about a link ends when the link is up
    again."""
    mlx5_events = [event for event in events if _is_mlx5(event)]
    reports = _reports(mlx5_events)
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in mlx5_events:
        if code := _code(event, reports):
            groups.setdefault((code, _part(event)), []).append(event)
    for (code, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        rule = (
            LEAK_RULE
            if any(member.field("leaks") and member.boot_id == newest.boot_id for member in group)
            else RULES[code]
        )
        if newest.code == LINK_UP and len(group) == sum(event.code == LINK_UP for event in group):
            continue  # no line reported that the link went down
        yield Finding(
            severity=rule.severity,
            code=f"mlx5/{code}",
            subject=part,
            message=_message(rule, _most_detailed(group), sum(event.lines for event in group if event.code != LINK_UP)),
            clears=rule.clears,
            window_seconds=_window_seconds(code, rule, config),
            events=tuple(event.sequence for event in group),
            recovered=newest.code == LINK_UP,
        )


def _is_mlx5(event: KernelEvent) -> bool:
    """Return True for a line from the mlx5 driver, or from the InfiniBand core about an mlx5 device. checks/nic.py
    handles other lines from the core."""
    return event.kind == "mlx5" or (event.kind == "ib" and event.field("ibdev").startswith("mlx5_"))


Reports = Mapping[tuple[str, str], Sequence[tuple[float, int]]]


def _reports(mlx5_events: Sequence[KernelEvent]) -> Reports:
    """Return a dict that maps (boot, card) to the card's health reports, as (time, severity) pairs sorted by time."""
    reports: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for event in mlx5_events:
        if severity := event.field("severity"):
            reports.setdefault((event.boot_id, event.pci), []).append((event.time, int(severity)))
    return {card: sorted(found) for card, found in reports.items()}


def _code(event: KernelEvent, reports: Reports) -> str:
    """Return the finding's code, or "" if the event is ignored."""
    if event.code in REQUEST_CODES:
        return "request_failed"
    if event.code == LINK_UP:
        return "link_down"
    if event.code != "health":
        return event.code if event.code in RULES else ""
    severity = event.field("severity")
    worst = int(severity) if severity else _nearby_severity(event, reports)
    return "health_fatal" if worst <= FIRMWARE_ERROR else "health_warning"


def _nearby_severity(event: KernelEvent, reports: Reports) -> int:
    """Return the severity for a line that has no severity: the worst severity among the health reports nearby. Without
    a report, the line is an error, because older drivers report only errors.
    """
    found = reports.get((event.boot_id, event.pci), ())
    start = bisect.bisect_left(found, (event.time - INCIDENT_SECONDS, 0))
    nearby = [severity for time, severity in found[start : start + 8] if time <= event.time + INCIDENT_SECONDS]
    return min(nearby, default=FIRMWARE_ERROR)


def _part(event: KernelEvent) -> str:
    """Return the card's address. If it is unknown, return the interface or device that the line names."""
    fields = dict(event.fields)
    return event.pci or next((fields[name] for name in ("netdev", "ibdev", "bond", "device") if name in fields), "")


def _window_seconds(code: str, rule: Rule, config: Config) -> float:
    if rule.severity is Severity.INFO:
        return config.link_window_seconds
    return config.warning_window_seconds if rule.severity is Severity.WARNING else 0.0


def _most_detailed(group: Sequence[KernelEvent]) -> KernelEvent:
    """Return the newest event with details, or the newest event if none has details."""
    return max(
        group,
        key=lambda event: (any(name in DETAIL_FIELDS for name, _ in event.fields), event.last_time, event.sequence),
    )


def _message(rule: Rule, event: KernelEvent, lines: int) -> str:
    fields = dict(event.fields)
    details = [fields[name] for name in DETAIL_FIELDS if name in fields]
    named = [fields[name] for name in ("bond", "netdev", "ibdev") if name in fields]
    named += [f"{name} {fields[name]}" for name in ("port", "module") if name in fields]
    text = rule.text + (f": {', '.join(details)}" if details else "")
    return "".join(
        (text, f" ({', '.join(named)})" if named else "", f", {lines} lines" if lines > 1 else ""),
    )


_CARD_TODO = (
    "Read journalctl -k | grep mlx5. mstdump PCI and mlxfwmanager --query collect data for the vendor. Power-cycle the "
    "node and update the firmware. If the fault recurs, replace the card."
)
_CABLE_TODO = (
    "No action tonight. mlxlink -d DEVICE -m shows the transceiver. At the next maintenance, reseat the transceiver "
    "and check the airflow. If the condition returns, replace the transceiver or the cable."
)
_LOST = "Traffic over this card fails, which affects multi-node jobs and mounts."

EXPLAIN = {
    "mlx5/health_fatal": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The network card's driver reports that the card's firmware is dead or has an error, or that it could not "
        "recover the card.",
        _LOST,
        _CARD_TODO,
        remedy=Remedy.POWER_CYCLE,
    ),
    "mlx5/health_warning": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The card's firmware reports a problem, but does not rate this problem as an error.",
        "The card continues to work, but more serious problems may follow.",
        "No action tonight. The line names the problem. Update the firmware at the next maintenance.",
        window="warning_window_seconds",
    ),
    "mlx5/health_recovery": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The driver stopped the card to recover it, or because the card was switched off or reset (mlxfwreset, "
        "SR-IOV).",
        "Until the card is back, no traffic goes over it. If no operator reset the card, its firmware failed.",
        "No action tonight if the card came back. journalctl -k | grep mlx5 shows the cause and the result.",
        window="warning_window_seconds",
    ),
    "mlx5/temperature": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A temperature sensor on the network card is above its limit.",
        "If the card gets hotter, it shuts down.",
        "No action tonight. mget_temp -d DEVICE shows the temperature. Check fans, filters and blanking panels, and "
        "the card's own fan if it has one.",
        window="warning_window_seconds",
    ),
    "mlx5/module_temperature": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A transceiver or active cable of a network card is above its temperature limit.",
        "If the transceiver gets hotter, it is switched off and the link goes down.",
        _CABLE_TODO,
        window="warning_window_seconds",
    ),
    "mlx5/module_power": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A transceiver or cable requests more power than the port or the slot can supply.",
        "The port does not come up.",
        f"{_CABLE_TODO} Use a transceiver of a lower power class, or a card and slot that supply more power.",
        window="warning_window_seconds",
    ),
    "mlx5/module_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The card cannot use a transceiver or cable because it is shorted, unreadable, unknown or not permitted.",
        "The port does not come up, or goes down.",
        _CABLE_TODO,
        window="warning_window_seconds",
    ),
    "mlx5/slot_power": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The PCI Express slot supplies less power than the network card may need. Some machines log this at each "
        "boot. If the card switched ports off for this reason, the kernel line names the ports.",
        "The card or an active cable may be slowed down. A port that was switched off has no link.",
        "No action tonight. Compare the card's speed with that of its neighbours (ib_link, eth_link). Check the slot's "
        "power in the BIOS, and the card's own power cable.",
        window="warning_window_seconds",
    ),
    "mlx5/command_timeout": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The network card's firmware did not answer a command from the driver. The node drains if the driver reports "
        "that it lost a resource or accepts no further commands. Otherwise this is a warning.",
        "Queues cannot be created or destroyed. Jobs that start or end hang for a minute at each queue, and each "
        "hang loses a resource of the card.",
        f"If the condition is only a warning, no action is needed tonight. {_CARD_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
        remedy=Remedy.POWER_CYCLE,
    ),
    "mlx5/tx_timeout": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets waited for seconds in one of the card's queues, and the driver restarted the queue.",
        "Connections stall or break. A single case may be caused by the switch (pause frames). If packets wait "
        "repeatedly, the cause is the card or the driver.",
        "No action tonight. Check ethtool -S INTERFACE | grep -E 'pause|timeout|err'. journalctl -k | grep mlx5 shows "
        "the surrounding lines.",
        window="warning_window_seconds",
    ),
    "mlx5/pci_error": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel reported a PCI Express error to the card's driver and reset the card.",
        "Work that used the card has failed. pcie_aer evaluates the error itself.",
        "No action tonight. journalctl -k | grep -E 'AER|mlx5' shows the error. At the next maintenance, reseat the "
        "card and check the riser and cables.",
        window="warning_window_seconds",
    ),
    "mlx5/load_failed": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The driver could not start a network card (or its virtual function).",
        "No job can use the card. If ports are expected, ib_link and eth_link drain the node.",
        "No action tonight. The preceding lines in journalctl -k show the reason, such as firmware older than the "
        "driver, dead firmware or a lack of resources.",
        window="warning_window_seconds",
    ),
    "mlx5/port_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel could not open a port of an RDMA device for management packets.",
        "The port stays in the state INIT because no subnet manager can reach it. The cause may be SELinux or a "
        "dying device.",
        "No action tonight. Check journalctl -k and ausearch -m avc around that time, and ibstat.",
        window="warning_window_seconds",
    ),
    "mlx5/bond_down": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "No member of a bond was up.",
        "All traffic over the bond stopped. eth_link reports whether the bond is still down.",
        "No action tonight. Read /proc/net/bonding/BOND, and check the switch at the other end of the bond's cables.",
        window="warning_window_seconds",
    ),
    "mlx5/link_down": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The link of a network card's port went down.",
        "There is no effect if an administrator took the link down, or if the link is back up. ib_link, ib_flap and "
        "eth_link evaluate links.",
        "No action needed. mlxlink -d DEVICE shows why the port is down (Troubleshooting Info).",
        window="link_window_seconds",
    ),
    "mlx5/request_failed": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The network card rejected a request or failed to process it. For example, a completion queue overflowed or "
        "a command was not possible.",
        "The cause is usually an application or the other node.",
        "No action needed, unless jobs of several users are affected on this node.",
        window="link_window_seconds",
    ),
    "mlx5/pcie_limited": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The driver found at its start that the PCI Express link gives the network card less bandwidth than the card "
        "could use.",
        "The card may not reach the speed of its network port. Many slots are built this way. pcie_link evaluates "
        "the PCI Express link.",
        "No action needed. Compare LnkCap and LnkSta in lspci -vv -s PCI, for the card and the port above.",
        window="link_window_seconds",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.IB_LINK),
    "mlx5/slot_power": FailureCause.PCIE,
    "mlx5/pci_error": FailureCause.PCIE,
    "mlx5/bond_down": FailureCause.ETHERNET,
    "mlx5/pcie_limited": FailureCause.PCIE,
}
ENDS_JOB = {
    "mlx5/health_fatal": EndsJob.ALWAYS,
    "mlx5/temperature": EndsJob.NEVER,
    "mlx5/module_temperature": EndsJob.NEVER,
    "mlx5/module_power": EndsJob.NEVER,
    "mlx5/slot_power": EndsJob.NEVER,
    "mlx5/command_timeout": EndsJob.ALWAYS,
    "mlx5/pcie_limited": EndsJob.NEVER,
}
