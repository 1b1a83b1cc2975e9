"""The driver and the VBIOS of the GPUs: those that the site wants, and the same on all GPUs of one model.

Rules: GPUs of one model on one node come with one VBIOS; after an exchange they often do not (GCM). All GPUs of a node
have the one driver that is loaded, so it is compared with the settings only. A corrupted InfoROM (NVML checks its
checksums) is a defect: what the GPU keeps in it, as the list of its bad memory, cannot be trusted. One that was whole
is looked at again after an hour, as DCGM does: for the driver it is more work than all else in a round.
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
    Host,
    LeftOut,
    NothingToCheck,
    NvmlError,
    NvmlGpu,
    Past,
    Severity,
)

USES = "nvml"
BASELINE = Baseline(("driver_version", "vbios"), place=13)


class Config(CheckSettings, frozen=True):
    """driver_version  the driver that must be loaded ("580.105.08"); "" = any
    vbios           the VBIOS of every GPU ("96.00.99.00.01"); "" = the one of most GPUs of its model on this node
    """

    driver_version: str = ""
    vbios: str = ""


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | NothingToCheck]:
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
        except NvmlError as error:  # the others are judged all the same
            failed.append(error)
    yield from _vbios(versions, config)
    if gpus and config.driver_version:
        yield from _driver(host.nvml.driver_version() or "unknown", config)
    if failed:
        raise failed[0]


def _driver(version: str, config: Config) -> Iterator[Finding]:
    if version != config.driver_version:
        message = f"driver {version} is loaded, {config.driver_version} is expected"
        yield Finding(Severity.WARNING, "gpu_software/driver", "", message, expects="driver_version")


def _vbios(versions: dict[NvmlGpu, str], config: Config) -> Iterator[Finding]:
    for gpu, version in versions.items():
        wanted = config.vbios or _most_common([versions[peer] for peer in versions if peer.name == gpu.name])
        if version != wanted:
            whose = "is expected" if config.vbios else "is that of the other GPUs"
            message = f"VBIOS {version or 'unknown'}, {wanted} {whose}"
            yield Finding(
                Severity.WARNING, "gpu_software/vbios", gpu.pci, message, expects="vbios" if config.vbios else ""
            )


def _most_common(versions: Sequence[str]) -> str:
    """The most common version; at a tie the newest, since exchanged GPUs come with an old one."""
    counts = Counter(versions)
    return max(counts, key=lambda version: (counts[version], version))


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    gpus = host.gpus()
    driver = host.nvml.driver_version() if gpus else None
    if driver:
        yield Entry("gpu_software", "driver_version", driver)
    versions = {gpu.vbios() for gpu in gpus}
    if len(versions) > 1 and len({gpu.name for gpu in gpus}) == 1:
        yield LeftOut("gpu_software", f"GPUs have different ones: {', '.join(map(str, versions))}", "vbios")
    elif len(versions) == 1 and (version := versions.pop()):
        yield Entry("gpu_software", "vbios", version)


EXPLAIN = {
    "gpu_software/driver": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Another driver is loaded than the site expects.",
        "Jobs over several nodes may behave differently on this one; CUDA versions may be refused.",
        "Install the driver and reboot; after an upgrade of the whole cluster correct driver_version.",
        expects="driver_version",
    ),
    "gpu_software/vbios": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This GPU's VBIOS is another than the site expects, or than other GPUs of its model on this node have.",
        "Limits of power and clocks, and repaired faults, depend on it: the GPU may be slower than its peers.",
        "nvidia-smi --query-gpu=pci.bus_id,vbios_version --format=csv. Update it with the tools of the machine's "
        "vendor at the next maintenance.",
    ),
    "gpu_software/inforom": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The checksums of the GPU's InfoROM are wrong. nvidia-smi says: infoROM is corrupted.",
        "The GPU keeps its history of errors and the list of its bad memory there: bad memory may be in use again.",
        "Reset the GPU or reboot, and look again. Comes back: run diagnostics, open a case for replacement with the "
        "output of nvidia-bug-report.sh.",
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
