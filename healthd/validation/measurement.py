"""Measurements of a node's GPUs, links and ports, and their comparison with floors, peers and earlier measurements.

- A floor is the minimum value that the site's settings, or the profile of the machine type, require in a test.
- Peers are the results of the same test and tool on other parts (GPUs, links, ports) of this node with the same
  relation. A part is slow if its value is below 0.9 of the peers' median, because FALCON (arXiv 2410.12588, section
  4.2) considers less than 10 % to be jitter. A transfer is slow if it takes longer than 1.1 x the median (section 4.3),
  which means that its rate is below the median / 1.1.
- History: the part's value is compared in the same way with the median of its last good values, if there are at least
  three.

If several references apply, the floor decides first, then the peers, then the history: an absolute number is stronger
evidence than a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from healthd.common.errors import HealthdError
from healthd.validation.document import Against, Key, Result, Verdict

# Test families that can be selected, and their tests (described in docs/validation.md).
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
QUICK = ("gemm", "memory", "pcie", "p2p", "cpu")  # families that can be completed within 30 s
GPU_FAMILIES = ("gemm", "memory", "pcie", "p2p", "nccl", "dcgm")
BETWEEN_GPUS = ("p2p", "nccl")
# Errors that prove nothing about the hardware: out of memory, GPU in use, a tool that was not built for this GPU or
# driver, or a wrong call. The list has CUDA's texts (cudaGetErrorString) and names (CUDA_ERROR_...), and NCCL's texts
# (ncclGetErrorString).
_EXCUSED = (
    *("out of memory", "out_of_memory", "alloc_failed", "busy or unavailable", "device_unavailable"),
    *("no kernel image", "no_binary_for_gpu", "invalid device function", "ptx", "jit_compil"),
    *("not supported", "not_supported", "insufficient", "driver_mismatch", "unsupported display driver"),
    *("invalid argument", "invalid_value", "invalid usage", "invalid device ordinal", "invalid_device"),
    *("no cuda-capable device", "no_device", "unhandled system error", "internal error", "operation not permitted"),
)


class NotUnderstood(HealthdError):
    """A tool's output was not recognised. The message is one sentence."""


class Measurement(NamedTuple):
    """One test's measurement of one part.

    Attributes:
        value: in `unit`, or None if there is none.
        state: "measured"; "passed" (the tool reports only success); "failed" (a wrong result, a CUDA or NCCL error, a
            failed diagnostic); "not_measured" (no such hardware or tool, or the tool was ended).
        message: one sentence; "" if the value needs no explanation.
        source: the tool and its version.
    """

    test: str
    part: str
    value: float | None
    unit: str
    state: str
    message: str
    source: str


def is_excused(text: str) -> bool:
    """Return True if a CUDA or NCCL error, as printed by a tool, proves nothing about the hardware."""
    lower = text.lower()
    return any(phrase in lower for phrase in _EXCUSED)


def test_family(test: str) -> str:
    """Return a test's family. "dcgm_pcie" and similar tests belong to the family DCGM."""
    for family, tests in FAMILIES.items():
        if test in tests:
            return family
    return "dcgm"


# --- assessment

COMPUTE_SHARE = 0.9
TRANSFER_FACTOR = 1.1
TRANSFERS = ("pcie", "p2p", "nccl", "ib")
MIN_HISTORY = 3


def min_share(test: str) -> float:
    """Return the limit for slow values, as a share of the median."""
    return 1 / TRANSFER_FACTOR if test_family(test) in TRANSFERS else COMPUTE_SHARE


def judge(
    measurements: Sequence[Measurement],
    floors: Mapping[str, float],
    history: Mapping[Key, Sequence[float]],
    relation: Callable[[str], str],
) -> list[Result]:
    """Compare measurements with their floors, peers and history.

    Args:
        floors: maps a test, or "TEST PART", to the minimum in the test's unit.
        history: values from earlier validations.
        relation: function that returns a part's relation; only parts with the same relation are peers.
    """
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for measurement in measurements:
        if measurement.state == "measured" and measurement.value is not None:
            groups.setdefault((measurement.test, measurement.source, relation(measurement.part)), []).append(
                measurement
            )
    return [
        _result(
            measurement,
            floors,
            history.get((measurement.test, measurement.part, measurement.source), ()),
            _peer_values(measurement, groups, relation(measurement.part)),
        )
        for measurement in measurements
    ]


def _peer_values(
    measurement: Measurement, groups: Mapping[tuple[str, str, str], Sequence[Measurement]], relation: str
) -> Sequence[float]:
    group = groups.get((measurement.test, measurement.source, relation), ())
    return [peer.value for peer in group if peer.part != measurement.part and peer.value is not None]


def _result(
    measurement: Measurement, floors: Mapping[str, float], history: Sequence[float], peers: Sequence[float]
) -> Result:
    if measurement.state == "failed":
        return _make_result(measurement, "failed", "", None, measurement.message)
    if measurement.state == "passed":
        return _make_result(measurement, "ok", "", None, measurement.message)
    if measurement.state != "measured" or measurement.value is None:
        return _make_result(measurement, "not_measured", "", None, measurement.message)
    compared: list[tuple[Against, float, str]] = []  # reference, minimum value, and description of the reference
    if floor := floors.get(f"{measurement.test} {measurement.part}", floors.get(measurement.test)):
        compared.append(("floor", floor, f"the floor of {number(floor)}"))
    share = min_share(measurement.test)
    if peers:
        middle = median(peers)
        peers_text = f"the median of its {len(peers)} peers" if len(peers) > 1 else "its only peer"
        compared.append(("peers", middle * share, f"{peers_text}, {number(middle)}"))
    if len(history) >= MIN_HISTORY:
        middle = median(history)
        compared.append(("own", middle * share, f"the median of its last {len(history)} validations, {number(middle)}"))
    for against, minimum, reference_text in compared:
        if measurement.value < minimum:
            reference = minimum if against == "floor" else minimum / share
            below = 100 * (1 - measurement.value / reference)
            return _make_result(
                measurement,
                "slow",
                against,
                minimum,
                f"{_value_text(measurement)}: {below:.0f} % below {reference_text}",
            )
    if not compared:
        return _make_result(measurement, "ok", "", None, f"{_value_text(measurement)}: nothing to compare it with")
    against, minimum, reference_text = compared[0]
    return _make_result(measurement, "ok", against, minimum, f"{_value_text(measurement)}; reference: {reference_text}")


def _make_result(
    measurement: Measurement, verdict: Verdict, against: Against, expected: float | None, message: str
) -> Result:
    return Result(
        measurement.test,
        measurement.part,
        measurement.value,
        measurement.unit,
        verdict,
        against,
        expected,
        message,
        measurement.source,
    )


def _value_text(measurement: Measurement) -> str:
    return f"{number(measurement.value or 0.0)} {measurement.unit}"


def number(value: float) -> str:
    """Format a value with three significant digits, or as a whole number if it is 100 or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
