"""`make soak`: a real `healthd run` with a real Slurm for an hour, while all that happens to a node happens at random.

Two nodes on one Slurm: of one the daemon is killed and started again, the other's lives all the while, so that growth
shows. Under one seed the same things happen in the same order.

    node.py      a node, its daemon, and what is done to both
    happens.py   what happens: one function each, a deck of them
    model.py     what must have come of it: every event and every decision once
    growth.py    what may not grow
    run.py       from the first step to the report
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests/support"), str(REPOSITORY / "tests" / "e2e")]
