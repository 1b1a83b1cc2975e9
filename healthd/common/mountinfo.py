"""Mounts from /proc/self/mountinfo (proc_pid_mountinfo(5)), which can be read even if a file server is down.

36 35 98:0 /srv /data rw,noatime shared:1 - nfs4 server:/srv rw,vers=4.2
id parent DEVICE root POINT OPTIONS [optional ...] - FSTYPE source SUPER_OPTIONS
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from healthd.common.text import regex

MOUNTINFO = "/proc/self/mountinfo"
LOCAL_TYPES = {
    *("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "bcachefs", "zfs"),
    *("tmpfs", "devtmpfs", "ramfs", "rootfs", "overlay", "squashfs", "erofs", "iso9660"),
}
DISK_TYPES = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "jfs", "bcachefs"}
# Container engines mount volumes here, and desktops mount removable disks.
_FOREIGN_FOLDERS = (
    *("/var/lib/kubelet/", "/var/lib/docker/", "/var/lib/containerd/", "/var/lib/containers/", "/var/lib/rancher/"),
    *("/run/containerd/", "/run/docker/", "/run/k3s/", "/run/containers/", "/run/media/", "/media/"),
)


class Mount(NamedTuple):
    """One mounted file system.

    `device` ("98:0") is the same for all mounts of a file system. `read_only` is True if a user mounted it read-only.
    `options` are the file system's own options, where "ro" may come from the kernel. `source` is a name such as
    "/dev/sda3".
    """

    point: str
    fstype: str
    device: str
    read_only: bool
    options: tuple[str, ...]
    source: str = ""

    @property
    def error_state(self) -> str:
        """The state to which the kernel changed the file system after errors: "read-only", "shut down", or "" for
        neither.

        A user's read-only mount sets "ro" for the mount and the file system; the kernel sets it only for the file
        system. From Linux 6.15 on, ext4 stays "rw" and has "emergency_ro" or "shutdown" (both seen on 6.18).
        """
        if "shutdown" in self.options:
            return "shut down"
        by_kernel = "emergency_ro" in self.options or ("ro" in self.options and not self.read_only)
        return "read-only" if by_kernel else ""


@functools.lru_cache(maxsize=1024)  # five checks and mounts parse the same lines in each round
def parse(line: str) -> Mount:
    """Parse a line from mountinfo. Raises ValueError if it is malformed."""
    fields = line.split(" ")
    try:
        end = fields.index("-", 6)
        device, point, options = fields[2], fields[4], fields[5].split(",")
        fstype, source, super_options = fields[end + 1], fields[end + 2], fields[end + 3].split(",")
    except (ValueError, IndexError):
        raise ValueError(f"{MOUNTINFO}: not a mount: {line[:80]!r}") from None
    if not point.startswith("/") or not {"rw", "ro"} & {*options}:
        raise ValueError(f"{MOUNTINFO}: not a mount: {line[:80]!r}")
    return Mount(_unescape(point), fstype, device, "ro" in options, tuple(super_options), _unescape(source))


def _unescape(text: str) -> str:
    r"""Decode \040, \011, \012 and \134, which the kernel writes for blank, tab, newline and backslash."""
    return regex(r"\\([0-7]{3})").sub(lambda match: chr(int(match[1], 8)), text)


def parse_all(text: str | None) -> tuple[list[Mount], str]:
    """Return all mounts in the kernel's order, and the problem with the first invalid line ("" if none).

    If `text` is None (a captured tree without this file), return no mounts.
    """
    if text is None:
        return [], ""
    if not text:
        return [], f"{MOUNTINFO} is empty"
    mounts, problem = [], ""
    for line in text.split("\n"):
        try:
            mounts.append(parse(line))
        except ValueError as error:
            problem = problem or str(error)
    return mounts, problem


def is_host_file_system(mount: Mount) -> bool:
    """Return True if the file system is on a disk and used by the node itself, not a volume for a single container."""
    return mount.fstype in DISK_TYPES and not mount.point.startswith(_FOREIGN_FOLDERS)


def is_loop_device(mount: Mount) -> bool:
    """Return True if the mount is on a loop device: the image of a test, an installer or a snapshot."""
    return mount.device.startswith("7:") or mount.source.startswith("/dev/loop")


def find_mount(mounts: Sequence[Mount], path: str) -> Mount | None:
    """Return the mount that contains a path.

    This is the mount with the longest mount point. If several mounts have that mount point, the last one is used.
    """
    found = None
    for mount in mounts:
        if _is_above(mount, path) and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def is_local(mounts: Sequence[Mount], path: str) -> bool:
    """Return True if a path can be read without waiting for a file server, because all mounts on the path have local
    types.

    A root directory on the network is treated as local, because nothing works without it.
    """
    local_by_point = {mount.point: mount.fstype in LOCAL_TYPES for mount in mounts if _is_above(mount, path)}
    if len(local_by_point) > 1:
        local_by_point.pop("/", None)
    return bool(local_by_point) and all(local_by_point.values())


def _is_above(mount: Mount, path: str) -> bool:
    return mount.point == "/" or path == mount.point or path.startswith(mount.point + "/")
