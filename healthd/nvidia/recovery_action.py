"""Recovery actions that the driver requests for a GPU. Xid 154 and NVML field 230 (nvml.h) use the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from healthd.common.model import Clears, Severity


class Action(NamedTuple):
    """A recovery action. `name` is the NAME in the code gpu_recovery_action/NAME, and `text` is for messages."""

    name: str
    severity: Severity
    clears: Clears
    text: str


# 0 requests nothing. An action that also concerns other nodes or GPUs is only a warning. NVIDIA recommends drain and
# reset (4) if the GPU contained the error and running work continues. Its catalogue recommends RESET_GPU for Xid 48, or
# DRAIN_AND_RESET if a row remap (63, 64) waits for the reset. If the GPU cannot be used any more without a reset, the
# driver requests 1, which is another condition and CRITICAL. Sources: docs.nvidia.com/deploy/xid-errors
# (WORKFLOW_XID_48), docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt (error recovery and response flags).
ACTIONS: Mapping[int, Action] = {
    1: Action("gpu_reset", Severity.CRITICAL, Clears.GPU_RESET, "reset the GPU"),
    2: Action("node_reboot", Severity.CRITICAL, Clears.REBOOT, "reboot the node"),
    3: Action("drain_p2p", Severity.WARNING, Clears.GPU_RESET, "drain peer-to-peer traffic"),
    4: Action("drain_and_reset", Severity.DEGRADED, Clears.GPU_RESET, "drain and reset the GPU"),
    5: Action("recover_imex_domain", Severity.WARNING, Clears.GPU_RESET, "recover the IMEX domain"),
    6: Action("bus_reset", Severity.CRITICAL, Clears.GPU_RESET, "reset the bus"),
    7: Action("system_reboot", Severity.CRITICAL, Clears.REBOOT, "reboot the system"),
}
UNKNOWN = Action("unknown", Severity.WARNING, Clears.GPU_RESET, "an action that this version does not know")
RESETS = frozenset({1, 2, 4, 6, 7})  # if the driver no longer requests one of these actions, the action was carried out
