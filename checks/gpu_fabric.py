"""Whether each GPU has joined its NVLink fabric, and is well in it (NVSwitch systems, Hopper and later).

Rules: NVML alone says whether there is a fabric: by names PCIe cards, GH200 and GB200 would be false alarms (gpud).
While a GPU has not joined, CUDA fails with 802 "system not yet initialized" and nvidia-smi looks fine: the fabric
manager (or NVLSM) does not run, or has just been started. systemd is asked for the cause only then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig, Seconds
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, Severity
from healthd.nvml import Fabric, NvmlError
from healthd.past import Past

USES = "nvml"

SYSTEMD = "/run/systemd/system"  # it exists if systemd booted the machine: sd_booted(3)
UNIT = "nvidia-fabricmanager.service"
ASK = ("systemctl", "show", "--property=LoadState,ActiveState", UNIT)
NOT_SUPPORTED, COMPLETED = 0, 3
STATES = {1: "not started", 2: "in progress"}
SUMMARIES = {2: "unhealthy", 3: "limited capacity"}
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


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """join_seconds      a GPU may take so long to join, as after a boot
    confirm_seconds   bad health must last for so long
    """

    join_seconds: Seconds = 300.0
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    failed: list[Exception] = []
    outside = 0
    for gpu in host.gpus():
        try:
            fabric = gpu.fabric()
            if fabric is None or fabric.state == NOT_SUPPORTED:
                continue
            outside += fabric.state != COMPLETED
            yield Observation("gpu_fabric_state", fabric.state, labels=(("pci", gpu.pci),))
            yield from _judge(gpu.pci, fabric, config)
        except (NvmlError, ValueError) as error:  # it must not hide the other GPUs
            failed.append(error)
    if outside:
        yield from _cause(host, config)
    if failed:
        raise failed[0]


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
    wrong = [f"joining failed with NVML's error {fabric.status}"] if fabric.status else []
    wrong += problems(fabric.health_mask or 0)
    wrong += [SUMMARIES[fabric.summary]] if fabric.summary in SUMMARIES else []
    if wrong:
        yield Finding(
            Severity.CRITICAL,
            "gpu_fabric/unhealthy",
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
    answers = dict(line.split("=", 1) for line in ran.stdout.splitlines() if "=" in line)
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

EXPLAIN = {
    "gpu_fabric/not_joined": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "The GPU belongs to an NVLink fabric and has not joined it minutes after it should have.",
        'CUDA does not start on it (error 802, "system not yet initialized"): each job fails at once.',
        f"systemctl restart nvidia-fabricmanager; its version must be the driver's. On B200 and later NVLSM must run, "
        f"too; on NVL72 look at the switches. {_LOOK}",
    ),
    "gpu_fabric/unhealthy": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "This GPU has joined its NVLink fabric, but is not well in it: degraded, without routes, or set up wrong.",
        "Traffic between GPUs fails, hangs, or is slow.",
        f"{_LOOK} Reset all GPUs of the node or reboot. If it stays: the switches, the cables (NVL72), the GPU.",
    ),
    "gpu_fabric/manager": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "GPUs have not joined their NVLink fabric, and the service that would let them is not running.",
        "CUDA does not start on them (error 802).",
        "journalctl -u nvidia-fabricmanager; its version must be the driver's. systemctl restart nvidia-fabricmanager.",
    ),
}
