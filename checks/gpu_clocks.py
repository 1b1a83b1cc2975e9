"""GPU clocks that the hardware reduces because of heat or lack of power.

Rules: reduced clocks for 60 % of ten minutes are degraded, as in gpud; AzNHC only logs them. Low clocks because of
idleness, user settings or the software power cap are normal and ignored. Driver 580 and later count the slowed seconds
themselves, so no slowdown between two runs is missed. With older drivers, the slowed share of the time between two runs
is estimated from the reason bits. According to nvml.h the slowdown bit may also be set briefly while clocks change, so
a single reading proves nothing.

Heat and the power brake can affect many nodes: one event in a power feed or a cooling loop slows racks of nodes at
once. For these causes, a drain is subject to the fleet limit, as for all shared causes. The drain ends by itself when
the hardware has not reduced the clocks for `within_seconds`, even on a drained, idle node, because no operator could
run `healthd repaired` on racks of nodes. The power brake is visible without load. If the GPU overheats again under
load, the limits for intermittent shared causes apply to the new drain (docs/slurm.md). A slowdown without a reported
reason is attributed to the GPU itself.
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

SLOWDOWN = 0x8  # set together with either of the next two bits; set alone if the GPU draws too much current too fast
REASONS = {"hw_thermal": (0x40, "too hot"), "hw_power_brake": (0x80, "power brake of the power supply")}
HARDWARE_BITS = SLOWDOWN | 0x40 | 0x80


class Config(CheckSettings, frozen=True):
    """slowed_share     degraded if a GPU was slowed down for this share of `within_seconds`; a smaller share warns
    within_seconds   period to which slowed_share applies
    clean_seconds    a slowdown clears after this long under load without another slowdown (a degraded one by heat or
                     the power brake clears after `within_seconds`, with or without load)
    relapse_seconds  an operator must clear a second degraded slowdown within this time (except for heat or the power
                     brake)
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
    unsupported = NothingToCheck("no GPU reports why its clocks are low")
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
    share, grown = 0.0, set()  # the slowed share of the time since the last run
    if last is not None and elapsed <= config.within_seconds:  # otherwise the readings are too far apart
        share = (_is_uncounted(bits, counted) + _is_uncounted(int(last.value), counted)) / 2
    for reason, seconds in counted.items():
        counter = (("pci", gpu.pci), ("reason", reason))
        reading = Observation("gpu_clock_slowdown_seconds_total", seconds, ObservationKind.COUNTER, counter)
        yield reading
        share = max(share, min(1.0, past.rate(reading) or 0.0))
        if past.growth(reading, 0.0):
            grown.add(reason)
    # If the gap between two runs is long, count only `within_seconds` of it.
    slowed = Observation("gpu_clock_slowed_seconds_total", 0.0, ObservationKind.COUNTER, labels)
    previous = past.last(slowed)
    total = (previous.value if previous is not None else 0.0) + share * min(elapsed, config.within_seconds)
    slowed = replace(slowed, value=total)
    yield from (reasons, slowed)
    if not grown and not bits & HARDWARE_BITS:
        return
    # Allow half a round of slack, because an increment at the window's edge covers time before the window.
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
    "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i PCI shows the reason. If the GPU is too hot, check fans, air "
    "flow, heat sink and room temperature, and compare with the node's other GPUs. For the power brake, check power "
    'supplies and cables (ipmitool sdr type "Power Supply"), and look for a power cap in the BMC or the rack. If no '
    "reason is reported, suspect a power limit or a weak power supply."
)

OBSERVATIONS = {
    "gpu_clock_event_reasons": Meaning(
        "NVML's bit mask of the reasons for reduced clocks (nvmlClocksEventReasons); 0 if the clocks are not reduced.",
        ("pci",),
    ),
    "gpu_clock_slowdown_seconds_total": Meaning(
        "Seconds for which the GPU was slowed down for the reason in the label, from the driver's own counter.",
        ("pci", "reason"),
    ),
    "gpu_clock_slowed_seconds_total": Meaning(
        "Seconds for which heat or lack of power slowed the GPU down, estimated from healthd's readings.",
        ("pci",),
    ),
}

EXPLAIN = {
    "gpu_clocks/slowed": Explain(
        Severity.DEGRADED,
        Clears.WINDOW,
        "The hardware reduced this GPU's clocks to half or less for most of ten minutes.",
        "A job on many GPUs runs only as fast as this GPU.",
        f"{_TODO} For heat or the power brake, healthd resumes the node ten minutes after the slowdown ends. Without "
        "a reported reason, the condition clears after a repair and six clean hours. If the slowdown returns within "
        "a day, an engineer must clear the condition: healthd repaired gpu_clocks/slowed PCI.",
        shared=None,
        window="clean_seconds",
    ),
    "gpu_clocks/slowed_briefly": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "The hardware reduced this GPU's clocks for a short time, because of heat, lack of power, or a clock change.",
        "A brief slowdown has little effect. Such a GPU often becomes permanently slow later.",
        f"No action tonight. At the next maintenance: {_TODO}",
        shared=None,
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
