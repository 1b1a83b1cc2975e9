"""Rows of the host: memory, processors, disks, file systems, services."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from frozen import HangFs
from healthd_daemon import FIRST_PATH_DIR
from machine import DATA, ROOT, TMP
from stories import (
    WINDOW_SECONDS,
    Row,
    Scene,
    Step,
    booted,
    kernel,
    nothing,
    prints,
    rebooted,
    repaired,
    steps,
    wait_until_open,
    writes,
)
from trees import captured_text

from healthd.common.model import Severity
from healthd.failslow.live.document import FILE, LiveDocument, LiveJob, to_json

QUICK_MOUNT = {"mount": {"missing_confirm_seconds": 1.0}}
HANG_SETTINGS = {"timeout_seconds": 4.0}  # longer than a worker takes to start, even on a busy machine
QUICK_SERVICES = {"services": {"confirm_seconds": 1.0}}
QUICK_NODES = {"device_nodes": {"confirm_seconds": 1.0}}
SPACE = {"disk_space": {"paths": ("/tmp",)}}
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
CPUS = "/sys/devices/system/cpu"
THROTTLED = f"{CPUS}/cpu0/thermal_throttle/package_throttle_count"
ZONE = "/sys/class/thermal/thermal_zone0"
GRACE_ZONE = {
    "/sys/devices/soc0/soc_id": "jep106:036b:0241\n",
    f"{ZONE}/device/description": "Thermal Zone Skt0 TJMax\n",
    f"{ZONE}/trip_point_0_type": "critical\n",
    f"{ZONE}/trip_point_0_temp": "104500\n",
    f"{ZONE}/temp": "46000\n",
}
DEVICES = [f"/dev/nvidia{name}" for name in ("ctl", *range(8))]
NVIDIAS = 195  # the major number
KIB, TMP_KIB, TMP_FILES = 1 << 10, 1 << 10, 100
SEL = captured_text("ipmitool_sel_elist.txt")
PROGRAM = "site-check"
BAD_PAGE = "Memory failure: 0x849923: recovery action for dirty LRU page: Recovered"

KERNEL_WARNS = {
    "kernel/rcu_stall": "rcu: INFO: rcu_sched self-detected stall on CPU",
    "kernel/workqueue": "BUG: workqueue lockup - pool cpus=3 node=0 flags=0x0 nice=0 stuck for 33s!",
    "kernel/hung_task": "INFO: task php-fpm:2767319 blocked for more than 120 seconds.",
    "kernel/cpu_throttled": "CPU3: Core temperature above threshold, cpu clock throttled (total events = 1)",
    "kernel/too_hot": "thermal thermal_zone0: critical temperature reached (103 C), shutting down",
}


# Reports of the live process about a job whose sampled counters it reads, and the reaction of a site.
WELL = LiveJob("4711", 4, "counters")
LOST = LiveJob(
    *("4711", 4, "counters", True, time.time() - 7200, 0.3, 8000.0, "", "", "unknown"),
    evidence=("mlx5_0/1: slowdowns by congestion (CNP handled) rose",),
    node_changed=True,
)
SLOW = frozenset({"failslow/counters"})
REQUEUES = {"failslow": {"sample": ("ib",), "action": "requeue", "loss_window_seconds": WINDOW_SECONDS}}


def report_job(job: LiveJob) -> Step:
    """Write the report into the daemon's runtime directory below the fake tree, where the check reads it."""

    def write_report(scene: Scene) -> None:
        report = to_json(LiveDocument(written=time.time(), jobs=(job,)))
        scene.machine.write({f"{scene.daemon.run_dir}/{FILE}": report})

    return write_report


def mounts(*lines: str) -> Step:
    return lambda scene: scene.machine.mounts(*lines)


def unit(name: str, state: str) -> Step:
    """Set the state of a unit in systemd: unit("munge", "failed failed")."""

    def set_state(scene: Scene) -> None:
        scene.machine.units[name] = state
        prints("systemctl", scene.machine.systemctl_output())(scene)

    return set_state


