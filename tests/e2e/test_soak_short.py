"""Two minutes of `make soak` (bench/soak): every event for each of two nodes and a quiet period, then random events.

The test waits for the consequences of each event and counts them; no duration fails it.
HEALTHD_SOAK_SEED: another seed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak.actions import DECK
from soak.run import NO_LIMIT, start_soak

SEED = int(os.environ.get("HEALTHD_SOAK_SEED", "1"))
SECONDS = 120


@pytest.mark.timeout(3600)
def test_every_event_and_decision_occurs_once_and_nothing_stays_open() -> None:
    with start_soak(SEED) as soak:
        soak.run(SECONDS, max_kib=NO_LIMIT, max_series=NO_LIMIT)  # the warm-up takes many more rounds
        print(soak.report())
    assert min(soak.done[happening.__name__] for happening in DECK) >= len(soak.nodes)
