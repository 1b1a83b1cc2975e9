"""Whether each GPU has joined its NVLink fabric, and is well in it (NVSwitch systems, Hopper and later).

Rules: NVML alone says whether there is a fabric: by names PCIe cards, GH200 and GB200 would be false alarms (gpud).
While a GPU has not joined, CUDA fails with 802 "system not yet initialized" and nvidia-smi looks fine: the fabric
manager (or NVLSM) does not run, or has just been started. systemd is asked for the cause only then. One GPU that says
that it has no fabric, beside others of its model that have joined theirs, is left out of it: NVLink does not reach it.

Less bandwidth, limited capacity and routes that are being recovered slow jobs down and end none (traffic still has its
routes), so they drain without a requeue; a summary "unhealthy" adds nothing to what the mask names.

No fault: a GPU with MIG, which has no NVLink; one that a host shares out as vGPUs; one whose joining is complete and
ended with "not supported" (no NVSwitch, gpud#1206); one that waits on a host whose fabric manager shares the NVSwitches
out (FABRIC_MODE 1 and 2): it is in progress until a partition with it is activated
(github.com/NVIDIA/gpu-driver-container/pull/909). In a virtual machine with such a partition only who runs the host can
activate it: that warns. An NVL72 has no such mode, its partitions are the switches'.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from healthd.api import (
    NO_GPU,
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    NvmlError,
    NvmlGpu,
    Observation,
    Past,
    PciFunction,
    Seconds,
    Severity,
    regex,
)
from healthd.host.inventory import device_kind
from healthd.nvidia.nvml import Fabric

USES = "nvml"

SYSTEMD = "/run/systemd/system"  # it exists if systemd booted the machine: sd_booted(3)
UNIT = "nvidia-fabricmanager.service"
ASK = ("systemctl", "show", "--property=LoadState,ActiveState", UNIT)
# FABRIC_MODE: 0 all on this machine, 1 shared NVSwitches, 2 vGPU (Fabric Manager User Guide, config options)
MANAGER_SETTINGS = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
SHARED_MODE = regex(r"^[ \t]*FABRIC_MODE[ \t]*=[ \t]*[12][ \t]*$", re.MULTILINE)
IS_GUEST, IS_VGPU_HOST = (1, 2), (3, 4)  # nvmlGpuVirtualizationMode_t
NVL72 = "NVIDIA GB"  # GB200, GB300
NOT_SUPPORTED, IN_PROGRESS, COMPLETED = 0, 2, 3
NOT_SUPPORTED_STATUS = 3  # NVML_ERROR_NOT_SUPPORTED
STATES = {1: "not started", 2: "in progress"}
UNHEALTHY, LIMITED_CAPACITY = 2, 3
SUMMARIES = {UNHEALTHY: "unhealthy", LIMITED_CAPACITY: "limited capacity"}
GOOD_SUMMARIES = (None, 0, 1)
# Fields of two bits in the health mask: their first bit, the bad value, and what it means. 0 = not supported. For the
# last two 1 is good: they say that something is as it should be, the others that something is wrong.
FIELDS = (
    (0, 1, "bandwidth is degraded"),
    (2, 1, "routes are being recovered"),
    (4, 1, "routes are unhealthy"),
    (6, 1, "an access time-out is being recovered"),
    (12, 2, "no partition is assigned"),
    (14, 2, "the fabric manager is disconnected"),
)
SLOWS = frozenset({"bandwidth is degraded", "routes are being recovered", SUMMARIES[LIMITED_CAPACITY]})
CONFIGURATION_SHIFT = 8  # four bits: 0 = not supported, 1 = good
CONFIGURATIONS = {
    2: "wrong system GUID",
    3: "wrong chassis serial number",
    4: "no partition",
    5: "not enough NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid state of the GPU",
}


class Config(CheckSettings, frozen=True):
    """join_seconds      a GPU may take so long to join, as after a boot
    confirm_seconds   bad health must last for so long
    """

    join_seconds: Seconds = 300.0
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    failed: list[Exception] = []
    outside = 0
    joined: Counter[str] = Counter()  # by model
    without: list[NvmlGpu] = []
    gpus = host.gpus()
    for gpu in gpus:
        try:
            fabric = gpu.fabric()
            if fabric is None or fabric.state == NOT_SUPPORTED:
                without.append(gpu)
                continue
            joined[gpu.name] += fabric.state == COMPLETED
            yield Observation("gpu_fabric_state", fabric.state, labels=(("pci", gpu.pci),))
            for finding in _judge(gpu.pci, fabric, config):
                if not _needs_none(gpu):
                    given = _shared_out(host, gpu, finding) if fabric.state == IN_PROGRESS else finding
                    outside += given is not None and given.code == "gpu_fabric/not_joined"
                    yield from [given] if given else []
        except (NvmlError, ValueError, OSError) as error:  # it must not hide the other GPUs
            failed.append(error)
    if len(without) == len(gpus):
        yield NothingToCheck("no GPU on an NVSwitch fabric") if gpus else NO_GPU
    for gpu in without:
        try:
            if joined[gpu.name] and not _needs_none(gpu):
                yield _left_out(gpu, joined[gpu.name], config)
        except NvmlError as error:
            failed.append(error)
    if outside:
        yield from _cause(host, config)
    if failed:
        raise failed[0]


def _needs_none(gpu: NvmlGpu) -> bool:
    return bool(gpu.mig_enabled()) or gpu.virtualization() in IS_VGPU_HOST


def _shared_out(host: Host, gpu: NvmlGpu, finding: Finding) -> Finding | None:
    """The finding of a GPU that is in progress, as its NVSwitches may be shared out by partitions; None: no fault.

    Raises ValueError or OSError if that cannot be told.
    """
    try:
        settings = host.read(MANAGER_SETTINGS)
    except OSError as error:
        raise ValueError(f"{MANAGER_SETTINGS}: {error.strerror}") from None
    if settings is not None:
        return None if SHARED_MODE.search(settings) else finding
    if (
        gpu.virtualization() not in IS_GUEST
        or gpu.name.startswith(NVL72)
        or any(map(_is_nvswitch, host.pci_functions()))
    ):
        return finding
    message = "the GPU waits for the host of this virtual machine to activate its NVLink partition"
    return replace(finding, severity=Severity.WARNING, code="gpu_fabric/partition", message=message)


def _is_nvswitch(function: PciFunction) -> bool:
    return device_kind(function.vendor, function.pci_class) == "nvswitch"


def _left_out(gpu: NvmlGpu, joined: int, config: Config) -> Finding:
    return Finding(
        Severity.DEGRADED,
        "gpu_fabric/no_fabric",
        gpu.pci,
        f"the GPU says that it has no NVLink fabric, {joined} of its kind have joined theirs",
        confirm_seconds=config.confirm_seconds,
    )


def _judge(pci: str, fabric: Fabric, config: Config) -> Iterator[Finding]:
    """Raises ValueError for numbers that nobody here knows: a newer driver's, or garbage."""
    if fabric.state != COMPLETED:
        if fabric.state not in STATES:
            raise ValueError(f"GPU {pci}: the state of its fabric is {fabric.state}, which is none")
        yield Finding(
            Severity.CRITICAL,
            "gpu_fabric/not_joined",
            pci,
            f"the GPU has not joined the NVLink fabric: {STATES[fabric.state]}",
            confirm_seconds=config.join_seconds,
            shared_cause=True,
        )
        return
    if fabric.status == NOT_SUPPORTED_STATUS:
        return
    wrong = [f"joining failed with NVML's error {fabric.status}"] if fabric.status else []
    wrong += problems(fabric.health_mask or 0)
    if fabric.summary in SUMMARIES and not (wrong and fabric.summary == UNHEALTHY):
        wrong.append(SUMMARIES[fabric.summary])
    if wrong:
        slows = SLOWS.issuperset(wrong)
        yield Finding(
            Severity.DEGRADED if slows else Severity.CRITICAL,
            "gpu_fabric/degraded" if slows else "gpu_fabric/unhealthy",
            pci,
            f"the GPU is not well in the NVLink fabric: {', '.join(wrong)}",
            confirm_seconds=config.confirm_seconds,
        )
    elif fabric.summary not in GOOD_SUMMARIES:
        raise ValueError(f"GPU {pci}: the health of its fabric is summed up as {fabric.summary}, which is unknown")


