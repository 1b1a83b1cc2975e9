"""InfiniBand and RoCE links that repeatedly go down and come back (flapping).

Rules: three times in 3 hours by the port's own counter, or five lost carriers in 24 hours (Azure healthagent, AzNHC and
OCI count flaps in this way). Growth within 30 minutes of boot is ignored, while links train. Only growth counts, so
every port is checked: a port that stays down does not go down again. Files: Linux, sysfs-class-infiniband: link_downed,
which stops at 255; and sysfs-class-net: carrier_down_count of the port's network interface, if it has one
(carrier_changes would count each flap twice).
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_IB_PORT,
    CheckSettings,
    Clears,
    Count,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    Seconds,
    Severity,
)
from healthd.host import infiniband

USES = ""
AFTER_EVENTS = ("mlx5", "ib")

COUNTER_LIMIT = 255


class Config(CheckSettings, frozen=True):
    """ports            ("mlx5_0/1", ...); () = all ports of the node
    links_downed     a link that was down this often within its window is a fault, by the port's counter
    links_downed_window_seconds
    carriers_lost    the same, by the port's network interface
    carriers_lost_window_seconds
    boot_seconds     nothing counts during this time after a boot
    clean_seconds    it clears after this long under load without another flap, or by `healthd repaired`
    """

    ports: tuple[str, ...] = ()
    links_downed: Count = 3
    links_downed_window_seconds: Seconds = 3 * 3600.0
    carriers_lost: Count = 5
    carriers_lost_window_seconds: Seconds = 24 * 3600.0
    boot_seconds: Seconds = 1800.0
    clean_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    if min(config.links_downed, config.carriers_lost) < 1:
        return "links_downed and carriers_lost must be at least 1"
    return infiniband.port_name_problem("ports", config.ports)


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    present = infiniband.ports(host)
    if not present and not config.ports:
        yield NO_IB_PORT
    ports = [name for name in present if not config.ports or name in config.ports]
    unreadable = [f"{name}: there is no such port" for name in config.ports if name not in present]
    settled = infiniband.settled_seconds(host, config.boot_seconds) if ports else 0.0
    for name in ports:
        for code, read_counter, limit, window in (
            ("link_downed", _link_downed, config.links_downed, config.links_downed_window_seconds),
            ("carrier_lost", _carrier_lost, config.carriers_lost, config.carriers_lost_window_seconds),
        ):
            try:
                reading = read_counter(host, name, past)
            except (OSError, ValueError) as error:  # this error must not hide the other counters
                unreadable.append(f"{name}: {error}")
                continue
            if reading is None:
                continue
            yield reading
            if code == "link_downed" and reading.value == COUNTER_LIMIT:
                message = (
                    f"port {name} has counted {COUNTER_LIMIT} times that its link went down, the counter's maximum"
                )
                yield Finding(Severity.INFO, "ib_flap/counter_full", name, message)
            window = min(window, settled)
            times = past.growth(reading, window) or 0.0
            if times >= limit and window > 0 and past.growth(reading, 0.0):  # old growth was reported before
                yield Finding(
                    Severity.DEGRADED,
                    f"ib_flap/{code}",
                    name,
                    f"the link of port {name} went down {times:.0f} times within {window / 3600:.1f} h",
                    clears=Clears.OPERATOR,
                    window_seconds=config.clean_seconds,
                    shared_cause=True,
                )
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _link_downed(host: Host, name: str, past: History) -> Observation | None:
    counted = infiniband.count(host, infiniband.path(name, "counters/link_downed"))
    return _reading("ib_link_downed_total", (("port", name),), counted, past)


def _carrier_lost(host: Host, name: str, past: History) -> Observation | None:
    """Read the count of lost carriers. dev_port links each interface of a device to its port. The first interface of a
    port by name is its own: partitions (ib0.8001) and representors (ens1f0npf0vf0) sort after it."""
    device, _, number = name.partition("/")
    net = f"{infiniband.DEVICES}/{device}/device/net"
    interfaces = host.list(net)
    if len(interfaces) > 1:
        interfaces = [
            interface
            for interface in interfaces
            if infiniband.count(host, f"{net}/{interface}/dev_port") == int(number) - 1
        ]
    if not interfaces:
        return None
    counted = infiniband.count(host, f"{net}/{interfaces[0]}/carrier_down_count")
    return _reading("ib_carrier_lost_total", (("port", name), ("interface", interfaces[0])), counted, past)


def _reading(name: str, labels: tuple[tuple[str, str], ...], counted: int | None, past: History) -> Observation | None:
    """Return None if the count was never readable in this boot. Raises ValueError if it was and no longer is."""
    reading = Observation(name, counted or 0, ObservationKind.COUNTER, labels)
    if counted is None and past.last(reading):
        raise ValueError(f"{name} cannot be read any more")
    return None if counted is None else reading


_TODO = (
    "mlxlink -d DEVICE -m -c and journalctl -k | grep -E 'mlx5|Link'. One node: reseat or replace the cable or its "
    "transceiver, try another switch port. Many nodes at once: check the switch. After the repair, once the next run "
    "of the check is clean, run healthd repaired CODE PORT."
)

OBSERVATIONS = {
    "ib_link_downed_total": Meaning("Times that the port's link went down, by the adapter's counter.", ("port",)),
    "ib_carrier_lost_total": Meaning(
        "Times that the port's network interface lost its carrier.",
        ("port", "interface"),
    ),
}

EXPLAIN = {
    "ib_flap/link_downed": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The port's own counter (link_downed) shows that its link failed and came back several times.",
        "Each time jobs on several nodes wait or are killed. The next flap is likely within hours.",
        _TODO,
        shared=True,
        window="clean_seconds",
    ),
    "ib_flap/carrier_lost": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The network interface of this port lost its carrier several times within a day.",
        "Each time jobs on several nodes wait or are killed. The next flap is likely within hours.",
        f"{_TODO} Setting an interface down and up (ip link set) counts as well.",
        shared=True,
        window="clean_seconds",
    ),
    "ib_flap/counter_full": Explain(
        Severity.INFO,
        Clears.PASS,
        "The counter of failed links is at its maximum, 255. Further failures are not counted.",
        "None by itself. Healthy ports reach it after years. Flaps of this port are not detected until it is reset.",
        "No action needed. perfquery -R on this node sets the port's counters to 0. Until then healthd uses the "
        "network interface's own counter.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.IB_LINK)
ENDS_JOB = {
    "ib_flap/link_downed": EndsJob.ALWAYS,
    "ib_flap/carrier_lost": EndsJob.ALWAYS,
    "ib_flap/counter_full": EndsJob.NEVER,
}
