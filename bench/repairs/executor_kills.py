"""Kills and power losses of the program that takes repair steps, without Slurm: each program is a fake (RepairNode)."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from random import Random

import pytest
from repair_node import (
    BOOT_ID,
    CAUSE,
    DCGM,
    ID,
    IDLE,
    LATER,
    PERSISTENCED,
    REASON,
    RepairNode,
    killed_after,
    killed_at,
    put_request,
)

from healthd.agent.repair import reset_step
from healthd.agent.repair.journal import JOURNAL_FILE, NAME, Outcome
from healthd.common.model import RepairStep
from healthd.host.separate_program import request_file
from repairs.result import Result, Violation

LONGEST_SECONDS = 1.2  # the slowest runs take about this long
POINTS = {RepairStep.GPU_RESET: 60, RepairStep.REBOOT: 36}  # a few more than a run has
ENDED = (Outcome.DONE, Outcome.UNKNOWN, Outcome.REFUSED)


def run_kills(count: int, seed: int) -> Result:
    """Run trials until `count` processes have been killed, two at a time."""
    result, number = Result(f"kills of healthd repair run, fake commands ({count})"), 0
    processes = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(2, mp_context=processes) as pool:
        open_trials: set[Future[tuple[Counter[str], list[Violation]]]] = set()
        while result.counts["kills"] < count or open_trials:
            while len(open_trials) < 2 and result.counts["kills"] < count:
                number += 1
                open_trials.add(pool.submit(run_trial, seed, number))
            done, open_trials = wait(open_trials, return_when=FIRST_COMPLETED)
            for future in done:
                counts, violations = future.result()
                result.counts.update(counts)
                result.add(*violations)
    result.counts["trials"] = number
    for kind in ("double actions", "services left stopped", "journals without a step that was taken", "no outcome"):
        result.counts[kind] += 0
    return result


def run_trial(seed: int, number: int) -> tuple[Counter[str], list[Violation]]:
    """Kill one or two runs for the same request, then let the next runs end."""
    random = Random(f"{seed} executor {number}")
    folder = Path(tempfile.mkdtemp(prefix="healthd-kills."))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reset_step, "RETRY_SECONDS", 0.0)
        trial = Trial(RepairNode(folder, patch), random)
        trial.run()
        violations = [Violation("kill", number, seed, trial.describe(), text) for text in trial.problems()]
    shutil.rmtree(folder)
    return trial.counts, violations


class Trial:
    """One request for a step, its kills, and what remains in the end."""

    def __init__(self, node: RepairNode, random: Random) -> None:
        self.node, self.random = node, random
        self.counts: Counter[str] = Counter()
        self.history: list[str] = []
        self.boot_id = BOOT_ID
        self.step = random.choice((RepairStep.GPU_RESET, RepairStep.GPU_RESET, RepairStep.REBOOT))
        self.reason = REASON if self.step is RepairStep.GPU_RESET else REASON.replace("gpu_reset", "reboot")
        self.identity = ID.replace("gpu_reset", self.step.value)

    def run(self) -> None:
        node, random = self.node, self.random
        node.set_node(IDLE, self.reason)
        if self.step is RepairStep.GPU_RESET and random.random() < 0.3:
            node.write("smi.mode", random.choice(("fails", "kills_parent", "no_effect")) + "\n")
        if random.random() < 0.3:
            node.write(PERSISTENCED, "inactive\n")
            node.write("smi.persistence", "Enabled\n")
        self.services = {name: node.read(name) for name in (PERSISTENCED, DCGM)}
        (node.state / "durable.json").write_bytes((node.state_dir / JOURNAL_FILE).read_bytes())
        self.put()
        for _ in range(random.choice((1, 1, 2))):
            self.kill_once()
        self.counts[self.step.value] += 1
        for _ in range(3):  # a fake nvidia-smi may kill one of these runs
            if not killed_at(node, 0):
                break
            self.counts["kills"] += 1
            self.history.append("killed by nvidia-smi")
        self.put(id=LATER.replace("gpu_reset", self.step.value))  # a daemon that has lost its ledger
        serve_in_child(node)
        serve_in_child(node)

    def put(self, **changes: object) -> None:
        names = {"id": self.identity, "step": self.step, "reason": self.reason, "boot_id": self.boot_id}
        put_request(self.node, **{**names, **changes})

    def kill_once(self) -> None:
        random = self.random
        if random.random() < 0.7:
            point = random.randint(1, POINTS[self.step])
            was_killed, text = killed_at(self.node, point, is_fine=True), f"killed at point {point}"
        else:
            seconds = random.uniform(0.0, LONGEST_SECONDS)
            was_killed, text = killed_after(self.node, seconds), f"killed after {seconds:.3f} s"
        if not was_killed:
            self.history.append(text.replace("killed", "ended before a kill"))
            return
        self.counts["kills"] += 1
        self.history.append(text)
        if random.random() < 0.25:
            self.lose_power()

    def lose_power(self) -> None:
        """Boot after a power loss: /run is empty, unsynced data may be lost, and systemd starts the services.

        Until the folder is synced, the disk may have either name of a renamed file.
        """
        node, random = self.node, self.random
        self.counts["power losses"] += 1
        kill_programs(node.state)
        journal = node.state_dir / JOURNAL_FILE
        if random.random() < 0.5:
            journal.write_bytes((node.state / "durable.json").read_bytes())
            self.history.append("power loss, the last rename is lost")
        else:
            self.history.append("power loss")
        for path in node.state_dir.glob("*.new"):
            random.choice((path.unlink, lambda path=path: os.truncate(path, random.randint(0, path.stat().st_size))))()
        shutil.rmtree(node.runtime_dir)
        node.runtime_dir.mkdir()
        self.boot_id = str(uuid.UUID(int=random.getrandbits(128)))
        (node.root / "proc/sys/kernel/random/boot_id").write_text(f"{self.boot_id}\n")
        for name, text in self.services.items():
            node.write(name, text)
        self.put(id="")  # the daemon reads the journal
        serve_in_child(node)
        if node.journal().find(self.identity) is None:
            self.put()  # nothing is recorded, so the daemon requests the step again in this boot

    def describe(self) -> str:
        return f"{self.step.value}, nvidia-smi {self.node.read('smi.mode').strip()}: {'; '.join(self.history)}"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong in the end."""
        node = self.node
        actions = node.resets + node.reboots
        if actions > 1:
            self.counts["double actions"] += 1
            yield f"{node.resets} resets and {node.reboots} reboots for one fault"
        if {name: node.read(name) for name in self.services} != self.services:
            self.counts["services left stopped"] += 1
            yield f"services: {[node.read(name) for name in self.services]}, before {list(self.services.values())}"
        if node.read("smi.persistence") == "Disabled\n" and self.boot_id == BOOT_ID:
            yield "persistence mode is off"
        if violations := node.read("violations"):
            yield violations
        if os.path.exists(request_file(str(node.runtime_dir), NAME)):
            yield "the request is still open"
        journal = node.journal()
        if journal.stopped is not None:
            yield f"the journal has {journal.stopped}"
        taken = [entry for entry in journal.entries if CAUSE in entry.causes]
        if actions and not taken:
            self.counts["journals without a step that was taken"] += 1
            yield "the step was taken, but the journal does not have it"
        if any(entry.outcome is Outcome.TAKING for entry in taken) and self.step is RepairStep.GPU_RESET:
            self.counts["no outcome"] += 1
            yield "the reset has no outcome"
        if not taken and journal.refused is None:
            self.counts["no outcome"] += 1
            yield "the request has no result"


def serve_in_child(node: RepairNode) -> None:
    """Serve in a child process, because the fake nvidia-smi may kill its parent."""
    killed_at(node, 0)


def kill_programs(folder: Path) -> None:
    """Kill the fake programs that still run: their working directory is `folder`."""
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(path) == str(folder):
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:  # the process has ended
            continue
