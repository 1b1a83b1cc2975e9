"""Events that every node has now and then drain none: restarts, upgrades, resets, failovers, job crashes.

All built-in checks run together on one DGX H100, configured as by `healthd baseline`. Each story has a counterpart just
above the limit, which does drain. Otherwise a check that detects nothing would pass here.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import EXPECTED, GPUS, NICS, REQUIRED, ROOT, TMP, WANTED, Machine
from story import MultiCheckNode, Story

from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings.registry import built_in_checks
from healthd.agent.worker.process import baseline_items
from healthd.common.codec import load
from healthd.common.model import Entry, Gpu, Inventory
from healthd.host.system import KernelClock

INVENTORY = Inventory(tuple(Gpu(pci, index) for index, pci in enumerate(GPUS)))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def node(machine: Machine) -> MultiCheckNode:
    """Return all built-in checks (except the site's, `exec` and `match`) after a first round without findings."""
    node = MultiCheckNode(
        Story(check.module, load(check.config, EXPECTED.get(name, {}), name))
        for name, check in built_in_checks().items()
        if name not in ("exec", "match")
    )
    node.run_round(machine.now())
    assert (node.seen, node.failed) == (set(), [])
    return node


def feed_lines(node: MultiCheckNode, *lines: str) -> None:
    for story in (node.story_of("gpu_xid"), node.story_of("sxid")):
        for line in lines:
            event = make_event(RawLine(story.now, line), story.boot_id)
            assert event is not None
            story.take_event(event, INVENTORY)
    node.apply_to_each(lambda story: None)


def test_healthy_day_gives_no_finding(machine, node):
    node.run_rounds(machine.now(), 12).apply_to_each(Story.reboot).run_rounds(machine.now(), 12)
    assert (node.seen, node.failed, node.drained) == (set(), [], False)


# --- services


@pytest.mark.parametrize("unit", [*REQUIRED, *WANTED])
@pytest.mark.parametrize("states", [["inactive dead"], ["deactivating stop-sigterm", "activating start"]])
def test_service_restart_does_not_drain(machine, node, unit, states):
    for state in states:
        machine.units[unit] = state
        node.run_round(machine.now(), minutes=0.4)
    machine.units[unit] = "active running"
    node.run_rounds(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False), "it was active again before the confirmation time ended"


def test_slurmd_that_stays_down_drains(machine, node):
    machine.units["slurmd"] = "inactive dead"
    node.run_rounds(machine.now(), 3, minutes=0.6)
    assert (node.codes, node.drained) == (["services/inactive"], True)


def test_time_service_that_stays_down_only_warns(machine, node):
    machine.units["chronyd"] = "inactive dead"
    node.run_rounds(machine.now(), 2)
    assert node.codes == ["services/wanted_inactive"]
    machine.clock = KernelClock(True, 0.0001, 6.0)
    node.run_rounds(machine.now(), 4)
    assert node.codes == ["clock/uncertain", "services/wanted_inactive"]
    assert not node.drained


def test_time_service_restart_does_not_drain(machine, node):
    machine.clock = KernelClock(False, 0.0, 16.0)
    node.run_round(machine.now())
    machine.clock = KernelClock(True, -0.3, 0.4)  # the service steps or slews the clock
    node.run_rounds(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False)


# --- file systems


def hang_mount(node: MultiCheckNode, seconds: float, minutes: float) -> None:
    """Let the check of /data hang while the other checks continue."""
    node.story_of("mount").hang(seconds, minutes)
    node.apply_to_each(lambda story: None)


def test_nfs_failover_of_90_seconds_does_not_drain(machine, node):
    hang_mount(node, 10.0, 0.2)
    hang_mount(node, 90.0, 1.3)
    machine.system.fails["/data"] = errno.ESTALE
    node.run_round(machine.now(), minutes=0.1)
    machine.system.fails.clear()
    node.run_round(machine.now(), minutes=0.5)
    assert (node.seen, node.drained) == ({"mount/hang"}, False)
    node.run_round(machine.now())
    assert node.codes == [], "the warning is cleared"


def test_nfs_server_away_for_ten_minutes_drains_without_requeue(machine, node):
    hang_mount(node, 10.0, 0.2)
    hang_mount(node, 611.0, 10.1)
    assert (node.codes, node.drained, node.story_of("mount").requeued) == (["mount/hang"], True, False)


@pytest.mark.parametrize("fault", ["stale", "unmounted"])
def test_remount_within_seconds_does_not_drain_and_a_lasting_fault_requeues(machine, node, fault):
    def break_mount() -> None:
        if fault == "stale":
            machine.system.fails["/data"] = errno.ESTALE
        else:
            machine.mounts(ROOT, TMP)

    break_mount()
    node.run_round(machine.now())
    machine.system.fails.clear()
    machine.mounts()
    node.run_rounds(machine.now(), 2, minutes=0.5)
    assert (node.seen, node.drained) == (set(), False)
    break_mount()
    node.run_rounds(machine.now(), 2, minutes=0.6)
    assert (node.drained, node.story_of("mount").requeued) == (True, True)


def test_job_that_fills_tmp_and_cleans_up_only_warns(machine, node):
    machine.system.free["/tmp"] = 0.07
    node.run_round(machine.now())
    assert node.codes == ["disk_space/low_space"]
    machine.system.free.clear()
    node.run_rounds(machine.now(), 2)
    assert (node.codes, node.drained) == ([], False)


def test_job_that_fills_tmp_completely_drains_until_it_is_clean(machine, node):
    machine.system.free["/tmp"] = 0.01
    node.run_round(machine.now())
    assert (node.codes, node.drained, node.story_of("disk_space").requeued) == (["disk_space/no_space"], True, False)
    machine.system.free.clear()
    node.run_rounds(machine.now(), 2)
    assert (node.codes, node.drained) == ([], False)


# --- the network


def set_all_ports(machine: Machine, up: bool, downed: int) -> None:
    """Change every InfiniBand port of the node, as when its leaf switch fails or returns."""
    for port in (0, 1):
        machine.port(port, up)
        machine.count(port, link_downed=downed)


def test_leaf_switch_reboot_of_60_seconds_does_not_drain(machine, node):
    set_all_ports(machine, up=False, downed=1)
    machine.count(0, symbol_error=4000, port_rcv_errors=912, link_error_recovery=1)
    node.run_round(machine.now())
    set_all_ports(machine, up=True, downed=1)
    machine.count(0, symbol_error=4300)
    node.run_round(machine.now(), minutes=1)
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_two_leaf_switch_reboots_between_runs_do_not_drain(machine, node):
    set_all_ports(machine, up=True, downed=2)
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_leaf_switch_that_stays_away_drains_and_requeues_after_four_minutes(machine, node):
    set_all_ports(machine, up=False, downed=1)
    node.run_rounds(machine.now(), 2, minutes=1.1)
    assert (node.codes, node.drained, node.story_of("ib_link").requeued) == (["ib_link/down"] * 2, True, False)
    node.run_round(machine.now(), minutes=4)
    assert node.story_of("ib_link").requeued


def test_three_link_losses_in_three_hours_drain(machine, node):
    for downed in (1, 2, 3):
        set_all_ports(machine, up=True, downed=downed)
        node.run_round(machine.now(), minutes=30)
    assert (node.codes, node.drained) == (["ib_flap/link_downed"] * 2, True)


def test_symbol_errors_on_active_link_drain(machine, node):
    for number in range(1, 9):
        machine.count(0, symbol_error=20 * number)
        node.run_round(machine.now())
    assert (node.codes, node.drained) == (["ib_errors/symbols"], True)


def test_only_ethernet_outage_longer_than_a_minute_drains(machine, node):
    machine.ethernet(up=False, changes=3)
    node.run_round(machine.now())
    machine.ethernet(changes=4)
    node.run_rounds(machine.now(), 3, minutes=1)
    assert (node.seen, node.drained) == (set(), False)
    machine.ethernet(up=False, changes=5)
    node.run_rounds(machine.now(), 2, minutes=1.1)
    assert (node.codes, node.drained) == (["eth_link/down"], True)


# --- the kernel log


JOB_GPU = "0000:61:00"
JOB_XIDS = (
    f"NVRM: Xid (PCI:{JOB_GPU}): 13, pid=4711, name=python3, Graphics SM Warp Exception on (GPC 4, TPC 0, SM 1): "
    "Out Of Range Address",
    f"NVRM: Xid (PCI:{JOB_GPU}): 31, pid=4711, name=python3, Ch 0000005a, intr 10000000. MMU Fault: ENGINE GRAPHICS",
    f"NVRM: Xid (PCI:{JOB_GPU}): 43, pid=4711, name=python3, Ch 00000010",
    f"NVRM: Xid (PCI:{JOB_GPU}): 45, pid=4711, name=python3, Ch 00000010",
    f"NVRM: Xid (PCI:{JOB_GPU}): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    f"NVRM: Xid (PCI:{JOB_GPU}): 94, pid=4711, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
)


def test_xids_of_failing_jobs_only_warn_and_clear(machine, node):
    for _ in range(20):  # one failed job after another, for an hour
        feed_lines(node, *JOB_XIDS)
        node.run_round(machine.now(), minutes=3)
    assert node.seen == {"gpu_xid/13", "gpu_xid/31", "gpu_xid/94"}, "43, 45 and 63 are only recorded"
    assert not node.drained
    node.run_rounds(machine.now(), 14)
    assert node.codes == [], "an hour later the warnings are cleared"


@pytest.mark.parametrize("code", [79, 48, 95])
def test_xid_that_no_job_can_cause_drains(node, code):
    feed_lines(node, f"NVRM: Xid (PCI:{JOB_GPU}): {code}, pid=4711, name=python3, x")
    assert (node.codes, node.drained, node.story_of("gpu_xid").requeued) == ([f"gpu_xid/{code}"], True, True)


# --- boots


def test_error_counts_of_a_boot_do_not_drain(machine, node):
    machine.up_seconds = 60
    for port in (0, 1):
        machine.count(port, link_downed=4, symbol_error=300, port_rcv_errors=900)
    for pci in (*GPUS, *NICS, "0000:00:01.1"):
        machine.aer(pci, RxErr=40, BadTLP=60)
    machine.memory(corrected=3)
    node.apply_to_each(Story.reboot).run_round(machine.now())
    machine.up_seconds = 600
    for port in (0, 1):  # counts of each port of a healthy DGX H100
        machine.count(port, link_downed=6, excessive_buffer_overrun_errors=15, port_rcv_errors=914, symbol_error=700)
    node.run_round(machine.now())
    machine.up_seconds = 1700
    for port in (0, 1):
        machine.count(port, link_downed=9)
    node.run_round(machine.now())
    machine.up_seconds = 4 * 3600
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_services_that_start_late_after_boot_do_not_drain(machine, node):
    """slurmd waits for healthd, an NFS server and the fabric manager are late, chrony is not synchronised yet."""
    machine.up_seconds = 40
    machine.units["slurmd"] = "inactive dead 4711"  # the start job waits in systemd
    machine.mounts(ROOT, TMP)
    machine.all_gpus("fabric_state = 2")
    machine.clock = KernelClock(False, 0.0, 16.0)
    node.apply_to_each(Story.reboot).run_round(machine.now())
    machine.mounts()
    node.run_round(machine.now(), minutes=0.4)
    machine.units["slurmd"] = "active running"
    node.run_rounds(machine.now(), 2, minutes=2)
    machine.gpus()
    machine.clock = KernelClock(True, 0.0001, 0.01)
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


UVM = ("sys/module/nvidia_uvm/initstate", "sys/module/nvidia_uvm", "dev/nvidia-uvm", "dev/nvidia-uvm-tools")
DRIVER_FILES = {"module": ("sys/module/nvidia/initstate", "sys/module/nvidia/refcnt", "sys/module/nvidia")}
DRIVER_FILES["device file"] = ("dev/nvidia3",)


def node_with_baseline(machine: Machine) -> MultiCheckNode:
    """Return the checks of the driver's files, with the expectations that `healthd baseline` finds on this machine."""
    found = {}
    for check in ("kernel_modules", "device_nodes"):
        check_module = built_in_checks()[check]
        entries = [
            item
            for item in baseline_items(machine.now(), check_module, check_module.config())
            if isinstance(item, Entry)
        ]
        names = {entry.key: entry.value for entry in entries}
        found[check] = names if check == "device_nodes" else tuple(names)
    checks = {name: built_in_checks()[name] for name in found}
    return MultiCheckNode(
        Story(check.module, load(check.config, {"expected": found[name]}, name)) for name, check in checks.items()
    )


def reboot_without(machine: Machine, node: MultiCheckNode, *paths: str) -> MultiCheckNode:
    for path in paths:
        (machine.root / path).rmdir() if (machine.root / path).is_dir() else (machine.root / path).unlink()
    return node.apply_to_each(Story.reboot).run_rounds(machine.now(), 12)


def test_reboot_without_uvm_does_not_drain(machine, node):
    """nvidia-modprobe may load it only with the first CUDA program, and a drained node never runs one."""
    baselined = node_with_baseline(machine).run_rounds(machine.now(), 2)
    reboot_without(machine, baselined, *UVM)
    node.apply_to_each(Story.reboot).run_rounds(machine.now(), 12)
    assert (baselined.seen | node.seen, baselined.failed + node.failed) == (set(), [])


@pytest.mark.parametrize("missing", DRIVER_FILES)
def test_reboot_without_a_file_of_the_driver_drains(machine, missing):
    baselined = node_with_baseline(machine).run_rounds(machine.now(), 2)
    assert not baselined.drained
    assert reboot_without(machine, baselined, *DRIVER_FILES[missing]).drained


@pytest.mark.parametrize("late", ["mount", "fabric"])
def test_mount_or_fabric_missing_minutes_after_boot_drains_until_present(machine, node, late):
    machine.up_seconds = 40
    if late == "mount":
        machine.mounts(ROOT, TMP)
    else:
        machine.all_gpus("fabric_state = 2")
    node.apply_to_each(Story.reboot).run_rounds(machine.now(), 2, minutes=5.1)
    assert node.drained
    machine.mounts()
    machine.gpus()
    assert not node.run_rounds(machine.now(), 2).drained


def test_link_flaps_half_an_hour_after_boot_drain(machine, node):
    machine.up_seconds = 3600
    node.apply_to_each(Story.reboot).run_round(machine.now())
    machine.count(0, link_downed=3)
    node.run_round(machine.now())
    assert (node.codes, node.drained) == (["ib_flap/link_downed"], True)


def test_dimm_replacement_by_operator_does_not_drain(machine, node):
    machine.memory(corrected=900)
    node.run_round(machine.now()).apply_to_each(lambda story: story.drain_by_operator("ticket 7: DIMM A1"))
    node.run_rounds(machine.now(), 3)
    machine.memory(corrected=0)
    machine.up_seconds = 200
    node.apply_to_each(Story.reboot).run_round(machine.now(), minutes=240)
    node.apply_to_each(lambda story: story.drain_by_operator(""))
    machine.memory(corrected=2)
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_dimm_missing_after_replacement_drains(machine, node):
    node.apply_to_each(lambda story: story.drain_by_operator("ticket 7: DIMM A1"))
    machine.memory(gib=1952)
    node.apply_to_each(Story.reboot).run_round(machine.now(), minutes=240)
    assert not node.drained, "the operator holds the node"
    node.apply_to_each(lambda story: story.drain_by_operator(""))
    assert (node.codes, node.drained) == (["memory_size/too_small"], True)


# --- GPUs


def test_power_saving_of_idle_gpus_gives_no_finding(machine, node):
    machine.all_gpus("pcie_generation = 1\nclock_event_reasons = 1\nutilization_percent = 0")
    node.run_rounds(machine.now(), 12)
    machine.all_gpus("pcie_generation = 5\nclock_event_reasons = 4\nutilization_percent = 100")  # at its power cap
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_busy_gpu_with_half_its_lanes_drains(machine, node):
    machine.gpus("[gpu.3]\npcie_width = 8\nutilization_percent = 100")
    node.run_rounds(machine.now(), 2)
    assert (node.codes, node.drained) == (["gpu_pcie/lanes"], True)


STOPPED = "persistence = false"  # nvidia-persistenced was stopped: no GPU can be reset while it runs
TRAINING = f"{STOPPED}\nnvlink_inactive = [0, 1, 2, 3, 4, 5, 6, 7]\nfabric_state = 2\npcie_generation = 1"


def test_gpu_reset_of_drained_node_by_operator_does_not_drain(machine, node):
    """NVML first hangs until the reset is done. Then there is no driver, because machines with NVSwitches unload the
    modules. Then the links of the GPUs train, the GPUs wait for the fabric manager, and the counters are 0.
    """
    machine.all_gpus("ecc_volatile_corrected_sram = 90\npcie_replays = 150")
    node.run_round(machine.now()).apply_to_each(lambda story: story.drain_by_operator("reset of the GPUs"))
    machine.all_gpus(STOPPED)
    node.run_round(machine.now())
    node.story_of("gpu_access").hang(45.0, 1.0)
    machine.gpus('library = "driver_not_loaded"')
    node.run_round(machine.now(), minutes=0.2)
    machine.all_gpus(f"{TRAINING}\npcie_replays = 0")
    feed_lines(node, "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link 04 Minion Link DLREQ interrupt")
    node.run_round(machine.now(), minutes=0.5)
    machine.all_gpus("pcie_replays = 2")
    node.run_rounds(machine.now(), 2, minutes=0.7)
    warned = {"gpu_persistence/off", "gpu_access/hang", "sxid/22013"}
    assert node.seen == {*warned, "gpu_access/driver_not_loaded"}
    assert node.codes == ["sxid/22013"]
    node.apply_to_each(lambda story: story.drain_by_operator("")).run_rounds(machine.now(), 3)
    assert not node.drained


def test_reset_of_one_gpu_of_idle_node_does_not_drain(machine, node):
    machine.gpus(f"[gpu.3]\n{STOPPED}")
    node.run_round(machine.now())
    node.story_of("gpu_access").hang(12.0, 1.0)
    machine.gpus(f"[gpu.3]\n{TRAINING}")
    node.run_round(machine.now(), minutes=0.2)
    machine.gpus()
    node.run_rounds(machine.now(), 3, minutes=0.9)
    assert (node.seen, node.drained) == ({"gpu_persistence/off", "gpu_access/hang"}, False)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("lost = true", "gpu_access/lost"),
        ("requires_reset = true", "gpu_access/reset_required"),
        ("gone = true", "gpu_count/missing"),
        ("nvlink_inactive = [4]", "gpu_nvlink/inactive"),
        ("fabric_state = 2", "gpu_fabric/not_joined"),
        ("mig = true", "gpu_mig/mode"),
    ],
)
def test_faulty_gpu_after_reset_drains(machine, node, text, code):
    node.apply_to_each(lambda story: story.drain_by_operator("reset of the GPUs"))
    machine.gpus(f"[gpu.3]\n{text}")
    node.run_rounds(machine.now(), 2, minutes=6)
    assert not node.drained, "the operator holds the node"
    node.apply_to_each(lambda story: story.drain_by_operator(""))
    assert node.drained
    assert code in node.codes


