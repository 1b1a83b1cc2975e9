"""Each GPU's MIG mode and number of MIG devices.

Rule: Slurm allocates what gres.conf defines. If a GPU comes back from a reset or a repair in another MIG state, it gets
jobs that cannot run on it. According to NVIDIA's MIG user guide, the mode survives a reboot on Ampere but not on Hopper
and later, and MIG devices never survive a reboot. Without expected values in the settings, no GPU is queried.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    MigDevices,
    NothingToCheck,
    NvmlGpu,
    Severity,
)

USES = "nvml"
BASELINE = Baseline(("mode", "instances"), place=12)
MODES = {True: "on", False: "off", None: "not supported"}


class Config(CheckSettings, frozen=True):
    """mode       the MIG mode that each GPU must have: "on" or "off"; "" = either
    instances  number of MIG devices that each GPU must have; -1 = any number
    """

    mode: str = ""
    instances: MigDevices = -1


def validate(config: Config) -> str | None:
    if config.mode not in ("", "on", "off"):
        return f'mode must be "on", "off" or "", got "{config.mode}"'
    if not -1 <= config.instances <= 64:
        return f"instances must be -1 or a number up to 64, got {config.instances}"
    if config.mode == "off" and config.instances > 0:
        return f'with mode = "off" there cannot be {config.instances} instances'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | NothingToCheck]:
    if not config.mode and config.instances < 0:
        yield NOT_IN_BASELINE
    else:
        yield from host.each_gpu(lambda gpu: _judge(gpu, config))


def _judge(gpu: NvmlGpu, config: Config) -> Iterator[Finding]:
    """Yield at most one finding. If the GPU is in the wrong mode, its MIG devices are not counted."""
    current, after_reset = gpu.mig_mode() or (None, None)
    if config.mode and MODES[current] != config.mode and not (current is None and config.mode == "off"):
        pending_text = f" ({MODES[after_reset]} after the next GPU reset)" if after_reset != current else ""
        message = f'MIG is {MODES[current]}{pending_text}; the settings require "{config.mode}"'
        yield Finding(Severity.DEGRADED, "gpu_mig/mode", gpu.pci, message, expects="mode")
    elif config.instances >= 0 and (count := gpu.mig_instances() or 0) != config.instances:
        message = f"{count} MIG devices; the settings require {config.instances}"
        yield Finding(Severity.DEGRADED, "gpu_mig/instances", gpu.pci, message, expects="instances")


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    gpus = host.gpus()
    modes = {gpu.mig_mode() for gpu in gpus}
    if not modes:
        return
    mode = modes.pop()
    if modes or (mode and mode[0] != mode[1]):
        yield LeftOut("gpu_mig", "not all GPUs are in the same mode, or a mode change waits for a reset", "mode")
    elif mode:
        yield Entry("gpu_mig", "mode", "on" if mode[0] else "off", note="remove this line if jobs change the mode")
    if not modes and mode and mode[0]:
        counts = {gpu.mig_instances() for gpu in gpus}
        if len(counts) == 1 and None not in counts:
            yield Entry("gpu_mig", "instances", counts.pop(), note="MIG devices on each GPU")
        else:
            yield LeftOut("gpu_mig", "GPUs have different numbers of MIG devices", "instances")


EXPLAIN = {
    "gpu_mig/mode": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "MIG is on although the settings require it to be off, or vice versa.",
        "Slurm allocates GPUs or MIG devices that do not exist. Jobs fail to start, or get only a MIG slice instead "
        "of a whole GPU.",
        "nvidia-smi --query-gpu=pci.bus_id,mig.mode.current,mig.mode.pending --format=csv shows the modes. Run "
        "nvidia-smi -i PCI -mig 0 (or 1), then reset the GPU. Check that the service that partitions the GPUs at boot "
        "is running (nvidia-mig-manager). If the settings are wrong, correct [checks.gpu_mig].",
        expects="mode",
    ),
    "gpu_mig/instances": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A GPU has more or fewer MIG devices than the settings require.",
        "If MIG devices are missing, Slurm still allocates them, so jobs fail to start. If there are too many, some "
        "stay unused.",
        "nvidia-smi -L and nvidia-smi mig -lgi -i PCI show the MIG devices. A reboot or a GPU reset deletes MIG "
        "devices. Start the service that creates them (nvidia-mig-manager), or run nvidia-smi mig -cgi PROFILES -C.",
        expects="instances",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.ALWAYS)
