"""One fault on a node of a real Slurm with sacct, and the jobs of this trial. The trials run on several clusters."""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

from healthd_daemon import Healthd, xid_line
from repair_site import CONFIG, Site, SlurmCommand, slurm_commands
from slurm_cluster import SlurmCluster

from healthd.agent.repair.slurm_state import STOP_RESERVATION
from repairs.result import Result, Violation
from repairs.times import end, log_tail

NODE, SPARE = "n1", "n2"
PATIENCE_SECONDS = 240.0
NOT_ENDED = ("", "PENDING", "RUNNING", "COMPLETING")
UNSAVED_SECONDS = 7.0  # slurmctld saves its state every 5 s; kill -9 loses what is newer
TRIAL_CONFIG = f"{CONFIG}[slurm]\ncommand_timeout_seconds = 120.0\nown_faults_per_hour = 0\n"


class Cluster:
    """A Slurm cluster with sacct, for one trial after the other. A job runs on the spare node all the time."""

    def __init__(self, slurm: SlurmCluster) -> None:
        self.slurm = slurm
        self.bystander = slurm.sbatch("sleep 30000", "-w", SPARE, "-t", "1000")
        slurm.wait_job(self.bystander, "RUNNING")
        slurm.wait_until_saved(self.bystander)

    def records(self, job: Job) -> list[str]:
        """Return the states in sacct, one for each run of the job.

        A slurmctld that was killed may use the number of a lost job again.
        """
        columns = ("-X", "-n", "-P", "-D", "-j", job.id, "-o", "Submit,State")
        rows = self.slurm.run("sacct", *columns).splitlines()
        times = (datetime.fromisoformat(row.partition("|")[0]).timestamp() for row in rows)
        return [row.partition("|")[2] for at, row in zip(times, rows, strict=True) if at > job.submitted - 2.0]


@dataclass
class Job:
    """A job of a trial. `submitted`: epoch seconds."""

    id: str
    submitted: float


