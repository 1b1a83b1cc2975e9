"""kill -9 of the daemon, of healthd-repair or of nvidia-smi at a random moment of a reset, with a real Slurm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from repair_node import BUSCTL, SYSTEMCTL
from repair_site import CONFIG, programs_of
from slurm_look import write_script
from waiting import until

from healthd.agent.repair.journal import Outcome
from healthd.agent.repair.journal_file import read_journal
from repairs.result import Result
from repairs.trial import NODE, PATIENCE_SECONDS, Cluster, Trial, run_trials

TARGETS = ("daemon", "healthd repair run", "nvidia-smi")
SERVICE = "nvidia-dcgm.service"
KILL_CONFIG = (
    CONFIG.replace("stop_services = []", f'stop_services = ["{SERVICE}"]')
    + "[slurm]\ncommand_timeout_seconds = 120.0\n[checks.services]\nenabled = false\n"
)
GAVE_UP = "(repair failed: a person must act)"
COUNTS = (
    *("resets", "double actions", "services left stopped", "resets while a job ran", "repairs without an end"),
    *("jobs", "jobs lost, requeued or failed", "in service in the end", "left to a person in the end"),
)


def run_slurm_kills(count: int, seed: int, at_once: int = 4) -> Result:
    result = Result(f"kills during a GPU reset with a real Slurm ({count} trials, {at_once} nodes at a time)")
    for name in ("kills", *COUNTS):
        result.counts[name] = 0
    run_trials(result, "kill with Slurm", count, seed, at_once, Kill)
    return result


class Kill(Trial):
    """A kill at a random moment. The node must return to service, or be left to a person after a failed reset."""

    def __init__(self, cluster: Cluster, random: Random) -> None:
        super().__init__(cluster, random, KILL_CONFIG)
        self.target = random.choice(TARGETS)
        self.delay = random.uniform(0.0, 4.0 if self.target == "daemon" else 2.2)
        self.has_queued_job = random.random() < 0.5
        self.name = f"{self.target} killed after {self.delay:.3f} s"
        self.name += ", a job waits" if self.has_queued_job else ""
        self.site.set_mode(random.choice(("ok", "slow")) if self.target == "daemon" else "slow")
        (self.site.machine.root / "run/systemd/system").mkdir(parents=True)
        for name, text in (("systemctl", SYSTEMCTL), ("busctl", BUSCTL)):
            write_script(self.site.programs / name, f"cd {self.folder}\n{text}")
        (self.folder / SERVICE).write_text("active\n")

    def run(self) -> None:
        until(lambda: not programs_of(self.site), "healthd-repair has read the journal", PATIENCE_SECONDS)
        self.fail()
        if self.target == "daemon":
            time.sleep(self.delay)
            self.site.daemon.kill()
            self.counts["kills"] += 1
            self.site.daemon.start()
        else:
            find = self.repair_programs if self.target == "healthd repair run" else self.smi_programs
            until(lambda: find() or self.is_over(), f"{self.target} runs", PATIENCE_SECONDS)
            time.sleep(self.delay)
            for pid in find():
                os.kill(pid, signal.SIGKILL)
                self.counts["kills"] += 1
        if self.has_queued_job:
            self.slurm.wait_state(NODE, "DRAIN", reason="healthd: gpu_xid/119 ") if not self.is_over() else None
            self.submit(1)
        until(self.is_over, "the repair has ended", PATIENCE_SECONDS)

    def repair_programs(self) -> list[int]:
        return programs_of(self.site)

    def smi_programs(self) -> list[int]:
        """Return the processes of the fake nvidia-smi, which work in the folder of this trial."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            try:
                if os.readlink(path) == str(self.folder) and b"nvidia-smi" in (path.parent / "cmdline").read_bytes():
                    found.append(int(path.parent.name))
            except OSError:  # the process has ended
                continue
        return found

    def is_over(self) -> bool:
        """Return True if the node is in service after a step, or left to a person."""
        node = self.slurm.node(NODE)
        journal = read_journal(str(self.folder / "daemon/state"))
        if journal is None or not any(entry.outcome is not Outcome.TAKING for entry in journal.entries):
            return False
        return node.reason.endswith(GAVE_UP) or {"DRAIN", "DOWN"}.isdisjoint(node.flags)

    def end_problems(self) -> Iterator[str]:
        resets, node = self.site.reset_times(), self.slurm.node(NODE)
        self.counts["resets"] += len(resets)
        self.counts["left to a person in the end" if "DRAIN" in node.flags else "in service in the end"] += 1
        if len(resets) > 1:
            self.counts["double actions"] += 1
            yield f"{len(resets)} resets for one fault"
        self.counts["resets with a stopped service"] += (self.folder / "systemctl.log").exists()
        if (self.folder / SERVICE).read_text() != "active\n":
            self.counts["services left stopped"] += 1
            yield f"{SERVICE} is stopped"
        for job in self.jobs:
            began, ended = self.run_of(job)
            if any(began < at < ended for at in resets):
                self.counts["resets while a job ran"] += 1
                yield f"a reset while job {job.id} ran"
