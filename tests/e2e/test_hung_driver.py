"""Tests with hangs, crashes and invalid answers around the daemon: driver, worker, mount, disk of the state directory.

The driver is a compiled libnvidia-ml.so.1 that writes to a frozen file system, so that a worker in it is in D state.
"""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stub_nvml
from frozen import FrozenFilesystem, HangFs, in_d_state, pending_signals, wait_for_d_state
from healthd_daemon import Healthd, condition
from requirements import require_programs, require_root
from systemd_container import SystemdContainer
from waiting import until

from healthd.agent.settings.registry import built_in_checks

STOP_SECONDS = 120.0  # hanging calls last until the test releases them
LONG = 3600.0  # only the first round runs in a test
MARK_VARIABLE = "HEALTHD_TEST_DIRECTORY"

CONFIG = f"""
interval_seconds = {LONG}
[checks.gpu_access]
timeout_seconds = %s
[checks.exec.site]
command = ["/bin/true"]
[checks.mount."/"]
""" + "".join(
    f"[checks.{name}]\ntimeout_seconds = 1\n"  # after a hang they run again twice this time later
    for name, check in built_in_checks().items()
    if check.uses == "nvml" and name != "gpu_access"
)


@pytest.fixture(autouse=True)
def process_mark(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that marks the processes of a test. A test fails if such a process exists at its end."""
    require_root()
    yield {MARK_VARIABLE: str(tmp_path)}
    end = time.monotonic() + STOP_SECONDS
    while (remaining := marked_pids(tmp_path)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert remaining == []


def marked_pids(directory: Path) -> list[int]:
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{MARK_VARIABLE}={directory}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                pids.append(int(pid))
    return pids


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenFilesystem]:
    with FrozenFilesystem(tmp_path) as filesystem:
        yield filesystem


@pytest.fixture
def driver(tmp_path: Path, disk: FrozenFilesystem, process_mark: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process whose NVML hangs in nvmlInit while the disk is frozen."""
    require_programs("gcc", packages="gcc")
    file = str(disk.path / "file")
    return {**stub_nvml.environment(tmp_path, STUB_HANG_CALL="nvmlInitWithFlags", STUB_HANG_PATH=file), **process_mark}


def outcomes(status: dict[str, Any]) -> dict[str, str]:
    return {result["check"]: result["outcome"] for result in status["results"]}


def gpu_outcomes(status: dict[str, Any]) -> set[str]:
    return {outcome for name, outcome in outcomes(status).items() if name.startswith("gpu_")}


def nvml_pids(directory: Path) -> list[int]:
    """Return the processes of a test that have loaded the driver's library."""
    pids = []
    for pid in marked_pids(directory):
        with contextlib.suppress(OSError):
            if stub_nvml.NAME in Path(f"/proc/{pid}/maps").read_text():
                pids.append(pid)
    return pids


def timed_stop(daemon: Healthd) -> float:
    start = time.monotonic()
    assert daemon.stop() == 0
    return time.monotonic() - start


# --- the driver


def test_hanging_driver_delays_only_gpu_checks_of_round(disk: FrozenFilesystem, driver: dict[str, str]) -> None:
    timeout_seconds = 20  # long enough for the queries of the test
    with disk.frozen(), Healthd(config=CONFIG % timeout_seconds, env=driver, fake_nvml="", wait=False) as daemon:
        daemon.wait_until(lambda s: True, "the daemon listens")
        worker = daemon.worker_pid()
        wait_for_d_state(worker)
        meanwhile, line = daemon.status(), daemon.verdict()
        assert meanwhile["results"] == []
        assert line.startswith("unknown ")

        after = daemon.wait_until(lambda s: s["round"]["seconds"] > 0, "the round has ended")
        assert timeout_seconds < after["round"]["seconds"] < STOP_SECONDS
        assert after["round"]["number"] == 1
        check_outcomes = outcomes(after)
        gpu_checks = {name for name in check_outcomes if name.startswith("gpu_")}
        assert len(gpu_checks) > 3
        assert check_outcomes.pop("gpu_access") == "timed_out"
        assert {check_outcomes.pop(name) for name in gpu_checks - {"gpu_access"}} == {"stuck"}
        assert {"exec", "mount", "pcie_aer"} <= set(check_outcomes)
        assert set(check_outcomes.values()) == {"completed"}
        hang = condition(after, "gpu_access/hang")
        assert hang is not None
        assert hang["severity"] == "warning"
        assert after["blocked"] == {"nvml": worker}
        word, expires, reason = daemon.verdict().split(maxsplit=2)
        assert word == "unknown"
        assert "gpu_access" in reason
        assert int(expires) > time.time()
        assert in_d_state(worker)
        assert pending_signals(worker) == set()


@pytest.mark.parametrize(
    ("timeout_seconds", "end_by"),
    [(1, "stop"), (60, "stop"), (60, "kill")],
    ids=["overdue-stopped", "at-work-stopped", "at-work-killed"],
)
def test_daemon_restarts_with_stuck_worker_and_runs_checks_after_its_end(
    disk: FrozenFilesystem, driver: dict[str, str], tmp_path: Path, timeout_seconds: float, end_by: str
) -> None:
    with Healthd(config=CONFIG % timeout_seconds, env=driver, fake_nvml="", wait=False) as daemon:
        daemon.kill()  # before its first request
        with disk.frozen():
            daemon.start()
            daemon.wait_until(lambda s: True, "the daemon listens")
            worker = daemon.worker_pid()
            wait_for_d_state(worker)
            if timeout_seconds == 1:
                daemon.wait_until(lambda s: s["round"]["seconds"] > 0, "the round has ended")
            if end_by == "kill":
                daemon.kill()
            else:
                assert timed_stop(daemon) < STOP_SECONDS
            assert in_d_state(worker)

            daemon.wait = True
            daemon.configure(CONFIG % 1)
            daemon.start()
            during_hang = daemon.status()
            assert during_hang["blocked"] == {"nvml": worker}
            assert during_hang["round"]["seconds"] < STOP_SECONDS
            assert outcomes(during_hang)["gpu_access"] == "stuck"
            assert outcomes(during_hang)["exec"] == "completed"
            assert condition(during_hang, "gpu_access/hang") is not None
            assert nvml_pids(tmp_path) == [worker]
            assert pending_signals(worker) == set()
        daemon.wait_until(lambda s: s["blocked"] == {}, "the stuck worker has ended")
        assert worker not in marked_pids(tmp_path)
        daemon.wait_until(lambda s: gpu_outcomes(s) == {"completed"}, "GPU checks complete again")
        daemon.wait_until(lambda s: len(s["inventory"]["gpus"]) == 2, "the GPUs are in the inventory")
        assert timed_stop(daemon) < STOP_SECONDS


# --- the driver, under systemd


@pytest.fixture
def stuck_worker(
    request: pytest.FixtureRequest, disk: FrozenFilesystem, driver: dict[str, str], tmp_path: Path
) -> Iterator[tuple[SystemdContainer, int]]:
    """Start the unit, with the parameter as a line of [Service], and a worker that is stuck in the driver.

    Yield the container and the worker's pid inside.
    """
    stub = stub_nvml.build(tmp_path)
    with SystemdContainer(binds=[disk.path, stub]) as box, disk.frozen():
        settings = '[kernel_log]\nsource = "off"\n[metrics]\nlisten = "off"\n'
        box.install_healthd(CONFIG % 1 + settings)
        names = ("LD_LIBRARY_PATH", "STUB_HANG_CALL", "STUB_HANG_PATH")
        service_line = getattr(request, "param", "")
        lines = [
            "[Service]",
            "RestartSec=0.2",
            service_line,
            *(f'Environment="{name}={driver[name]}"' for name in names),
        ]
        box.write("/etc/systemd/system/healthd.service.d/test.conf", "\n".join([*lines, ""]))
        box.systemctl("daemon-reload")
        box.systemctl("start", "healthd")
        worker = box.status()["blocked"]["nvml"]
        until(lambda: in_d_state(worker, proc_of(box)), "the worker hangs in the driver")
        yield box, worker


def proc_of(box: SystemdContainer) -> Path:
    return box.path("/proc")


def test_systemd_restart_keeps_stuck_worker(stuck_worker: tuple[SystemdContainer, int], disk: FrozenFilesystem) -> None:
    box, worker = stuck_worker
    assert pending_signals(worker, proc_of(box)) == set()
    start = time.monotonic()
    box.systemctl("restart", "healthd")
    assert time.monotonic() - start < STOP_SECONDS
    assert box.status()["blocked"] == {"nvml": worker}
    assert in_d_state(worker, proc_of(box))
    assert pending_signals(worker, proc_of(box)) == set()
    disk.thaw()
    until(lambda: not (proc_of(box) / str(worker)).exists(), "the stuck worker has ended")
    until(lambda: gpu_outcomes(box.status()) == {"completed"}, "GPU checks complete again")


# 20 s are longer than a stall of a busy machine.
@pytest.mark.parametrize("stuck_worker", ["WatchdogSec=20"], indirect=True, ids=[""])
def test_watchdog_timeout_keeps_stuck_worker(
    stuck_worker: tuple[SystemdContainer, int],
) -> None:
    box, worker = stuck_worker
    box.exec("kill", "-STOP", box.show("healthd", "MainPID"))
    box.wait_for_property("healthd", "NRestarts", "1")
    box.wait_for_property("healthd", "ActiveState", "active")
    assert "Watchdog timeout" in box.log("healthd")
    assert box.status()["blocked"] == {"nvml": worker}
    assert in_d_state(worker, proc_of(box))
    assert pending_signals(worker, proc_of(box)) == set()


# --- a faulty worker

MISBEHAVIOUR = {
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "failed", "the worker died (signal 11)"),
    "exits": ("os._exit(7)", "failed", "the worker died (exit status 7)"),
    "babbles": ("os.write(stream(), b'hello')", "failed", "the worker sent an invalid answer"),
    "pretends": ('os.write(stream(), b\'{"error": ""}\\n\')', "failed", "the worker sent an invalid answer"),
    "floods": ("os.write(stream(), b'x' * (9 << 20))", "failed", "the worker's answer exceeds 8 MiB"),
    "hangs_up": ("os.close(stream()); time.sleep(3600)", "failed", "the worker died"),
    "never_ends": ("time.sleep(3600)", "timed_out", "no answer within 1 s"),
}