class Trial:
    """One fault on the node. `name` describes the trial, `counts` has what happened in it."""

    def __init__(self, cluster: Cluster, random: Random, config: str = TRIAL_CONFIG) -> None:
        self.cluster, self.slurm, self.random = cluster, cluster.slurm, random
        self.name = ""
        self.counts: Counter[str] = Counter()
        self.jobs: list[Job] = []
        self.killed_slurmctld_at = 0.0
        self.folder = Path(tempfile.mkdtemp(prefix="healthd-trial."))
        (self.folder / "jobs").mkdir()
        self.site = self.make_site(config)

    def make_site(self, config: str) -> Any:
        return Site(self.slurm, NODE, self.folder, config)

    def problems(self) -> list[str]:
        """Run the trial and return what is wrong."""
        found: list[str] = []
        with self.start():
            try:
                self.run()
                found += self.end_problems()
                self.site.daemon.stop()
            except Exception as error:  # the trial is over; the next one begins with the node in service
                self.counts["repairs without an end"] += 1
                found.append(f"{type(error).__name__}: {error}; {self.repair_status()}")
        return [*found, *self.job_problems()]

    def start(self) -> AbstractContextManager[object]:
        """Start the daemon, which the context ends."""
        daemon: Healthd = self.site.daemon
        return daemon

    def run(self) -> None:
        raise NotImplementedError

    def end_problems(self) -> Iterator[str]:
        raise NotImplementedError

    def fail(self) -> None:
        self.site.daemon.kernel_line(xid_line(119))

    def submit(self, seconds: int, *options: str) -> str:
        """Submit a job that records when it runs."""
        log = f"{self.folder}/jobs/$SLURM_JOB_ID"
        script = f"date +%s.%N >>{log}; sleep {seconds}; date +%s.%N >>{log}"
        submitted = time.time()
        job = self.slurm.sbatch(script, "-w", NODE, "-t", "10", *options)
        self.jobs.append(Job(job, submitted))
        return job

    def repair_status(self) -> dict[str, Any]:
        try:
            repair: dict[str, Any] = self.site.daemon.status()["repair"]
        except OSError:
            return {"attempt": "the daemon does not answer"}
        return repair

    def commands(self, caller: str) -> list[SlurmCommand]:
        return [command for command in slurm_commands(self.site.programs) if command.caller == caller]

    def last_reading(self, caller: str, before: float) -> float:
        """Return when the last reading of the node before this time began."""
        query = f"sinfo -h -a -n {NODE} "
        times = [c.began for c in self.commands(caller) if c.argv.startswith(query) and c.ended <= before]
        return max(times, default=0.0)

    def run_of(self, job: Job) -> tuple[float, float]:
        """Return when the job ran, by its own log (epoch seconds). A job that still runs ends at infinity."""
        path = self.folder / "jobs" / job.id
        times = [float(line) for line in path.read_text().split()] if path.exists() else []
        infinity = float("inf")
        return (times or [infinity])[0], times[1] if len(times) > 1 else infinity

    def job_problems(self) -> Iterator[str]:
        """Let all jobs end, and yield those that did not end well, by sacct."""
        self.counts["jobs"] += len(self.jobs)
        if not {"DRAIN", "DOWN"}.isdisjoint(self.slurm.node(NODE).flags):
            self.slurm.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        kill = self.killed_slurmctld_at
        for job in self.jobs:
            if 0 <= kill - job.submitted < UNSAVED_SECONDS and self.is_unknown(job):
                self.counts["jobs lost by slurmctld in its kill -9"] += 1
                continue
            deadline, states = time.monotonic() + PATIENCE_SECONDS, [""]
            while time.monotonic() < deadline and (
                not states or states[-1] in ("", "PENDING", "RUNNING", "COMPLETING")
            ):
                states = self.cluster.records(job)
                time.sleep(0.3)
            if states != ["COMPLETED"]:
                self.counts["jobs lost, requeued or failed"] += 1
                yield f"job {job.id}: {states}"
        bystander = self.slurm.job(self.cluster.bystander)
        if (bystander["JobState"], bystander["Restarts"]) != ("RUNNING", "0"):
            self.counts["jobs lost, requeued or failed"] += 1
            yield f"the job on the other node: {bystander}"

    def is_unknown(self, job: Job) -> bool:
        return self.slurm.attempt("scontrol", "show", "job", job.id).returncode != 0

    def close(self) -> None:
        """Return the node to service for the next trial."""
        end(self.site.daemon)
        self.slurm.attempt("scontrol", "delete", f"ReservationName={STOP_RESERVATION}")
        for job in self.jobs:
            self.slurm.attempt("scancel", job.id)
        self.slurm.attempt("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        if self.slurm.node(NODE).flags != {"IDLE"}:
            self.slurm.reset_node(NODE)
        shutil.rmtree(self.folder)


MakeTrial: TypeAlias = Callable[[Cluster, Random], Trial]


def run_trials(result: Result, kind: str, count: int, seed: int, at_once: int, make: MakeTrial, **options: Any) -> None:
    """Run the trials 1 to `count`, each with its own random numbers, and `at_once` of them at the same time.

    `options` are those of the Slurm clusters.
    """
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(1, count + 1):
        numbers.put(number)

    def work() -> None:
        try:
            run_on_cluster()
        except Exception as error:
            result.add(Violation(kind, 0, seed, "a Slurm cluster", f"{type(error).__name__}: {error}"))

    def run_on_cluster() -> None:
        with ExitStack() as stack:
            cluster_to_start = SlurmCluster(nodes=2, gpus=0, accounting=True, message_timeout=10, **options)
            with result.lock:  # several databases that are created at the same moment fail on a busy machine
                slurm = stack.enter_context(cluster_to_start)
            cluster = Cluster(slurm)
            while True:
                try:
                    number = numbers.get_nowait()
                except queue.Empty:
                    return
                trial = make(cluster, Random(f"{seed} {kind} {number}"))
                problems = trial.problems()
                with result.lock:
                    result.counts["trials"] += 1
                    result.counts.update(trial.counts)
                    log = log_tail(trial.site.daemon) if problems else ""
                    result.add(*(Violation(kind, number, seed, trial.name, text, log) for text in problems))
                trial.close()

    threads = [threading.Thread(target=work) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if result.counts["trials"] != count:
        result.add(Violation(kind, 0, seed, "all", f"only {result.counts['trials']} of {count} trials ended"))
