"""The recovery action that the driver requests for a GPU (NVML field 230, driver 570 and later).

Source: nvml.h. The field contains the same information as Xid 154. It is a state, so it can still be read if the Xid
was missed. Drivers and GPUs without the field are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    CheckSettings as Config,
)
from healthd.api import (
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
    Repair,
    Severity,
)
from healthd.nvidia.recovery_action import ACTIONS, RESETS, UNKNOWN

USES = "nvml"
AFTER_EVENTS = ("xid", "gsp", "gpu_event", "gpu_recovery_action", "job_end")


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    yield from host.each_gpu(lambda gpu: _judge(gpu, past), NothingToCheck("no GPU reports recovery actions"))


def _judge(gpu: NvmlGpu, past: History) -> Iterator[Finding | Observation | Repair]:
    number = gpu.recovery_action()
    if number is None:
        return
    reading = Observation("gpu_recovery_action", number, labels=(("pci", gpu.pci),))
    yield reading
    last = past.last(reading)
    if number == 0 and last is not None and last.value in RESETS:
        yield Repair(Clears.GPU_RESET, gpu.pci, "the driver no longer requests recovery", before=last.time)
    if number != 0:
        action = ACTIONS.get(number, UNKNOWN)
        message = f"the driver requests: {action.text} ({number})"
        yield Finding(action.severity, f"gpu_recovery_action/{action.name}", gpu.pci, message)


def _explain(severity: Severity, action_text: str, matters: str, todo: str) -> Explain:
    return Explain(
        severity,
        Clears.PASS,
        f"The driver requests this recovery action: {action_text}. The driver repeats the request until the action is "
        "done.",
        matters,
        todo,
    )


_BROKEN = "The GPU had a fault that it cannot recover from by itself. Work on the GPU fails or has failed."
_RESET = (
    "After the drain, stop all clients of the GPU, then run nvidia-smi --gpu-reset -i PCI (with NVSwitches, reset all "
    "GPUs), or reboot. An earlier Xid in journalctl -k shows the reason."
)
_REBOOT = "Reboot after the drain. A GPU reset is not enough. journalctl -k shows the reason."

OBSERVATIONS = {
    "gpu_recovery_action": Meaning(
        "Requested recovery action: 0 none, 1 GPU reset, 2 node reboot, 3 drain of peer-to-peer traffic, 4 drain and "
        "reset, 5 IMEX domain recovery, 6 bus reset, 7 system reboot.",
        ("pci",),
    ),
}

EXPLAIN = {
    "gpu_recovery_action/gpu_reset": _explain(Severity.CRITICAL, ACTIONS[1].text, _BROKEN, _RESET),
    "gpu_recovery_action/node_reboot": _explain(Severity.CRITICAL, ACTIONS[2].text, _BROKEN, _REBOOT),
    "gpu_recovery_action/drain_p2p": _explain(
        Severity.WARNING,
        ACTIONS[3].text,
        "Traffic between GPUs is disrupted. Jobs that use only this GPU continue.",
        "No action tonight. Check NVLink and the fabric manager (nvidia-smi nvlink -s; journalctl -u "
        "nvidia-fabricmanager). The request usually clears when the job that used the links ends.",
    ),
    "gpu_recovery_action/drain_and_reset": _explain(
        Severity.DEGRADED,
        ACTIONS[4].text,
        "The driver has contained a fault, usually a memory error. Running work continues, but no new work should "
        "start before the reset that repairs the fault. If the fault gets worse, the driver requests a GPU reset, "
        "and healthd requeues the jobs.",
        _RESET,
    ),
    "gpu_recovery_action/recover_imex_domain": _explain(
        Severity.WARNING,
        ACTIONS[5].text,
        "Memory that GPUs on several nodes share cannot be used. The cause may be on another node.",
        "No action tonight on this node. Check nvidia-imex-ctl -N and the service nvidia-imex on the domain's nodes.",
    ),
    "gpu_recovery_action/bus_reset": _explain(Severity.CRITICAL, ACTIONS[6].text, _BROKEN, _REBOOT),
    "gpu_recovery_action/system_reboot": _explain(Severity.CRITICAL, ACTIONS[7].text, _BROKEN, _REBOOT),
    "gpu_recovery_action/unknown": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The driver requests an action that this version of healthd does not recognise.",
        "The effect is unknown, so this is only a warning.",
        "No action tonight. nvidia-smi -q names the action (GPU Recovery Action). Upgrade healthd.",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.GPU),
    "gpu_recovery_action/drain_p2p": FailureCause.NVLINK,
    "gpu_recovery_action/recover_imex_domain": FailureCause.NVLINK,
}
ENDS_JOB = {
    "gpu_recovery_action/gpu_reset": EndsJob.ALWAYS,
    "gpu_recovery_action/node_reboot": EndsJob.ALWAYS,
    "gpu_recovery_action/drain_and_reset": EndsJob.ALWAYS,
    "gpu_recovery_action/bus_reset": EndsJob.ALWAYS,
    "gpu_recovery_action/system_reboot": EndsJob.ALWAYS,
}