@pytest.mark.parametrize("state", ["lost", "requires_reset", "gone", "unreachable"])
def test_gpu_state_during_reset_in_a_pause_never_drains(machine, node, state):
    node.apply_to_each(lambda story: story.pause(10))
    machine.gpus(f"[gpu.3]\n{state} = true")
    node.run_round(machine.now(), minutes=1)
    machine.gpus()
    node.run_rounds(machine.now(), 6)
    if state == "requires_reset":
        assert not node.codes, "the driver requests nothing any more: the GPU was reset"
    else:
        assert node.codes, "a fault that needs a reboot is reported until `healthd repaired`"
    assert not node.drained


def test_mig_changes_between_jobs_do_not_drain_without_mig_settings(tmp_path, machine):
    """Without MIG settings, GPUs may have other MIG devices, or none, between jobs."""
    node = MultiCheckNode(Story(check.module) for name, check in built_in_checks().items() if not check.per)
    for text in ("mig = false", "mig_pending = true", "mig = true\nmig_devices = 3", "mig = true\nmig_devices = 7"):
        machine.all_gpus(text)
        node.run_rounds(machine.now(), 3)
    machine.all_gpus("")
    node.run_rounds(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False)


def test_mig_devices_other_than_configured_drain_until_right(machine):
    config = load(built_in_checks()["gpu_mig"].config, {"mode": "on", "instances": 7}, "gpu_mig")
    node = MultiCheckNode([Story(built_in_checks()["gpu_mig"].module, config)])
    machine.all_gpus("mig = true\nmig_devices = 6")
    assert node.run_round(machine.now()).drained
    machine.all_gpus("mig = true\nmig_devices = 7")
    assert not node.run_rounds(machine.now(), 2).drained


