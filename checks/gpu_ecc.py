"""ECC errors since the driver was loaded, and whether ECC is on.

Rules: any uncorrected error means that data was lost: reset before the next job (Meta's study, OCI, Azure, DCGM). SRAM
over NVIDIA's threshold is NVIDIA's criterion for a replacement. Corrected errors are normal up to AzNHC's limits.
A count that falls shows a reset, but only with persistence mode: without it the driver forgets the count when the last
user of the GPU goes. With MIG no GPU tells the counts since then (nvml.h): the growth of those for life stands in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, ObservationKind, Repair, Severity
from healthd.nvml import NvmlGpu
from healthd.past import Past

USES = "nvml"
AFTER_EVENTS = ("xid", "job_end")


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """max_corrected_sram, max_corrected_dram   more corrected errors than this since the driver was loaded warn"""

    max_corrected_sram: int = 10_000
    max_corrected_dram: int = 20_000_000


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | Repair]:
    yield from host.each_gpu(lambda gpu: _look(host, gpu, config, past))


def _look(host: Host, gpu: NvmlGpu, config: Config, past: Past) -> Iterator[Finding | Observation | Repair]:
    if gpu.ecc_mode() is False:
        yield Finding(Severity.WARNING, "gpu_ecc/disabled", gpu.pci, "ECC is off, and this GPU has it")
        return
    counts = _volatile(gpu)
    kept = Observation("gpu_ecc_counts_kept", int(_outlive_their_users(host, gpu)), labels=(("pci", gpu.pci),))
    yield kept
    kept_before = past.last(kept)
    comparable = kept.value and (kept_before is None or kept_before.value)
    for (location, error), count in counts.items():
        labels = (("pci", gpu.pci), ("location", location), ("error", error))
        reading = Observation("gpu_ecc_volatile_errors_total", count, ObservationKind.COUNTER, labels)
        yield reading
        last = past.last(reading)
        if last is not None and count < last.value and comparable:
            message = f"{location} {error} errors fell from {last.value:.0f} to {count}"
            yield Repair(Clears.GPU_RESET, gpu.pci, message, before=last.time)
    yield from _judge(gpu, counts, config)
    life = gpu.ecc_total(uncorrected=True, volatile=False)
    yield from _lifetime(gpu, life, past, judged=not counts)
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


def _judge(gpu: NvmlGpu, counts: dict[tuple[str, str], int], config: Config) -> Iterator[Finding]:
    lost = [f"{where} {count}" for (where, error), count in counts.items() if error == "uncorrected" and count > 0]
    if lost:
        words = ", ".join(lost)
        yield Finding(
            Severity.CRITICAL,
            "gpu_ecc/uncorrected",
            gpu.pci,
            f"uncorrected ECC errors since the driver was loaded: {words}",
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


def _lifetime(gpu: NvmlGpu, total: int | None, past: Past, judged: bool) -> Iterator[Finding | Observation]:
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
            message = f"{total - last.value:.0f} new uncorrected ECC errors ({total} in the life of this GPU)"
            yield Finding(Severity.CRITICAL, "gpu_ecc/uncorrected", gpu.pci, message, clears=Clears.GPU_RESET)
        if total > 0:
            message = f"{total} uncorrected ECC errors in the life of this GPU"
            yield Finding(Severity.INFO, "gpu_ecc/aggregate", gpu.pci, message)


EXPLAIN = {
    "gpu_ecc/uncorrected": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "The GPU found errors in its memory or caches that ECC could not correct.",
        "Data was lost: the job that used it was killed or computed with wrong numbers, and the damaged row stays in "
        "use until a reset remaps it.",
        "Let the node drain, reset the GPU (nvidia-smi --gpu-reset -i PCI, all clients stopped) or reboot, then "
        "look at nvidia-smi -q -d ECC,ROW_REMAPPER. SRAM errors that return, or a failed remap: replace it. Without "
        "persistence mode, and with MIG, a reset leaves no trace that healthd trusts: reboot, or healthd repaired "
        "gpu_ecc/uncorrected PCI.",
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
