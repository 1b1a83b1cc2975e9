"""Jobs by their size: classes of GPUs whose upper ends are powers of two."""

from __future__ import annotations


def class_of(gpus: str) -> str:
    """SQL: the class of a column of GPUs, as the question `states` has it: jobs of at most so many GPUs and of more
    than half as many; 0 = without GPUs; NULL = not known."""
    return f"CASE WHEN {gpus} <= 0 THEN 0 WHEN {gpus} >= 1 THEN CAST(pow(2, ceil(log2({gpus}))) AS BIGINT) END"


def size_named(gpus_up_to: int | None) -> str:
    """ "1", "2", "3-4", "5-8", ..."""
    if gpus_up_to is None:
        return "not known"
    return f"{gpus_up_to // 2 + 1:,}-{gpus_up_to:,}" if gpus_up_to > 2 else str(gpus_up_to)


def gpus_named(gpus_up_to: int | None) -> str:
    """ "1 GPU", "3-4 GPUs", ..., "GPUs not known"."""
    if gpus_up_to is None:
        return "GPUs not known"
    return "1 GPU" if gpus_up_to == 1 else f"{size_named(gpus_up_to)} GPUs"
