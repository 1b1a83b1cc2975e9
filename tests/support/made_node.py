"""A simulated node (clocks, GPUs, kernel log, Slurm) with the real daemon, whose worker runs in this process.

Time passes only where the daemon waits and costs nothing: hours of a node take a second and are reproducible.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import fake_pci_gpus
from slurm_text import columns, listpids, sinfo
from trees import FakeSystem, add_gpus, replace, write

from healthd.agent import daemon as daemons
from healthd.agent.daemon import Daemon
from healthd.agent.scheduler import replies
from healthd.agent.settings import registry
from healthd.agent.settings.config import Loaded
from healthd.agent.settings.effective import resolve_settings
from healthd.agent.settings.registry import Check
from healthd.agent.slurm import driver, event_jobs
from healthd.agent.worker.client import Reply, Request
from healthd.agent.worker.process import Setup, Worker
from healthd.common.slurm.commands import FLEET_COLUMNS, CommandResult
from healthd.host import wakeup
from healthd.host.host import Host
from healthd.nvidia import fake_scenario
from healthd.nvidia.fake_nvml import open_fake

NOW = 1_800_000_000.0
BOOT = "6e3c1f60-8d0e-4b60-9d2b-5f1f0c3c2a11"
COMMAND_SECONDS = 0.05  # duration of a request to the worker and of a Slurm command
MAX_TURNS = 400  # turns of the loop without passing time; a daemon with more never sleeps
BUFFER_BYTES = 4 << 20


class Killed(BaseException):
    """Raised in place of kill -9: the daemon executes nothing after it."""


class Clock:
    """A wall clock (`now`) that can be set, and a monotonic clock that cannot."""

    def __init__(self) -> None:
        self.seconds, self.offset = 1000.0, NOW - 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> float:
        return self.seconds + self.offset

    def advance(self, seconds: float) -> None:
        self.seconds += max(seconds, 0.0)


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A Slurm that executes commands at once, with this node and 999 others, and without jobs."""

    reason: str = "none"
    since: float = 0.0

    def after(self, argv: tuple[str, ...], now: float) -> Slurm:
        arguments = dict(word.split("=", 1) for word in argv if "=" in word)
        if "State" not in arguments:
            return self
        return Slurm(arguments["Reason"], now) if arguments["State"] == "DRAIN" else Slurm()

    def answer(self, argv: tuple[str, ...]) -> CommandResult:
        if "listpids" in argv:
            return listpids()
        if argv[0] == "sinfo" and "-n" in argv:
            return sinfo("idle" if self.reason == "none" else "idle+drain", self.reason, self.since)
        if argv[0] == "sinfo":
            return CommandResult(0, columns(("gpu", "idle", "Unknown", "none", "999"), FLEET_COLUMNS))
        if argv[-1] == "partition":
            return CommandResult(0, b"PartitionName=gpu Nodes=n[1-999] TotalNodes=999 SelectTypeParameters=NONE\n")
        return CommandResult(0)


class EndedProcess:
    """The process of a worker that does not exist: it has always ended."""

    pid = 1 << 30  # no such process
    returncode: int | None = 0

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        pass


class KillableDaemon(Daemon):
    """A daemon that is killed after `fuse` effects (a save, a request to the worker)."""

    killed = False
    fuse = float("inf")

    def announce_stop(self) -> None:
        if self.killed:
            self.control.close(False)
        else:
            super().announce_stop()

    def count_effect(self) -> None:
        self.fuse -= 1
        if self.fuse < 0:
            raise Killed


