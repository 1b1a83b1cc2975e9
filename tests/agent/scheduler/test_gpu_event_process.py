"""The daemon's side of the process that receives GPU events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from healthd.agent.kernel_log.gpu_events import HOLD_SECONDS, RECOVERY_ACTION, UNAVAILABLE
from healthd.agent.scheduler.gpu_event_process import HUNG_SECONDS, MAX_RETRY_SECONDS, GpuEventProcess, Received
from healthd.agent.worker.client import start_time
from healthd.common.model import KernelEvent
from healthd.host.wakeup import FOREVER

XID = {"event": {"kind": "xid", "pci": "0000:61:00.0", "xids": [79]}, "since": 1.8e9}


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def program(*lines: object, after: str = "sys.stdin.read()") -> tuple[str, ...]:
    """Return a command that writes these lines and then does something else until its input is closed."""
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    return (sys.executable, "-c", f"import sys, time\nsys.stdout.write({text!r})\nsys.stdout.flush()\n{after}")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, command: tuple[str, ...], is_enabled: bool = True) -> GpuEventProcess:
    return GpuEventProcess(is_enabled, {}, "boot-1", clock, lambda: 1.8e9 + clock(), command=command)


@pytest.fixture
def closing() -> Iterator[list[GpuEventProcess]]:
    processes: list[GpuEventProcess] = []
    yield processes
    for process in processes:
        process.close()


def received(process: GpuEventProcess, clock: Clock, recorded: tuple[KernelEvent, ...] = ()) -> Received:
    """Return what a process sends at first, after the hold."""
    names: list[str] = []
    process.step(recorded)
    until(lambda: names.extend(process.step(recorded).triggers) or process._held or names, "it has sent its lines")
    clock.seconds += HOLD_SECONDS
    last = process.step(recorded)
    return Received(last.events, (*names, *last.triggers))


def test_disabled_process_is_not_started(clock: Clock) -> None:
    process = made(clock, ("/nonexistent",), is_enabled=False)
    assert process.step(()) == Received()
    assert (process.pids, process.deadline, list(process.waits()), process.problem) == ((), FOREVER, [], "")


def test_xid_without_line_is_an_event(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program(XID))
    closing.append(process)
    (event,) = received(process, clock).events
    assert (event.kind, event.code, event.pci, event.boot_id) == ("xid", "79", "0000:61:00.0", "boot-1")


def test_xid_with_line_is_no_second_event(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program(XID))
    closing.append(process)
    at = 1.8e9 + clock()
    line = KernelEvent("xid", "79", "0000:61:00.0", at, boot_id="boot-1", last_time=at, sequence=1)
    assert received(process, clock, (line,)).events == ()


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ({"event": {"kind": "recovery_action", "pci": "0000:61:00.0"}}, (RECOVERY_ACTION,)),
        ({"event": {"kind": "unavailable"}}, (UNAVAILABLE,)),
        ({"dropped": 12}, (UNAVAILABLE, RECOVERY_ACTION)),
    ],
)
def test_triggers_come_at_once(
    clock: Clock, closing: list[GpuEventProcess], message: object, names: tuple[str, ...]
) -> None:
    process = made(clock, program(message))
    closing.append(process)
    assert received(process, clock) == Received((), names)


def test_hanging_process_is_abandoned_and_not_killed(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program({}, after="time.sleep(600)"))
    closing.append(process)
    process.step(())
    (pid,) = process.pids
    clock.seconds += 1
    until(lambda: process.step(()) is not None and process._last_line_at == clock.seconds, "its line is read")
    clock.seconds += HUNG_SECONDS
    until(lambda: process.step(()) is not None and process._process is None, "it is abandoned")
    try:
        assert "hangs" in process.problem
        os.kill(pid, 0)  # it still exists
        assert not has_ended(pid)
        assert (process.pids, process.may_use_gpus, process.is_hung) == ((pid,), True, True)
    finally:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not process.is_hung, "it has ended")
    assert not process.may_use_gpus


def test_process_ends_for_a_repair_and_is_started_again_afterwards(
    clock: Clock, closing: list[GpuEventProcess]
) -> None:
    process = made(clock, program({}))
    closing.append(process)
    process.step(())
    (pid,) = process.pids
    assert process.may_use_gpus
    process.keep_closed(True)
    until(lambda: not process.may_use_gpus, "it has ended")
    assert has_ended(pid)
    process.step(())
    assert (process.pids, process.deadline, process.problem) == ((), FOREVER, "")
    process.keep_closed(False)
    process.step(())
    assert len(process.pids) == 1


def test_process_that_does_not_end_for_a_repair_hangs(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program({}, after="time.sleep(600)"))
    closing.append(process)
    process.step(())
    (pid,) = process.pids
    clock.seconds += 1
    until(lambda: process.step(()) is not None and process._last_line_at == clock.seconds, "its line is read")
    process.keep_closed(True)
    try:
        assert (process.may_use_gpus, process.is_hung) == (True, False)
        assert process.deadline < clock.seconds + HUNG_SECONDS
        clock.seconds += HUNG_SECONDS
        assert process.is_hung
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("content", "is_adopted"), [("{pid} {start}\n", True), ("{pid} 1\n", False), ("x", False)])
def test_process_of_an_earlier_daemon_is_adopted(tmp_path: Path, clock: Clock, content: str, is_adopted: bool) -> None:
    """A process in D state survives a restart of the daemon, also one that switches events off."""
    with subprocess.Popen(["sleep", "600"]) as earlier:
        try:
            start = start_time(earlier.pid)
            (tmp_path / "lock").write_text(content.format(pid=earlier.pid, start=start))
            setup = {"lock": str(tmp_path / "lock")}
            process = GpuEventProcess(False, setup, "boot-1", clock, lambda: 1.8e9 + clock())
            process.adopt_earlier()
            assert (process.may_use_gpus, process.is_hung) == (is_adopted, False)
            clock.seconds += HUNG_SECONDS
            assert process.is_hung is is_adopted
        finally:
            earlier.kill()
    assert not process.may_use_gpus


def test_ended_process_is_started_again_with_growing_delay(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program(after=""))
    closing.append(process)
    delays = []
    for _ in range(12):
        process.step(())
        assert process.pids
        until(lambda: process.step(()) is not None and not process.pids, "it has ended")
        delays.append(process.deadline - clock.seconds)
        clock.seconds = process.deadline
    assert delays == [min(2.0**number, MAX_RETRY_SECONDS) for number in range(12)]


def test_missing_program_is_a_problem(clock: Clock) -> None:
    process = made(clock, ("/nonexistent",))
    process.step(())
    assert "cannot start" in process.problem


def test_problem_of_the_process_is_shown_until_it_ends(clock: Clock, closing: list[GpuEventProcess]) -> None:
    process = made(clock, program({"problem": "nvmlInit: no"}, after="sys.stdin.read()"))
    closing.append(process)
    until(lambda: process.step(()) is not None and process.problem, "the problem")
    assert process.problem == "nvmlInit: no"
    process._take(b'{"problem": ""}')
    assert process.problem == ""


def test_close_returns_events_that_wait_for_a_line(clock: Clock) -> None:
    process = made(clock, program(XID))
    process.step(())
    until(lambda: process.step(()) is not None and process._held, "it is held")
    assert [event.code for event in process.close()] == ["79"]
    assert process.deadline == FOREVER
    assert process.close() == (), "only once"


def test_close_does_not_return_an_event_whose_line_was_read(clock: Clock) -> None:
    process = made(clock, program(XID))
    process.step(())
    until(lambda: process.step(()) is not None and process._held, "it is held")
    line = KernelEvent("xid", "79", "0000:61:00.0", 1.8e9, boot_id="boot-1", last_time=1.8e9, sequence=1)
    assert process.close((line,)) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["event", "since", "dropped", "problem", "kind", "xids", "pci"]), inner)
    ),
    max_leaves=8,
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_handled_or_counted(line: bytes) -> None:
    process = made(Clock(), ("/nonexistent",))
    names = process._take(line)
    assert set(names) <= {"gpu_event", UNAVAILABLE, RECOVERY_ACTION}
    assert all(entry.event.kind in ("xid", "gpu_event") for entry in process._held)


def test_real_process_with_fake_nvml_reports_events_of_a_job(tmp_path: Path) -> None:
    """A job's process has a GPU open, according to files like those of cgroups and /proc."""
    cgroup = tmp_path / "sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/user/task_0"
    cgroup.mkdir(parents=True)
    (cgroup / "cgroup.procs").write_text("4711\n")
    (tmp_path / "proc/4711/fd").mkdir(parents=True)
    (tmp_path / "proc/4711/fd/5").symlink_to("/dev/nvidia3")
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:61:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Device Minor: \t 3\n")
    (tmp_path / "gpus.toml").write_text('profile = "dgx-h100"\ngpu.3.events = [{xid = 79}]\n')
    setup = {"root": str(tmp_path), "fake_nvml": str(tmp_path / "gpus.toml"), "lock": str(tmp_path / "lock")}
    process = GpuEventProcess(True, setup, "boot-1", time.monotonic, time.time)
    found: list[KernelEvent] = []
    try:
        until(lambda: found.extend(process.step(()).events) or found, "the event comes")
        assert [(event.code, event.pci) for event in found] == [("79", "0000:61:00.0")]
        (pid,) = process.pids
        assert (tmp_path / "lock").read_text() == f"{pid} {start_time(pid)}\n"
    finally:
        process.close()
    until(lambda: has_ended(pid), "it has ended")
