"""Names and counters of InfiniBand and RoCE ports in sysfs (Linux, sysfs-class-infiniband).

A port is written as "mlx5_0/1": device and number.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Iterator

from healthd.common.text import regex
from healthd.host.host import Host

DEVICES = "/sys/class/infiniband"
STATES = ("0: NOP", "1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE", "5: ACTIVE_DEFER")
UNSUPPORTED_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)  # errors from drivers that lack a counter
NO_COUNTERS = "N/A (no PMA)"  # older kernels print this instead
_PORT = regex(r"[^/\s]+/[1-9][0-9]*")
_COUNT = regex(r"[0-9]{1,19}")
_UPTIME = regex(r"([0-9]{1,12}\.[0-9]+) [0-9.]+")


def ports(host: Host) -> list[str]:
    return list(host.shared(DEVICES, lambda: tuple(_ports(host))))


def _ports(host: Host) -> Iterator[str]:
    for device in host.list(DEVICES):
        yield from (f"{device}/{number}" for number in host.list(f"{DEVICES}/{device}/ports"))


def path(port: str, name: str) -> str:
    """Return the path of one of a port's files. `name` is, for example, "state" or "counters/link_downed"."""
    device, _, number = port.partition("/")
    return f"{DEVICES}/{device}/ports/{number}/{name}"


def port_name_problem(setting: str, names: Iterable[str]) -> str | None:
    """Return an error message if a setting contains a name that is not a port, otherwise None."""
    for name in names:
        if not _PORT.fullmatch(name):
            return f'{setting}: "{name}" is not a port: write device/number, as in "mlx5_0/1"'
    return None


def count(host: Host, file: str) -> int | None:
    """Return a counter, or None if it is missing or the driver does not support it. Raises OSError or ValueError.

    Readings from this counter have no `bits`, because these counters stop at their maximum. A smaller value means a
    reset to 0 (perfquery -R, a driver reload), never a wrap.
    """
    try:
        text = host.read_shared(file)
    except OSError as error:
        if error.errno in UNSUPPORTED_ERRNOS:
            return None
        raise
    if text is None or text == NO_COUNTERS:
        return None
    if not _COUNT.fullmatch(text):
        raise ValueError(f"{file}: not a count: {text[:40]!r}")
    return int(text)


def settled_seconds(host: Host, boot_seconds: float) -> float:
    """Return the seconds since the links were trained, which is assumed to be `boot_seconds` after the boot. Errors
    that ports counted earlier are not a fault. Raises OSError or ValueError.
    """
    text = host.read_shared("/proc/uptime")
    if text is None:
        return math.inf  # a captured tree
    match = _UPTIME.fullmatch(text)
    if match is None:
        raise ValueError("/proc/uptime: not an uptime")
    return float(match[1]) - boot_seconds
