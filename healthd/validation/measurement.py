"""Measurements of a node's parts, and their comparison with a floor, peers and their own history.

- A floor is the minimum that the site, or a profile of the machine's type, requires of such a part.
- Peers are the same test, by the same tool, of other parts of this node with the same relation. Below 0.9 of their
  median is slow: FALCON (arXiv 2410.12588, section 4.2) considers less than 10 % as jitter. A transfer is slow if it
  takes longer than 1.1 x the median (section 4.3): its rate is then below the median / 1.1.
- History: the same comparison with the median of the last good values, from three values on.

The floor decides first, then the peers, then the history: an absolute number is stronger than a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from healthd.common.errors import HealthdError
from healthd.validation.document import Against, Key, Result, Verdict

# Selectable families, and the tests of each (docs/validation.md describes them).
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
QUICK = ("gemm", "memory", "pcie", "p2p", "cpu")  # completed within 30 s
OF_GPUS = ("gemm", "memory", "pcie", "p2p", "nccl", "dcgm")
BETWEEN_GPUS = ("p2p", "nccl")
# Errors that prove nothing about a part: no memory, a GPU in use, a tool not built for this GPU or driver, or a wrong
# call. CUDA's texts (cudaGetErrorString), its names (CUDA_ERROR_...), NCCL's (ncclGetErrorString).
_EXCUSED = (
    *("out of memory", "out_of_memory", "alloc_failed", "busy or unavailable", "device_unavailable"),
    *("no kernel image", "no_binary_for_gpu", "invalid device function", "ptx", "jit_compil"),
    *("not supported", "not_supported", "insufficient", "driver_mismatch", "unsupported display driver"),
    *("invalid argument", "invalid_value", "invalid usage", "invalid device ordinal", "invalid_device"),
    *("no cuda-capable device", "no_device", "unhandled system error", "internal error", "operation not permitted"),
)


class NotUnderstood(HealthdError):
    """Unknown output of a tool, with one sentence."""


class Measurement(NamedTuple):
    """Measurement of one test of one part.

    value   in `unit`; None if there is none
    state   "measured"; "passed" (the tool itself reports success); "failed" (a wrong result, an error of CUDA or NCCL,
            a failed diagnostic); "not_measured" (no such hardware or tool, or the tool was ended)
    message  one sentence, "" for a value alone
    source  the tool and its version
    """

    test: str
    part: str
    value: float | None
    unit: str
    state: str
    message: str
    source: str


def is_excused(text: str) -> bool:
    """Return True if an error of CUDA or NCCL, as printed by a tool, proves nothing about a part."""
    lower = text.lower()
    return any(words in lower for words in _EXCUSED)


def family_of(test: str) -> str:
    """Return the family of a test; "dcgm_pcie" and similar tests belong to DCGM."""
    for family, tests in FAMILIES.items():
        if test in tests:
            return family
    return "dcgm"


# --- assessment

COMPUTE_SHARE = 0.9
TRANSFER_FACTOR = 1.1
TRANSFERS = ("pcie", "p2p", "nccl", "ib")
LEAST_PAST = 3


def least_share(test: str) -> float:
    """Return the smallest share of the median that is not slow."""
    return 1 / TRANSFER_FACTOR if family_of(test) in TRANSFERS else COMPUTE_SHARE


def judge(
    measurements: Sequence[Measurement],
    floors: Mapping[str, float],
    past: Mapping[Key, Sequence[float]],
    relation: Callable[[str], str],
) -> list[Result]:
    """Compare measurements. floors: test, or "TEST PART", -> the minimum in its unit. history: values of earlier
    validations. relation: relation of a part; only parts with the same relation are peers."""
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for one in measurements:
        if one.state == "measured" and one.value is not None:
            groups.setdefault((one.test, one.source, relation(one.part)), []).append(one)
    return [
        _result(one, floors, past.get((one.test, one.part, one.source), ()), _others(one, groups, relation(one.part)))
        for one in measurements
    ]


def _others(
    one: Measurement, groups: Mapping[tuple[str, str, str], Sequence[Measurement]], lies: str
) -> Sequence[float]:
    group = groups.get((one.test, one.source, lies), ())
    return [other.value for other in group if other.part != one.part and other.value is not None]


def _result(one: Measurement, floors: Mapping[str, float], past: Sequence[float], peers: Sequence[float]) -> Result:
    if one.state == "failed":
        return _told(one, "failed", "", None, one.message)
    if one.state == "passed":
        return _told(one, "ok", "", None, one.message)
    if one.state != "measured" or one.value is None:
        return _told(one, "not_measured", "", None, one.message)
    compared: list[tuple[Against, float, str]] = []  # reference, minimum, and its description
    if floor := floors.get(f"{one.test} {one.part}", floors.get(one.test)):
        compared.append(("floor", floor, f"the floor {number(floor)}"))
    share = least_share(one.test)
    if peers:
        middle = median(peers)
        who = f"the median of its {len(peers)} peers" if len(peers) > 1 else "its only peer"
        compared.append(("peers", middle * share, f"{who} {number(middle)}"))
    if len(past) >= LEAST_PAST:
        middle = median(past)
        compared.append(("own", middle * share, f"the median of its last {len(past)} validations {number(middle)}"))
    for against, least, what in compared:
        if one.value < least:
            reference = least if against == "floor" else least / share
            below = 100 * (1 - one.value / reference)
            return _told(one, "slow", against, least, f"{_value(one)}: {below:.0f} % below {what}")
    if not compared:
        return _told(one, "ok", "", None, f"{_value(one)}: nothing to compare it with")
    against, least, what = compared[0]
    return _told(one, "ok", against, least, f"{_value(one)}; reference: {what}")


def _told(one: Measurement, verdict: Verdict, against: Against, expected: float | None, message: str) -> Result:
    return Result(one.test, one.part, one.value, one.unit, verdict, against, expected, message, one.source)


def _value(one: Measurement) -> str:
    return f"{number(one.value or 0.0)} {one.unit}"


def number(value: float) -> str:
    """Return a value with three digits, or whole from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
