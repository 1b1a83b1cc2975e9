"""InfiniBand and RoCE ports: link state and rate.

Rules: only ports that the site expects are checked. A port that is down is degraded after one minute and critical after
four minutes, because a leaf switch reboots in one minute and NCCL survives that (Meta's study counts links as high
severity; gpud waits 4 minutes, AzNHC compares the rate). A slow link drains the node without a requeue, because jobs
continue. Files: Linux, sysfs-class-infiniband.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import field

from healthd.api import (
    NO_IB_PORT,
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    Gbps,
    History,
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    Seconds,
    Severity,
    Worsens,
    WorsensBy,
    regex,
)
from healthd.host import infiniband
from healthd.host.network_card import is_card

USES = ""
AFTER_EVENTS = ("mlx5", "ib", "job_end")
BASELINE = Baseline(("expected_gbps",), place=30)

RATE = regex(r"([0-9]{1,6}(?:\.[0-9]+)?) Gb/sec \([0-9]{1,2}X(?: (\w+))?\)")
LINK_UP = "5: LinkUp"
NO_PHYSICAL_STATE = "0: <unknown>"  # virtual functions report this state
PHYSICAL_STATES = (
    *(NO_PHYSICAL_STATE, "1: Sleep", "2: Polling", "3: Disabled", "4: PortConfigurationTraining"),
    *(LINK_UP, "6: LinkErrorRecovery", "7: Phy Test"),
)


class Config(CheckSettings, frozen=True):
    """expected_gbps     rate of each port in Gbit/s: {"mlx5_0/1" = 400}; 0 = any rate. Other ports are not checked
    confirm_seconds   a problem must last this long before it is reported
    critical_seconds  a port that is down for this long is critical
    """

    expected_gbps: dict[str, Gbps] = field(default_factory=dict)
    confirm_seconds: Seconds = 60.0
    critical_seconds: Seconds = 240.0


def validate(config: Config) -> str | None:
    for port, rate in config.expected_gbps.items():
        if rate < 0:
            return f"expected_gbps: the rate of {port} must not be negative, got {rate:g}"
    return infiniband.port_name_problem("expected_gbps", config.expected_gbps)


class Port(NamedTuple):
    """State of a port. If a kernel does not know a newer speed, it prints the oldest speed without a name, such as "10
    Gb/sec (4X)" for a 200 Gbit/s port.

    gbps             as the kernel prints it
    is_speed_named   True if the kernel prints the speed's name
    """

    active: bool
    state_text: str
    gbps: float
    is_speed_named: bool


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected_gbps:
        yield NOT_IN_BASELINE if infiniband.ports(host) else NO_IB_PORT
    ports: dict[str, Port | None] = {}
    unreadable = []
    for name in sorted({*infiniband.ports(host), *config.expected_gbps}):
        try:
            ports[name] = _read(host, name)
        except (OSError, ValueError) as error:  # this error must not hide the other ports
            unreadable.append((name, str(error)))
    for name, port in ports.items():
        if port is not None:
            yield Observation("ib_port_active", int(port.active), labels=(("port", name),))
            yield Observation("ib_port_rate_bytes_per_second", port.gbps * 1e9 / 8, labels=(("port", name),))
    fastest = max((port.gbps for port in ports.values() if port and port.active), default=0.0)
    for name, gbps in config.expected_gbps.items():
        if name in ports:
            yield from _judge(name, ports[name], gbps, fastest, config)
    problems = [problem for name, problem in unreadable if name in config.expected_gbps]
    if problems:
        raise ValueError("; ".join(problems))


def _read(host: Host, name: str) -> Port | None:
    """Return the port's state, or None if there is no such port or it disappeared while being read."""
    state, physical, rate = (host.read_shared(infiniband.path(name, file)) for file in ("state", "phys_state", "rate"))
    return None if state is None or physical is None or rate is None else parse(name, state, physical, rate)


def parse(name: str, state: str, physical: str, rate: str) -> Port:
    """Parse texts such as "4: ACTIVE", "5: LinkUp" and "400 Gb/sec (4X NDR)". Raises ValueError for anything else.

    A port that is down also has a rate, so check `active` first.
    """
    if state not in infiniband.STATES:
        raise ValueError(f"{name}: not a state: {state[:60]!r}")
    if physical not in PHYSICAL_STATES:
        raise ValueError(f"{name}: not a physical state: {physical[:60]!r}")
    match = RATE.fullmatch(rate)
    if match is None:
        raise ValueError(f"{name}: not a rate: {rate[:60]!r}")
    up = physical in (LINK_UP, NO_PHYSICAL_STATE)
    word = state.partition(": ")[2]
    state_text = f"{word}/{physical.partition(': ')[2]}"
    return Port(word == "ACTIVE" and up, state_text, float(match[1]), match[2] is not None)


