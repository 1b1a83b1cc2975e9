"""Tests of the `healthd fleet` command: its messages and exit statuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.fleet.all_sources import ALL

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def fleet(*arguments: str | Path, program: str = "") -> tuple[int, str, str]:
    """Run `healthd fleet ...` in a Python that runs `program` first. Return exit status, output and errors."""
    start = f"{program}\nimport sys\nfrom healthd.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "fleet", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_missing_duckdb_is_one_sentence(tmp_path):
    without = "import sys\nsys.modules['duckdb'] = None"
    status, out, err = fleet("prune", "--db", tmp_path, "--before", "2026-01-01", program=without)
    assert (status, out) == (3, "")
    message = 'duckdb is not installed here: docs/deploy.md, "Central host", describes the installation'
    assert err == f"healthd fleet: {message}\n"


def test_help_needs_no_extra():
    status, out, err = fleet("ingest", "--help", program="import sys\nsys.modules['duckdb'] = None")
    assert (status, err) == (0, "")
    assert all(source.flag in out for source in ALL)


def test_prune_rejects_folder_without_store(tmp_path):
    status, _, err = fleet("prune", "--db", tmp_path / "db", "--before", "2026-01-01")
    assert status == 3
    assert err.startswith(f"healthd fleet: {tmp_path}/db: not a store: ")


@pytest.mark.parametrize(
    ("before", "reason"), [("2090-01-01", "in the future"), ("May", "not a time"), ("Unknown", "is not a time")]
)
def test_prune_rejects_invalid_date(tmp_path, before, reason):
    status, _, err = fleet("prune", "--db", tmp_path / "db", "--before", before)
    assert status == 64
    assert reason in err


def test_ingest_without_source_is_usage_error(tmp_path):
    status, _, err = fleet("ingest", "--out", tmp_path / "db")
    assert (status, (tmp_path / "db").exists()) == (64, False)
    assert all(source.flag in err for source in ALL)


def test_ingest_continues_after_missing_file(tmp_path):
    for number in (1, 2):
        line = f"{number}|COMPLETED|1793500000|1793500000|1793500100"
        (tmp_path / f"j{number}.txt").write_text(f"JobID|State|Submit|Start|End\n{line}\n")
    files = [tmp_path / name for name in ("j1.txt", "missing.txt", "j2.txt")]
    status, out, err = fleet("ingest", "--out", tmp_path / "db", "--cluster", "c1", "--sacct", *files)
    assert (status, out) == (3, "sacct: 2 rows\n")
    assert re.fullmatch(f"sacct: {files[1]}: .*\n", err)


def test_ingest_names_twenty_unreadable_streams_and_counts_others(tmp_path):
    for number in range(30):
        node = tmp_path / "srv" / f"n{number:02}"
        node.mkdir(parents=True)
        (node / "events.jsonl").symlink_to("/dev/zero")
    status, out, err = fleet("ingest", "--out", tmp_path / "db", "--events", tmp_path / "srv")
    lines = err.splitlines()
    assert (status, out, len(lines)) == (3, "", 21)
    assert lines[0].startswith(f"events: {tmp_path}/srv/n00/events.jsonl: ")
    assert " 10 more files" in lines[-1]
