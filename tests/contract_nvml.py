"""What every NVML must keep, fake or real. `python contract_nvml.py [PROFILE]` asserts it of the real one."""

from __future__ import annotations

import re
import sys

from healthd.nvml import Histogram, NvlinkErrors, Nvml, NvmlErrorKind, NvmlGpu, PcieLink, RemappedRows

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
    assert type(gpu.ecc_mode()) in (bool, type(None))
    assert type(gpu.mig_enabled()) in (bool, type(None))
    assert type(gpu.sram_threshold_exceeded()) in (bool, type(None))
    assert isinstance(gpu.vbios(), str | None)
    _assert_count(gpu.recovery_action())
    _assert_count(gpu.temperature())
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


def _assert_links(gpu: NvmlGpu) -> None:
    states = gpu.nvlink_states()
    assert states is None or (0 < len(states) <= 64 and all(type(state) is bool for state in states))
    for link in range(len(states or ())):
        errors = gpu.nvlink_errors(link)
        if errors is not None:
            assert errors != NvlinkErrors(None, None, None)
            for count in (errors.replay, errors.recovery, errors.crc):
                _assert_count(count)
    assert gpu.nvlink_errors(len(states or ()) + 100) is None, "no such link"


def _assert_count(count: int | None) -> None:
    assert count is None or (type(count) is int and count >= 0)


if __name__ == "__main__":
    from healthd.fake_nvml import open_fake
    from healthd.nvml import open_real

    for _ in range(2):  # a second round in the same process
        nvml = open_fake(sys.argv[1]) if sys.argv[1:] else open_real()
        assert_contract(nvml)
        print(f"{len(nvml.gpus())} GPUs answer, {len(nvml.unreachable)} do not")
        nvml.close()
