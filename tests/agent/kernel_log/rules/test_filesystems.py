"""Tests of file system lines. Each captured line has a comment with its public issue; the other lines follow the
formats of the kernel and of Lustre."""

from __future__ import annotations

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.rules import filesystems


def read(text: str) -> tuple[str, str, str]:
    """Return (type of file system, code, device or server) of a message."""
    event = parse(text)
    if event is None or event.kind != "fs":
        return ("", "", "")
    event_fields = dict(event.fields)
    return event_fields["fs"], event.code, event_fields.get("device") or event_fields.get("server", "")


@pytest.mark.parametrize(
    ("text", "fs", "code", "device"),
    [
        # github.com/kubernetes/kubernetes/issues/12905 and 10664
        ("Aborting journal on device dm-4-8.", "ext4", "journal_abort", "dm-4"),
        ("EXT4-fs error (device dm-4) in ext4_setattr:4562: Journal has aborted", "ext4", "error", "dm-4"),
        (
            "EXT4-fs error (device sdb): ext4_journal_check_start:56: Detected aborted journal",
            "ext4",
            "error",
            "sdb",
        ),
        ("EXT4-fs (sdb): Remounting filesystem read-only", "ext4", "remount_ro", "sdb"),
        (
            "EXT4-fs warning (device sdb): __ext4_read_dirblock:902: error reading directory block (ino 1, block 0)",
            "ext4",
            "warning",
            "sdb",
        ),
        # github.com/longhorn/longhorn/issues/6650
        ("EXT4-fs (sdi): I/O error while writing superblock", "ext4", "io_error", "sdi"),
        (
            "EXT4-fs error (device sdf): ext4_check_bdev_write_error:217: comm filebeat: Error while async write back",
            "ext4",
            "error",
            "sdf",
        ),
        (
            "EXT4-fs warning (device sda3): ext4_end_bio:343: I/O error 10 writing to inode 12 starting block 88)",
            "ext4",
            "io_error",
            "sda3",
        ),
        ("EXT4-fs (sda3): previous I/O error to superblock detected", "ext4", "io_error", "sda3"),
        ("EXT4-fs (sda3): This should not happen!! Data will be lost", "ext4", "io_error", "sda3"),
        ("EXT4-fs (sda3): error count since last fsck: 3", "ext4", "error_count", "sda3"),
        ("EXT4-fs (sda3): initial error at time 1700000000: ext4_lookup:1", "ext4", "error_count", "sda3"),
        ("EXT4-fs (sda3): shut down requested (2)", "ext4", "shutdown", "sda3"),
        ("EXT3-fs (sda3): error: remounting filesystem read-only", "ext3", "remount_ro", "sda3"),
        ("EXT2-fs error (device sda3): ext2_lookup: deleted inode referenced: 5", "ext2", "error", "sda3"),
        ("Aborting journal on device nvme0n1p2-8.", "ext4", "journal_abort", "nvme0n1p2"),
        ("Aborting journal on device sdb1.", "ext4", "journal_abort", "sdb1"),
        ("JBD2: Error -5 detected when updating journal superblock for dm-0-8.", "ext4", "io_error", "dm-0"),
        ("EXT4-fs (dm-17): ext4_writepages: jbd2_start: 1024 pages, ino 5; err -30", "ext4", "error", "dm-17"),
        ("JBD2: recovery failed", "ext4", "io_error", ""),
        ("JBD2: Invalid checksum recovering block 88 in log", "ext4", "io_error", ""),
        ("XFS (nbd0): First 128 bytes of corrupted metadata buffer:", "xfs", "detail", "nbd0"),
        ("JBD2: Detected IO errors while flushing file data on sda3-8", "ext4", "io_error", "sda3"),
        # github.com/kubernetes/node-problem-detector/pull/845
        (
            "XFS (dm-4): Internal error xfs_iunlink_remove at line 2038 of file fs/xfs/xfs_inode.c.",
            "xfs",
            "corruption",
            "dm-4",
        ),
        ("XFS (dm-4): Corruption detected. Unmount and run xfs_repair", "xfs", "corruption", "dm-4"),
        ("XFS (dm-4): xfs_inactive_ifree: xfs_ifree returned error -117", "xfs", "io_error", "dm-4"),
        (
            "XFS (dm-4): xfs_do_force_shutdown(0x1) called from line 1788 of file fs/xfs/xfs_inode.c.",
            "xfs",
            "shutdown",
            "dm-4",
        ),
        ("XFS (dm-4): I/O Error Detected. Shutting down filesystem", "xfs", "shutdown", "dm-4"),
        ("XFS (dm-4): Please umount the filesystem and rectify the problem(s)", "xfs", "shutdown", "dm-4"),
        # github.com/siderolabs/talos/pull/8733
        ("XFS (sdb6): log I/O error -5", "xfs", "io_error", "sdb6"),
        ("XFS (sdb6): Filesystem has been shut down due to log error (0x2).", "xfs", "shutdown", "sdb6"),
        (
            "XFS (nvme0n1): Corruption of in-memory data (0x8) detected at xfs_trans_cancel+0x11b/0x140 [xfs] "
            "(fs/xfs/xfs_trans.c:1098).  Shutting down filesystem.",
            "xfs",
            "shutdown",
            "nvme0n1",
        ),
        # github.com/dm-vdo/kvdo/issues/25
        (
            'XFS (dm-7): metadata I/O error: block 0x280000010 ("xlog_bread_noalign") error 5 numblks 8',
            "xfs",
            "io_error",
            "dm-7",
        ),
        ("XFS (dm-7): log mount/recovery failed: error -5", "xfs", "mount_failed", "dm-7"),
        ("XFS (dm-2): Corruption warning: Metadata has LSN (1:2736) ahead of current LSN", "xfs", "corruption", "dm-2"),
        ("XFS (dm-0): xfs_log_force: error -5 returned.", "xfs", "io_error", "dm-0"),
        (
            "XFS (nbd0): Metadata corruption detected at xfs_dinode_verify.part.0+0x172/0x640 [xfs], inode 0x1 dinode",
            "xfs",
            "corruption",
            "nbd0",
        ),
        ('XFS (sda): metadata I/O error in "xfs_imap_to_bp" at daddr 0x8 len 8 error 5', "xfs", "io_error", "sda"),
        ("XFS: python3(77) possible memory allocation deadlock size 65552 in kmem_alloc", "xfs", "memory", ""),
        # github.com/btrfs/linux/issues/761, coreos/rpm-ostree/issues/4457, NixOS/nixpkgs/issues/160398
        (
            "BTRFS: error (device nvme2n1) in __btrfs_update_delayed_inode:1075: errno=-5 IO failure",
            "btrfs",
            "error",
            "nvme2n1",
        ),
        ("BTRFS info (device nvme2n1): forced readonly", "btrfs", "remount_ro", "nvme2n1"),
        ("BTRFS info (device sda3: state E): forced readonly", "btrfs", "remount_ro", "sda3"),
        ("BTRFS info (device sda3 state EA): forced readonly", "btrfs", "remount_ro", "sda3"),
        ("BTRFS warning (device nvme2n1): Skipping commit of aborted transaction.", "btrfs", "error", "nvme2n1"),
        (
            "BTRFS error (device sda3): block=5763170304 write time tree block corruption detected",
            "btrfs",
            "corruption",
            "sda3",
        ),
        ("BTRFS: Transaction aborted (error -28)", "btrfs", "error", ""),
        (
            "BTRFS error (device dm-0): bdev /dev/mapper/root_1 errs: wr 0, rd 3535, flush 0, corrupt 0, gen 0",
            "btrfs",
            "io_error",
            "dm-0",
        ),
        (
            "BTRFS warning (device sda3): csum failed root 5 ino 257 off 0 csum 0x1 expected csum 0x2 mirror 1",
            "btrfs",
            "corruption",
            "sda3",
        ),
        ("BTRFS critical (device sda3): corrupt leaf: root=2 block=88", "btrfs", "corruption", "sda3"),
        (
            "BTRFS error (device mmcblk0p2) in __btrfs_free_extent:5783: errno=-5 IO failure",
            "btrfs",
            "error",
            "mmcblk0p2",
        ),
        ("FAT-fs (sda1): Filesystem has been set read-only", "fat", "remount_ro", "sda1"),
        ("FAT-fs (sda1): error, fat_get_cluster: invalid cluster chain (i_pos 0)", "fat", "error", "sda1"),
        ("F2FS-fs (vdb): inconsistent node block, nid:5", "f2fs", "error", "vdb"),
        ("SQUASHFS error: Unable to read page, block 88, size 5", "squashfs", "io_error", ""),
        ("bcachefs (sdb): emergency read only", "bcachefs", "remount_ro", "sdb"),
        (
            "WARNING: Pool 'tank' has encountered an uncorrectable I/O failure and has been suspended.",
            "zfs",
            "io_error",
            "",
        ),
    ],
)
def test_parse_reads_local_file_system_faults(text: str, fs: str, code: str, device: str) -> None:
    assert read(text) == (fs, code, device)