def problems(mask: int) -> list[str]:
    """The problems that a health mask shows, [] = none; a configuration that only newer drivers know is one, too.

    Raises ValueError for 3, which no field of two bits can hold.
    """
    if any(mask >> shift & 0x3 == 0x3 for shift, _, _ in FIELDS):
        raise ValueError(f"not a health mask of the NVLink fabric: {mask:#x}")
    found = [words for shift, bad, words in FIELDS if mask >> shift & 0x3 == bad]
    configuration = mask >> CONFIGURATION_SHIFT & 0xF
    if configuration > 1:
        found.append(f"incorrect configuration: {CONFIGURATIONS.get(configuration, configuration)}")
    return found


def _cause(host: Host, config: Config) -> Iterator[Finding]:
    """Nothing if the unit is not installed: on NVL72 the fabric manager runs on the switches."""
    ran = host.run(ASK, seconds=5.0) if host.exists(SYSTEMD) else None
    if ran is None:
        return
    answers = dict(line.split("=", 1) for line in ran.stdout.split("\n") if "=" in line)
    state = answers.get("ActiveState")
    if ran.status != 0 or not state or "LoadState" not in answers:
        said = (ran.stderr or ran.stdout).strip()
        raise ValueError(f"systemctl does not say whether {UNIT} is active: {said[:80]!r}")
    if answers["LoadState"] != "not-found" and state not in ("active", "reloading"):
        yield Finding(
            Severity.DEGRADED,
            "gpu_fabric/manager",
            "",
            f"{UNIT} is {state}, and GPUs wait for it to join the NVLink fabric",
            confirm_seconds=config.join_seconds,
            shared_cause=True,
        )


