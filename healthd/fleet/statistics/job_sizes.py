"""Size classes of jobs by number of GPUs. Each class ends at a power of two."""

from __future__ import annotations

MAX_CLASS_GPUS = 2**24  # number of GPUs; all larger jobs are in one class


def size_class_sql(gpus: str) -> str:
    """Return SQL for the size class of a column that contains GPUs.

    A class is named by its upper end: its jobs have at most this number of GPUs, and more than half this number. 0
    means no GPUs. NULL means that the number is unknown.
    """
    sizes = (2**power for power in range(MAX_CLASS_GPUS.bit_length()))
    classes = " ".join(f"WHEN {gpus} <= {size} THEN {size}" for size in sizes)
    largest = f"WHEN {gpus} > {MAX_CLASS_GPUS} THEN {2 * MAX_CLASS_GPUS}"
    return f"CAST(CASE WHEN {gpus} <= 0 THEN 0 {classes} {largest} END AS BIGINT)"


def format_size(gpus_up_to: int | None) -> str:
    """Format a size class as "1", "2", "3-4", "5-8", ..."""
    if gpus_up_to is None:
        return "not known"
    return f"{gpus_up_to // 2 + 1:,}-{gpus_up_to:,}" if gpus_up_to > 2 else str(gpus_up_to)


def format_gpus(gpus_up_to: int | None) -> str:
    """Format a size class as "1 GPU", "3-4 GPUs", ..., or "GPUs not known"."""
    if gpus_up_to is None:
        return "GPUs not known"
    return "1 GPU" if gpus_up_to == 1 else f"{format_size(gpus_up_to)} GPUs"
