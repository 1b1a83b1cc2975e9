"""GPU clocks that the hardware reduces because of heat or missing power.

Rules: 60 % of ten minutes is degraded, as in gpud; AzNHC only logs. Idle GPUs, clocks that were set and the software's
power cap are normal and ignored. Drivers from 580 on count the seconds themselves, so that nothing is missed between
two runs; with older drivers the bits of two runs give the share of the time between them. According to nvml.h the
slowdown bit may also be set for a moment while clocks change, so one reading alone proves nothing.

Many nodes share heat and the power brake: one event in a power feed or a cooling loop slows racks of nodes at once. For
these a drain waits for the fleet limit like every shared cause, and ends by itself once the hardware has not reduced
the clocks for `within_seconds`, whether drained and idle or not. No operator could run `healthd repaired` on racks of
nodes. The brake is visible without load; heat that returns with the load is bounded like every intermittent shared
cause (docs/slurm.md). A slowdown without a reason is the GPU's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

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
    NvmlGpu,
    Observation,
    ObservationKind,
    Seconds,
    Severity,
    Share,
)

USES = "nvml"

SLOWDOWN = 0x8  # set together with each of the other two, and alone when the GPU draws too much current too fast
REASONS = {"hw_thermal": (0x40, "too hot"), "hw_power_brake": (0x80, "power brake of the power supply")}
HARDWARE_BITS = SLOWDOWN | 0x40 | 0x80


class Config(CheckSettings, frozen=True):
    """slowed_share     a GPU slowed down for this share of `within_seconds` is degraded; less warns
    within_seconds   the period of slowed_share
    clean_seconds    a slowdown clears after this long under load without another one (most of `within_seconds` by heat
                     or the power brake: after `within_seconds`, with or without load)
    relapse_seconds  a GPU degraded again within this time waits for an operator (not by heat or the brake)
    """

    slowed_share: Share = 0.6
    within_seconds: Seconds = 600.0
    clean_seconds: Seconds = 6 * 3600.0
    relapse_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    if not 0 < config.slowed_share <= 1:
        return f"slowed_share: must be above 0 and at most 1, got {config.slowed_share:g}"
    if config.within_seconds <= 0:
        return f"within_seconds: must be above 0, got {config.within_seconds:g}"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU that reports why its clocks are low")
    yield from host.each_gpu(lambda gpu: _check_gpu(gpu, host.now(), config, past), unsupported)


def _check_gpu(gpu: NvmlGpu, now: float, config: Config, past: History) -> Iterator[Finding | Observation]:
    reported, counted = gpu.clock_event_reasons(), gpu.slowdown_seconds() or {}
    if reported is None and not counted:
        return
    bits = reported or 0
    labels = (("pci", gpu.pci),)
    reasons = Observation("gpu_clock_event_reasons", bits, labels=labels)
    last = past.last(reasons)
    elapsed = max(0.0, now - last.time) if last is not None else 0.0
    share, grown = 0.0, set()  # the share of the time since the last run
    if last is not None and elapsed <= config.within_seconds:  # else two readings say nothing about the time between
        share = (_is_uncounted(bits, counted) + _is_uncounted(int(last.value), counted)) / 2
    for reason, seconds in counted.items():
        counter = (("pci", gpu.pci), ("reason", reason))
        reading = Observation("gpu_clock_slowdown_seconds_total", seconds, ObservationKind.COUNTER, counter)
        yield reading
        share = max(share, min(1.0, past.rate(reading) or 0.0))
        if past.growth(reading, 0.0):
            grown.add(reason)
    # After a long gap between two runs, its share counts as the same share of `within_seconds`.
    slowed = Observation("gpu_clock_slowed_seconds_total", 0.0, ObservationKind.COUNTER, labels)
    previous = past.last(slowed)
    total = (previous.value if previous is not None else 0.0) + share * min(elapsed, config.within_seconds)
    slowed = replace(slowed, value=total)
    yield from (reasons, slowed)
    if not grown and not bits & HARDWARE_BITS:
        return
    # Half a round of slack: an increment at the very edge belongs to the time before the window.
    recent = past.growth(slowed, max(0.0, config.within_seconds - elapsed / 2)) or 0.0
    is_degraded = last is not None and recent >= config.slowed_share * config.within_seconds
    cause_text = [cause_text for reason, (bit, cause_text) in REASONS.items() if reason in grown or bits & bit]
    is_shared = bool(cause_text)
    minutes = f", for {recent / 60:.0f} of the last {config.within_seconds / 60:.0f} minutes" if is_degraded else ""
    yield Finding(
        Severity.DEGRADED if is_degraded else Severity.WARNING,
        "gpu_clocks/slowed" if is_degraded else "gpu_clocks/slowed_briefly",
        gpu.pci,
        f"the hardware reduces the clocks ({', '.join(cause_text) or 'no reason reported'}){minutes}",
        clears=Clears.WINDOW,
        window_seconds=config.within_seconds if is_degraded and is_shared else config.clean_seconds,
        relapse_seconds=config.relapse_seconds if is_degraded and not is_shared else 0.0,
        shared_cause=is_shared,
    )


def _is_uncounted(bits: int, counted: dict[str, float]) -> bool:
    """Return True if the bits show a slowdown whose seconds the driver does not count."""
    for reason, (bit, _) in REASONS.items():
        if reason in counted and bits & bit:
            bits &= ~(bit | SLOWDOWN)
    return bool(bits & HARDWARE_BITS)


_TODO = (
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i PCI. Too hot: check fans, air flow, heat sink and room "
    "temperature; compare with the other GPUs of the node. Power brake: check power supplies and cables (ipmitool sdr "
    'type "Power Supply"), and a cap in the BMC or the rack. No reason reported: a power limit or a weak supply.'
)

OBSERVATIONS = {
    "gpu_clock_event_reasons": Meaning(
        "NVML's bits for the reasons of reduced clocks (nvmlClocksEventReasons); 0 if nothing reduces them.",
        ("pci",),
    ),
    "gpu_clock_slowdown_seconds_total": Meaning(
        "Seconds that the driver slowed the GPU down for this reason, by the driver's own counter.",
        ("pci", "reason"),
    ),
    "gpu_clock_slowed_seconds_total": Meaning(
        "Seconds that heat or power kept the GPU slow, estimated from healthd's runs.",
        ("pci",),
    ),
}

EXPLAIN = {
    "gpu_clocks/slowed": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "The hardware reduced this GPU's clocks to half or less for most of ten minutes.",
        "A job on many GPUs is as slow as this one.",
        f"{_TODO} Heat and power brake: the node is resumed by itself ten minutes after they are over. Without a "
        "reason, it clears after six clean hours once the GPU was repaired. If it happens twice within a day it "
        "waits for an engineer: healthd repaired gpu_clocks/slowed PCI.",
        shared=None,
        window="clean_seconds",
    ),
    "gpu_clocks/slowed_briefly": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The hardware reduced this GPU's clocks for a while: too hot, short of power, or only during a clock change.",
        "Little while it is brief. It often precedes a GPU that is slow all the time.",
        f"No action tonight. At the next maintenance: {_TODO}",
        shared=None,
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
