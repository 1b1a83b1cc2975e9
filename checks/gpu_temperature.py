"""GPUs close to thermal slowdown, and GPU memory above its maximum temperature.

Rule: warn within two degrees of the GPU's hardware slowdown temperature or above the memory's maximum. The slowdown
temperature differs between models; the driver reports it. Ada, Hopper and later report the remaining degrees (T.LIMIT
in nvidia-smi) instead. If the driver reports neither value, use the model's slowdown temperature that nvidia-smi -q
shows on other machines: a hot GPU is not healthy just because its limit is unknown.
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

# Degrees Celsius at which the hardware slows down each model, from nvidia-smi -q on real machines (V100:
# github.com/NVIDIA/nvidia-docker/issues/1076; H100, B200, GB200: the temperature plus its margin). The default for
# other models is a little below NVIDIA's cards (RTX 3080: 95) and the alarm in DCGM's policy sample.
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
    """margin_celsius     warn if a GPU is at most this far below its slowdown temperature
    slowdown_celsius   slowdown temperature if the driver does not report one; 0 = use the GPU model's value
    """

    margin_celsius: Celsius = 2.0
    slowdown_celsius: WholeCelsius = 0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU reports a temperature")
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
    """Return the degrees left to the GPU's hardware slowdown, or None if the driver does not report them.

    The driver's margin is relative to the operating maximum, which is a little below the slowdown (2 C on an H100). A
    limit of 0 means no limit.
    """
    margin = gpu.temperature_margin()
    if margin is not None:
        return margin - (limits.slowdown_margin or 0)
    if celsius is None or limits.slowdown is None or limits.slowdown <= 0:
        return None
    return limits.slowdown - celsius


def model_slowdown(name: str) -> int:
    """Return a model's slowdown temperature. `name` is its NVML name ("NVIDIA A100-SXM4-80GB")."""
    tokens = regex(r"[^A-Z0-9]+").split(name.upper())
    return next((SLOWDOWN_CELSIUS[token] for token in tokens if token in SLOWDOWN_CELSIUS), DEFAULT_SLOWDOWN_CELSIUS)


_TODO = (
    "No action tonight. Compare nvidia-smi -q -d TEMPERATURE -i PCI with the other GPUs. Check the node's fans and air "
    "flow (ipmitool sdr type Fan), the heat sink and the room temperature, and look for dust."
)

OBSERVATIONS = {
    "gpu_temperature_celsius": Meaning("Temperature of the GPU, in degrees Celsius.", ("pci",)),
    "gpu_slowdown_margin_celsius": Meaning(
        "Degrees Celsius left until the hardware slows the GPU down; negative if the GPU is already hotter.",
        ("pci",),
    ),
    "gpu_memory_temperature_celsius": Meaning("Temperature of the GPU's memory, in degrees Celsius.", ("pci",)),
}

EXPLAIN = {
    "gpu_temperature/hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU is hot: at most two degrees below the temperature at which its hardware halves the clocks, or above "
        "it.",
        "If the GPU gets hotter, jobs slow down. The check gpu_clocks reports that.",
        _TODO,
    ),
    "gpu_temperature/memory_hot": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU's memory is above its maximum temperature.",
        "The GPU slows down, and hot memory causes more ECC errors.",
        _TODO,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
