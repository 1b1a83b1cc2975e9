"""Two minutes of `make soak` (bench/soak): all that happens to a node, to each of two, and a rest; then at random.

It waits for what must come of each thing and counts; how long that takes fails nothing.
HEALTHD_SOAK_SEED: another seed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak.happens import DECK
from soak.run import NO_LIMIT, soaking

SEED = int(os.environ.get("HEALTHD_SOAK_SEED", "1"))
SECONDS = 120


@pytest.mark.timeout(3600)
def test_whatever_happens_to_a_node_every_event_and_decision_comes_once_and_nothing_stays_open() -> None:
    with soaking(SEED) as soak:
        soak.live(SECONDS, most_kib=NO_LIMIT, most_series=NO_LIMIT)  # it is warm after many more rounds
        print(soak.report())
    assert min(soak.done[happening.__name__] for happening in DECK) >= len(soak.nodes)
