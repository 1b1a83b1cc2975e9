"""The contract of every NVML, fake or real. `python contract_nvml.py [PROFILE]` asserts it on the real one."""

from __future__ import annotations

import re
import sys

from healthd.nvidia.gpu_event import GpuEvent
from healthd.nvidia.nvml import (
    ABSENT,
    Fabric,
    Histogram,
    Nvml,
    NvmlError,
    NvmlErrorKind,
    NvmlGpu,
    PcieLink,
    Platform,
    RemappedRows,
    RetiredPages,
    TemperatureLimits,
)
from healthd.nvidia.nvml_events import open_events

ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0")


def assert_contract(nvml: Nvml) -> None:
    version = nvml.driver_version()
    assert version is None or version
    gpus = nvml.gpus()
    assert gpus is nvml.gpus(), "one enumeration for each open"
    assert len({gpu.pci for gpu in gpus}) == len(gpus)
    assert all(isinstance(error.kind, NvmlErrorKind) for error in nvml.unreachable)
    for gpu in gpus:
        assert_gpu(gpu)


def assert_gpu(gpu: NvmlGpu) -> None:
    assert ADDRESS.fullmatch(gpu.pci)
    assert gpu.index >= 0
    assert isinstance(gpu.uuid, str)
    assert isinstance(gpu.name, str)
    assert re.fullmatch(r"[0-9A-Za-z]{1,29}", gpu.serial() or "0")
    _assert_count(gpu.minor())
    _assert_count(gpu.uptime_seconds())
    assert type(gpu.ecc_mode()) in (bool, type(None))
    assert type(gpu.mig_enabled()) in (bool, type(None))
    assert type(gpu.sram_threshold_exceeded()) in (bool, type(None))
    assert type(gpu.unrepairable_memory()) in (bool, type(None))
    assert isinstance(gpu.vbios(), str | None)
    _assert_count(gpu.recovery_action())
    _assert_count(gpu.virtualization())
    assert all(type(part) is int for part in gpu.compute_capability() or ())
    _assert_count(gpu.temperature())
    _assert_count(gpu.sm_clock_mhz())
    assert gpu.activity_counters(()) == {}
    watts = gpu.mean_power_milliwatts()
    assert watts is None or 0 <= watts < 3_000_000
    counted = gpu.activity_counters(("nvlink", "pcie", "power"))
    assert counted.keys() <= {"nvlink", "pcie", "power"}
    assert all(type(count) is int and count >= 0 for count in counted.values())
    for uncorrected in (True, False):
        for volatile in (True, False):
            _assert_count(gpu.ecc_total(uncorrected, volatile))
            for location in ("sram", "dram"):
                _assert_count(gpu.ecc_count(location, uncorrected, volatile))
    rows = gpu.remapped_rows()
    assert rows is None or (isinstance(rows, RemappedRows) and type(rows.pending) is bool)
    histogram = gpu.row_remap_histogram()
    assert histogram is None or isinstance(histogram, Histogram)
    _assert_links(gpu)
    assert isinstance(gpu.pcie_link(), PcieLink)
    _assert_state(gpu)


def _assert_state(gpu: NvmlGpu) -> None:
    pages = gpu.retired_pages()
    assert pages is None or (isinstance(pages, RetiredPages) and type(pages.pending) is bool)
    fabric = gpu.fabric()
    if fabric is not None:
        assert isinstance(fabric, Fabric)
        for number in (fabric.state, fabric.status, fabric.health_mask, fabric.summary, fabric.clique):
            _assert_count(number)
        assert re.fullmatch(r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", fabric.cluster)
    platform = gpu.platform()
    assert platform is None or (isinstance(platform, Platform) and "\0" not in platform.chassis_serial)
    for link in gpu.c2c_links():
        assert type(link.active) in (bool, type(None))
        for count in (link.error_interrupts, link.replays, link.back_to_back_replays):
            _assert_count(count)
    assert type(gpu.c2c_enabled()) in (bool, type(None))
    repair = gpu.pending_repair()
    assert repair is None or [type(repair.channel), type(repair.tpc)] == [bool, bool]
    for count in (gpu.clock_event_reasons(), gpu.memory_temperature(), gpu.pcie_replays(), gpu.mig_instances()):
        _assert_count(count)
    for seconds in (gpu.slowdown_seconds() or {"none": 0.0}).values():
        assert type(seconds) is float
        assert seconds >= 0
    limits = gpu.temperature_limits()
    assert isinstance(limits, TemperatureLimits)
    for degrees in (limits.slowdown, limits.memory_max, limits.slowdown_margin, gpu.temperature_margin()):
        assert type(degrees) in (int, type(None))
    used = gpu.utilization()
    assert used is None or 0 <= used <= 1
    for flag in (gpu.persistence_mode(), gpu.inforom_valid()):
        assert type(flag) in (bool, type(None))
    for watts in (gpu.enforced_power_limit_watts(), gpu.default_power_limit_watts()):
        assert watts is None or watts >= 0
    processes = gpu.compute_processes()
    assert processes is None or all(type(pid) is int for pid in processes)
    mode = gpu.mig_mode()
    assert mode is None or [type(entry) for entry in mode] == [bool, bool]


def assert_events(nvml: Nvml) -> None:
    """Register events twice. A driver that just started has none."""
    for _ in range(2):
        try:
            events = open_events(nvml, [gpu.pci for gpu in nvml.gpus()])
        except NvmlError as error:
            if error.number not in ABSENT:  # no GPU has events, as in a vGPU
                raise
            return
        for _ in range(100):
            event = events.wait(0)
            if event is None:
                break
            assert isinstance(event, GpuEvent)
            assert event.pci == "" or ADDRESS.fullmatch(event.pci)
            assert all(type(xid) is int for xid in event.xids)
        events.close()


def _assert_links(gpu: NvmlGpu) -> None:
    links = gpu.nvlinks()
    assert links is None or 0 < len(links) <= 64
    for link in links or ():
        assert type(link.active) in (bool, type(None))
        for count in (link.replay, link.recovery, link.crc, link.speed, *link.packet_errors.values()):
            _assert_count(count)
        for rate in (link.effective_ber, link.symbol_ber):
            assert rate is None or 0 <= rate < 16


def _assert_count(count: int | None) -> None:
    assert count is None or (type(count) is int and count >= 0)


if __name__ == "__main__":
    from healthd.nvidia.fake_nvml import open_fake
    from healthd.nvidia.nvml import open_real

    for _ in range(2):  # a second round in the same process
        nvml = open_fake(sys.argv[1]) if sys.argv[1:] else open_real()
        assert_contract(nvml)
        assert_events(nvml)
        print(f"{len(nvml.gpus())} GPUs answer, {len(nvml.unreachable)} do not")
        nvml.close()
