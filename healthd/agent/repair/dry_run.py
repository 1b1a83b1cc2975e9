"""What must hold before a step, read now, for `healthd repair --dry-run`. Nothing is changed.

The executor calls the same functions right before the step. The daemon reports its own obstacles in its status
(obstacles.py, attempt.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection

from healthd.agent.repair.executor import BOOTS
from healthd.agent.repair.journal import Outcome, Request
from healthd.agent.repair.node_reading import DAEMON_UNIT, own_pids, read_node
from healthd.agent.repair.requirements import NodeReading, Process, Requirement, requirements
from healthd.agent.repair.reset_step import PreparedReset, open_smi, prepare_reset
from healthd.agent.repair.slurm_state import cluster_requirements, jobs_requirement
from healthd.agent.repair.step_result import PreparedStep, StepResult
from healthd.agent.slurm import blocking
from healthd.common.model import RepairStep

CHECKS_SECONDS = 15.0  # a round closes NVML within seconds
STEP_TEXTS = {
    RepairStep.GPU_RESET: "the GPUs can be reset",
    RepairStep.REBOOT: "Slurm or systemd can reboot the node",
    RepairStep.POWER_CYCLE: "power_cycle_command reaches the BMC of this machine",
}


def read_requirements(request: Request, stuck_pids: Collection[int] = ()) -> list[Requirement]:
    """Return the requirements in Slurm, on this node and of the step itself.

    `stuck_pids` are processes that hang in the kernel. nvidia-smi might then hang too, so it is not run.
    """
    is_reset = request.step is RepairStep.GPU_RESET
    reading = _read_without_checks(request.root) if is_reset else read_node(request.root)
    own = own_pids(reading, request.step)
    users = [process.pid for process in _own_users(reading)] if is_reset else []
    return [
        *cluster_requirements(request, blocking.run),
        jobs_requirement(request, blocking.run),
        *requirements(reading, request.settings.stop_services, own, is_reset),
        _step_requirement(request, stuck_pids, users),
    ]


def _read_without_checks(root: str) -> NodeReading:
    """Read the node once the daemon's checks have closed the GPUs, or after CHECKS_SECONDS."""
    deadline = time.monotonic() + CHECKS_SECONDS
    while _own_users(reading := read_node(root)) and time.monotonic() < deadline:
        time.sleep(1.0)
    return reading


def _own_users(reading: NodeReading) -> list[Process]:
    return [p for p in reading.processes or () if p.gpu_files and p.unit == DAEMON_UNIT]


def _step_requirement(request: Request, stuck_pids: Collection[int], users: Collection[int]) -> Requirement:
    """Return the requirement that this step is possible on this node and in its state."""
    text = STEP_TEXTS[request.step]
    if request.step is RepairStep.GPU_RESET and stuck_pids:
        pid = min(stuck_pids)
        return Requirement("step", text, False, f"process {pid} hangs in the kernel, so a reset may hang too")
    if users:
        return Requirement("step", text, None, f"process {min(users)} of healthd still uses the GPUs")
    if request.step is not RepairStep.REBOOT and os.geteuid() != 0:
        return Requirement("step", text, None, "only root can test this")
    prepared = _prepare(request)
    if not isinstance(prepared, StepResult):
        return Requirement("step", text, True)
    return Requirement("step", text, False if prepared.outcome is Outcome.IMPOSSIBLE else None, prepared.problem)


def _prepare(request: Request) -> PreparedReset | PreparedStep | StepResult:
    if request.step is not RepairStep.GPU_RESET:
        return BOOTS[request.step](request)
    with tempfile.TemporaryDirectory(prefix="healthd-repair-") as folder:
        return prepare_reset(request, open_smi(folder))
