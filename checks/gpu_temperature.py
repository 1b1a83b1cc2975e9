"""GPUs that are about to slow down because they are hot, and GPU memory that is hotter than it may be.

Rule: two degrees before the hardware slows the GPU down (the driver says where that is, models differ), or above the
memory's maximum. Ada, Hopper and later tell the degrees that are left (T.LIMIT in nvidia-smi) instead of a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, Severity
from healthd.nvml import NvmlGpu, TemperatureLimits
from healthd.past import Past

USES = "nvml"


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """margin_celsius   a GPU so close below its slowdown, or closer, warns"""

    margin_celsius: float = 2.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    yield from host.each_gpu(lambda gpu: _look(gpu, config))


def _look(gpu: NvmlGpu, config: Config) -> Iterator[Finding | Observation]:
    celsius, memory, limits = gpu.temperature(), gpu.memory_temperature(), gpu.temperature_limits()
    left = _left(gpu, celsius, limits)
    labels = (("pci", gpu.pci),)
    if celsius is not None:
        yield Observation("gpu_temperature_celsius", celsius, labels=labels)
    if left is not None:
        yield Observation("gpu_slowdown_margin_celsius", left, labels=labels)
    if memory is not None:
        yield Observation("gpu_memory_temperature_celsius", memory, labels=labels)
    if left is not None and left <= config.margin_celsius:
        where = f"{left} C below" if left > 0 else f"{-left} C above" if left < 0 else "at"
        message = f"{where} the temperature at which the hardware slows it down"
        message = f"{celsius} C, {message}" if celsius is not None else message
        yield Finding(Severity.WARNING, "gpu_temperature/hot", gpu.pci, message)
    if memory is not None and limits.memory_max is not None and memory > limits.memory_max > 0:
        message = f"the memory has {memory} C, at most {limits.memory_max} are allowed"
        yield Finding(Severity.WARNING, "gpu_temperature/memory_hot", gpu.pci, message)


def _left(gpu: NvmlGpu, celsius: int | None, limits: TemperatureLimits) -> int | None:
    """Degrees below the slowdown. The margin counts from the operating maximum, a little below it (2 C on an H100).

    None if the driver tells neither; a limit of 0 is none.
    """
    margin = gpu.temperature_margin()
    if margin is not None:
        return margin - (limits.slowdown_margin or 0)
    if celsius is None or limits.slowdown is None or limits.slowdown <= 0:
        return None
    return limits.slowdown - celsius


_COOLING = "Fans and air flow of the node (ipmitool sdr type Fan), dust, the heat sink, the temperature of the room."

EXPLAIN = {
    "gpu_temperature/hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU is within two degrees of the temperature at which its hardware halves the clocks, or above it.",
        "Jobs get slow when it gets any hotter; gpu_clocks says when that happens.",
        f"nvidia-smi -q -d TEMPERATURE -i PCI; compare with the other GPUs. {_COOLING}",
    ),
    "gpu_temperature/memory_hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU's memory is hotter than its maximum.",
        "The GPU slows down, and hot memory makes more ECC errors.",
        f"nvidia-smi -q -d TEMPERATURE -i PCI; compare with the other GPUs. {_COOLING}",
    ),
}
