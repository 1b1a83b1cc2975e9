"""`make soak`: run a real `healthd run` with a real Slurm for an hour under random faults.

Two nodes share one Slurm. The daemon of one node is killed and restarted. The daemon of the other node runs all the
time, so that growth becomes visible. The same seed gives the same events in the same order.

    node.py      a node, its daemon, and the actions on both
    actions.py   the events (one function each), and the deck of all events
    model.py     checks the result: every event and every decision must occur exactly once
    growth.py    values that must not grow
    run.py       the soak from the first step to the report
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests/support"), str(REPOSITORY / "tests" / "e2e")]