SITE_CHECK = """
import os, signal, stat, time

def stream():
    for name in os.listdir("/proc/self/fd"):
        path = "/proc/self/fd/" + name
        if int(name) > 2 and os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            return int(name)

def run(host, config, past):
    yield from ()
"""


def test_round_continues_with_new_worker_after_faulty_one(tmp_path: Path, process_mark: dict[str, str]) -> None:
    directory = tmp_path / "checks"
    directory.mkdir(mode=0o755)
    for name, (body, _, _) in MISBEHAVIOUR.items():
        (directory / f"site_{name}.py").write_text(SITE_CHECK + textwrap.indent(body, "    ") + "\n")
        (directory / f"site_{name}_then.py").write_text(SITE_CHECK)
    config = f'interval_seconds = {LONG}\nchecks_dir = "{directory}"\n[checks.site_never_ends]\ntimeout_seconds = 1\n'
    with Healthd(config=config, env=process_mark) as daemon:
        status = daemon.status()
        assert status["round"]["number"] == 1
        results = {result["check"]: result for result in status["results"]}
        for name, (_, outcome, error) in MISBEHAVIOUR.items():
            bad = results.pop(f"site_{name}")
            # On a busy machine, a worker whose end is detected late is killed; its exit status may arrive even later.
            late_errors = ("the worker died (signal 9)", "the worker died") if name in ("crashes", "exits") else ()
            error_text = error if bad["error"] in late_errors else bad["error"]
            assert (bad["outcome"], error_text[: len(error)]) == (outcome, error)
        assert set(MISBEHAVIOUR) == {name[5:-5] for name in results if name.startswith("site_")}
        assert {result["outcome"] for result in results.values()} == {"completed"}
        assert min(result["started"] for result in results.values()) >= status["round"]["started"] - 0.1
        assert status["round"]["seconds"] < 3 * STOP_SECONDS
        assert status["blocked"] == {}


