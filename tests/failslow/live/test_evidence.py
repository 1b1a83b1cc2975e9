"""Tests of what changed on a node when a job became slow: readings from simulated trees, and their comparison."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import UnreadableTree, add_pci_device, aer_file, write

from healthd.failslow.live import node_reading
from healthd.failslow.live.evidence import MAX_CHANGES, PORT_COUNTERS, NodeChange, find_changes, is_hardware_fault
from healthd.failslow.live.node import Readings, read_node
from healthd.failslow.live.node_reading import Gpu, Link, OperationTimes, Reading
from healthd.failslow.model import Cause
from healthd.host.host import Host
from healthd.host.wakeup import FOREVER

GPU, NIC = "0000:1b:00.0", "0000:18:00.0"
# As Linux prints them. mountstats: github.com/prometheus/procfs, mountstats_test.go. diskstats, vmstat and stat: the
# documented columns (Linux, admin-guide/iostats.rst, proc(5)).
MOUNTSTATS = """\
device rootfs mounted on / with fstype rootfs
device /dev/sda1 mounted on / with fstype ext4
device 192.168.1.1:/srv/test mounted on /mnt/nfs/test with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.0,rsize=1048576,wsize=1048576,namlen=255,acregmin=3,acregmax=60,acdirmin=30,acdirmax=60,hard
\tage:\t13968
\tRPC iostats version: 1.0  p/v: 100003/4 (nfs)
\txprt:\ttcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726
\tper-op statistics
\t        NULL: 0 0 0 0 0 0 0 0
\t        READ: 1298 1298 0 207680 1210292152 6 79386 79407
\t       WRITE: 0 0 0 0 0 0 0 0
\t      ACCESS: 2927395007 2927394995 0 526931094212 362996810236 18446743919241604546 1667369447 1953587717
"""
DISKSTATS = """\
   7       0 loop0 759 15 12420 572 315 2469 32014 725 0 1092 1844 0 0 0 0 206 546
 259       0 nvme0n1 100 0 8000 50 200 0 16000 400 0 300 450 0 0 0 0 0 0
 259       1 nvme0n1p1 90 0 7000 40 190 0 15000 390 0 290 430 0 0 0 0 0 0
