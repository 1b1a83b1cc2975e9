"""Tests of the journal fields of healthd's actions in a real journal: `journalctl -u healthd NODE_ACTION=drain`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_container import CHECKOUT, SystemdContainer

from healthd.agent.settings import registry

# Replaces Slurm's commands, because the container has no slurmctld: one node, whose drain is a file.
SLURM = f"""#!{sys.executable}
import os, sys, time
sys.path[:0] = [{str(CHECKOUT)!r}, {str(CHECKOUT / "tests/support")!r}]
from healthd.common.slurm.commands import FLEET_COLUMNS
from slurm_text import columns, sinfo
words, drain = sys.argv[1:], "/opt/drained"
reason = open(drain).read() if os.path.exists(drain) else ""
if os.path.basename(sys.argv[0]) == "sinfo" and "-n" in words:
    state, since = ("idle+drain", os.stat(drain).st_mtime) if reason else ("idle", 0)
    sys.stdout.buffer.write(sinfo(state, reason or "none", since).stdout)
elif os.path.basename(sys.argv[0]) == "sinfo":
    sys.stdout.buffer.write(columns(("gpu", "idle+drain" if reason else "idle", "0", reason, "1"), FLEET_COLUMNS))
elif "State=DRAIN" in words:
    open(drain, "w").write(words[-1].removeprefix("Reason="))
elif "State=UNDRAIN" in words:
    os.remove(drain)
elif "listpids" in words:
    sys.exit("No job steps exist on this node.")
elif "partition" in words:
    print("PartitionName=gpu TotalNodes=1")
else:
    print("BOOT_TIME = 1")
"""

SETTINGS = """\
mode = "{mode}"
node_name = "n1"
interval_seconds = 10
[fleet]
jitter_seconds = 0
[kernel_log]
source = "off"
[metrics]
listen = "off"
[checks.exec.raid]
command = ["/bin/sh", "-c", "test ! -e /opt/broken || {{ echo two disks are gone; exit 2; }}"]
"""
# A resume waits for each check that can drain, and most of them cannot run in a container.
OTHER_CHECKS_OFF = "".join(
    f"[checks.{name}]\nenabled = false\n" for name in registry.built_in_checks() if name != "exec"
)


@pytest.fixture(scope="module")
def box() -> Iterator[SystemdContainer]:
    with SystemdContainer() as running:
        running.write("/usr/bin/sinfo", SLURM, 0o755)
        running.write("/usr/bin/scontrol", SLURM, 0o755)
        yield running


def journal_entries(box: SystemdContainer, *fields: str) -> list[dict[str, str]]:
    lines = box.exec("journalctl", "-u", "healthd", "-o", "json", "--all", *fields).stdout.splitlines()
    return [json.loads(line) for line in lines]


def wait_for_entry(box: SystemdContainer, *fields: str, words: str = "") -> dict[str, str]:
    """Wait for and return the first entry with these fields and this text."""
    deadline = time.monotonic() + 120
    while not (entries := [entry for entry in journal_entries(box, *fields) if words in entry["MESSAGE"]]):
        assert time.monotonic() < deadline, box.log("healthd")
        time.sleep(0.1)
    return entries[0]


def fields_of_entry(entry: dict[str, str]) -> tuple[str, ...]:
    return tuple(entry.get(name, "") for name in ("PRIORITY", "NODE_ACTION", "CODE", "SUBJECT", "SEVERITY"))


def test_drain_and_resume_are_warnings_with_fields(box: SystemdContainer) -> None:
    box.install_healthd(SETTINGS.format(mode="act") + OTHER_CHECKS_OFF)
    box.systemctl("start", "healthd")
    box.write("/opt/broken", "")
    box.exec("healthd", "pause", "--for", "1s", "--why", "look again")  # all checks run after it
    drained = wait_for_entry(box, "NODE_ACTION=drain")
    assert fields_of_entry(drained) == ("4", "drain", "exec/critical", "raid", "degraded")
    assert drained["MESSAGE"] == "drained the node: healthd: exec/critical raid: two disks are gone"
    opened = journal_entries(box, "CODE=exec/critical")
    assert [fields_of_entry(entry) for entry in opened if "NODE_ACTION" not in entry] == [
        ("4", "", "exec/critical", "raid", "degraded")
    ]
    assert (Path(box.path("/opt/drained")).read_text()) == drained["MESSAGE"].removeprefix("drained the node: ")
    box.exec("rm", "/opt/broken")
    box.exec("healthd", "repaired", "exec/critical", "raid", "--why", "new disks")
    resumed = wait_for_entry(box, "NODE_ACTION=resume")
    assert fields_of_entry(resumed) == ("4", "resume", "exec/critical", "raid", "degraded")
    assert len(journal_entries(box, "NODE_ACTION=drain")) == 1
    box.systemctl("stop", "healthd")


def test_drain_in_observe_mode_is_warning_with_same_fields(box: SystemdContainer) -> None:
    box.install_healthd(SETTINGS.format(mode="observe") + OTHER_CHECKS_OFF)
    box.write("/opt/broken", "")
    box.systemctl("start", "healthd")
    withheld = wait_for_entry(box, "NODE_ACTION=withheld", words="observe")
    assert fields_of_entry(withheld) == ("4", "withheld", "exec/critical", "raid", "degraded")
    assert withheld["MESSAGE"].startswith('decision: would drain with "healthd: exec/critical raid: ')
    assert not box.path("/opt/drained").exists()
    box.systemctl("stop", "healthd")
