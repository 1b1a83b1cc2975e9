"""A store with an ingested made-up history (bench/history)."""

from __future__ import annotations

import sys
from pathlib import Path

from healthd.cli.main import main

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

from history.generate import make  # noqa: E402
from history.size import Size  # noqa: E402


def create_store(folder: Path, size: Size) -> Path:
    """Generate the history in `folder`, ingest all its sources and return the store."""
    history_dir, db = folder / "made", folder / "db"
    make(size, history_dir)
    sources = {
        "--nodes": "nodes.csv",
        "--topology": "topology.conf",
        "--slurmctld-log": "slurmctld.log",
        "--node-states": "node_states.txt",
        "--reservations": "reservations.txt",
        "--tickets": "tickets.csv",
        "--events": "events",
    }
    flags = [word for flag, name in sources.items() for word in (flag, str(history_dir / name))]
    sacct = ["--sacct", *map(str, sorted((history_dir / "sacct").iterdir()))]
    always = ["--out", str(db), "--cluster", "made", "--timezone", "UTC"]
    assert main(["fleet", "ingest", *always, *flags, *sacct]) in (0, 1)  # some lines of a made-up history are torn
    return db
