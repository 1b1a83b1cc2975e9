"""Retired pages of GPU memory, on GPUs before Ampere (later GPUs remap rows instead).

Rules: a page that waits to be retired stays in use until a reboot (nvml.h), and the next job may get it. AWS replaces a
GPU at 60 retired pages, counting single and double bit errors (AzNHC at 62, DCGM at 63; the table has 64 entries).
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
    Severity,
)

USES = "nvml"
AFTER_EVENTS = ("xid", "job_end")


class Config(CheckSettings, frozen=True):
    """degraded_pages   a GPU with this many retired pages is degraded"""

    degraded_pages: Count = 60


def validate(config: Config) -> str | None:
    return None if config.degraded_pages > 0 else f"degraded_pages must be positive, got {config.degraded_pages}"


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    yield from host.each_gpu(lambda gpu: _judge(gpu, config), NothingToCheck("no GPU retires memory pages"))


def _judge(gpu: NvmlGpu, config: Config) -> Iterator[Finding | Observation]:
    pages = gpu.retired_pages()
    if pages is None:
        return
    for cause, count in (("single_bit", pages.single_bit), ("double_bit", pages.double_bit)):
        labels = (("pci", gpu.pci), ("cause", cause))
        yield Observation("gpu_retired_pages_total", count, ObservationKind.COUNTER, labels)
    counts = f"{pages.double_bit} for double bit errors, {pages.single_bit} for single bit errors"
    if pages.pending:
        message = f"memory pages wait for a reboot to be retired (total: {counts})"
        yield Finding(Severity.DEGRADED, "gpu_retired_pages/pending", gpu.pci, message, clears=Clears.REBOOT)
    retired = pages.single_bit + pages.double_bit
    if retired >= config.degraded_pages:
        yield Finding(
            Severity.DEGRADED,
            "gpu_retired_pages/too_many",
            gpu.pci,
            f"{retired} memory pages are retired: {counts} (limit {config.degraded_pages})",
            clears=Clears.OPERATOR,
            evidence=f"retired {retired}",
        )


OBSERVATIONS = {
    "gpu_retired_pages_total": Meaning("Memory pages that the GPU has retired over its life.", ("pci", "cause")),
}

EXPLAIN = {
    "gpu_retired_pages/pending": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "A page of the GPU's memory had a double-bit error or repeated single-bit errors and waits to be retired. The "
        "driver retires it the next time it is loaded.",
        "Until then the page is in use. The next job may get this page and be killed.",
        "Reboot after the drain, then check that nvidia-smi -q -d PAGE_RETIREMENT shows Pending: No. If you reset "
        "the GPU or reloaded the driver instead, run healthd repaired gpu_retired_pages/pending PCI.",
    ),
    "gpu_retired_pages/too_many": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The number of retired pages in the GPU's memory is close to the capacity of the driver's table (64).",
        "The memory is wearing out. Errors will continue, and the driver will soon be unable to retire more pages.",
        "Open a case with the vendor for replacement. To use the GPU until its replacement, run healthd repaired "
        "gpu_retired_pages/too_many PCI. The condition returns when another page is retired.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU_MEMORY)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.ALWAYS)
# NVIDIA replaces GPUs with this condition (NVIDIA GPU memory error management: retired pages).
PERMANENT = ("gpu_retired_pages/too_many",)
