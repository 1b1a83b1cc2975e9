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
from healthd_daemon import Healthd, xid
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
class Figures:
    """Counts of one node's part of the test."""

    daemon_kills: int = 0
    worker_kills: int = 0
    events: int = 0
    faults: int = 0
    between: int = 0  # kills of the daemon after the drain was sent and before a requeue was
    completed: int = 0  # brief jobs that ended before they could be requeued
    requeued: set[str] = field(default_factory=set)


class Patient:
    """A node whose daemon is killed repeatedly, and the actions on it."""

    def __init__(self, cluster: SlurmCluster, node: str, directory: Path, env: dict[str, str], kills: int) -> None:
        self.cluster = cluster
        self.node = node
        self.kills = kills
        self.random = random.Random(f"{SEED} {node}")
        self.figures = Figures()
        self.gates = directory
        self.daemon = Healthd(
            *("--mode", "act", "--node-name", node, "--interval", "1"),
            config=CONFIG,
            env=env,
            directory=directory,
            wait=False,
        )

    def live(self) -> Figures:
        self.daemon.start()  # lines from before the first start are history, so it waits for that start
        self.daemon.until(lambda s: s["round"].get("seconds", 0) > 0, "the first round is over")
        while self.figures.daemon_kills + self.figures.worker_kills < self.kills or not self.figures.between:
            self.suffer_a_fault()
        self.ensure_running()
        assert self.daemon.stop() == 0
        return self.figures

    def suffer_a_fault(self) -> None:
        cluster, figures = self.cluster, self.figures
        figures.faults += 1
        gate = self.gates / f"gate{figures.faults}"
        plain = [cluster.sbatch("sleep 600", "-w", self.node) for _ in range(2)]
        kept = cluster.sbatch("sleep 600", "--no-requeue", "-w", self.node)
        brief = cluster.sbatch(f"while ! [ -e {gate} ]; do sleep 0.1; done", "-w", self.node)
        for job in (*plain, kept, brief):
            cluster.wait_job(job, "RUNNING")

        fault_at = self.random.randrange(KILLS_PER_FAULT // 2)
        gate_at = fault_at + self.random.randrange(3)
        mark = len(self.log())
        for number in range(KILLS_PER_FAULT):
            if number == gate_at:
                gate.touch()
            lines = [self.warning() for _ in range(self.random.randrange(3))]
            if number == fault_at:
                lines += [self.fault()]
            aim = number == fault_at and (figures.faults == 1 or self.random.random() < 0.5)
            self.one_kill(lines, aim, mark)
        self.recover([*plain], kept, brief, mark)

    def one_kill(self, lines: list[str], aim: bool, mark: int) -> None:
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
        if not aim and self.random.random() < 0.25 and (worker := self.worker()):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
                self.figures.worker_kills += 1
            return
        self.daemon.kill()
        self.figures.daemon_kills += 1
        said = self.log()[mark:]
        self.figures.between += DRAIN in said and REQUEUE not in said

    def recover(self, plain: list[str], kept: str, brief: str, mark: int) -> None:
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
        self.daemon.until(lambda s: self.counted() == self.figures.events, f"{self.figures.events} events")
        assert cluster.job(kept)["JobState"] == "RUNNING"
        assert cluster.job(kept)["Restarts"] == "0"
        assert RESUME not in self.log()[mark:]
        cluster.run("scancel", *plain, kept, brief, check=False)
        assert "done" in self.daemon.ask(command="repaired", code="gpu_xid/79")
        cluster.wait_state(self.node, "IDLE", without=("DRAIN", "COMPLETING"))

    # kernel lines

    def warning(self) -> str:
        """Return a line that is always an event of its own: each has another link."""
        self.figures.events += 1
        number = self.figures.events
        text = f"SXid (PCI:0000:{number // 1000:02x}:00.0): 22013, Non-fatal, Link {number % 1000:02d} Minion Link"
        return f"[{uptime():12.6f}] nvidia-nvswitch0: {text} DLREQ interrupt"

    def fault(self) -> str:
        self.figures.events += 1
        return xid(79, pci=self.pci(), when=uptime())

    def pci(self) -> str:
        return f"0000:{self.figures.faults:02x}:00"

    # state

    def ensure_running(self) -> None:
        process = self.daemon.process
        if process is None or process.poll() is not None:
            self.daemon.start()

    def worker(self) -> int | None:
        """Return the pid of the worker, which the daemon starts first; None while it is being replaced."""
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            with suppress(StopIteration, OSError):
                return self.daemon.worker()
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
        found: dict[str, list[dict[str, object]]] = json.loads((self.daemon.run_dir / "ledger.json").read_text())
        return found

    def counted(self) -> int:
        """Return the number of kernel events in all conditions. (A worker that a kill left inside NVML may add a
        hang.)"""
        ledger = self.ledger()
        known = (*ledger["conditions"], *ledger.get("cleared", []))
        return sum(int(str(c["count"])) for c in known if c["check"] in ("gpu_xid", "sxid"))


def uptime() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


@pytest.fixture
def patients(kills: int, tmp_path: Path) -> Iterator[list[Patient]]:
    with SlurmCluster(nodes=NODES) as cluster:
        slow = tmp_path / "bin" / "scontrol"
        slow.parent.mkdir()
        slow.write_text(SLOW_SCONTROL.format(log=tmp_path / "requeues", scontrol=shutil.which("scontrol")))
        slow.chmod(0o755)
        env = {**cluster.env, "PATH": f"{slow.parent}:{os.environ['PATH']}"}
        share = -(-kills // NODES)
        made = []
        for name in cluster.names:
            directory = tmp_path / name
            directory.mkdir()
            made.append(Patient(cluster, name, directory, env, share))
        yield made
        for patient in made:
            process = patient.daemon.process
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.parametrize("kills", KILLS)
def test_whenever_it_is_killed_each_event_counts_once_and_each_job_is_requeued_once(
    patients: list[Patient], kills: int, tmp_path: Path
) -> None:
    print(f"HEALTHD_KILLS_SEED={SEED}")
    began = time.monotonic()
    with ThreadPoolExecutor(NODES) as pool:
        figures = list(pool.map(Patient.live, patients))
    seconds = time.monotonic() - began

    for patient in patients:
        ledger = patient.ledger()
        assert patient.counted() == patient.figures.events
        assert [event.get("lines", 1) for event in ledger["events"]] == [1] * min(patient.figures.events, 500)
        assert "operator resumed" not in patient.log()
        assert "Traceback" not in patient.log()
        assert list(patient.gates.glob("*/*.new")) == [], "a partly written file remains"

    cluster = patients[0].cluster
    requeues: Counter[str] = Counter()
    completed = set()
    for line in cluster.log("slurmctld").splitlines():
        if found := re.search(r"Requeuing JobId=(\d+)", line):
            requeues[found[1]] += 1
            assert found[1] not in completed, "a completed job was started again"
        if found := re.search(r"_job_complete: JobId=(\d+) done", line):
            completed.add(found[1])
    wanted = set().union(*(f.requeued for f in figures))
    assert {job: n for job, n in requeues.items() if n != 1} == {}
    assert wanted <= set(requeues)
    sent = Counter((tmp_path / "requeues").read_text().split())
    assert {job: n for job, n in sent.items() if n != 1} == {}, "the command was sent twice for one run of a job"

    done = sum(f.daemon_kills + f.worker_kills for f in figures)
    between = sum(f.between for f in figures)
    print(
        f"{done} kills ({sum(f.worker_kills for f in figures)} of the worker, "
        f"{between} between drain and requeue), "
        f"{sum(f.events for f in figures)} events, "
        f"{sum(f.faults for f in figures)} drains, "
        f"{sum(requeues.values())} requeues, "
        f"{sum(f.completed for f in figures)} jobs that completed in the gap: "
        f"{seconds:.0f} s"
    )
    assert done >= kills
    assert between > 0
