"""The fake node for measuring rounds."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import node_tree

GPUS, DISKS, PROCESSES = len(node_tree.GPUS), len(node_tree.DISKS), node_tree.PROCESSES


@contextlib.contextmanager
def node(
    gpus: int = GPUS, disks: int = DISKS, processes: int = PROCESSES, profile: str = "dgx-h100"
) -> Iterator[tuple[Path, str]]:
    """Build the node's tree. Yield the tree, and settings that include a baseline of it, so that every check has a
    reference.

    The file `gpus.toml` in the tree defines the GPUs of the fake NVML, which are those of the fake machine `profile`.
    """
    folder = Path(tempfile.mkdtemp(prefix="healthd-bench."))
    try:
        node_tree.build(folder, gpus, disks, processes)
        fake = folder / "gpus.toml"
        fake.write_text(f'profile = "{profile}"\npci = {json.dumps(node_tree.gpus(gpus))}\n')
        argv = (sys.executable, "-m", "healthd", "baseline", "--root", str(folder), "--fake-nvml", str(fake))
        baseline = folder / "baseline.toml"
        baseline.write_text(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, cwd="/").stdout)
        yield folder, f'baseline_file = "{baseline}"\n{node_tree.CONFIG}'
    finally:
        shutil.rmtree(folder)
