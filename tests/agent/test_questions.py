"""Tests that queries change nothing: no property or query method of the daemon's parts changes the ledger."""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from healthd.agent.conditions import ledger as ledgers
from healthd.agent.conditions.ledger import Pause
from healthd.agent.daemon import Daemon
from healthd.agent.settings import registry
from healthd.agent.settings.effective import resolve_settings
from healthd.common.model import Ack, Clears, Condition, ConditionState, DrainRecord, Mode, NodeState, Severity
from healthd.common.values import encode
from healthd.host.host import Host

JOBS = "sys/fs/cgroup/system.slice/slurmstepd.scope"
DAY = 24 * 3600.0

# Methods of the parts that are queries, in addition to properties.
ASKED = {"waits", "scheduled", "expected", "completed", "snapshot", "problems", "changed"}

seconds = st.floats(0.0, 2 * DAY)
conditions = st.builds(
    lambda check, subject, severity, state, age, ack: Condition(
        check=check,
        instance="",
        code=f"{check}/x",
        subject=subject,
        severity=severity,
        message=f"{check} {subject}",
        clears=Clears.PASS,
        state=state,
        boot_id="b",
        first_seen=time.time() - age,
        last_seen=time.time(),
        count=1,
        ack=ack,
    ),
    st.sampled_from(["gpu_processes", "gpu_xid", "disk_space"]),
    st.sampled_from(["", "0000:1b:00.0"]),
    st.sampled_from(list(Severity)),
    st.sampled_from([ConditionState.PENDING, ConditionState.OPEN, ConditionState.ACKNOWLEDGED]),
    seconds,
    st.none() | st.builds(lambda age: Ack(time.time() - age, "known", "ann", Severity.INFO), st.floats(-DAY, DAY)),
)
ALLOCATED, DRAINED = (NodeState("n1", frozenset(flags)) for flags in ({"ALLOCATED"}, {"IDLE", "DRAIN"}))


class Made:
    """A daemon with a fake root and clocks that can be advanced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ahead = folder, 0.0
        checks = registry.built_in_checks()
        table = {
            **{name: str(folder / name) for name in ("root", "runtime_dir", "state_dir", "checks_dir")},
            "mode": "drain",
            "profile": "none",
            "baseline_file": "",
            "nvml": {"fake": "dgx-h100"},
            "metrics": {"listen": "off"},
            "kernel_log": {"source": "off"},
        }
        self.jobs(0)
        clocks = (self.ahead_of(clock) for clock in (time.time, time.monotonic))
        self.daemon = Daemon(lambda _running: (resolve_settings(table, "test", {}, checks), checks), "", *clocks)
        self.daemon.start()

    def ahead_of(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + self.ahead

    def jobs(self, number: int) -> None:
        """Give this number of jobs a process on the node."""
        scope = self.folder / "root" / JOBS
        shutil.rmtree(scope, ignore_errors=True)
        scope.mkdir(parents=True)
        for job in range(1, number + 1):
            (scope / f"job_{job}/step_0").mkdir(parents=True)
            (scope / f"job_{job}/step_0/cgroup.procs").write_text(f"{job}\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    node = Made(tmp_path_factory.mktemp("node"))
    yield node
    node.daemon.shut_down()


def parts(whole: object, seen: set[int]) -> Iterator[object]:
    """Yield the daemon and its parts, each once. Skip values, and Host, which reads hardware."""
    is_value = isinstance(whole, Enum | Host | Struct)
    if id(whole) in seen or is_value or not type(whole).__module__.startswith("healthd."):
        return
    seen.add(id(whole))
    yield whole
    for part in vars(whole).values():
        if hasattr(part, "__dict__"):
            yield from parts(part, seen)


def questions(part: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and the call of each query of a part."""
    for name, member in inspect.getmembers(type(part)):
        if isinstance(member, property):
            yield name, lambda name=name: getattr(part, name)
        elif name in ASKED:
            yield name, getattr(part, name)


def test_the_parts_of_a_daemon_are_found_with_their_questions(made: Made) -> None:
    asked = {(type(part).__name__, name) for part in parts(made.daemon, set()) for name, _ in questions(part)}
    assert {
        *(
            ("WorkerQueue", "deadline"),
            ("JobPresence", "is_idle"),
            ("Scheduler", "scheduled"),
            ("KernelEventIntake", "waits"),
        ),
        *(
            ("SlurmController", "deadline"),
            ("SlurmDriver", "is_busy"),
            ("Daemon", "snapshot"),
            ("KernelLogReader", "cursor"),
        ),
        *(
            ("ConditionStore", "conditions"),
            ("WorkerClient", "waits"),
            ("StreamDelivery", "is_due"),
            ("ControlServer", "deadline"),
        ),
    } <= asked


@given(
    conditions=st.lists(conditions, max_size=4, unique_by=lambda c: c.key),
    ended=st.booleans(),
    jobs=st.integers(0, 2),
    goes_by=seconds,
    mode=st.sampled_from(list(Mode)),
    node=st.sampled_from([None, ALLOCATED, DRAINED]),
    read_ago=seconds,
    reason=st.sampled_from(["", "healthd: gpu_xid/79 : it fell off the bus"]),
    pause=st.none() | st.builds(lambda left: Pause(time.time() + left, "a move", "ann"), st.floats(-DAY, DAY)),
)
def test_no_question_changes_the_ledger(
    made: Made,
    conditions: list[Condition],
    ended: bool,
    jobs: int,
    goes_by: float,
    mode: Mode,
    node: NodeState | None,
    read_ago: float,
    reason: str,
    pause: Pause | None,
) -> None:
    daemon, memory = made.daemon, made.daemon.store
    made.ahead = 0.0
    daemon.scheduler.reconfigure(daemon.configured)
    made.jobs(0 if ended else 1)
    daemon.job_ended()
    made.jobs(jobs)
    made.ahead = goes_by
    daemon.controller.settings = replace(daemon.settings, mode=mode)
    driver = daemon.controller._driver
    driver.status = replace(driver.status, node=node, read_at=time.time() + goes_by - read_ago)
    memory.set_conditions({})
    memory.change(slurm=DrainRecord(reason=reason), pause=pause)
    memory.commit(ledgers.with_conditions(memory.ledger, {c.key: c for c in conditions}))
    for part in parts(daemon, set()):
        for name, ask in questions(part):
            ledger, text, past = memory.ledger, encode(memory.ledger), dict(memory.past)
            answer = ask()
            if inspect.isgenerator(answer):
                list(answer)
            assert memory.ledger is ledger, f"{type(part).__name__}.{name} changes it"
            assert (encode(memory.ledger), memory.past) == (text, past), f"{type(part).__name__}.{name} changes it"
