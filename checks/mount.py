"""Whether the file systems that jobs need are mounted, have the right type and respond.

Rules: Meta's study counts missing mounts as high severity; NHC checks that a mount is present, has the right type and
is not read-only. A mount that does not respond never causes a requeue, because a hard NFS mount survives a failover and
jobs continue. A file server affects many nodes at once, so all findings of this check have a shared cause.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

from healthd.api import (
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    LeftOut,
    Meaning,
    Observation,
    Seconds,
    Severity,
    Worsens,
    WorsensBy,
    regex,
)
from healthd.common.mountinfo import MOUNTINFO, Mount, parse_all

USES = ""
PER = "mount"
BASELINE = Baseline(("fstype", "read_only"), place=80)

PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM)


class Config(CheckSettings, frozen=True):
    """fstype                  file system type that must be mounted ("nfs" accepts nfs4 too); "" = any type
    read_only               true: the mount may be read-only
    missing_confirm_seconds a mount must be missing, stale or failing for this long before it is reported
    hang_degraded_seconds   degraded if the mount has not responded for this long; until then it warns
    """

    fstype: str = ""
    read_only: bool = False
    missing_confirm_seconds: Seconds = 30.0
    hang_degraded_seconds: Seconds = 600.0


def validate(config: Config) -> str | None:
    if config.name and (not config.name.startswith("/") or (config.name.endswith("/") and config.name != "/")):
        return f'"{config.name}" is not a mount point; write it as the kernel does, as in [checks.mount."/data"]'
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation]:
    mount = _find(host.read_shared(MOUNTINFO), config.name)
    error_number = _probe(host, config.name) if mount is not None else None
    if mount is not None and mount.fstype == "autofs":
        mount = _find(host.read(MOUNTINFO), config.name)  # the query itself has mounted the file system
    is_mounted = mount is not None and mount.point == config.name and mount.fstype != "autofs"
    yield Observation("mount_mounted", int(is_mounted), labels=(("mountpoint", config.name),))
    if mount is None or not is_mounted or error_number == errno.ENOENT:
        yield _broken(Severity.CRITICAL, "missing", "is not mounted", config)
    elif error_number == errno.ESTALE:
        yield _broken(Severity.CRITICAL, "stale", "has a stale file handle", config)
    elif error_number is not None:
        yield _broken(
            Severity.DEGRADED, "failing", f"returns {errno.errorcode.get(error_number, error_number)}", config
        )
    if mount is not None and is_mounted:
        yield from _differs(mount, config)


def _find(text: str | None, path: str) -> Mount | None:
    """Return the uppermost mount at `path`. If there is none, return the automounter's mount that contains `path`, or
    None.

    Raises ValueError if no mount is found and a line cannot be parsed, because that line may be the mount.
    """
    if text is None:
        raise ValueError(f"{MOUNTINFO} is missing")
    mounts, garbled = parse_all(text)
    found = automounter = None
    for mount in mounts:
        if mount.point == path:
            found = mount
        elif mount.fstype == "autofs" and path.startswith(mount.point.rstrip("/") + "/"):
            automounter = mount
    if found is None and garbled:
        raise ValueError(garbled)
    return found or automounter


def _probe(host: Host, path: str) -> int | None:
    """Return statvfs's error number, or None on success. The call may never return, and it triggers an automount."""
    try:
        host.statvfs(path)
    except OSError as error:
        if error.errno in PERMISSION_ERRNOS:
            raise
        return error.errno
    return None


def _broken(severity: Severity, name: str, problem: str, config: Config) -> Finding:
    return Finding(
        severity,
        f"mount/{name}",
        config.name,
        f"{config.name} {problem}",
        confirm_seconds=config.missing_confirm_seconds,
        shared_cause=True,
    )


def _differs(mount: Mount, config: Config) -> Iterator[Finding]:
    if config.fstype and mount.fstype != config.fstype and (config.fstype, mount.fstype) != ("nfs", "nfs4"):
        message = f"{config.name} is {mount.fstype}, not {config.fstype}"
        yield Finding(Severity.DEGRADED, "mount/wrong_type", config.name, message, shared_cause=True)
    if not config.read_only and (mount.read_only or "ro" in mount.options or mount.error_state):
        message = f"{config.name} is {mount.error_state or 'mounted read-only'}"
        yield Finding(Severity.DEGRADED, "mount/read_only", config.name, message, shared_cause=True)


def overdue(config: Config, seconds: float) -> Iterator[Finding]:
    yield Finding(
        Severity.WARNING,
        "mount/hang",
        config.name,
        f"{config.name} has not responded for {max(seconds, 1):.0f} s",
        worsens=Worsens(config.hang_degraded_seconds, Severity.DEGRADED),
        shared_cause=True,
    )


NETWORK_TYPES = (
    "afs|cifs|nfs4?|smb3|virtiofs|orangefs|pvfs2|panfs|gpfs|lustre|wekafs"
    "|(fuse[.])?(beegfs|ceph|daos|glusterfs|juicefs|mfs|weka)"
)
LOCAL_TYPES = "bcachefs|btrfs|ext[234]|f2fs|xfs|zfs"
MULTI_MOUNT_TYPES = ("btrfs", "zfs")  # one file system, mounted in several places
TRANSIENT_MOUNT_POINTS = (
    "/(proc|sys|dev|run|snap|media)(/.*)?"
    "|/(tmp|var/tmp|var/run)/.+"
    "|/var/lib/(containerd|containers|docker|enroot|kubelet|lxc|lxd|machines|nfs|rancher|snapd)(/.*)?"
    "|/var/spool/(slurm|slurmd)/.+"
    "|.*//deleted"
)


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    mounts, parse_error = parse_all(host.read(MOUNTINFO))
    if parse_error:
        raise ValueError(parse_error)
    yield from baseline_mounts(mounts)


