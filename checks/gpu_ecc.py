"""The GPUs' ECC errors since the driver was loaded, and their ECC mode.

Rules: any uncorrected error means lost data: reset the GPU before the next job (Meta's study, OCI, Azure, DCGM). NVIDIA
replaces a GPU with more SRAM errors than NVIDIA's threshold. Corrected errors are normal up to AzNHC's limits. With
persistence mode, a count that falls shows that the GPU was reset. Without persistence mode, the driver drops the count
when the GPU's last process ends. With MIG, no GPU reports the counts since the driver was loaded (nvml.h), so the
growth of the lifetime counts is used instead.

Disabled ECC is a warning unless it is the GPU's factory default (nvmlDeviceGetDefaultEccMode, driver 515 and later).
Workstation cards such as the RTX A6000 ship with ECC off.

A count above 0 at the first run drains the node, because it is unknown whose data was lost. The node also drains
without a requeue if a count grew while healthd was not running for longer than two rounds (`growth_seconds`). In that
case, the current jobs may have started long after the error. A count that grew between two rounds requeues the jobs on
this GPU (Meta's high class).

Chips that contain errors (CONTAINING_CHIPS) are the exception. They should end only the process that hit the error,
while the GPU's other processes continue unharmed. On these chips, a growing count only drains the node. Jobs are
requeued if the driver also requests a reset, which shows that the error was not contained (drivers before 570 do not
report this). The kernel log has the details. Xid 94 reports a contained error and its process (a warning). Xid 95
reports an uncontained error. Xid 48 reports an error whose containment is not known yet. Xids 95 and 48 requeue the
jobs on this GPU at once, on every chip.
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
    History,
    Host,
    Meaning,
    NothingToCheck,
    NvmlGpu,
    Observation,
    ObservationKind,
    Repair,
    Seconds,
    Severity,
)
from healthd.nvidia.recovery_action import ACTIONS

USES = "nvml"
AFTER_EVENTS = ("xid", "job_end")

# Chips that contain errors, by compute capability (developer.nvidia.com/cuda-gpus). Source: "NVIDIA GPU Memory Error
# Management", docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, table "Supported GPUs": GA100, GH100 and GB10x contain
# them and retire the page; GA10x (A10, A40: 8.6) and AD10x (L4, L40: 8.9) only remap rows, at a reset; V100 (7.0) and
# T4 (7.5) are older and retire pages. Chips that are not in the table (GB20x is 12.0) are assumed not to contain
# errors. This includes Blackwell Ultra (B300 and GB300: 10.3), which NVIDIA's driver calls GB110; the table has no
# GB11x. If that chip does contain errors, a job is requeued unnecessarily. If it does not contain errors, no job
# continues with lost data.
CONTAINING_CHIPS = {(8, 0): "GA100", (9, 0): "GH100", (10, 0): "GB10x"}


class Config(CheckSettings, frozen=True):
    """max_corrected_sram, max_corrected_dram   warn above this many corrected errors since the driver was loaded
    growth_seconds   new uncorrected errors do not requeue if the last run is longer ago: their job is unknown
    """

    max_corrected_sram: Count = 10_000
    max_corrected_dram: Count = 20_000_000
    growth_seconds: Seconds = 900.0  # two rounds at the default interval, plus their possible delay


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    judged = False
    for item in host.each_gpu(lambda gpu: _check_gpu(host, gpu, config, past)):
        judged = judged or not (isinstance(item, Observation) and item.name == "gpu_ecc_counts_kept")
        yield item
    if not judged:
        yield NothingToCheck("no GPU with ECC on")


def _check_gpu(host: Host, gpu: NvmlGpu, config: Config, past: History) -> Iterator[Finding | Observation | Repair]:
    if gpu.ecc_mode() is False:
        if gpu.ecc_is_on_by_default() is not False:
            yield Finding(Severity.WARNING, "gpu_ecc/disabled", gpu.pci, "ECC is off, but this GPU supports it")
        return
    counts = _volatile(gpu)
    persistence = Observation("gpu_ecc_counts_kept", int(_counts_survive_idle(host, gpu)), labels=(("pci", gpu.pci),))
    yield persistence
    previous_persistence = past.last(persistence)
    comparable = persistence.value and (previous_persistence is None or previous_persistence.value)
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
    yield from _lifetime(gpu, life, config, past, count_new_errors=not counts)
    if not counts and gpu.ecc_mode() and (life is None or not gpu.mig_enabled()):
        raise ValueError(f"GPU {gpu.pci}: ECC is on, but no error counter can be read")


def _counts_survive_idle(host: Host, gpu: NvmlGpu) -> bool:
    """Return True if the driver keeps the counts while no process uses the GPU. healthd closes the GPU after each
    round.
    """
    mode = gpu.persistence_mode()
    return host.driver_was_in_use is not False if mode is None else mode


def _volatile(gpu: NvmlGpu) -> dict[tuple[str, str], int]:
    """Return the supported counts, keyed by (location, "corrected" or "uncorrected").

    GPUs before Turing do not report a sum for caches and registers, so it is calculated as the total minus the other
    locations.
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
    """Yield findings for the counts. `new` is the number of uncorrected errors since the last round, or 0 if that round
    was long ago."""
    lost = [f"{where} {count}" for (where, error), count in counts.items() if error == "uncorrected" and count > 0]
    if lost:
        counts_text = ", ".join(lost)
        severity, qualifier = _rate_new_errors(gpu) if new else (Severity.DEGRADED, "")
        summary = f"{new:.0f} new uncorrected ECC errors{qualifier}; since" if new else "uncorrected ECC errors since"
        yield Finding(
            severity,
            "gpu_ecc/uncorrected",
            gpu.pci,
            f"{summary} the driver was loaded: {counts_text}",
            clears=Clears.GPU_RESET,
            evidence=f"uncorrected: {counts_text}",
        )
    limits = {"sram": config.max_corrected_sram, "dram": config.max_corrected_dram}
    above_limit = [
        f"{where} {counts[where, 'corrected']} (limit {limit})"
        for where, limit in limits.items()
        if counts.get((where, "corrected"), 0) > limit
    ]
    if above_limit:
        message = f"many corrected ECC errors since the driver was loaded: {', '.join(above_limit)}"
        yield Finding(Severity.WARNING, "gpu_ecc/corrected", gpu.pci, message, clears=Clears.GPU_RESET)


