"""Files that this node's prolog writes: each job's GPUs, and the refused jobs.

RUNTIME_DIR/jobs/N contains the GPUs that Slurm allocated to a job, as "JOB NUMBERS [UUIDS]" (gres.parse_prolog_file()).
N is the job's number modulo 1024, so the number of files is bounded and no cleanup is needed. A file that another job
has overwritten is treated as missing. The files are on tmpfs and live as long as the jobs.

RUNTIME_DIR/refused contains one line, "EPOCH_SECONDS JOB", for each job that the prolog refused because of healthd's
verdict. The prolog keeps only the last lines.

Files that other users could change are not read.
"""

from __future__ import annotations

import os

from healthd.agent.slurm.node_gpus import NodeGpus
from healthd.common import ownership
from healthd.common.model import Gpu, Inventory
from healthd.common.text import is_decimal
from healthd.host.job_processes import gpus_open_by_job

FOLDER = "jobs"
FILES = 1024  # the same number as in the prolog
FILE = "refused"
LINES = 64  # the prolog keeps fewer lines
MAX_BYTES = 16 << 10


def read_node_gpus(inventory: Inventory, complete: tuple[Gpu, ...], runtime_dir: str, root: str) -> NodeGpus:
    """Return the GPUs of this node's jobs, both allocated by Slurm and opened by their processes.

    Slurm is not queried.
    """
    return NodeGpus(
        inventory,
        complete,
        lambda job: _read(os.path.join(runtime_dir, FOLDER, str(int(job) % FILES))),
        lambda processes: gpus_open_by_job(processes, root),
    )


def refusal_times(runtime_dir: str) -> tuple[float, ...]:
    """Return the times at which the prolog refused jobs, in epoch seconds, or () if the file is missing or
    untrusted.
    """
    text, _ = _read(os.path.join(runtime_dir, FILE))
    times = [line.partition(" ")[0] for line in text.split("\n")[-LINES:]]
    return tuple(float(word) for word in times if is_decimal(word) and len(word) <= 12)


def _read(path: str) -> tuple[str, float]:
    """Return a file's text and modification time, or ("", 0) if the file is missing or untrusted."""
    try:
        with ownership.open_file(path) as descriptor:
            return os.read(descriptor, MAX_BYTES).decode("ascii", "replace"), os.fstat(descriptor).st_mtime
    except OSError:
        return "", 0.0
