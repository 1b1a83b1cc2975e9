"""Whether something keeps this node's clock right.

Rules: munge refuses messages of another time, so Slurm loses the node; node_exporter's alerts NodeClockSkewDetected and
NodeClockNotSynchronising ask the same. The kernel itself tells (adjtimex(2)): what disciplines the clock says how wrong
it may be, and the kernel adds 0.5 ms to that for each second without news. At 16 s (nine hours) it is not synchronised;
the longest usual poll (systemd-timesyncd, 34 minutes) makes 1 s. The flag STA_UNSYNC alone says nothing: chrony without
rtcsync never clears it. Below healthd.service, which denies the calls that may set a clock, systemd-timedated is asked:
it tells only whether the error is below 16 s.
And whether time is read from a slow chip (GCM wants the clock source "tsc"): after "Marking clocksource 'tsc' as
unstable because the skew is too large" Linux takes hpet or acpi_pm, and takes tsc out of the list of those available.
Other sources are right, kvm-clock on a virtual machine as arch_sys_counter on Arm.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Past,
    Seconds,
    Severity,
    regex,
)
from healthd.host.system import KernelClock

USES = ""

CLOCK_SOURCES = "/sys/devices/system/clocksource/clocksource0/available_clocksource"
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SLOW = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
NAME = regex(r"[a-z][a-z0-9_-]+")
OF_HYPERVISORS = ("kvm-clock", "xen", "hyperv_clocksource")
TIME_CLIENTS = (
    *("/etc/chrony.conf", "/etc/chrony/chrony.conf", "/etc/ntp.conf", "/etc/ntpsec/ntp.conf"),
    *("/etc/linuxptp", "/etc/ptp4l.conf", "/var/lib/systemd/timesync"),
)


class Config(CheckSettings, frozen=True):
    """max_offset_seconds  a clock that is known to be off by more warns
    max_error_seconds   a clock that may be off by more warns: nobody asked a time server for long
    confirm_seconds     it must be so for this long: after a boot chrony needs minutes
    """

    max_offset_seconds: Seconds = 1.0
    max_error_seconds: Seconds = 5.0
    confirm_seconds: Seconds = 600.0


def validate(config: Config) -> str | None:
    if config.max_offset_seconds <= 0:
        return "max_offset_seconds must be above 0"
    if not 0 < config.max_error_seconds < 16:
        return "max_error_seconds must be above 0 and below 16, where the kernel stops to count"
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: OSError | ValueError | None = None
    source = None
    try:
        source = host.read(CLOCK_SOURCE)
        yield from _source(source, config)
    except (OSError, ValueError) as error:  # it must not hide how wrong the clock is
        unreadable = error
    clock = host.clock()
    if clock is not None:
        yield from _kept(host, clock, config)
    elif source is None and not unreadable:
        yield NothingToCheck("no clock in this tree")
    if unreadable:
        raise unreadable


def _source(source: str | None, config: Config) -> Iterator[Finding]:
    if source is not None and not NAME.fullmatch(source):
        raise ValueError(f"{CLOCK_SOURCE}: not a name: {source[:40]!r}")
    if source in SLOW:
        yield _finding("slow_source", f"the kernel reads the time from {source}, not from the CPU", config)


def _kept(host: Host, clock: KernelClock, config: Config) -> Iterator[Finding | Observation]:
    yield Observation("clock_synchronised", int(clock.synchronised))
    if clock.offset_seconds is None or clock.max_error_seconds is None:
        if not clock.synchronised and not _is_left_to_the_hypervisor(host):
            yield _finding("unsynchronised", "the clock is not synchronised", config)
        return
    offset, error = abs(clock.offset_seconds), clock.max_error_seconds
    yield Observation("clock_offset_seconds", clock.offset_seconds)
    yield Observation("clock_max_error_seconds", error)
    if error > config.max_error_seconds:
        if clock.synchronised:
            yield _finding("uncertain", f"the clock may be wrong by {error:.1f} s: no time server answers", config)
        elif not _is_left_to_the_hypervisor(host):
            yield _finding("unsynchronised", "the clock is not synchronised", config)
    if offset > config.max_offset_seconds:
        yield _finding("offset", f"the clock is off by {offset:.3f} s", config)


def _finding(what: str, message: str, config: Config) -> Finding:
    return Finding(Severity.WARNING, f"clock/{what}", "", message, confirm_seconds=config.confirm_seconds)


def _is_left_to_the_hypervisor(host: Host) -> bool:
    """Whether this is a virtual machine on which no program for the time was ever set up."""
    sources = (host.read(CLOCK_SOURCES) or "").split()
    virtual = any(source.startswith(OF_HYPERVISORS) for source in sources)
    return virtual and not any(host.exists(path) for path in TIME_CLIENTS)


_TODO = "chronyc tracking and chronyc sources -v, or timedatectl timesync-status: is it running, do its servers answer?"

OBSERVATIONS = {
    "clock_synchronised": Meaning("1 if the kernel says that its clock is synchronised, else 0."),
    "clock_offset_seconds": Meaning("How far the clock is from the time server's, in seconds; above 0 or below."),
    "clock_max_error_seconds": Meaning("How wrong the clock may be at most by the kernel's estimate, in seconds."),
}

EXPLAIN = {
    "clock/unsynchronised": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Nothing keeps the clock: no time server has answered since the boot, or for nine hours.",
        "It drifts by seconds a day. When it is minutes off, munge refuses the node's messages and Slurm loses it.",
        _TODO,
        confirm="confirm_seconds",
    ),
    "clock/uncertain": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The clock was right, but no time server has answered for hours.",
        "None yet. It drifts from here on.",
        _TODO,
        confirm="confirm_seconds",
    ),
    "clock/offset": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The clock is known to be wrong, and is being corrected slowly or not at all.",
        "Logs of several nodes do not fit together, files seem to come from the future, and TLS may fail.",
        f"{_TODO} chronyc makestep sets it at once.",
        confirm="confirm_seconds",
    ),
    "clock/slow_source": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The kernel does not trust the CPUs' counter (tsc) and reads the time from a chip, each time by a system call.",
        "To ask for the time takes tens of times as long: Python, NCCL and whatever measures itself get slower.",
        "journalctl -k | grep -i -e tsc -e clocksource says why. Reboot; if it comes back, update the board's firmware "
        "(interrupts of its own that take too long, sockets that do not agree). On a virtual machine: its hypervisor.",
        confirm="confirm_seconds",
    ),
}
