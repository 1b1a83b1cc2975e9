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
MARK = "HEALTHD_TEST_DIRECTORY"

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
def mark(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the environment that marks the processes of a test. A test fails if such a process exists at its end."""
    require_root()
    yield {MARK: str(tmp_path)}
    end = time.monotonic() + STOP_SECONDS
    while (left := marked(tmp_path)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def marked(directory: Path) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{MARK}={directory}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
    return found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenFilesystem]:
    with FrozenFilesystem(tmp_path) as made:
        yield made


@pytest.fixture
def driver(tmp_path: Path, disk: FrozenFilesystem, mark: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process whose NVML hangs in nvmlInit while the disk is frozen."""
    require_programs("gcc", packages="gcc")
    file = str(disk.path / "file")
    return {**stub_nvml.environment(tmp_path, STUB_HANG_CALL="nvmlInitWithFlags", STUB_HANG_PATH=file), **mark}


def outcomes(status: dict[str, Any]) -> dict[str, str]:
    return {result["check"]: result["outcome"] for result in status["results"]}


def gpu_outcomes(status: dict[str, Any]) -> set[str]:
    return {outcome for name, outcome in outcomes(status).items() if name.startswith("gpu_")}


def nvml_workers(directory: Path) -> list[int]:
    """Return the processes of a test that have loaded the driver's library."""
    found = []
    for pid in marked(directory):
        with contextlib.suppress(OSError):
            if stub_nvml.NAME in Path(f"/proc/{pid}/maps").read_text():
                found.append(pid)
    return found


def timed_stop(daemon: Healthd) -> float:
    began = time.monotonic()
    assert daemon.stop() == 0
    return time.monotonic() - began


# --- the driver


def test_a_driver_that_hangs_costs_a_round_its_gpu_checks_and_nothing_else(
    disk: FrozenFilesystem, driver: dict[str, str]
) -> None:
    timeout_seconds = 20  # long enough for the queries of the test
    with disk.frozen(), Healthd(config=CONFIG % timeout_seconds, env=driver, fake_nvml="", wait=False) as daemon:
        daemon.until(lambda s: True, "the daemon listens")
        worker = daemon.worker()
        wait_for_d_state(worker)
        meanwhile, line = daemon.status(), daemon.verdict()
        assert meanwhile["results"] == []
        assert line.startswith("unknown ")

        after = daemon.until(lambda s: s["round"]["seconds"] > 0, "the round has ended")
        assert timeout_seconds < after["round"]["seconds"] < STOP_SECONDS
        assert after["round"]["number"] == 1
        found = outcomes(after)
        gpu_checks = {name for name in found if name.startswith("gpu_")}
        assert len(gpu_checks) > 3
        assert found.pop("gpu_access") == "timed_out"
        assert {found.pop(name) for name in gpu_checks - {"gpu_access"}} == {"stuck"}
        assert {"exec", "mount", "pcie_aer"} <= set(found)
        assert set(found.values()) == {"completed"}
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
    ("timeout_seconds", "way"),
    [(1, "stop"), (60, "stop"), (60, "kill")],
    ids=["overdue-stopped", "at-work-stopped", "at-work-killed"],
)
def test_a_daemon_stops_and_starts_beside_a_stuck_worker_and_asks_again_when_it_is_gone(
    disk: FrozenFilesystem, driver: dict[str, str], tmp_path: Path, timeout_seconds: float, way: str
) -> None:
    with Healthd(config=CONFIG % timeout_seconds, env=driver, fake_nvml="", wait=False) as daemon:
        daemon.kill()  # before its first request
        with disk.frozen():
            daemon.start()
            daemon.until(lambda s: True, "the daemon listens")
            worker = daemon.worker()
            wait_for_d_state(worker)
            if timeout_seconds == 1:
                daemon.until(lambda s: s["round"]["seconds"] > 0, "the round has ended")
            if way == "kill":
                daemon.kill()
            else:
                assert timed_stop(daemon) < STOP_SECONDS
            assert in_d_state(worker)

            daemon.wait = True
            daemon.configure(CONFIG % 1)
            daemon.start()
            beside = daemon.status()
            assert beside["blocked"] == {"nvml": worker}
            assert beside["round"]["seconds"] < STOP_SECONDS
            assert outcomes(beside)["gpu_access"] == "stuck"
            assert outcomes(beside)["exec"] == "completed"
            assert condition(beside, "gpu_access/hang") is not None
            assert nvml_workers(tmp_path) == [worker]
            assert pending_signals(worker) == set()
        daemon.until(lambda s: s["blocked"] == {}, "the stuck worker has ended")
        assert worker not in marked(tmp_path)
        daemon.until(lambda s: gpu_outcomes(s) == {"completed"}, "GPU checks complete again")
        daemon.until(lambda s: len(s["inventory"]["gpus"]) == 2, "the GPUs are in the inventory")
        assert timed_stop(daemon) < STOP_SECONDS