# --- mounts and disks


def test_hanging_mount_delays_only_its_own_check(tmp_path: Path, process_mark: dict[str, str]) -> None:
    with HangFs(tmp_path) as mount:
        point = str(mount.path)
        table = f'interval_seconds = {LONG}\n[checks.exec.site]\ncommand = ["/bin/true"]\n[checks.mount."/"]\n'
        # Not earlier: the worker must be in the mount when it is terminated.
        with Healthd(config=f'{table}[checks.mount."{point}"]\ntimeout_seconds = 8\n', env=process_mark) as daemon:
            status = daemon.status()
            hang = condition(status, "mount/hang", point)
            assert hang is not None
            assert (hang["severity"], status["health"]) == ("warning", "unknown")
            check_outcomes = {(result["check"], result["instance"]): result["outcome"] for result in status["results"]}
            assert check_outcomes.pop(("mount", point)) == "timed_out"
            assert {("exec", "site"), ("mount", "/"), ("gpu_access", "")} <= set(check_outcomes)
            assert set(check_outcomes.values()) == {"completed"}
            assert status["round"]["seconds"] < STOP_SECONDS
            worker = status["blocked"][f"mount {point}"]
            wait_for_d_state(worker)  # it has just been terminated
            assert timed_stop(daemon) < STOP_SECONDS
            daemon.start()
            assert daemon.status()["blocked"] == {f"mount {point}": worker}
            assert timed_stop(daemon) < STOP_SECONDS


