"""Tests that change the whole machine run by themselves: scripts/run_tests.py runs them after the others.

pytest without that script runs all selected tests. HEALTHD_TESTS selects the part that a process of run_tests.py runs:
"beside" for tests that can run in parallel with others, "alone" for tests marked `alone`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PART = "HEALTHD_TESTS"


@pytest.hookimpl(trylast=True)  # after the selection by `-m` and by file
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = os.environ.get(PART)
    if part is None:
        return
    alone = [item for item in items if item.get_closest_marker("alone")]
    if alone and part == "beside":
        Path(os.environ["HEALTHD_TEST_RUN"], "alone").touch()  # informs scripts/run_tests.py that such tests exist
    beside = [item for item in items if item not in alone]
    items[:], deselected = (alone, beside) if part == "alone" else (beside, alone)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