# --- the driver, under systemd


@pytest.fixture
def stuck(
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
        more = getattr(request, "param", "")
        lines = ["[Service]", "RestartSec=0.2", more, *(f'Environment="{n}={driver[n]}"' for n in names)]
        box.write("/etc/systemd/system/healthd.service.d/test.conf", "\n".join([*lines, ""]))
        box.systemctl("daemon-reload")
        box.systemctl("start", "healthd")
        worker = box.status()["blocked"]["nvml"]
        until(lambda: in_d_state(worker, proc(box)), "the worker hangs in the driver")
        yield box, worker


def proc(box: SystemdContainer) -> Path:
    return box.path("/proc")


def test_a_restart_by_systemd_leaves_the_stuck_worker_alone(
    stuck: tuple[SystemdContainer, int], disk: FrozenFilesystem
) -> None:
    box, worker = stuck
    assert pending_signals(worker, proc(box)) == set()
    began = time.monotonic()
    box.systemctl("restart", "healthd")
    assert time.monotonic() - began < STOP_SECONDS
    assert box.status()["blocked"] == {"nvml": worker}
    assert in_d_state(worker, proc(box))
    assert pending_signals(worker, proc(box)) == set()
    disk.thaw()
    until(lambda: not (proc(box) / str(worker)).exists(), "the stuck worker has ended")
    until(lambda: gpu_outcomes(box.status()) == {"completed"}, "GPU checks complete again")


@pytest.mark.parametrize("stuck", ["WatchdogSec=20"], indirect=True, ids=[""])  # longer than a stall of a busy machine
def test_a_watchdog_that_expires_leaves_the_stuck_worker_alone(
    stuck: tuple[SystemdContainer, int],
) -> None:
    box, worker = stuck
    box.exec("kill", "-STOP", box.show("healthd", "MainPID"))
    box.wait("healthd", "NRestarts", "1")
    box.wait("healthd", "ActiveState", "active")
    assert "Watchdog timeout" in box.log("healthd")
    assert box.status()["blocked"] == {"nvml": worker}
    assert in_d_state(worker, proc(box))
    assert pending_signals(worker, proc(box)) == set()


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


def test_a_round_goes_on_with_a_fresh_worker_after_one_that_misbehaves(tmp_path: Path, mark: dict[str, str]) -> None:
    directory = tmp_path / "checks"
    directory.mkdir(mode=0o755)
    for name, (body, _, _) in MISBEHAVIOUR.items():
        (directory / f"site_{name}.py").write_text(SITE_CHECK + textwrap.indent(body, "    ") + "\n")
        (directory / f"site_{name}_then.py").write_text(SITE_CHECK)
    config = f'interval_seconds = {LONG}\nchecks_dir = "{directory}"\n[checks.site_never_ends]\ntimeout_seconds = 1\n'
    with Healthd(config=config, env=mark) as daemon:
        status = daemon.status()
        assert status["round"]["number"] == 1
        results = {result["check"]: result for result in status["results"]}
        for name, (_, outcome, error) in MISBEHAVIOUR.items():
            bad = results.pop(f"site_{name}")
            # On a busy machine, a worker whose end is detected late is killed; its exit status may arrive even later.
            late = ("the worker died (signal 9)", "the worker died") if name in ("crashes", "exits") else ()
            told = error if bad["error"] in late else bad["error"]
            assert (bad["outcome"], told[: len(error)]) == (outcome, error)
        assert set(MISBEHAVIOUR) == {name[5:-5] for name in results if name.startswith("site_")}
        assert {result["outcome"] for result in results.values()} == {"completed"}
        assert min(result["started"] for result in results.values()) >= status["round"]["started"] - 0.1
        assert status["round"]["seconds"] < 3 * STOP_SECONDS
        assert status["blocked"] == {}


# --- mounts and disks


def test_a_mount_that_hangs_costs_a_round_its_own_check_only(tmp_path: Path, mark: dict[str, str]) -> None:
    with HangFs(tmp_path) as mount:
        point = str(mount.path)
        table = f'interval_seconds = {LONG}\n[checks.exec.site]\ncommand = ["/bin/true"]\n[checks.mount."/"]\n'
        # Not earlier: the worker must be in the mount when it is terminated.
        with Healthd(config=f'{table}[checks.mount."{point}"]\ntimeout_seconds = 8\n', env=mark) as daemon:
            status = daemon.status()
            hang = condition(status, "mount/hang", point)
            assert hang is not None
            assert (hang["severity"], status["health"]) == ("warning", "unknown")
            found = {(result["check"], result["instance"]): result["outcome"] for result in status["results"]}
            assert found.pop(("mount", point)) == "timed_out"
            assert {("exec", "site"), ("mount", "/"), ("gpu_access", "")} <= set(found)
            assert set(found.values()) == {"completed"}
            assert status["round"]["seconds"] < STOP_SECONDS
            worker = status["blocked"][f"mount {point}"]
            wait_for_d_state(worker)  # it has just been terminated
            assert timed_stop(daemon) < STOP_SECONDS
            daemon.start()
            assert daemon.status()["blocked"] == {f"mount {point}": worker}
            assert timed_stop(daemon) < STOP_SECONDS


def test_a_state_directory_whose_disk_hangs_stops_nothing(
    disk: FrozenFilesystem, tmp_path: Path, mark: dict[str, str]
) -> None:
    quick = "interval_seconds = 2\n"
    with (
        disk.frozen(),
        HangFs(tmp_path) as gone,
        Healthd("--state-dir", str(disk.path / "state"), config=quick, env=mark) as writing,
        Healthd("--state-dir", str(gone.path), config=quick, env=mark, wait=False) as reading,
    ):
        stopped = Healthd("--state-dir", str(gone.path), config=quick, env=mark, wait=False)
        with stopped:
            workers = stopped.run_dir / "workers.json"
            until(lambda: workers.exists() and b"state_dir" in workers.read_bytes(), "it reads the copy")
            assert timed_stop(stopped) < STOP_SECONDS
        assert not (stopped.run_dir / "ledger.json").exists()  # the copy still takes precedence

        began = time.monotonic()
        first = writing.status()["round"]["number"]
        writing.until(lambda s: "state_dir" in s["blocked"], "the worker that writes the copy is given up")
        writing.until(lambda s: s["round"]["number"] > first + 1, "the rounds continue")
        assert "the worker could not write events: no answer within 20 s" in writing.log.read_text()
        assert timed_stop(writing) < STOP_SECONDS
        writing.start()
        assert "state_dir" in writing.status()["blocked"]
        disk.thaw()
        until((disk.path / "state/ledger.json").exists, "the copy is written later")
        assert writing.status()["blocked"] == {}
        assert timed_stop(writing) < STOP_SECONDS

        reading.until(lambda s: s["round"]["seconds"] > 0, "the start is bounded")
        assert time.monotonic() - began < 5 * STOP_SECONDS
        assert "the copy of the ledger in" in reading.log.read_text()
        assert "state_dir" in reading.status()["blocked"]
        assert timed_stop(reading) < STOP_SECONDS