MODULE = "/sys/module/nvidia/initstate"
UPGRADE: tuple[Callable[[Machine], None], ...] = (
    lambda machine: machine.gpus('library = "mismatch"'),
    lambda machine: machine.gpus('library = "driver_not_loaded"'),
    lambda machine: machine.all_gpus("gone = true"),
    lambda machine: machine.gpus("".join(f"[gpu.{n}]\ngone = true\n" for n in range(3, 8))),
    lambda machine: machine.all_gpus(TRAINING),
    lambda machine: machine.units.update(slurmd="inactive dead"),
)


def test_driver_upgrade_in_a_pause_does_not_drain(machine, node):
    node.apply_to_each(lambda story: story.pause(60))
    machine.write({MODULE: "going\n"})
    for step in UPGRADE:
        step(machine)
        node.run_rounds(machine.now(), 2)
        assert not node.drained
    expected = {"gpu_access/driver_mismatch", "gpu_count/missing", "services/inactive", "kernel_modules/not_loaded"}
    assert expected <= node.seen
    machine.units["slurmd"] = "active running"
    machine.write({MODULE: "live\n"})
    machine.gpus('driver_version = "590.48.01"')
    node.run_rounds(machine.now(), 14)
    assert node.story_of("gpu_access").trusted_since, "the pause is over"
    assert not node.drained
    # Faults that need a reboot are still reported but do not drain. The unexpected driver version warns.
    assert set(node.codes) == {"gpu_count/missing", "gpu_software/driver"}
    node.apply_to_each(lambda story: story.repaired("gpu_count/missing") if story.check.name == "gpu_count" else None)
    assert node.run_round(machine.now()).codes == ["gpu_software/driver"]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_driver_missing_after_the_pause_drains(machine, node, step):
    node.apply_to_each(lambda story: story.pause(30))
    UPGRADE[step](machine)
    node.run_rounds(machine.now(), 5)
    assert not node.drained
    node.run_rounds(machine.now(), 3)
    assert node.drained


