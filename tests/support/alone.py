"""Tests that change the whole machine run with nothing beside them: scripts/run_tests.py runs them after the others.

pytest by itself runs all that it is given. HEALTHD_TESTS says which part of that a process of run_tests.py is to run:
"beside", what bears others beside it, or "alone", what is marked so.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PART = "HEALTHD_TESTS"


@pytest.hookimpl(trylast=True)  # of what `-m` and a file's tables leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = os.environ.get(PART)
    if part is None:
        return
    alone = [item for item in items if item.get_closest_marker("alone")]
    if alone and part == "beside":
        Path(os.environ["HEALTHD_TEST_RUN"], "alone").touch()  # says that there are such
    beside = [item for item in items if item not in alone]
    items[:], left = (alone, beside) if part == "alone" else (beside, alone)
    if left:
        config.hook.pytest_deselected(items=left)
