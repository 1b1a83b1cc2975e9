"""Whether the driver keeps the GPUs initialised while nobody uses them.

Rules: without persistence mode the driver shuts a GPU down with its last user (NVIDIA, driver persistence): each start
then takes seconds a GPU, and closing forgets the ECC errors since the last one. Where the mode is on but no process
holds the driver (the old way, nvidia-smi -pm 1), healthd itself asks the GPUs only once an hour ([nvml]
idle_interval_seconds).
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
    Host,
    NothingToCheck,
    NvmlError,
    Past,
    Severity,
)
from healthd.api import CheckSettings as Config

USES = "nvml"


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | NothingToCheck]:
    failed: list[NvmlError] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    off = []
    for gpu in gpus:
        try:
            if gpu.persistence_mode() is False:
                off.append(gpu.pci)
        except NvmlError as error:  # the others are judged all the same
            failed.append(error)
    for pci in off:
        yield Finding(Severity.WARNING, "gpu_persistence/off", pci, "persistence mode is off")
    if gpus and not off and host.driver_was_held is False:
        message = "no process holds the driver: nvidia-persistenced does not run"
        yield Finding(Severity.WARNING, "gpu_persistence/not_held", "", message)
    if failed:
        raise failed[0]


_DAEMON_TODO = (
    "systemctl enable --now nvidia-persistenced. Its ExecStart should have --persistence-mode: some packages start it "
    "with --no-persistence-mode, and then it does nothing (systemctl edit nvidia-persistenced)."
)

EXPLAIN = {
    "gpu_persistence/off": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Persistence mode is off: the driver shuts this GPU down whenever its last user goes.",
        "Each start of a job takes seconds a GPU longer, settings such as clocks and power limits are lost, and so are "
        "the ECC errors since the driver was loaded, by which a bad GPU is recognised.",
        _DAEMON_TODO,
    ),
    "gpu_persistence/not_held": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Nobody but healthd has the driver open while no job runs.",
        "Faults of idle GPUs are found late: opening the driver costs seconds, so healthd looks once an hour.",
        _DAEMON_TODO,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.NEVER)
