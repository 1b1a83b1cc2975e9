"""A user's own FUSE mount on the real kernel: a process hanging in it, and its files with root as the alleged owner."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from fakes import findings
from frozen import HangFs, wait_for_d_state
from of_this_run import FOLDER
from requirements import require_root

from healthd.checks import processes
from healthd.checks.processes import FUSE_CONNECTIONS, Config
from healthd.common import ownership
from healthd.host.host import Host
from healthd.host.system import Tree

USER = 65534
USER_PROGRAM = "import fcntl, mmap, os, sys; os.setgid({0}); os.setuid({0}); os.chdir(sys.argv[1]); {1}"
# Calls that send a request to the server, which does not answer ...
WAITING_FOR_SERVER = {
    "stat": "os.stat('lost')",
    "open": "os.open('openedd/lost', os.O_RDONLY)",
    "create": "os.open('d/lost', os.O_RDWR | os.O_CREAT)",
    "read": "os.read(os.open('a', os.O_RDONLY), 4096)",
    "page": "mmap.mmap(os.open('b', os.O_RDONLY), 4096, prot=mmap.PROT_READ)[0]",
    "write": "os.write(os.open('c', os.O_WRONLY), b'x')",
    "list": "os.listdir('listd')",
    "lock": "fcntl.lockf(os.open('e', os.O_RDWR), fcntl.LOCK_EX)",
    "statfs": "os.statvfs('.')",
}
# ... and calls that wait for a lock held by such a call.
WAITING_FOR_LOCK = {
    "stat": "os.stat('lost')",
    "make": "os.mkdir('d/other')",
    "remove": "os.unlink('d/other')",
    "rename": "os.rename('d/other', 'd/another')",
    "find": "os.stat('d/other')",
    "write": "os.write(os.open('c', os.O_WRONLY), b'x')",
}


@pytest.fixture
def fusectl() -> Iterator[None]:
    """Mount fusectl where systemd mounts it on a node. The run finds the mount by its source, an arbitrary word."""
    require_root()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(os.fsencode(FOLDER), FUSE_CONNECTIONS.encode(), b"fusectl", 0, None) == 0
    yield
    if mounted:
        libc.umount2(FUSE_CONNECTIONS.encode(), 2)


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Yield a folder accessible to everybody."""
    with tempfile.TemporaryDirectory(prefix="healthd-fuse.") as name:
        Path(name).chmod(0o755)
        yield Path(name)


class LimitedTree(Tree):
    """This machine with only these processes, since other tests let some hang meanwhile.

    Without `stacks` it is the view of a daemon under healthd.service, without CAP_SYS_ADMIN.
    """

    def __init__(self, pids: Collection[int], stacks: bool) -> None:
        super().__init__("")
        self.pids, self.stacks = [str(pid) for pid in pids], stacks

    def names(self, path: str) -> list[str]:
        return self.pids if path == "/proc" else super().names(path)

    def read(self, path: str) -> bytes:
        if path.endswith("/stack") and not self.stacks:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)
        return super().read(path)


@pytest.mark.parametrize(("mounter", "code"), [(USER, "processes/user_file_system"), (0, "processes/unkillable")])
def test_owner_of_fuse_mount_determines_condition(public_folder: Path, fusectl: None, mounter: int, code: str) -> None:
    with contextlib.ExitStack() as all_processes, HangFs(public_folder, user=mounter, opens=True) as fuse:

        def start(statement: str) -> int:
            command = [sys.executable, "-c", USER_PROGRAM.format(USER, statement), str(fuse.path)]
            return all_processes.enter_context(subprocess.Popen(command, stderr=subprocess.DEVNULL)).pid

        waiting_for_server = {start(statement): name for name, statement in WAITING_FOR_SERVER.items()}
        fuse.wait_for_requests(*waiting_for_server)
        waiting_for_lock = {start(statement): name for name, statement in WAITING_FOR_LOCK.items()}
        for pid in waiting_for_lock:
            wait_for_d_state(pid)
        for pid in (*waiting_for_server, *waiting_for_lock):
            os.kill(pid, signal.SIGKILL)
        for pid in (*waiting_for_server, *waiting_for_lock):
            wait_for_d_state(pid)
        for stacks in (True, False):
            found = findings(
                processes, Host(system=LimitedTree([*waiting_for_server, *waiting_for_lock], stacks)), Config()
            )
            code_by_pid = {int(finding.subject.partition("@")[0]): finding.code for finding in found}
            for pid, name in (waiting_for_server | waiting_for_lock).items():
                assert code_by_pid[pid] == code, (name, stacks, Path(f"/proc/{pid}/stack").read_text())


def test_fuse_users_come_from_mount_table(tmp_path: Path) -> None:
    """ownership.py trusts no file attribute from such a mount."""
    with HangFs(tmp_path, user=USER):
        assert USER in ownership._fuse_users().values()
    assert USER not in ownership._fuse_users().values()
