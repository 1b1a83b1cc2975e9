"""Names for resources outside of the run's folder: scripts/run_tests.py finds leftovers by the name of the run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

FOLDER = Path(os.environ.get("HEALTHD_TEST_RUN") or tempfile.gettempdir())
RUNS = [part for part in FOLDER.parts if part.startswith("hdt.")] or [FOLDER.name]  # a run may be inside another


def name_with_run(name: str) -> str:
    """Return a name for a cgroup or a program that creates one: "hdt.x2k_81ab.name"."""
    return ".".join((*RUNS, name))
