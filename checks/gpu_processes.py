"""Processes that hold a GPU on a node without jobs: leftovers of jobs, or processes started outside Slurm.

Rule: a leftover process keeps GPU memory from the next job and prevents a reset of the GPU. Slurm's own epilogs and
NHC look for such processes as well. The call takes a lock of the driver (some 4.5 ms for each GPU), which jobs would
notice. It is made only while no job is on the node: Slurm shows this node drained and idle, or an epilog reported the
end of the last job, and Slurm's cgroups are empty. A manual check on a node with jobs lists their processes, too.
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
COMM_LENGTH = 15  # characters: the kernel cuts program names at this length


class Config(CheckSettings, frozen=True):
    """allowed          programs that may hold a GPU: services that outlive jobs (MPS, a display server, DCGM)
    confirm_seconds  a process must be present for this long: one that is about to end does not count
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
            f"held by {message}",
            confirm_seconds=config.confirm_seconds,
        )


def _descends(host: Host, pid: int, ancestor: str) -> bool:
    """Return True if a process, or an ancestor, has the pid in the lock of `healthd validate`: such a process is no
    leftover."""
    for _ in range(MAX_ANCESTORS):
        if f"{pid}" == ancestor:
            return True
        parent = regex(r"^PPid:\s*(\d+)", re.MULTILINE).search(host.read_or_empty(f"/proc/{pid}/status"))
        if parent is None or parent[1] in ("0", "1"):
            return False
        pid = int(parent[1])
    return False


def _describe(host: Host, pid: int, program: str | None) -> str:
    """Return 'pid 4711 "python" (uid 1000, job 12)'. A process that has ended and still holds the GPU counts, too."""
    if program is None:
        return f"pid {pid}, which is not in /proc"
    user = regex(r"^Uid:\s*(\d+)", re.MULTILINE).search(host.read(f"/proc/{pid}/status") or "")
    job = job_in(host.read(f"/proc/{pid}/cgroup") or "")
    return f'pid {pid} "{program}" (uid {user[1] if user else "unknown"}{f", job {job}" if job else ", no job"})'


EXPLAIN = {
    "gpu_processes/leftover": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process holds a GPU of a drained node without jobs: a job left it, or it was started outside Slurm.",
        "The next job finds less memory on the GPU, or shares it. The GPU cannot be reset.",
        "nvidia-smi; ps -fp PID. Ask its owner, or end it: kill PID. A process that does not end hangs in the driver "
        "(cat /proc/PID/stack): reboot. Add services that may hold GPUs to allowed in [checks.gpu_processes].",
        confirm="confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
