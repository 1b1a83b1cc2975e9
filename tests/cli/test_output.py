"""Text that commands print: tests/cli/output/COMMAND.txt holds one transcript per command.

`HEALTHD_WRITE_OUTPUT=1 pytest -n 0 tests/cli/test_output.py` writes what the commands print now; review the diff. Times
are not compared. Other tests assert exit statuses, codes and fields, so that a text is stored in one place.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from slurm_text import columns
from status_daemon import StatusDaemon
from trees import plain_machine, write

from healthd.agent.repair import dry_run, reboot_step
from healthd.agent.repair.requirements import NodeReading, Process
from healthd.agent.slurm import blocking
from healthd.cli import daemons
from healthd.cli.main import FAMILIES, main
from healthd.common.model import RepairStep
from healthd.common.slurm import commands as queries
from healthd.common.slurm.commands import Command, CommandResult
from tests.docs.test_readme import TIMES

pytestmark = pytest.mark.one_python

FOLDER = Path(__file__).parent / "output"
FILES = FOLDER / "files"
COMMAND = re.compile(r"(?m)^\$ (.*)\n")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d[\sT]\d\d:\d\d(:\d\d)?(Z|\+00:00)?")


NODE = NodeReading(
    processes=(
        Process(1, 0, "systemd"),
        Process(820, 1, "nv-hostengine", "nv-hostengine -n", "nvidia-dcgm.service", ("/dev/nvidia0",)),
        Process(4711, 1, "python3", "python3 train.py", "", ("/dev/nvidia0", "/dev/nvidiactl")),
    ),
    package_locks=("/var/lib/dpkg/lock-frontend",),
    inhibitors=None,
    system_state="running",
)


# A reservation, a node that is being repaired, a node in service, and no job on this node.
SLURM = {
    queries.reservations(): b"ReservationName=maint StartTime=2025-11-22T06:00:00 State=INACTIVE\n",
    queries.node("gpu-042"): columns(
        ("gpu", "1", "idle+drain", "1763800000", "root(0)", "healthd: gpu_xid/79", "(null)"), queries.NODE_COLUMNS
    ),
    queries.claims(): columns(
        ("gpu-017", "idle+drain", "1763790000", "healthd: gpu_xid/119 (repair: gpu_reset)"), queries.CLAIM_COLUMNS
    ),
    queries.fleet(): columns(("gpu", "mixed", "0", "none", "3"), queries.FLEET_COLUMNS),
    queries.config(): b"RebootProgram = /sbin/reboot\nReturnToService = 2\nSLURM_VERSION = 22.05.8\n",
}


def answer_of_slurm(command: Command) -> CommandResult:
    return CommandResult(0, SLURM.get(command.argv, b""))


def run(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command line of a transcript in this process. Return its output, and the exit status unless it is 0."""
    program, *arguments = shlex.split(command)
    assert program == "healthd"
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    captured = capsys.readouterr()
    return captured.out + captured.err + (f"exit status {status}\n" if status else "")


def without_times(text: str) -> list[str]:
    """Return the words of `text`, with times replaced. Line breaks depend on the width of a time."""
    return TIMES.sub("TIME", DATE.sub("DATE", text)).split()


def at_now(value: Any, now: float) -> Any:
    """Return a document in which each "now-60" is a time in seconds since the epoch."""
    if isinstance(value, dict):
        return {key: at_now(item, now) for key, item in value.items()}
    if isinstance(value, list):
        return [at_now(item, now) for item in value]
    if isinstance(value, str) and re.fullmatch(r"now[+-]\d+", value):
        return now + float(value[3:])
    return value


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the files of the transcripts: an empty machine, settings, logs, and daemons' statuses.

    Each table of status.json is the status of a daemon whose runtime directory has the name of the table.
    """
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    plain_machine(tmp_path / "tree")
    hardware = {"/proc/meminfo": "MemTotal: 2147483648 kB\n", "/sys/devices/system/cpu/online": "0-255\n"}
    write(tmp_path / "tree", hardware)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "gpu-042", "6.1", "#1", "x86_64")))
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-042")
    monkeypatch.setattr(daemons, "describe_daemons", lambda: "")  # the daemons of other tests
    monkeypatch.setattr(dry_run, "read_node", lambda root: NODE)  # this machine's processes
    monkeypatch.setattr(blocking, "run", answer_of_slurm)
    prepare_reboot = partial(reboot_step.prepare_reboot, run=answer_of_slurm)
    monkeypatch.setattr(dry_run, "BOOTS", {RepairStep.REBOOT: prepare_reboot})
    time.tzset()
    documents = at_now(json.loads((FILES / "status.json").read_text()), time.time())
    with ExitStack() as stack:
        for name, changes in documents.items():
            if name != "base":
                Path(name).mkdir()
                stack.enter_context(StatusDaemon(Path(name), **{**documents["base"], **changes}))
        yield tmp_path
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_output_matches_transcript(name, world, capsys, monkeypatch):
    if os.path.exists("/etc/healthd"):
        pytest.skip("this machine has settings of its own")
    if name == "help":
        monkeypatch.setenv("COLUMNS", "80")
    file = FOLDER / f"{name}.txt"
    text = file.read_text("utf-8")
    commands = COMMAND.findall(text)
    assert commands
    printed = [run(command, capsys).replace(str(world), "/root") for command in commands]
    if os.environ.get("HEALTHD_WRITE_OUTPUT"):
        head = text[: text.index("$ ")]
        parts = [f"$ {command}\n{output}" for command, output in zip(commands, printed, strict=True)]
        file.write_text(head + "\n".join(parts), "utf-8")
    expected = COMMAND.split(text)[2::2]
    shown = dict(zip(commands, map(without_times, printed), strict=True))
    assert shown == dict(zip(commands, map(without_times, expected), strict=True))


def test_help_transcript_has_every_command():
    commands = set(COMMAND.findall((FOLDER / "help.txt").read_text("utf-8")))
    assert {f"healthd {name} --help" for name in FAMILIES} <= commands
