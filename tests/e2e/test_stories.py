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
from stories import CHECKS, Row, run_story

from healthd.agent.settings import registry
from healthd.common.model import Severity

PARALLEL_STORIES = 8
FILES = (stories_gpu, stories_host, stories_network, stories_pci, stories_storage)
ROWS = [row for file in FILES for row in file.ROWS]
UNTESTED = {code: why for file in FILES for code, why in file.UNTESTED.items()}
CHANGING_SEVERITY = {"gpu_access/hang", "mount/hang"}  # explained with their first severity


@pytest.fixture(scope="module")
def story_results(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[None]]]:
    """Run the selected stories and yield their results by the text of the row."""
    story_items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    selected_rows: list[Row] = [item.callspec.params["row"] for item in story_items]
    free_nodes: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        SlurmCluster(nodes=min(PARALLEL_STORIES, len(selected_rows)), gpus=0) as cluster,
        ThreadPoolExecutor(PARALLEL_STORIES) as pool,
    ):
        for name in cluster.names:
            free_nodes.put(name)
        yield {str(row): pool.submit(run_story, row, cluster, free_nodes) for row in selected_rows}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_story(story_results: dict[str, Future[None]], row: Row) -> None:
    story_results[str(row)].result()


def test_every_draining_row_has_story_or_reason_without() -> None:
    draining = {
        family(code) for code, found in registry.explained(CHECKS).items() if found.severity >= Severity.DEGRADED
    }
    tested, untested = {family(row.code) for row in ROWS}, {family(code) for code in UNTESTED}
    assert (draining | CHANGING_SEVERITY) - tested - untested == set()
    assert tested & untested == set()


def family(code: str) -> str:
    """Group the many Xids and SXids by the way they clear."""
    if code.partition("/")[0] not in ("gpu_xid", "sxid"):
        return code
    found = registry.explain(CHECKS, code)
    assert found is not None
    return f"{code.partition('/')[0]} until {found.clears.value}"
