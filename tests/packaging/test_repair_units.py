"""Tests of the units that take repair steps: started by the daemon's request, not killed during a step, given up."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthd.agent.repair.journal import NAME
from healthd.common.paths import RUNTIME_DIR
from healthd.host.separate_program import request_file, taken_file
from tests.packaging.test_unit import NEVER, directives

pytestmark = pytest.mark.one_python

SYSTEMD = Path(__file__).parents[2] / "packaging/systemd"
SERVICE = dict(directives((SYSTEMD / "healthd-repair.service").read_text()))
PATH = directives((SYSTEMD / "healthd-repair.path").read_text())
DAEMON = directives((SYSTEMD / "healthd.service").read_text())


def test_path_unit_waits_for_the_request_of_the_daemon() -> None:
    watched = [value for name, value in PATH if name == "PathExists"]
    assert watched == [request_file(RUNTIME_DIR, NAME), taken_file(RUNTIME_DIR, NAME)]
    assert "healthd-repair.path" in dict(DAEMON)["Wants"].split()


def test_systemd_does_not_kill_a_step_but_ends_what_a_killed_program_left() -> None:
    assert SERVICE["TimeoutStartSec"] == "infinity"
    assert SERVICE["KillMode"] == "control-group"
    assert int(SERVICE["OOMScoreAdjust"]) < 0
    assert int(SERVICE["StartLimitBurst"]) >= 30, "successful starts count too, a few per repair"


def test_step_keeps_the_rights_of_root() -> None:
    assert not set(SERVICE) & {"CapabilityBoundingSet", "AmbientCapabilities", "DevicePolicy", "User"}
    denied = SERVICE["SystemCallFilter"].removeprefix("~").split()
    assert not {"@reboot", "@module", "@privileged", "@raw-io"} & set(denied)


def test_service_gives_up_what_no_step_needs() -> None:
    """e2e/test_hardening.py demonstrates those that a container can show."""
    names = ("NoNewPrivileges", "RestrictRealtime", "RestrictSUIDSGID", "RestrictNamespaces", "LockPersonality")
    assert {SERVICE.get(name) for name in names} == {"yes"}
    assert {"@swap", "@clock"} <= set(SERVICE["SystemCallFilter"].removeprefix("~").split())
    assert SERVICE["SystemCallFilter"].startswith("~")


def test_service_needs_no_mount_namespace() -> None:
    assert not set(SERVICE) & {name for name in NEVER if name not in ("PrivateNetwork", "DynamicUser", "User")}
