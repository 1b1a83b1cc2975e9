"""Operators, jobs and a killed slurmctld during a repair, at a moment and of a kind that a seed determines.

The witnesses do not depend on healthd: sacct and each job's own log, the log of the fake nvidia-smi, Slurm's Reason in
the end, and the times of all Slurm commands. An action counts as made before a step if slurmctld had acknowledged it
before healthd-repair began its last reading of the node. Slurm has no command that compares and changes, so an action
between the last reading and the command cannot be seen; such actions are counted apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from slurm_cluster import Node
from waiting import until

from healthd.agent.repair.slurm_state import STOP_RESERVATION
from repairs.result import Result
from repairs.trial import NODE, PATIENCE_SECONDS, TRIAL_CONFIG, Cluster, Trial, run_trials

CLAIMED = "(repair: gpu_reset)"
KEEP = "operator: keep"
STEADY_SECONDS = 1.5

BOUNDARIES = (
    *("before the drain", "after the drain", "at the claim", "before the step", "during the step"),
    *("during verify", "around the resume", "after the resume"),
)
ACTIONS = (
    *("submit a job", "resume", "undrain", "drain", "change the Reason", "healthd repair stop", "healthd pause"),
    *("reserve healthd-no-repair", "down", "kill slurmctld"),
)
REPLACES_DRAIN = ("drain", "change the Reason", "down")
ENDS_DRAIN = ("resume", "undrain")
COUNTS = (
    *("resets", "double actions", "resets in a drain of another owner", "resets during a stop or a pause"),
    *("resets while a job ran", "states of operators lost", "repairs without an end"),
    *("jobs", "jobs lost, requeued or failed", "jobs lost by slurmctld in its kill -9"),
    "actions between a reading and the command after it",
)


class Acknowledged(NamedTuple):
    """An action: when it began, and when its command had ended. `is_effective`: it changed the state of a drain."""

    began: float
    ended: float
    is_effective: bool


def run_races(count: int, seed: int, at_once: int = 4) -> Result:
    result = Result(f"races of a GPU reset with operators and jobs ({count} trials, {at_once} nodes at a time)")
    for name in COUNTS:
        result.counts[name] = 0
    run_trials(result, "race", count, seed, at_once, Race)
    return result


class Race(Trial):
    """One action at one boundary of the repair of a fault."""

    boundaries: Sequence[str] = BOUNDARIES
    actions: Sequence[str] = ACTIONS
    config = TRIAL_CONFIG

    def __init__(self, cluster: Cluster, random: Random) -> None:
        super().__init__(cluster, random, self.config)
        self.action_result: Acknowledged | None = None
        self.released = 0.0
        self.boundary, self.action = random.choice(self.boundaries), random.choice(self.actions)
        # slurmctld restores an ended job as running if it is killed before it saves the end.
        self.has_job_at_fault = random.random() < 0.25 and self.action not in ("down", "kill slurmctld")
        self.has_queued_job = random.random() < 0.5 and self.action != "down"
        self.is_concurrent = random.random() < 0.5
        self.delay = random.random()
        self.name = f"{self.action} {self.boundary}"
        self.name += ", a job runs at the fault" if self.has_job_at_fault else ""
        self.name += ", a job waits" if self.has_queued_job else ""
        self.counts.update((self.boundary, self.action))

    def run(self) -> None:
        if self.has_job_at_fault:
            job = self.submit(3, "--no-requeue")
            self.slurm.wait_job(job, "RUNNING")
            until((self.folder / "jobs" / job).exists, "the job runs")
        if self.boundary == "before the step":
            (self.site.programs / "hold").touch()
        if self.boundary == "during the step":
            self.site.set_mode("waits")
        if self.boundary == "before the drain":
            self.act_before_drain()
        else:
            self.fail()
            self.wait_for_boundary()
            self.act()
        self.released = time.time()
        (self.site.programs / "hold").unlink(missing_ok=True)
        (self.folder / "go").touch()
        time.sleep(1.0 + self.delay)
        self.undo()
        self.wait_until_settled()
        if not self.is_decided_by_operator():
            self.return_to_service()

    def act_before_drain(self) -> None:
        if not self.is_concurrent:
            self.act()
            self.fail()
            return
        acting = threading.Thread(target=self.act)
        acting.start()
        time.sleep(self.delay * 0.1)
        self.fail()
        acting.join()

    def wait_for_boundary(self) -> None:
        self.slurm.wait_state(NODE, "DRAIN", reason="healthd: gpu_xid/119 ")
        if self.has_queued_job:
            self.submit(1)
        if self.boundary == "at the claim":
            until(lambda: CLAIMED in self.slurm.node(NODE).reason or self.is_over(), "the claim", PATIENCE_SECONDS)
        elif self.boundary == "before the step":
            until((self.site.programs / "held").exists, "healthd-repair is about to take the step", PATIENCE_SECONDS)
        elif self.boundary == "during the step":
            until(self.site.resets, "the reset has begun", PATIENCE_SECONDS)
        elif self.boundary in ("during verify", "around the resume"):
            until(lambda: self.site.reset_times("resets.ended"), "the reset has ended", PATIENCE_SECONDS)
            time.sleep(self.delay * 0.5 if self.boundary == "during verify" else 0.5 + self.delay)
        elif self.boundary == "after the resume":
            until(self.is_over, "the node is in service", PATIENCE_SECONDS)

    def is_over(self) -> bool:
        return self.site.resets() > 0 and "DRAIN" not in self.slurm.node(NODE).flags

    # --- the action

    def act(self) -> None:
        before, began = self.slurm.node(NODE), time.time()
        was_drained = "DRAIN" in before.flags and before.reason.startswith("healthd: ")
        status = 0
        if self.action == "submit a job":
            self.submit(1, "--no-requeue")  # before the drain, the fault itself would requeue it
        elif self.action in ("resume", "undrain", "drain", "change the Reason", "down"):
            status = self.update_node(self.action)
        elif self.action == "healthd repair stop":
            self.site.daemon.request(command="repair-stop")
        elif self.action == "healthd pause":
            self.site.daemon.request(command="pause", seconds=600, why="trial")
        elif self.action == "reserve healthd-no-repair":
            times = ("StartTime=now+300days", "Duration=1", "Users=root", f"Nodes={NODE}")
            name = f"ReservationName={STOP_RESERVATION}"
            status = self.slurm.attempt("scontrol", "create", "reservation", name, *times).returncode
        else:
            status = self.act_otherwise()
        is_effective = status == 0 and (was_drained or self.action in ("drain", "down"))
        self.action_result = Acknowledged(began, time.time(), is_effective)

    def act_otherwise(self) -> int:
        """Kill slurmctld, and start it again. Return 0."""
        self.killed_slurmctld_at = time.time()
        self.slurm.kill_slurmctld()
        time.sleep(self.delay * 2)
        self.slurm.start_slurmctld()
        return 0

    def update_node(self, action: str) -> int:
        changes = {
            "resume": ("State=RESUME",),
            "undrain": ("State=UNDRAIN",),
            "drain": ("State=DRAIN", f"Reason={KEEP}"),
            "change the Reason": (f"Reason={KEEP}",),
            "down": ("State=DOWN", f"Reason={KEEP}"),
        }
        return self.slurm.attempt("scontrol", "update", f"NodeName={NODE}", *changes[action]).returncode

    def undo(self) -> None:
        """End what only delays a repair."""
        if self.action == "healthd pause":
            self.site.daemon.request(command="unpause")
        elif self.action == "reserve healthd-no-repair":
            self.slurm.attempt("scontrol", "delete", f"ReservationName={STOP_RESERVATION}")

    def is_decided_by_operator(self) -> bool:
        """Return True if the operator has replaced or ended healthd's drain, so that its repair is over."""
        assert self.action_result is not None
        return self.action_result.is_effective and self.action in (*REPLACES_DRAIN, *ENDS_DRAIN)

    # --- the end

    def wait_until_settled(self) -> None:
        """Wait until no step is in progress, for a moment."""
        since, end = time.monotonic(), time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < since + STEADY_SECONDS:
            if time.monotonic() > end:
                raise TimeoutError(f"claimed without progress: {self.repair_status()}")
            self.proceed()
            if self.repair_status()["attempt"] is not None:
                since = time.monotonic()
            time.sleep(0.1)

    def return_to_service(self) -> None:
        """Order the repair, if it waits, until the node is in service."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.is_at_end(node := self.slurm.node(NODE)):
            if time.monotonic() > end:
                raise TimeoutError(f"not in service: {node}; {self.repair_status()}")
            self.proceed()
            repair = self.repair_status()
            if repair["attempt"] is None and not repair["ordered_by"] and node.reason.startswith("healthd: "):
                self.site.daemon.request(command="repair-now")
            time.sleep(1.0)

    def proceed(self) -> None:
        """Let the machine do what the step requires."""

    def is_at_end(self, node: Node) -> bool:
        """Return True if the node is in service."""
        return {"DRAIN", "DOWN"}.isdisjoint(node.flags)

    def end_problems(self) -> Iterator[str]:
        yield from self.state_problems()
        yield from self.reset_problems()

    def state_problems(self) -> Iterator[str]:
        """Yield how healthd changed the state that an operator had set."""
        assert self.action_result is not None
        if not self.is_decided_by_operator():
            return
        node = self.slurm.node(NODE)
        if self.action in REPLACES_DRAIN:
            flag = "DOWN" if self.action == "down" else "DRAIN"
            is_kept = node.reason == KEEP and flag in node.flags
        else:
            is_kept = "DRAIN" not in node.flags
        if is_kept or (self.action in ENDS_DRAIN and self.boundary == "before the drain"):
            return
        changes = [
            c for c in self.commands("daemon") if " update NodeName=" in c.argv and c.ended > self.action_result.ended
        ]
        reading = self.last_reading("daemon", changes[0].began) if changes else 0.0
        if not changes:
            return  # Slurm replaces the Reason of a node that is down and boots
        if reading < self.action_result.ended:
            self.counts["actions between a reading and the command after it"] += 1
            return
        self.counts["states of operators lost"] += 1
        yield f"the state of the operator is lost: {node}; healthd's change: {changes[:1]}"

    def reset_problems(self) -> Iterator[str]:
        resets, action = self.site.reset_times(), self.action_result
        assert action is not None
        self.counts["resets"] += len(resets)
        if len(resets) > 1:
            self.counts["double actions"] += 1
            yield f"{len(resets)} resets for one fault"
        for at in resets:
            reading = self.last_reading("executor", at)
            if at > action.ended and action.is_effective and self.action in (*REPLACES_DRAIN, *ENDS_DRAIN):
                if action.ended > reading:
                    self.counts["actions between a reading and the command after it"] += 1
                else:
                    self.counts["resets in a drain of another owner"] += 1
                    yield f"a reset {at - action.ended:.3f} s after the operator's action"
            if self.was_stopped(at):
                self.counts["resets during a stop or a pause"] += 1
                yield f"a reset {at - action.ended:.3f} s after the stop"
            for job in self.jobs:
                began, ended = self.run_of(job)
                if began < at < ended:
                    if began < reading:
                        self.counts["resets while a job ran"] += 1
                        yield f"a reset {at - began:.3f} s after the start of job {job.id}"
                    else:
                        self.counts["actions between a reading and the command after it"] += 1

    def was_stopped(self, at: float) -> bool:
        """Return True if the step was forbidden while it was held, and taken nevertheless before the end of this."""
        stops = ("healthd repair stop", "healthd pause", "reserve healthd-no-repair")
        if self.boundary != "before the step" or self.action not in stops:
            return False
        return self.released < at < self.released + 1.0