def _rate_new_errors(gpu: NvmlGpu) -> tuple[Severity, str]:
    """Return the severity of new errors, and text that gives the reason for a severity below critical.

    The text says "should have contained" because this chip is assumed to contain errors. The containment itself was not
    observed.
    """
    action = ACTIONS.get(gpu.recovery_action() or 0)
    if gpu.compute_capability() not in CONTAINING_CHIPS or (action and action.severity is Severity.CRITICAL):
        return Severity.CRITICAL, ""
    return Severity.DEGRADED, ", which this GPU should have contained (see Xid 94 or 95)"


def _lifetime(
    gpu: NvmlGpu, total: int | None, config: Config, past: History, count_new_errors: bool
) -> Iterator[Finding | Observation]:
    if gpu.sram_threshold_exceeded():
        yield Finding(
            Severity.DEGRADED,
            "gpu_ecc/sram_threshold",
            gpu.pci,
            "SRAM had more uncorrected errors than NVIDIA's replacement threshold",
            clears=Clears.OPERATOR,
            evidence="SRAM threshold flag 1",
        )
    if total is not None:
        labels = (("pci", gpu.pci), ("error", "uncorrected"))
        reading = Observation("gpu_ecc_aggregate_errors_total", total, ObservationKind.COUNTER, labels)
        yield reading
        last = past.last(reading)
        if count_new_errors and last is not None and total > last.value:
            is_recent = past.last(reading, within_seconds=config.growth_seconds) is not None
            severity, qualifier = _rate_new_errors(gpu) if is_recent else (Severity.DEGRADED, "")
            message = (
                f"{total - last.value:.0f} new uncorrected ECC errors{qualifier} ({total} over the life of this GPU)"
            )
            yield Finding(severity, "gpu_ecc/uncorrected", gpu.pci, message, clears=Clears.GPU_RESET)
        if total > 0:
            message = f"{total} uncorrected ECC errors over the life of this GPU"
            yield Finding(Severity.INFO, "gpu_ecc/aggregate", gpu.pci, message)


