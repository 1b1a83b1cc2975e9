"""memory_size: whether the machine has the expected memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import findings, observations_named, parse_or_error, run_check, run_until_error
from hypothesis import given
from hypothesis import strategies as st
from story import Story
from trees import write

from healthd.agent.conditions.absorb import as_configured
from healthd.checks import memory_size
from healthd.checks.memory_size import Config, parse, parse_nodes, validate
from healthd.common.model import Clears, Severity
from healthd.host.host import Host

GIB = 2**30
# First lines as in proc_meminfo(5). A DGX H100 has 2 TiB.
MEMINFO = "MemTotal:       {:8d} kB\nMemFree:        2081226060 kB\nMemAvailable:   2086152368 kB\nBuffers: 1 kB\n"
EXPECTED = Config(expected_bytes=2000 * GIB)


def node(tmp_path: Path, gib: float) -> Host:
    return write(tmp_path, {"/proc/meminfo": MEMINFO.format(int(gib * 2**20))})


def healthy(tmp_path: Path) -> tuple[Host, Config]:
    """Write only the line that the check reads, so that a truncated file is one in which this line is truncated."""
    return write(tmp_path, {"/proc/meminfo": MEMINFO.splitlines()[0].format(2000 * 2**20)}), EXPECTED


def test_complete_memory_gives_no_finding(tmp_path):
    results = run_check(memory_size, node(tmp_path, 2000), EXPECTED)
    assert [item.value for item in results] == [2000 * GIB]
    assert list(observations_named(results, "memory_size_bytes")) == results


@pytest.mark.parametrize(
    ("gib", "is_too_small"), [(2100, False), (1990, False), (1941, False), (1939, True), (1750, True)]
)
def test_three_percent_may_be_missing(tmp_path, gib, is_too_small):
    assert len(findings(memory_size, node(tmp_path, gib), EXPECTED)) == is_too_small


def test_missing_memory_is_degraded(tmp_path):
    (finding,) = findings(memory_size, node(tmp_path, 1750), EXPECTED)
    assert (finding.code, finding.severity, finding.clears) == ("memory_size/too_small", Severity.DEGRADED, Clears.PASS)
    assert finding.message == "1750.0 GiB of memory; expected 2000.0 GiB: 12% missing"


def test_max_missing_share_is_a_setting(tmp_path):
    assert findings(memory_size, node(tmp_path, 1750), Config(expected_bytes=2000 * GIB, max_missing_share=0.2)) == []


def test_memory_size_reports_nothing_without_expectation(tmp_path):
    assert run_check(memory_size, node(tmp_path, 1)) == []
    assert run_check(memory_size, Host(str(tmp_path / "nothing"))) == []


def test_missing_dimm_drains_until_restored(tmp_path):
    story = Story(memory_size, EXPECTED).run_checks(node(tmp_path, 2000), 2)
    assert not story.drained
    story.reboot().run_check(node(tmp_path, 1875))
    assert story.drained
    assert not story.requeued
    story.run_checks(node(tmp_path, 1875), 400).reboot().run_checks(node(tmp_path, 1875), 5)
    assert story.drained, "neither time nor a reboot restores it"
    story.reboot().run_check(node(tmp_path, 2000))
    assert story.drained, "once is not enough"
    story.run_check(node(tmp_path, 2000))
    assert not story.drained


# A GB200 tray: the memory of each of two Grace CPUs is 480 GiB; NUMA nodes 2, 10, 18 and 26 are the memory of four GPUs
# of 186 GiB (TensorRT-LLM, examples/wide_ep/README.md; judged without a capture).
NUMA = {
    "/proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n",
    "/sys/devices/system/node/has_cpu": "0-1\n",
    "/sys/devices/system/node/has_memory": "0-2,10,18,26\n",
    **{
        f"/sys/devices/system/node/node{node}/meminfo": f"\nNode {node} MemTotal:       {gib * 2**20} kB\n"
        for node, gib in ((0, 480), (1, 480), (2, 186), (10, 186), (18, 186), (26, 186))
    },
}


def tray(tmp_path: Path, gib: int) -> Host:
    return write(tmp_path, {"/proc/meminfo": MEMINFO.format(gib * 2**20), **NUMA})


def test_memory_of_gpus_does_not_count(tmp_path):
    config = Config(expected_bytes=960 * GIB)
    with_gpus, without = tray(tmp_path / "a", 960 + 4 * 186), node(tmp_path / "b", 960)
    for host in (with_gpus, without):  # without: the driver is not loaded, or runs in the mode CDMM
        assert [item.value for item in run_check(memory_size, host, config)] == [960 * GIB]
        assert [entry.value for entry in memory_size.baseline(host, config)] == [960 * GIB]


def test_missing_dimm_is_found_despite_memory_of_gpus(tmp_path):
    host = tray(tmp_path, 864 + 4 * 186)
    write(tmp_path, {"/sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal: {384 * 2**20} kB\n"})
    (finding,) = findings(memory_size, host, Config(expected_bytes=960 * GIB))
    assert finding.message == "864.0 GiB of memory; expected 960.0 GiB: 10% missing"


@pytest.mark.parametrize(
    ("has_cpu", "has_memory"), [("0-1", "0-1"), ("0-1", "0"), ("0", "1"), ("", "0-1"), ("0-1", "")]
)
def test_mem_total_counts_unless_numa_nodes_with_and_without_cpus_have_memory(tmp_path, has_cpu, has_memory):
    host = node(tmp_path, 2000)
    folder = "/sys/devices/system/node"
    write(tmp_path, {f"{folder}/has_cpu": f"{has_cpu}\n", f"{folder}/has_memory": f"{has_memory}\n"})
    assert [item.value for item in run_check(memory_size, host, EXPECTED)] == [2000 * GIB]


@pytest.mark.parametrize("numa", [("0-1", "0-1"), ("0-1", "0"), ("0", "1"), None])
def test_cpuinfo_is_read_only_with_numa_nodes_with_and_without_cpus(tmp_path, numa):
    host = node(tmp_path, 2000)
    folder = "/sys/devices/system/node"
    if numa is not None:
        write(tmp_path, {f"{folder}/has_cpu": f"{numa[0]}\n", f"{folder}/has_memory": f"{numa[1]}\n"})
    (tmp_path / "proc/cpuinfo").mkdir()  # a read raises IsADirectoryError
    assert [item.value for item in run_check(memory_size, host, EXPECTED)] == [2000 * GIB]


@pytest.mark.parametrize("file", ["has_cpu", "has_memory", "node1/meminfo"])
def test_unreadable_numa_file_fails_run(tmp_path, file):
    host = tray(tmp_path, 1704)
    write(tmp_path, {f"/sys/devices/system/node/{file}": "N/A\n"})
    results, error = run_until_error(memory_size, host, EXPECTED)
    assert results == []
    assert error.startswith(f"/sys/devices/system/node/{file}: ")


def test_size_guessed_by_profile_only_warns(tmp_path):
    config = Config(expected_bytes=2000 * GIB, guessed=("expected_bytes",))
    (finding,) = findings(memory_size, node(tmp_path, 1750), config)
    assert as_configured(finding, config).severity is Severity.WARNING
    story = Story(memory_size, config).run_checks(node(tmp_path, 1750), 5)
    assert story.codes == ["memory_size/too_small"]
    assert not story.drained


@pytest.mark.parametrize("share", [-0.1, 1.0, 3.0, float("nan")])
def test_validate_rejects_invalid_share(share):
    assert "max_missing_share" in (validate(Config(max_missing_share=share)) or "")


def test_validate_rejects_negative_size():
    assert "expected_bytes" in (validate(Config(expected_bytes=-1)) or "")
    assert validate(EXPECTED) is None


@pytest.mark.parametrize(
    "text",
    ["", "N/A", "MemTotal: N/A kB\n", "MemTotal: 0 kB\n", "MemTotal: 99999999999999999999 kB\n", "MemFree: 1 kB\n"],
)
def test_unreadable_size_fails_run(tmp_path, text):
    results, error = run_until_error(memory_size, write(tmp_path, {"/proc/meminfo": text}), EXPECTED)
    assert results == []
    assert error.startswith("/proc/meminfo: has no MemTotal in kB: ")


@given(st.one_of(st.text(max_size=20), st.text("0129-,", max_size=20)))
def test_parse_nodes_of_any_text_gives_numbers_or_error(text):
    nodes, error = parse_or_error(lambda: parse_nodes(text, "file"))
    assert error.startswith("file: ") if error else all(0 <= number < 100_000 for number in nodes)


@given(st.one_of(st.text(max_size=40), st.text("MemTotal: 0129kB\n", max_size=40)))
def test_parse_of_any_text_gives_size_or_error(text):
    size, error = parse_or_error(parse, text)
    assert error.startswith("/proc/meminfo: ") if error else 0 < size < 2**50
