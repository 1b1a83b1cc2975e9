"""Test that the centre needs no network: every query runs without one and downloads nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fleet_history import history
from fleet_rows import made
from requirements import require_programs, require_root

from healthd.fleet.queries import builtin_queries

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {table: [tuple(one.values()) for one in some] for table, some in history(Random(0), 60).items() if some}
    return made(tmp_path_factory.mktemp("fleet") / "db", rows)


def without_a_network(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own network namespace, where the loopback is down and there is no other interface."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(home), "TMPDIR": str(home)}
    return subprocess.run(["unshare", "--net", *command], capture_output=True, text=True, timeout=120, env=env)


def test_every_question_is_answered_without_a_network_and_leaves_nothing_behind(db, tmp_path):
    require_root()
    require_programs("unshare", packages="util-linux")
    links = without_a_network(tmp_path, "cat", "/proc/net/dev").stdout.splitlines()[2:]
    assert [line.split()[:2] for line in links] == [["lo:", "0"]]
    for name in builtin_queries():
        done = without_a_network(tmp_path, sys.executable, "-m", "healthd", "fleet", "query", name, "--db", str(db))
        assert (done.returncode, done.stderr) == (0, ""), name
        assert "no rows" not in done.stdout, name
    assert list(tmp_path.iterdir()) == [], "no extension below HOME and nothing in TMPDIR"
