"""Ethernet interfaces and bonds: link state, speed, MTU and carrier changes.

Rules (as in Azure healthagent): an interface that is not up is a fault, and frequent carrier changes are a warning.
Only expected interfaces and the members of expected bonds are checked. If one member is down, a bond still works, but
slower and without redundancy. If the interface's MTU differs from the network's MTU, large packets are lost or split
into many small ones (GCM's check-ethlink). Files: Linux, sysfs-class-net.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    Count,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    Mbps,
    Meaning,
    Mtu,
    NothingToCheck,
    Observation,
    ObservationKind,
    Seconds,
    Severity,
    is_decimal,
    regex,
)
from healthd.host.network_card import is_card

USES = ""
AFTER_EVENTS = ("mlx5", "ib")
BASELINE = Baseline(("expected_mbps", "expected_mtu"), place=31)

NET = "/sys/class/net"
NAME = regex(r"(?!\.{1,2}$)[^/\s:]{1,15}")
DOWN = ("down", "lowerlayerdown", "dormant", "notpresent", "testing")
COUNT = regex(r"[0-9]{1,10}")
SPEED_UNKNOWN = ("-1", "0", "4294967295")


class Config(CheckSettings, frozen=True):
    """expected_mbps     speed of each interface or bond in Mbit/s: {"bond0" = 200000}; 0 = any. Only these are checked
    expected_mtu      MTU of each interface or bond in bytes: {"bond0" = 9000}. Only these are checked
    confirm_seconds   a problem must last this long before it is reported
    carrier_changes   warn if the carrier changes more often than this within carrier_changes_window_seconds; a flap
                      is two changes
    carrier_changes_window_seconds   period in which carrier changes are counted
    """

    expected_mbps: dict[str, Mbps] = field(default_factory=dict)
    expected_mtu: dict[str, Mtu] = field(default_factory=dict)
    confirm_seconds: Seconds = 60.0
    carrier_changes: Count = 3
    carrier_changes_window_seconds: Seconds = 3600.0


def validate(config: Config) -> str | None:
    for name, mbps in config.expected_mbps.items():
        if not NAME.fullmatch(name):
            return f'expected_mbps: "{name}" is not an interface name like "eth0"'
        if mbps < 0:
            return f"expected_mbps: the speed of {name} must not be negative, got {mbps}"
    for name, mtu in config.expected_mtu.items():
        if not NAME.fullmatch(name):
            return f'expected_mtu: "{name}" is not an interface name like "eth0"'
        if mtu <= 0:
            return f"expected_mtu: the MTU of {name} must be above 0, got {mtu}"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected_mbps and not config.expected_mtu:
        yield NOT_IN_BASELINE
    unreadable = []
    bonds: dict[str, str] = {}  # member -> its bond
    for name in config.expected_mbps:
        try:
            bonds.update(dict.fromkeys(_members(host, name), name))
        except OSError as error:
            unreadable.append(f"{name}: {error}")
    for name in {**config.expected_mbps, **bonds}:
        try:
            yield from _judge(host, name, bonds.get(name, ""), config, past)
        except (OSError, ValueError) as error:  # this error must not hide findings about other interfaces
            unreadable.append(f"{name}: {error}")
    for name in config.expected_mtu:
        try:
            yield from _mtu(host, name, config)
        except (OSError, ValueError) as error:
            unreadable.append(f"{name}: {error}")
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _members(host: Host, name: str) -> list[str]:
    """Return the members of a bond. The bond's sysfs directory has a link lower_NAME for each member, as a bridge or
    VLAN has for the devices below.
    """
    entries = host.list(f"{NET}/{name}")
    return [entry.removeprefix("lower_") for entry in entries if entry.startswith("lower_") and "bonding" in entries]


def _judge(host: Host, name: str, bond: str, config: Config, past: History) -> Iterator[Finding | Observation]:
    interface = f"interface {name}, a member of {bond}," if bond else f"interface {name}"
    mbps = config.expected_mbps.get(name, 0)
    state = host.read(f"{NET}/{name}/operstate")
    up = state is not None and is_up(host, name, state)
    yield Observation("eth_interface_up", int(up), labels=(("interface", name),))
    code = problem = ""
    if state is None:
        code, problem = "missing", f"{interface} is missing"
    elif not up:
        code, problem = "member_down" if bond else "down", f"{interface} is not up ({state})"
    elif mbps and (speed := _speed(host, name)) < mbps:
        code, problem = "slow", f"{interface} runs at {speed} Mbit/s; expected {mbps}"
    if code:
        yield Finding(
            Severity.DEGRADED,
            f"eth_link/{code}",
            name,
            problem,
            confirm_seconds=config.confirm_seconds,
            shared_cause=code in ("down", "member_down"),
            expects="expected_mbps",
        )
    yield from _carrier(host, name, config, past)


def is_up(host: Host, name: str, state: str) -> bool:
    """Return True if the interface is up. If the driver leaves operstate at "unknown", return True if there is a
    carrier.

    Raises ValueError for an unknown state.
    """
    if state == "unknown":
        state = {"1": "up", "0": "down"}.get(host.read(f"{NET}/{name}/carrier") or "", "of unknown carrier")
    if state != "up" and state not in DOWN:
        raise ValueError(f"{name}/operstate: not a state: {state[:40]!r}")
    return state == "up"


def _speed(host: Host, name: str) -> int:
    text = host.read(f"{NET}/{name}/speed") or ""
    if text in SPEED_UNKNOWN:
        raise ValueError(f"{name}/speed: the driver does not report it ({text}); expected_mbps = 0 accepts any speed")
    if not COUNT.fullmatch(text):
        raise ValueError(f"{name}/speed: not a speed: {text[:40]!r}")
    return int(text)


def _mtu(host: Host, name: str, config: Config) -> Iterator[Finding]:
    text = host.read(f"{NET}/{name}/mtu")
    if text is None:
        return  # expected_mbps already reports a missing interface
    if not COUNT.fullmatch(text):
        raise ValueError(f"{name}/mtu: not a number of bytes: {text[:40]!r}")
    expected = config.expected_mtu[name]
    if int(text) != expected:
        yield Finding(
            Severity.WARNING,
            "eth_link/mtu",
            name,
            f"interface {name} has MTU {int(text)}; expected {expected}",
            confirm_seconds=config.confirm_seconds,
            expects="expected_mtu",
        )


def _carrier(host: Host, name: str, config: Config, past: History) -> Iterator[Finding | Observation]:
    text = host.read(f"{NET}/{name}/carrier_changes")
    if text is None:
        return
    if not COUNT.fullmatch(text):
        raise ValueError(f"{name}/carrier_changes: not a count: {text[:40]!r}")
    labels = (("interface", name),)
    reading = Observation("eth_carrier_changes_total", int(text), ObservationKind.COUNTER, labels)
    yield reading
    changes = past.growth(reading, config.carrier_changes_window_seconds) or 0.0
    if changes > config.carrier_changes:
        hours = config.carrier_changes_window_seconds / 3600
        message = f"the carrier of interface {name} changed {changes:.0f} times within {hours:g} h"
        yield Finding(Severity.WARNING, "eth_link/flapping", name, message)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    entries = {name: host.list(f"{NET}/{name}") for name in host.list(NET)}
    bonds = {name for name, files in entries.items() if "bonding" in files}
    members = {entry[6:] for name in bonds for entry in entries[name] if entry.startswith("lower_")}
    for name in sorted(entries.keys() - members):  # eth_link finds bond members by itself
        path = f"{NET}/{name}"
        if name not in bonds and not is_card(host, path):
            continue
        if (
            not NAME.fullmatch(name)
            or host.read_or_empty(f"{path}/type") != "1"
            or "f" in host.read_or_empty(f"{path}/phys_port_name")
        ):
            continue  # not Ethernet (ib_link has InfiniBand), or a virtual function ("pf0vf3", "pf0sf1")
        try:
            state = host.read(f"{path}/operstate") or ""
            if not is_up(host, name, state):
                yield LeftOut("eth_link", f"is {state}", "expected_mbps", name)
                continue
            speed = host.read(f"{path}/speed") or "0"
        except (OSError, ValueError) as error:
            yield LeftOut("eth_link", str(error), "expected_mbps", name, unread=True)
            continue
        is_speed_known = speed not in SPEED_UNKNOWN and is_decimal(speed)
        note = "" if is_speed_known else "the driver does not report the speed"
        yield Entry("eth_link", "expected_mbps", int(speed) if is_speed_known else 0, name, note=note)
        mtu = host.read_or_empty(f"{path}/mtu")
        if COUNT.fullmatch(mtu) and int(mtu):
            yield Entry("eth_link", "expected_mtu", int(mtu), name)


_TODO = (
    "Run ip -s link show INTERFACE, ethtool INTERFACE and journalctl -k | grep INTERFACE. If only this node is "
    "affected, reseat or replace the cable or its transceiver, or try another switch port. If many nodes are affected "
    "at once, check the switch."
)

OBSERVATIONS = {
    "eth_interface_up": Meaning("1 if the network interface is up, else 0.", ("interface",)),
    "eth_carrier_changes_total": Meaning(
        "Number of carrier changes since the interface was created.",
        ("interface",),
    ),
}

EXPLAIN = {
    "eth_link/down": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "An expected interface or bond is not up.",
        "File systems, Slurm or jobs that use this network hang or fail.",
        f"{_TODO} If an administrator took the interface down, run ip link set INTERFACE up.",
        confirm="confirm_seconds",
        shared=True,
        expects="expected_mbps",
    ),
    "eth_link/member_down": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A member of a bond is down. The bond continues to work.",
        "The bond has less bandwidth and no redundancy. If the other member fails too, the node loses this network.",
        f"{_TODO} cat /proc/net/bonding/BOND shows the state of its members.",
        confirm="confirm_seconds",
        shared=True,
        expects="expected_mbps",
    ),
    "eth_link/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "An expected interface is missing. Its card or driver is gone, or the interface has another name.",
        "File systems, Slurm or jobs that use this network fail.",
        "Run ip link, lspci | grep -i ethernet and journalctl -k | grep -i renamed. If udev renamed the interface, "
        "correct expected_mbps.",
        confirm="confirm_seconds",
        expects="expected_mbps",
    ),
    "eth_link/slow": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The interface is up but slower than expected. If the interface is a bond, a member may be missing.",
        "Every job that uses this node runs only as fast as this link.",
        _TODO,
        confirm="confirm_seconds",
        expects="expected_mbps",
    ),
    "eth_link/mtu": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The interface's MTU (maximum packet size) differs from the settings.",
        "If this MTU is larger than the network's MTU, large packets are lost and connections hang. If it is "
        "smaller, throughput suffers.",
        "No action tonight. Compare ip link show INTERFACE with a healthy node. ip link set INTERFACE mtu N lasts "
        "until the next boot. Set it permanently in the network configuration (NetworkManager, systemd-networkd, "
        "netplan).",
        confirm="confirm_seconds",
        expects="expected_mtu",
    ),
    "eth_link/flapping": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The interface lost its carrier repeatedly.",
        "Connections stall each time. Such a link often goes down permanently later.",
        f"No action tonight. {_TODO}",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.ETHERNET)
ENDS_JOB = {
    "eth_link/down": EndsJob.ALWAYS,
    "eth_link/member_down": EndsJob.NEVER,
    "eth_link/missing": EndsJob.ALWAYS,
    "eth_link/slow": EndsJob.NEVER,
    "eth_link/mtu": EndsJob.NEVER,
}
PERMANENT = ("eth_link/missing",)
