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
from story import Node, Story

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
def node(machine: Machine) -> Node:
    """Return all built-in checks (except the site's, `exec` and `match`) after a first round without findings."""
    node = Node(
        Story(check.module, load(check.config, EXPECTED.get(name, {}), name))
        for name, check in built_in_checks().items()
        if name not in ("exec", "match")
    )
    node.look(machine.now())
    assert (node.seen, node.failed) == (set(), [])
    return node


def hear(node: Node, *lines: str) -> None:
    for story in (node.of("gpu_xid"), node.of("sxid")):
        for line in lines:
            event = make_event(RawLine(story.now, line), story.boot_id)
            assert event is not None
            story.hear(event, INVENTORY)
    node.each(lambda story: None)


def test_a_healthy_day_shows_nothing(machine, node):
    node.looks(machine.now(), 12).each(Story.reboot).looks(machine.now(), 12)
    assert (node.seen, node.failed, node.drained) == (set(), [], False)


# --- services


@pytest.mark.parametrize("unit", [*REQUIRED, *WANTED])
@pytest.mark.parametrize("states", [["inactive dead"], ["deactivating stop-sigterm", "activating start"]])
def test_a_service_that_is_restarted(machine, node, unit, states):
    for state in states:
        machine.units[unit] = state
        node.look(machine.now(), minutes=0.4)
    machine.units[unit] = "active running"
    node.looks(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False), "it was active again before the confirmation time ended"


def test_a_slurmd_that_stays_down_drains(machine, node):
    machine.units["slurmd"] = "inactive dead"
    node.looks(machine.now(), 3, minutes=0.6)
    assert (node.codes, node.drained) == (["services/inactive"], True)


def test_a_time_service_that_stays_down_only_warns_and_so_does_the_clock_hours_later(machine, node):
    machine.units["chronyd"] = "inactive dead"
    node.looks(machine.now(), 2)
    assert node.codes == ["services/wanted_inactive"]
    machine.clock = KernelClock(True, 0.0001, 6.0)
    node.looks(machine.now(), 4)
    assert node.codes == ["clock/uncertain", "services/wanted_inactive"]
    assert not node.drained


def test_a_restart_of_the_time_service(machine, node):
    machine.clock = KernelClock(False, 0.0, 16.0)
    node.look(machine.now())
    machine.clock = KernelClock(True, -0.3, 0.4)  # the service steps or slews the clock
    node.looks(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False)


# --- file systems


def hang(node: Node, seconds: float, minutes: float) -> None:
    """Let the check of /data hang while the other checks continue."""
    node.of("mount").hang(seconds, minutes)
    node.each(lambda story: None)


def test_an_nfs_failover_of_90_seconds(machine, node):
    hang(node, 10.0, 0.2)
    hang(node, 90.0, 1.3)
    machine.system.fails["/data"] = errno.ESTALE
    node.look(machine.now(), minutes=0.1)
    machine.system.fails.clear()
    node.look(machine.now(), minutes=0.5)
    assert (node.seen, node.drained) == ({"mount/hang"}, False)
    node.look(machine.now())
    assert node.codes == [], "the warning is cleared"


def test_an_nfs_server_that_is_away_for_ten_minutes_drains_without_requeue(machine, node):
    hang(node, 10.0, 0.2)
    hang(node, 611.0, 10.1)
    assert (node.codes, node.drained, node.of("mount").requeued) == (["mount/hang"], True, False)


@pytest.mark.parametrize("how", ["stale", "unmounted"])
def test_a_mount_that_is_mounted_anew_within_seconds_and_one_that_is_not(machine, node, how):
    def broken() -> None:
        if how == "stale":
            machine.system.fails["/data"] = errno.ESTALE
        else:
            machine.mounts(ROOT, TMP)

    broken()
    node.look(machine.now())
    machine.system.fails.clear()
    machine.mounts()
    node.looks(machine.now(), 2, minutes=0.5)
    assert (node.seen, node.drained) == (set(), False)
    broken()
    node.looks(machine.now(), 2, minutes=0.6)
    assert (node.drained, node.of("mount").requeued) == (True, True)


def test_a_job_that_fills_tmp_and_cleans_up(machine, node):
    machine.system.free["/tmp"] = 0.07
    node.look(machine.now())
    assert node.codes == ["disk_space/low_space"]
    machine.system.free.clear()
    node.looks(machine.now(), 2)
    assert (node.codes, node.drained) == ([], False)