"""
PSI = "some avg10=1.53 avg60=1.87 avg300=1.73 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"


def sentences(*arguments: Any) -> tuple[str, ...]:
    return tuple(change.sentence for change in find_changes(*arguments))


def healthy_node(root: Path) -> Host:
    for pci, pci_class in ((GPU, "0x030200"), (NIC, "0x020700")):
        add_pci_device(root, pci, pci_class, "0000:00:01.1", vendor="0x10de" if pci == GPU else "0x15b3")
        link = {"current_link_width": "16\n", "current_link_speed": "32.0 GT/s PCIe\n"}
        write(root, {f"/sys/bus/pci/devices/{pci}/{name}": text for name, text in link.items()})
        write(
            root, {f"/sys/bus/pci/devices/{pci}/aer_dev_{kind}": aer_file(kind) for kind in ("correctable", "nonfatal")}
        )
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    write(root, {f"{port}/rate": "400 Gb/sec (4X NDR)\n", f"{port}/counters/symbol_error": "5\n"})
    write(root, {f"{port}/hw_counters/np_cnp_sent": "70\n", f"{port}/counters/port_xmit_wait": "N/A (no PMA)\n"})
    write(root, {f"/proc/pressure/{resource}": PSI.format(1000, 10) for resource in ("cpu", "memory", "io")})
    write(root, {"/proc/stat": "cpu  10 0 20 70 5 0 1 4 0 0\ncpu0 10 0 20 70 5 0 1 4 0 0\n"})
    write(root, {"/proc/diskstats": DISKSTATS, "/proc/self/mountstats": MOUNTSTATS})
    write(root, {"/proc/vmstat": "nr_free_pages 5\npswpin 3\npswpout 4\noom_kill 0\n"})
    write(root, {"/sys/fs/cgroup/system.slice/slurmstepd.scope/job_7/step_0/cgroup.procs": "10\n11\n"})
    write(root, {f"/proc/{pid}/status": "Name:\tpython\nCpus_allowed_list:\t0-7\n" for pid in (10, 11)})
    return Host(str(root), now=lambda: 1.7e9)


def test_read_node_reads_every_source(tmp_path: Path) -> None:
    gpu_facts = {GPU: {"celsius": 60, "sm_mhz": 1980, "reasons": 0, "pcie": [5, 16]}, "other": {"celsius": "hot"}}
    reading = read_node(healthy_node(tmp_path), gpu_facts)
    assert reading.gpus == {GPU: Gpu(60, 1980, 0), "other": Gpu(None, None, None)}
    assert reading.links == {GPU: Link(32.0, 16), NIC: Link(32.0, 16)}
    assert reading.errors == {GPU: {"correctable": 0, "nonfatal": 0}, NIC: {"correctable": 0, "nonfatal": 0}}
    assert reading.ports == {"mlx5_0/1": {"symbol_error": 5, "np_cnp_sent": 70}}
    assert reading.speeds == {"mlx5_0/1": 400.0}
    assert reading.waiting["cpu some"] == 1000
    assert reading.waiting["io full"] == 10
    assert reading.cpu == {"idle": 75, "steal": 4, "all": 110}
    assert reading.disks == {"nvme0n1": OperationTimes(300, 450)}
    assert reading.mounts == {"/mnt/nfs/test": OperationTimes(1298 + 2927395007, 79407 + 1953587717)}
    assert reading.memory == {"pswpin": 3, "pswpout": 4, "oom_kill": 0}
    assert reading.pinned == {"0-7": 2}


def test_read_node_handles_bare_machine(tmp_path: Path) -> None:
    reading = read_node(Host(str(tmp_path), now=lambda: 5.0), {})
    assert reading == Reading(5.0)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.EACCES])
def test_read_node_skips_unreadable_sources(tmp_path: Path, number: int) -> None:
    healthy_node(tmp_path)
    refused = ("/proc/stat", "/sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error", "/proc/pressure/cpu")
    host = Host(str(tmp_path), system=UnreadableTree(tmp_path, dict.fromkeys(refused, number)))
    reading = read_node(host, {})
    assert reading.cpu == {}
    assert reading.ports == {"mlx5_0/1": {"np_cnp_sent": 70}}
    assert "cpu some" not in reading.waiting
    assert reading.waiting["io some"] == 1000


def test_read_node_skips_slow_adapter(tmp_path: Path) -> None:
    seconds = iter(range(1000))
    reading = read_node(healthy_node(tmp_path), {}, lambda: float(next(seconds)))
    assert reading.ports == {}
    assert reading.disks


# --- changes


def readings_around_onset(**since: Any) -> tuple[list[Reading], list[Reading]]:
    """Return two readings before the onset and one after it, one minute apart, equal except for the given values."""
    quiet = Reading(
        0.0,
        {GPU: Gpu(60, 1980, 0)},
        {GPU: Link(32.0, 16)},
        {GPU: {"correctable": 0, "nonfatal": 0}},
        {"mlx5_0/1": {"np_cnp_sent": 0, "symbol_error": 0, "link_downed": 0}},
        {"mlx5_0/1": 400.0},
        {"cpu some": 0, "io full": 0, "memory full": 0},
        {"idle": 0, "steal": 0, "all": 0},
        {"nvme0n1": OperationTimes(0, 0)},
        {"/data": OperationTimes(0, 0)},
        {"pswpin": 0, "pswpout": 0, "oom_kill": 0},
        {"0-7": 8},
    )
    minute = dataclasses.replace(
        quiet,
        time=60.0,
        cpu={"idle": 5000, "steal": 10, "all": 6000},
        disks={"nvme0n1": OperationTimes(600, 600)},
        mounts={"/data": OperationTimes(600, 1200)},
    )
    later = {
        "time": 120.0,
        "cpu": {"idle": 10000, "steal": 20, "all": 12000},
        "mounts": {"/data": OperationTimes(1200, 2400)},
    }
    return [quiet, minute], [dataclasses.replace(minute, **{**later, **since})]


def test_find_changes_is_empty_for_quiet_node() -> None:
    assert sentences(*readings_around_onset()) == ()


@pytest.mark.parametrize(
    ("since", "sentence"),
    [
        (
            {"gpus": {GPU: Gpu(60, 1980, 0x40)}},
            f"GPU {GPU}: its clock is now limited (thermal slowdown by the hardware)",
        ),
        ({"gpus": {GPU: Gpu(60, 1200, 0x4)}}, f"GPU {GPU}: clock 1200 MHz at its power limit, 1980 MHz before"),
        ({"gpus": {GPU: Gpu(81, 1980, 0)}}, f"GPU {GPU}: temperature 81 C, 60 C before"),
        ({"links": {GPU: Link(32.0, 8)}}, f"{GPU}: PCIe link with 8 lanes, 16 before"),
        ({"links": {GPU: Link(2.5, 16)}}, f"{GPU}: PCIe link at 2.5 GT/s, 32 before"),
        (
            {"errors": {GPU: {"correctable": 90, "nonfatal": 0}}},
            f"{GPU}: 90 correctable PCIe errors (AER) per minute, 0 before",
        ),
        (
            {"ports": {"mlx5_0/1": {"link_downed": 1}}},
            "port mlx5_0/1: 1 link downs per minute, 0 before",
        ),
        (
            {"ports": {"mlx5_0/1": {"np_cnp_sent": 60_000}}},
            "port mlx5_0/1: 6e+04 congestion notifications to senders (CNP sent) per minute, 0 before",
        ),
        ({"speeds": {"mlx5_0/1": 200.0}}, "port mlx5_0/1: link at 200 Gbit/s, 400 before"),
        (
            {"waiting": {"cpu some": 24_000_000}},
            "tasks waited for a CPU 40% of the time, 0.0% before (PSI)",
        ),
        (
            {"waiting": {"io full": 12_000_000}},
            "all tasks waited for disks or file servers 20% of the time, 0.0% before (PSI)",
        ),
        (
            {"cpu": {"idle": 5000, "steal": 910, "all": 12000}},
            "the hypervisor took 15% of the CPU time (steal), 0.2% before",
        ),
        ({"disks": {"nvme0n1": OperationTimes(1200, 60_600)}}, "disk nvme0n1: 100 ms per operation, 1.0 ms before"),
        ({"mounts": {"/data": OperationTimes(1200, 61_200)}}, "NFS /data: 100 ms per operation, 2.0 ms before"),
        ({"memory": {"pswpin": 60_000, "pswpout": 0, "oom_kill": 0}}, "1000 pages per second swapped in, 0 before"),
        ({"memory": {"oom_kill": 1}}, "the kernel killed a process because memory was exhausted"),
        ({"pinned": {"3": 8}}, "8 job processes are pinned to CPU 3, 0 before"),
    ],
)
def test_change_states_both_numbers(since: Mapping[str, Any], sentence: str) -> None:
    assert sentences(*readings_around_onset(**since)) == (sentence,)


def test_condition_before_onset_is_no_change() -> None:
    before, since = readings_around_onset(gpus={GPU: Gpu(85, 1200, 0x40)}, links={GPU: Link(32.0, 8)}, pinned={"3": 8})
    same = {"gpus": since[0].gpus, "links": since[0].links, "pinned": since[0].pinned}
    assert sentences([dataclasses.replace(reading, **same) for reading in before], since) == ()


def test_changes_of_cause_and_named_gpu_come_first() -> None:
    other_gpu = "0000:43:00.0"
    before, since = readings_around_onset(
        gpus={GPU: Gpu(60, 1700, 0), other_gpu: Gpu(60, 1000, 0)},
        waiting={"cpu some": 54_000_000},
        speeds={"mlx5_0/1": 1.0},
    )
    before = [dataclasses.replace(reading, gpus={**reading.gpus, other_gpu: Gpu(60, 1980, 0)}) for reading in before]

    def first(cause: Cause, gpu: str = "") -> str:
        return sentences(before, since, cause, gpu)[0]

    assert first(Cause.COMPUTE_GPU).startswith(f"GPU {other_gpu}")
    assert first(Cause.COMPUTE_GPU, GPU).startswith(f"GPU {GPU}")
    assert first(Cause.COMPUTE_CPU).startswith("tasks waited ")
    assert first(Cause.COMMUNICATION_INTER_NODE).startswith("port mlx5_0/1")
    assert len(sentences(before, since, Cause.UNKNOWN)) == 4


def test_reset_or_new_counter_is_no_change() -> None:
    before, since = readings_around_onset(ports={"mlx5_0/1": {"np_cnp_sent": 5}, "mlx5_1/1": {"np_cnp_sent": 10**9}})
    before[1] = dataclasses.replace(before[1], ports={"mlx5_0/1": {"np_cnp_sent": 10**6}})
    assert sentences(before, since) == ()


def test_single_reading_before_gives_no_rate() -> None:
    before, since = readings_around_onset(gpus={GPU: Gpu(60, 1200, 0)}, ports={"mlx5_0/1": {"np_cnp_sent": 10**9}})
    assert sentences(before[1:], since) == (f"GPU {GPU}: clock 1200 MHz, 1980 MHz before",)
    assert sentences([], since) == ()
    assert sentences(before, []) == ()


READINGS = st.builds(
    Reading,
    st.floats(0, 1e10),
    st.dictionaries(st.just(GPU), st.builds(Gpu, *[st.none() | st.integers(-5, 1 << 40)] * 3)),
    st.dictionaries(st.just(GPU), st.builds(Link, st.floats(0, 64), st.integers(1, 32))),
    *[st.dictionaries(st.just("x"), st.dictionaries(st.sampled_from(["correctable", "np_cnp_sent"]), st.integers(0)))]
    * 2,
    st.dictionaries(st.just("x"), st.floats(0, 1e4)),
    st.dictionaries(st.sampled_from(["cpu some", "io full"]), st.integers(0)),
    st.fixed_dictionaries({}, optional={"steal": st.integers(0), "all": st.integers(0)}),
    *[st.dictionaries(st.just("d"), st.builds(OperationTimes, st.integers(0), st.integers(0)))] * 2,
    st.dictionaries(st.sampled_from(["pswpin", "oom_kill"]), st.integers(0)),
    st.dictionaries(st.sampled_from(["3", "0-7"]), st.integers(0, 300)),
)


@given(st.lists(READINGS, max_size=3), st.lists(READINGS, max_size=3), st.sampled_from(Cause))
def test_any_readings_give_limited_sentences(before: list[Reading], since: list[Reading], cause: Cause) -> None:
    found = sentences(before, since, cause, GPU)
    assert len(found) <= MAX_CHANGES
    assert all(sentence and len(sentence) < 400 for sentence in found)


@given(st.text(max_size=300))
def test_any_text_is_parsed(text: str) -> None:
    for readable in (
        node_reading.cpu_times,
        node_reading.disk_times,
        node_reading.nfs_times,
        node_reading.memory_events,
    ):
        assert isinstance(readable(text), dict)
    assert dict(node_reading.pressure(text, "cpu")) is not None
    assert node_reading.gbit_per_s(text) is None or text
    assert node_reading.link(text, text) is None or text


@given(
    st.lists(st.sampled_from([*MOUNTSTATS.splitlines(), *DISKSTATS.splitlines(), "", "\x00", "9" * 50]), max_size=30)
)
def test_lines_in_any_order_are_parsed(lines: list[str]) -> None:
    text = "\n".join(lines)
    for slow in (*node_reading.nfs_times(text).values(), *node_reading.disk_times(text).values()):
        assert min(slow) >= 0


# --- regular readings


def test_readings_are_taken_each_minute_while_needed() -> None:
    taken = []

    def take_reading() -> Reading:
        taken.append(Reading(float(len(taken))))
        return taken[-1]

    readings = Readings(take_reading)
    readings.step(100.0, is_needed=False)
    assert (readings.deadline, len(taken)) == (FOREVER, 0)
    readings.step(100.0, is_needed=True)
    readings.step(130.0, is_needed=True)
    readings.step(160.0, is_needed=True)
    assert (readings.deadline, len(taken)) == (220.0, 2)
    readings.step(161.0, is_needed=False)
    assert readings.deadline == FOREVER
    assert readings.find_changes(None, Cause.UNKNOWN, "", 300.0) == ()


def test_changing_jobs_do_not_increase_readings() -> None:
    taken = []

    def take_reading() -> Reading:
        taken.append(Reading(float(len(taken))))
        return taken[-1]

    readings = Readings(take_reading)
    for tenth in range(600):
        readings.step(tenth / 10, is_needed=tenth % 2 == 0)
        readings.find_changes(None, Cause.UNKNOWN, "", tenth / 10)
    assert len(taken) <= 1 + 6


def test_find_changes_compares_before_and_after_onset() -> None:
    before, since = readings_around_onset(gpus={GPU: Gpu(60, 1200, 0)})
    nodes = iter([*before, *since, dataclasses.replace(since[0], time=180.0)])
    readings = Readings(lambda: next(nodes))
    for at in range(3):
        readings.step(60.0 * at, is_needed=True)
    (change,) = readings.find_changes(100.0, Cause.UNKNOWN, "", 180.0)
    assert change.sentence == f"GPU {GPU}: clock 1200 MHz, 1980 MHz before"


def test_clock_set_back_gives_no_changes() -> None:
    before, since = readings_around_onset()
    nodes = iter([*before, dataclasses.replace(since[0], time=-3600.0, gpus={GPU: Gpu(99, 100, 0x40)})])
    readings = Readings(lambda: next(nodes))
    for at in range(2):
        readings.step(60.0 * at, is_needed=True)
    assert readings.find_changes(-3600.0, Cause.UNKNOWN, "", 180.0) == ()


@pytest.mark.parametrize(
    ("since", "is_fault"),
    [
        ({"gpus": {GPU: Gpu(60, 1200, 0x40)}}, True),
        ({"gpus": {GPU: Gpu(60, 1200, 0x04)}}, False),
    ],
)
def test_thermal_slowdown_is_hardware_fault_and_power_limit_is_not(since, is_fault):
    assert any(map(is_hardware_fault, find_changes(*readings_around_onset(**since)))) is is_fault


def test_effects_of_job_are_no_hardware_fault():
    for family in ("cpu", "storage"):
        assert not is_hardware_fault(NodeChange(0.9, family, "everything waited"))
    for name in ("rp_cnp_handled", "np_cnp_sent", "port_xmit_wait", "local_ack_timeout_err", "out_of_buffer"):
        assert not is_hardware_fault(NodeChange(PORT_COUNTERS[name][1], "fabric", name))
    for name in ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors"):
        assert is_hardware_fault(NodeChange(PORT_COUNTERS[name][1], "fabric", name))