OBSERVATIONS = {
    "gpu_ecc_counts_kept": Meaning(
        "1 if the driver keeps the volatile ECC counts while no job uses the GPU (persistence mode, or a process "
        "keeps the driver open), else 0.",
        ("pci",),
    ),
    "gpu_ecc_volatile_errors_total": Meaning(
        "The GPU's ECC errors since the driver was loaded or the GPU was reset, by location and kind.",
        ("pci", "location", "error"),
    ),
    "gpu_ecc_aggregate_errors_total": Meaning("The GPU's ECC errors over its whole life.", ("pci", "error")),
}

EXPLAIN = {
    "gpu_ecc/uncorrected": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "The GPU found errors in its memory or caches that ECC could not correct.",
        "Data was lost. The job that used the data was killed or computed wrong numbers. The damaged row stays in "
        "use until a reset remaps it. After new errors, healthd requeues the jobs on this GPU. Errors that occurred "
        "before the first run, or while healthd did not run for longer than growth_seconds, only drain the node. "
        "A100, H100, B200 and related GPUs should contain errors by ending only the process that hit the error. On "
        "these GPUs, new errors only drain the node; jobs are requeued only if the driver requests a reset.",
        "After the drain, reset the GPU (nvidia-smi --gpu-reset -i PCI, with all clients stopped) or reboot, then "
        "check nvidia-smi -q -d ECC,ROW_REMAPPER. If SRAM errors recur or a remap failed, replace the GPU. Without "
        "persistence mode, healthd cannot detect the reset; with MIG, only with a driver that reports the GPU's uptime "
        "(CUDA 13.5). In these cases, reboot, or run healthd repaired gpu_ecc/uncorrected PCI.",
        also=(Severity.DEGRADED,),
    ),
    "gpu_ecc/sram_threshold": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The GPU had too many uncorrected errors in caches and registers, so the driver set the flag 'SRAM threshold "
        "exceeded'.",
        "SRAM cannot be remapped. NVIDIA replaces GPUs with this flag.",
        "Run NVIDIA's field diagnostics and open a case with NVIDIA (nvidia-bug-report.sh). To use the GPU until its "
        "replacement, run healthd repaired gpu_ecc/sram_threshold PCI. The condition returns if the count changes.",
    ),
    "gpu_ecc/corrected": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "Since the driver was loaded, the GPU has had far more corrected ECC errors than healthy GPUs have.",
        "No data was lost, because all errors were corrected. The GPU may be wearing out.",
        "No action tonight. Check whether the count keeps growing. At the next maintenance, run diagnostics (dcgmi "
        "diag -r 3).",
    ),
    "gpu_ecc/disabled": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This GPU supports ECC, but ECC is off.",
        "Flipped bits go unnoticed, so jobs compute wrong numbers without any error.",
        "No action tonight. Once no job is running here, run nvidia-smi -e 1 -i PCI, then reset the GPU or reboot. If "
        "ECC is off "
        'on purpose, set severity = { "gpu_ecc/disabled" = "info" }.',
    ),
    "gpu_ecc/aggregate": Explain(
        Severity.INFO,
        Clears.PASS,
        "The GPU had uncorrected errors in the past.",
        "Current jobs are not affected, because a reset has cleared the past errors.",
        "No action needed. The record is useful if the same GPU fails again.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU_MEMORY)
ENDS_JOB = {
    "gpu_ecc/uncorrected": EndsJob.ALWAYS,
    "gpu_ecc/sram_threshold": EndsJob.ALWAYS,
    "gpu_ecc/disabled": EndsJob.NEVER,
    "gpu_ecc/aggregate": EndsJob.NEVER,
}
# NVIDIA replaces GPUs with this condition (NVIDIA GPU memory error management: SRAM threshold).
PERMANENT = ("gpu_ecc/sram_threshold",)
