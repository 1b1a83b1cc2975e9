"""This node's clock synchronisation and clock source.

Rules: munge rejects messages with a wrong time, so Slurm loses contact with the node. node_exporter has the alerts
NodeClockSkewDetected and NodeClockNotSynchronising. The kernel reports an estimate of the clock's error (adjtimex(2)).
The time daemon sets the estimate, and the kernel adds 0.5 ms for each second without an update. At 16 s (after nine
hours) the kernel considers the clock unsynchronised. The longest usual poll interval (systemd-timesyncd, 34 minutes)
adds 1 s. The flag STA_UNSYNC is not used alone, because chrony without rtcsync never clears it. healthd.service denies
all system calls that can set the clock, including adjtimex. healthd then queries systemd-timedated, which reports only
whether the error is below 16 s.

The check also warns if the time is read from a slow chip (GCM requires the clock source "tsc"). After logging "Marking
clocksource 'tsc' as unstable because the skew is too large", Linux switches to hpet or acpi_pm and removes tsc from the
available sources. Other sources are normal: kvm-clock on virtual machines, arch_sys_counter on Arm.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Seconds,
    Severity,
    regex,
)
from healthd.host.system import KernelClock

USES = ""

CLOCK_SOURCES = "/sys/devices/system/clocksource/clocksource0/available_clocksource"
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
NAME = regex(r"[a-z][a-z0-9_-]+")
HYPERVISOR_SOURCES = ("kvm-clock", "xen", "hyperv_clocksource")
TIME_CLIENTS = (
    *("/etc/chrony.conf", "/etc/chrony/chrony.conf", "/etc/ntp.conf", "/etc/ntpsec/ntp.conf"),
    *("/etc/linuxptp", "/etc/ptp4l.conf", "/var/lib/systemd/timesync"),
)


class Config(CheckSettings, frozen=True):
    """max_offset_seconds  warn if the known offset of the clock is above this
    max_error_seconds   warn if no time server has responded and the clock may be wrong by more than this
    confirm_seconds     a problem must last this long before it is reported; after a boot chrony needs several minutes
    """

    max_offset_seconds: Seconds = 1.0
    max_error_seconds: Seconds = 5.0
    confirm_seconds: Seconds = 600.0


def validate(config: Config) -> str | None:
    if config.max_offset_seconds <= 0:
        return "max_offset_seconds must be above 0"
    if not 0 < config.max_error_seconds < 16:
        return "max_error_seconds must be above 0 and below 16, the limit of the kernel's estimate"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: OSError | ValueError | None = None
    source = None
    try:
        source = host.read(CLOCK_SOURCE)
        yield from _source(source, config)
    except (OSError, ValueError) as error:  # this error must not hide the clock's error
        unreadable = error
    clock = host.clock()
    if clock is not None:
        yield from _synchronisation(host, clock, config)
    elif source is None and not unreadable:
        yield NothingToCheck("no clock in this tree")
    if unreadable:
        raise unreadable


def _source(source: str | None, config: Config) -> Iterator[Finding]:
    if source is not None and not NAME.fullmatch(source):
        raise ValueError(f"{CLOCK_SOURCE}: not a name: {source[:40]!r}")
    if source in SLOW_SOURCES:
        yield _finding("slow_source", f"the kernel reads the time from {source}, not from the CPU", config)


def _synchronisation(host: Host, clock: KernelClock, config: Config) -> Iterator[Finding | Observation]:
    yield Observation("clock_synchronised", int(clock.synchronised))
    if clock.offset_seconds is None or clock.max_error_seconds is None:
        if not clock.synchronised and not _is_hypervisor_managed(host):
            yield _finding("unsynchronised", "the clock is not synchronised", config)
        return
    offset, error = abs(clock.offset_seconds), clock.max_error_seconds
    yield Observation("clock_offset_seconds", clock.offset_seconds)
    yield Observation("clock_max_error_seconds", error)
    if error > config.max_error_seconds:
        if clock.synchronised:
            yield _finding("uncertain", f"the clock may be wrong by {error:.1f} s: no time server responds", config)
        elif not _is_hypervisor_managed(host):
            yield _finding("unsynchronised", "the clock is not synchronised", config)
    if offset > config.max_offset_seconds:
        yield _finding("offset", f"the clock is off by {offset:.3f} s", config)


def _finding(name: str, message: str, config: Config) -> Finding:
    return Finding(Severity.WARNING, f"clock/{name}", "", message, confirm_seconds=config.confirm_seconds)


def _is_hypervisor_managed(host: Host) -> bool:
    """Return True if this is a virtual machine on which no time client was ever configured."""
    sources = (host.read(CLOCK_SOURCES) or "").split()
    is_virtual = any(source.startswith(HYPERVISOR_SOURCES) for source in sources)
    return is_virtual and not any(host.exists(path) for path in TIME_CLIENTS)


_TODO = (
    "No action tonight. chronyc tracking and chronyc sources -v, or timedatectl timesync-status, show whether the time "
    "daemon is running and its servers respond."
)

OBSERVATIONS = {
    "clock_synchronised": Meaning("1 if the kernel reports its clock as synchronised, else 0."),
    "clock_offset_seconds": Meaning("Offset of the clock from the time server, in seconds; may be negative."),
    "clock_max_error_seconds": Meaning("Largest possible error of the clock as estimated by the kernel, in seconds."),
}

EXPLAIN = {
    "clock/unsynchronised": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The clock is not synchronised. No time server has responded since boot, or for nine hours.",
        "The clock drifts by seconds a day. Once it is off by minutes, munge rejects the node's messages and Slurm "
        "loses contact with the node.",
        _TODO,
        confirm="confirm_seconds",
    ),
    "clock/uncertain": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The clock was synchronised before, but no time server has responded for hours.",
        "No effect yet. The clock drifts from now on.",
        _TODO,
        confirm="confirm_seconds",
    ),
    "clock/offset": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The clock is wrong, and the time daemon corrects it slowly or not at all.",
        "Timestamps from different nodes do not match, files seem to come from the future, and TLS may fail.",
        f"{_TODO} chronyc makestep sets the clock at once.",
        confirm="confirm_seconds",
    ),
    "clock/slow_source": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The kernel does not trust the CPUs' counter (tsc). It reads the time from a separate chip, so each program "
        "needs a system call to get the time.",
        "Reading the time takes tens of times longer. Python, NCCL and programs that measure their own run time get "
        "slower.",
        "No action tonight. journalctl -k | grep -i -e tsc -e clocksource shows the reason. Reboot the node when no "
        "job is running. If it happens again, update the board's firmware. Possible causes are long firmware "
        "interrupts, or sockets whose counters differ. On a virtual machine, check the hypervisor.",
        confirm="confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.SERVICES)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
