"""A user's own FUSE mount on the real kernel: a process that hangs in it, and files in it that say they are root's."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import codes, findings
from frozen import HangFs, wait_for_d_state
from of_this_run import FOLDER
from requirements import require_root

from healthd.checks import processes
from healthd.checks.processes import FUSE_CONNECTIONS, Config
from healthd.host import Host
from healthd.machine import ownership

USER = 65534
STAT_IN_IT = "import os, sys; os.setgid({0}); os.setuid({0}); os.stat(sys.argv[1] + '/x')"


@pytest.fixture
def connections() -> Iterator[None]:
    """fusectl, where systemd has mounted it on a node. Its source, which is any word, is by what the run finds it."""
    require_root()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(os.fsencode(FOLDER), FUSE_CONNECTIONS.encode(), b"fusectl", 0, None) == 0
    yield
    if mounted:
        libc.umount2(FUSE_CONNECTIONS.encode(), 2)


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder that everybody reaches."""
    with tempfile.TemporaryDirectory(prefix="healthd-fuse.") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.mark.parametrize(("mounter", "code"), [(USER, "processes/user_file_system"), (0, "processes/unkillable")])
def test_who_mounted_it_says_whose_fault_it_is(everybodys: Path, connections: None, mounter: int, code: str) -> None:
    with HangFs(everybodys, user=mounter) as fuse:
        hung = subprocess.Popen([sys.executable, "-c", STAT_IN_IT.format(USER), str(fuse.path)])
        try:
            fuse.wait_until_it_hears(hung.pid)
            hung.kill()
            wait_for_d_state(hung.pid)
            found = [one for one in findings(processes, Host(), Config()) if one.subject.startswith(f"{hung.pid}@")]
            assert codes(found) == [code], Path(f"/proc/{hung.pid}/stack").read_text()
        finally:
            fuse.release()
            hung.wait(120)


def test_the_mount_table_says_who_mounted_it(tmp_path: Path) -> None:
    """ownership.py believes nothing that such a mount says of its files."""
    with HangFs(tmp_path, user=USER):
        assert USER in ownership._fuse_users().values()
    assert USER not in ownership._fuse_users().values()