def test_a_job_that_fills_tmp_to_the_end_keeps_others_away_only_until_it_is_clean(machine, node):
    machine.system.free["/tmp"] = 0.01
    node.look(machine.now())
    assert (node.codes, node.drained, node.of("disk_space").requeued) == (["disk_space/no_space"], True, False)
    machine.system.free.clear()
    node.looks(machine.now(), 2)
    assert (node.codes, node.drained) == ([], False)


# --- the network


def fabric(machine: Machine, up: bool, downed: int) -> None:
    """Change every InfiniBand port of the node, as when its leaf switch fails or returns."""
    for port in (0, 1):
        machine.port(port, up)
        machine.count(port, link_downed=downed)


def test_a_leaf_switch_that_reboots_in_60_seconds(machine, node):
    fabric(machine, up=False, downed=1)
    machine.count(0, symbol_error=4000, port_rcv_errors=912, link_error_recovery=1)
    node.look(machine.now())
    fabric(machine, up=True, downed=1)
    machine.count(0, symbol_error=4300)
    node.look(machine.now(), minutes=1)
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_a_leaf_switch_that_reboots_twice_in_an_hour_while_nobody_looks(machine, node):
    fabric(machine, up=True, downed=2)
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_a_leaf_switch_that_stays_away_drains_and_after_four_minutes_requeues(machine, node):
    fabric(machine, up=False, downed=1)
    node.looks(machine.now(), 2, minutes=1.1)
    assert (node.codes, node.drained, node.of("ib_link").requeued) == (["ib_link/down"] * 2, True, False)
    node.look(machine.now(), minutes=4)
    assert node.of("ib_link").requeued


def test_links_that_go_down_three_times_in_three_hours_drain(machine, node):
    for downed in (1, 2, 3):
        fabric(machine, up=True, downed=downed)
        node.look(machine.now(), minutes=30)
    assert (node.codes, node.drained) == (["ib_flap/link_downed"] * 2, True)


def test_symbol_errors_that_go_on_while_the_link_is_up_drain(machine, node):
    for number in range(1, 9):
        machine.count(0, symbol_error=20 * number)
        node.look(machine.now())
    assert (node.codes, node.drained) == (["ib_errors/symbols"], True)


def test_an_ethernet_switch_that_reboots_in_50_seconds_and_one_that_stays_away(machine, node):
    machine.ethernet(up=False, changes=3)
    node.look(machine.now())
    machine.ethernet(changes=4)
    node.looks(machine.now(), 3, minutes=1)
    assert (node.seen, node.drained) == (set(), False)
    machine.ethernet(up=False, changes=5)
    node.looks(machine.now(), 2, minutes=1.1)
    assert (node.codes, node.drained) == (["eth_link/down"], True)


# --- the kernel log


JOB = "0000:61:00"
OF_JOBS = (
    f"NVRM: Xid (PCI:{JOB}): 13, pid=4711, name=python3, Graphics SM Warp Exception on (GPC 4, TPC 0, SM 1): "
    "Out Of Range Address",
    f"NVRM: Xid (PCI:{JOB}): 31, pid=4711, name=python3, Ch 0000005a, intr 10000000. MMU Fault: ENGINE GRAPHICS",
    f"NVRM: Xid (PCI:{JOB}): 43, pid=4711, name=python3, Ch 00000010",
    f"NVRM: Xid (PCI:{JOB}): 45, pid=4711, name=python3, Ch 00000010",
    f"NVRM: Xid (PCI:{JOB}): 63, pid='<unknown>', name=<unknown>, Row Remapper: New row marked for remapping",
    f"NVRM: Xid (PCI:{JOB}): 94, pid=4711, name=python3, Contained: SM (0x1). RST: No, D-RST: No",
)


def test_an_xid_13_from_each_node_of_a_job_array_and_what_else_jobs_do(machine, node):
    for _ in range(20):  # one failed job after another, for an hour
        hear(node, *OF_JOBS)
        node.look(machine.now(), minutes=3)
    assert node.seen == {"gpu_xid/13", "gpu_xid/31", "gpu_xid/94"}, "43, 45 and 63 are only recorded"
    assert not node.drained
    node.looks(machine.now(), 14)
    assert node.codes == [], "an hour later the warnings are cleared"


@pytest.mark.parametrize("code", [79, 48, 95])
def test_an_xid_that_no_job_can_cause_drains(node, code):
    hear(node, f"NVRM: Xid (PCI:{JOB}): {code}, pid=4711, name=python3, x")
    assert (node.codes, node.drained, node.of("gpu_xid").requeued) == ([f"gpu_xid/{code}"], True, True)


# --- boots


