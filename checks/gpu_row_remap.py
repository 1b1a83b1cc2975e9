"""Bad parts of a GPU that it replaces with spare ones: memory rows (Ampere and later), memory channels and TPCs.

Rules: a failed remap leaves a bad row in use (NVIDIA's debug guidelines, Meta's study). A pending remap takes effect at
the next reset. NVIDIA replaces an A100 after 512 remaps (OCI, gpud). While MIG instances exist, the driver reports no
rows, and nothing is checked. In DCGM's memory watch, the driver's flag "unrepairable memory" (Hopper and later, driver
590) is a failure (DCGM_FR_FAULTY_MEMORY: isolate, then run a field diagnostic). In healthd, this flag is degraded,
because no source reports harm to running jobs, and harmful errors have an Xid.

Drivers from 580 on report pending repairs of a memory channel and of a TPC (texture processing cluster). The driver
logs a channel's repair as Xid 160 ("Perform ... to activate repair"), and the retirement of a TPC as Xid 156, for which
NVIDIA's Xid catalogue requires a GPU reset (open-gpu-kernel-modules: _eccChannelRepairPendingEmitOsLogXid,
_eccTpcRepairPendingSameGpcEmitOsLogXid). Both are degraded, as a pending row remap is: the bad part remains in use
until the reset.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_GPU,
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
    NvmlError,
    NvmlGpu,
    Observation,
    ObservationKind,
    Repair,
    Severity,
)
from healthd.nvidia.nvml import RemappedRows

USES = "nvml"
AFTER_EVENTS = ("xid", "job_end")


class Config(CheckSettings, frozen=True):
    """max_uncorrectable   degraded if more rows than this were remapped after uncorrectable errors"""

    max_uncorrectable: Count = 512


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    failed: list[NvmlError] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    judged = False
    for probe in (_rows, _memory, _repairs):
        for gpu in gpus:
            try:
                for item in probe(gpu, config, past):
                    judged = True
                    yield item
            except NvmlError as error:  # the other GPUs are still checked
                failed.append(error)
    if failed:
        raise failed[0]
    if gpus and not judged:
        yield NothingToCheck("no GPU with row remapping")


def _rows(gpu: NvmlGpu, config: Config, past: History) -> Iterator[Finding | Observation | Repair]:
    rows = gpu.remapped_rows()
    if rows is None:
        return
    yield from _observations(gpu, rows)
    pending = Observation("gpu_row_remap_pending", int(rows.pending), labels=(("pci", gpu.pci),))
    yield pending
    last = past.last(pending)
    if last is not None and last.value and not rows.pending:
        # Only a reset completes a pending remap.
        yield Repair(Clears.GPU_RESET, gpu.pci, "a pending row remap was completed", before=last.time)
    yield from _judge(gpu, rows, config)


def _memory(gpu: NvmlGpu, config: Config, past: History) -> Iterator[Finding]:
    if gpu.unrepairable_memory():
        yield Finding(
            Severity.DEGRADED,
            "gpu_row_remap/unrepairable",
            gpu.pci,
            "the driver reports memory that cannot be repaired",
            clears=Clears.OPERATOR,
            evidence="unrepairable memory flag 1",
        )


def _repairs(gpu: NvmlGpu, config: Config, past: History) -> Iterator[Finding | Observation | Repair]:
    waiting = gpu.pending_repair()
    if waiting is None:
        return
    parts = [name for name, is_pending in (("a memory channel", waiting.channel), ("a TPC", waiting.tpc)) if is_pending]
    pending = Observation("gpu_repair_pending", int(bool(parts)), labels=(("pci", gpu.pci),))
    yield pending
    last = past.last(pending)
    if last is not None and last.value and not parts:
        # Only a reset completes a pending repair.
        yield Repair(Clears.GPU_RESET, gpu.pci, "a pending repair was completed", before=last.time)
    if parts:
        message = f"the repair of {' and of '.join(parts)} waits for a reset"
        yield Finding(Severity.DEGRADED, "gpu_row_remap/repair_pending", gpu.pci, message, clears=Clears.GPU_RESET)


def _observations(gpu: NvmlGpu, rows: RemappedRows) -> Iterator[Observation]:
    for error, count in (("correctable", rows.correctable), ("uncorrectable", rows.uncorrectable)):
        labels = (("pci", gpu.pci), ("error", error))
        yield Observation("gpu_remapped_rows_total", count, ObservationKind.COUNTER, labels)
    yield Observation("gpu_row_remap_failed", int(rows.failure), labels=(("pci", gpu.pci),))


def _judge(gpu: NvmlGpu, rows: RemappedRows, config: Config) -> Iterator[Finding]:
    if rows.failure:
        yield Finding(
            Severity.CRITICAL,
            "gpu_row_remap/failure",
            gpu.pci,
            "a row remap failed: the bad row stays in use",
            clears=Clears.OPERATOR,
            evidence="failure flag 1",
        )
    if rows.pending:
        message = f"a row remap waits for a reset ({rows.uncorrectable} uncorrectable, {rows.correctable} correctable)"
        yield Finding(Severity.DEGRADED, "gpu_row_remap/pending", gpu.pci, message, clears=Clears.GPU_RESET)
    if rows.uncorrectable > config.max_uncorrectable:
        yield Finding(
            Severity.DEGRADED,
            "gpu_row_remap/too_many",
            gpu.pci,
            f"{rows.uncorrectable} rows remapped after uncorrectable errors (limit {config.max_uncorrectable})",
            clears=Clears.OPERATOR,
            evidence=f"uncorrectable {rows.uncorrectable}",
        )
    banks = gpu.row_remap_histogram()
    if banks is not None and banks.none > 0:
        message = f"{banks.none} memory banks have no spare row left: the next bad row cannot be remapped"
        yield Finding(Severity.WARNING, "gpu_row_remap/no_spare_rows", gpu.pci, message)


OBSERVATIONS = {
    "gpu_row_remap_pending": Meaning(
        "1 if rows of the GPU's memory will be remapped at the next reset, else 0.",
        ("pci",),
    ),
    "gpu_remapped_rows_total": Meaning(
        "Rows of memory that the GPU has remapped over its life, by kind of error.",
        ("pci", "error"),
    ),
    "gpu_repair_pending": Meaning(
        "1 if a memory channel or a TPC of the GPU will be repaired at the next reset, else 0.",
        ("pci",),
    ),
    "gpu_row_remap_failed": Meaning("1 if a row could not be remapped (replace the GPU), else 0.", ("pci",)),
}

EXPLAIN = {
    "gpu_row_remap/failure": Explain(
        Severity.CRITICAL,
        Clears.OPERATOR,
        "The GPU could not replace a bad row of its memory with a spare row. The flag stays set for the rest of the "
        "GPU's life.",
        "The bad row is still in use. Jobs that use it are killed or lose data.",
        "Replace the GPU. A failed remap is NVIDIA's criterion for an RMA. Keep the output of nvidia-smi -q and "
        "nvidia-bug-report.sh for the case. After the replacement, run healthd repaired gpu_row_remap/failure PCI.",
    ),
    "gpu_row_remap/pending": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "The GPU found a bad row. A spare row will replace it at the next GPU reset.",
        "Until then the bad row may still be in use, and jobs may hit it again. If the driver has stopped using the "
        "row, running jobs continue.",
        "After the drain, run nvidia-smi --gpu-reset -i PCI with all clients stopped, or reboot. Then check that "
        "nvidia-smi -q -d ROW_REMAPPER shows 'Pending: No'.",
    ),
    "gpu_row_remap/repair_pending": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "The GPU found a bad memory channel, or a bad TPC (texture processing cluster: two multiprocessors). A spare "
        "one will replace it at the next GPU reset.",
        "Until then the bad part remains in use, and jobs may hit the error again.",
        "After the drain, run nvidia-smi --gpu-reset -i PCI with all clients stopped, or reboot. Then check that "
        "nvidia-smi -q shows 'Channel Repair Pending: No' and 'TPC Repair Pending: No'.",
    ),
    "gpu_row_remap/too_many": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "More rows were remapped after uncorrectable errors than NVIDIA accepts for a good GPU.",
        "The memory is wearing out, and few spare rows are left.",
        "Open a case with the vendor for replacement. To use the GPU until its replacement, run healthd repaired "
        "gpu_row_remap/too_many PCI. The condition returns when another row is remapped.",
    ),
    "gpu_row_remap/unrepairable": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "No spare row can replace some of this GPU's bad memory ('Unrepairable Memory' in nvidia-smi -q).",
        "Jobs that use this memory may hit uncorrectable errors and be killed.",
        "Run NVIDIA's field diagnostics and open a case with the vendor for replacement (nvidia-bug-report.sh). "
        "After the replacement, or to use the old GPU until its replacement, run healthd repaired "
        "gpu_row_remap/unrepairable PCI.",
    ),
    "gpu_row_remap/no_spare_rows": Explain(
        Severity.WARNING,
        Clears.PASS,
        "At least one bank of the GPU's memory has no spare rows left.",
        "No data has been lost yet, but the next bad row in that bank cannot be remapped.",
        "No action tonight. Plan to replace the GPU.",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.GPU_MEMORY),
    "gpu_row_remap/repair_pending": FailureCause.GPU,
}
ENDS_JOB = {
    "gpu_row_remap/failure": EndsJob.ALWAYS,
    "gpu_row_remap/pending": EndsJob.ALWAYS,
    "gpu_row_remap/repair_pending": EndsJob.ALWAYS,
    "gpu_row_remap/too_many": EndsJob.ALWAYS,
    "gpu_row_remap/unrepairable": EndsJob.ALWAYS,
}
# NVIDIA replaces GPUs with these conditions (NVIDIA GPU memory error management: row remapping failures, used-up
# spares).
PERMANENT = (
    "gpu_row_remap/failure",
    "gpu_row_remap/too_many",
    "gpu_row_remap/unrepairable",
    "gpu_row_remap/no_spare_rows",
)
