"""GPUs whose power limit is below the default of their model.

Rule: a GPU with a reduced power limit is slow without an error, and every job on several GPUs waits for the slowest.
The limit in force (NVML, enforced) is the smallest of nvidia-smi -pl and the limits of the board and the chassis.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
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
    Watts,
)

USES = "nvml"


class Config(CheckSettings, frozen=True):
    """accepted_watts   limits from this value on are intended; 0 = only the model's default is"""

    accepted_watts: Watts = 0.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU that reports a power limit")
    yield from host.each_gpu(lambda gpu: _check_gpu(gpu, config), unsupported)


def _check_gpu(gpu: NvmlGpu, config: Config) -> Iterator[Finding | Observation]:
    limit, default = gpu.enforced_power_limit_watts(), gpu.default_power_limit_watts()
    if limit is None or default is None:
        return
    yield Observation("gpu_power_limit_watts", limit, labels=(("pci", gpu.pci),))
    if limit < min(default, config.accepted_watts or default):
        message = f"the power limit in force is {limit:g} W; the default is {default:g} W"
        yield Finding(Severity.WARNING, "gpu_power/limited", gpu.pci, message)


OBSERVATIONS = {
    "gpu_power_limit_watts": Meaning("The power limit in force, in watts.", ("pci",)),
}

EXPLAIN = {
    "gpu_power/limited": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The power limit of this GPU is below the default of its model.",
        "The GPU lowers its clocks under load, and jobs are as slow as their slowest GPU.",
        "No action tonight. nvidia-smi -q -d POWER -i PCI shows the limits. If nvidia-smi set the limit, run "
        "nvidia-smi -i PCI -pl WATTS. Otherwise a power supply or its cable may be missing, or the BMC caps the "
        "chassis. If the limit is intended, set accepted_watts.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = {"gpu_power/limited": EndsJob.NEVER}