def munge_restarts(count: int) -> Step:
    """Set how often systemd restarted munge."""

    def set_count(scene: Scene) -> None:
        output = scene.machine.systemctl_output().replace("NRestarts=0\nId=munge", f"NRestarts={count}\nId=munge")
        prints("systemctl", output)(scene)

    return set_count


def memory(gib: int = 2048, corrected: int = 0, uncorrected: int = 0) -> Step:
    return lambda scene: scene.machine.memory(gib, corrected, uncorrected)


def device(path: str, mode: int = 0o666) -> Step:
    """Create a device file with this mode."""

    def create(scene: Scene) -> None:
        node = scene.machine.root / path.lstrip("/")
        node.unlink(missing_ok=True)
        os.mknod(node, stat.S_IFCHR | mode, os.makedev(NVIDIAS, 0))
        node.chmod(mode)

    return create


def without(path: str) -> Step:
    """Remove this file of the fake tree."""
    return lambda scene: (scene.machine.root / path.lstrip("/")).unlink()


def small_tmp(scene: Scene) -> None:
    """Mount a file system of 1 MiB and a hundred files at /tmp."""
    point = str(scene.machine.root / "tmp")
    options = f"size={TMP_KIB}k,nr_inodes={TMP_FILES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "story", point], check=True)
    scene.ends.callback(subprocess.run, ["umount", "--lazy", point], check=True)


def used(share: float) -> Step:
    """Use this share of the space of /tmp."""
    return lambda scene: (scene.machine.root / "tmp/data").write_bytes(bytes(int(share * TMP_KIB) * KIB)) and None


def files(count: int) -> Step:
    """Create this number of files in /tmp."""

    def create_files(scene: Scene) -> None:
        tmp = scene.machine.root / "tmp"
        for number in range(TMP_FILES):
            if number < count:
                (tmp / str(number)).touch()
            else:
                (tmp / str(number)).unlink(missing_ok=True)

    return create_files


def program_exits(status: int, message: str) -> Step:
    """Set the exit status and output of the site's program."""

    def write_program(scene: Scene) -> None:
        assert scene.daemon.programs is not None
        script = scene.daemon.programs / ".new"
        script.write_text(f"#!/bin/sh\necho {message}\nexit {status}\n")
        script.chmod(0o755)
        script.replace(scene.daemon.programs / PROGRAM)

    return write_program


