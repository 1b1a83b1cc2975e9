"""Write the output of the commands in docs/fleet-answers.md, each below its command: `scripts/fleet_excerpts.py`.

The commands query a store that is built from a generated history with known faults (bench/history). The history is the
same on every machine. Run the script after an answer changes; tests/docs/test_fleet_answers_docs.py fails if the page
differs.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/fleet-answers.md"
CONSOLE = re.compile(r"(?<=```console\n)(.*?)(?=```)", re.DOTALL)
DUMPS = ROOT / "tests/data/flight_recorder"
# docs/fleet-answers.md names the same options.
HISTORY = ("--jobs", "60000", "--months", "3", "--seed", "13")
FILES = {
    "--nodes": "made/nodes.csv",
    "--topology": "made/topology.conf",
    "--slurmctld-log": "made/slurmctld.log",
    "--node-states": "made/node_states.txt",
    "--reservations": "made/reservations.txt",
    "--tickets": "made/tickets.csv",
    "--events": "made/events",
    "--sacct": "made/sacct/*.txt",
}
INGEST = "healthd fleet ingest --out db --cluster made --timezone UTC " + " ".join(map(" ".join, FILES.items()))


def make_store(folder: Path) -> None:
    """Build `folder`/db from `folder`/made, and a command `folder`/bin/healthd that runs this tree.

    Raises CalledProcessError."""
    program = folder / "bin/healthd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m healthd "$@"\n')
    program.chmod(0o755)
    make = [sys.executable, str(ROOT / "bench/make_history.py"), "--out", "made", *HISTORY]
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'bench'}"}
    subprocess.run(make, cwd=folder, env={**_environment(folder), **path}, check=True, capture_output=True)
    subprocess.run(["sh", "-c", INGEST], cwd=folder, env=_environment(folder), check=True, capture_output=True)
    if DUMPS.exists():
        (folder / "flight_recorder").symlink_to(DUMPS)


def command_output(command: str, folder: Path) -> str:
    """Return the output of the command on a terminal of 120 columns, in a folder where the store is ./db."""
    process = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=_environment(folder), capture_output=True, text=True
    )
    return process.stdout + process.stderr


def commands(block: str) -> list[str]:
    """Return the commands of one terminal block: its lines that begin with "$ "."""
    return re.findall(r"(?m)^\$ (.*)$", block)


def blocks(page: str) -> list[str]:
    """Return the terminal blocks of the page."""
    return CONSOLE.findall(page)


def block(command_lines: list[str], run: Callable[[str], str]) -> str:
    """Return a terminal block: each command, and below it its output from `run`."""
    return "".join(f"$ {command}\n{_with_newline(run(command))}" for command in command_lines)


def _with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
        "LC_ALL": "C.UTF-8",
        "TMPDIR": str(folder),
    }


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="fleet-excerpts-") as name:
        folder = Path(name)
        make_store(folder)
        page = PAGE.read_text("utf-8")
        new_page = CONSOLE.sub(
            lambda found: block(commands(found[0]), lambda command: command_output(command, folder)), page
        )
    PAGE.write_text(new_page, "utf-8")
    print(
        f"{PAGE.relative_to(ROOT)}: {'unchanged' if new_page == page else 'changed'}, {len(blocks(new_page))} terminals"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
