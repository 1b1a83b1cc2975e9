"""Operators and jobs during a repair by a reboot. The machine boots at once, so that each boundary can be reached."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from random import Random

from repair_site import REBOOT_CONFIG, RepairedNode
from slurm_cluster import Node

from repairs.races import COUNTS, ENDS_DRAIN, REPLACES_DRAIN, Race
from repairs.result import Result
from repairs.times import end
from repairs.trial import NODE, Cluster, run_trials

BOUNDARIES = ("before the step", "after the reboot request", "during the boot", "after the boot")
ACTIONS = (
    *("submit a job", "resume", "undrain", "drain", "change the Reason", "healthd repair stop"),
    *("reserve healthd-no-repair", "down", "scontrol cancel_reboot"),
)
# A reboot that an operator cancelled has failed after this time.
RACE_CONFIG = REBOOT_CONFIG.replace("[slurm]", "boot_timeout_seconds = 30.0\n[slurm]") + "own_faults_per_hour = 0\n"
GAVE_UP = "(repair failed: a person must act)"


def run_reboot_races(count: int, seed: int, at_once: int = 4) -> Result:
    result = Result(f"races of a reboot with operators and jobs ({count} trials, {at_once} nodes at a time)")
    for name in COUNTS:
        if "slurmctld" not in name and "pause" not in name:
            result.counts[name.replace("resets", "reboots")] = 0
    conf = ["ResumeTimeout=600"]
    run_trials(result, "reboot race", count, seed, at_once, RebootRace, reboots=True, extra_conf=conf)
    return result


class RebootRace(Race):
    """One action at one boundary of a repair by a reboot."""

    boundaries, actions, config = BOUNDARIES, ACTIONS, RACE_CONFIG

    def __init__(self, cluster: Cluster, random: Random) -> None:
        super().__init__(cluster, random)
        self.has_job_at_fault = False
        self.reboots_before = self.slurm.reboot_count(NODE)
        self.boots = 0

    def make_site(self, config: str) -> RepairedNode:
        return RepairedNode(self.slurm, NODE, self.folder / "node", config)

    @contextlib.contextmanager
    def start(self) -> Iterator[None]:
        try:
            self.site.start()
            yield
        finally:
            end(self.site.daemon)

    @property
    def reboots(self) -> int:
        return self.slurm.reboot_count(NODE) - self.reboots_before

    def run(self) -> None:
        if self.boundary == "before the step":
            (self.site.programs / "hold").touch()
        self.site.fail()
        self.slurm.wait_state(NODE, "DRAIN", reason="healthd: gpu_xid/119 ")
        if self.has_queued_job:
            self.submit(1)
        if self.boundary == "before the step":
            self.site.wait_until_held()
            self.act()
            (self.site.programs / "hold").unlink()
        else:
            self.slurm.wait_reboot(NODE, self.reboots_before + 1)
            self.act_around_boot()
        time.sleep(1.0 + self.delay)
        self.undo()
        self.wait_until_settled()
        if not self.is_decided_by_operator():
            self.return_to_service()

    def act_around_boot(self) -> None:
        if self.boundary == "after the reboot request":
            self.act()
            return
        self.boots += 1
        if self.boundary == "after the boot":
            self.site.boot()
            time.sleep(self.delay)
            self.act()
            return
        self.site.go_down()
        self.site.daemon.start()
        self.act()
        self.slurm.start_slurmd(NODE, "-b")

    def act_otherwise(self) -> int:
        return self.slurm.attempt("scontrol", "cancel_reboot", NODE).returncode

    def proceed(self) -> None:
        """Boot the machine if Slurm has rebooted it."""
        if self.boots < self.reboots:
            self.boots += 1
            self.site.boot()

    def is_at_end(self, node: Node) -> bool:
        return node.reason.endswith(GAVE_UP) or {"DRAIN", "DOWN", "NOT_RESPONDING"}.isdisjoint(node.flags)

    def reset_problems(self) -> Iterator[str]:
        reboots, action = self.reboots, self.action_result
        assert action is not None
        self.counts["reboots"] += reboots
        if reboots > 1:
            self.counts["double actions"] += 1
            yield f"{reboots} reboots for one fault"
        is_changed = action.is_effective and self.action in (*REPLACES_DRAIN, *ENDS_DRAIN)
        if reboots and self.boundary == "before the step" and is_changed:
            self.counts["reboots in a drain of another owner"] += 1
            yield "a reboot after the operator's action"

    def close(self) -> None:
        super().close()
        self.slurm.reset_node(NODE)  # slurmd reported a boot, or does not run
