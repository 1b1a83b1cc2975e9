"""Processes that hold a GPU of a node on which no job runs: leftovers of jobs, and what should not be there.

Rule: what is left on a GPU keeps its memory from the next job, and keeps the GPU from being reset. Slurm's own epilogs
and NHC look for such processes as well. The call takes a lock of the driver (some 4.5 ms a GPU), which jobs would feel:
so it is made only while no job is here: Slurm shows this node drained and idle, or an epilog told that the last job
ended, and Slurm's cgroups have none. Asked by hand where jobs run, it names theirs, too.
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
    Host,
    NothingToCheck,
    NvmlGpu,
    Past,
    Seconds,
    Severity,
    regex,
)
from healthd.host.cgroup import job_in

USES = "nvml"
WHEN = "idle"
AFTER_EVENTS = ("job_end",)
MOST_ANCESTORS = 16
COMM_LENGTH = 15  # characters: the kernel cuts program names there


class Config(CheckSettings, frozen=True):
    """allowed          programs that may hold a GPU: services that outlive jobs (MPS, a display server, DCGM)
    confirm_seconds  a process must be there for so long: one that is about to end does not count
    """

    allowed: tuple[str, ...] = (
        "nvidia-cuda-mps-server",
        "nvidia-cuda-mps-control",
        "Xorg",
        "nv-hostengine",
        "dcgm-exporter",
    )
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | NothingToCheck]:
    yield from host.each_gpu(lambda gpu: _look(host, gpu, config))


def _look(host: Host, gpu: NvmlGpu, config: Config) -> Iterator[Finding]:
    allowed = {name[:COMM_LENGTH] for name in config.allowed}
    pids = gpu.compute_processes() or ()
    left = [(pid, program) for pid in pids if (program := host.read(f"/proc/{pid}/comm")) not in allowed]
    if left and (validation := host.told(f"{host.runtime_dir}/validation.lock")):
        left = [(pid, program) for pid, program in left if not _descends(host, pid, validation)]
    if left:
        message = ", ".join(_words(host, pid, program) for pid, program in left)
        yield Finding(
            Severity.DEGRADED,
            "gpu_processes/leftover",
            gpu.pci,
            f"held by {message}",
            confirm_seconds=config.confirm_seconds,
        )


def _descends(host: Host, pid: int, ancestor: str) -> bool:
    """Whether a process, or one that it descends from, has the number that `healthd validate` wrote into its lock:
    what that runs on the GPUs is no leftover."""
    for _ in range(MOST_ANCESTORS):
        if f"{pid}" == ancestor:
            return True
        parent = regex(r"^PPid:\s*(\d+)", re.MULTILINE).search(host.told(f"/proc/{pid}/status"))
        if parent is None or parent[1] in ("0", "1"):
            return False
        pid = int(parent[1])
    return False


def _words(host: Host, pid: int, program: str | None) -> str:
    """'pid 4711 "python" (uid 1000, job 12)'. A process that has ended and still holds the GPU counts, too."""
    if program is None:
        return f"pid {pid}, which /proc does not have"
    user = regex(r"^Uid:\s*(\d+)", re.MULTILINE).search(host.read(f"/proc/{pid}/status") or "")
    job = job_in(host.read(f"/proc/{pid}/cgroup") or "")
    return f'pid {pid} "{program}" (uid {user[1] if user else "unknown"}{f", job {job}" if job else ", of no job"})'


EXPLAIN = {
    "gpu_processes/leftover": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A process holds a GPU of a drained node on which no job runs: left by a job, or started past Slurm.",
        "The next job finds less memory on the GPU, or shares it. The GPU cannot be reset.",
        "nvidia-smi; ps -fp PID. Ask its owner or end it: kill PID. One that does not end hangs in the driver "
        "(cat /proc/PID/stack): reboot. A service that may hold GPUs belongs into allowed of [checks.gpu_processes].",
        confirm="confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DRIVER)
