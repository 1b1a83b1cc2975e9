"""Tests of the units that collect evidence: started by the daemon's request, bounded, and after jobs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from healthd.agent.evidence.request import NAME
from healthd.agent.settings.config import EvidenceConfig
from healthd.common.paths import RUNTIME_DIR
from healthd.host.separate_program import request_file, taken_file
from tests.packaging.test_unit import NEVER, directives

pytestmark = pytest.mark.one_python

SYSTEMD = Path(__file__).parents[2] / "packaging/systemd"
SERVICE = dict(directives((SYSTEMD / "healthd-evidence.service").read_text()))
PATH = directives((SYSTEMD / "healthd-evidence.path").read_text())
DAEMON = directives((SYSTEMD / "healthd.service").read_text())


def test_systemd_accepts_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze not found")
    for name in ("healthd-evidence.path", "healthd-evidence.service", "healthd.service"):
        text = (SYSTEMD / name).read_text().replace("/usr/bin/healthd", "/bin/true")  # verify requires the program
        (tmp_path / name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "healthd-evidence.path")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    complaints = [line for line in result.stderr.splitlines() if "healthd" in line]
    assert (result.returncode, complaints) == (0, []), result.stderr


def test_path_unit_waits_for_the_request_of_the_daemon() -> None:
    watched = [value for name, value in PATH if name == "PathExists"]
    assert watched == [request_file(RUNTIME_DIR, NAME), taken_file(RUNTIME_DIR, NAME)]
    assert "healthd-evidence.path" in dict(DAEMON)["Wants"].split()


def test_service_ends_everything_and_gives_up() -> None:
    assert SERVICE["KillMode"] == "control-group"
    assert (SERVICE["Nice"], SERVICE["IOSchedulingClass"]) == ("19", "idle")
    assert int(SERVICE["StartLimitBurst"]) >= 30, "successful starts count too, two or more per drain"
    minutes = int(SERVICE["TimeoutStartSec"].removesuffix("min"))
    assert minutes * 60 > EvidenceConfig().timeout_seconds + 1800


def test_service_needs_no_mount_namespace() -> None:
    assert not set(SERVICE) & {name for name in NEVER if name not in ("PrivateNetwork", "DynamicUser", "User")}