def baseline_mounts(mounts: Sequence[Mount]) -> Iterator[Entry | LeftOut]:
    """Yield a setting for each permanent mount that jobs may need."""
    uppermost = {mount.point: mount for mount in mounts}
    automounted = {mount.point for mount in mounts if mount.fstype == "autofs"}
    seen_devices: set[str] = set()
    for mount in sorted(uppermost.values(), key=lambda mount: (len(mount.point), mount.point)):
        if not _is_permanent(mount) or not mount.point.isprintable() or mount.point != mount.point.strip():
            continue
        if any(above in automounted for above in _at_and_above(mount.point)):
            yield LeftOut("mount", "automounted; add it manually if jobs need it", instance=mount.point)
            continue
        if regex(LOCAL_TYPES).fullmatch(mount.fstype) and mount.fstype not in MULTI_MOUNT_TYPES:
            if mount.device in seen_devices:
                continue  # a bind mount of a directory on that device
            seen_devices.add(mount.device)
        if mount.error_state:
            yield LeftOut("mount", f"the kernel has made it {mount.error_state}", instance=mount.point)
            continue
        yield Entry("mount", "fstype", mount.fstype, instance=mount.point)
        if mount.read_only or "ro" in mount.options:
            yield Entry("mount", "read_only", True, instance=mount.point)


def _is_permanent(mount: Mount) -> bool:
    is_local = regex(LOCAL_TYPES).fullmatch(mount.fstype)
    if not (is_local or regex(NETWORK_TYPES).fullmatch(mount.fstype)) or regex(TRANSIENT_MOUNT_POINTS).fullmatch(
        mount.point
    ):
        return False
    if is_local and mount.point.startswith("/etc/"):
        return False  # files such as /etc/hosts that containers mount
    is_loop = mount.device.startswith("7:")
    is_users = any(option.startswith("user_id=") and option != "user_id=0" for option in mount.options)
    return not is_loop and not is_users


def _at_and_above(point: str) -> Iterator[str]:
    while point:
        yield point
        point = point.rpartition("/")[0]
    yield "/"


OBSERVATIONS = {
    "mount_mounted": Meaning("1 if the expected file system is mounted, else 0.", ("mountpoint",)),
}

EXPLAIN = {
    "mount/missing": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "The file system that the settings expect at this mount point is not mounted.",
        "Jobs find an empty directory. They fail, or fill the local disk instead.",
        "Run mount POINT and read its error message, or check the .mount or .automount unit with systemctl status. If "
        "many nodes are affected at once, check the file server or the network.",
        confirm="missing_confirm_seconds",
        shared=True,
    ),
    "mount/stale": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "The file server no longer recognises this mount (ESTALE), usually because the file system was exported again.",
        "Every access fails until the file system is mounted again.",
        "Run umount -l POINT && mount POINT. Restart processes that have open files on this mount.",
        confirm="missing_confirm_seconds",
        shared=True,
    ),
    "mount/failing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The file system is mounted, but a simple query (statvfs) returns an error.",
        "Most accesses by jobs will fail too.",
        "ENOTCONN means that a FUSE client has ended; mount the file system again. For EIO, look for the disk or the "
        "server in journalctl -k. ETIMEDOUT comes from a soft mount whose server does not respond.",
        confirm="missing_confirm_seconds",
        shared=True,
    ),
    "mount/wrong_type": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The mounted file system has a different type from the one in the settings.",
        "Jobs may write to a slow or local file system instead and lose their output.",
        "Compare findmnt POINT with fstab and with fstype in [checks.mount].",
        shared=True,
    ),
    "mount/read_only": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The file system is read-only.",
        "Jobs cannot write their results. A local file system turns read-only after disk errors.",
        "journalctl -k shows disk errors. Run fsck and remount. If the mount is meant to be read-only, set read_only = "
        "true.",
        shared=True,
    ),
    "mount/hang": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The file system did not respond in time. The condition is a warning at first. It becomes degraded if the "
        "hang lasts, but never critical.",
        "Jobs that use the file system hang. On a hard mount they continue when the server is back, so no job is "
        "requeued.",
        "While the condition is only a warning, no action is needed tonight on this node. If many nodes are affected "
        "at once, check the file server and the network first. If only this node is affected, look for 'server not "
        "responding' in journalctl -k, and check the node's network.",
        worsens=WorsensBy("hang_degraded_seconds", Severity.DEGRADED),
        shared=True,
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.MOUNT)
ENDS_JOB = {
    "mount/missing": EndsJob.ALWAYS,
    "mount/stale": EndsJob.ALWAYS,
    "mount/failing": EndsJob.ALWAYS,
    "mount/wrong_type": EndsJob.ALWAYS,
    "mount/read_only": EndsJob.ALWAYS,
    "mount/hang": EndsJob.NEVER,
}
