"""Parsers of measuring tools, with outputs that users posted. Nothing else is taken for a number."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.validation import tools
from healthd.validation.measurement import FAMILIES, Measurement, NotUnderstood, is_excused
from healthd.validation.tools import cpu, dcgmi, mndiag, nccl_tests, nvbandwidth, perftest, pytorch, pytorch_program

TOOLS = str(Path(tools.__file__).parent)

RECORDED = Path(__file__).parents[2] / "data/validation"


def recorded(name: str) -> str:
    return (RECORDED / name).read_text("utf-8")


def summaries(found: list[Measurement]) -> list[tuple]:
    return [
        (measurement.test, measurement.part, measurement.value and round(measurement.value, 2), measurement.state)
        for measurement in found
    ]


# --- nvbandwidth


def test_nvbandwidth_0_2_names_gpus_by_number():
    found = nvbandwidth.parse(recorded("nvbandwidth_v0.2_8x4090.txt"))
    assert len(found) == 16
    assert summaries(found)[0] == ("pcie_h2d", "gpu 0", 25.5, "measured")
    assert summaries(found)[-1] == ("pcie_d2h", "gpu 7", 26.83, "measured")
    assert {measurement.source for measurement in found} == {"nvbandwidth 0.2"}


def test_nvbandwidth_of_pairs_gives_each_pair_once_without_diagonal():
    found = nvbandwidth.parse(recorded("nvbandwidth_v0.8_6xa6000_pairs.txt"))
    assert len({measurement.part for measurement in found}) == len(found) == 30
    values = {measurement.part: measurement.value for measurement in found}
    assert values["gpu 3>gpu 0"] == 21.95  # row 0, column 3: GPU 0 reads from GPU 3
    assert sum(values.values()) == pytest.approx(715.53, abs=0.1)  # the sum that the tool printed


def test_nvbandwidth_with_addresses_uses_them_and_doubles_local_copy():
    found = nvbandwidth.parse(recorded("nvbandwidth_v0.8_8xh20_memory.txt"))
    assert summaries(found)[0] == ("memory", "0000:18:00.0", 2232.6, "measured")
    assert summaries(found)[7] == ("memory", "0000:da:00.0", 2232.6, "measured")


def test_nvbandwidth_wrong_copy_and_cuda_error_are_failures():
    (wrong_copy,) = nvbandwidth.parse(recorded("nvbandwidth_v0.7_wrong_copy.txt"))
    assert (wrong_copy.test, wrong_copy.state) == ("p2p", "failed")
    assert "Invalid value when checking the pattern" in wrong_copy.message
    (error,) = nvbandwidth.parse(recorded("nvbandwidth_v0.8_cuda_error.txt"))
    assert (error.test, error.state) == ("pcie_d2h", "failed")
    assert "CUDA_ERROR_INVALID_CONTEXT" in error.message


def test_nvbandwidth_command_has_cases_of_each_family():
    assert nvbandwidth.command("/x/nvbandwidth", ("pcie", "memory")) == (
        *("/x/nvbandwidth", "-t", "host_to_device_memcpy_ce", "-t", "device_to_host_memcpy_ce"),
        *("-t", "device_local_copy"),
    )


# --- nccl-tests


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("nccl_all_reduce_a100_2021.txt", 235.26, "measured"),
        ("nccl_all_reduce_h100_13_columns.txt", 95.10, "measured"),
        ("nccl_wrong_results.txt", 129.05, "failed"),
        ("nccl_cuda_error_2018.txt", None, "failed"),
        ("nccl_cuda_error_after_rows.txt", None, "failed"),
        ("nccl_one_gpu.txt", None, "not_measured"),
        ("nccl_sendrecv_cut_off.txt", None, "not_measured"),
    ],
)
def test_nccl_uses_bus_bandwidth_of_largest_size(name, value, state):
    (found,) = nccl_tests.parse(recorded(name), "nccl_all_reduce")
    assert (found.value, found.state) == (value, state)
    assert found.message or state == "measured"


def test_nccl_reports_the_error():
    assert "2 results were wrong" in nccl_tests.parse(recorded("nccl_wrong_results.txt"), "nccl_sendrecv")[0].message
    assert "unhandled cuda error" in nccl_tests.parse(recorded("nccl_cuda_error_2018.txt"), "nccl_sendrecv")[0].message


# Errors that prove nothing about a part: the GPU is in use, no memory, a tool older than the GPU or the driver, a wrong
# call. The texts are those of CUDA and NCCL (driver_types.h, cuda.h, ncclGetErrorString).
EXCUSES = [
    "CUDA-capable device(s) is/are busy or unavailable",
    "out of memory",
    "no kernel image is available for execution on the device",
    "CUDA driver version is insufficient for CUDA runtime version",
    "the provided PTX was compiled with an unsupported toolchain.",
    "invalid device ordinal",
    "no CUDA-capable device is detected",
    "unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "invalid usage (run with NCCL_DEBUG=WARN for details)",
    "unhandled cuda error (run with NCCL_DEBUG=INFO for details) / Cuda failure 2 'out of memory'",
]


@pytest.mark.parametrize("text", EXCUSES)
def test_nccl_excuses_busy_gpu_and_old_tool(text):
    kind = "NCCL" if "NCCL" in text else "CUDA"
    (found,) = nccl_tests.parse(f"n1: Test {kind} failure common.cu:941 '{text}'\n", "nccl_all_reduce")
    assert (found.state, text[:20] in found.message) == ("not_measured", True)


@pytest.mark.parametrize(
    "name",
    [
        *("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        *("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_nvbandwidth_excuses_busy_gpu_and_old_tool(name):
    text = recorded("nvbandwidth_v0.8_cuda_error.txt").replace("CUDA_ERROR_INVALID_CONTEXT", name)
    (found,) = nvbandwidth.parse(text)
    assert (found.state, name in found.message) == ("not_measured", True)


def test_excuses_of_pytorch_program_apply_to_every_tool():
    assert [text for text in pytorch_program.EXCUSED if not is_excused(text)] == []


def test_gpu_error_is_not_excused():
    for text in (
        "an illegal memory access was encountered",
        "uncorrectable ECC error encountered",
        "CUDA_ERROR_LAUNCH_FAILED",
    ):
        assert not is_excused(text)
    (found,) = nccl_tests.parse(
        "n1: Test CUDA failure common.cu:502 'an illegal memory access was encountered'\n", "nccl_all_reduce"
    )
    assert found.state == "failed"


# --- perftest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("perftest_loopback_8m.txt", 201.80),  # 24056.72 MiB/s, of a port of 200 Gb/s
        ("perftest_loopback_all_sizes.txt", 194.96),
        ("perftest_gbits.txt", 0.48),
    ],
)
def test_perftest_reads_average_rate_in_both_units(name, value):
    (found,) = perftest.parse(recorded(name), "mlx5_0/1")
    assert summaries([found]) == [("ib_loopback", "mlx5_0/1", value, "measured")]


def test_perftest_dead_link_is_a_failure_and_missing_server_is_not():
    (link,) = perftest.parse(recorded("perftest_status_12.txt"), "mlx5_0/1")
    assert (link.state, "Failed status 12" in link.message) == ("failed", True)
    (server,) = perftest.parse(recorded("perftest_no_server.txt"), "mlx5_0/1")
    assert (server.state, "Couldn't connect" in server.message) == ("not_measured", True)


def test_perftest_server_and_client_use_the_same_port():
    server, client = perftest.commands("ib_write_bw", "mlx5_3/2", 18515)
    assert client == (*server, "127.0.0.1")
    assert server[:7] == ("ib_write_bw", "-d", "mlx5_3", "-i", "2", "-p", "18515")


# --- dcgmi


def test_dcgm_failure_belongs_to_its_gpu():
    found = dcgmi.parse(recorded("dcgm_per_gpu_1.7.json"))
    stress = {measurement.part: measurement for measurement in found if measurement.test == "dcgm_sm_stress"}
    assert {part: measurement.state for part, measurement in stress.items()} == {
        "DCGM 0": "failed",
        "DCGM 1": "passed",
        "DCGM 2": "failed",
        "DCGM 3": "failed",
    }
    assert "Max stress level of 2128.7 did not exceed desired stress level of 3000.0" in stress["DCGM 0"].message
    assert {measurement.state for measurement in found if measurement.test == "dcgm_targeted_stress"} == {
        "not_measured"
    }


def test_dcgm_3_1_passes_all_gpus():
    found = dcgmi.parse(recorded("dcgm_3.1_pass.json.txt"))
    assert {measurement.state for measurement in found} == {"passed"}
    assert {measurement.source for measurement in found} == {"DCGM 3.1.0"}
    assert [measurement.part for measurement in found if measurement.test == "dcgm_software"] == [
        f"DCGM {n}" for n in range(8)
    ]


def test_dcgm_excuses_busy_gpu():
    warning = "API call cudaStreamCreate failed for GPU 3: 'CUDA-capable device(s) is/are busy or unavailable'"
    result = {"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [{"warning": warning}]}
    tests = [{"name": "pcie", "results": [result]}]
    document = {"DCGM Diagnostic": {"test_categories": [{"category": "Integration", "tests": tests}]}}
    (found,) = dcgmi.parse(json.dumps(document))
    assert (found.state, warning in found.message) == ("not_measured", True)


def test_dcgm_setting_is_no_failure_and_skipped_is_not_measured():
    found = {measurement.test: measurement for measurement in dcgmi.parse(recorded("dcgm_4.2.3_skipped.json"))}
    assert {test: measurement.state for test, measurement in found.items()} == dict.fromkeys(
        ("dcgm_software", "dcgm_memory", "dcgm_pcie"), "not_measured"
    )
    assert "Persistence mode for GPU 0 is disabled" in found["dcgm_software"].message
    assert found["dcgm_pcie"].message == "DCGM reports skip"
    allowed = {measurement.test: measurement for measurement in dcgmi.parse(recorded("dcgm_4.5.2_allowed.json"))}
    assert (allowed["dcgm_memory"].state, allowed["dcgm_pcie"].state) == ("passed", "passed")
    assert (allowed["dcgm_pcie"].part, allowed["dcgm_pcie"].source) == ("DCGM 0", "DCGM 4.5.2")


# --- dcgmi mndiag

HOSTS = ("host-01", "host-02", "host-03")


def mndiag_document(hosts: list[dict], results: list[dict]) -> str:
    return json.dumps(
        {
            "DCGM Diagnostic": mndiag.NAME,
            "hosts": hosts,
            "test_categories": [{"tests": [{"status": "Pass", "results": results}]}],
        }
    )


def gpu_rows(numbers, **keys) -> list[dict]:
    return [{"entity_group": "GPU", "entity_group_id": 1, "entity_id": number, **keys} for number in numbers]


def test_mndiag_failure_belongs_to_gpu_of_host():
    found = mndiag.parse(recorded("dcgm_mndiag_4.3_fail.json"), HOSTS)
    assert {measurement.part: (measurement.state, measurement.message) for measurement in found} == {
        "host-01 DCGM 0": ("passed", "passed"),
        "host-01 DCGM 1": ("failed", "CUDA memory allocation failed"),
        "host-02 DCGM 0": ("passed", "passed"),
        "host-02 DCGM 1": ("failed", "NCCL communication timeout"),
        "host-03 DCGM 0": ("passed", "passed"),
    }
    assert {(measurement.test, measurement.source) for measurement in found} == {("dcgm_mnubergemm", "DCGM 4.3.0")}


def test_mndiag_host_without_result_is_not_measured():
    found = mndiag.parse(recorded("dcgm_mndiag_4.3_pass.json"), ("HOST-01.cluster", "host-02", "host-03", "host-04"))
    assert [measurement.part for measurement in found if measurement.state == "not_measured"] == ["host-04"]
    assert sum(measurement.state == "passed" for measurement in found) == 5


def test_mndiag_results_without_names_of_hosts_prove_nothing_about_the_hosts():
    document = json.loads(recorded("dcgm_mndiag_4.3_pass.json"))
    del document["hosts"]
    found = mndiag.parse(json.dumps(document), HOSTS)
    assert tuple(measurement.part for measurement in found if measurement.state == "not_measured") == HOSTS


@given(
    numbers=st.lists(st.integers(0, 2**63), min_size=1, max_size=6, unique=True),
    failed=st.integers(0, 5),
    chance=st.randoms(use_true_random=False),
)
def test_mndiag_maps_results_by_host_id_in_any_order(numbers, failed, chance):
    names = {number: f"n{position}" for position, number in enumerate(numbers)}
    failed_number = numbers[failed % len(numbers)]
    hosts = [{"host_id": number, "hostname": name} for number, name in names.items()]
    results = [
        {
            "host_id": number,
            "entity_group": "GPU",
            "entity_id": 0,
            "status": "Fail" if number == failed_number else "Pass",
        }
        for number in numbers
    ]
    chance.shuffle(hosts)
    chance.shuffle(results)
    found = mndiag.parse(mndiag_document(hosts, results), sorted(names.values()))
    assert {measurement.part: measurement.state for measurement in found} == {
        f"{name} DCGM 0": "failed" if number == failed_number else "passed" for number, name in names.items()
    }


@pytest.mark.parametrize("numbers", [(0, 0, 1), (1, None, 2), (0, "1", 2), (0, 1.0, 2), (0, True, 2), (-1, 0, 1), (1,)])
def test_mndiag_with_unclear_host_id_cannot_be_read(numbers):
    """The last case has a host_id that is also the position of a host without one."""
    document = json.loads(recorded("dcgm_mndiag_4.3_pass.json"))
    for host in document["hosts"]:
        del host["host_id"]
    for host, number in zip(document["hosts"], numbers, strict=False):
        host["host_id"] = number
    with pytest.raises(NotUnderstood, match=r"cannot be read: .*host_id"):
        mndiag.parse(json.dumps(document), HOSTS)


@given(
    gpus=st.lists(st.tuples(st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15))), min_size=1, max_size=5),
    is_listed=st.booleans(),
    others=st.integers(0, 2),
)
def test_mndiag_gpu_without_result_is_not_measured(gpus, is_listed, others):
    """`others`: the number of entities that are not GPUs, which have no results."""
    hosts, results, names = [], [], [f"n{number}" for number in range(len(gpus))]
    for number, (with_result, without_result) in enumerate(gpus):
        listed = with_result | without_result
        host = {"host_id": number, "hostname": names[number], "num_entities": len(listed) + others}
        cpus = [{"entity_group": "CPU", "entity_id": at} for at in range(others)]
        hosts.append(
            {**host, "entities": gpu_rows(listed) + cpus} if is_listed else {**host, "num_entities": len(listed)}
        )
        results += gpu_rows(with_result, host_id=number, status="Pass")
    if not results:
        return
    found = mndiag.parse(mndiag_document(hosts, results), names)
    parts = [measurement.part for measurement in found]
    assert len(parts) == len(set(parts))
    expected = {}
    for name, (with_result, without_result) in zip(names, gpus, strict=True):
        expected |= {f"{name} DCGM {gpu}": "passed" for gpu in with_result}
        missing = without_result - with_result
        if is_listed:
            expected |= {f"{name} DCGM {gpu}": "not_measured" for gpu in missing}
        if not with_result or (missing and not is_listed):
            expected[name] = "not_measured"
    assert {measurement.part: measurement.state for measurement in found} == expected


def test_mndiag_counts_gpus_that_dcgm_counts_but_does_not_list():
    hosts = [{"host_id": 0, "hostname": "n1", "num_entities": 4, "entities": gpu_rows([0, 1])}]
    found = mndiag.parse(mndiag_document(hosts, gpu_rows([0], host_id=0, status="Pass")), ["n1"])
    assert {measurement.part: measurement.state for measurement in found} == {
        "n1 DCGM 0": "passed",
        "n1 DCGM 1": "not_measured",
        "n1": "not_measured",
    }


def test_mndiag_host_with_only_the_result_of_a_cpu_is_not_measured():
    hosts = [{"host_id": 0, "hostname": "n1", "num_entities": 5}]
    results = [{"host_id": 0, "entity_group": "CPU", "entity_id": 0, "status": "Pass"}]
    found = mndiag.parse(mndiag_document(hosts, results), ["n1"])
    assert [measurement.part for measurement in found if measurement.state == "not_measured"] == ["n1"]


@pytest.mark.parametrize("count", [10**12, -1, True, "4", None, 1.5])
def test_mndiag_unusual_number_of_entities_gives_at_most_one_row(count):
    hosts = [{"host_id": 0, "hostname": "n1", "num_entities": count}]
    found = mndiag.parse(mndiag_document(hosts, gpu_rows([0], host_id=0, status="Pass")), ["n1"])
    assert [measurement.part for measurement in found] == ["n1 DCGM 0", *(["n1"] if count == 10**12 else [])]


def test_mndiag_hosts_without_host_id_are_numbered_by_position():
    document = json.loads(recorded("dcgm_mndiag_4.3_fail.json"))
    for host in document["hosts"]:
        del host["host_id"]
    assert mndiag.parse(json.dumps(document), HOSTS) == mndiag.parse(recorded("dcgm_mndiag_4.3_fail.json"), HOSTS)


def test_mndiag_error_of_mpi_is_no_failure_of_a_gpu():
    document = json.loads(recorded("dcgm_mndiag_4.3_pass.json"))
    (test,) = document["test_categories"][0]["tests"]
    test |= {"status": "Fail", "mpi_error": {"error_category": "MPI", "warning": "Error: ssh: connect to host"}}
    found = mndiag.parse(json.dumps(document), HOSTS)
    assert {(measurement.state, measurement.message) for measurement in found} == {
        ("not_measured", "Error: ssh: connect to host")
    }


def test_mndiag_without_results_reports_the_error():
    with pytest.raises(NotUnderstood, match="host engine is not valid any longer"):
        mndiag.parse(recorded("dcgm_mndiag_4.3_runtime_error.json"), HOSTS)


@given(
    statuses=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["Pass", "Fail", "Warn", "Skip", "Not Run"])),
        max_size=16,
        unique_by=lambda row: row[:2],
    ),
    overall=st.sampled_from(["Pass", "Fail"]),
)
def test_mndiag_counts_each_gpu_once_and_only_fail_fails(statuses, overall):
    names = [f"n{number}" for number in range(4)]
    results = [
        {"host_id": host, "entity_group": "GPU", "entity_id": gpu, "status": status} for host, gpu, status in statuses
    ]
    document = {
        "DCGM Diagnostic": "DCGM Multi-Node Diagnostic",
        "hosts": [{"hostname": name} for name in names],
        "test_categories": [{"tests": [{"name": "MNUBERGEMM", "status": overall, "results": results}]}],
    }
    if not results:
        with pytest.raises(NotUnderstood):
            mndiag.parse(json.dumps(document), names)
        return
    found = {measurement.part: measurement.state for measurement in mndiag.parse(json.dumps(document), names)}
    gpus = {f"n{host} DCGM {gpu}": status for host, gpu, status in statuses}
    assert set(found) == {*gpus, *({*names} - {part.partition(" ")[0] for part in gpus})}
    assert {part for part, state in found.items() if state == "failed"} == {
        part for part, status in gpus.items() if status == "Fail"
    }
    passed = {part for part, status in gpus.items() if status == "Pass"}
    is_doubtful = overall == "Fail" and "Fail" not in gpus.values()
    assert {part for part, state in found.items() if state == "passed"} == (set() if is_doubtful else passed)


def test_mndiag_command_leaves_time_to_start():
    assert mndiag.command("dcgmi", ("n1", "n2"), 900.0) == (
        *("dcgmi", "mndiag", "--hostList", "n1;n2", "--run", "mnubergemm"),
        *("--parameters", "mnubergemm.time_to_run=840", "--json"),
    )


# --- PyTorch


def json_lines(*documents: dict) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


def test_pytorch_reads_results_line_by_line():
    part = "0000:1b:00.0"
    text = json_lines(
        {"source": "PyTorch 2.5.1"},
        {"gpus": [part]},
        {"test": "gemm_bf16", "part": part, "value": 700.0, "unit": "TFLOPS"},
        {"test": "gemm_fp32", "part": part, "value": 50.0, "unit": "TFLOPS", "wrong": "3 of 9 numbers changed"},
        {"test": "gemm_fp8", "part": part, "skipped": "this GPU has no FP8"},
        {"test": "memory", "part": part, "error": "RuntimeError: CUDA error: an illegal memory access"},
        {"test": "p2p_64mb", "part": f"{part}>{part}", "value": None},
    )
    assert summaries(pytorch.parse(text + '{"test": "memory", "pa')) == [
        ("gemm_bf16", part, 700.0, "measured"),
        ("gemm_fp32", part, 50.0, "failed"),
        ("gemm_fp8", part, None, "not_measured"),
        ("memory", part, None, "failed"),
        ("p2p_64mb", f"{part}>{part}", None, "not_measured"),
    ]


def test_pytorch_program_without_torch_or_gpu_reports_reason(tmp_path):
    with pytest.raises(NotUnderstood, match="sees no GPU"):
        pytorch.parse(json_lines({"source": "PyTorch 2.5.1"}, {"missing": "PyTorch sees no GPU here"}))
    program = f"{TOOLS}/pytorch_program.py"
    command = pytorch.command(sys.executable, program, ("gemm",), 0.1)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if not _has_torch():
        assert done.returncode == 0, done.stderr
        with pytest.raises(NotUnderstood, match="torch"):
            pytorch.parse(done.stdout)


def _has_torch() -> bool:
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def test_pytorch_passes_are_rings_for_every_number_of_gpus():
    arguments = json.loads(pytorch.command("python3", "program", ("p2p", "ib"), 1.0)[-1])
    assert arguments["families"] == ["p2p"]
    assert arguments["passes"]["4"] == [[[0, 1], [2, 3]], [[1, 2], [3, 0]]]
    assert set(arguments["passes"]) == {str(count) for count in range(2, 17)}


# --- the CPU


def test_cpu_program_computes_with_and_without_numpy(tmp_path):
    program = f"{TOOLS}/cpu_program.py"
    values = {}
    for python in (sys.executable, "/usr/bin/python3"):
        if Path(python).exists():
            done = subprocess.run(cpu.command(python, program, 0.1), capture_output=True, text=True, timeout=300)
            (found,) = cpu.parse(done.stdout)
            assert (found.test, found.part, found.state) == ("cpu_gemm", "cpu", "measured")
            values[found.source] = found.value
    assert values
    assert all(value > 0 for value in values.values())


def test_cpu_program_without_numpy_measures():
    code = (
        "import sys; sys.modules['numpy'] = None; sys.argv = ['x', '0.05']\n"
        f"exec(open({TOOLS + '/cpu_program.py'!r}).read())"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=300, check=True)
    (found,) = cpu.parse(done.stdout)
    assert (found.state, found.source.split()[0]) == ("measured", "Python")


def test_cpu_changed_product_is_a_failure():
    (found,) = cpu.parse(json.dumps({"value": 10.0, "source": "numpy 2", "wrong": 3, "size": 1024}))
    assert found.state == "failed"
    assert "3 of 1048576 numbers" in found.message


# --- all tools

PARSERS = {
    "nvbandwidth": nvbandwidth.parse,
    "nccl": lambda text: nccl_tests.parse(text, "nccl_all_reduce"),
    "perftest": lambda text: perftest.parse(text, "mlx5_0/1"),
    "dcgm": dcgmi.parse,
    "mndiag": lambda text: mndiag.parse(text, ("n1",)),
    "pytorch": pytorch.parse,
    "cpu": cpu.parse,
}
TESTS = {test for tests in FAMILIES.values() for test in tests}


def assert_measurements_or_error(parse, text):
    try:
        found = parse(text)
    except NotUnderstood:
        return
    assert found
    for measurement in found:
        assert measurement.test in TESTS or measurement.test.startswith("dcgm_")
        assert measurement.state in ("measured", "passed", "failed", "not_measured")
        assert measurement.value is None or 0 < measurement.value < float("inf")
        assert (measurement.state == "measured") <= (measurement.value is not None)
        assert measurement.message or measurement.state == "measured"
        assert len(measurement.message) <= 400
        assert all(
            word.isprintable() for word in (measurement.part, measurement.message, measurement.source, measurement.unit)
        )


KEYS = [
    "test",
    "part",
    "value",
    "wrong",
    "error",
    "skipped",
    "missing",
    "source",
    "size",
    "name",
    "status",
    "version",
    "results",
    "tests",
    "category",
    "test_categories",
    "warnings",
    "info",
    "gpu_id",
    "gpu_ids",
    "entity_group",
    "entity_id",
    "metadata",
    "hosts",
    "hostname",
    "host_id",
    "mpi_error",
    "warning",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS, *dcgmi.ROOTS]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("tool", PARSERS)
@given(text=st.text(max_size=300) | JSON.map(json.dumps))
def test_parser_of_any_text_gives_measurements_or_error(tool, text):
    assert_measurements_or_error(PARSERS[tool], text)


@pytest.mark.parametrize("tool", PARSERS)
@given(value=JSON)
def test_parser_of_any_json_gives_measurements_or_error(tool, value):
    several = {"DCGM Diagnostic": mndiag.NAME, "hosts": value, "test_categories": value, "global_errors": value}
    for root in ({"DCGM Diagnostic": {"test_categories": value}}, {"DCGM Diagnostic": value}, several):
        assert_measurements_or_error(PARSERS[tool], json.dumps(root))


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.iterdir() if path.name != "README.md"))
def test_parser_of_damaged_output_gives_measurements_or_error(name):
    chance, text = random.Random(name), recorded(name)
    for _ in range(60):
        damaged = list(text)
        for _ in range(chance.randint(1, 30)):
            at = chance.randrange(len(damaged) + 1)
            damaged[at : at + chance.choice((0, 1, 40))] = chance.choice(
                ("", "9" * 30, "\x1b[2J", "N/A", "{", "-", "\n")
            )
        cut = "".join(damaged)[: chance.randint(1, len(text))]
        for parse in PARSERS.values():
            assert_measurements_or_error(parse, cut)


def test_each_recorded_output_has_a_source():
    named = (RECORDED / "README.md").read_text("utf-8")
    assert [
        path.name for path in RECORDED.iterdir() if f"`{path.name}`" not in named and path.name != "README.md"
    ] == []
