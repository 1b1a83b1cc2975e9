"""Every draining row of the catalogue has a story, run by the real `healthd run` and a real Slurm (stories.py).

The stories run in parallel: each test waits for its own.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import stories_gpu
import stories_host
import stories_network
import stories_pci
import stories_storage
from slurm_cluster import SlurmCluster
from stories import CHECKS, Row, tell

from healthd.agent.settings import registry
from healthd.common.model import Severity

AT_ONCE = 8
FILES = (stories_gpu, stories_host, stories_network, stories_pci, stories_storage)
ROWS = [row for file in FILES for row in file.ROWS]
LEFT = {code: why for file in FILES for code, why in file.LEFT.items()}
WORSENS = {"gpu_access/hang", "mount/hang"}  # explained with their first severity


@pytest.fixture(scope="module")
def told(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """Run the selected stories and yield their results by the text of the row."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked: list[Row] = [item.callspec.params["row"] for item in here]
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    with SlurmCluster(nodes=min(AT_ONCE, len(asked)), gpus=0) as cluster, ThreadPoolExecutor(AT_ONCE) as pool:
        for name in cluster.names:
            free.put(name)
        yield {str(row): pool.submit(tell, row, cluster, free) for row in asked}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_story(told: dict[str, Future[None]], row: Row) -> None:
    told[str(row)].result()


def test_every_row_that_drains_has_a_story_or_it_is_said_why_not() -> None:
    draining = {
        family(code) for code, found in registry.explained(CHECKS).items() if found.severity >= Severity.DEGRADED
    }
    told, left = {family(row.code) for row in ROWS}, {family(code) for code in LEFT}
    assert (draining | WORSENS) - told - left == set()
    assert told & left == set()


def family(code: str) -> str:
    """Group the many Xids and SXids by the way they clear."""
    if code.partition("/")[0] not in ("gpu_xid", "sxid"):
        return code
    found = registry.explain(CHECKS, code)
    assert found is not None
    return f"{code.partition('/')[0]} until {found.clears.value}"