def bmc(scene: Scene) -> None:
    """Add a BMC: /dev shows it, and ipmitool prints its log."""
    devices = scene.daemon.directory / "dev"
    devices.mkdir()
    os.mknod(devices / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (devices / "ipmi0").touch()
    scene.daemon.bind_mounts["/dev"] = devices
    prints("ipmitool", SEL)(scene)


def sel_entry(name: str, sensor: str, event: str) -> Row:
    """Return a row for a new entry in the BMC's log, which an engineer reports as repaired."""
    line = f"  91 | 11/20/2026 | 10:01:17 | {sensor} | {event} | Asserted"
    return Row(
        f"ipmi_sel/{name}",
        sensor,
        well=bmc,
        fault=prints("ipmitool", SEL + line),
        repair=repaired,
        settings={"ipmi_sel": {"enforce": True, "interval_seconds": 0.5}},
        programs=("ipmitool",),
    )


def process(pid: int, state: str) -> Mapping[str, str]:
    """Return the /proc files of a process that was killed."""
    signals = "SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n"
    return {
        f"/proc/{pid}/status": f"Name:\tpython3\n{signals}",
        f"/proc/{pid}/stat": f"{pid} (python3) {state} 1 {' '.join(['0'] * 48)}\n",
    }


def processes(*pids: int, state: str) -> Step:
    return writes({path: text for pid in pids for path, text in process(pid, state).items()})


def ended(*pids: int) -> Step:
    def remove(scene: Scene) -> None:
        for pid in pids:
            shutil.rmtree(scene.machine.root / f"proc/{pid}")

    return remove


def server(error: int = 0) -> Step:
    """Make the mount at /data unresponsive, or let every access fail with this error."""

    def mount_hang(scene: Scene) -> None:
        scene.ends.enter_context(HangFs(Path(), scene.machine.root / "data", error))

    return mount_hang


def server_is_back(scene: Scene) -> None:
    scene.ends.close()


ROWS = [
    Row(
        "failslow/loss",
        "",
        fault=report_job(LOST),
        repair=report_job(WELL),
        also=SLOW,
        settings=REQUEUES,
        how="requeues",
    ),
    Row(
        "failslow/loss",
        "",
        fault=report_job(LOST),
        repair=report_job(WELL),
        also=SLOW,
        settings={"failslow": {**REQUEUES["failslow"], "action": "drain"}},
        severity=Severity.DEGRADED,
        how="drains",
    ),
    Row(
        "clock/slow_source",
        "",
        well=writes({CLOCK_SOURCE: "tsc\n"}),
        fault=writes({CLOCK_SOURCE: "hpet\n"}),
        repair=writes({CLOCK_SOURCE: "tsc\n"}),
        settings={"clock": {"confirm_seconds": 1.0}},
    ),
    Row("cpu/missing", "", fault=writes({f"{CPUS}/online": "0-2\n"}), repair=writes({f"{CPUS}/online": "0-3\n"})),
    Row(
        "cpu/governor",
        "",
        fault=writes({f"{CPUS}/cpufreq/policy1/scaling_governor": "powersave\n"}),
        repair=writes({f"{CPUS}/cpufreq/policy1/scaling_governor": "performance\n"}),
    ),
    Row(
        "cpu/throttled",
        "cpu0",
        well=writes({THROTTLED: "5\n", f"{CPUS}/cpu0/topology/core_siblings_list": "0-3\n"}),
        fault=writes({THROTTLED: "6\n"}),
        repair=nothing,
        settings={"cpu": {"clear_after": 15}},  # number of rounds without throttling
    ),
    Row(
        "cpu/critical_temperature",
        "socket0",
        well=writes(GRACE_ZONE),
        fault=writes({f"{ZONE}/temp": "104500\n"}),
        repair=writes({f"{ZONE}/temp": "46000\n"}),
    ),
    Row("memory_size/too_small", "", fault=memory(gib=1920), repair=memory()),
    Row("memory_edac/uncorrected", "mc0", fault=memory(uncorrected=1), repair=booted(memory())),
    Row(
        "memory_edac/uncorrected",
        "mc0",
        how="from the kernel log",
        fault=kernel("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_Ha#0_Chan#2_DIMM#0 (channel:2 slot:0 page:0x8)"),
        repair=rebooted,
    ),
    Row(
        "memory_edac/uncorrected",
        "mc0",
        how="found by the scrubber",
        fault=steps(
            kernel("EDAC MC0: 1 UE memory scrubbing error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0)"),
            memory(uncorrected=1),
        ),
        repair=booted(memory()),
        severity=Severity.DEGRADED,
    ),
    Row(
        "memory_edac/machine_check",
        "",
        fault=kernel("mce: [Hardware Error]: CPU 0: Machine Check Exception: 5 Bank 7: bd80000000100134"),
        repair=rebooted,
    ),
    Row("memory_edac/uncorrected_at_boot", "mc0", fault=booted(memory(uncorrected=2)), repair=booted(memory())),
    Row(
        "memory_edac/corrected",
        "mc0/dimm0",
        fault=memory(corrected=1001),
        repair=nothing,
        settings={"memory_edac": {"clean_seconds": WINDOW_SECONDS}},
    ),
    Row(
        "memory_edac/page_recovered",
        "",
        fault=kernel(BAD_PAGE),
        repair=nothing,
        settings={"memory_edac": {"clean_seconds": WINDOW_SECONDS}},
    ),
    Row(
        "memory_edac/deferred",
        "",
        fault=kernel("[Hardware Error]: Deferred error, no action required."),
        repair=rebooted,
    ),
    Row("memory_edac/left_over", "", fault=kernel("[Hardware Error]: System Fatal error."), repair=rebooted),
    Row(
        "memory_edac/pci_parity",
        "0000:03:00.0",
        fault=kernel("EDAC PCI: Signaled System Error on 0000:03:00.0"),
        repair=rebooted,
    ),
    Row(
        "kernel/oops",
        "",
        fault=kernel(
            "BUG: unable to handle page fault for address: ffffa26487064230",
            "Oops: 0000 [#1] PREEMPT SMP PTI",
            "RIP: 0010:f+0x2c/0x70 [nvidia]",
        ),
        repair=rebooted,
    ),
    Row(
        "kernel/oops",
        "",
        how="elsewhere",
        fault=kernel("BUG: unable to handle page fault for address: ffffa26487064230"),
        repair=rebooted,
        severity=Severity.WARNING,
    ),
    Row(
        "kernel/rcu_stall",
        "",
        how="and all others that expire",
        fault=steps(kernel(*KERNEL_WARNS.values()), wait_until_open(*KERNEL_WARNS)),
        repair=nothing,
        also=frozenset(KERNEL_WARNS) - {"kernel/rcu_stall"},
        settings={"kernel": {"window_seconds": WINDOW_SECONDS}},
    ),
    Row(
        "kernel/panic",
        "",
        fault=kernel("Kernel panic - not syncing: Fatal exception in interrupt"),
        repair=rebooted,
    ),
    Row(
        "kernel/hard_lockup",
        "",
        fault=kernel("watchdog: Watchdog detected hard LOCKUP on cpu 12"),
        repair=rebooted,
    ),
    Row(
        "kernel/soft_lockup",
        "",
        how="of more than 5 min",
        fault=kernel("watchdog: BUG: soft lockup - CPU#18 stuck for 306s! [python3:2254956]"),
        repair=rebooted,
    ),
    Row(
        "kernel_modules/not_loaded",
        "nvidia",
        fault=lambda scene: shutil.rmtree(scene.machine.root / "sys/module/nvidia"),
        repair=writes({"/sys/module/nvidia/initstate": "live\n"}),
        settings={"kernel_modules": {"confirm_seconds": 1.0}},
    ),
    Row(
        "device_nodes/missing",
        DEVICES[3],
        well=steps(*(device(path) for path in DEVICES)),
        fault=without(DEVICES[3]),
        repair=device(DEVICES[3]),
        settings=QUICK_NODES,
    ),
    Row(
        "device_nodes/wrong_mode",
        DEVICES[3],
        well=steps(*(device(path) for path in DEVICES)),
        fault=device(DEVICES[3], 0o600),
        repair=device(DEVICES[3]),
        settings=QUICK_NODES,
    ),
    Row("disk_space/no_space", "/tmp", well=small_tmp, fault=used(0.97), repair=used(0.1), settings=SPACE),
    Row("disk_space/low_space", "/tmp", well=small_tmp, fault=used(0.93), repair=used(0.1), settings=SPACE),
    Row("disk_space/no_inodes", "/tmp", well=small_tmp, fault=files(97), repair=files(3), settings=SPACE),
    Row("disk_space/low_inodes", "/tmp", well=small_tmp, fault=files(92), repair=files(3), settings=SPACE),
    Row(
        "exec/critical",
        "site",
        well=program_exits(0, "fine"),
        fault=program_exits(2, "broken"),
        repair=program_exits(0, "fine"),
        settings={"exec": {"name": "site", "command": (f"{FIRST_PATH_DIR}/{PROGRAM}",)}},
        programs=(PROGRAM,),
    ),
    Row(
        "exec/warning",
        "site",
        well=program_exits(0, "fine"),
        fault=program_exits(1, "odd"),
        repair=program_exits(0, "fine"),
        settings={"exec": {"name": "site", "command": (f"{FIRST_PATH_DIR}/{PROGRAM}",)}},
        programs=(PROGRAM,),
    ),
    Row(
        "match/missing",
        "site",
        well=program_exits(0, "fine"),
        fault=program_exits(0, "broken"),
        repair=program_exits(0, "fine"),
        settings={"match": {"name": "site", "command": (f"{FIRST_PATH_DIR}/{PROGRAM}",), "requires": "^fine$"}},
        programs=(PROGRAM,),
    ),
    Row(
        "match/found",
        "site",
        well=program_exits(0, "fine"),
        fault=program_exits(0, "broken"),
        repair=program_exits(0, "fine"),
        settings={"match": {"name": "site", "command": (f"{FIRST_PATH_DIR}/{PROGRAM}",), "forbids": "broken"}},
        programs=(PROGRAM,),
    ),
    sel_entry("bus_fatal", "Critical Interrupt PCIe Err", "Bus Fatal Error"),
    sel_entry("critical_interrupt", "Critical Interrupt PCIe Err", "PCI SERR"),
    sel_entry("power_supply", "Power Supply PS1 Status", "Power Supply AC lost"),
    sel_entry("uncorrectable", "Memory #0x02", "Uncorrectable ECC"),
    Row(
        "mount/missing",
        "/data",
        fault=mounts(ROOT, TMP),
        repair=mounts(ROOT, TMP, DATA),
        settings=QUICK_MOUNT,
    ),
    Row(
        "mount/read_only",
        "/data",
        fault=mounts(ROOT, TMP, DATA.replace("rw,relatime", "ro,relatime")),
        repair=mounts(ROOT, TMP, DATA),
    ),
    Row(
        "mount/wrong_type",
        "/data",
        fault=mounts(ROOT, TMP, DATA.replace("nfs4 fs:/data", "ext4 /dev/sdb1")),
        repair=mounts(ROOT, TMP, DATA),
    ),
    Row(
        "mount/stale",
        "/data",
        fault=server(errno.ESTALE),
        repair=server_is_back,
        settings=QUICK_MOUNT,
    ),
    Row(
        "mount/failing",
        "/data",
        fault=server(errno.EIO),
        repair=server_is_back,
        settings=QUICK_MOUNT,
    ),
    Row(
        "mount/hang",
        "/data",
        fault=server(),
        repair=server_is_back,
        settings={"mount": HANG_SETTINGS},
    ),
    Row(
        "mount/hang",
        "/data",
        how="until it is degraded",
        fault=server(),
        repair=server_is_back,
        settings={"mount": {**HANG_SETTINGS, "hang_degraded_seconds": 6.0}},
        severity=Severity.DEGRADED,
    ),
    Row(
        "processes/unkillable",
        "200@0",
        fault=processes(200, state="D"),
        repair=ended(200),
        settings={"processes": {"killed_seconds": 1.0}},
    ),
    Row(
        "processes/zombies",
        "",
        fault=processes(*range(200, 205), state="Z"),
        repair=ended(*range(200, 205)),
        settings={"processes": {"max_zombies_per_core": 1}},
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
    Row(
        "services/changing",
        "munge",
        well=unit("munge", "active running"),
        fault=unit("munge", "activating start"),
        repair=unit("munge", "active running"),
        settings=QUICK_SERVICES,
        programs=("systemctl",),
    ),
    Row(
        "services/restarting",
        "munge",
        well=munge_restarts(1),
        fault=munge_restarts(9),
        repair=repaired,
        settings=QUICK_SERVICES,
        programs=("systemctl",),
    ),
]

# Codes without a story, and why.
UNTESTED = {
    f"clock/{what}": "the check reads this machine's clock, which a story would have to change"
    for what in ("unsynchronised", "uncertain", "offset")
} | {
    "kernel/rule_failed": "only a mistake in a rule opens it: test_no_input_ends_it.py causes one",
    "kernel/pattern": "its patterns are not settings of a check: test_kernel_site.py tests them",
}
