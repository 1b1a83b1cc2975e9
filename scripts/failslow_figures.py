"""Write the pictures and the command output of docs/fail-slow.md: `scripts/failslow_figures.py`.

The jobs on that page are generated from a seed, so their faults are known, and the files are the same on each machine.
`--data DIR` writes only the files of these jobs. Run it after the detection or the plots change:
tests/docs/test_failslow_docs.py fails if the page or a picture is outdated.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from fleet_excerpts import CONSOLE, block, command_output, commands  # noqa: E402

PAGE = ROOT / "docs/fail-slow.md"
FIGURES = {
    "fail-slow-worker.svg": "healthd failslow job.csv --series worker --value batch_time_norm --plot",
    "fail-slow-gang.svg": "healthd failslow gang.csv --index step --plot",
    "fail-slow-job.svg": "healthd failslow sequences.csv --index step --plot",
}
SEED = 14


def write_data(folder: Path) -> None:
    """Write job.csv, gang.csv, sequences.csv and stall.csv."""
    (folder / "job.csv").write_text(_job(random.Random(SEED)))
    (folder / "gang.csv").write_text(_gang(random.Random(SEED)))
    (folder / "sequences.csv").write_text(_sequences(random.Random(SEED)))
    (folder / "stall.csv").write_text(_stall(random.Random(SEED)))


def _job(rng: random.Random) -> str:
    """Return ten workers that do not wait for each other; worker 6 is 65 % slower in iterations 180 to 195."""
    rows = ["worker,batch_time_norm"]
    for iteration in range(300):
        for worker in range(10):
            slow = 1.65 if worker == 6 and 180 <= iteration < 195 else 1.0
            rows.append(f"{worker},{450 * slow * rng.gauss(1, 0.03):.0f}")
    return "\n".join(rows) + "\n"


def _gang(rng: random.Random) -> str:
    """Return eight ranks on two nodes that wait for each other; rank 5 computes 40 % longer in steps 200 to 320."""
    rows = ["rank,node,step,seconds,busy,wait,transfer"]
    for step in range(500):
        busy = [0.5 * rng.gauss(1, 0.02) * (1.4 if rank == 5 and 200 <= step < 320 else 1) for rank in range(8)]
        transfer = 0.2 * rng.gauss(1, 0.03)
        seconds = max(busy) + transfer
        for rank, own in enumerate(busy):
            times = ",".join(f"{value:.4f}" for value in (seconds, own, seconds - own - transfer, transfer))
            rows.append(f"{rank},gpu-{1 + rank // 4},{step},{times}")
    return "\n".join(rows) + "\n"


def _sequences(rng: random.Random) -> str:
    """Return the same gang; from step 250 on, all ranks compute 30 % longer, as with longer sequences."""
    rows = ["rank,node,step,seconds,busy,wait,transfer"]
    for step in range(500):
        busy = [0.5 * rng.gauss(1, 0.02) * (1.3 if step >= 250 else 1) for _ in range(8)]
        transfer = 0.2 * rng.gauss(1, 0.03)
        seconds = max(busy) + transfer
        for rank, own in enumerate(busy):
            times = ",".join(f"{value:.4f}" for value in (seconds, own, seconds - own - transfer, transfer))
            rows.append(f"{rank},gpu-{1 + rank // 4},{step},{times}")
    return "\n".join(rows) + "\n"


def _stall(rng: random.Random) -> str:
    """Return four ranks that wait for each other; the input of rank 2 stalls in every step."""
    rows = ["rank,step,step_time,busy,wait"]
    for step in range(300):
        busy = [(352 if rank == 2 else 162) * rng.gauss(1, 0.01) for rank in range(4)]
        seconds = max(busy) + 10 * rng.gauss(1, 0.03)
        rows += [f"{rank},{step},{seconds:.2f},{own:.2f},{seconds - own:.2f}" for rank, own in enumerate(busy)]
    return "\n".join(rows) + "\n"


def make_folder(folder: Path) -> None:
    """Write the data, and a command `folder`/bin/healthd that runs this tree."""
    write_data(folder)
    program = folder / "bin/healthd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m healthd "$@"\n')
    program.chmod(0o755)


def draw(folder: Path, target: Path) -> None:
    """Draw the pictures from the data in `folder`. Raises CalledProcessError."""
    for name, command in FIGURES.items():
        output = command_output(
            f"{command} {shlex.quote(str(target / name))} >/dev/null || test $? = 1 && echo drawn", folder
        )
        if output != "drawn\n":
            raise subprocess.CalledProcessError(1, command, stderr=output)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the pictures and command output of docs/fail-slow.md.")
    parser.add_argument("--data", type=Path, help="write only the generated jobs, to this folder")
    args = parser.parse_args()
    if args.data is not None:
        args.data.mkdir(parents=True, exist_ok=True)
        write_data(args.data)
        return 0
    with tempfile.TemporaryDirectory(prefix="failslow-figures-") as name:
        folder = Path(name)
        make_folder(folder)
        draw(folder, PAGE.parent)
        page = PAGE.read_text("utf-8")
        new_page = CONSOLE.sub(
            lambda found: block(commands(found[0]), lambda command: command_output(command, folder)), page
        )
    PAGE.write_text(new_page, "utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {'unchanged' if new_page == page else 'changed'}; written: {', '.join(FIGURES)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
