"""Rows of the host: memory, processors, disks, file systems, services."""

from __future__ import annotations

from machine import DATA, ROOT, TMP
from stories import NOT_YET, Row, Scene, Step, prints

QUICK_MOUNT = {"mount": {"missing_confirm_seconds": 1.0}}
QUICK_SERVICES = {"services": {"confirm_seconds": 1.0}}


def mounts(*lines: str) -> Step:
    return lambda scene: scene.machine.mounts(*lines)


def unit(name: str, state: str) -> Step:
    """systemd shows it so, and the others as they are: unit("munge", "failed failed")."""

    def do(scene: Scene) -> None:
        scene.machine.units[name] = state
        prints("systemctl", scene.machine.shown_units())(scene)

    return do


ROWS = [
    Row(
        "mount/missing",
        "/data",
        fault=mounts(ROOT, TMP),
        repair=mounts(ROOT, TMP, DATA),
        settings=QUICK_MOUNT,
    ),
    Row(
        "services/inactive",
        "munge",
        well=unit("munge", "active running"),
        fault=unit("munge", "failed failed"),
        repair=unit("munge", "active running"),
        settings=QUICK_SERVICES,
        programs=("systemctl",),
    ),
    Row(
        "services/wanted_inactive",
        "chronyd",
        well=unit("chronyd", "active running"),
        fault=unit("chronyd", "inactive dead"),
        repair=unit("chronyd", "active running"),
        settings=QUICK_SERVICES,
        programs=("systemctl",),
    ),
]

# Codes that drain and are not told here, and why.
LEFT = {
    "cpu/missing": NOT_YET,
    "device_nodes/missing": NOT_YET,
    "device_nodes/wrong_mode": NOT_YET,
    "disk_space/no_inodes": NOT_YET,
    "disk_space/no_space": NOT_YET,
    "exec/critical": NOT_YET,
    "ipmi_sel/bus_fatal": NOT_YET,
    "ipmi_sel/critical_interrupt": NOT_YET,
    "ipmi_sel/power_supply": NOT_YET,
    "ipmi_sel/uncorrectable": NOT_YET,
    "kernel/hard_lockup": NOT_YET,
    "kernel/oops": NOT_YET,
    "kernel/panic": NOT_YET,
    "kernel_modules/not_loaded": NOT_YET,
    "memory_edac/machine_check": NOT_YET,
    "memory_edac/uncorrected": NOT_YET,
    "memory_size/less": NOT_YET,
    "mount/failing": NOT_YET,
    "mount/hang": NOT_YET,
    "mount/read_only": NOT_YET,
    "mount/stale": NOT_YET,
    "mount/wrong_type": NOT_YET,
    "processes/unkillable": NOT_YET,
}