def test_driver_reload_that_restarts_counters_does_not_drain(machine, node):
    machine.all_gpus("ecc_volatile_corrected_dram = 5000\npcie_replays = 200\nnvlink_crc = { 4 = 3 }")
    node.run_rounds(machine.now(), 2)
    assert node.codes == ["gpu_nvlink/crc"] * 8
    machine.all_gpus("pcie_replays = 0")
    node.run_rounds(machine.now(), 12)
    assert (node.seen, node.drained) == ({"gpu_nvlink/crc"}, False)


# --- the machine that runs the tests


TRUE_OF_TEST_MACHINES = {
    "clock/unsynchronised": "containers have no time service",
    "cpu/governor": "laptops save power",
    "disk_space/": "the disk may really be full",
    "gpu_persistence/": "a workstation has no nvidia-persistenced",
}


def test_this_machine_without_expectations_gives_nothing_above_info(tmp_path):
    # Other tests, which run in parallel, let processes hang.
    (tmp_path / "healthd.toml").write_text("[checks.processes]\nenabled = false\n")
    command = ["check", "--json", "--config", str(tmp_path / "healthd.toml"), "--profile", "none", "--baseline", ""]
    process = subprocess.run([sys.executable, "-m", "healthd", *command], capture_output=True, text=True, check=False)
    results = json.loads(process.stdout)["results"]
    assert [result for result in results if result["outcome"] != "completed"] == []
    found = [f for result in results for f in result["findings"] if f["severity"] != "info"]
    assert [f for f in found if not f["code"].startswith(tuple(TRUE_OF_TEST_MACHINES))] == []
