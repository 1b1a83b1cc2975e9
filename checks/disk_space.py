"""Free space and free inodes of the local file systems that every job and daemon writes to.

Rules: gpud, GCM and NHC monitor the free space and inodes of local file systems. Network mounts are not queried because
statvfs may never return (the mount check handles each mount separately). Read-only media (squashfs, ISO 9660, an
overlay without a writable layer) are always full, which is not a fault. btrfs does not count inodes. "Free" means free
for users, because ext4 reserves 5 % for root. A percentage alone says little about a large disk. For example, 3 % of 30
TiB is almost 1 TiB, and nothing fails. Low space therefore drains the node only if few GiB are left as well. For
inodes, only the percentage is used.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from healthd.api import (
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    Gib,
    History,
    Host,
    Meaning,
    NothingToCheck,
    Observation,
    Percent,
    Severity,
)
from healthd.common.mountinfo import MOUNTINFO, Mount, find_mount, is_local, parse_all

USES = ""

ALWAYS_FULL = {"squashfs", "erofs", "iso9660"}
MAX_SYMLINKS = 40  # as in the kernel


class Limits(Struct, frozen=True):
    """Limits for the file system that contains a path. None means that the check's own limit applies."""

    degraded_percent: Percent | None = None
    degraded_gib: Gib | None = None
    warning_percent: Percent | None = None


class Config(CheckSettings, frozen=True):
    """paths             paths to check; a file system is checked once even if it contains several paths
    limits            further paths, each with its own limits. If a file system contains several paths, its mount
                      point's limits apply if the mount point is listed, otherwise the first path's limits
    degraded_percent  degraded if a smaller percentage of the space or of the inodes than this is free
    degraded_gib      low space is degraded only if fewer GiB than this are free too, otherwise a warning
    warning_percent   warn if a smaller percentage than this is free
    """

    paths: tuple[str, ...] = ("/", "/tmp", "/var")
    limits: dict[str, Limits] = field(default_factory=dict)
    degraded_percent: Percent = 5.0
    degraded_gib: Gib = 20.0
    warning_percent: Percent = 10.0


def validate(config: Config) -> str | None:
    for path in config.paths:
        if not path.startswith("/"):
            return f'paths: "{path}" must begin with a slash'
    for path in config.limits:
        if not path.startswith("/"):
            return f'limits: "{path}" must begin with a slash'
        if problem := _problem(_path_limits(config, path)):
            return f'limits."{path}": {problem}'
    return _problem(config)


def _problem(config: Config) -> str | None:
    if not 0 <= config.degraded_percent <= config.warning_percent <= 100:
        return "degraded_percent must not be above warning_percent, and both must be between 0 and 100"
    if not config.degraded_gib > 0:
        return f"degraded_gib must be above 0, got {config.degraded_gib:g}"
    return None


def _path_limits(config: Config, path: str) -> Config:
    """Return the settings for `path`. The path's own limits replace the check's limits."""
    path_limits = config.limits.get(path, Limits())
    names = ("degraded_percent", "degraded_gib", "warning_percent")
    return replace(config, **{name: value for name in names if (value := getattr(path_limits, name)) is not None})


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    mounts, parse_error = parse_all(host.read_shared(MOUNTINFO))
    unreadable = [parse_error] if parse_error else []
    judged = set()
    for path, mount in _by_path(host, config, mounts):
        if "ro" in mount.options or mount.fstype in ALWAYS_FULL or mount.device in judged:
            continue
        if not is_local(mounts, mount.point):
            continue
        judged.add(mount.device)
        try:
            space = host.statvfs(mount.point)
        except OSError as error:  # this error must not hide the other file systems
            unreadable.append(f"{mount.point}: {error.strerror}")
            continue
        limits = _path_limits(config, path)
        # A total of 0 is skipped: btrfs counts no inodes, tmpfs may have no limit.
        yield from _judge("space", mount.point, space.available_bytes, space.size_bytes, limits)
        yield from _judge("inodes", mount.point, space.inodes_available, space.inodes, limits)
    if not judged and not unreadable:
        yield NothingToCheck("no local file system at checks.disk_space.paths")
    if unreadable:
        raise ValueError("; ".join(unreadable))


