"""Tests with kill -9 at random moments and a real slurmctld: nothing is lost, and no action is repeated.

HEALTHD_KILLS_SEED: the seed that a failed run printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from healthd_daemon import Healthd, xid_line
from slurm_cluster import SlurmCluster

KILLS = (
    pytest.param(100, marks=pytest.mark.timeout(3600)),
    pytest.param(1000, marks=(pytest.mark.timeout(7200), pytest.mark.long)),
)
SEED = int(os.environ.get("HEALTHD_KILLS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
NODES = 4
KILLS_PER_FAULT = 12
SECONDS_BETWEEN_KILLS = (0.3, 0.8)  # a daemon is up after 0.15 s: these kills hit the start or the actions afterwards
# Each node breaks repeatedly, and no operator resumes it. A killed daemon's requeue may run for up to 15 s.
CONFIG = '[slurm]\nrequeue_retry_seconds = 15\nrequeue = "node"\nown_faults_per_hour = 0\n'
SLOW_SCONTROL = """\
#!/bin/sh
# Logs the requeues and is slow, so that a killed daemon's command still runs at the next start.
if [ "$1" = requeue ]; then
    echo "$3" >>{log}
    sleep "0.$(($$ % 2 * 7))"
fi
exec {scontrol} "$@"
"""
DRAIN, REQUEUE, RESUME = "State=DRAIN", "running: scontrol requeue", "State=UNDRAIN"


@dataclass
class Statistics:
    """Counts of one node's part of the test."""

    daemon_kills: int = 0
    worker_kills: int = 0
    events: int = 0
    faults: int = 0
    between: int = 0  # kills of the daemon after the drain was sent and before a requeue was
    completed: int = 0  # brief jobs that ended before they could be requeued
    requeued: set[str] = field(default_factory=set)


