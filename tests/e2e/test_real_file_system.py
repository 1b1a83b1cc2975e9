"""Kernel messages of a file system stopped after an error, and of a full one: real ones on a loop device.

Each has its own mount namespace, so that no other process on this machine sees a broken disk.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from requirements import require_programs, require_root

KERNEL = tuple(int(number) for number in re.findall(r"[0-9]+", os.uname().release)[:2])
REPORTS_SHUTDOWN = KERNEL >= (6, 15)

TRIGGER_ERROR = 'echo 1 > "/sys/fs/ext4/$(basename "$(findmnt -no SOURCE "$point")")/trigger_fs_error"'
SHUT_DOWN = (
    f"{sys.executable} -c 'import fcntl, os, struct, sys; "
    'fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack("I", 2))\' "$point"'  # EXT4_IOC_SHUTDOWN
)
FILL_SPACE = 'dd if=/dev/zero of="$point/big" bs=1M 2>/dev/null || true'
FILL_INODES = 'mkdir "$point/d"; seq -f "$point/d/%g" 5000 | xargs touch 2>/dev/null || true'


@pytest.mark.parametrize(
    ("options", "problem", "expected"),
    [
        ("errors=remount-ro", ":", []),
        ("errors=remount-ro", TRIGGER_ERROR, ["block_device/stopped"]),
        ("errors=continue", SHUT_DOWN, ["block_device/stopped"] if REPORTS_SHUTDOWN else []),
        ("ro", ":", []),
        ("rw", 'mount -o remount,ro "$point"', []),
        ("rw", 'mount -o remount,bind,ro "$point"', []),
        ("rw", FILL_SPACE, ["disk_space/no_space"]),
        ("rw", FILL_INODES, ["disk_space/no_inodes"]),
    ],
)
def test_checks_report_file_system_errors_and_only_those(
    tmp_path: Path, options: str, problem: str, expected: list[str]
) -> None:
    require_root()
    require_programs("mkfs.ext4", "mount", "unshare", "findmnt", packages="e2fsprogs mount util-linux")
    image, point, config = tmp_path / "image", tmp_path / "mount", tmp_path / "healthd.toml"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, timeout=240)
    point.mkdir()
    config.write_text(f'[checks.disk_space]\npaths = ["{point}"]\n')
    check_command = f"{sys.executable} -m healthd check --json --config {config} block_device disk_space"
    script = f'set -e; point={point}; mount -o loop,{options} {image} "$point"; {problem}; exec {check_command}'
    completed = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=400)
    assert completed.stderr == ""
    conditions = json.loads(completed.stdout)["conditions"]
    assert [condition["code"] for condition in conditions] == expected
    assert all(condition["subject"] == str(point) for condition in conditions)