@pytest.mark.parametrize(
    ("text", "fs", "code", "server"),
    [
        ("nfs: server 100.73.159.36 not responding, still trying", "nfs", "not_responding", "100.73.159.36"),
        ("nfs: server nas1.example.org not responding, timed out", "nfs", "not_responding", "nas1.example.org"),
        ("nfs: server fd00::1 OK", "nfs", "ok", "fd00::1"),
        ("lockd: server nas1 not responding, still trying", "lockd", "not_responding", "nas1"),
        ("lockd: server nas1 OK", "lockd", "ok", "nas1"),
        ("NFS: state manager: check lease failed on NFSv4 server nas1 with error 13", "nfs", "client_error", ""),
        ("NFS: nfs4_reclaim_open_state: unhandled error -10026", "nfs", "client_error", ""),
        ("nfs4_reclaim_open_state: Lock reclaim failed!", "nfs", "client_error", ""),
        ("NFS: server nas1 error: fileid changed", "nfs", "client_error", ""),
        ("CIFS: VFS: \\\\nas2 has not responded in 180 seconds. Reconnecting...", "cifs", "not_responding", "nas2"),
        ("CIFS VFS: Server nas2 has not responded in 120 seconds. Reconnecting...", "cifs", "not_responding", "nas2"),
        # github.com/aws/aws-parallelcluster/issues/2701
        (
            "Lustre: no2zxbmv-MDT0000-mdc-000000001785e248: Connection to no2zxbmv-MDT0000 (at 10.0.47.232@tcp) was "
            "lost; in progress operations using this service will wait for recovery to complete",
            "lustre",
            "not_responding",
            "no2zxbmv-MDT0000",
        ),
        (
            "Lustre: 3315:0:(client.c:2116:ptlrpc_expire_one_request()) @@@ Request sent has timed out for slow "
            "reply: [sent 1619790610/real 1619790610]  req@0000000052a0ed37 x1698193162592192/t0(0)",
            "lustre",
            "request_timeout",
            "",
        ),
        (
            "Lustre: no2zxbmv-MDT0000-mdc-000000001785e248: Connection restored to 10.0.47.232@tcp "
            "(at 10.0.47.232@tcp)",
            "lustre",
            "ok",
            "no2zxbmv-MDT0000",
        ),
        ("Lustre: MGS: Connection restored to c7547940-8b66 (at 10.14.83.21@tcp)", "lustre", "ok", "MGS"),
        # github.com/jade-hpc-gpu/jade-hpc-gpu.github.io/issues/14
        (
            "LustreError: 11-0: jmain01-MDT0000-mdc-ffff88203810d800: operation obd_ping to node 172.31.126.88@o2ib "
            "failed: rc = -107",
            "lustre",
            "client_error",
            "",
        ),
        (
            "LNet: 2431:0:(o2iblnd_cb.c:3174:kiblnd_check_conns()) Timed out tx for 172.31.126.87@o2ib: 403055 seconds",
            "lustre",
            "request_timeout",
            "",
        ),
        (
            "Lustre: 2449:0:(client.c:2141:ptlrpc_expire_one_request()) Skipped 24 previous similar messages",
            "lustre",
            "detail",
            "",
        ),
        (
            "LustreError: 166-1: MGC172.31.126.87@o2ib: Connection to MGS (at 172.31.126.87@o2ib) was lost; in "
            "progress operations using this service will fail",
            "lustre",
            "not_responding",
            "MGC172.31.126.87@o2ib",
        ),
        (
            "LustreError: 167-0: scratch-OST0001-osc-ffff88203810d800: This client was evicted by scratch-OST0001; in "
            "progress operations using this service will fail.",
            "lustre",
            "evicted",
            "scratch-OST0001",
        ),
        (
            "LustreError: 167-0: This client was evicted by scratch-OST0001; in progress operations using this "
            "service will fail.",
            "lustre",
            "evicted",
            "scratch-OST0001",
        ),
        ("Lustre: Evicted from MGS (at 10.0.0.1@tcp) after server handle changed", "lustre", "evicted", "MGS"),
        ("LustreError: 123:0:(osc_cache.c:1:osc_release()) ASSERTION( x ) failed: ", "lustre", "lbug", ""),
        ("LustreError: 123:0:(osc_cache.c:1:osc_release()) LBUG", "lustre", "lbug", ""),
        (
            "LNetError: 123:0:(o2iblnd_cb.c:3350:kiblnd_check_txs_locked()) Timed out tx: active_txs, 0 seconds",
            "lustre",
            "request_timeout",
            "",
        ),
        ("libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon", "ceph", "not_responding", "ceph mon"),
        ("libceph: mon2 (1)10.0.0.3:6789 session established", "ceph", "ok", "ceph mon"),
        # github.com/ceph/ceph/pull/65325
        ("ceph: mds0 closed our session", "ceph", "evicted", "ceph mds0"),
        ("ceph: mds0 reconnect denied", "ceph", "not_responding", "ceph mds0"),
        ("libceph: mds0 172.21.5.114:6812 socket closed (con state OPEN)", "ceph", "client_error", "ceph mds0"),
        ("ceph: mds0 caps stale", "ceph", "not_responding", "ceph mds0"),
        ("ceph: mds0 caps renewed", "ceph", "ok", "ceph mds0"),
        ("ceph: [9b5d5d2e-1f6c-4b0e-8f3e-0123456789ab 4154]: mds0 hung", "ceph", "not_responding", "ceph mds0"),
        ("ceph: mds0 came back", "ceph", "ok", "ceph mds0"),
        (
            "beegfs: python(1234): Messaging (RPC): Communication error: Receive timed out from: beegfs-storage n1",
            "beegfs",
            "client_error",
            "",
        ),
        (
            "beegfs: mount(15): Configuration error: Initialization of common objects failed.",
            "beegfs",
            "client_error",
            "",
        ),
        # github.com/vdsm/virtual-dsm/issues/865
        ("CIFS VFS: cifs_mount failed w/return code = -115", "cifs", "client_error", ""),
        ("CIFS: VFS: Error connecting to socket. Aborting operation.", "cifs", "client_error", ""),
        ("GPFS Deadman Switch timer [0] has expired; IOs in progress: 2", "gpfs", "client_error", ""),
    ],
)
def test_parse_reads_network_file_system_faults_and_recovery(text: str, fs: str, code: str, server: str) -> None:
    assert read(text) == (fs, code, server)


