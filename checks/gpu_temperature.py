"""GPUs close to thermal slowdown, and GPU memory above its maximum temperature.

Rule: two degrees below the hardware slowdown of the GPU (the driver reports it, models differ), or above the memory's
maximum. Ada, Hopper and later report the remaining degrees (T.LIMIT in nvidia-smi) instead of a limit. If the driver
reports neither, the model's own slowdown counts, as nvidia-smi -q shows it elsewhere: a hot GPU is not healthy just
because its limit is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    Celsius,
    CheckSettings,
    Clears,
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
    Severity,
    WholeCelsius,
    regex,
)
from healthd.nvidia.nvml import TemperatureLimits

USES = "nvml"

# Degrees Celsius at which the hardware of a model slows it down, from nvidia-smi -q of real machines (V100:
# github.com/NVIDIA/nvidia-docker/issues/1076; for H100, B200, GB200 the temperature plus its margin). Other models: a
# little below NVIDIA's cards (RTX 3080: 95) and the alarm in DCGM's policy sample.
SLOWDOWN_CELSIUS = {
    "P100": 82,
    "V100": 87,
    "A100": 89,
    "H100": 89,
    "H200": 89,
    "GB200": 89,
    "B200": 91,
    "T4": 93,
}
DEFAULT_SLOWDOWN_CELSIUS = 90


class Config(CheckSettings, frozen=True):
    """margin_celsius     a GPU this close below its slowdown, or closer, warns
    slowdown_celsius   temperature of the slowdown if the driver does not report it; 0 = by the GPU's model
    """

    margin_celsius: Celsius = 2.0
    slowdown_celsius: WholeCelsius = 0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU that reports a temperature")
    yield from host.each_gpu(lambda gpu: _check_gpu(gpu, config), unsupported)


def _check_gpu(gpu: NvmlGpu, config: Config) -> Iterator[Finding | Observation]:
    celsius, memory, limits = gpu.temperature(), gpu.memory_temperature(), gpu.temperature_limits()
    margin = _slowdown_margin(gpu, celsius, limits)
    assumed = config.slowdown_celsius or model_slowdown(gpu.name)
    labels = (("pci", gpu.pci),)
    if celsius is not None:
        yield Observation("gpu_temperature_celsius", celsius, labels=labels)
    if margin is not None:
        yield Observation("gpu_slowdown_margin_celsius", margin, labels=labels)
    if memory is not None:
        yield Observation("gpu_memory_temperature_celsius", memory, labels=labels)
    if margin is not None and margin <= config.margin_celsius:
        position = f"{margin} C below" if margin > 0 else f"{-margin} C above" if margin < 0 else "at"
        message = f"{position} the temperature at which the hardware slows it down"
        message = f"{celsius} C, {message}" if celsius is not None else message
        yield Finding(Severity.WARNING, "gpu_temperature/hot", gpu.pci, message)
    elif margin is None and celsius is not None and celsius >= assumed - config.margin_celsius:
        message = f"{celsius} C; the driver reports no limit, and this model slows down at about {assumed} C"
        yield Finding(Severity.WARNING, "gpu_temperature/hot", gpu.pci, message)
    if memory is not None and limits.memory_max is not None and memory > limits.memory_max > 0:
        message = f"the memory is at {memory} C; the maximum is {limits.memory_max} C"
        yield Finding(Severity.WARNING, "gpu_temperature/memory_hot", gpu.pci, message)


def _slowdown_margin(gpu: NvmlGpu, celsius: int | None, limits: TemperatureLimits) -> int | None:
    """Return the degrees below the hardware slowdown. The driver's margin counts from the operating maximum, a little
    below the slowdown (2 C on an H100).

    None if the driver reports neither; a limit of 0 means no limit.
    """
    margin = gpu.temperature_margin()
    if margin is not None:
        return margin - (limits.slowdown_margin or 0)
    if celsius is None or limits.slowdown is None or limits.slowdown <= 0:
        return None
    return limits.slowdown - celsius


def model_slowdown(name: str) -> int:
    """Return the slowdown temperature of a model, by its NVML name ("NVIDIA A100-SXM4-80GB")."""
    tokens = regex(r"[^A-Z0-9]+").split(name.upper())
    return next((SLOWDOWN_CELSIUS[token] for token in tokens if token in SLOWDOWN_CELSIUS), DEFAULT_SLOWDOWN_CELSIUS)


_COOLING = "Check fans and air flow of the node (ipmitool sdr type Fan), dust, the heat sink and the room temperature."

OBSERVATIONS = {
    "gpu_temperature_celsius": Meaning("Temperature of the GPU, in degrees Celsius.", ("pci",)),
    "gpu_slowdown_margin_celsius": Meaning(
        "Degrees Celsius left until the hardware slows the GPU down; negative if it is hotter.",
        ("pci",),
    ),
    "gpu_memory_temperature_celsius": Meaning("Temperature of the GPU's memory, in degrees Celsius.", ("pci",)),
}

EXPLAIN = {
    "gpu_temperature/hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU is within two degrees of the temperature at which its hardware halves the clocks, or above it.",
        "Jobs slow down if it gets hotter; gpu_clocks reports that.",
        f"No action tonight. nvidia-smi -q -d TEMPERATURE -i PCI; compare with the other GPUs. {_COOLING}",
    ),
    "gpu_temperature/memory_hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU's memory is hotter than its maximum.",
        "The GPU slows down, and hot memory causes more ECC errors.",
        f"No action tonight. nvidia-smi -q -d TEMPERATURE -i PCI; compare with the other GPUs. {_COOLING}",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
