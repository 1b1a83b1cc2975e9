"""A node of the soak: its daemon, its fake hardware, its jobs, and the events that it must report."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthd_daemon import Healthd, condition, wait_for_rounds, xid_line
from machine import GPUS, Machine
from slurm_cluster import SlurmCluster
from waiting import until

from healthd.agent.conditions.bounds import MAX_CONDITIONS
from healthd.agent.conditions.ledger import MAX_EVENTS
from healthd.events.reader import Cursor, Tally, find, read
from soak import growth
from soak.model import Command, Expected, find_problems

PATIENCE_SECONDS = 240.0  # time limit for actions that take seconds on an idle machine
FAULTS_TO_FILL = MAX_EVENTS + 100
FAULTS_AT_ONCE = MAX_CONDITIONS - 4
CONFIG = """\
interval_seconds = 1.0
profile = "none"
baseline_file = ""
[slurm]
requeue = "node"
own_faults_per_hour = 0  # each node breaks repeatedly, and no operator resumes it
[fleet]
limit_percent = 100
own_hardware_limit_percent = 100
jitter_seconds = 0
[checks.gpu_access]
confirm_seconds = 1.0
[checks.gpu_count]
expected = 8
confirm_seconds = 1.0
[checks.disk_space]  # of the machine that runs the soak
enabled = false
[checks.gpu_persistence]
timeout_seconds = 3.0
[checks.failslow]
client = true
"""
SITE = '[checks.exec.site]\ncommand = ["/bin/true"]\n'
# A wrapper around scontrol. It records each command that changes Slurm as one line of JSON, and runs it unchanged.
SCONTROL = """\
#!{python}
import json, os, sys
if sys.argv[1] in ("update", "requeue"):
    with open({log!r}, "a") as log:
        log.write(json.dumps(sys.argv[1:]) + "\\n")
