"""Rows of disks, and of kernel lines about file systems."""

from __future__ import annotations

import shutil

from machine import DATA, DISK, NVME, ROOT, TMP
from stories import WINDOW_SECONDS, Row, Scene, Step, kernel, nothing, rebooted, steps, writes

from healthd.common.model import Severity

IO_ERROR = "I/O error, dev {}, sector 32545872 op 0x1:(WRITE) flags 0x80700 phys_seg 1 prio class 2"
MEDIUM_ERROR = "critical medium error, dev {}, sector 5 op 0x0:(READ) flags 0x0"
SCRATCH = "25 22 9:0 / /scratch rw - ext4 /dev/md0 rw"
DEGRADED = "/sys/block/md0/md/degraded"
PATH = "device-mapper: multipath: 253:3: {} path 8:16."
LUSTRE = "scratch-MDT0000-mdc-ffff88203810d800"
BRIEF = {
    "block_device": {"warning_window_seconds": WINDOW_SECONDS},
    "filesystem": {"error_window_seconds": WINDOW_SECONDS},
}


def controller(state: str) -> Step:
    """Set the state of the NVMe controller, which is the PCI device DISK."""
    return writes({f"{NVME}/address": f"{DISK}\n", f"{NVME}/state": f"{state}\n"})


def mounts(*lines: str) -> Step:
    return lambda scene: scene.machine.mounts(*lines)


def pull_disk(scene: Scene) -> None:
    shutil.rmtree(scene.machine.root / NVME.lstrip("/"))


def expires(code: str, part: str, line: str, how: str = "") -> Row:
    """Return a row for a line that the kernel logged once: a warning."""
    return Row(
        code,
        part,
        how=how,
        fault=kernel(line),
        repair=nothing,
        settings=BRIEF,
        severity=Severity.WARNING,
    )


ROWS = [
    Row(
        "block_device/missing",
        "S64GNE0R000001",
        fault=pull_disk,
        repair=writes({f"{NVME}/state": "live\n", f"{NVME}/serial": "S64GNE0R000001\n"}),
        settings={"block_device": {"confirm_seconds": 1.0}},
    ),
    Row(
        "block_device/nvme",
        DISK,
        well=controller("live"),
        fault=controller("dead"),
        meanwhile=controller("live"),
        repair=rebooted,
    ),
    Row(
        "block_device/nvme",
        DISK,
        how="from the kernel log",
        well=controller("live"),
        fault=kernel("nvme nvme0: Removing after probe failure status: -19"),
        repair=rebooted,
    ),
    Row(
        "block_device/nvme_path",
        "nvme0",
        well=writes({f"{NVME}/transport": "rdma\n"}),
        fault=controller("connecting"),
        repair=controller("live"),
        settings={"block_device": {"confirm_seconds": 1.0}},
    ),
    Row("block_device/io_error", "sda", fault=kernel(IO_ERROR.format("sda")), repair=rebooted),
    Row("block_device/medium_error", "sda", fault=kernel(MEDIUM_ERROR.format("sda")), repair=rebooted),
    Row(
        "block_device/raid_failed",
        "md0",
        well=mounts(ROOT, TMP, DATA, SCRATCH),
        fault=kernel("md/raid:md0: Cannot continue operation (2/4 failed)."),
        repair=rebooted,
    ),
    Row(
        "block_device/raid_degraded",
        "md0",
        well=writes({DEGRADED: "0\n"}),
        fault=writes({DEGRADED: "1\n"}),
        repair=writes({DEGRADED: "0\n"}),
    ),
    Row(
        "block_device/root_stopped",
        "/",
        fault=kernel("EXT4-fs (sda2): Remounting filesystem read-only"),
        repair=rebooted,
    ),
    Row(
        "block_device/stopped",
        "/scratch",
        well=mounts(ROOT, TMP, DATA, SCRATCH),
        fault=mounts(ROOT, TMP, DATA, SCRATCH.replace("md0 rw", "md0 rw,emergency_ro")),
        meanwhile=mounts(ROOT, TMP, DATA),
        repair=steps(mounts(ROOT, TMP, DATA, SCRATCH), rebooted),
    ),
    Row(
        "block_device/path",
        "8:16",
        fault=kernel(PATH.format("Failing")),
        repair=kernel(PATH.format("Reinstating")),
    ),
    expires("block_device/io_error", "sdb", IO_ERROR.format("sdb"), "of an empty disk"),
    expires("block_device/raid_disk", "md0", "md/raid1:md0: Disk failure on sdb1, disabling device."),
    expires("block_device/command_error", "nvme0", "nvme nvme0: I/O 39 QID 3 timeout, aborting"),
    expires("block_device/adapter", "mpt3sas_cm0", "mpt3sas_cm0: fault_state(0x2100)!"),
    expires("filesystem/volume_stopped", "dm-17", "EXT4-fs (dm-17): Remounting filesystem read-only"),
    expires(
        "filesystem/errors", "sda3", "EXT4-fs error (device sda3): ext4_find_entry:1455: inode #2: comm ls: reading"
    ),
    expires("filesystem/mount_failed", "sdc", "XFS (sdc): log mount/recovery failed: error -117"),
    Row(
        "filesystem/not_responding",
        "nas1",
        fault=kernel("nfs: server nas1 not responding, still trying"),
        repair=kernel("nfs: server nas1 OK"),
    ),
    Row(
        "filesystem/evicted",
        "scratch-MDT0000",
        fault=kernel(
            f"LustreError: 167-0: {LUSTRE}: This client was evicted by scratch-MDT0000; in progress "
            "operations using this service will fail."
        ),
        repair=kernel(f"Lustre: {LUSTRE}: Connection restored to 10.0.0.1@o2ib (at 10.0.0.1@o2ib)"),
    ),
    Row(
        "filesystem/lustre_bug",
        "",
        fault=kernel("LustreError: 123:0:(osc_cache.c:1:osc_release()) LBUG"),
        repair=rebooted,
    ),
]

# Codes that drain and have no story, and why.
UNTESTED: dict[str, str] = {}