def test_the_noise_of_a_boot(machine, node):
    machine.up_seconds = 60
    for port in (0, 1):
        machine.count(port, link_downed=4, symbol_error=300, port_rcv_errors=900)
    for pci in (*GPUS, *NICS, "0000:00:01.1"):
        machine.aer(pci, RxErr=40, BadTLP=60)
    machine.memory(corrected=3)
    node.each(Story.reboot).look(machine.now())
    machine.up_seconds = 600
    for port in (0, 1):  # counts of each port of a healthy DGX H100
        machine.count(port, link_downed=6, excessive_buffer_overrun_errors=15, port_rcv_errors=914, symbol_error=700)
    node.look(machine.now())
    machine.up_seconds = 1700
    for port in (0, 1):
        machine.count(port, link_downed=9)
    node.look(machine.now())
    machine.up_seconds = 4 * 3600
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_what_is_not_there_yet_when_healthd_starts_after_a_boot(machine, node):
    """slurmd waits for healthd, an NFS server and the fabric manager are late, chrony is not synchronised yet."""
    machine.up_seconds = 40
    machine.units["slurmd"] = "inactive dead 4711"  # the start job waits in systemd
    machine.mounts(ROOT, TMP)
    machine.all_gpus("fabric_state = 2")
    machine.clock = KernelClock(False, 0.0, 16.0)
    node.each(Story.reboot).look(machine.now())
    machine.mounts()
    node.look(machine.now(), minutes=0.4)
    machine.units["slurmd"] = "active running"
    node.looks(machine.now(), 2, minutes=2)
    machine.gpus()
    machine.clock = KernelClock(True, 0.0001, 0.01)
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


UVM = ("sys/module/nvidia_uvm/initstate", "sys/module/nvidia_uvm", "dev/nvidia-uvm", "dev/nvidia-uvm-tools")
GONE = {"module": ("sys/module/nvidia/initstate", "sys/module/nvidia/refcnt", "sys/module/nvidia")}
GONE["device file"] = ("dev/nvidia3",)


def set_up_by_a_baseline(machine: Machine) -> Node:
    """Return the checks of the driver's files, with the expectations that `healthd baseline` finds on this machine."""
    found = {}
    for check in ("kernel_modules", "device_nodes"):
        known = built_in_checks()[check]
        entries = [item for item in baseline_items(machine.now(), known, known.config()) if isinstance(item, Entry)]
        names = {entry.key: entry.value for entry in entries}
        found[check] = names if check == "device_nodes" else tuple(names)
    checks = {name: built_in_checks()[name] for name in found}
    return Node(
        Story(check.module, load(check.config, {"expected": found[name]}, name)) for name, check in checks.items()
    )


def reboot_without(machine: Machine, node: Node, *paths: str) -> Node:
    for path in paths:
        (machine.root / path).rmdir() if (machine.root / path).is_dir() else (machine.root / path).unlink()
    return node.each(Story.reboot).looks(machine.now(), 12)


def test_a_reboot_without_uvm_drains_nothing(machine, node):
    """nvidia-modprobe may load it only with the first CUDA program, and a drained node never runs one."""
    baselined = set_up_by_a_baseline(machine).looks(machine.now(), 2)
    reboot_without(machine, baselined, *UVM)
    node.each(Story.reboot).looks(machine.now(), 12)
    assert (baselined.seen | node.seen, baselined.failed + node.failed) == (set(), [])


@pytest.mark.parametrize("what", GONE)
def test_a_reboot_without_what_the_driver_always_brings_drains(machine, what):
    baselined = set_up_by_a_baseline(machine).looks(machine.now(), 2)
    assert not baselined.drained
    assert reboot_without(machine, baselined, *GONE[what]).drained


@pytest.mark.parametrize("late", ["mount", "fabric"])
def test_what_is_still_not_there_minutes_after_the_boot_drains_until_it_is(machine, node, late):
    machine.up_seconds = 40
    if late == "mount":
        machine.mounts(ROOT, TMP)
    else:
        machine.all_gpus("fabric_state = 2")
    node.each(Story.reboot).looks(machine.now(), 2, minutes=5.1)
    assert node.drained
    machine.mounts()
    machine.gpus()
    assert not node.looks(machine.now(), 2).drained


def test_links_that_still_flap_half_an_hour_after_the_boot_drain(machine, node):
    machine.up_seconds = 3600
    node.each(Story.reboot).look(machine.now())
    machine.count(0, link_downed=3)
    node.look(machine.now())
    assert (node.codes, node.drained) == (["ib_flap/link_downed"], True)