os.execv({scontrol!r}, ["scontrol", *sys.argv[1:]])
"""


class Node:
    """A node. `is_killed`: True if its daemon may be killed.

    `expected`: the required contents of its stream at rest.
    """

    def __init__(self, cluster: SlurmCluster, name: str, folder: Path, is_killed: bool) -> None:
        self.cluster, self.name, self.folder, self.is_killed = cluster, name, folder, is_killed
        self.expected = Expected()
        self.parts = self.reloads = 0
        self.has_site = False
        self.machine = Machine(folder)
        self.machine.now()
        run_dir = self.machine.root / str(folder / "run").lstrip("/")  # a check reads it below the tree
        run_dir.parent.mkdir(parents=True)
        run_dir.symlink_to(folder / "run")
        for number, pci in enumerate(GPUS):
            about = f"Model: \t\t NVIDIA H100\nDevice Minor: \t {number}\n"
            self.machine.write({f"/proc/driver/nvidia/gpus/{pci}/information": about})
        self.daemon = Healthd(
            *("--mode", "act", "--node-name", name, "--root", str(self.machine.root), "--listen", "127.0.0.1:0"),
            config=CONFIG,
            env={**cluster.env, "PATH": f"{self._noting_scontrol()}:{cluster.env['PATH']}"},
            directory=folder,
            fake_nvml=str(self.machine.scenario),
        )
        self.cursor, self.tally = Cursor(), Tally()
        self.events: list[dict[str, Any]] = []

    def _noting_scontrol(self) -> Path:
        programs = self.folder / "bin"
        programs.mkdir()
        found = shutil.which("scontrol", path=self.cluster.env["PATH"])
        text = SCONTROL.format(python=shutil.which("python3"), log=str(self.folder / "commands"), scontrol=found)
        (programs / "scontrol").write_text(text)
        (programs / "scontrol").chmod(0o755)
        return programs

    # actions

    def xid(self, code: int) -> str:
        """Write a kernel line about a new part, which opens one condition. Returns the part."""
        self.parts += 1
        pci = f"{self.parts >> 8:04x}:{self.parts & 255:02x}:00"
        self.daemon.kernel_line(xid_line(code, pci, when=time.clock_gettime(time.CLOCK_MONOTONIC)))
        self.expected.opened[f"gpu_xid/{code}", f"{pci}.0"] += 1
        return f"{pci}.0"

    def repeat_fault(self, code: int, part: str, times: int) -> None:
        """Repeat the same fault many times at once. No further condition must open."""
        line = xid_line(code, part.rpartition(".")[0], when=time.clock_gettime(time.CLOCK_MONOTONIC))
        self.daemon.kernel_line(*[line] * times)

    def command(self, expected_event: str, **request: Any) -> None:
        """Send a command to the control socket. The command must succeed, and the stream must have one event for it."""
        answer = self.daemon.request(**request)
        assert "done" in answer, f"{request}: {answer}"
        self.expected.expect_report(expected_event)

    def configure(self, has_site: bool) -> None:
        """Write another healthd.toml and reload it."""
        before, self.has_site = self.has_site, has_site
        self.write_config(CONFIG + (SITE if has_site else ""))
        assert "done" in self.daemon.request(command="reload")
        if has_site is not before:
            self.expected.expect_report("check_enabled site" if has_site else "check_disabled site")

    def write_config(self, text: str) -> None:
        new = self.daemon.config.with_suffix(".new")
        new.write_text(f"{text}\n[checks.processes]\nenabled = false\n")
        new.replace(self.daemon.config)

    def kill(self) -> None:
        """Kill the daemon at any moment and start it again."""
        self.daemon.kill()
        self.expected.kills += 1
        self.daemon.start()

    def kill_worker(self) -> None:
        os.kill(self.daemon.worker_pid(), signal.SIGKILL)

    def fill(self) -> None:
        """Write enough faults to fill all buffers for faults, so that memory has no further reason to grow."""
        for _ in range(-(-FAULTS_TO_FILL // FAULTS_AT_ONCE)):
            parts = [self.xid(31) for _ in range(FAULTS_AT_ONCE)]
            self.until(lambda s, parts=parts: all(condition(s, "gpu_xid/31", part) for part in parts), "all are open")
            self.command("repaired", command="repaired", code="gpu_xid/31")
            self.until(lambda s: s["stream"]["waiting"] == 0, "the stream is written")

    # waiting

    def until(self, reached: Callable[[dict[str, Any]], object], description: str) -> dict[str, Any]:
        return self.daemon.wait_until(
            lambda status: bool(reached(status)), f"{self.name}: {description}", PATIENCE_SECONDS
        )

    def until_open(self, code: str, part: str) -> None:
        self.until(lambda s: (condition(s, code, part) or {}).get("state") == "open", f"{code} {part} is open")

    def until_cleared(self, code: str, part: str) -> None:
        self.until(lambda s: condition(s, code, part) is None, f"{code} {part} is gone")

    def until_drained(self) -> None:
        self.cluster.wait_state(self.name, "DRAIN", reason="healthd: ", timeout=PATIENCE_SECONDS)

    def until_resumed(self) -> None:
        self.cluster.wait_state(self.name, "IDLE", without=("DRAIN", "COMPLETING"), timeout=PATIENCE_SECONDS)

    def rounds(self, count: int) -> None:
        last = self.daemon.status()["round"]["number"] + count
        self.until(lambda s: s["round"]["number"] > last, f"round {last} is over")

    # rest

    def repair_all(self) -> None:
        """Repair everything and wait until no condition is open, nothing waits and the node is in service."""
        self.machine.gpus()
        self.configure(has_site=False)
        for path in self.machine.root.glob("proc/[0-9]*/cgroup"):
            shutil.rmtree(path.parent)
        if self.daemon.status()["pause"] is not None:
            self.command("pause ended", command="unpause")
        self.rounds(3)  # conditions that end by themselves have ended
        for found in self.daemon.status()["conditions"]:
            self.command("repaired", command="repaired", code=found["code"], part=found["subject"])
        self.until(lambda s: not s["conditions"], "no condition is open")
        self.until_resumed()
        self.until(lambda s: not s["slurm"]["problem"] and s["decision"]["action"] == "leave", "decision is leave")
        wait_for_rounds(self.daemon, 2)
        self.until(lambda s: s["stream"]["waiting"] == 0, "the stream is written")

    def find_problems(self) -> list[str]:
        """Return the problems of the node at rest."""
        self.events += [
            event.fields
            for s in find([str(self.folder / "state")], self.tally)
            for event in read(s, self.cursor, self.tally)
        ]
        self.daemon.wait_until(lambda s: not s["problems"], "no problem is left", PATIENCE_SECONDS)
        status = self.daemon.status()
        problems = find_problems(self.events, self.commands(), self.expected)
        problems += [f"gap in the stream: {hole}" for hole in self.cursor.sequences.gaps()]
        problems += [f"dropped: {status['dropped']}"] if status["dropped"] else []
        problems += [f"problems: {status['problems']}"] if status["problems"] else []
        log = self.daemon.log.read_text(errors="replace")
        problems += [log[log.index("Traceback") - 200 :][:3000]] if "Traceback" in log else []
        return problems

    def commands(self) -> list[Command]:
        path = self.folder / "commands"
        lines = path.read_text().splitlines() if path.exists() else []
        return [command for line in lines if (command := _command(json.loads(line)))]

    def measure(self) -> dict[str, float]:
        return growth.measure(self.daemon)


def _command(argv: list[str]) -> Command | None:
    if argv[0] == "requeue":
        return Command("requeue", argv[-1])
    arguments = " ".join(argv)
    if "State=UNDRAIN" in arguments or "State=RESUME" in arguments:
        return Command("resume", "")
    if found := re.search(r"State=DRAIN(?:.*) Reason=(.*)", arguments) or re.search(r"\bReason=(.*)", arguments):
        return Command("drain", found[1])
    return None


__all__ = ["Node", "until"]
