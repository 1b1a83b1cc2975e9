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
XID_TEXTS = {
    79: "pid=7, name=x, GPU has fallen off the bus.",
    48: "pid=7, name=x, An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer.",
    119: "pid=7, name=x, Timeout waiting for RPC from GSP0! Expected function 76 (GSP_RM_CONTROL) (0x20800a4c 0x4).",
    31: "pid=7, name=x, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_1 faulted @ 0x7f_00592000.",
    63: "pid=7, name=x, Row Remapper: New row marked for remapping, reset gpu to activate.",
}
OTHER_LINES = (
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
CLEARED_BY = {
    Clears.REBOOT: ("repaired by ",),
    Clears.GPU_RESET: ("repaired by ", "gpu_reset: "),
    Clears.OPERATOR: ("repaired by ",),  # a fault that returned after a repair
}
DAY = 24 * 3600.0
SETTLED_SECONDS = 310.0  # five rounds: longer than each confirm time and than the clean runs of each check


class NodeStateMachine(RuleBasedStateMachine):
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
        self.expected_open: set[ConditionKey] = set()
        self.event_lines: int | None = 0
        self.node.run_for(1.0)

    def teardown(self) -> None:
        try:
            self.check_restarted_daemon_agrees()
        finally:
            self.node.close()
            shutil.rmtree(self.folder)

    # --- time

    @rule(seconds=st.sampled_from([0.06, 1.0, 20.0, 70.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.node.run_for(seconds)

    @rule(turns=st.integers(1, 6))
    def begin_round(self, turns: int) -> None:
        """Start a round, so that the next step comes during the round."""
        self.node.daemon.scheduler.queue.run_all_now()
        for _ in range(turns):
            self.node.turn(1.0)

    @rule(seconds=st.sampled_from([3.0, -3.0, 3600.0, -3600.0, 2 * DAY, -2 * DAY]))
    def step_clock(self, seconds: float) -> None:
        self.node.clock.offset += seconds
        if abs(seconds) > DAY:
            self.event_lines = None

    # --- the node

    @rule(code=st.sampled_from(sorted(XID_TEXTS)), gpu=st.integers(0, 1))
    def write_xid(self, code: int, gpu: int) -> None:
        address = self.node.addresses[gpu]
        self.write_line(f"NVRM: Xid (PCI:{address.removesuffix('.0')}): {code}, {XID_TEXTS[code]}")
        if code in LATCHED and "gpu_xid" in self.node.checks:
            self.expected_open.add(ConditionKey(f"gpu_xid/{code}", address))

    @rule(line=st.sampled_from(OTHER_LINES))
    def write_other_line(self, line: str) -> None:
        self.write_line(line)

    def write_line(self, line: str) -> None:
        self.node.log_line(line)
        if self.event_lines is not None and make_event(RawLine(0.0, line), "") is not None:
            self.event_lines += 1

    @rule(fault=st.sampled_from(FAULTS), gpu=st.integers(0, 1))
    def break_gpu(self, fault: dict[str, Any], gpu: int) -> None:
        self.node.gpus[gpu] = {**self.node.gpus.get(gpu, {}), **fault}
        self.node.write_scenario()

    @rule(gpu=st.integers(0, 1))
    def repair_gpu(self, gpu: int) -> None:
        self.node.gpus.pop(gpu, None)
        self.node.write_scenario()

    @rule(mig=st.booleans(), gpu=st.integers(0, 1))
    def switch_mig(self, mig: bool, gpu: int) -> None:
        self.node.gpus[gpu] = {**self.node.gpus.get(gpu, {}), "mig": mig}
        self.node.write_scenario()

    @rule(library=st.sampled_from(["driver_not_loaded", "mismatch", "fine"]))
    def reload_driver(self, library: str) -> None:
        """Reload the driver, which clears its counters."""
        self.node.machine = {"library": library}
        for table in self.node.gpus.values():
            table.pop("ecc_volatile_uncorrected_sram", None)
        self.node.write_scenario()

    # --- operators

    @rule(check=st.sampled_from(sorted(CHECKS)), times=st.integers(1, 2))
    def toggle_check(self, check: str, times: int) -> None:
        if self.node.checks.pop(check, None) is None:
            self.node.checks[check] = CHECKS[check]
        if check == "gpu_xid":
            self.expected_open.clear()
        self.reload_settings(times)

    @rule(mode=st.sampled_from(["observe", "drain"]), times=st.integers(1, 2))
    def change_mode(self, mode: str, times: int) -> None:
        self.node.mode = mode
        self.reload_settings(times)

    def reload_settings(self, times: int) -> None:
        for _ in range(times):
            self.node.send_sighup()

    @rule(which=st.integers(0, 5), every_part=st.booleans())
    def run_repaired(self, which: int, every_part: bool) -> None:
        if open_keys := list(self.open_conditions()):
            code, part = open_keys[which % len(open_keys)]
            self.run_command(protocol.repaired(code, None if every_part else part, "new board"))

    @rule(which=st.integers(0, 5), seconds=st.sampled_from([30.0, 3600.0]))
    def run_ack(self, which: int, seconds: float) -> None:
        if open_keys := list(self.open_conditions()):
            self.run_command(protocol.ack(*open_keys[which % len(open_keys)], seconds, "we know"))

    @rule(seconds=st.sampled_from([30.0, 3600.0]))
    def run_pause(self, seconds: float) -> None:
        self.run_command(protocol.pause(seconds, "a move"))

    @rule()
    def run_unpause(self) -> None:
        if self.node.daemon.store.ledger.pause:
            self.run_command(protocol.simple_request(protocol.UNPAUSE))

    def run_command(self, request: dict[str, Any]) -> None:
        assert "done" in self.node.daemon.answer(request, "ann", may_command=True)

    @rule()
    def resume_in_slurm(self) -> None:
        self.node.slurm = Slurm()

    # --- end of the daemon

    @rule()
    def kill(self) -> None:
        self.node.kill()

    @rule(effects=st.integers(0, 6), code=st.sampled_from(sorted(XID_TEXTS)), gpu=st.integers(0, 1))
    def kill_after_effects(self, effects: int, code: int, gpu: int) -> None:
        """Kill the daemon after this number of effects: right before or after a save or a request to the worker."""
        self.write_xid(code, gpu)
        self.node.daemon.fuse = effects
        self.node.daemon.scheduler.queue.run_all_now()
        self.node.run_for(2.0)
        self.node.daemon.fuse = float("inf")

    @rule()
    def restart(self) -> None:
        self.node.daemon.shut_down()
        self.node.daemon = self.node.start_daemon()

    # --- invariants

    def open_conditions(self) -> dict[ConditionKey, Condition]:
        return self.node.daemon.store.conditions

    @invariant()
    def no_error_was_recorded(self) -> None:
        assert not guard.dropped
        assert not self.node.daemon.reload_problem
        assert not self.node.daemon.store.save_failed

    @invariant()
    def lines_are_counted_once(self) -> None:
        if self.has_read_all() and self.event_lines is not None:
            assert sum(event.lines for event in self.node.daemon.store.ledger.events) == self.event_lines

    @invariant()
    def no_condition_is_lost(self) -> None:
        if not self.has_read_all():
            return
        ledger = self.node.daemon.store.ledger
        for key in self.expected_open - set(self.open_conditions()):
            cleared_condition = [c for c in ledger.cleared if c.key == key][-1]
            assert cleared_condition.cleared_by.startswith(CLEARED_BY[cleared_condition.clears]), cleared_condition
            self.expected_open.remove(key)

    def has_read_all(self) -> bool:
        (file,) = self.node.daemon.kernel_events.listener.cursor["files"]
        return bool(file[1] == self.node.log.stat().st_size)

    def check_restarted_daemon_agrees(self) -> None:
        """Compare the verdict with that of a new daemon on a copy of the files, each after some quiet rounds."""
        node = self.node
        node.run_for(1.0)
        node.daemon.store.save(round_ended=True)
        saved_seconds, slurm = node.clock.seconds, node.slurm
        copy_dir = node.folder / "new"
        for name in ("runtime_dir", "state_dir"):
            shutil.copytree(node.folder / name, copy_dir / name, ignore=shutil.ignore_patterns("*.sock"))
        node.run_for(SETTLED_SECONDS)
        node.daemon.shut_down()
        first_state = daemon_state(node.daemon)
        self.no_error_was_recorded()
        node.clock.seconds, node.slurm = saved_seconds, slurm
        node.daemon = node.start_daemon("new")
        node.run_for(SETTLED_SECONDS)
        assert daemon_state(node.daemon) == first_state
        self.no_error_was_recorded()


def daemon_state(daemon: Daemon) -> dict[str, Any]:
    verdict = daemon.verdict
    return {
        "health": verdict.health,
        "causes": [c.key for c in verdict.causes],
        "unknown": verdict.unknown,
        "may_resume": verdict.may_resume,
        "conditions": {c.key: (c.severity, c.state, c.clears, c.message) for c in verdict.conditions},
    }


def test_invariants_hold_and_restarted_daemon_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_state_machine_as_test(
        lambda: NodeStateMachine(tmp_path, monkeypatch),
        settings=settings(max_examples=max(15, settings.default.max_examples // 2)),
    )
