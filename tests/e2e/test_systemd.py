"""A service started by healthd.service under a real systemd: the resulting state in systemd and the journal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen import FrozenFilesystem, in_d_state, wait_for_d_state
from systemd_container import CHECKOUT, ContainerError, SystemdContainer, clean_up
from waiting import until

E2E = Path(__file__).parent
UNIT = (CHECKOUT / "packaging/systemd/healthd.service").read_text()

SERVICE = """
import logging, os, signal, subprocess, sys, time
from healthd.agent.reporting import systemd
systemd.set_up_logging()
logging.warning("two GPUs", extra={"HEALTHD_CODE": "gpu_count/missing"})
if len(sys.argv) > 1:  # a worker whose disk may be frozen
    subprocess.Popen(["/bin/sh", "-c", "read go; echo x > " + sys.argv[1]], stdin=subprocess.PIPE)
hung = []
signal.signal(signal.SIGHUP, lambda *_: hung.append(True))
signal.signal(signal.SIGTERM, lambda *_: (systemd.stopping(), sys.exit()))
systemd.ready(f"watched every {systemd.watchdog_seconds()} s")
while True:
    if not hung:
        systemd.watchdog()
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def box() -> Iterator[SystemdContainer]:
    with SystemdContainer() as running:
        yield running


SHORT_WATCHDOG = "WatchdogSec=20"  # for a service that hangs: a busy machine stalls for less


def install(box: SystemdContainer, name: str, *arguments: str, extra_line: str = "") -> None:
    """Install the project's unit with the service above instead of the daemon. `more`: a line of [Service]."""
    box.write(f"/opt/{name}.py", SERVICE)
    command = " ".join(f'"{word}"' for word in (sys.executable, f"/opt/{name}.py", *arguments))
    settings = ["ExecStart=", f"ExecStart={command}", f'Environment="PYTHONPATH={CHECKOUT}"']
    settings += ["RestartSec=0.2", "ExecReload=", "ExecReload=/bin/kill -HUP $MAINPID", extra_line]
    box.write(f"/etc/systemd/system/{name}.service.d/test.conf", "\n".join(["[Service]", *settings, ""]))
    box.install_unit(f"{name}.service", UNIT)


def test_container_runs_interpreter_and_checkout(box: SystemdContainer) -> None:
    program = "import healthd, systemd.journal, psutil, pyudev, sqlite3, ssl, ctypes; print(healthd.__file__)"
    inside = box.exec("env", f"PYTHONPATH={CHECKOUT}", sys.executable, "-c", program)
    assert Path(inside.stdout.strip()).is_relative_to(CHECKOUT)


def test_exec_reports_failed_command_with_output(box: SystemdContainer) -> None:
    with pytest.raises(ContainerError, match=r"sh -c 'echo no; exit 3': exit status 3\nno"):
        box.exec("sh", "-c", "echo no; exit 3")