def test_an_operator_takes_the_node_down_for_another_dimm(machine, node):
    machine.memory(corrected=900)
    node.look(machine.now()).each(lambda story: story.hold("ticket 7: DIMM A1"))
    node.looks(machine.now(), 3)
    machine.memory(corrected=0)
    machine.up_seconds = 200
    node.each(Story.reboot).look(machine.now(), minutes=240)
    node.each(lambda story: story.hold(""))
    machine.memory(corrected=2)
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_a_dimm_that_is_not_found_after_that_drains(machine, node):
    node.each(lambda story: story.hold("ticket 7: DIMM A1"))
    machine.memory(gib=1952)
    node.each(Story.reboot).look(machine.now(), minutes=240)
    assert not node.drained, "the operator holds the node"
    node.each(lambda story: story.hold(""))
    assert (node.codes, node.drained) == (["memory_size/too_small"], True)


# --- GPUs


def test_idle_gpus_save_power(machine, node):
    machine.all_gpus("pcie_generation = 1\nclock_event_reasons = 1\nutilization_percent = 0")
    node.looks(machine.now(), 12)
    machine.all_gpus("pcie_generation = 5\nclock_event_reasons = 4\nutilization_percent = 100")  # at its power cap
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == (set(), False)


def test_a_gpu_that_works_on_half_its_lanes_drains(machine, node):
    machine.gpus("[gpu.3]\npcie_width = 8\nutilization_percent = 100")
    node.looks(machine.now(), 2)
    assert (node.codes, node.drained) == (["gpu_pcie/lanes"], True)


STOPPED = "persistence = false"  # nvidia-persistenced was stopped: no GPU can be reset while it runs
TRAINING = f"{STOPPED}\nnvlink_inactive = [0, 1, 2, 3, 4, 5, 6, 7]\nfabric_state = 2\npcie_generation = 1"


def test_an_operator_resets_the_gpus_of_a_drained_node(machine, node):
    """NVML first hangs until the reset is done. Then there is no driver, because machines with NVSwitches unload the
    modules. Then the links of the GPUs train, the GPUs wait for the fabric manager, and the counters are 0.
    """
    machine.all_gpus("ecc_volatile_corrected_sram = 90\npcie_replays = 150")
    node.look(machine.now()).each(lambda story: story.hold("reset of the GPUs"))
    machine.all_gpus(STOPPED)
    node.look(machine.now())
    node.of("gpu_access").hang(45.0, 1.0)
    machine.gpus('library = "driver_not_loaded"')
    node.look(machine.now(), minutes=0.2)
    machine.all_gpus(f"{TRAINING}\npcie_replays = 0")
    hear(node, "nvidia-nvswitch0: SXid (PCI:0000:07:00.0): 22013, Non-fatal, Link 04 Minion Link DLREQ interrupt")
    node.look(machine.now(), minutes=0.5)
    machine.all_gpus("pcie_replays = 2")
    node.looks(machine.now(), 2, minutes=0.7)
    warned = {"gpu_persistence/off", "gpu_access/hang", "sxid/22013"}
    assert node.seen == {*warned, "gpu_access/driver_not_loaded"}
    assert node.codes == ["sxid/22013"]
    node.each(lambda story: story.hold("")).looks(machine.now(), 3)
    assert not node.drained


def test_an_operator_resets_one_gpu_of_an_idle_node(machine, node):
    machine.gpus(f"[gpu.3]\n{STOPPED}")
    node.look(machine.now())
    node.of("gpu_access").hang(12.0, 1.0)
    machine.gpus(f"[gpu.3]\n{TRAINING}")
    node.look(machine.now(), minutes=0.2)
    machine.gpus()
    node.looks(machine.now(), 3, minutes=0.9)
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
def test_a_gpu_that_is_not_well_after_its_reset_drains(machine, node, text, code):
    node.each(lambda story: story.hold("reset of the GPUs"))
    machine.gpus(f"[gpu.3]\n{text}")
    node.looks(machine.now(), 2, minutes=6)
    assert not node.drained, "the operator holds the node"
    node.each(lambda story: story.hold(""))
    assert node.drained
    assert code in node.codes


@pytest.mark.parametrize("state", ["lost", "requires_reset", "gone", "unreachable"])
def test_whatever_nvml_says_of_a_gpu_during_a_reset_in_a_pause(machine, node, state):
    node.each(lambda story: story.pause(10))
    machine.gpus(f"[gpu.3]\n{state} = true")
    node.look(machine.now(), minutes=1)
    machine.gpus()
    node.looks(machine.now(), 6)
    if state == "requires_reset":
        assert not node.codes, "the driver requests nothing any more: the GPU was reset"
    else:
        assert node.codes, "a fault that needs a reboot is reported until `healthd repaired`"
    assert not node.drained


