"""What a tool said of one part, before anybody judged it."""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.errors import HealthdError

# What can be asked for, and the tests of each (docs/validation.md says what they are).
FAMILIES: dict[str, tuple[str, ...]] = {
    "gemm": ("gemm_bf16", "gemm_fp32", "gemm_fp8"),
    "memory": ("memory",),
    "pcie": ("pcie_h2d", "pcie_d2h"),
    "p2p": ("p2p_16mb", "p2p_32mb", "p2p_64mb", "p2p"),
    "nccl": ("nccl_all_reduce", "nccl_sendrecv"),
    "ib": ("ib_loopback",),
    "dcgm": ("dcgm",),
    "cpu": ("cpu_gemm",),
}
QUICK = ("gemm", "memory", "pcie", "p2p", "cpu")  # what is done within 30 s
OF_GPUS = ("gemm", "memory", "pcie", "p2p", "nccl", "dcgm")
BETWEEN_GPUS = ("p2p", "nccl")
# Errors that say nothing of a part: no room, somebody else has the GPU, the tool was not made for this GPU or driver,
# or it was called wrongly. CUDA's words (cudaGetErrorString), its names (CUDA_ERROR_...), NCCL's (ncclGetErrorString).
_EXCUSED = (
    *("out of memory", "out_of_memory", "alloc_failed", "busy or unavailable", "device_unavailable"),
    *("no kernel image", "no_binary_for_gpu", "invalid device function", "ptx", "jit_compil"),
    *("not supported", "not_supported", "insufficient", "driver_mismatch", "unsupported display driver"),
    *("invalid argument", "invalid_value", "invalid usage", "invalid device ordinal", "invalid_device"),
    *("no cuda-capable device", "no_device", "unhandled system error", "internal error", "operation not permitted"),
)


class NotUnderstood(HealthdError):
    """A tool's output is none that is known: one sentence."""


class Measurement(NamedTuple):
    """One test of one part.

    value   in `unit`; None where there is none
    state   "measured"; "passed" (the tool itself says that all is well); "failed" (a wrong result, an error of CUDA or
            NCCL, a failed diagnostic); "not_looked" (no such hardware or tool, or it was ended)
    says    one sentence, "" of a value alone
    source  the tool and its version
    """

    test: str
    part: str
    value: float | None
    unit: str
    state: str
    says: str
    source: str


def is_excused(text: str) -> bool:
    """Whether an error of CUDA or NCCL, as a tool printed it, says nothing of a part."""
    lower = text.lower()
    return any(words in lower for words in _EXCUSED)


def family_of(test: str) -> str:
    """The family of a test; "dcgm_pcie" and the like are DCGM's."""
    for family, tests in FAMILIES.items():
        if test in tests:
            return family
    return "dcgm"