@pytest.mark.parametrize(
    "text",
    [
        "EXT4-fs (nvme0n1p1): mounted filesystem 933e404a-e526 r/w with ordered data mode. Quota mode: none.",
        "EXT4-fs (nvme0n1p1): re-mounted 933e404a-e526 ro. Quota mode: none.",
        "EXT4-fs (NVMEn1p2): re-mounted UUID r/w. Quota mode: none.",
        "EXT4-fs (sda1): unmounting filesystem 933e404a-e526.",
        "EXT4-fs (sda1): recovery complete",
        "EXT4-fs (sda1): orphan cleanup on readonly fs",
        "EXT4-fs (sdn): VFS: Can't find ext4 filesystem",
        "EXT4-fs (sda1): couldn't mount as ext3 due to feature incompatibilities",
        "EXT4-fs: Warning: mounting with data=journal disables delayed allocation",
        "JBD2: Clearing recovery information on journal",
        "XFS (dm-1): Mounting V5 Filesystem",
        "XFS (vda1): Ending clean mount",
        "XFS (sda): Starting recovery (logdev: internal)",
        "XFS (sda): Unmounting Filesystem 933e404a-e526",
        "XFS (sdb6): Quotacheck needed: Please wait.",
        "SGI XFS with ACLs, security attributes, realtime, quota, no debug enabled",
        "BTRFS info (device sda3): bdev /dev/sda3 errs: wr 0, rd 0, flush 0, corrupt 2, gen 0",
        "BTRFS info (device dm-0): the free space cache file (615276085248) is invalid, skip it",
        "BTRFS info (device sda3): using free space tree",
        "BTRFS: device fsid 933e404a-e526 devid 1 transid 5 /dev/sda3 scanned by systemd-udevd (300)",
        "FAT-fs (sda1): Volume was not properly unmounted. Some data may be corrupt. Please run fsck.",
        "F2FS-fs (vdb): Mounted with checkpoint version = 5",
        "NFS: Registering the id_resolver key type",
        "nfs: Deprecated parameter 'intr'",
        "NFS: permission(0:41/13063406188894154770), mask=0x10, res=0",
        # github.com/nfs-ganesha/nfs-ganesha/issues/335: rpcdebug
        "NFS: nfs_pgio_result: 41836, (status -528)",
        "NFS: nfs_weak_revalidate: inode 10332493177315662170 is valid",
        "NFSD: client 10.9.8.108 testing state ID with incorrect client ID",
        "RPC: Registered named UNIX socket transport module.",
        "FS-Cache: Netfs 'nfs' registered for caching",
        "Lustre: Lustre: Build Version: 2.12.8",
        "Lustre: Mounted scratch-client",
        "Lustre: Unmounted scratch-client",
        "LNet: Added LNI 10.0.0.1@tcp [8/256/0/180]",
        "LNet: Using FMR for registration",
        "Key type ceph registered",
        "libceph: loaded (mon/osd proto 15/24)",
        "libceph: client4154 fsid 9b5d5d2e-1f6c-4b0e-8f3e-0123456789ab",
        "ceph: loaded (mds proto 32)",
        "overlayfs: upper fs does not support RENAME_WHITEOUT.",
        "fuse: init (API version 7.39)",
        "beegfs: enabling unsafe global rkey",
        "CIFS: Attempting to mount \\\\nas2\\share",
    ],
)
def test_parse_ignores_healthy_file_system_lines(text: str) -> None:
    assert parse(text) is None