def test_mig_is_set_up_anew(tmp_path, machine):
    """Without MIG settings, GPUs may have other MIG devices, or none, between jobs."""
    node = Node(Story(check.module) for name, check in built_in_checks().items() if not check.per)
    for text in ("mig = false", "mig_pending = true", "mig = true\nmig_devices = 3", "mig = true\nmig_devices = 7"):
        machine.all_gpus(text)
        node.looks(machine.now(), 3)
    machine.all_gpus("")
    node.looks(machine.now(), 3)
    assert (node.seen, node.drained) == (set(), False)


def test_where_the_site_says_what_mig_must_be_other_devices_drain_until_they_are_right(machine):
    config = load(built_in_checks()["gpu_mig"].config, {"mode": "on", "instances": 7}, "gpu_mig")
    node = Node([Story(built_in_checks()["gpu_mig"].module, config)])
    machine.all_gpus("mig = true\nmig_devices = 6")
    assert node.look(machine.now()).drained
    machine.all_gpus("mig = true\nmig_devices = 7")
    assert not node.looks(machine.now(), 2).drained


MODULE = "/sys/module/nvidia/initstate"
UPGRADE: tuple[Callable[[Machine], None], ...] = (
    lambda machine: machine.gpus('library = "mismatch"'),
    lambda machine: machine.gpus('library = "driver_not_loaded"'),
    lambda machine: machine.all_gpus("gone = true"),
    lambda machine: machine.gpus("".join(f"[gpu.{n}]\ngone = true\n" for n in range(3, 8))),
    lambda machine: machine.all_gpus(TRAINING),
    lambda machine: machine.units.update(slurmd="inactive dead"),
)


def test_a_driver_upgrade_in_a_pause(machine, node):
    node.each(lambda story: story.pause(60))
    machine.write({MODULE: "going\n"})
    for step in UPGRADE:
        step(machine)
        node.looks(machine.now(), 2)
        assert not node.drained
    expected = {"gpu_access/driver_mismatch", "gpu_count/missing", "services/inactive", "kernel_modules/not_loaded"}
    assert expected <= node.seen
    machine.units["slurmd"] = "active running"
    machine.write({MODULE: "live\n"})
    machine.gpus('driver_version = "590.48.01"')
    node.looks(machine.now(), 14)
    assert node.of("gpu_access").trusted_since, "the pause is over"
    assert not node.drained
    # Faults that need a reboot are still reported but do not drain. The unexpected driver version warns.
    assert set(node.codes) == {"gpu_count/missing", "gpu_software/driver"}
    node.each(lambda story: story.repaired("gpu_count/missing") if story.check.name == "gpu_count" else None)
    assert node.look(machine.now()).codes == ["gpu_software/driver"]


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_a_driver_that_is_not_back_when_the_pause_ends_drains(machine, node, step):
    node.each(lambda story: story.pause(30))
    UPGRADE[step](machine)
    node.looks(machine.now(), 5)
    assert not node.drained
    node.looks(machine.now(), 3)
    assert node.drained


def test_the_driver_is_loaded_again_and_counts_from_zero(machine, node):
    machine.all_gpus("ecc_volatile_corrected_dram = 5000\npcie_replays = 200\nnvlink_crc = { 4 = 3 }")
    node.looks(machine.now(), 2)
    assert node.codes == ["gpu_nvlink/crc"] * 8
    machine.all_gpus("pcie_replays = 0")
    node.looks(machine.now(), 12)
    assert (node.seen, node.drained) == ({"gpu_nvlink/crc"}, False)


# --- the machine that runs the tests


TRUE_OF_TEST_MACHINES = {
    "clock/unsynchronised": "containers have no time service",
    "cpu/governor": "laptops save power",
    "disk_space/": "the disk may really be full",
    "gpu_persistence/": "a workstation has no nvidia-persistenced",
}


def test_without_expectations_this_machine_gives_nothing_above_info(tmp_path):
    # Other tests, which run in parallel, let processes hang.
    (tmp_path / "healthd.toml").write_text("[checks.processes]\nenabled = false\n")
    command = ["check", "--json", "--config", str(tmp_path / "healthd.toml"), "--profile", "none", "--baseline", ""]
    done = subprocess.run([sys.executable, "-m", "healthd", *command], capture_output=True, text=True, check=False)
    results = json.loads(done.stdout)["results"]
    assert [result for result in results if result["outcome"] != "completed"] == []
    found = [f for result in results for f in result["findings"] if f["severity"] != "info"]
    assert [f for f in found if not f["code"].startswith(tuple(TRUE_OF_TEST_MACHINES))] == []
