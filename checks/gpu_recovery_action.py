"""What the driver itself says must be done with a GPU (NVML field 230, driver 570 and later).

Rule: nvml.h. The same fact as Xid 154, but a state: it is still there after a missed event. A driver or GPU that does
not have the field gives nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import CheckSettings as Config
from healthd.api import (
    Clears,
    Explain,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    NvmlGpu,
    Observation,
    Past,
    Repair,
    Severity,
)
from healthd.nvidia.recovery_action import ACTIONS, RESETS, UNKNOWN

USES = "nvml"
AFTER_EVENTS = ("xid", "gsp", "job_end")


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    yield from host.each_gpu(lambda gpu: _judge(gpu, past), NothingToCheck("no GPU that reports recovery actions"))


def _judge(gpu: NvmlGpu, past: Past) -> Iterator[Finding | Observation | Repair]:
    number = gpu.recovery_action()
    if number is None:
        return
    reading = Observation("gpu_recovery_action", number, labels=(("pci", gpu.pci),))
    yield reading
    last = past.last(reading)
    if number == 0 and last is not None and last.value in RESETS:
        yield Repair(Clears.GPU_RESET, gpu.pci, "the driver asks for no recovery any more", before=last.time)
    if number != 0:
        action = ACTIONS.get(number, UNKNOWN)
        message = f"the driver asks to {action.words} ({number})"
        yield Finding(action.severity, f"gpu_recovery_action/{action.name}", gpu.pci, message)


def _explain(severity: Severity, words: str, matters: str, todo: str) -> Explain:
    return Explain(
        severity, Clears.PASS, f"The driver asks to {words}, and goes on to ask until it is done.", matters, todo
    )


_BROKEN = "The GPU met a fault that it cannot leave by itself: work on it fails or has failed."
_RESET = (
    "Let the node drain, stop all clients of the GPU, nvidia-smi --gpu-reset -i PCI (with NVSwitches: all GPUs), or "
    "reboot. The Xid just before it in journalctl -k says why."
)
_REBOOT = "Let the node drain and reboot it: a reset of the GPU is not enough. journalctl -k says why."

OBSERVATIONS = {
    "gpu_recovery_action": Meaning(
        "What the driver asks for: 0 nothing, 1 GPU reset, 2 node reboot, 3 drain of peer-to-peer traffic, 4 "
        "drain and reset, 5 IMEX domain recovery, 6 bus reset, 7 system reboot.",
        ("pci",),
    ),
}

EXPLAIN = {
    "gpu_recovery_action/gpu_reset": _explain(Severity.CRITICAL, ACTIONS[1].words, _BROKEN, _RESET),
    "gpu_recovery_action/node_reboot": _explain(Severity.CRITICAL, ACTIONS[2].words, _BROKEN, _REBOOT),
    "gpu_recovery_action/drain_p2p": _explain(
        Severity.WARNING,
        ACTIONS[3].words,
        "Traffic between GPUs is disturbed. Jobs that use this GPU alone go on.",
        "Look at NVLink and the fabric manager (nvidia-smi nvlink -s; journalctl -u nvidia-fabricmanager). It mostly "
        "ends when the job that used the links has ended.",
    ),
    "gpu_recovery_action/drain_and_reset": _explain(
        Severity.DEGRADED,
        ACTIONS[4].words,
        "The driver has contained a fault, mostly of memory: what runs goes on, and nothing new should start before "
        "the reset that repairs it. If it gets worse the driver asks to reset the GPU, and that requeues.",
        _RESET,
    ),
    "gpu_recovery_action/recover_imex_domain": _explain(
        Severity.WARNING,
        ACTIONS[5].words,
        "Memory that GPUs of several nodes share is not usable. The cause may be on another node.",
        "Look at nvidia-imex-ctl -N and the service nvidia-imex on the nodes of the domain.",
    ),
    "gpu_recovery_action/bus_reset": _explain(Severity.CRITICAL, ACTIONS[6].words, _BROKEN, _REBOOT),
    "gpu_recovery_action/system_reboot": _explain(Severity.CRITICAL, ACTIONS[7].words, _BROKEN, _REBOOT),
    "gpu_recovery_action/unknown": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The driver asks for an action with a number that is newer than this healthd.",
        "Unknown: it only warns.",
        "nvidia-smi -q names the action (GPU Recovery Action). Upgrade healthd.",
    ),
}