def test_parse_reads_xfs_fault_without_device():
    line = "XFS: Internal error XFS_WANT_CORRUPTED_RETURN at line 342 of file fs/xfs/xfs_alloc.c.  Caller 0x1"
    assert read(line) == ("xfs", "corruption", "")
    assert read("XFS: Internal error (812) possible memory allocation deadlock size 88 in kmem_alloc")[1] == "memory"


@pytest.mark.parametrize(
    "name", ["EXT4-fs (sda3):", "nfs: server a OK", "XFS (sda): x", "Lustre: a: b", "x): Remounting", "sda3): in x"]
)
def test_parse_is_not_misled_by_process_names(name: str) -> None:
    text = f"EXT4-fs error (device dm-17): ext4_find_entry:1455: inode #2: comm {name}: Remounting filesystem read-only"
    assert read(text) == ("ext4", "error", "dm-17")
    assert read(f"{name}[77]: segfault at 0 ip 0 sp 0 error 4 in Aborting journal on device sda3-8.") == ("", "", "")
    oom = parse(f"oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/EXT4-fs (sda3): x,task={name},pid=7,uid=0")
    assert oom is None or oom.kind != "fs"


PIECES = [literal for rule in filesystems.RULES for literal in rule.literals] + [
    *("(device sda3)", "(sda3): ", " state EA", ": ", "server ", "not responding", "OK", "Connection to ", "(at x)"),
    *(
        "was lost",
        "1:0:(a.c:1:b()) ",
        "@@@ Request sent has ",
        "mon0 ",
        "mds0 ",
        "A" * 40,
        " " * 40,
        "0" * 40,
        "error ",
    ),
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=12))
def test_parse_accepts_any_text(pieces: list[str]) -> None:
    event = parse("".join(pieces))
    if event is not None and event.kind == "fs":
        assert all(len(value) <= 255 and "\n" not in value for _, value in event.fields)


@pytest.mark.parametrize("piece", [*PIECES, "Lustre: a-", "BTRFS error (device a", "beegfs: a", "JBD2: a ", "XFS: a"])
def test_parse_is_fast_for_long_line(piece: str) -> None:
    for prefix in (
        "",
        "XFS (sda): ",
        "Lustre: ",
        "LustreError: 11-0: ",
        "BTRFS error (device sda3): ",
        "libceph: mon0 ",
    ):
        text = prefix + piece * (16_000 // len(piece))
        assert cpu_seconds(lambda text=text: [parse(text) for _ in range(20)], 0.5) < 0.5