class Node:
    """A simulated node.

    gpus      fake NVML settings of GPUs with faults, by index
    machine   fake NVML settings of the whole machine
    checks    tables of the checks that run
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, checks: Mapping[str, dict[str, Any]]) -> None:
        self.folder, self.root, self.log = folder, folder / "root", folder / "kern.log"
        self.clock, self.slurm, self.mode = Clock(), Slurm(), "drain"
        self.addresses = fake_pci_gpus("dgx-h100")[:2]
        self.gpus: dict[int, dict[str, Any]] = {}
        self.machine: dict[str, Any] = {}
        self.checks = dict(checks)
        self.scenario = folder / "gpus.toml"
        self.wait_limit = float("inf")  # time at which a wait of the daemon ends
        self._ends: list[socket.socket] = []
        self._built_in = registry.built_in_checks()
        add_gpus(self.root, self.addresses)
        write(self.root, {"/proc/sys/kernel/random/boot_id": f"{BOOT}\n", "/sys/module/nvidia/initstate": "live\n"})
        self.log.touch()
        self.write_scenario()
        for module in (daemons, replies):
            monkeypatch.setattr(module, "poll", self._poll)
        monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # no power failure here
        for module in (driver, event_jobs):
            monkeypatch.setattr(module, "Child", self._command)
        self.daemon = self.start_daemon()

    def close(self) -> None:
        self.daemon.shut_down()
        for end in self._ends:
            end.close()

    # --- events

    def write_scenario(self) -> None:
        """Write the settings of the fake NVML; NVML uses them after it is opened again."""
        tables = {"": {"profile": "dgx-h100", "pci": self.addresses, "start": NOW, **self.machine}}
        tables |= {f"[gpu.{index}]": table for index, table in sorted(self.gpus.items())}
        lines = [line for head, table in tables.items() for line in (head, *map(_toml, table.items()))]
        text = "\n".join(lines)
        fake_scenario.parse(text)  # a mistyped setting fails here
        replace(self.folder / ".new", self.scenario, text.encode())

    def log_line(self, text: str) -> None:
        """Write a line to the kernel log."""
        timestamp = datetime.fromtimestamp(self.clock.now(), timezone.utc).isoformat(timespec="microseconds")
        with self.log.open("a") as file:
            file.write(f"{timestamp} n1 kernel: {text}\n")

    def send_sighup(self) -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)

    # --- life of the daemon

    def start_daemon(self, folder: str = "") -> KillableDaemon:
        """Start a daemon with its files in this folder below the node's."""
        daemon = KillableDaemon(
            lambda _running: self._settings(self.folder / folder), "", self.clock.now, self.clock.monotonic
        )
        runner, save = daemon.client, daemon.store.save
        runner._start_process = self._begin_worker
        send, step = runner.send, runner.step

        def counted_send(request: Request) -> Reply | None:
            daemon.count_effect()
            reply = send(request)
            self._answer()
            return reply

        def answered_step() -> Reply | None:
            reply = step()  # the step may send another request
            self._answer()
            return reply

        def counted_save(round_ended: bool = False) -> None:
            daemon.count_effect()
            save(round_ended)
            daemon.count_effect()

        runner.send, runner.step = counted_send, answered_step  # type: ignore[method-assign]
        daemon.store.save = counted_save  # type: ignore[method-assign]
        daemon.start()
        return daemon

    def turn(self, max_seconds: float) -> None:
        """Run one turn of the loop with a wait of at most `max_seconds`. Replace the daemon if it is killed
        meanwhile."""
        self.wait_limit = self.clock.seconds + max_seconds
        try:
            self.daemon.turn()
        except Killed:
            self.kill()
        self.wait_limit = float("inf")

    def run_for(self, seconds: float) -> None:
        end, turns = self.clock.seconds + seconds, 0
        while self.clock.seconds < end:
            before = self.clock.seconds
            self.turn(end - before)
            turns = turns + 1 if self.clock.seconds == before else 0
            assert turns < MAX_TURNS, "it never sleeps"

    def kill(self) -> None:
        """Kill the daemon and start another one."""
        self.daemon.killed, self.daemon.fuse = True, float("inf")
        self.daemon.opened.close()
        self.daemon = self.start_daemon()

    # --- internals

    def _settings(self, folder: Path) -> tuple[Loaded, dict[str, Check]]:
        checks = self._built_in
        off = {name: {"enabled": False} for name in checks if name not in self.checks and not checks[name].per}
        table = {
            **{name: str(folder / name) for name in ("runtime_dir", "state_dir", "checks_dir")},
            "root": str(self.root),
            "node_name": "n1",
            "cluster": "c",
            "mode": self.mode,
            "interval_seconds": 60.0,
            "profile": "none",
            "baseline_file": "",
            "nvml": {"fake": str(self.scenario)},
            "metrics": {"listen": "off"},
            "evidence": {"enabled": False},  # its collector would run on this machine's clock
            "kernel_log": {"source": str(self.log), "trust_file": True},
            "checks": {**off, **self.checks},
        }
        return resolve_settings(table, "test", {}, checks), checks

    def _poll(self, descriptors: Iterable[tuple[int, bool]], seconds: float) -> set[int]:
        """The wait of the daemon: time passes only if no descriptor is ready."""
        ready = wakeup.poll(descriptors, 0.0)
        if not ready:
            self.clock.advance(min(seconds, self.wait_limit - self.clock.seconds))
        return ready

    def _begin_worker(self, setup: Setup, stream: socket.socket) -> EndedProcess:
        for end in self._ends:
            end.close()
        self._ends = [stream.dup()]
        self._ends[0].setblocking(False)
        self._ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        host = Host(
            setup.root, lambda: open_fake(setup.fake_nvml, self.clock.now), self.clock.now, FakeSystem(setup.root)
        )
        self._worker = Worker(setup, host, checks=self._built_in)
        return EndedProcess()

    def _answer(self) -> None:
        """Let the worker answer all requests; each takes COMMAND_SECONDS."""
        try:
            requests = self._ends[0].recv(BUFFER_BYTES) if self._ends else b""
        except (BlockingIOError, ConnectionResetError):  # no request, or its sender has ended
            return
        for line in requests.splitlines():
            self.clock.advance(COMMAND_SECONDS)
            self._ends[0].send(self._worker.respond(line))

    def _command(self, argv: tuple[str, ...], *_: object) -> CompletedCommand:
        self.slurm = self.slurm.after(argv, self.clock.now())
        return CompletedCommand(self.slurm.answer(argv), self.clock.monotonic)


class CompletedCommand:
    """A Slurm command (host/child_process.py) that ends after COMMAND_SECONDS."""

    def __init__(self, answer: CommandResult, monotonic: Callable[[], float]) -> None:
        self._answer, self._monotonic = answer, monotonic
        self.started = monotonic()
        self.deadline = self.started + COMMAND_SECONDS
        self.status = answer.status

    def waits(self) -> Iterator[tuple[int, bool]]:
        return iter(())

    def step(self) -> bool:
        return self._monotonic() >= self.deadline

    def output(self) -> tuple[str, str]:
        return self._answer.stdout, self._answer.stderr


def _toml(setting: tuple[str, Any]) -> str:
    name, value = setting
    return f"{name} = {json.dumps(value)}"