def _by_path(host: Host, config: Config, mounts: Sequence[Mount]) -> list[tuple[str, Mount]]:
    """Return each path with the mount that contains the path.

    Mount points come first, because a file system gets the limits of its first path. If a disk is not mounted, its path
    is on the file system below. The disk's limits must not replace that file system's own limits.
    """
    found = []
    for path in (*config.limits, *config.paths):
        resolved = _without_links(host, mounts, path)
        if mount := find_mount(mounts, resolved):
            found.append((posixpath.normpath(resolved) != mount.point, path, mount))
    return [(path, mount) for _, path, mount in sorted(found, key=lambda entry: entry[0])]


def _without_links(host: Host, mounts: Sequence[Mount], path: str) -> str:
    """Resolve symbolic links (/tmp may link to /scratch/tmp), but only on local file systems."""
    for _ in range(MAX_SYMLINKS):
        for end in (n for n in range(1, len(path) + 1) if path[n : n + 1] in ("/", "")):
            part = path[:end]
            if not is_local(mounts, part):
                return path
            target = host.link_target(part)
            if target is not None:
                path = posixpath.normpath(posixpath.join(posixpath.dirname(part), target, path[end + 1 :]))
                break
        else:
            return path
    return path


def _judge(resource: str, point: str, available: int, size: int, config: Config) -> Iterator[Finding | Observation]:
    if size <= 0:
        return
    percent = 100.0 * available / size
    yield Observation(f"disk_{resource}_available_ratio", available / size, labels=(("mountpoint", point),))
    if resource == "space":
        message = f"{percent:.1f} % of {point} is free: {available / 2**30:.1f} of {size / 2**30:.1f} GiB"
    else:
        message = f"{percent:.1f} % of the inodes on {point} are free: {available} of {size}"
    has_enough_gib = resource == "space" and available >= config.degraded_gib * 2**30
    if percent < config.degraded_percent and not has_enough_gib:
        yield Finding(Severity.DEGRADED, f"disk_space/no_{resource}", point, message)
    elif percent < config.warning_percent:
        yield Finding(Severity.WARNING, f"disk_space/low_{resource}", point, message)


_SPACE_TODO = (
    "du -xh --max-depth=2 POINT | sort -h | tail shows the largest directories; lsof +L1 shows deleted files that are "
    "still open. If /tmp is full of old job data, let the epilog remove it. In /var, look for logs, core dumps and "
    "container images."
)
_INODES_TODO = "du -x --inodes --max-depth=2 POINT | sort -n | tail shows where the small files are. Remove them."

OBSERVATIONS = {
    "disk_space_available_ratio": Meaning(
        "Share of the file system's space that is free for users, from 0 (full) to 1.",
        ("mountpoint",),
    ),
    "disk_inodes_available_ratio": Meaning(
        "Share of the file system's inodes that are free, from 0 to 1.", ("mountpoint",)
    ),
}

EXPLAIN = {
    "disk_space/no_space": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A local file system is nearly full: its free space is below the limits in percent and in GiB.",
        "Jobs cannot write temporary files, slurmd cannot spool job scripts, and daemons lose their logs and state.",
        _SPACE_TODO,
    ),
    "disk_space/no_inodes": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "A local file system has almost no free inodes left, regardless of its free space.",
        "New files fail with 'No space left on device', as on a full disk.",
        _INODES_TODO,
    ),
    "disk_space/low_space": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A local file system is filling up. The free percentage is low, but many GiB may still be free.",
        "No effect yet. The node is drained when the file system is nearly full and few GiB are left.",
        f"No action tonight. {_SPACE_TODO}",
    ),
    "disk_space/low_inodes": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A local file system is running out of inodes.",
        "No effect yet. The node is drained when almost no inodes are left.",
        f"No action tonight. {_INODES_TODO}",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.DISK_SPACE)
ENDS_JOB = {
    "disk_space/no_space": EndsJob.ALWAYS,
    "disk_space/no_inodes": EndsJob.ALWAYS,
    "disk_space/low_space": EndsJob.NEVER,
    "disk_space/low_inodes": EndsJob.NEVER,
}
