"""packaging/systemd: what healthd.service must never have, and why; tests/e2e/test_hardening.py runs it."""

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
    "a mount namespace: what is mounted, remounted or made read-only on the node later does not appear in it as it is, "
    "and systemd makes it by asking each mount, of which one may be of a dead file server"
)
# Directive -> why healthd.service has it not. Each of SEES_OTHERS is shown in e2e/test_hardening.py.
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
    "ProtectProc": f"{SEES_OTHERS}; and the jobs' processes are those of other users",
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
    "DynamicUser": f"{SEES_OTHERS}; and drains are root's",
    "User": "drains are root's or SlurmUser's, and others' processes root's to look at",
    "PrivateUsers": "the owners of processes and files would all be nobody, and capabilities count for nothing outside",
    "PrivateNetwork": "no slurmctld, no InfiniBand and Ethernet ports in /sys, no Prometheus",
    "IPAddressDeny": "slurmctld and Prometheus have addresses that only the site knows: a drop-in can say them",
    "ProtectClock": "it implies DeviceAllow=char-rtc, which on systemd 249 and 252 cut off all unlisted devices",
    "ProtectHostname": "a name that DHCP sets later would not be seen: it makes a UTS namespace",
    "MemoryDenyWriteExecute": "programs of the site that use CUDA, Java or a JIT do that, for 0.02 of the score",
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
    """ "char-nvidia*" is looked up in /proc/devices, "/dev/nvidia0" in /dev, once, when the unit starts: before the
    module is loaded there is no such name, and the device stays cut off (systemd.resource-control(5))."""
    assert [value for name, value in HAS if name == "DeviceAllow"] == ["char-* rwm"]


def test_what_a_program_of_the_site_may_need_is_listed_and_nothing_of_it_is_on() -> None:
    assert directives(DROP_IN) == []
    listed = {name for name, _ in directives("\n".join(line.lstrip("#") for line in DROP_IN.splitlines()))}
    assert listed >= {"CapabilityBoundingSet", "SystemCallFilter", "DeviceAllow", "RestrictAddressFamilies"}
    assert not listed & set(NEVER)


def test_a_refused_call_is_an_error_and_kills_nobody() -> None:
    assert dict(HAS)["SystemCallErrorNumber"] == "EPERM"


def test_the_daemon_has_the_turn_of_any_other_service() -> None:
    """ "idle" and "batch" would have it wait for the jobs that keep every core busy."""
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
    mine = tmp_path / "healthd.conf"  # whoever runs this test may make folders of their own
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
