"""judge: comparison of a measured value with a floor, with its peers, and with its own past."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from healthd.validation import parts
from healthd.validation.document import History, history_as_text, parse_history, with_new_values
from healthd.validation.measurement import Measurement, judge, min_share


def measured(test="gemm_bf16", *values, state="measured", source="PyTorch 2.5.1", message=""):
    return [
        Measurement(test, f"0000:{number:02x}:00.0", value, "TFLOPS", state, message, source)
        for number, value in enumerate(values)
    ]


def verdicts(measurements, floors=None, past=None, relation=lambda part: ""):
    return [(result.verdict, result.against) for result in judge(measurements, floors or {}, past or {}, relation)]


def test_value_below_floor_is_slow():
    assert verdicts(measured("gemm_bf16", 620.0, 619.9), {"gemm_bf16": 620.0}) == [("ok", "floor"), ("slow", "floor")]
    result = judge(measured("gemm_bf16", 400.0), {"gemm_bf16": 620.0}, {}, lambda part: "")[0]
    assert (result.expected, result.value) == (620.0, 400.0)
    assert result.message == "400 TFLOPS: 35 % below the floor of 620"


def test_gpu_below_90_percent_of_its_peers_is_slow():
    assert verdicts(measured("gemm_bf16", 700, 701, 699, 631)) == [("ok", "peers")] * 4
    found = judge(measured("gemm_bf16", 700, 701, 699, 629), {}, {}, lambda part: "")
    assert [result.verdict for result in found] == ["ok", "ok", "ok", "slow"]
    assert found[3].message == "629 TFLOPS: 10 % below the median of its 3 peers, 700"
    assert found[3].expected == pytest.approx(630)


def test_transfer_slower_than_1_1_times_the_median_is_slow():
    assert min_share("pcie_h2d") == min_share("ib_loopback") == min_share("p2p_64mb") == pytest.approx(1 / 1.1)
    assert min_share("gemm_fp8") == min_share("memory") == 0.9
    assert verdicts(measured("pcie_h2d", 55, 55, 55, 50.1)) == [("ok", "peers")] * 4
    assert verdicts(measured("pcie_h2d", 55, 55, 55, 49.9))[3] == ("slow", "peers")


def test_slower_one_of_two_is_slow():
    found = judge(measured("memory", 3000, 2000), {}, {}, lambda part: "")
    assert [result.verdict for result in found] == ["ok", "slow"]
    assert "its only peer, 3,000" in found[1].message


def test_only_pairs_with_same_topology_are_peers():
    """6 A6000 without NVLink (github.com/NVIDIA/nvbandwidth/issues/50): transfers between the CPUs are slower by
    design."""
    near = [Measurement("p2p", f"{a}>{b}", 26.3, "GB/s", "measured", "", "x") for a, b in ((0, 1), (1, 2), (3, 4))]
    far = [Measurement("p2p", f"{a}>{b}", 21.8, "GB/s", "measured", "", "x") for a, b in ((2, 3), (5, 0))]
    nodes = {str(gpu): gpu // 3 for gpu in range(6)}
    assert {verdict for verdict, _ in verdicts([*near, *far], relation=lambda part: parts.relation(part, nodes))} == {
        "ok"
    }
    assert ("slow", "peers") in verdicts([*near, *far])


def test_other_tools_and_versions_are_no_peers_and_no_past():
    other_tool = measured("memory", 5000.0, source="nvbandwidth 0.8")
    assert verdicts([*measured("memory", 3000.0), *other_tool]) == [("ok", ""), ("ok", "")]
    past = {("memory", "0000:00:00.0", "nvbandwidth 0.7"): [5000.0] * 5}
    assert verdicts(measured("memory", 3000.0), past=past) == [("ok", "")]


def test_own_past_counts_from_three_values():
    key = ("memory", "0000:00:00.0", "PyTorch 2.5.1")
    assert verdicts(measured("memory", 2000.0), past={key: [3000.0, 3000.0]}) == [("ok", "")]
    found = judge(measured("memory", 2000.0), {}, {key: [3000.0, 3010.0, 2990.0]}, lambda part: "")[0]
    assert (found.verdict, found.against) == ("slow", "own")
    assert found.message == "2,000 TFLOPS: 33 % below the median of its last 3 validations, 3,000"


def test_all_gpus_slow_is_detected_by_floor_and_past():
    past = {("memory", f"0000:{n:02x}:00.0", "PyTorch 2.5.1"): [3000.0] * 3 for n in range(4)}
    assert verdicts(measured("memory", *[2000.0] * 4), past=past) == [("slow", "own")] * 4
    assert verdicts(measured("memory", *[2000.0] * 4), {"memory": 2500.0}) == [("slow", "floor")] * 4


def test_failed_and_unmeasured_values_are_no_peers():
    broken = measured("memory", 10.0, state="failed", message="wrong")
    unmeasured = measured("memory", None, state="not_measured", message="no room")
    passed = [Measurement("dcgm_pcie", "DCGM 0", None, "", "passed", "passed", "DCGM 4")]
    assert verdicts([*broken, *unmeasured, *passed, *measured("memory", 3000.0)]) == [
        *(("failed", ""), ("not_measured", ""), ("ok", ""), ("ok", ""))
    ]


@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=16),
    st.floats(1e-3, 1e6) | st.none(),
    st.lists(st.floats(1e-3, 1e6), max_size=5),
)
def test_every_measurement_has_one_verdict_and_faster_is_never_worse(values, floor, old):
    floors = {"memory": floor} if floor else {}
    past = {("memory", "0000:00:00.0", "PyTorch 2.5.1"): old}
    found = judge(measured("memory", *values), floors, past, lambda part: "")
    assert len(found) == len(values)
    faster = judge(measured("memory", values[0] * 2, *values[1:]), floors, past, lambda part: "")
    assert (found[0].verdict, faster[0].verdict) != ("ok", "slow")
    assert all(result.message for result in found)


# --- past values


def test_history_keeps_ten_newest_good_values():
    results = judge(measured("memory", 3000, 3000, 3000, 1000), {}, {}, lambda part: "")
    past: History = {}
    for _ in range(15):
        past = with_new_values(parse_history(history_as_text(past)), results)
    assert {part: len(values) for (_, part, _), values in past.items()} == {f"0000:{n:02x}:00.0": 10 for n in range(3)}
    assert parse_history(history_as_text(past)) == past


@given(
    st.text(max_size=300) | st.lists(st.dictionaries(st.text(max_size=6), st.integers()), max_size=3).map(json.dumps)
)
def test_parse_history_accepts_any_text(text):
    for values in parse_history(text).values():
        assert all(value > 0 for value in values)


def test_parse_history_skips_damaged_lines():
    valid_line = json.dumps({"test": "memory", "part": "a", "source": "x", "value": 3.0})
    damaged_lines = [
        '{"test": 1}',
        "nonsense",
        valid_line[:-4],
        valid_line.replace("3.0", "true"),
        valid_line.replace("3.0", "-1"),
        "[" * 5000,
    ]
    damaged_lines.append(valid_line.replace("3.0", "9" * 400))
    assert parse_history("\n".join([*damaged_lines, valid_line])) == {("memory", "a", "x"): [3.0]}


# --- parts


def test_read_parts_finds_gpus_and_active_ports(tmp_path):
    gpu, port = "/sys/bus/pci/devices/0000:1B:00.0", "/sys/class/infiniband/mlx5_0/ports/1"
    write(
        tmp_path,
        {
            f"{gpu}/vendor": "0x10de\n",
            f"{gpu}/class": "0x030200\n",
            f"{gpu}/numa_node": "1\n",
            "/sys/bus/pci/devices/0000:c1:00.0/vendor": "0x10de\n",  # an NVSwitch
            "/sys/bus/pci/devices/0000:c1:00.0/class": "0x068000\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            "/sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        },
    )
    assert parts.read_parts(str(tmp_path)) == parts.Parts({"0000:1b:00.0": 1}, {"mlx5_0/1": 400.0})
    assert parts.read_parts(str(tmp_path / "nowhere")) == parts.Parts({}, {})


def test_relation_is_near_within_one_numa_node():
    gpus = {"a": 0, "b": 0, "c": 1}
    assert [parts.relation(pair, gpus) for pair in ("a>b", "a>c", "a", "a>x", "")] == ["near", "far", "", "", ""]
