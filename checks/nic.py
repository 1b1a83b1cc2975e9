"""Kernel log faults of network cards other than mlx5: bnxt, ice, irdma, ENA, EFA, mlx4 and other Ethernet cards.

Rules: if a card's firmware is dead or its driver could not reset the card, the card works again only after the driver
is reloaded ("Rebuild failed, unload and reload driver", ice_main.c). Such a card drains the node until a reboot, like
mlx5/health_fatal. An EFA card that did not answer a command drains as well, because its driver sends no further
commands (efa_com.c clears EFA_AQ_STATE_RUNNING_BIT), and NVSentinel calls that fatal. Failures to create RDMA objects
are only warnings, because a job may have used up all objects. Resets by the driver itself, other timeouts and ports
that cannot be opened are warnings as well. Links that go down and failed requests are only recorded; ib_link, ib_flap
and eth_link evaluate links.

Lines from the InfiniBand core (IPoIB, management ports) that do not name an mlx5 device are handled here too. This
includes lines about an mlx5 device that udev renamed ("infiniband ibp65s0: Couldn't open port 1"), because neither the
line nor the inventory shows an RDMA device's driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    Seconds,
    Severity,
)

USES = ""


class Config(CheckSettings, frozen=True):
    """warning_window_seconds   how long a warning stays open without a further kernel line
    link_window_seconds      a link that went down, or a failed request, stays recorded for this long
    """

    warning_window_seconds: Seconds = 24 * 3600.0
    link_window_seconds: Seconds = 3600.0


class Rule(NamedTuple):
    """Properties of the finding for one kind of event. The message starts with `text`."""

    code: str
    severity: Severity
    clears: Clears
    text: str


_WARNING_ENDING = (Severity.WARNING, Clears.WINDOW)
_RECORDED_ENDING = (Severity.INFO, Clears.WINDOW)
_REQUESTS = Rule("request_failed", *_RECORDED_ENDING, "requests failed")
RULES = {
    "health_fatal": Rule("firmware_failed", Severity.DEGRADED, Clears.REBOOT, "the card no longer works"),
    "health_recovery": Rule("recovery", *_WARNING_ENDING, "the driver is resetting the card"),
    "rdma_failed": Rule("rdma_failed", *_WARNING_ENDING, "RDMA does not work on this card"),
    "command_timeout": Rule("command_timeout", *_WARNING_ENDING, "the card did not answer a command"),
    "tx_timeout": Rule("tx_timeout", *_WARNING_ENDING, "packets were not sent in time"),
    "port_failed": Rule("port_failed", *_WARNING_ENDING, "a port could not be opened"),
    "link_down": Rule("link_down", *_RECORDED_ENDING, "the link went down"),
    "link_up": Rule("link_down", *_RECORDED_ENDING, "the link went down"),
    **dict.fromkeys(("command_failed", "send_failed"), _REQUESTS),
}
# efa_com.c: after a command without a response the driver sends no further commands.
GIVEN_UP_RULE = Rule(
    "command_timeout", Severity.DEGRADED, Clears.REBOOT, "the card did not respond, and the driver gave up on it"
)


def correlate(events: Sequence[KernelEvent], node: Inventory, config: Config) -> Iterator[Finding]:
    """Yield one finding for each code and card, from all its events. A finding about a link ends when the link is up
    again."""
    groups: dict[tuple[str, str], list[KernelEvent]] = {}
    for event in events:
        if event.kind == "ib" and event.code in RULES and not event.field("ibdev").startswith("mlx5_"):
            groups.setdefault((RULES[event.code].code, _part(event)), []).append(event)
    for (code, part), group in groups.items():
        newest = max(group, key=lambda event: (event.last_time, event.sequence))
        faults = [event for event in group if event.code != "link_up"]
        if not faults:
            continue  # no line reported that the link went down
        gave_up = any(event.field("leaks") and event.boot_id == newest.boot_id for event in group)
        rule = GIVEN_UP_RULE if gave_up else RULES[faults[0].code]
        yield Finding(
            severity=rule.severity,
            code=f"nic/{code}",
            subject=part,
            message=_message(rule, max(faults, key=lambda event: (event.last_time, event.sequence)), faults),
            clears=rule.clears,
            window_seconds=_window_seconds(rule, config),
            events=tuple(event.sequence for event in group),
            recovered=newest.code == "link_up",
        )


def _part(event: KernelEvent) -> str:
    """Return the card's address. If it is unknown, return the interface or RDMA device that the line names."""
    return event.pci or event.field("netdev") or event.field("ibdev")


