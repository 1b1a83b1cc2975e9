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
QUERY_METHODS = {"waits", "scheduled", "expected", "completed", "snapshot", "problems", "changed"}

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


class DaemonNode:
    """A daemon with a fake root and clocks that can be advanced."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock_offset = folder, 0.0
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
        self.set_jobs(0)
        clocks = (self.shifted(clock) for clock in (time.time, time.monotonic))
        self.daemon = Daemon(lambda _running: (resolve_settings(table, "test", {}, checks), checks), "", *clocks)
        self.daemon.start()

    def shifted(self, clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + self.clock_offset

    def set_jobs(self, job_count: int) -> None:
        """Give this number of jobs a process on the node."""
        scope = self.folder / "root" / JOBS
        shutil.rmtree(scope, ignore_errors=True)
        scope.mkdir(parents=True)
        for job in range(1, job_count + 1):
            (scope / f"job_{job}/step_0").mkdir(parents=True)
            (scope / f"job_{job}/step_0/cgroup.procs").write_text(f"{job}\n")


@pytest.fixture(scope="module")
def daemon_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonNode]:
    new_node = DaemonNode(tmp_path_factory.mktemp("node"))
    yield new_node
    new_node.daemon.shut_down()


def parts(root_part: object, seen_ids: set[int]) -> Iterator[object]:
    """Yield the daemon and its parts, each once. Skip values, and Host, which reads hardware."""
    is_value = isinstance(root_part, Enum | Host | Struct)
    if id(root_part) in seen_ids or is_value or not type(root_part).__module__.startswith("healthd."):
        return
    seen_ids.add(id(root_part))
    yield root_part
    for part in vars(root_part).values():
        if hasattr(part, "__dict__"):
            yield from parts(part, seen_ids)


def iter_queries(part: object) -> Iterator[tuple[str, Any]]:
    """Yield the name and the call of each query of a part."""
    for name, member in inspect.getmembers(type(part)):
        if isinstance(member, property):
            yield name, lambda name=name: getattr(part, name)
        elif name in QUERY_METHODS:
            yield name, getattr(part, name)


def test_parts_and_queries_are_found(daemon_node: DaemonNode) -> None:
    found_queries = {
        (type(part).__name__, name) for part in parts(daemon_node.daemon, set()) for name, _ in iter_queries(part)
    }
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
    } <= found_queries


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
def test_queries_do_not_change_ledger(
    daemon_node: DaemonNode,
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
    daemon, condition_store = daemon_node.daemon, daemon_node.daemon.store
    daemon_node.clock_offset = 0.0
    daemon.scheduler.reconfigure(daemon.configured)
    daemon_node.set_jobs(0 if ended else 1)
    daemon.job_ended()
    daemon_node.set_jobs(jobs)
    daemon_node.clock_offset = goes_by
    daemon.controller.settings = replace(daemon.settings, mode=mode)
    driver = daemon.controller._driver
    driver.status = replace(driver.status, node=node, read_at=time.time() + goes_by - read_ago)
    condition_store.set_conditions({})
    condition_store.change(slurm=DrainRecord(reason=reason), pause=pause)
    condition_store.commit(ledgers.with_conditions(condition_store.ledger, {c.key: c for c in conditions}))
    for part in parts(daemon, set()):
        for name, query in iter_queries(part):
            ledger, text, past = condition_store.ledger, encode(condition_store.ledger), dict(condition_store.past)
            answer = query()
            if inspect.isgenerator(answer):
                list(answer)
            assert condition_store.ledger is ledger, f"{type(part).__name__}.{name} changes it"
            assert (encode(condition_store.ledger), condition_store.past) == (text, past), (
                f"{type(part).__name__}.{name} changes it"
            )
