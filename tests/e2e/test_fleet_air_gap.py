"""Test that the centre needs no network: every query runs without one and downloads nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fleet_history import history
from fleet_rows import store_with
from requirements import require_programs, require_root

from healthd.fleet.queries import builtin_queries

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {
        table: [tuple(entry.values()) for entry in entries]
        for table, entries in history(Random(0), 60).items()
        if entries
    }
    return store_with(tmp_path_factory.mktemp("fleet") / "db", rows)


def run_without_network(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own network namespace, where the loopback is down and there is no other interface."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
    return subprocess.run(["unshare", "--net", *command], capture_output=True, text=True, timeout=120, env=env)


def test_every_query_runs_without_network_and_leaves_no_files(db, tmp_path):
    require_root()
    require_programs("unshare", packages="util-linux")
    links = run_without_network(tmp_path, "cat", "/proc/net/dev").stdout.splitlines()[2:]
    assert [line.split()[:2] for line in links] == [["lo:", "0"]]
    for name in builtin_queries():
        result = run_without_network(tmp_path, sys.executable, "-m", "healthd", "fleet", "query", name, "--db", str(db))
        assert (result.returncode, result.stderr) == (0, ""), name
        assert "no rows" not in result.stdout, name
    assert list(tmp_path.iterdir()) == [], "no extension below HOME and nothing in TMPDIR"