def _window_seconds(rule: Rule, config: Config) -> float:
    if rule.severity is Severity.INFO:
        return config.link_window_seconds
    return config.warning_window_seconds if rule.severity is Severity.WARNING else 0.0


def _message(rule: Rule, event: KernelEvent, faults: Sequence[KernelEvent]) -> str:
    command = event.field("command")
    named = [event.field(name) for name in ("netdev", "ibdev") if event.field(name)]
    named += [f"port {event.field('port')}"] if event.field("port") else []
    lines = sum(each.lines for each in faults)
    text = rule.text + (f": {command}" if command else "")
    return text + (f" ({', '.join(named)})" if named else "") + (f", {lines} lines" if lines > 1 else "")


_LOST = "Traffic over this card fails, which affects multi-node jobs and mounts."
_CARD_TODO = (
    "journalctl -k shows the driver's surrounding lines, and ethtool -i INTERFACE shows the driver and firmware "
    "versions. After the drain, reboot (or reload the driver on the idle node) and update the firmware. If the fault "
    "recurs, replace the card."
)

EXPLAIN = {
    "nic/firmware_failed": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A network card's driver reports that the card's firmware is dead, or that it could not reset the card.",
        f"{_LOST} The card works again only after its driver is reloaded.",
        _CARD_TODO,
    ),
    "nic/recovery": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "A network card's firmware failed or did not respond, and the driver is resetting the card.",
        "During the reset no traffic goes over the card, and RDMA connections break. If the reset fails, "
        "nic/firmware_failed follows.",
        "No action tonight if the card came back (journalctl -k). If resets recur, update the firmware. If resets "
        "continue after the update, replace the card.",
        window="warning_window_seconds",
    ),
    "nic/rdma_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The network card could not create an RDMA object such as a completion queue or queue pair, or its RDMA "
        "function failed. The port may still be ACTIVE.",
        "NCCL and MPI cannot start or continue over this card, because ibv_create_cq and similar calls fail.",
        "No action tonight. ibv_devinfo -v -d DEVICE and a loopback ib_write_bw on the idle node show whether RDMA "
        "works. If RDMA fails, reload the driver or reboot, and update the firmware. If RDMA works, a job had used "
        "up the card's objects.",
        window="warning_window_seconds",
    ),
    "nic/command_timeout": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The network card's firmware did not answer a command from the driver. The node drains if the driver gives "
        "up on the card (EFA). Otherwise this is a warning.",
        "RDMA objects cannot be created or destroyed, so jobs hang when they start or end.",
        f"If the condition is only a warning, no action is needed tonight. {_CARD_TODO}",
        also=(Severity.WARNING,),
        milder=Ends(Clears.WINDOW, "warning_window_seconds"),
    ),
    "nic/tx_timeout": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets waited for seconds in one of the network card's queues, and the driver restarted the queue or the "
        "card.",
        "Connections stall or break. A single case may be caused by the switch (pause frames). If packets wait "
        "repeatedly, the cause is the card or the driver.",
        "No action tonight. Check ethtool -S INTERFACE | grep -E 'pause|timeout|err', and the surrounding lines in "
        "journalctl -k.",
        window="warning_window_seconds",
    ),
    "nic/port_failed": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The kernel could not open a port of an RDMA device for management packets.",
        "The port stays in the state INIT because no subnet manager can reach it.",
        "No action tonight. Check journalctl -k and ausearch -m avc around that time, and ibstat.",
        window="warning_window_seconds",
    ),
    "nic/link_down": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The link of a network card's port went down.",
        "There is no effect if an administrator took the link down, or if the link is back up. ib_link, ib_flap and "
        "eth_link evaluate links.",
        "No action needed. ethtool INTERFACE shows the link. If the link stays down, check the cable, the transceiver "
        "and the switch port.",
        window="link_window_seconds",
    ),
    "nic/request_failed": Explain(
        Severity.INFO,
        Clears.WINDOW,
        "The network card rejected a request or failed to process it.",
        "The cause is usually an application or the other node.",
        "No action needed, unless jobs of several users are affected on this node.",
        window="link_window_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.IB_LINK)
ENDS_JOB = {
    "nic/firmware_failed": EndsJob.ALWAYS,
    "nic/command_timeout": EndsJob.ALWAYS,
}
