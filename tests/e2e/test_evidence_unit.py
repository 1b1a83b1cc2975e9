"""The units that collect evidence, under a real systemd: the daemon in its sandbox requests, the path unit starts the
collector, a hung bug report ends at its deadline, and a collector that cannot start is given up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from healthd_daemon import xid_line
from systemd_container import SystemdContainer
from waiting import until

SECONDS = 300
KERNEL_LOG = "/var/log/healthd-test.log"
# The bug report starts processes that leave its process group and its session.
HUNG_BUG_REPORT = """#!/bin/sh
echo report | gzip >"$3.gz"
setsid sh -c 'exec -a evidence-orphan sleep 6000' &
exec -a evidence-bug-report sleep 6000
"""
CONFIG = f"""
interval_seconds = 1.0
[nvml]
fake = "dgx-h100"
[kernel_log]
source = "{KERNEL_LOG}"
trust_file = true
[metrics]
listen = "off"
[evidence]
timeout_seconds = 5.0
[checks.processes]
enabled = false
"""


@pytest.fixture
def box() -> Iterator[SystemdContainer]:
    with SystemdContainer() as running:
        running.write(KERNEL_LOG, "")
        running.write("/usr/local/sbin/nvidia-bug-report.sh", HUNG_BUG_REPORT.replace("/bin/sh", "/bin/bash"), 0o755)
        running.install_healthd(CONFIG)
        yield running


def wait_for_evidence(box: SystemdContainer, is_reached: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def reached() -> bool:
        found.update(box.status().get("evidence") or {})
        return bool(found and is_reached(found))

    until(reached, f"the evidence is as expected; {box.log('healthd-evidence')[-2000:]}", SECONDS)
    return found


def open_fault(box: SystemdContainer) -> None:
    box.systemctl("start", "healthd")
    box.exec("sh", "-c", f"echo {xid_line(79)!r} >>{KERNEL_LOG}")


def test_path_unit_starts_collector_for_sandboxed_daemon(box: SystemdContainer) -> None:
    open_fault(box)
    evidence = wait_for_evidence(box, lambda found: found["path"])
    assert (evidence["stage"], evidence["error"]) == ("waiting", "")
    assert box.show("healthd-evidence.path", "ActiveState") == "active"
    assert box.exec("stat", "-c", "%a %U", evidence["path"]).stdout.split() == ["600", "root"]
    files = json.loads(box.exec("healthd", "evidence", "show", "--json").stdout)["files"]
    assert {"first/record.rec", "first/journal.log"} <= {file["file"] for file in files}
    box.wait_for_property("healthd-evidence.service", "ActiveState", "inactive")
    assert box.show("healthd-evidence.service", "Result") == "success"


def test_hung_bug_report_ends_with_all_its_processes(box: SystemdContainer) -> None:
    """The collector is started by hand for the full part, because this container has no Slurm."""
    box.systemctl("start", "healthd")
    unit = box.exec("systemd-run", "--wait", "--pipe", "healthd", "evidence", "collect", "--now", "--full", check=False)
    assert unit.returncode == 0, unit.stderr
    shown = json.loads(box.exec("healthd", "evidence", "show", "--json").stdout)
    problems = {entry["file"]: entry["problem"] for part in shown["parts"] for entry in part["entries"]}
    assert problems["nvidia-bug-report.log.gz"]
    assert [file for file in shown["files"] if file["file"] == "full/nvidia-bug-report.log.gz" and file["bytes"]]
    assert box.exec("pgrep", "-f", "evidence-orphan|evidence-bug-report", check=False).stdout == ""


def test_killed_collector_starts_again_and_takes_its_programs_with_it(box: SystemdContainer) -> None:
    slow = "#!/bin/bash\nexec -a evidence-slow sleep 6000\n"
    box.write("/usr/local/sbin/journalctl", slow, 0o755)
    open_fault(box)
    until(lambda: box.exec("pgrep", "-f", "evidence-slow", check=False).stdout, "the collector runs", SECONDS)
    box.exec("rm", "/usr/local/sbin/journalctl")
    box.systemctl("kill", "--kill-whom=main", "--signal=KILL", "healthd-evidence.service")
    wait_for_evidence(box, lambda found: found["path"])
    assert box.exec("pgrep", "-f", "evidence-slow", check=False).stdout == ""


def test_restart_of_daemon_does_not_end_collector(box: SystemdContainer) -> None:
    box.write("/usr/local/sbin/journalctl", "#!/bin/sh\nuntil [ -e /tmp/go ]; do sleep 0.1; done\n", 0o755)
    open_fault(box)
    box.wait_for_property("healthd-evidence.service", "ActiveState", "activating")
    pid = box.show("healthd-evidence.service", "MainPID")
    box.systemctl("restart", "healthd")
    assert box.show("healthd-evidence.service", "MainPID") == pid
    box.exec("touch", "/tmp/go")
    wait_for_evidence(box, lambda found: found["path"])


def test_collector_that_cannot_start_is_given_up_and_reported(box: SystemdContainer) -> None:
    drop_in = "[Service]\nExecStart=\nExecStart=/bin/false\n"
    box.write("/etc/systemd/system/healthd-evidence.service.d/test.conf", drop_in)
    box.systemctl("daemon-reload")
    open_fault(box)
    box.wait_for_property("healthd-evidence.path", "ActiveState", "failed", SECONDS)
    until(
        lambda: [problem for problem in box.status()["problems"] if problem.startswith("evidence: ")],
        "the request that is not served is a problem",
        SECONDS,
    )