_LOOK = "nvidia-smi -q -i PCI (Fabric); journalctl -u nvidia-fabricmanager; journalctl -k | grep -iE 'sxid|xid'."

OBSERVATIONS = {
    "gpu_fabric_state": Meaning(
        "The GPU's state in the NVSwitch fabric: 0 not supported, 1 not started, 2 in progress, 3 completed.",
        ("pci",),
    ),
}

EXPLAIN = {
    "gpu_fabric/not_joined": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "The GPU belongs to an NVLink fabric and has not joined it minutes after it should have.",
        'CUDA does not start on it (error 802, "system not yet initialized"): each job fails at once.',
        f"systemctl restart nvidia-fabricmanager; its version must be the driver's. On B200 and later NVLSM must run, "
        f"too; on NVL72 look at the switches. {_LOOK}",
        confirm="join_seconds",
        shared=True,
    ),
    "gpu_fabric/partition": Explain(
        Severity.WARNING,
        Clears.PASS,
        "This virtual machine has the GPU, and the NVSwitches belong to its host, which has not activated a partition "
        "with the GPU.",
        'Until it does, CUDA does not start on this GPU (error 802, "system not yet initialized").',
        "Ask who runs the host: its fabric manager must have activated the partition (FABRIC_MODE 1 or 2).",
        confirm="join_seconds",
        shared=True,
    ),
    "gpu_fabric/degraded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU's NVLink fabric has less bandwidth or capacity than it should, or recovers its routes.",
        "Traffic between GPUs goes on, slower: a job on many GPUs is as slow as this one.",
        f"{_LOOK} If it does not recover: reset all GPUs of the node or reboot; then the links, the switches, the GPU.",
        confirm="confirm_seconds",
    ),
    "gpu_fabric/unhealthy": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "This GPU has joined its NVLink fabric, but is not well in it: without routes, or set up wrong.",
        "Traffic between GPUs fails or hangs.",
        f"{_LOOK} Reset all GPUs of the node or reboot. If it stays: the switches, the cables (NVL72), the GPU.",
        confirm="confirm_seconds",
    ),
    "gpu_fabric/no_fabric": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU says that it has no NVLink fabric, while others of its model on this node have joined theirs.",
        "NVLink does not reach it: collective operations fail there or fall back to PCIe.",
        f"{_LOOK} Are its NVLinks up (nvidia-smi nvlink -s -i PCI)? Reset all GPUs of the node or reboot. If it stays: "
        "the GPU, or the baseboard.",
        confirm="confirm_seconds",
    ),
    "gpu_fabric/manager": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "GPUs have not joined their NVLink fabric, and the service that would let them is not running.",
        "CUDA does not start on them (error 802).",
        "journalctl -u nvidia-fabricmanager; its version must be the driver's. systemctl restart nvidia-fabricmanager.",
        confirm="join_seconds",
        shared=True,
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.NVLINK),
    "gpu_fabric/manager": FailureCause.SERVICES,
}
ENDS_JOB = {
    "gpu_fabric/not_joined": EndsJob.ALWAYS,
    "gpu_fabric/degraded": EndsJob.NEVER,
    "gpu_fabric/unhealthy": EndsJob.ALWAYS,
    "gpu_fabric/no_fabric": EndsJob.ALWAYS,
    "gpu_fabric/manager": EndsJob.ALWAYS,
}
