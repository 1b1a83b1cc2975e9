"""A service that talks through healthd.service, under a real systemd: what the manager and the journal make of it."""

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
if len(sys.argv) > 1:  # a worker that writes to a disk which may be frozen
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


WATCHED = "WatchdogSec=20"  # for a service that hangs: a stall of a busy machine is shorter


def install(box: SystemdContainer, name: str, *arguments: str, more: str = "") -> None:
    """The project's unit with the service above in the daemon's place. `more`: a line of [Service]."""
    box.write(f"/opt/{name}.py", SERVICE)
    words = " ".join(f'"{word}"' for word in (sys.executable, f"/opt/{name}.py", *arguments))
    settings = ["ExecStart=", f"ExecStart={words}", f'Environment="PYTHONPATH={CHECKOUT}"']
    settings += ["RestartSec=0.2", "ExecReload=", "ExecReload=/bin/kill -HUP $MAINPID", more]
    box.write(f"/etc/systemd/system/{name}.service.d/test.conf", "\n".join(["[Service]", *settings, ""]))
    box.install_unit(f"{name}.service", UNIT)


def test_the_interpreter_and_this_checkout_work_inside(box: SystemdContainer) -> None:
    program = "import healthd, systemd.journal, psutil, pyudev, sqlite3, ssl, ctypes; print(healthd.__file__)"
    inside = box.exec("env", f"PYTHONPATH={CHECKOUT}", sys.executable, "-c", program)
    assert Path(inside.stdout.strip()).is_relative_to(CHECKOUT)


def test_a_command_that_fails_says_so_with_its_output(box: SystemdContainer) -> None:
    with pytest.raises(ContainerError, match=r"sh -c 'echo no; exit 3': exit status 3\nno"):
        box.exec("sh", "-c", "echo no; exit 3")


def test_a_killed_test_leaves_no_container_running() -> None:
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
    until(lambda: not leader.exists(), "its PID 1 is gone")

    def cleaned_up() -> bool:
        clean_up(Path(directory), [Path(cgroup) for cgroup in cgroups])
        return not any(Path(cgroup).exists() for cgroup in cgroups)

    until(cleaned_up, "what it ran has left its cgroups")


def test_the_manager_hears_that_the_service_is_ready_and_lives(box: SystemdContainer) -> None:
    install(box, "alive")
    box.systemctl("start", "alive")
    assert box.show("alive", "StatusText") == "watched every 900.0 s"
    pid = box.show("alive", "MainPID")
    told = box.show("alive", "WatchdogTimestampMonotonic")
    until(lambda: box.show("alive", "WatchdogTimestampMonotonic") != told, "the manager hears that it lives")
    assert (box.show("alive", "MainPID"), box.show("alive", "NRestarts")) == (pid, "0")
    box.systemctl("stop", "alive")
    assert box.show("alive", "Result") == "success"


def test_a_service_that_hangs_is_started_again(box: SystemdContainer) -> None:
    install(box, "hung", more=WATCHED)
    box.systemctl("start", "hung")
    box.systemctl("reload", "hung")
    box.wait("hung", "NRestarts", "1")
    box.wait("hung", "ActiveState", "active")
    assert "Watchdog timeout" in box.log("hung")
    box.systemctl("stop", "hung")


def test_the_journal_has_priority_and_fields(box: SystemdContainer) -> None:
    install(box, "speaking")
    box.systemctl("start", "speaking")
    box.exec("journalctl", "--sync")
    lines = box.exec("journalctl", "-u", "speaking", "-o", "json", "SYSLOG_IDENTIFIER=healthd").stdout.splitlines()
    entry = json.loads(lines[0])
    found = entry["MESSAGE"], entry["PRIORITY"], entry["HEALTHD_CODE"]
    assert found == ("two GPUs", "4", "gpu_count/missing")
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
    words = (sys.executable, "-m", "healthd", "run", "--config", "/opt/healthd.toml", "--fake-nvml", "dgx-h100")
    start = "ExecStart=" + " ".join(f'"{word}"' for word in words)
    settings = ["[Service]", "ExecStart=", start, f'Environment="PYTHONPATH={CHECKOUT}"', ""]
    box.write("/etc/systemd/system/healthd.service.d/test.conf", "\n".join(settings))
    box.install_unit("healthd.service", UNIT)


def test_slurmd_is_started_after_the_first_verdict(box: SystemdContainer) -> None:
    install_healthd(box)
    # slurmd's own unit says nothing of healthd
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


