"""Tests of packaging/systemd: directives forbidden in healthd.service, and why. tests/e2e/test_hardening.py runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from healthd.agent.settings.config import Settings
from healthd.agent.slurm import prolog_files

pytestmark = pytest.mark.one_python

SYSTEMD = Path(__file__).parents[2] / "packaging/systemd"
UNIT = (SYSTEMD / "healthd.service").read_text()
DROP_IN = (SYSTEMD / "healthd-exec-checks.conf").read_text()

OTHER_MOUNTS = (
    "a mount namespace: later mounts, remounts and read-only changes of the node do not appear in it as they are, "
    "and systemd queries each mount to create it, which hangs if a file server is dead"
)
# Directive -> why healthd.service does not have it. e2e/test_hardening.py demonstrates each of OTHER_MOUNTS.
NEVER = {
    "ProtectSystem": f"{OTHER_MOUNTS}; check mount finds / read-only, and disk_space skips what it cannot write",
    "ProtectHome": OTHER_MOUNTS,
    "PrivateTmp": OTHER_MOUNTS,
    "PrivateMounts": OTHER_MOUNTS,
    "PrivateDevices": f"{OTHER_MOUNTS}; and no GPU, no IPMI, no /dev/kmsg",
    "ProtectKernelTunables": OTHER_MOUNTS,
    "ProtectKernelModules": OTHER_MOUNTS,
    "ProtectKernelLogs": f"{OTHER_MOUNTS}; and no /dev/kmsg",
    "ProtectControlGroups": OTHER_MOUNTS,
    "ProtectProc": f"{OTHER_MOUNTS}; and the processes of jobs belong to other users",
    "ProcSubset": f"{OTHER_MOUNTS}; and /proc/driver/nvidia, /proc/mounts, /proc/sys are no processes",
    "ReadOnlyPaths": OTHER_MOUNTS,
    "ReadWritePaths": OTHER_MOUNTS,
    "InaccessiblePaths": OTHER_MOUNTS,
    "NoExecPaths": OTHER_MOUNTS,
    "ExecPaths": OTHER_MOUNTS,
    "BindPaths": OTHER_MOUNTS,
    "BindReadOnlyPaths": OTHER_MOUNTS,
    "TemporaryFileSystem": OTHER_MOUNTS,
    "MountFlags": OTHER_MOUNTS,
    "PrivateIPC": OTHER_MOUNTS,
    "LogNamespace": OTHER_MOUNTS,
    "RootDirectory": OTHER_MOUNTS,
    "RootImage": OTHER_MOUNTS,
    "DynamicUser": f"{OTHER_MOUNTS}; and only root may drain",
    "User": "only root or SlurmUser may drain, and only root can read processes of other users",
    "PrivateUsers": "the owners of processes and files would all be nobody, and capabilities have no effect outside",
    "PrivateNetwork": "no slurmctld, no InfiniBand and Ethernet ports in /sys, no Prometheus",
    "IPAddressDeny": "only the site has the addresses of slurmctld and Prometheus; a drop-in can set them",
    "ProtectClock": "it implies DeviceAllow=char-rtc, which on systemd 249 and 252 cut off all unlisted devices",
    "ProtectHostname": "it creates a UTS namespace, so a name that DHCP sets later would not be visible",
    "MemoryDenyWriteExecute": "programs of the site that use CUDA, Java or a JIT need it, for 0.02 of the score",
}


def directives(text: str) -> list[tuple[str, str]]:
    lines = (line.strip() for line in text.splitlines())
    return [
        (name, value)
        for name, separator, value in (line.partition("=") for line in lines)
        if separator and not name.startswith("#")
    ]


UNIT_DIRECTIVES = directives(UNIT)
MOUNT_NAMESPACE = [name for name, why in NEVER.items() if why.startswith(OTHER_MOUNTS)]


@pytest.mark.parametrize("name", NEVER)
def test_unit_has_no_forbidden_directive(name: str) -> None:
    assert name not in {directive for directive, _ in UNIT_DIRECTIVES}, NEVER[name]


def test_hooks_service_has_no_mount_namespace() -> None:
    """systemd would hang on a dead file server when it creates the namespace."""
    names = {name for name, _ in directives((SYSTEMD / "healthd-hooks.service").read_text())}
    assert names & set(MOUNT_NAMESPACE) == set()
    assert {"CapabilityBoundingSet", "NoNewPrivileges", "SystemCallFilter", "DevicePolicy"} <= names


def test_unit_allows_devices_by_class() -> None:
    """systemd looks up "char-nvidia*" in /proc/devices and "/dev/nvidia0" in /dev once, when the unit starts.

    Before the module is loaded there is no such name, and the device stays blocked (systemd.resource-control(5)).
    """
    assert [value for name, value in UNIT_DIRECTIVES if name == "DeviceAllow"] == ["char-* rwm"]


def test_drop_in_for_site_programs_is_commented_out() -> None:
    assert directives(DROP_IN) == []
    listed = {name for name, _ in directives("\n".join(line.lstrip("#") for line in DROP_IN.splitlines()))}
    assert listed >= {"CapabilityBoundingSet", "SystemCallFilter", "DeviceAllow", "RestrictAddressFamilies"}
    assert not listed & set(NEVER)


def test_refused_system_call_returns_error() -> None:
    assert dict(UNIT_DIRECTIVES)["SystemCallErrorNumber"] == "EPERM"


def test_unit_uses_default_cpu_scheduling() -> None:
    """With "idle" or "batch" it would wait for the jobs, which keep every core busy."""
    assert {(name, value) for name, value in UNIT_DIRECTIVES if name in ("CPUSchedulingPolicy", "Nice")} == {
        ("CPUSchedulingPolicy", "other"),
        ("Nice", "0"),
    }
    assert not [name for name, _ in UNIT_DIRECTIVES if name.startswith("IOScheduling")]


def test_tmpfiles_create_directories_of_prolog(tmp_path: Path) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles not found")
    text = (SYSTEMD / "healthd-tmpfiles.conf").read_text()
    assert text.count(" root root ") == 2
    own_conf = tmp_path / "healthd.conf"  # the user of this test can create its own folders only
    own_conf.write_text(text.replace(" root root ", f" {os.getuid()} {os.getgid()} "))
    root_dir = tmp_path / "root"
    root_dir.mkdir()
    command = ["systemd-tmpfiles", "--create", f"--root={root_dir}", str(own_conf)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr) == (0, "")
    runtime_dir = root_dir / Settings().runtime_dir.lstrip("/")
    for folder in (runtime_dir, runtime_dir / prolog_files.FOLDER):
        assert oct(folder.stat().st_mode & 0o7777) == "0o755", folder


def test_preset_enables_service() -> None:
    assert "enable healthd.service" in (SYSTEMD / "80-healthd.preset").read_text().splitlines()
