"""Driver and VBIOS versions, and the InfoROM's checksums.

Rules: GPUs of one model on one node are delivered with the same VBIOS version; after a replacement the versions often
differ (GCM). All GPUs on a node share the one loaded driver, so its version is only compared with the settings. NVML
verifies the InfoROM's checksums. A corrupted InfoROM is a defect, because the GPU stores data there, such as the list
of bad memory, which then cannot be trusted. A valid InfoROM is checked again after an hour, as in DCGM, because this
check costs the driver more work than the rest of a round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from healthd.api import (
    NO_GPU,
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
    NothingToCheck,
    NvmlError,
    NvmlGpu,
    Severity,
)

USES = "nvml"
BASELINE = Baseline(("driver_version", "vbios"), place=13)


class Config(CheckSettings, frozen=True):
    """driver_version  driver version that must be loaded ("580.105.08"); "" = any
    vbios           VBIOS version of every GPU ("96.00.99.00.01"); "" = the most common version on GPUs of its model
    """

    driver_version: str = ""
    vbios: str = ""


def run(host: Host, config: Config, past: History) -> Iterator[Finding | NothingToCheck]:
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    failed: list[NvmlError] = []
    versions: dict[NvmlGpu, str] = {}
    for gpu in gpus:
        try:
            versions[gpu] = gpu.vbios() or ""
            if host.inforom_valid(gpu) is False:
                yield Finding(Severity.DEGRADED, "gpu_software/inforom", gpu.pci, "the InfoROM is corrupted")
        except NvmlError as error:  # the other GPUs are still checked
            failed.append(error)
    yield from _vbios(versions, config)
    if gpus and config.driver_version:
        yield from _driver(host.nvml.driver_version() or "unknown", config)
    if failed:
        raise failed[0]


def _driver(version: str, config: Config) -> Iterator[Finding]:
    if version != config.driver_version:
        message = f"driver {version} is loaded; expected {config.driver_version}"
        yield Finding(Severity.WARNING, "gpu_software/driver", "", message, expects="driver_version")


def _vbios(versions: dict[NvmlGpu, str], config: Config) -> Iterator[Finding]:
    for gpu, version in versions.items():
        expected = config.vbios or _most_common([versions[peer] for peer in versions if peer.name == gpu.name])
        if version != expected:
            reference = "is the expected version" if config.vbios else "is the version of the other GPUs"
            message = f"VBIOS {version or 'unknown'}; {expected} {reference}"
            yield Finding(
                Severity.WARNING, "gpu_software/vbios", gpu.pci, message, expects="vbios" if config.vbios else ""
            )


def _most_common(versions: Sequence[str]) -> str:
    """Return the most common version. If several are equally common, return the newest, because replacement GPUs have
    older versions."""
    counts = Counter(versions)
    return max(counts, key=lambda version: (counts[version], version))


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    gpus = host.gpus()
    driver = host.nvml.driver_version() if gpus else None
    if driver:
        yield Entry("gpu_software", "driver_version", driver)
    versions = {gpu.vbios() for gpu in gpus}
    if len(versions) > 1 and len({gpu.name for gpu in gpus}) == 1:
        yield LeftOut("gpu_software", f"GPUs have different VBIOS versions: {', '.join(map(str, versions))}", "vbios")
    elif len(versions) == 1 and (version := versions.pop()):
        yield Entry("gpu_software", "vbios", version)


EXPLAIN = {
    "gpu_software/driver": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The loaded driver version differs from the expected version.",
        "A multi-node job may behave differently on this node, and programs with some CUDA versions may not start.",
        "No action tonight. Install the expected driver and reboot once no job is running here. After an upgrade of "
        "the whole cluster, correct driver_version.",
        expects="driver_version",
    ),
    "gpu_software/vbios": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This GPU's VBIOS differs from the expected version, or from other GPUs of its model on this node.",
        "Power limits, clock limits and bug fixes depend on the VBIOS, so the GPU may be slower than its peers.",
        "No action tonight. nvidia-smi --query-gpu=pci.bus_id,vbios_version --format=csv shows the versions. Update "
        "the VBIOS with the machine vendor's tools at the next maintenance.",
    ),
    "gpu_software/inforom": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The checksums of the GPU's InfoROM are wrong (nvidia-smi: infoROM is corrupted).",
        "The GPU stores its error history and its list of bad memory there, so bad memory may be in use again.",
        "After the drain, reset the GPU or reboot, then check again. If the InfoROM is still corrupted, run NVIDIA's "
        "field diagnostics and open a case with the vendor for replacement (nvidia-bug-report.sh).",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.DRIVER),
    "gpu_software/inforom": FailureCause.GPU,
}
ENDS_JOB = {
    "gpu_software/driver": EndsJob.NEVER,
    "gpu_software/vbios": EndsJob.NEVER,
}
PERMANENT = ("gpu_software/inforom",)
