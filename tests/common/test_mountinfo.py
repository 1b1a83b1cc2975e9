"""mountinfo: parsing the mount table."""

from __future__ import annotations

import pytest
from fakes import parse_or_error
from hypothesis import given
from hypothesis import strategies as st
from trees import captured_text

from healthd.common.mountinfo import Mount, find_mount, is_host_file_system, is_local, is_loop_device, parse, parse_all

NFS = "16 1 0:42 / /data rw,relatime shared:1 - nfs4 server:/srv rw,vers=4.2"


def test_parse_reads_point_type_and_options():
    assert parse(NFS) == Mount("/data", "nfs4", "0:42", False, ("rw", "vers=4.2"), "server:/srv")


@pytest.mark.parametrize(
    ("mount", "file_system", "error_state"),
    [
        ("rw", "rw", ""),
        ("ro", "ro", ""),  # mounted read-only
        ("ro", "rw", ""),  # a read-only bind mount
        ("rw", "ro", "read-only"),  # Linux before 6.15, after an error
        ("rw", "rw,errors=remount-ro", ""),
        ("rw", "rw,errors=remount-ro,emergency_ro", "read-only"),  # Linux 6.18, after an error
        ("rw", "rw,shutdown", "shut down"),  # Linux 6.18
    ],
)
def test_error_state_distinguishes_kernel_errors_from_read_only_mounts(mount, file_system, error_state):
    assert parse(f"63 43 7:0 / /srv {mount},relatime - ext4 /dev/loop0 {file_system}").error_state == error_state


def test_find_mount_prefers_longest_and_last_mount_point():
    points = ["/proc", "/", "/data", "/data/a", "/data"]
    mounts = [Mount(point, str(number), "", False, ()) for number, point in enumerate(points)]

    def fstype(path: str) -> str:
        found = find_mount(mounts, path)
        return found.fstype if found else "none"

    assert [fstype(path) for path in ("/", "/x", "/data", "/data/b", "/data/a/b", "/database")] == list("114431")
    assert find_mount(mounts[2:], "/x") is None


@pytest.mark.parametrize(
    ("mounts", "path", "local"),
    [
        ({"/": "ext4"}, "/tmp", True),
        ({"/": "ext4", "/data": "nfs4"}, "/data/x", False),
        ({"/": "ext4", "/data": "nfs4"}, "/database", True),
        ({"/": "ext4", "/data": "nfs4", "/data/scratch": "xfs"}, "/data/scratch", False),  # the path crosses NFS
        ({"/": "ext4", "/dev": "devtmpfs", "/dev/shm": "tmpfs"}, "/dev/shm", True),
        ({"/": "nfs4", "/tmp": "tmpfs"}, "/tmp", True),
        ({"/": "nfs4", "/tmp": "tmpfs"}, "/var", False),
        ({"/": "ext4", "/home": "autofs"}, "/home/a", False),
        ({"/": "ext4", "/mnt": "fuse.sshfs"}, "/mnt", False),
        ({}, "/", False),
    ],
)
def test_is_local_is_false_if_path_crosses_a_file_server(mounts, path, local):
    assert is_local([Mount(point, fstype, "", False, ()) for point, fstype in mounts.items()], path) is local


def test_is_local_uses_last_mount_at_a_point():
    mounts = [Mount("/", "ext4", "", False, ()), Mount("/a", "xfs", "", False, ()), Mount("/a", "nfs", "", False, ())]
    assert not is_local(mounts, "/a")
    assert is_local([*mounts, mounts[1]], "/a")


def test_parse_all_reads_real_table():
    mounts, error = parse_all(captured_text("mountinfo_gpu_node.txt").strip())
    assert error == ""
    assert {mount.fstype for mount in mounts} >= {"ext4", "tmpfs", "fuse.lxcfs", "cgroup2"}
    assert {mount.error_state for mount in mounts} == {""}


def test_parse_all_rejects_empty_table_and_accepts_missing_one():
    assert parse_all("") == ([], "/proc/self/mountinfo is empty")
    assert parse_all(None) == ([], "")


def test_parse_all_reports_garbled_line_and_keeps_others():
    mounts, error = parse_all(f"garbage\n{NFS}\n{NFS[:30]}")
    assert [mount.point for mount in mounts] == ["/data"]
    assert "not a mount: 'garbage'" in error


@given(
    point=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
    optional=st.lists(st.sampled_from(["shared:1", "master:2", "propagate_from:3", "unbindable"])),
    read_only=st.booleans(),
)
def test_parse_reads_every_valid_mount_point(point, optional, read_only):
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in f"/{point}")
    options = "ro" if read_only else "rw"
    line = " ".join(["16", "1", "0:42", "/", escaped, f"{options},x", *optional, "-", "nfs4", "", "rw"])
    assert parse(line) == Mount(f"/{point}", "nfs4", "0:42", read_only, ("rw",))


@given(st.one_of(st.text(max_size=60), st.integers(0, len(NFS)).map(lambda end: NFS[:end])))
def test_parse_of_any_line_gives_a_mount_or_error(line):
    found, error = parse_or_error(parse, line)
    if error:
        assert error.startswith("/proc/self/mountinfo: not a mount: ")
        assert "\n" not in error
    else:
        assert found.point.startswith("/")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("21 0 8:1 / / rw - ext4 /dev/sda1 rw", True),
        ("22 21 0:45 / /scratch rw - btrfs /dev/nvme0n1 rw", True),
        ("22 21 253:17 / /var/lib/kubelet/pods/1/volumes/kubernetes.io~csi/pvc/mount rw - ext4 /dev/dm-17 rw", False),
        ("22 21 7:5 / /mnt/test rw - xfs /dev/loop5 rw", False),
        ("22 21 8:17 / /run/media/ann/stick rw - ext4 /dev/sdb1 rw", False),
        ("22 21 0:46 / /tmp rw - tmpfs tmpfs rw", False),
        ("22 21 0:42 / /data rw - nfs4 server:/srv rw", False),
    ],
)
def test_is_host_file_system_excludes_containers_and_images(line, expected):
    mount = parse(line)
    assert (is_host_file_system(mount) and not is_loop_device(mount)) is expected
