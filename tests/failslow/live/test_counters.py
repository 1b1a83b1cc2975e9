"""Tests of the activity counters of a node, read from simulated trees and a stub of NVML, also with faults."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from healthd.common.errors import HealthdError
from healthd.failslow.live.counters import CounterTotal, GpuCounters, IbPorts, NoCounters, growth, parse_count
from healthd.host.host import Host
from healthd.nvidia.fake_nvml import open_fake

PORTS = "/sys/class/infiniband/{}/ports/1/counters/{}"


def host_with_ports(root: Path, **counts: tuple[str, str]) -> Host:
    """Write port counters, given as device=(received, sent)."""
    for device, (received, sent) in counts.items():
        write(root, {PORTS.format(device, "port_rcv_data"): received, PORTS.format(device, "port_xmit_data"): sent})
    return Host(str(root))


def open_counters() -> list[str]:
    """Return the port counters that this process has open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sorted(os.readlink(link) for link in links if os.path.lexists(link) and "/ports/" in os.readlink(link))


def test_ports_count_both_directions_through_same_descriptors(tmp_path: Path) -> None:
    ports = IbPorts(host_with_ports(tmp_path, mlx5_0=("100\n", "20\n"), mlx5_1=("7\n", "1\n")))
    ports.open()
    descriptors_before = open_counters()
    assert ports.read() == {"ib": {"mlx5_0/1": 120, "mlx5_1/1": 8}}
    with open(tmp_path / PORTS.format("mlx5_0", "port_rcv_data").lstrip("/"), "r+") as file:
        file.write("18446744073709551615\n")
    assert ports.read() == {"ib": {"mlx5_0/1": 2**64 + 19, "mlx5_1/1": 8}}
    assert open_counters() == descriptors_before
    assert len(descriptors_before) == 4
    ports.close()
    assert open_counters() == []


def test_node_without_ports_raises_no_counters(tmp_path: Path) -> None:
    write(tmp_path, {"/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"})
    with pytest.raises(NoCounters, match="no InfiniBand port"):
        IbPorts(Host(str(tmp_path))).open()


@pytest.mark.parametrize(
    "text", ["", "N/A (no PMA)\n", "-3\n", "1e9\n", "12 13\n", "9" * 40 + "\n", "\x00\n", "0x10\n"]
)
def test_port_without_valid_count_is_left_out(tmp_path: Path, text: str) -> None:
    ports = IbPorts(host_with_ports(tmp_path, mlx5_0=("100\n", text), mlx5_1=("7\n", "1\n")))
    ports.open()
    assert ports.read() == {"ib": {"mlx5_1/1": 8}}
    ports.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV, errno.EINVAL])
def test_removed_port_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    ports = IbPorts(host_with_ports(tmp_path, mlx5_0=("100\n", "20\n"), mlx5_1=("7\n", "1\n")))
    ports.open()
    read = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if "mlx5_0" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert ports.read() == {"ib": {"mlx5_1/1": 8}}
    ports.close()


def test_narrow_halves_number_of_ports(tmp_path: Path) -> None:
    ports = IbPorts(host_with_ports(tmp_path, **{f"mlx5_{number}": ("1\n", "1\n") for number in range(5)}))
    ports.open()
    port_counts = []
    while True:
        port_counts.append(len(ports.read()["ib"]))
        if not ports.narrow():
            break
    assert port_counts == [5, 3, 2, 1]
    ports.close()


ITERATIONS = "".join(f"gpu.{number}.iteration_seconds = 2.0\n" for number in range(8))


def host_with_gpus(path: Path, settings: str = "") -> Host:
    scenario = path / "gpus.toml"
    scenario.write_text(f'profile = "dgx-h100"\n{settings}')
    return Host(str(path), lambda: open_fake(str(scenario)))


def test_gpu_counters_are_read_together(tmp_path: Path) -> None:
    source = GpuCounters(host_with_gpus(tmp_path, ITERATIONS), ("nvlink", "power"))
    source.open()
    counts = source.read()
    assert {name: len(parts) for name, parts in counts.items()} == {"nvlink": 8, "power": 8}
    assert all(count > 0 for parts in counts.values() for count in parts.values())
    assert [len(source.read()["power"]) for _ in range(4) if source.narrow()] == [4, 2, 1]
    source.close()


