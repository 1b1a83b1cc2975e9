"""Persistence mode, in which the driver keeps idle GPUs initialised.

Rules: without persistence mode, the driver shuts a GPU down when its last process ends (NVIDIA, driver persistence).
The next start takes seconds for each GPU, and the shutdown discards the counts of ECC errors since the last start. If
the mode was switched on with nvidia-smi -pm 1 (the legacy way), no process keeps the driver open. healthd then queries
the GPUs only once an hour ([nvml] idle_interval_seconds).

With persistence mode, a GPU's uptime that falls shows that the GPU was reset, also with MIG (nvml.h of CUDA 13.5,
nvmlDeviceGetGpuUptime_v1: "resets to zero on a host reboot, driver unload/reload, or a GPU reset"). Without it, the
driver initialises the GPU again for each first client, and the uptime proves nothing.

A restart of nvidia-persistenced on an idle node has the same effect on the uptime as a reset, and no other value
distinguishes them: nvidia-smi resets only GPUs without clients, so nvidia-persistenced is restarted for a reset too.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_GPU,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    NvmlError,
    NvmlGpu,
    Observation,
    Repair,
    Severity,
)
from healthd.api import CheckSettings as Config

USES = "nvml"


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    failed: list[NvmlError] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    off = []
    for gpu in gpus:
        try:
            mode = gpu.persistence_mode()
            if mode is False:
                off.append(gpu.pci)
            elif mode:
                yield from _detect_reset(gpu, past)
        except NvmlError as error:  # the other GPUs are still checked
            failed.append(error)
    for pci in off:
        yield Finding(Severity.WARNING, "gpu_persistence/off", pci, "persistence mode is off")
    if gpus and not off and host.driver_was_in_use is False:
        message = "no process keeps the driver open: nvidia-persistenced is not running"
        yield Finding(Severity.WARNING, "gpu_persistence/not_held", "", message)
    if failed:
        raise failed[0]


def _detect_reset(gpu: NvmlGpu, past: History) -> Iterator[Observation | Repair]:
    uptime = gpu.uptime_seconds()
    if uptime is None:
        return
    reading = Observation("gpu_uptime_seconds", uptime, labels=(("pci", gpu.pci),))
    yield reading
    last = past.last(reading)
    if last is not None and uptime < last.value:
        message = f"the GPU's uptime fell from {last.value:.0f} to {uptime} s"
        yield Repair(Clears.GPU_RESET, gpu.pci, message, before=last.time)


OBSERVATIONS = {
    "gpu_uptime_seconds": Meaning(
        "Seconds since the driver initialised the GPU. Only with persistence mode, and a driver of CUDA 13.5 or later.",
        ("pci",),
    ),
}

_DAEMON_TODO = (
    "No action tonight. Run systemctl enable --now nvidia-persistenced. Its ExecStart should have "
    "--persistence-mode. Some packages start it with --no-persistence-mode, so that persistence mode stays off; "
    "change that with systemctl edit nvidia-persistenced."
)

EXPLAIN = {
    "gpu_persistence/off": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Persistence mode is off, so the driver shuts this GPU down whenever its last process ends.",
        "Each job takes seconds longer per GPU to start. Settings such as clocks and power limits are lost. The ECC "
        "error counts, which help to identify a bad GPU, are lost too.",
        _DAEMON_TODO,
    ),
    "gpu_persistence/not_held": Explain(
        Severity.WARNING,
        Clears.PASS,
        "While no job is running, only healthd opens the driver.",
        "Faults in idle GPUs are found late. Opening the driver takes seconds, so healthd queries idle GPUs only "
        "once an hour.",
        _DAEMON_TODO,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