def test_killed_test_leaves_no_container_running() -> None:
    program = (
        f"import sys, time; sys.path += {[str(E2E), str(E2E.parent / 'support')]}\n"
        "from systemd_container import SystemdContainer\n"
        "box = SystemdContainer().__enter__()\n"
        "print(box.leader, box.directory, *box.cgroups, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        pid, directory, *cgroups = test.stdout.readline().split()
        leader = Path(f"/proc/{pid}")
        assert leader.exists()
        test.kill()
    until(lambda: not leader.exists(), "its PID 1 has ended")

    def cleaned_up() -> bool:
        clean_up(Path(directory), [Path(cgroup) for cgroup in cgroups])
        return not any(Path(cgroup).exists() for cgroup in cgroups)

    until(cleaned_up, "its cgroups are empty")


def test_service_reports_ready_and_watchdog_to_manager(box: SystemdContainer) -> None:
    install(box, "alive")
    box.systemctl("start", "alive")
    assert box.show("alive", "StatusText") == "watched every 900.0 s"
    pid = box.show("alive", "MainPID")
    last_watchdog = box.show("alive", "WatchdogTimestampMonotonic")
    until(
        lambda: box.show("alive", "WatchdogTimestampMonotonic") != last_watchdog,
        "the manager gets the next watchdog message",
    )
    assert (box.show("alive", "MainPID"), box.show("alive", "NRestarts")) == (pid, "0")
    box.systemctl("stop", "alive")
    assert box.show("alive", "Result") == "success"


def test_hanging_service_is_restarted(box: SystemdContainer) -> None:
    install(box, "hung", extra_line=SHORT_WATCHDOG)
    box.systemctl("start", "hung")
    box.systemctl("reload", "hung")
    box.wait_for_property("hung", "NRestarts", "1")
    box.wait_for_property("hung", "ActiveState", "active")
    assert "Watchdog timeout" in box.log("hung")
    box.systemctl("stop", "hung")


def test_journal_entry_has_priority_and_fields(box: SystemdContainer) -> None:
    install(box, "speaking")
    box.systemctl("start", "speaking")
    box.exec("journalctl", "--sync")
    lines = box.exec("journalctl", "-u", "speaking", "-o", "json", "SYSLOG_IDENTIFIER=healthd").stdout.splitlines()
    entry = json.loads(lines[0])
    message_fields = entry["MESSAGE"], entry["PRIORITY"], entry["HEALTHD_CODE"]
    assert message_fields == ("two GPUs", "4", "gpu_count/missing")
    box.systemctl("stop", "speaking")


SETTINGS = """\
mode = "observe"
[kernel_log]
source = "/opt/kernel.log"
[metrics]
listen = "off"
[checks.exec.slow]
command = ["/bin/sh", "-c", "sleep 2; echo broken; exit 2"]
"""


def install_healthd(box: SystemdContainer) -> None:
    box.write("/opt/kernel.log", "")
    box.write("/opt/healthd.toml", SETTINGS)
    command = (sys.executable, "-m", "healthd", "run", "--config", "/opt/healthd.toml", "--fake-nvml", "dgx-h100")
    start = "ExecStart=" + " ".join(f'"{word}"' for word in command)
    settings = ["[Service]", "ExecStart=", start, f'Environment="PYTHONPATH={CHECKOUT}"', ""]
    box.write("/etc/systemd/system/healthd.service.d/test.conf", "\n".join(settings))
    box.install_unit("healthd.service", UNIT)


def test_slurmd_starts_after_first_verdict(box: SystemdContainer) -> None:
    install_healthd(box)
    # The unit of slurmd does not mention healthd.
    slurmd = [
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        "ExecStart=/bin/cp /run/healthd/verdict /run/s",
        "",
    ]
    box.install_unit("slurmd.service", "\n".join(slurmd))
    box.install_unit("node.target", "[Unit]\nWants=slurmd.service healthd.service\nAfter=slurmd.service\n")
    box.systemctl("start", "node.target")
    assert "exec/critical slow: broken" in box.exec("cat", "/run/s").stdout
    box.systemctl("stop", "healthd")


def test_journal_has_each_event_and_one_entry_for_checks_of_start(box: SystemdContainer) -> None:
    install_healthd(box)
    box.systemctl("start", "healthd")
    events = ("cat", "/var/lib/healthd/events.jsonl")
    until(lambda: '"opened"' in box.exec(*events, check=False).stdout, "the events of the start are written")
    box.systemctl("stop", "healthd")
    box.exec("journalctl", "--sync")
    file = box.exec(*events).stdout.splitlines()
    file_events = [json.loads(line) for line in file]
    journal = box.exec("journalctl", "-o", "json", "--all", "SYSLOG_IDENTIFIER=healthd-events").stdout.splitlines()
    journal_entries = list(map(json.loads, journal))
    entries = {
        (event["HEALTHD_STREAM_ID"], int(event["HEALTHD_SEQ"])): event
        for event in journal_entries
        if "HEALTHD_SEQ" in event
    }
    other_events = {key for key, event in entries.items() if event["HEALTHD_EVENT"] != "check_enabled"}
    assert {
        (event["stream_id"], event["seq"]) for event in file_events if event["event"] != "check_enabled"
    } == other_events
    checks = [event["check"] for event in file_events if event["event"] == "check_enabled"]
    enabled = [event["MESSAGE"] for event in journal_entries if event["HEALTHD_EVENT"] == "check_enabled"]
    assert 0 < len(enabled) < len(checks)
    assert all(f" {check}" in " ".join(enabled) for check in checks)
    opened = next(event for event in file_events if event["event"] == "opened")
    entry = entries[opened["stream_id"], opened["seq"]]
    assert (entry["MESSAGE"], entry["HEALTHD_EVENT"]) == ("opened exec exec/critical slow: broken", "opened")
    assert (entry["HEALTHD_CODE"], entry["HEALTHD_FIRST"]) == ("exec/critical", opened["first"])


# --- reload


@pytest.fixture(scope="module")
def unmodified_service(box: SystemdContainer) -> SystemdContainer:
    """Start healthd.service without changes."""
    box.exec("rm", "-rf", "/etc/systemd/system/healthd.service.d")
    box.write("/opt/kernel.log", "")
    box.install_healthd(SETTINGS)
    box.systemctl("restart", "healthd")
    return box


@pytest.mark.parametrize(
    ("invalid_settings", "message"),
    [
        ('mode = "dran"\n', '/etc/healthd/healthd.toml: mode: "dran" is not one of '),
        ("mode = \n", "/etc/healthd/healthd.toml: not TOML: "),
    ],
)
def test_rejected_reload_fails_with_reason(
    unmodified_service: SystemdContainer, invalid_settings: str, message: str
) -> None:
    box = unmodified_service
    daemon_pid = box.show("healthd", "MainPID")
    box.write("/etc/healthd/healthd.toml", invalid_settings)
    completed = box.exec("systemctl", "reload", "healthd", check=False)
    assert completed.returncode != 0
    assert "Job for healthd.service failed" in completed.stderr
    assert box.show("healthd", "StatusText").startswith(f"settings not reloaded: {message}")
    assert message in box.exec("systemctl", "status", "--no-pager", "healthd", check=False).stdout
    assert message in box.log("healthd")
    status = box.status("--runtime-dir", "/run/healthd")
    assert [problem for problem in status["problems"] if f"the settings were not reloaded: {message}" in problem]
    assert status["mode"] == "observe"
    assert (box.show("healthd", "MainPID"), box.show("healthd", "ActiveState")) == (daemon_pid, "active")

    box.write("/etc/healthd/healthd.toml", SETTINGS.replace("observe", "drain"))
    box.systemctl("reload", "healthd")  # raises if it fails
    new_status = box.status()
    assert (new_status["mode"], [problem for problem in new_status["problems"] if "settings" in problem]) == (
        "drain",
        [],
    )
    assert box.show("healthd", "StatusText").startswith(new_status["health"])
    assert box.show("healthd", "MainPID") == daemon_pid
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    box.systemctl("reload", "healthd")


def test_sighup_reloads_settings(unmodified_service: SystemdContainer) -> None:
    box = unmodified_service
    box.write("/etc/healthd/healthd.toml", SETTINGS.replace("observe", "drain"))
    box.systemctl("kill", "--signal=HUP", "--kill-who=main", "healthd")
    until(lambda: box.status()["mode"] == "drain", "the settings are read")
    box.systemctl("stop", "healthd")


def host_pid(word: str) -> int:
    """Return the pid on this machine of the shell with `word` in its command line."""
    completed = subprocess.run(["pgrep", "--oldest", "-f", f"^/bin/sh .*{word}"], capture_output=True, text=True)
    return int(completed.stdout)


def test_restart_leaves_worker_in_d_state_and_is_not_delayed(tmp_path: Path) -> None:
    with FrozenFilesystem(tmp_path) as disk, SystemdContainer(binds=[disk.path]) as box, disk.frozen():
        install(box, "stuck", str(disk.path / "file"), extra_line=SHORT_WATCHDOG)
        box.systemctl("start", "stuck")
        main_pid = box.show("stuck", "MainPID")
        box.exec("kill", "-HUP", main_pid)
        writer = box.exec("pgrep", "--parent", main_pid).stdout.strip()
        box.wait_for_property("stuck", "NRestarts", "1")  # the worker's pipe closed with the daemon, so it writes now
        writer_host_pid = host_pid(str(disk.path / "file"))
        wait_for_d_state(writer_host_pid)
        log_before = box.log("stuck")
        box.systemctl("restart", "stuck")
        assert "timed out" not in box.log("stuck").removeprefix(log_before), "the restart does not wait for a timeout"
        assert in_d_state(writer_host_pid)
        assert writer in box.exec("ps", "-o", "pid", "-A").stdout
        box.systemctl("stop", "stuck")
