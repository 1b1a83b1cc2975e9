"""GPUs whose power limit is below the default for their model.

Rule: a GPU with a reduced power limit is slow without any error, and every multi-GPU job waits for its slowest GPU. The
limit in force (the enforced limit in NVML) is the lowest of three limits: the setting of nvidia-smi -pl, the board's
limit and the chassis's limit.
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
    """accepted_watts   power limits of at least this many watts are accepted; 0 = only the model's default"""

    accepted_watts: Watts = 0.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU reports a power limit")
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
        "This GPU's power limit is below the default for its model.",
        "The GPU lowers its clocks under load, and a job runs only as fast as its slowest GPU.",
        "No action tonight. nvidia-smi -q -d POWER -i PCI shows the limits. If the limit was set with nvidia-smi, run "
        "nvidia-smi -i PCI -pl WATTS. Otherwise a power supply or its cable may be missing, or the BMC caps the "
        "chassis. If the limit is intended, set accepted_watts.",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU)
ENDS_JOB = {"gpu_power/limited": EndsJob.NEVER}
