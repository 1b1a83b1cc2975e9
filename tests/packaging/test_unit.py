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

SEES_OTHERS = (
    "a mount namespace: later mounts, remounts and read-only changes of the node do not appear in it as they are, "
    "and systemd queries each mount to create it, which hangs if a file server is dead"
)
# Directive -> why healthd.service does not have it. e2e/test_hardening.py demonstrates each of OTHER_MOUNTS.
NEVER = {
    "ProtectSystem": f"{SEES_OTHERS}; check mount finds / read-only, and disk_space skips what it cannot write",
    "ProtectHome": SEES_OTHERS,
    "PrivateTmp": SEES_OTHERS,
    "PrivateMounts": SEES_OTHERS,
    "PrivateDevices": f"{SEES_OTHERS}; and no GPU, no IPMI, no /dev/kmsg",
    "ProtectKernelTunables": SEES_OTHERS,
    "ProtectKernelModules": SEES_OTHERS,
    "ProtectKernelLogs": f"{SEES_OTHERS}; and no /dev/kmsg",
    "ProtectControlGroups": SEES_OTHERS,
    "ProtectProc": f"{SEES_OTHERS}; and the processes of jobs belong to other users",
    "ProcSubset": f"{SEES_OTHERS}; and /proc/driver/nvidia, /proc/mounts, /proc/sys are no processes",
    "ReadOnlyPaths": SEES_OTHERS,
    "ReadWritePaths": SEES_OTHERS,
    "InaccessiblePaths": SEES_OTHERS,
    "NoExecPaths": SEES_OTHERS,
    "ExecPaths": SEES_OTHERS,
    "BindPaths": SEES_OTHERS,
    "BindReadOnlyPaths": SEES_OTHERS,
    "TemporaryFileSystem": SEES_OTHERS,
    "MountFlags": SEES_OTHERS,
    "PrivateIPC": SEES_OTHERS,
    "LogNamespace": SEES_OTHERS,
    "RootDirectory": SEES_OTHERS,
    "RootImage": SEES_OTHERS,
    "DynamicUser": f"{SEES_OTHERS}; and only root may drain",
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
        (name, value) for name, at, value in (line.partition("=") for line in lines) if at and not name.startswith("#")
    ]


HAS = directives(UNIT)


@pytest.mark.parametrize("name", NEVER)
def test_the_unit_has_nothing_that_would_have_it_see_another_node_than_this(name: str) -> None:
    assert name not in {has for has, _ in HAS}, NEVER[name]


def test_devices_are_allowed_by_a_class_that_needs_no_driver_and_not_by_names() -> None:
    """systemd looks up "char-nvidia*" in /proc/devices and "/dev/nvidia0" in /dev once, when the unit starts.

    Before the module is loaded there is no such name, and the device stays blocked (systemd.resource-control(5)).
    """
    assert [value for name, value in HAS if name == "DeviceAllow"] == ["char-* rwm"]


def test_what_a_program_of_the_site_may_need_is_listed_and_nothing_of_it_is_on() -> None:
    assert directives(DROP_IN) == []
    listed = {name for name, _ in directives("\n".join(line.lstrip("#") for line in DROP_IN.splitlines()))}
    assert listed >= {"CapabilityBoundingSet", "SystemCallFilter", "DeviceAllow", "RestrictAddressFamilies"}
    assert not listed & set(NEVER)


def test_a_refused_call_is_an_error_and_kills_nobody() -> None:
    assert dict(HAS)["SystemCallErrorNumber"] == "EPERM"


def test_the_daemon_has_the_turn_of_any_other_service() -> None:
    """With "idle" or "batch" it would wait for the jobs, which keep every core busy."""
    assert {(name, value) for name, value in HAS if name in ("CPUSchedulingPolicy", "Nice")} == {
        ("CPUSchedulingPolicy", "other"),
        ("Nice", "0"),
    }
    assert not [name for name, _ in HAS if name.startswith("IOScheduling")]


def test_what_a_prolog_reads_and_writes_is_there_before_healthd_ran_for_the_first_time(tmp_path: Path) -> None:
    if shutil.which("systemd-tmpfiles") is None:
        pytest.skip("systemd-tmpfiles not found")
    text = (SYSTEMD / "healthd-tmpfiles.conf").read_text()
    assert text.count(" root root ") == 2
    mine = tmp_path / "healthd.conf"  # the user of this test can create its own folders only
    mine.write_text(text.replace(" root root ", f" {os.getuid()} {os.getgid()} "))
    made = tmp_path / "root"
    made.mkdir()
    command = ["systemd-tmpfiles", "--create", f"--root={made}", str(mine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    runtime_dir = made / Settings().runtime_dir.lstrip("/")
    for folder in (runtime_dir, runtime_dir / prolog_files.FOLDER):
        assert oct(folder.stat().st_mode & 0o7777) == "0o755", folder


def test_an_image_that_goes_by_presets_leaves_it_enabled() -> None:
    assert "enable healthd.service" in (SYSTEMD / "80-healthd.preset").read_text().splitlines()