def test_hanging_state_directory_does_not_stop_daemon(
    disk: FrozenFilesystem, tmp_path: Path, process_mark: dict[str, str]
) -> None:
    short_interval = "interval_seconds = 2\n"
    with (
        disk.frozen(),
        HangFs(tmp_path) as hanging_mount,
        Healthd("--state-dir", str(disk.path / "state"), config=short_interval, env=process_mark) as writing,
        Healthd("--state-dir", str(hanging_mount.path), config=short_interval, env=process_mark, wait=False) as reading,
    ):
        stopped = Healthd("--state-dir", str(hanging_mount.path), config=short_interval, env=process_mark, wait=False)
        with stopped:
            workers = stopped.run_dir / "workers.json"
            until(lambda: workers.exists() and b"state_dir" in workers.read_bytes(), "it reads the copy")
            assert timed_stop(stopped) < STOP_SECONDS
        assert not (stopped.run_dir / "ledger.json").exists()  # the copy still takes precedence

        start = time.monotonic()
        first = writing.status()["round"]["number"]
        writing.wait_until(lambda s: "state_dir" in s["blocked"], "the worker that writes the copy is given up")
        writing.wait_until(lambda s: s["round"]["number"] > first + 1, "the rounds continue")
        assert "the worker could not write events: no answer within 20 s" in writing.log.read_text()
        assert timed_stop(writing) < STOP_SECONDS
        writing.start()
        assert "state_dir" in writing.status()["blocked"]
        disk.thaw()
        until((disk.path / "state/ledger.json").exists, "the copy is written later")
        assert writing.status()["blocked"] == {}
        assert timed_stop(writing) < STOP_SECONDS

        reading.wait_until(lambda s: s["round"]["seconds"] > 0, "the start is bounded")
        assert time.monotonic() - start < 5 * STOP_SECONDS
        assert "the copy of the ledger in" in reading.log.read_text()
        assert "state_dir" in reading.status()["blocked"]
        assert timed_stop(reading) < STOP_SECONDS
