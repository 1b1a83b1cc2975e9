"""Tests of random sequences of faults, commands and restarts: no internal error, no fault lost or counted twice, and
the same verdict as a daemon that starts with the saved ledger."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from made_node import Node, Slurm

from healthd.agent.control import protocol
from healthd.agent.daemon import Daemon
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.common import guard
from healthd.common.model import Clears, Condition, ConditionKey

CHECKS: Mapping[str, dict[str, Any]] = {
    **{name: {} for name in ("gpu_access", "gpu_count", "gpu_ecc", "gpu_row_remap", "gpu_recovery_action")},
    **{name: {} for name in ("gpu_xid", "sxid", "kernel", "filesystem", "gpu_processes")},
    "gpu_mig": {"mode": "off"},
}
# Xid codes and their texts. LATCHED has the codes that open a latched condition.
XIDS = {
    79: "pid=7, name=x, GPU has fallen off the bus.",
    48: "pid=7, name=x, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer.",
    119: "pid=7, name=x, Timeout waiting for RPC from GSP0! Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4).",
    31: "pid=7, name=x, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_1 faulted @ 0x7f_00592000.",
    63: "pid=7, name=x, Row Remapper: New row marked for remapping, reset gpu to activate.",
}
OTHERS = (
    "nvidia-nvswitch3: SXid (PCI:0000:1b:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
    "python3[4711]: segfault at 0 ip 0000000000000000 sp 00007ffd2a5d1c68 error 14",
    "EXT4-fs error (device sda2): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0",
    "NVRM: GPU at PCI:0000:1b:00: GPU-8a47641b-dff6-f09f-618c-c3eb58fb430d",
)
FAULTS: tuple[dict[str, Any], ...] = (
    {"lost": True},
    {"gone": True},
    {"requires_reset": True},
    {"unreachable": True},
    {"remap_pending": True},
    {"ecc_volatile_uncorrected_sram": 2, "ecc_aggregate_uncorrected_sram": 2},
    {"recovery_action": 1},
)
LATCHED = (79, 48, 119)
ENDS = {
    Clears.REBOOT: ("repaired by ",),
    Clears.GPU_RESET: ("repaired by ", "gpu_reset: "),
    Clears.OPERATOR: ("repaired by ",),  # a fault that returned after a repair
}
DAY = 24 * 3600.0
SETTLED_SECONDS = 310.0  # five rounds: longer than each confirm time and than the clean runs of each check


class AnyOrder(RuleBasedStateMachine):
    """A node with random events.

    `expected_open` has conditions that end only by a reset, an operator or the removal of their check. `event_lines`
    counts the written lines that are events; it is None after a clock step so large that events expire.
    """

    numbers = itertools.count()

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        guard.dropped.clear()
        self.folder = folder / str(next(self.numbers))
        self.folder.mkdir()
        self.node = Node(self.folder, monkeypatch, CHECKS)
        self.must_stand: set[ConditionKey] = set()
        self.lines: int | None = 0
        self.node.goes_on(1.0)

    def teardown(self) -> None:
        try:
            self.the_verdict_is_that_of_a_new_daemon()
        finally:
            self.node.close()
            shutil.rmtree(self.folder)

    # --- time

    @rule(seconds=st.sampled_from([0.06, 1.0, 20.0, 70.0, 400.0]))
    def time_goes_by(self, seconds: float) -> None:
        self.node.goes_on(seconds)

    @rule(turns=st.integers(1, 6))
    def a_round_begins(self, turns: int) -> None:
        """Start a round, so that the next step comes during the round."""
        self.node.daemon.scheduler.queue.run_all_now()
        for _ in range(turns):
            self.node.turn(1.0)

    @rule(seconds=st.sampled_from([3.0, -3.0, 3600.0, -3600.0, 2 * DAY, -2 * DAY]))
    def the_clock_is_set(self, seconds: float) -> None:
        self.node.clock.offset += seconds
        if abs(seconds) > DAY:
            self.lines = None

    # --- the node

    @rule(code=st.sampled_from(sorted(XIDS)), gpu=st.integers(0, 1))
    def the_driver_says_an_xid(self, code: int, gpu: int) -> None:
        address = self.node.addresses[gpu]
        self.says(f"NVRM: Xid (PCI:{address.removesuffix('.0')}): {code}, {XIDS[code]}")
        if code in LATCHED and "gpu_xid" in self.node.checks:
            self.must_stand.add(ConditionKey(f"gpu_xid/{code}", address))

    @rule(line=st.sampled_from(OTHERS))
    def the_kernel_says_something_else(self, line: str) -> None:
        self.says(line)

    def says(self, line: str) -> None:
        self.node.says(line)
        if self.lines is not None and make_event(RawLine(0.0, line), "") is not None:
            self.lines += 1

    @rule(fault=st.sampled_from(FAULTS), gpu=st.integers(0, 1))
    def a_gpu_becomes_bad(self, fault: dict[str, Any], gpu: int) -> None:
        self.node.gpus[gpu] = {**self.node.gpus.get(gpu, {}), **fault}
        self.node.changed()

    @rule(gpu=st.integers(0, 1))
    def a_gpu_is_well_again(self, gpu: int) -> None:
        self.node.gpus.pop(gpu, None)
        self.node.changed()

    @rule(mig=st.booleans(), gpu=st.integers(0, 1))
    def mig_is_switched(self, mig: bool, gpu: int) -> None:
        self.node.gpus[gpu] = {**self.node.gpus.get(gpu, {}), "mig": mig}
        self.node.changed()

    @rule(library=st.sampled_from(["driver_not_loaded", "mismatch", "fine"]))
    def the_driver_is_loaded_anew(self, library: str) -> None:
        """Reload the driver, which clears its counters."""
        self.node.machine = {"library": library}
        for table in self.node.gpus.values():
            table.pop("ecc_volatile_uncorrected_sram", None)
        self.node.changed()

    # --- operators

    @rule(check=st.sampled_from(sorted(CHECKS)), times=st.integers(1, 2))
    def a_check_is_removed_or_comes_back(self, check: str, times: int) -> None:
        if self.node.checks.pop(check, None) is None:
            self.node.checks[check] = CHECKS[check]
        if check == "gpu_xid":
            self.must_stand.clear()
        self.the_settings_are_read_again(times)

    @rule(mode=st.sampled_from(["observe", "drain"]), times=st.integers(1, 2))
    def the_mode_changes(self, mode: str, times: int) -> None:
        self.node.mode = mode
        self.the_settings_are_read_again(times)

    def the_settings_are_read_again(self, times: int) -> None:
        for _ in range(times):
            self.node.hang_up()

    @rule(which=st.integers(0, 5), every_part=st.booleans())
    def somebody_says_repaired(self, which: int, every_part: bool) -> None:
        if standing := list(self.standing()):
            code, part = standing[which % len(standing)]
            self.told(protocol.repaired(code, None if every_part else part, "new board"))

    @rule(which=st.integers(0, 5), seconds=st.sampled_from([30.0, 3600.0]))
    def somebody_knows_of_it(self, which: int, seconds: float) -> None:
        if standing := list(self.standing()):
            self.told(protocol.ack(*standing[which % len(standing)], seconds, "we know"))

    @rule(seconds=st.sampled_from([30.0, 3600.0]))
    def there_is_a_pause(self, seconds: float) -> None:
        self.told(protocol.pause(seconds, "a move"))

    @rule()
    def the_pause_is_over(self) -> None:
        if self.node.daemon.store.ledger.pause:
            self.told(protocol.simple_request(protocol.UNPAUSE))

    def told(self, request: dict[str, Any]) -> None:
        assert "done" in self.node.daemon.answer(request, "ann", may_command=True)

    @rule()
    def somebody_resumes_the_node_in_slurm(self) -> None:
        self.node.slurm = Slurm()

    # --- end of the daemon

    @rule()
    def it_is_killed(self) -> None:
        self.node.kill()

    @rule(effects=st.integers(0, 6), code=st.sampled_from(sorted(XIDS)), gpu=st.integers(0, 1))
    def it_is_killed_while_it_hears(self, effects: int, code: int, gpu: int) -> None:
        """Kill the daemon after this number of effects: right before or after a save or a request to the worker."""
        self.the_driver_says_an_xid(code, gpu)
        self.node.daemon.fuse = effects
        self.node.daemon.scheduler.queue.run_all_now()
        self.node.goes_on(2.0)
        self.node.daemon.fuse = float("inf")

    @rule()
    def it_is_stopped_and_started(self) -> None:
        self.node.daemon.shut_down()
        self.node.daemon = self.node.started()

    # --- invariants

    def standing(self) -> dict[ConditionKey, Condition]:
        return self.node.daemon.store.conditions

    @invariant()
    def nothing_was_a_mistake(self) -> None:
        assert not guard.dropped
        assert not self.node.daemon.reload_problem
        assert not self.node.daemon.store.save_failed

    @invariant()
    def what_was_heard_is_counted_once(self) -> None:
        if self.has_heard_all() and self.lines is not None:
            assert sum(event.lines for event in self.node.daemon.store.ledger.events) == self.lines

    @invariant()
    def no_condition_is_lost(self) -> None:
        if not self.has_heard_all():
            return
        ledger = self.node.daemon.store.ledger
        for key in self.must_stand - set(self.standing()):
            ended = [c for c in ledger.cleared if c.key == key][-1]
            assert ended.cleared_by.startswith(ENDS[ended.clears]), ended
            self.must_stand.remove(key)

    def has_heard_all(self) -> bool:
        (file,) = self.node.daemon.kernel_events.listener.cursor["files"]
        return bool(file[1] == self.node.log.stat().st_size)

    def the_verdict_is_that_of_a_new_daemon(self) -> None:
        """Compare the verdict with that of a new daemon on a copy of the files, each after some quiet rounds."""
        node = self.node
        node.goes_on(1.0)
        node.daemon.store.save(round_ended=True)
        at, slurm = node.clock.seconds, node.slurm
        new = node.folder / "new"
        for name in ("runtime_dir", "state_dir"):
            shutil.copytree(node.folder / name, new / name, ignore=shutil.ignore_patterns("*.sock"))
        node.goes_on(SETTLED_SECONDS)
        node.daemon.shut_down()
        before = judged(node.daemon)
        self.nothing_was_a_mistake()
        node.clock.seconds, node.slurm = at, slurm
        node.daemon = node.started("new")
        node.goes_on(SETTLED_SECONDS)
        assert judged(node.daemon) == before
        self.nothing_was_a_mistake()


def judged(daemon: Daemon) -> dict[str, Any]:
    verdict = daemon.verdict
    return {
        "health": verdict.health,
        "causes": [c.key for c in verdict.causes],
        "unknown": verdict.unknown,
        "may_resume": verdict.may_resume,
        "conditions": {c.key: (c.severity, c.state, c.clears, c.message) for c in verdict.conditions},
    }


def test_whatever_happens_in_whatever_order_nothing_is_lost_and_a_new_daemon_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_state_machine_as_test(
        lambda: AnyOrder(tmp_path, monkeypatch),
        settings=settings(max_examples=max(15, settings.default.max_examples // 2)),
    )
