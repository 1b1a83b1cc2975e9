"""ECC errors since the driver was loaded, and whether ECC is on.

Rules: any uncorrected error means that data was lost: reset before the next job (Meta's study, OCI, Azure, DCGM). SRAM
over NVIDIA's threshold is NVIDIA's criterion for a replacement. Corrected errors are normal up to AzNHC's limits.
A count that falls shows a reset, but only with persistence mode: without it the driver forgets the count when the last
user of the GPU goes. With MIG no GPU tells the counts since then (nvml.h): the growth of those for life stands in.

ECC that is off warns, unless that is the factory default of the GPU (nvmlDeviceGetDefaultEccMode, driver 515 and
later): workstation cards such as the RTX A6000 ship with ECC off.

A count that stands at first sight drains: whose data it was, nobody knows. So does one that grew while nobody looked
for longer than two rounds (`growth_seconds`): the jobs that run now may have begun long after. One that grew between
two rounds requeues the jobs that hold this GPU (Meta's high class), but for parts that contain errors (CONTAINS). Those
should end the process that met the error themselves, and what else runs on the GPU goes on unharmed: their growth
drains, and requeues only where the driver asks for a reset by then, for that says that the error was not contained
(before driver 570 it says nothing). What was so is for the log to say: Xid 94 that it was contained, and to whom it
happened (it warns); Xid 95 that it was not, and Xid 48 that there was one, before anybody knows which: both requeue the
jobs of this GPU at once, on every part.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    CheckSettings,
    Clears,
    Count,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    NvmlGpu,
    Observation,
    ObservationKind,
    Past,
    Repair,
    Seconds,
    Severity,
)
from healthd.nvidia.recovery_action import ACTIONS

USES = "nvml"
AFTER_EVENTS = ("xid", "job_end")

# Chips that contain errors, by compute capability (developer.nvidia.com/cuda-gpus). Source: "NVIDIA GPU Memory Error
# Management", docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, table "Supported GPUs": GA100, GH100 and GB10x contain
# them and take the page out of use; GA10x (A10, A40: 8.6) and AD10x (L4, L40: 8.9) only remap rows, at a reset; V100
# (7.0) and T4 (7.5) are older and retire pages. What stands in no column (GB20x is 12.0) is taken not to contain them.
# So is Blackwell Ultra (B300 and GB300: 10.3): NVIDIA's driver calls that chip GB110, and the table names no GB11x.
# That requeues a job too many if it contains them after all, and leaves none on lost data if it does not.
CONTAINS = {(8, 0): "GA100", (9, 0): "GH100", (10, 0): "GB10x"}


class Config(CheckSettings, frozen=True):
    """max_corrected_sram, max_corrected_dram   more corrected errors than this since the driver was loaded warn
    growth_seconds   uncorrected errors that are new since an older look are nobody's: they drain, as at first sight
    """

    max_corrected_sram: Count = 10_000
    max_corrected_dram: Count = 20_000_000
    growth_seconds: Seconds = 900.0  # two rounds of the default interval, and what they may be late


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    judged = False
    for item in host.each_gpu(lambda gpu: _look(host, gpu, config, past)):
        judged = judged or not (isinstance(item, Observation) and item.name == "gpu_ecc_counts_kept")
        yield item
    if not judged:
        yield NothingToCheck("no GPU with ECC on")


def _look(host: Host, gpu: NvmlGpu, config: Config, past: Past) -> Iterator[Finding | Observation | Repair]:
    if gpu.ecc_mode() is False:
        if gpu.ecc_is_on_by_default() is not False:
            yield Finding(Severity.WARNING, "gpu_ecc/disabled", gpu.pci, "ECC is off, and this GPU has it")
        return
    counts = _volatile(gpu)
    kept = Observation("gpu_ecc_counts_kept", int(_outlive_their_users(host, gpu)), labels=(("pci", gpu.pci),))
    yield kept
    kept_before = past.last(kept)
    comparable = kept.value and (kept_before is None or kept_before.value)
    new = 0.0
    for (location, error), count in counts.items():
        labels = (("pci", gpu.pci), ("location", location), ("error", error))
        reading = Observation("gpu_ecc_volatile_errors_total", count, ObservationKind.COUNTER, labels)
        yield reading
        if error == "uncorrected" and past.last(reading, within_seconds=config.growth_seconds):
            new += past.growth(reading, 0.0) or 0.0
        last = past.last(reading)
        if last is not None and count < last.value and comparable:
            message = f"{location} {error} errors fell from {last.value:.0f} to {count}"
            yield Repair(Clears.GPU_RESET, gpu.pci, message, before=last.time)
    yield from _judge(gpu, counts, new, config)
    life = gpu.ecc_total(uncorrected=True, volatile=False)
    yield from _lifetime(gpu, life, config, past, judged=not counts)
    if not counts and gpu.ecc_mode() and (life is None or not gpu.mig_enabled()):
        raise ValueError(f"GPU {gpu.pci}: ECC is on, but no error counter answers")


def _outlive_their_users(host: Host, gpu: NvmlGpu) -> bool:
    """Whether the driver keeps the counts while nobody uses the GPU. healthd is a user that leaves after each round."""
    mode = gpu.persistence_mode()
    return host.driver_was_held is not False if mode is None else mode


def _volatile(gpu: NvmlGpu) -> dict[tuple[str, str], int]:
    """(location, corrected or uncorrected) -> count, where supported.

    Before Turing, caches and registers have no sum of their own: theirs is the rest of the total.
    """
    found = {
        (location, error): gpu.ecc_count(location, error == "uncorrected", volatile=True)
        for location in ("sram", "dram")
        for error in ("corrected", "uncorrected")
    }
    for error in ("corrected", "uncorrected"):
        dram = found["dram", error]
        if found["sram", error] is None and (total := gpu.ecc_total(error == "uncorrected", volatile=True)) is not None:
            found["memory" if dram is None else "caches", error] = total if dram is None else max(0, total - dram)
    return {key: count for key, count in found.items() if count is not None}


def _judge(gpu: NvmlGpu, counts: dict[tuple[str, str], int], new: float, config: Config) -> Iterator[Finding]:
    """`new`: how many uncorrected errors came since the last round, if that was a short time ago."""
    lost = [f"{where} {count}" for (where, error), count in counts.items() if error == "uncorrected" and count > 0]
    if lost:
        words = ", ".join(lost)
        severity, how = _of_new_errors(gpu) if new else (Severity.DEGRADED, "")
        told = f"{new:.0f} new uncorrected ECC errors{how}; since" if new else "uncorrected ECC errors since"
        yield Finding(
            severity,
            "gpu_ecc/uncorrected",
            gpu.pci,
            f"{told} the driver was loaded: {words}",
            clears=Clears.GPU_RESET,
            evidence=f"uncorrected: {words}",
        )
    limits = {"sram": config.max_corrected_sram, "dram": config.max_corrected_dram}
    many = [
        f"{where} {counts[where, 'corrected']} (limit {limit})"
        for where, limit in limits.items()
        if counts.get((where, "corrected"), 0) > limit
    ]
    if many:
        message = f"many corrected ECC errors since the driver was loaded: {', '.join(many)}"
        yield Finding(Severity.WARNING, "gpu_ecc/corrected", gpu.pci, message, clears=Clears.GPU_RESET)


def _of_new_errors(gpu: NvmlGpu) -> tuple[Severity, str]:
    """How bad errors are that came since the last round, and words for why they are no worse.

    That the part contains errors is a rule and not what was seen: so do the words say it."""
    asked = ACTIONS.get(gpu.recovery_action() or 0)
    if gpu.compute_capability() not in CONTAINS or (asked and asked.severity is Severity.CRITICAL):
        return Severity.CRITICAL, ""
    return Severity.DEGRADED, ", which this GPU should have contained (see Xid 94 or 95)"


def _lifetime(
    gpu: NvmlGpu, total: int | None, config: Config, past: Past, judged: bool
) -> Iterator[Finding | Observation]:
    if gpu.sram_threshold_exceeded():
        yield Finding(
            Severity.DEGRADED,
            "gpu_ecc/sram_threshold",
            gpu.pci,
            "SRAM had more uncorrected errors than NVIDIA's threshold for a replacement",
            clears=Clears.OPERATOR,
            evidence="SRAM threshold flag 1",
        )
    if total is not None:
        labels = (("pci", gpu.pci), ("error", "uncorrected"))
        reading = Observation("gpu_ecc_aggregate_errors_total", total, ObservationKind.COUNTER, labels)
        yield reading
        last = past.last(reading)
        if judged and last is not None and total > last.value:
            is_recent = past.last(reading, within_seconds=config.growth_seconds) is not None
            severity, how = _of_new_errors(gpu) if is_recent else (Severity.DEGRADED, "")
            message = f"{total - last.value:.0f} new uncorrected ECC errors{how} ({total} in the life of this GPU)"
            yield Finding(severity, "gpu_ecc/uncorrected", gpu.pci, message, clears=Clears.GPU_RESET)
        if total > 0:
            message = f"{total} uncorrected ECC errors in the life of this GPU"
            yield Finding(Severity.INFO, "gpu_ecc/aggregate", gpu.pci, message)


OBSERVATIONS = {
    "gpu_ecc_counts_kept": Meaning(
        "1 if the volatile ECC counts outlive their users (persistence mode, or the driver is held open), else 0.",
        ("pci",),
    ),
    "gpu_ecc_volatile_errors_total": Meaning(
        "ECC errors of the GPU since the driver was loaded or the GPU was reset, by place and kind.",
        ("pci", "location", "error"),
    ),
    "gpu_ecc_aggregate_errors_total": Meaning("ECC errors of the GPU in its life.", ("pci", "error")),
}

EXPLAIN = {
    "gpu_ecc/uncorrected": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "The GPU found errors in its memory or caches that ECC could not correct.",
        "Data was lost: the job that used it was killed or computed with wrong numbers, and the damaged row stays in "
        "use until a reset remaps it. What was there at the first look, or came while nobody looked for longer than "
        "growth_seconds, only drains, and so does what A100, H100, B200 and their kin should have contained (they end "
        "the process that met it); new errors on other GPUs, or after which the driver asks for a reset, requeue the "
        "jobs of this GPU.",
        "Let the node drain, reset the GPU (nvidia-smi --gpu-reset -i PCI, all clients stopped) or reboot, then "
        "look at nvidia-smi -q -d ECC,ROW_REMAPPER. SRAM errors that return, or a failed remap: replace it. Without "
        "persistence mode, and with MIG, a reset leaves no trace that healthd trusts: reboot, or healthd repaired "
        "gpu_ecc/uncorrected PCI.",
        also=(Severity.DEGRADED,),
    ),
    "gpu_ecc/sram_threshold": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The driver's flag 'SRAM threshold exceeded' is set: too many uncorrected errors in caches and registers.",
        "SRAM cannot be remapped. NVIDIA replaces GPUs with this flag.",
        "Run NVIDIA's field diagnostics and open a case with nvidia-bug-report.sh. To go on meanwhile: "
        "healthd repaired gpu_ecc/sram_threshold PCI; it stays acknowledged for as long as nothing changes.",
    ),
    "gpu_ecc/corrected": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "Far more corrected ECC errors since the driver was loaded than healthy GPUs have.",
        "Nothing is wrong yet: all were corrected. It may be a part that is wearing out.",
        "Watch whether it grows. Run diagnostics (dcgmi diag -r 3) at the next maintenance.",
    ),
    "gpu_ecc/disabled": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This GPU has ECC but it is switched off.",
        "Flipped bits go unnoticed: jobs compute wrong numbers without any error.",
        "nvidia-smi -e 1 -i PCI, then reset the GPU or reboot. If it is off on purpose: "
        'severity = { "gpu_ecc/disabled" = "info" }.',
    ),
    "gpu_ecc/aggregate": Explain(
        Severity.INFO,
        Clears.PASS,
        "The GPU had uncorrected errors at some time in its life.",
        "None for today's jobs: errors of the past were dealt with by a reset.",
        "Nothing. It is worth knowing when the same GPU makes trouble again.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU_MEMORY)
ENDS_JOB = {
    "gpu_ecc/uncorrected": EndsJob.ALWAYS,
    "gpu_ecc/sram_threshold": EndsJob.ALWAYS,
    "gpu_ecc/disabled": EndsJob.NEVER,
    "gpu_ecc/aggregate": EndsJob.NEVER,
}
# NVIDIA replaces such a GPU (NVIDIA GPU memory error management: SRAM threshold).
PERMANENT = ("gpu_ecc/sram_threshold",)