def test_journal_has_each_event_with_its_fields_and_one_entry_for_the_checks_of_a_start(box: SystemdContainer) -> None:
    install_healthd(box)
    box.systemctl("start", "healthd")
    events = ("cat", "/var/lib/healthd/events.jsonl")
    until(lambda: '"opened"' in box.exec(*events, check=False).stdout, "what the start told is written")
    box.systemctl("stop", "healthd")
    box.exec("journalctl", "--sync")
    file = box.exec(*events).stdout.splitlines()
    told = [json.loads(line) for line in file]
    journal = box.exec("journalctl", "-o", "json", "--all", "SYSLOG_IDENTIFIER=healthd-events").stdout.splitlines()
    found = list(map(json.loads, journal))
    entries = {(e["HEALTHD_STREAM_ID"], int(e["HEALTHD_SEQ"])): e for e in found if "HEALTHD_SEQ" in e}
    others = {key for key, e in entries.items() if e["HEALTHD_EVENT"] != "check_enabled"}
    assert {(e["stream_id"], e["seq"]) for e in told if e["event"] != "check_enabled"} == others
    checks = [e["check"] for e in told if e["event"] == "check_enabled"]
    enabled = [e["MESSAGE"] for e in found if e["HEALTHD_EVENT"] == "check_enabled"]
    assert 0 < len(enabled) < len(checks)
    assert all(f" {check}" in " ".join(enabled) for check in checks)
    opened = next(e for e in told if e["event"] == "opened")
    entry = entries[opened["stream_id"], opened["seq"]]
    assert (entry["MESSAGE"], entry["HEALTHD_EVENT"]) == ("opened exec exec/critical slow: broken", "opened")
    assert (entry["HEALTHD_CODE"], entry["HEALTHD_FIRST"]) == ("exec/critical", opened["first"])


# --- a reload


@pytest.fixture(scope="module")
def reloaded(box: SystemdContainer) -> SystemdContainer:
    """healthd.service as it is, started."""
    box.exec("rm", "-rf", "/etc/systemd/system/healthd.service.d")
    box.write("/opt/kernel.log", "")
    box.install_healthd(SETTINGS)
    box.systemctl("restart", "healthd")
    return box


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ('mode = "dran"\n', '/etc/healthd/healthd.toml: mode: "dran" is not one of '),
        ("mode = \n", "/etc/healthd/healthd.toml: not TOML: "),
    ],
)
def test_a_refused_reload_fails_and_says_why(reloaded: SystemdContainer, wrong: str, sentence: str) -> None:
    box = reloaded
    daemon = box.show("healthd", "MainPID")
    box.write("/etc/healthd/healthd.toml", wrong)
    done = box.exec("systemctl", "reload", "healthd", check=False)
    assert done.returncode != 0
    assert "Job for healthd.service failed" in done.stderr
    assert box.show("healthd", "StatusText").startswith(f"settings not reloaded: {sentence}")
    assert sentence in box.exec("systemctl", "status", "--no-pager", "healthd", check=False).stdout
    assert sentence in box.log("healthd")
    said = box.status("--runtime-dir", "/run/healthd")
    assert [one for one in said["problems"] if f"the settings were not reloaded: {sentence}" in one]
    assert said["mode"] == "observe"
    assert (box.show("healthd", "MainPID"), box.show("healthd", "ActiveState")) == (daemon, "active")

    box.write("/etc/healthd/healthd.toml", SETTINGS.replace("observe", "drain"))
    box.systemctl("reload", "healthd")  # fails the test where it fails
    now = box.status()
    assert (now["mode"], [one for one in now["problems"] if "settings" in one]) == ("drain", [])
    assert box.show("healthd", "StatusText").startswith(now["health"])
    assert box.show("healthd", "MainPID") == daemon
    box.write("/etc/healthd/healthd.toml", SETTINGS)
    box.systemctl("reload", "healthd")


def test_sighup_reads_the_settings_too(reloaded: SystemdContainer) -> None:
    box = reloaded
    box.write("/etc/healthd/healthd.toml", SETTINGS.replace("observe", "drain"))
    box.systemctl("kill", "--signal=HUP", "--kill-who=main", "healthd")
    until(lambda: box.status()["mode"] == "drain", "it is read")
    box.systemctl("stop", "healthd")


def host_pid(word: str) -> int:
    """The pid on this machine of the shell that has `word` in its command line."""
    found = subprocess.run(["pgrep", "--oldest", "-f", f"^/bin/sh .*{word}"], capture_output=True, text=True)
    return int(found.stdout)


def test_a_restart_leaves_a_worker_in_d_state_alone_and_is_not_held_up(tmp_path: Path) -> None:
    with FrozenFilesystem(tmp_path) as disk, SystemdContainer(binds=[disk.path]) as box, disk.frozen():
        install(box, "stuck", str(disk.path / "file"), more=WATCHED)
        box.systemctl("start", "stuck")
        first = box.show("stuck", "MainPID")
        box.exec("kill", "-HUP", first)
        writer = box.exec("pgrep", "--parent", first).stdout.strip()
        box.wait("stuck", "NRestarts", "1")  # the worker's pipe closed with the daemon, so it writes now
        outside = host_pid(str(disk.path / "file"))
        wait_for_d_state(outside)
        before = box.log("stuck")
        box.systemctl("restart", "stuck")
        assert "timed out" not in box.log("stuck").removeprefix(before), "it is not waited for until a time is over"
        assert in_d_state(outside)
        assert writer in box.exec("ps", "-o", "pid", "-A").stdout
        box.systemctl("stop", "stuck")
