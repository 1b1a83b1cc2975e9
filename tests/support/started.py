"""Records the start and end of each test in a file of the run (scripts/run_tests.py), to report after a timeout."""

from __future__ import annotations

import os
from pathlib import Path


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(f"+{nodeid}\n")


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note(f"-{nodeid}\n")


def _note(line: str) -> None:
    run = os.environ.get("HEALTHD_TEST_RUN")
    if run and "PYTEST_XDIST_WORKER" not in os.environ:  # xdist forwards to the main process
        with open(Path(run) / "running", "a") as file:
            file.write(line)
