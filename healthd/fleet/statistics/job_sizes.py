"""Size classes of jobs: GPUs, with powers of two as upper ends."""

from __future__ import annotations

LARGEST = 2**24  # GPUs, upper end of the largest class but one


def class_of(gpus: str) -> str:
    """Return SQL for the size class of a column of GPUs.

    The class is the upper end: at most that many GPUs and more than half of it; 0 = no GPUs; NULL = unknown.
    """
    sizes = (2**power for power in range(LARGEST.bit_length()))
    classes = " ".join(f"WHEN {gpus} <= {size} THEN {size}" for size in sizes)
    return f"CAST(CASE WHEN {gpus} <= 0 THEN 0 {classes} WHEN {gpus} > {LARGEST} THEN {2 * LARGEST} END AS BIGINT)"


def size_named(gpus_up_to: int | None) -> str:
    """Return "1", "2", "3-4", "5-8", ..."""
    if gpus_up_to is None:
        return "not known"
    return f"{gpus_up_to // 2 + 1:,}-{gpus_up_to:,}" if gpus_up_to > 2 else str(gpus_up_to)


def gpus_named(gpus_up_to: int | None) -> str:
    """Return "1 GPU", "3-4 GPUs", ..., "GPUs not known"."""
    if gpus_up_to is None:
        return "GPUs not known"
    return "1 GPU" if gpus_up_to == 1 else f"{size_named(gpus_up_to)} GPUs"