def _judge(name: str, port: Port | None, gbps: float, fastest: float, config: Config) -> Iterator[Finding]:
    if port is None or not port.active:
        yield Finding(
            Severity.DEGRADED,
            "ib_link/missing" if port is None else "ib_link/down",
            name,
            f"port {name} is missing" if port is None else f"port {name} is {port.state_text}, not ACTIVE/LinkUp",
            confirm_seconds=config.confirm_seconds,
            worsens=Worsens(config.critical_seconds, Severity.CRITICAL),
            shared_cause=port is not None,
            expects="expected_gbps",
        )
    elif port.gbps < gbps:
        # If the speed has no name, the link may be fine and the kernel too old. This does not apply if another port
        # shows that this kernel knows the speed.
        is_speed_known = port.is_speed_named or fastest >= gbps
        yield Finding(
            Severity.DEGRADED if is_speed_known else Severity.WARNING,
            "ib_link/slow" if is_speed_known else "ib_link/rate_unknown",
            name,
            f"port {name} runs at {port.gbps:g} Gbit/s; expected {gbps:g}",
            confirm_seconds=config.confirm_seconds,
            expects="expected_gbps",
        )


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    for device in host.list(infiniband.DEVICES):
        if not is_card(host, f"{infiniband.DEVICES}/{device}"):
            continue
        for number in host.list(f"{infiniband.DEVICES}/{device}/ports"):
            name, path = f"{device}/{number}", f"{infiniband.DEVICES}/{device}/ports/{number}"
            try:
                port = parse(name, *((host.read(f"{path}/{file}") or "") for file in ("state", "phys_state", "rate")))
            except (OSError, ValueError) as error:
                yield LeftOut("ib_link", str(error), "expected_gbps", name, unread=True)
                continue
            if port.active:
                note = (
                    host.read_or_empty(f"{path}/link_layer")
                    if port.is_speed_named
                    else "this kernel does not know the speed's name"
                )
                gbps = int(port.gbps) if port.gbps == int(port.gbps) else port.gbps
                yield Entry("ib_link", "expected_gbps", gbps if port.is_speed_named else 0, name, note=note)
            else:
                yield LeftOut("ib_link", f"is {port.state_text}", "expected_gbps", name)


_CABLE_TODO = (
    "Run ibstat, mlxlink -d DEVICE -m and journalctl -k | grep mlx5. If only this node is affected, reseat or replace "
    "the cable or its transceiver, or try another switch port. If many nodes are affected at once, check the switch."
)

OBSERVATIONS = {
    "ib_port_active": Meaning("1 if the InfiniBand port is ACTIVE, else 0.", ("port",)),
    "ib_port_rate_bytes_per_second": Meaning("Rate of the InfiniBand port's link, in bytes per second.", ("port",)),
}

EXPLAIN = {
    "ib_link/down": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "An expected port is not ACTIVE and LinkUp. The condition is degraded at first and becomes critical if it "
        "lasts.",
        "Multi-node jobs hang in collectives and end with timeouts. File systems mounted over this port hang as well.",
        f"{_CABLE_TODO} The state INIT means that the link is up but no subnet manager has configured the port; check "
        "opensm or UFM.",
        confirm="confirm_seconds",
        worsens=WorsensBy("critical_seconds", Severity.CRITICAL),
        shared=True,
        expects="expected_gbps",
    ),
    "ib_link/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "An expected port is missing. Its adapter or driver is gone, or the port has another name.",
        "Multi-node jobs fail or fall back to a slow path.",
        "Run lspci | grep -i mellanox, journalctl -k | grep mlx5 and rdma link. If the adapter is missing on PCI as "
        "well, reseat it. If udev renamed the port (mlx5_0 became ibp26s0), correct expected_gbps.",
        confirm="confirm_seconds",
        worsens=WorsensBy("critical_seconds", Severity.CRITICAL),
        expects="expected_gbps",
    ),
    "ib_link/slow": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The link is up but slower than expected, because it has fewer lanes or runs at an older speed.",
        "Every job that uses this node runs only as fast as this link.",
        _CABLE_TODO,
        confirm="confirm_seconds",
        expects="expected_gbps",
    ),
    "ib_link/rate_unknown": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The kernel reports the oldest speed (10 Gb/sec) for the port, without a name. Either the kernel does not "
        "know the real speed, or the link really fell back to 10 Gb/sec.",
        "The effect is unknown, so this is only a warning.",
        "No action tonight. mlxlink -d DEVICE shows the real speed. If the link is fine, set expected_gbps to the rate "
        "that this kernel shows, or to 0.",
        confirm="confirm_seconds",
        expects="expected_gbps",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.IB_LINK)
ENDS_JOB = {
    "ib_link/down": EndsJob.ALWAYS,
    "ib_link/missing": EndsJob.ALWAYS,
    "ib_link/slow": EndsJob.NEVER,
    "ib_link/rate_unknown": EndsJob.NEVER,
}
PERMANENT = ("ib_link/missing",)