class KilledNode:
    """A node whose daemon is killed repeatedly, and the actions on it."""

    def __init__(self, cluster: SlurmCluster, node: str, directory: Path, env: dict[str, str], kills: int) -> None:
        self.cluster = cluster
        self.node = node
        self.kills = kills
        self.random = random.Random(f"{SEED} {node}")
        self.figures = Statistics()
        self.gates = directory
        self.daemon = Healthd(
            *("--mode", "act", "--node-name", node, "--interval", "1"),
            config=CONFIG,
            env=env,
            directory=directory,
            wait=False,
        )

    def run(self) -> Statistics:
        self.daemon.start()  # lines from before the first start are history, so it waits for that start
        self.daemon.wait_until(lambda s: s["round"].get("seconds", 0) > 0, "the first round is over")
        while self.figures.daemon_kills + self.figures.worker_kills < self.kills or not self.figures.between:
            self.run_fault()
        self.ensure_running()
        assert self.daemon.stop() == 0
        return self.figures

    def run_fault(self) -> None:
        cluster, figures = self.cluster, self.figures
        figures.faults += 1
        gate = self.gates / f"gate{figures.faults}"
        plain = [cluster.sbatch("sleep 600", "-w", self.node) for _ in range(2)]
        not_requeued = cluster.sbatch("sleep 600", "--no-requeue", "-w", self.node)
        brief = cluster.sbatch(f"while ! [ -e {gate} ]; do sleep 0.1; done", "-w", self.node)
        for job in (*plain, not_requeued, brief):
            cluster.wait_job(job, "RUNNING")

        fault_at = self.random.randrange(KILLS_PER_FAULT // 2)
        gate_at = fault_at + self.random.randrange(3)
        mark = len(self.log())
        for number in range(KILLS_PER_FAULT):
            if number == gate_at:
                gate.touch()
            lines = [self.warning_line() for _ in range(self.random.randrange(3))]
            if number == fault_at:
                lines += [self.fault_line()]
            is_aimed = number == fault_at and (figures.faults == 1 or self.random.random() < 0.5)
            self.kill_once(lines, is_aimed, mark)
        self.recover([*plain], not_requeued, brief, mark)

    def kill_once(self, lines: list[str], aim: bool, mark: int) -> None:
        """Start the daemon if it does not run, log `lines` at some moment, kill it or its worker at another.

        `aim`: kill after the drain instead of at a random moment after the start.
        """
        early = self.random.random() < 0.3
        if early:
            self.daemon.kernel_line(*lines)
        self.ensure_running()
        end = time.monotonic() + self.random.uniform(0, self.random.choice(SECONDS_BETWEEN_KILLS))
        if not early and lines:
            time.sleep(self.random.uniform(0, max(0.0, end - time.monotonic())))
            self.daemon.kernel_line(*lines)
        if aim:
            with suppress(TimeoutError):
                self.wait_for_log(DRAIN, mark, 60.0)
            end = time.monotonic() + self.random.uniform(0, self.random.choice((0.06, 0.6)))
        time.sleep(max(0.0, end - time.monotonic()))
        if not aim and self.random.random() < 0.25 and (worker := self.worker_pid()):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                self.figures.worker_kills += 1
            return
        self.daemon.kill()
        self.figures.daemon_kills += 1
        new_log = self.log()[mark:]
        self.figures.between += DRAIN in new_log and REQUEUE not in new_log

    def recover(self, plain: list[str], not_requeued: str, brief: str, mark: int) -> None:
        """Check that the running daemon brings the node and its jobs to the right state; then repair the fault."""
        cluster = self.cluster
        self.ensure_running()
        node = cluster.wait_state(self.node, "DRAIN", reason="healthd: gpu_xid/79 ")
        assert node.reason.startswith(f"healthd: gpu_xid/79 {self.pci()}.0: "), node
        for job in plain:
            assert cluster.wait_job(job, "PENDING")["Restarts"] == "1"
            self.figures.requeued.add(job)
        ended = cluster.wait_job(brief, "PENDING", "COMPLETED")
        if ended["JobState"] == "COMPLETED":
            assert ended["Restarts"] == "0"
            self.figures.completed += 1
        else:
            assert ended["Restarts"] == "1"
        self.daemon.wait_until(lambda s: self.counted_events() == self.figures.events, f"{self.figures.events} events")
        assert cluster.job(not_requeued)["JobState"] == "RUNNING"
        assert cluster.job(not_requeued)["Restarts"] == "0"
        assert RESUME not in self.log()[mark:]
        cluster.run("scancel", *plain, not_requeued, brief, check=False)
        assert "done" in self.daemon.request(command="repaired", code="gpu_xid/79")
        cluster.wait_state(self.node, "IDLE", without=("DRAIN", "COMPLETING"))

    # kernel lines

    def warning_line(self) -> str:
        """Return a line that is always an event of its own: each has another link."""
        self.figures.events += 1
        number = self.figures.events
        text = f"SXid (PCI:0000:{number // 1000:02x}:00.0): 22013, Non-fatal, Link {number % 1000:02d} Minion Link"
        return f"[{uptime():12.6f}] nvidia-nvswitch0: {text} DLREQ interrupt"

    def fault_line(self) -> str:
        self.figures.events += 1
        return xid_line(79, pci=self.pci(), when=uptime())

    def pci(self) -> str:
        return f"0000:{self.figures.faults:02x}:00"

    # state

    def ensure_running(self) -> None:
        process = self.daemon.process
        if process is None or process.poll() is not None:
            self.daemon.start()

    def worker_pid(self) -> int | None:
        """Return the pid of the worker, which the daemon starts first; None while it is being replaced."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            with suppress(StopIteration, OSError):
                return self.daemon.worker_pid()
            time.sleep(0.002)
        return None

    def log(self) -> str:
        return self.daemon.log.read_text(errors="replace") if self.daemon.log.exists() else ""

    def wait_for_log(self, words: str, mark: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while words not in self.log()[mark:]:
            if time.monotonic() > end:
                raise TimeoutError(f'"{words}" was not logged within {seconds} s')
            time.sleep(0.003)

    def ledger(self) -> dict[str, list[dict[str, object]]]:
        document: dict[str, list[dict[str, object]]] = json.loads((self.daemon.run_dir / "ledger.json").read_text())
        return document

    def counted_events(self) -> int:
        """Return the number of kernel events in all conditions. (A worker that a kill left inside NVML may add a
        hang.)"""
        ledger = self.ledger()
        all_conditions = (*ledger["conditions"], *ledger.get("cleared", []))
        return sum(int(str(entry["count"])) for entry in all_conditions if entry["check"] in ("gpu_xid", "sxid"))


def uptime() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@pytest.fixture
def killed_nodes(kills: int, tmp_path: Path) -> Iterator[list[KilledNode]]:
    with SlurmCluster(nodes=NODES) as cluster:
        slow = tmp_path / "bin" / "scontrol"
        slow.parent.mkdir()
        slow.write_text(SLOW_SCONTROL.format(log=tmp_path / "requeues", scontrol=shutil.which("scontrol")))
        slow.chmod(0o755)
        env = {**cluster.env, "PATH": f"{slow.parent}:{os.environ['PATH']}"}
        share = -(-kills // NODES)
        new_nodes = []
        for name in cluster.names:
            directory = tmp_path / name
            directory.mkdir()
            new_nodes.append(KilledNode(cluster, name, directory, env, share))
        yield new_nodes
        for patient in new_nodes:
            process = patient.daemon.process
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("kills", KILLS)
def test_each_event_counts_once_and_each_job_is_requeued_once_across_kills(
    killed_nodes: list[KilledNode], kills: int, tmp_path: Path
) -> None:
    print(f"HEALTHD_KILLS_SEED={SEED}")
    start = time.monotonic()
    with ThreadPoolExecutor(NODES) as pool:
        figures = list(pool.map(KilledNode.run, killed_nodes))
    seconds = time.monotonic() - start

    for patient in killed_nodes:
        ledger = patient.ledger()
        assert patient.counted_events() == patient.figures.events
        assert [event.get("lines", 1) for event in ledger["events"]] == [1] * min(patient.figures.events, 500)
        assert "operator resumed" not in patient.log()
        assert "Traceback" not in patient.log()
        assert list(patient.gates.glob("*/*.new")) == [], "a partly written file remains"

    cluster = killed_nodes[0].cluster
    requeues: Counter[str] = Counter()
    completed = set()
    for line in cluster.log("slurmctld").splitlines():
        if found := re.search(r"Requeuing JobId=(\d+)", line):
            requeues[found[1]] += 1
            assert found[1] not in completed, "a completed job was started again"
        if found := re.search(r"_job_complete: JobId=(\d+) done", line):
            completed.add(found[1])
    expected = set().union(*(statistics.requeued for statistics in figures))
    assert {job: number for job, number in requeues.items() if number != 1} == {}
    assert expected <= set(requeues)
    sent = Counter((tmp_path / "requeues").read_text().split())
    assert {job: number for job, number in sent.items() if number != 1} == {}, (
        "the command was sent twice for one run of a job"
    )

    total_kills = sum(statistics.daemon_kills + statistics.worker_kills for statistics in figures)
    between = sum(statistics.between for statistics in figures)
    print(
        f"{total_kills} kills ({sum(statistics.worker_kills for statistics in figures)} of the worker, "
        f"{between} between drain and requeue), "
        f"{sum(statistics.events for statistics in figures)} events, "
        f"{sum(statistics.faults for statistics in figures)} drains, "
        f"{sum(requeues.values())} requeues, "
        f"{sum(statistics.completed for statistics in figures)} jobs that completed in the gap: "
        f"{seconds:.0f} s"
    )
    assert total_kills >= kills
    assert between > 0
