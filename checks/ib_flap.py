"""InfiniBand and RoCE links that repeatedly go down and come back (flapping).

Rules: a link flaps if it went down three times in 3 hours according to the port's own counter, or lost its carrier five
times in 24 hours (as in Azure healthagent, AzNHC and OCI). Flaps in the first 30 minutes of a boot do not count,
because links are still training. The counters of a port that stays down do not grow, so all ports can be checked.
Files: Linux, sysfs-class-infiniband: link_downed, which stops at 255; and sysfs-class-net: carrier_down_count of the
port's network interface, if it has one (carrier_changes would count each flap twice).
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
    """ports            ports to check, such as ("mlx5_0/1", ...); () = all ports of the node
    links_downed     degraded if a link went down this often within the window, according to the port's counter
    links_downed_window_seconds   window for links_downed
    carriers_lost    degraded if the port's network interface lost its carrier this often within its window
    carriers_lost_window_seconds   window for carriers_lost
    boot_seconds     flaps during this time after a boot do not count
    clean_seconds    a flap clears after this long under load without another flap, or by `healthd repaired`
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
    unreadable = [f"{name}: no such port" for name in config.ports if name not in present]
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
                message = f"the link-down counter of port {name} is at its maximum, {COUNTER_LIMIT}"
                yield Finding(Severity.INFO, "ib_flap/counter_full", name, message)
            window = min(window, settled)
            times = past.growth(reading, window) or 0.0
            # earlier runs already reported older growth
            if times >= limit and window > 0 and past.growth(reading, 0.0):
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
    """Return the carrier losses of the port's own network interface, or None if the port has no interface. dev_port
    maps each of the device's interfaces to a port. The port's own interface comes first by name, because partitions
    (ib0.8001) and representors (ens1f0npf0vf0) sort after it.
    """
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
    """Return the reading, or None if the count has not been readable since boot. Raises ValueError if the count was
    readable before.
    """
    reading = Observation(name, counted or 0, ObservationKind.COUNTER, labels)
    if counted is None and past.last(reading):
        raise ValueError(f"{name} cannot be read any more")
    return None if counted is None else reading


_TODO = (
    "Run mlxlink -d DEVICE -m -c and journalctl -k | grep -E 'mlx5|Link'. If only this node is affected, reseat or "
    "replace the cable or its transceiver, or try another switch port. If many nodes are affected at once, check the "
    "switch. After the repair, wait for the check's next clean run, then run healthd repaired CODE PORT."
)

OBSERVATIONS = {
    "ib_link_downed_total": Meaning(
        "Number of times the port's link went down, from the adapter's counter.", ("port",)
    ),
    "ib_carrier_lost_total": Meaning(
        "Number of times the port's network interface lost its carrier.",
        ("port", "interface"),
    ),
}

EXPLAIN = {
    "ib_flap/link_downed": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The port's link failed and came back several times, according to the port's own counter (link_downed).",
        "At each flap, multi-node jobs wait or are killed. The next flap is likely within hours.",
        _TODO,
        shared=True,
        window="clean_seconds",
    ),
    "ib_flap/carrier_lost": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The network interface of this port lost its carrier several times within a day.",
        "At each flap, multi-node jobs wait or are killed. The next flap is likely within hours.",
        f"{_TODO} Setting an interface down and up (ip link set) counts as well.",
        shared=True,
        window="clean_seconds",
    ),
    "ib_flap/counter_full": Explain(
        Severity.INFO,
        Clears.PASS,
        "The port's counter of link failures is at its maximum, 255. Further failures are not counted.",
        "No effect by itself; healthy ports reach the maximum after years. Until the counter is reset, it shows no "
        "further flaps.",
        "No action needed. perfquery -R on this node resets the port's counters to 0. Until the reset healthd only "
        "uses the network interface's counter.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.IB_LINK)
ENDS_JOB = {
    "ib_flap/link_downed": EndsJob.ALWAYS,
    "ib_flap/carrier_lost": EndsJob.ALWAYS,
    "ib_flap/counter_full": EndsJob.NEVER,
}
