"""What a test makes outside of its run's folder has the run's name, by which scripts/run_tests.py finds it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FOLDER = Path(os.environ.get("HEALTHD_TEST_RUN") or tempfile.gettempdir())
RUNS = [part for part in FOLDER.parts if part.startswith("hdt.")] or [FOLDER.name]  # a run may be inside another


def of_this_run(name: str) -> str:
    """For a cgroup, or what makes one of its own name: "hdt.x2k_81ab.name"."""
    return ".".join((*RUNS, name))
