"""Errors on active InfiniBand links: symbol errors, recoveries, overruns.

Rules (as in NVSentinel): a link that certainly harms jobs is degraded. Such a link has more than 120 symbol errors in
an hour (the InfiniBand specification's bit error rate of 1e-12), or any local link integrity or buffer overrun error.
High rates of the other counters are warnings.

A link that goes down and retrains counts errors, for example when its switch reboots. Errors up to the first run after
the retraining are ignored; ib_link and ib_flap report such a link. All ports count errors after a boot: on a healthy
DGX H100 each port had counted 14 receive errors, and buffer overruns up to the counter's maximum. Omni-Path (hfi1)
counts each resent packet as a local link integrity error, so that counter is ignored there. mlx5 also counts errors
between the ends of a connection. High rates of ACK timeouts and slow restarts are only warnings, because a crashed peer
raises these rates too.

Files: Linux, sysfs-class-infiniband, counters/*. These counters are narrow and stop at their maximum; perfquery -R
resets them to 0. If the driver has hw_counters/*, they are read as well; mlx5's hw_counters are wide.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

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
    Rate,
    Seconds,
    Severity,
)
from healthd.host import infiniband

USES = ""

LINK_DOWN = -1
COUNTER_LIMITS = {  # the maximum of each counter
    "symbol_error": 2**16 - 1,
    "local_link_integrity_errors": 2**4 - 1,
    "excessive_buffer_overrun_errors": 2**4 - 1,
    "link_error_recovery": 2**8 - 1,
    "port_rcv_errors": 2**16 - 1,
}
TRANSPORT_COUNTERS = ("local_ack_timeout_err", "roce_slow_restart")


class Config(CheckSettings, frozen=True):
    """ports                     ports to check, such as ("mlx5_0/1", ...); () = all ports of the node
    symbol_errors_per_hour          degraded at more symbol errors than this within an hour
    symbol_errors_per_second        warn at more symbol errors than this between two runs
    recoveries_per_minute     warn at more link recoveries than this between two runs
    receive_errors_per_second       warn at more packets received with errors than this between two runs
    ack_timeouts_per_second   warn at more packets not acknowledged in time than this between two runs
    slow_restarts_per_second  warn at more RoCE slow restarts than this between two runs
    boot_seconds              errors during this time after a boot do not count
    clean_seconds             errors clear after this long under load without new errors
    """

    ports: tuple[str, ...] = ()
    symbol_errors_per_hour: Count = 120
    symbol_errors_per_second: Rate = 10.0
    recoveries_per_minute: Rate = 5.0
    receive_errors_per_second: Rate = 10.0
    ack_timeouts_per_second: Rate = 1.0
    slow_restarts_per_second: Rate = 10.0
    boot_seconds: Seconds = 1800.0
    clean_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    rates = (config.symbol_errors_per_second, config.recoveries_per_minute, config.receive_errors_per_second)
    transport = (config.ack_timeouts_per_second, config.slow_restarts_per_second)
    if min(config.symbol_errors_per_hour, *rates, *transport) < 0:
        return "the limits must not be negative"
    return infiniband.port_name_problem("ports", config.ports)


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    present = infiniband.ports(host)
    if not present and not config.ports:
        yield NO_IB_PORT
    unreadable = [f"{name}: no such port" for name in config.ports if name not in present]
    for name in [name for name in present if not config.ports or name in config.ports]:
        full_counters = []
        found: list[tuple[Severity, str, str]] = []
        link_stayed_up = True
        try:
            link = _link(host, name)
            yield link
            last = past.last(link)
            link_stayed_up = link.value != LINK_DOWN and (last is None or last.value == link.value)
        except (OSError, ValueError) as error:  # healthd's own counter of symbol errors is used instead
            unreadable.append(f"{name}: {error}")
        for counter in (*COUNTER_LIMITS, *TRANSPORT_COUNTERS):
            try:
                reading = _read(host, name, counter, past)
                growth = (past.growth(reading, 0.0) or 0.0) if reading else 0.0
                settled = infiniband.settled_seconds(host, config.boot_seconds) if growth else 0.0
            except (OSError, ValueError) as error:  # this error must not hide the other counters
                unreadable.append(f"{name}: {error}")
                continue
            if reading is None:
                continue
            yield reading
            if reading.kind is not ObservationKind.COUNTER:
                continue
            full_counters += [counter] if reading.value == COUNTER_LIMITS.get(counter) else []
            counts = growth if link_stayed_up and settled > 0 else 0.0
            hourly = 0.0
            if counter == "symbol_error":
                symbols = _symbols(name, counts, past)
                yield symbols
                hourly = past.growth(symbols, min(3600.0, settled)) or 0.0
            if counts and not (counter == "local_link_integrity_errors" and _is_omni_path(host, name)):
                found += _judge(counter, counts, hourly, past.rate(reading) or 0.0, config)
        if full_counters:
            message = f"port {name}: counters at their maximum, no longer counting: {', '.join(full_counters)}"
            yield Finding(Severity.INFO, "ib_errors/counter_full", name, message)
        for severity, code, text in found:
            window = config.clean_seconds
            message = f"port {name}: {text}"
            yield Finding(severity, f"ib_errors/{code}", name, message, Clears.WINDOW, window_seconds=window)
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _link(host: Host, name: str) -> Observation:
    """Return the number of times the port's link went down, from its own counter, or LINK_DOWN if it is down now. An
    unchanged value means that the link stayed up since the last run. A counter reset changes the value too. Raises
    OSError or ValueError.
    """
    times = infiniband.count(host, infiniband.path(name, "counters/link_downed"))
    state = host.read_shared(infiniband.path(name, "state")) or ""
    if state not in infiniband.STATES:
        raise ValueError(f"state: not a state: {state[:40]!r}")
    return Observation(
        "ib_errors_link_downs_seen", LINK_DOWN if state == "1: DOWN" else times or 0, labels=(("port", name),)
    )


def _symbols(name: str, new: float, past: History) -> Observation:
    """Return the port's symbol errors as a counter that healthd keeps itself. Errors during link training are
    excluded."""
    counter = Observation("ib_symbol_errors_while_up_total", 0, ObservationKind.COUNTER, (("port", name),))
    last = past.last(counter)
    return replace(counter, value=(last.value if last else 0.0) + new)


def _is_omni_path(host: Host, name: str) -> bool:
    driver = host.link_target(f"{infiniband.DEVICES}/{name.partition('/')[0]}/device/driver") or ""
    return driver.endswith("/hfi1")


def _read(host: Host, name: str, counter: str, past: History) -> Observation | None:
    """Return a counter's reading, or a mark if the driver does not support the counter. While the mark exists, the
    counter is not read and None is returned. The mark expires after two days or a boot. Raises ValueError if the driver
    no longer reports a counter that it reported earlier.
    """
    labels = (("port", name), ("counter", counter))
    mark = Observation("ib_counter_unsupported", 1, labels=labels)
    if past.last(mark):
        return None
    folder = "hw_counters" if counter in TRANSPORT_COUNTERS else "counters"
    counted = infiniband.count(host, infiniband.path(name, f"{folder}/{counter}"))
    reading = Observation("ib_errors_total", counted or 0, ObservationKind.COUNTER, labels)
    if counted is None and past.last(reading):
        raise ValueError(f"{counter} cannot be read any more")
    return mark if counted is None else reading


def _judge(counter: str, new: float, hourly: float, rate: float, config: Config) -> Iterator[tuple[Severity, str, str]]:
    """Yield (severity, code, text) for a counter that increased. If the counter is at its maximum, the real number of
    errors may be higher.
    """
    if counter == "local_link_integrity_errors":
        yield Severity.DEGRADED, "link_integrity", f"{new:.0f} new local link integrity errors"
    elif counter == "excessive_buffer_overrun_errors":
        yield Severity.DEGRADED, "buffer_overrun", f"{new:.0f} new buffer overrun errors"
    elif counter == "link_error_recovery" and rate * 60 > config.recoveries_per_minute:
        yield Severity.WARNING, "recovery_rate", f"the link recovers from errors {rate * 60:.0f} times per minute"
    elif counter == "port_rcv_errors" and rate > config.receive_errors_per_second:
        yield Severity.WARNING, "receive_rate", f"{rate:.0f} packets per second are received with errors"
    elif counter == "symbol_error" and hourly > config.symbol_errors_per_hour:
        yield Severity.DEGRADED, "symbols", f"{hourly:.0f} symbol errors within an hour"
    elif counter == "symbol_error" and rate > config.symbol_errors_per_second:
        yield Severity.WARNING, "symbol_rate", f"{rate:.0f} symbol errors per second"
    elif counter == "local_ack_timeout_err" and rate > config.ack_timeouts_per_second:
        yield Severity.WARNING, "ack_timeout_rate", f"{rate:.0f} packets per second were not acknowledged in time"
    elif counter == "roce_slow_restart" and rate > config.slow_restarts_per_second:
        yield Severity.WARNING, "slow_restart_rate", f"{rate:.0f} RoCE slow restarts per second"


_TODO = (
    "mlxlink -d DEVICE -m -c shows the cable, its optical power and its error rates. Clean or replace the cable or "
    "its transceiver, or try another switch port. The fault may be at either end of the link."
)
_MATTERS = "Packets are resent, and the link may fail later. Multi-node jobs get slow or are killed."

OBSERVATIONS = {
    "ib_errors_link_downs_seen": Meaning(
        "Number of times the port's link went down; -1 while the link is down. For healthd's own use.",
        ("port",),
    ),
    "ib_symbol_errors_while_up_total": Meaning(
        "The port's symbol errors while its link stayed up, excluding link training.",
        ("port",),
    ),
    "ib_counter_unsupported": Meaning(
        "Always 1: the driver does not report this counter for the port.", ("port", "counter")
    ),
    "ib_errors_total": Meaning(
        "The port's errors of the kind in the label, from the adapter's counter.", ("port", "counter")
    ),
}

EXPLAIN = {
    "ib_errors/symbols": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "The port received more symbol errors than the InfiniBand specification allows in an hour.",
        _MATTERS,
        _TODO,
        window="clean_seconds",
    ),
    "ib_errors/link_integrity": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "Errors on the physical link exceeded the port's threshold (LocalLinkIntegrityErrors).",
        _MATTERS,
        _TODO,
        window="clean_seconds",
    ),
    "ib_errors/buffer_overrun": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "The port's receive buffers overran in consecutive flow control updates (ExcessiveBufferOverrunErrors).",
        "Flow control does not work on this link, so packets are lost.",
        f"{_TODO} Check the firmware of the adapter and the switch as well.",
        window="clean_seconds",
    ),
    "ib_errors/symbol_rate": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "There was a burst of symbol errors, but fewer than the hourly limit for a fault.",
        _MATTERS,
        f"No action tonight. At the next maintenance: {_TODO}",
        window="clean_seconds",
    ),
    "ib_errors/recovery_rate": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The link retrains repeatedly without going down (LinkErrorRecoveryCounter).",
        "Traffic pauses each time, and collectives wait. Such links often go down later.",
        f"No action tonight. At the next maintenance: {_TODO}",
        window="clean_seconds",
    ),
    "ib_errors/receive_rate": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The port receives many packets with errors (PortRcvErrors).",
        _MATTERS,
        f"No action tonight. {_TODO} A remote sender may also be the cause. ibqueryerrors shows which ports in the "
        "fabric count errors.",
        window="clean_seconds",
    ),
    "ib_errors/ack_timeout_rate": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets from this port were often not acknowledged in time and had to be resent (local_ack_timeout_err).",
        "Jobs wait for each of these packets. After the last retry, the connection fails, and the job fails too.",
        "No action tonight. If only the nodes of one job are affected and one of them died at that time, the dead node "
        "is the cause. Otherwise packets are lost on the way. Check ibqueryerrors, or for RoCE the switch's drops and "
        "priority flow control, then this node's cable.",
        window="clean_seconds",
    ),
    "ib_errors/slow_restart_rate": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "RoCE often restarted sending at a low rate, as it does after packet loss (roce_slow_restart).",
        "Multi-node jobs get slow.",
        "No action tonight. If many nodes are affected, check the fabric's congestion control and priority flow "
        "control (ECN, PFC, lossless queues). If only this node is affected, check its cable and port, and whether its "
        "NIC is configured like the others (mlnx_qos -i INTERFACE).",
        window="clean_seconds",
    ),
    "ib_errors/counter_full": Explain(
        Severity.INFO,
        Clears.PASS,
        "Counters of this port are at their maximum (15, 255 or 65535) and count no further errors.",
        "No effect by itself. Full counters are common on ports that have been up for a year, because the narrowest "
        "counter ends at 15.",
        "No action needed. perfquery -R on this node resets the port's counters to 0.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.IB_LINK)
ENDS_JOB = {
    "ib_errors/symbols": EndsJob.ALWAYS,
    "ib_errors/link_integrity": EndsJob.ALWAYS,
    "ib_errors/buffer_overrun": EndsJob.ALWAYS,
    "ib_errors/counter_full": EndsJob.NEVER,
}
