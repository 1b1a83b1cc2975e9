"""Rules for file systems: local ones that stop after errors, and servers that do not respond.

    kind fs, for a local file system. Fields: device = its kernel name ("sda3", "dm-17"); fs = its type. Codes:
    remount_ro, shutdown, journal_abort   the kernel stopped the file system: writes are no longer possible
    error, io_error, corruption           the file system continues or stops, as the mount option errors= requires
    mount_failed                          the file system could not be mounted
    error_count, memory, warning          minor problems

    kind fs, for a server. Fields: server = its name; fs = nfs, lockd, cifs, lustre, ceph, ... Codes:
    not_responding, evicted               the server does not respond, or it evicted this client
    ok                                    the server responds again
    request_timeout, client_error, lbug   problems that a client reports about itself
    detail                                a further line about one of these

Names that users choose (of processes, paths, hosts) come after the matched text. The exception is `server`, from which
at most 255 characters without blanks are read. Sources: Linux 3.10 to 7.3, fs/ext4/super.c, fs/jbd2,
fs/xfs/xfs_fsops.c, xfs_message.c, fs/btrfs/messages.c, net/sunrpc/clnt.c, fs/nfs, net/ceph, fs/ceph; Lustre 2.5 to
2.15, ptlrpc/import.c.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import Rule, event, event_builder, find_code
from healthd.common.model import KernelEvent
from healthd.common.text import regex

DEVICE = r"([A-Za-z][\w.!-]{0,31})"

_Table = tuple[tuple[re.Pattern[str], str], ...]


def _code_table(*table: tuple[str, str]) -> _Table:
    return tuple((regex(pattern, re.S), code) for pattern, code in table)


def _device_event(match: re.Match[str], code: str, fs: str, device: str | None) -> KernelEvent | None:
    return event("fs", match, code, fields=(("fs", fs), ("device", device))) if code else None


# --- ext2, ext3, ext4 and their journals
#
# EXT4-fs error (device sda3): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0
# EXT4-fs error (device sda3) in ext4_reserve_inode_write:5870: Journal has aborted
# EXT4-fs (sda3): Remounting filesystem read-only
_EXT = regex(rf"(EXT[234])-fs (?:(error|warning) \(device {DEVICE}\)(?::| in )|\({DEVICE}\): )(.{{1,200}})", re.S)
_EXT_CODES = _code_table(
    (r"(?:error: )?[Rr]emounting filesystem read-only", "remount_ro"),
    (r"(?:Shut(?:ting)? down|shut down requested|emergency (?:remount|read-only))", "shutdown"),
    (r"error count since last fsck|(?:initial|last) error at(?: time)? ", "error_count"),
    (r"I/O error while (?:writing|reading)|previous I/O error to superblock|error loading journal", "io_error"),
    (r"ext4_\w{1,40}: jbd2_start: ", "error"),
    (r"This should not happen!!|Delayed block allocation failed|failed to convert unwritten", "io_error"),
    (r"error: |ext4_\w{1,40}: (?:bad|corrupt|invalid)|ext4_abort called", "error"),
    (r"(?:ext4_check_descriptors: |group descriptors corrupted|bad geometry|corrupt root inode)", "mount_failed"),
    (r"(?:journal inode is deleted|no journal found|unable to read superblock|mount failed)", "mount_failed"),
    (r"warning: mounting (?:fs with errors|unchecked fs)|Inode \d{1,20} .{0,40}orphan list check failed", "warning"),
)
_IO_WARNING = regex(r" ?ext4_end_bio:\d{1,6}: I/O error")


def _ext(kind: str, match: re.Match[str]) -> KernelEvent | None:
    fs, level, error_device, device, text = match.groups()
    if level == "error":
        code = "error"
    elif level == "warning":
        code = "io_error" if _IO_WARNING.match(text) else "warning"
    else:
        code = find_code(text, _EXT_CODES)
    return _device_event(match, code, fs.lower(), error_device or device)


# Aborting journal on device sda3-8.        the journal's inode follows "-" (":" in 2.6)
# JBD2: Error -5 detected when updating journal superblock for sda3-8.
_JOURNAL = regex(
    rf"(?:Aborting journal on device|JBD2?: .{{0,80}}? (?:superblock for|flushing file data on)) {DEVICE}(:\d{{1,10}})?"
)
_JBD2 = regex(r"JBD2: (?:recovery failed|journal checksum error|Invalid checksum|IO error|I/O error|Error -?\d)")
_JOURNAL_INODE = regex(r"-\d{1,10}$")


def _journal(kind: str, match: re.Match[str]) -> KernelEvent | None:
    code = "journal_abort" if match.string.startswith("Aborting") else "io_error"
    return _device_event(match, code, "ext4", _JOURNAL_INODE.sub("", match[1].rstrip(".")))


# --- XFS (sda3): ...
# XFS: Internal error XFS_WANT_CORRUPTED_RETURN at line 342 of file fs/xfs/xfs_alloc.c.       (no device)
_XFS = regex(rf"XFS(?: \({DEVICE}\)|(?=: Internal error \w{{1,64}} at line \d)): (.{{1,300}})", re.S)
_XFS_CODES = _code_table(
    (r"User initiated shutdown received", "shutdown"),
    (r"xfs_do_force_shutdown\(|Filesystem has been shut down|[^\n]{0,250}?Shutting down filesystem", "shutdown"),
    (r"Please un?mount the filesystem and rectify", "shutdown"),
    (r"Remounting filesystem read-only", "remount_ro"),
    (
        r"(?:metadata|log) I/O error|I/O error while|writeback error on|[Ff]ailing async write|page discard on page",
        "io_error",
    ),
    (r"xfs_log_force: error |xfs_\w{1,40}: .{0,80}returned error|xlog_\w{1,30}: .{0,80}error", "io_error"),
    (r"Internal error |Metadata (?:corruption|CRC error) detected|Corruption (?:detected|warning)", "corruption"),
    (r"First \d{1,4} bytes of corrupted metadata", "detail"),
    (r"(?:corrupt|Corrupt)|bad magic number in|Unmount and run xfs_repair|[Cc]orruption of ", "corruption"),
    (r"log mount(?:/recovery)? failed|SB validate failed|failed to read root inode|RT mount failed", "mount_failed"),
    (
        r"Mount(?:ing)? failed|Failed to (?:recover|read)|failed to locate log tail|Superblock has unknown",
        "mount_failed",
    ),
    (r"possible memory allocation deadlock", "memory"),
)
_XFS_MEMORY = regex(r"XFS: .{1,40}possible memory allocation deadlock", re.S)


def _xfs(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _device_event(match, find_code(match[2], _XFS_CODES), "xfs", match[1])


# --- btrfs: BTRFS error (device sda3: state EA): ...          "state" follows a blank from 6.0 on, a colon in 5.18
_BTRFS = regex(
    rf"BTRFS:? (emergency|alert|critical|crit|error|warning|info|panic) \(device {DEVICE}(?::? state \w{{1,12}})?\)"
    r"(?::| in) ?(.{1,200})",
    re.S,
)
_BTRFS_BARE = regex(r"BTRFS:? (?:error: |critical: )?(Transaction aborted|.{0,60}open_ctree failed)", re.S)
_BTRFS_CODES = _code_table(
    (r"forced readonly|emergency shutdown|Remounting read-only after error", "remount_ro"),
    (r"bdev .{1,100} errs: wr|lost page write|direct IO failed|error writing primary super", "io_error"),
    (r"(?:i/o|I/O|IO) (?:error|failure)", "io_error"),
    (r"csum failed|checksum (?:error|verify failed)|csum (?:mismatch|hole)|parent transid verify failed", "corruption"),
    (r"corrupt |corruption|bad tree block|block=\d{1,20} (?:read|write) time tree block corruption", "corruption"),
    (r"open_ctree failed|failed to (?:read|recover|load|verify)|super_total_bytes", "mount_failed"),
    (r"Skipping commit of aborted transaction|Transaction aborted|cleaner transaction attach", "error"),
)


def _btrfs(kind: str, match: re.Match[str]) -> KernelEvent | None:
    level, device, text = match.groups()
    code = find_code(text.lstrip(), _BTRFS_CODES)
    if level == "info" and code != "remount_ro":  # counters of past errors, which are printed at each mount
        return None
    if level not in ("info", "warning"):
        code = code or "error"
    return _device_event(match, code, "btrfs", device)


def _btrfs_bare(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _device_event(match, "error" if match[1].startswith("Transaction") else "mount_failed", "btrfs", None)


# --- others
_OTHER = regex(rf"(F2FS-fs|FAT-fs|bcachefs|SQUASHFS)(?: error)?(?: \(?(?:device )?{DEVICE}\)?)?: ?(.{{1,160}})", re.S)
_OTHER_CODES = _code_table(
    (r".{0,60}(?:[Ff]ilesystem has been set read-only|emergency read.only)", "remount_ro"),
    (r".{0,60}(?:I/O error|read error|write error|[Uu]nable to read|Failed to read block)", "io_error"),
    (r"error, |.{0,60}(?:inconsistent|fatal error|zlib decompression failed|checksum mismatch)", "error"),
)
_ZFS = regex(r"WARNING: Pool '[^'\n]{1,255}' has encountered an uncorrectable I/O failure")


def _other(kind: str, match: re.Match[str]) -> KernelEvent | None:
    name, device, text = match.groups()
    return _device_event(match, find_code(text, _OTHER_CODES), name.lower().removesuffix("-fs"), device)


# --- servers
#
# nfs: server 100.73.159.36 not responding, still trying / timed out          and, when it responds again:
# nfs: server 100.73.159.36 OK
_SERVER = r"(\S{1,255})"
_RPC = regex(rf"(nfs4?|lockd|nlm|nfsacl|rpcbind|portmap|mount|statd): server {_SERVER} (not responding|OK)(?:$|,|\s)")
_CIFS = regex(rf"CIFS:? VFS: (?:Server |\\\\)?{_SERVER} (?:Server \S{{1,255}} )?has not responded (?:in|for) ")
_CIFS_CLIENT = regex(
    r"CIFS:? VFS: (?:\\\S{1,255} )?(?:Error connecting to socket|cifs_mount failed|Send error in |No (?:task|writable))"
)
_NFS = regex(
    r"(?:NFS|NFSv4|nfs|nfs4|NFS4): (?:(?:state manager|state recovery|permission denied|[Ll]ock reclaim failed)\b"
    rf"|server {_SERVER} error: fileid changed|v4 server |Buggy server|Server \S{{1,255}} reports our clientid"
    r"|directory .{1,200} contains a readdir loop|Stale|stale"
    # A function's name alone does not indicate a fault: with rpcdebug, all functions log what they do.
    r"|(?:__)?nfs4?_\w{1,50}[: ].{0,80}?(?:[Ff]ail|[Ee]rror))",
    re.S,
)
_NFS_BARE = regex(r"(?:__)?nfs4_reclaim_\w{1,30}: .{0,80}(?:fail|error)", re.S)


def _rpc(kind: str, match: re.Match[str]) -> KernelEvent | None:
    program, server, text = match.groups()
    fs = "nfs" if program.startswith(("nfs", "mount")) else program
    return _server_event(match, "ok" if text == "OK" else "not_responding", fs, server)


def _server_event(match: re.Match[str], code: str, fs: str, server: str | None) -> KernelEvent | None:
    return event("fs", match, code, fields=(("fs", fs), ("server", server))) if code else None


def _cifs(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _server_event(match, "not_responding", "cifs", match[1].lstrip("\\"))


# Lustre: scratch-MDT0000-mdc-ffff88203810d800: Connection to scratch-MDT0000 (at 172.31.126.88@o2ib) was lost; ...
# Lustre: scratch-MDT0000-mdc-ffff88203810d800: Connection restored to 172.31.126.88@o2ib (at 172.31.126.88@o2ib)
# LustreError: 167-0: scratch-OST0001-osc-ffff88203810d800: This client was evicted by scratch-OST0001; ...
# LustreError: 11-0: scratch-MDT0000-mdc-ffff88203810d800: operation obd_ping to node ... failed: rc = -107
# Lustre: 2449:0:(client.c:2141:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow reply: ...
_LUSTRE = regex(
    r"(Lustre|LustreError|LNet|LNetError): "
    r"(?:\d{1,10}(?:-\d{1,10}|:\d{1,3}:\([^()\s]{1,120}\(\)\)|:\(?[^\s()]{1,120}\)?):? )?"
    r"(?:([A-Za-z0-9][\w.@:-]{0,127}): )?(.{1,200})",
    re.S,
)
_LUSTRE_CODES = _code_table(
    (r"Skipped \d{1,10} previous similar", "detail"),
    (r"Connection to \S{1,128} \(at \S{1,128}\) was lost", "not_responding"),
    (r"Connection restored to ", "ok"),
    (r"This client was evicted by|Evicted from ", "evicted"),
    (r"@@@ Request sent has (?:timed out|failed)|Timed out tx|@@@ timeout", "request_timeout"),
    (r"LBUG|ASSERTION\(", "lbug"),
)
_LUSTRE_CLIENT = regex(r"-(?:mdc|osc|mgc|lwp|osp|mdt)-[0-9a-f]{6,16}$|-mdc$|-osc$")
_EVICTED_BY = regex(r"(?:This client was evicted by|Evicted from) ([\w.@:-]{1,128}?)[;:,. ]")


def _lustre(kind: str, match: re.Match[str]) -> KernelEvent | None:
    source, subject, text = match.groups()
    code = find_code(text, _LUSTRE_CODES) or ("client_error" if source.endswith("Error") else "")
    evicted_by = _EVICTED_BY.match(text)
    server = _LUSTRE_CLIENT.sub("", subject) if subject else evicted_by[1] if evicted_by else None
    return _server_event(match, code, "lustre", server if code in ("not_responding", "ok", "evicted") else None)


# libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon
# ceph: mds0 caps stale          from 6.7 on: ceph: [FSID CLIENT]: mds0 caps stale
_CEPH = regex(r"(?:lib)?ceph: (?:\[[0-9a-f-]{1,40} \d{1,20}\]:? )?(mon|mds|osd)(\d{1,6}) (.{1,200})", re.S)
_CEPH_CODES = _code_table(
    (r"(?:\S{1,80} )?session lost|hung|caps (?:stale|went stale)|reconnect denied|rejected session", "not_responding"),
    (r"(?:\S{1,80} )?session established|came back|caps renewed|reconnect success|recovery completed", "ok"),
    (r"closed our session|.{0,40}blo?a?cklisted", "evicted"),
    (r"(?:\S{1,80} )?(?:socket (?:closed|error)|connect error|wrong peer|bad |feature set mismatch)", "client_error"),
    (r"down$|weight 0x0 \(out\)", "client_error"),
)

# beegfs: python(1234): Messaging (RPC): Communication error: Receive timed out from: beegfs-storage node1 [ID: 1]
# The message begins with the name of the requesting process.
_BEEGFS = regex(
    r"beegfs: .{1,80}?(?:Communication error|Receive timed out|Unable to connect|Connect(?:ion)? failed|unreachable"
    r"|Configuration error)",
    re.S,
)
# GPFS Deadman Switch timer has expired; IOs in progress: 2          the kernel side of mmfsd
_GPFS = regex(r"GPFS (?:Deadman Switch timer|logAssertFailed)|mmfs: (?:\[[EX]\]|Stale|stale)")


def _ceph(kind: str, match: re.Match[str]) -> KernelEvent | None:
    # The client switches to another monitor if it loses one.
    server = "mon" if match[1] == "mon" else match[1] + match[2]
    return _server_event(match, find_code(match[3], _CEPH_CODES), "ceph", f"ceph {server}")


RULES: tuple[Rule, ...] = (
    Rule("fs", ("EXT4-fs ", "EXT3-fs ", "EXT2-fs "), _EXT, _ext),
    Rule("fs", ("Aborting journal", "JBD2: ", "JBD: "), _JOURNAL, _journal),
    Rule("fs", ("JBD2: ",), _JBD2, event_builder("io_error", fs="ext4")),
    Rule("fs", ("XFS",), _XFS, _xfs),
    Rule("fs", ("memory allocation deadlock",), _XFS_MEMORY, event_builder("memory", fs="xfs")),
    Rule("fs", ("BTRFS",), _BTRFS, _btrfs),
    Rule("fs", ("BTRFS",), _BTRFS_BARE, _btrfs_bare),
    Rule("fs", ("F2FS-fs", "FAT-fs", "bcachefs", "SQUASHFS"), _OTHER, _other),
    Rule("fs", ("has encountered an uncorrectable",), _ZFS, event_builder("io_error", fs="zfs")),
    Rule("fs", (": server ",), _RPC, _rpc),
    Rule("fs", ("CIFS",), _CIFS, _cifs),
    Rule("fs", ("CIFS",), _CIFS_CLIENT, event_builder("client_error", fs="cifs")),
    Rule("fs", ("NFS: ", "NFSv4: ", "nfs: ", "nfs4: ", "NFS4: "), _NFS, event_builder("client_error", fs="nfs")),
    Rule("fs", ("nfs4_reclaim_",), _NFS_BARE, event_builder("client_error", fs="nfs")),
    Rule("fs", ("Lustre", "LNet"), _LUSTRE, _lustre),
    Rule("fs", ("ceph: ",), _CEPH, _ceph),
    Rule("fs", ("beegfs: ",), _BEEGFS, event_builder("client_error", fs="beegfs")),
    Rule("fs", ("GPFS ", "mmfs: "), _GPFS, event_builder("client_error", fs="gpfs")),
)
