"""Processes that use a GPU on a node without jobs: leftovers of jobs, or processes started outside Slurm.

Rule: a leftover process occupies GPU memory that the next job needs, and prevents a GPU reset. Slurm's own epilogs and
NHC also look for such processes. The NVML call holds a lock in the driver (about 4.5 ms for each GPU), which would
disturb jobs. It is therefore made only while no job is on the node. Slurm must show the node as drained and idle, or an
epilog must have reported the end of the last job. Slurm's cgroups must also be empty. A manual check on a node with
jobs also lists the jobs' processes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from healthd.api import (
    CheckSettings,
    Clears,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    NothingToCheck,
    NvmlGpu,
    Seconds,
    Severity,
    regex,
)
from healthd.host.cgroup import job_in

USES = "nvml"
WHEN = "idle"
AFTER_EVENTS = ("job_end",)
MAX_ANCESTORS = 16
COMM_LENGTH = 15  # the kernel truncates program names to this many characters


class Config(CheckSettings, frozen=True):
    """allowed          programs that may use a GPU: services that outlive jobs (MPS, a display server, DCGM)
    confirm_seconds  a process must be present for this long before it is reported, because it may be about to end
    """

    allowed: tuple[str, ...] = (
        "nvidia-cuda-mps-server",
        "nvidia-cuda-mps-control",
        "Xorg",
        "nv-hostengine",
        "dcgm-exporter",
    )
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | NothingToCheck]:
    yield from host.each_gpu(lambda gpu: _check_gpu(host, gpu, config))


def _check_gpu(host: Host, gpu: NvmlGpu, config: Config) -> Iterator[Finding]:
    allowed = {name[:COMM_LENGTH] for name in config.allowed}
    pids = gpu.compute_processes() or ()
    leftovers = [(pid, program) for pid in pids if (program := host.read(f"/proc/{pid}/comm")) not in allowed]
    if leftovers and (validation := host.read_or_empty(f"{host.runtime_dir}/validation.lock")):
        leftovers = [(pid, program) for pid, program in leftovers if not _descends(host, pid, validation)]
    if leftovers:
        message = ", ".join(_describe(host, pid, program) for pid, program in leftovers)
        yield Finding(
            Severity.DEGRADED,
            "gpu_processes/leftover",
            gpu.pci,
            f"in use by {message}",
            confirm_seconds=config.confirm_seconds,
        )


def _descends(host: Host, pid: int, ancestor: str) -> bool:
    """Return True if `ancestor` is this process or one of its ancestors. `ancestor` is the pid in the lock file of
    `healthd validate`, whose processes are not leftovers.
    """
    for _ in range(MAX_ANCESTORS):
        if f"{pid}" == ancestor:
            return True
        parent = regex(r"^PPid:\s*(\d+)", re.MULTILINE).search(host.read_or_empty(f"/proc/{pid}/status"))
        if parent is None or parent[1] in ("0", "1"):
            return False
        pid = int(parent[1])
    return False


def _describe(host: Host, pid: int, program: str | None) -> str:
    """Return text such as 'pid 4711 "python" (uid 1000, job 12)'. The driver may list a process that has ended."""
    if program is None:
        return f"pid {pid}, which is not in /proc"
    user = regex(r"^Uid:\s*(\d+)", re.MULTILINE).search(host.read(f"/proc/{pid}/status") or "")
    job = job_in(host.read(f"/proc/{pid}/cgroup") or "")
    return f'pid {pid} "{program}" (uid {user[1] if user else "unknown"}{f", job {job}" if job else ", no job"})'


EXPLAIN = {
    "gpu_processes/leftover": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process uses a GPU on a drained node without jobs. A job left it behind, or it was started outside Slurm.",
        "The next job has less GPU memory or shares the GPU with this process. The GPU cannot be reset.",
        "nvidia-smi and ps -fp PID show the process. Ask the owner, or end the process with kill PID. A process that "
        "does not end hangs in the driver (cat /proc/PID/stack); reboot the node. Add services that may use GPUs to "
        "allowed in [checks.gpu_processes].",
        confirm="confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