def test_gpus_without_counter_or_lost_are_left_out(tmp_path: Path) -> None:
    host = host_with_gpus(tmp_path, ITERATIONS + "gpu.0.unsupported_fields = [138]\ngpu.1.lost = true\n")
    source = GpuCounters(host, ("nvlink", "power"))
    source.open()
    counts = source.read()
    assert len(counts["nvlink"]) == 6
    assert len(counts["power"]) == 7
    source.close()


def test_busy_gpu_is_read_again_completely() -> None:
    answers = iter([HealthdError("busy"), {"nvlink": 1}, {"nvlink": 9}])

    def counted(_names: Sequence[str]) -> dict[str, int]:
        answer = next(answers)
        if isinstance(answer, HealthdError):
            raise answer
        return answer

    gpu = SimpleNamespace(pci="0000:1b:00.0", activity_counters=counted)
    source = GpuCounters(SimpleNamespace(gpus=lambda: [gpu]), ("nvlink",))  # type: ignore[arg-type]
    assert source.open() == ""
    assert [source.read()["nvlink"][gpu.pci] for _ in range(2)] == [1, 9]


def test_mean_power_is_summed_instead_of_reading_energy() -> None:
    watts, clock, read_names = (
        iter([300.0, 300.0, 500.0, 700.0]),
        iter([10.0, 10.0, 10.5, 12.5]),
        list[tuple[str, ...]](),
    )

    def counted(names: Sequence[str]) -> dict[str, int]:
        read_names.append(tuple(names))
        return dict.fromkeys(names, 7)

    gpu = SimpleNamespace(
        pci="0000:1b:00.0", mean_power_milliwatts=lambda: next(watts) * 1000, activity_counters=counted
    )
    host = SimpleNamespace(gpus=lambda: [gpu], close_nvml=lambda: None)
    source = GpuCounters(host, ("nvlink", "power"), clock=lambda: next(clock))  # type: ignore[arg-type]
    assert source.open() == ""
    found = [source.read() for _ in range(3)]
    assert [counts["power"][gpu.pci] for counts in found] == [0, 250_000, 1_650_000]  # millijoules
    assert found[0]["nvlink"] == {gpu.pci: 7}
    assert read_names == [("nvlink",)] * 4


def test_unsupported_counter_is_reported_once_and_not_read(tmp_path: Path) -> None:
    without = "".join(f"gpu.{number}.unsupported_fields = [138]\n" for number in range(8))
    source = GpuCounters(host_with_gpus(tmp_path, ITERATIONS + without), ("nvlink", "power"))
    assert source.open().endswith(" for nvlink")
    assert source.read().keys() == {"power"}
    source.close()


def test_node_without_gpus_raises(tmp_path: Path) -> None:
    with pytest.raises((OSError, HealthdError)):
        GpuCounters(Host(str(tmp_path)), ("nvlink",)).open()


# --- growth and totals


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (5, 9, 4),
        (5, 5, 0),
        (2**64 - 10, 5, 15),
        (2**32 - 10, 5, 15),
        (2**40, 5, 0),  # reset
        (2**63, 5, 0),
        (2**32 + 10, 5, 0),
    ],
)
def test_growth_handles_wrap_and_reset(before: int, after: int, expected: int) -> None:
    assert growth(before, after) == expected


COUNT = st.integers(0, 2**64 - 1)


@given(st.lists(st.dictionaries(st.sampled_from("abc"), COUNT), max_size=20))
def test_counter_total_never_falls(readings: list[dict[str, int]]) -> None:
    total, last = CounterTotal(), 0
    for reading in readings:
        value = total.add(reading)
        if value is not None:
            assert value >= last
            last = value


def test_added_or_removed_parts_do_not_change_total() -> None:
    total = CounterTotal()
    assert total.add({"a": 10}) is None
    assert total.add({"a": 15, "b": 10**12}) == 5
    assert total.add({"a": 20, "b": 10**12 + 1}) == 11
    assert total.add({"b": 10**12 + 2}) == 12
    assert total.add({"c": 3}) is None
    assert total.add({"c": 4}) == 13


@given(st.binary(max_size=40))
def test_parse_count_accepts_number_or_raises(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_count(text) < 10**24
