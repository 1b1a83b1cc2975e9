"""What this node tells, without asking Slurm, of the GPUs that its jobs were given and of those that they have open.

The prolog writes down what Slurm gave a job: RUNTIME_DIR/jobs/N, N = the job's number modulo 1024, holds "JOB NUMBERS
[UUIDS]" (gres.told_by_prolog()). So the files are few however many jobs come, and nobody has to remove them; one that
another job wrote over is as good as none. They are on tmpfs, so they live as long as the jobs.
"""

from __future__ import annotations

import os

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.common import ownership
from healthd.common.model import Gpu, Inventory
from healthd.host.job_processes import open_gpus

FOLDER = "jobs"
FILES = 1024  # as many as the prolog knows
MOST_BYTES = 16 << 10


def of_this_node(inventory: Inventory, whole: tuple[Gpu, ...], runtime_dir: str, root: str) -> NodeGpus:
    return NodeGpus(
        inventory,
        whole,
        lambda job: _read(os.path.join(runtime_dir, FOLDER, str(int(job) % FILES))),
        lambda processes: open_gpus(processes, root),
    )


def _read(path: str) -> tuple[str, float]:
    """A file's text and when it was written; ("", 0) of one that is not there, or that others could change."""
    try:
        with ownership.opened(path) as descriptor:
            return os.read(descriptor, MOST_BYTES).decode("ascii", "replace"), os.fstat(descriptor).st_mtime
    except OSError:
        return "", 0.0
