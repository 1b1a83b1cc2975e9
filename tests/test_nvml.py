"""The real backend: through the loader, ctypes and pynvml, on a compiled libnvidia-ml.so.1 (see stub_nvml.c)."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import contract_nvml
import pynvml
import pytest
import stub_nvml
from hypothesis import given
from hypothesis import strategies as st

from healthd.nvml import NvmlError, NvmlErrorKind, ask, kind_of, sysfs_address

# What a child process prints of the stub's GPUs, as JSON.
REPORT = """
import json
from healthd.nvml import NvmlError, open_real

def value(function, *arguments):
    try:
        return function(*arguments)
    except NvmlError as error:
        return [error.kind.name, error.number, str(error)]

def error(each):
    return {"kind": each.kind.name, "number": each.number, "pci": each.pci, "index": each.index, "text": str(each)}

def gpu(each):
    rows, histogram, link = each.remapped_rows(), each.row_remap_histogram(), each.pcie_link()
    links = each.nvlink_errors(17), each.nvlink_errors(11)
    return {
        "pci": each.pci, "index": each.index, "uuid": each.uuid, "name": each.name,
        "vbios": each.vbios(), "temperature": value(each.temperature), "mig": each.mig_enabled(),
        "ecc": value(each.ecc_mode),
        "totals": [each.ecc_total(u, v) for u in (False, True) for v in (True, False)],
        "sram": each.ecc_count("sram", True, False), "dram": each.ecc_count("dram", False, True),
        "threshold": value(each.sram_threshold_exceeded),
        "rows": rows and [rows.correctable, rows.uncorrectable, rows.pending, rows.failure],
        "histogram": histogram and [histogram.max, histogram.high, histogram.partial, histogram.low, histogram.none],
        "recovery": value(each.recovery_action), "states": value(each.nvlink_states),
        "links": [errors and [errors.replay, errors.recovery, errors.crc] for errors in links],
        "pcie": [link.generation, link.width, link.max_generation, link.max_width],
    }

try:
    nvml = open_real()
    found = {"driver": nvml.driver_version(), "gpus": [gpu(each) for each in nvml.gpus()],
             "unreachable": [error(each) for each in nvml.unreachable]}
    nvml.close()
except NvmlError as failed:
    found = {"error": error(failed)}
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory):
    """Runs a program in a process that finds the stub; gives what it printed."""
    directory = tmp_path_factory.mktemp("nvml")

    def run(program: str = REPORT, minimal: bool = False, **settings: str) -> str:
        environment = stub_nvml.environment(directory, minimal, **settings)
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == 0
        return done.stdout

    return run


# the real way


def test_every_value_is_read_through_ctypes(stub):
    found = json.loads(stub())
    assert found["driver"] == "999.99.99"
    assert found["unreachable"] == []
    one, two = found["gpus"]
    assert two["pci"] == "0000:43:00.0"
    assert one == {
        "pci": "0000:1b:00.0",
        "index": 0,
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "Stub GPU",
        "vbios": "96.00.99.00.01",
        "temperature": 29,
        "mig": False,
        "ecc": True,
        "totals": [1, 3, 2, 4],
        "sram": 704,
        "dram": 201,
        "threshold": True,
        "rows": [3, 4, True, False],
        "histogram": [10, 11, 12, 13, 14],
        "recovery": 4,
        "states": [link != 5 for link in range(18)],
        "links": [
            [161 + (17 << 40), 162 + (17 << 40), 163 + (17 << 40)],
            [161 + (11 << 40), 162 + (11 << 40), 163 + (11 << 40)],
        ],
        "pcie": [1, 8, 5, 16],
    }


def test_a_library_that_lacks_most_symbols_answers_none(stub):
    found = json.loads(stub(minimal=True))
    assert found["driver"] is None
    one, _ = found["gpus"]
    assert (one.pop("pci"), one.pop("index"), one.pop("uuid"), one.pop("name")) == ("0000:1b:00.0", 0, "", "")
    assert one.pop("totals") == [None] * 4
    assert one.pop("links") == [None, None]
    assert one.pop("pcie") == [None] * 4
    assert set(one.values()) == {None}


def test_without_fields_links_are_counted_by_asking_and_errors_come_from_the_older_call(stub):
    one = json.loads(stub(STUB_FIELDS="off"))["gpus"][0]
    assert one["recovery"] is None
    assert one["states"] == [link != 5 for link in range(18)]
    assert one["links"] == [None, [1011, 2011, 3011 + 4011]]


def library_is_installed() -> bool:
    try:
        ctypes.CDLL(stub_nvml.NAME)
    except OSError:
        return False
    return True


# Where a driver is installed, its library too.
LIBRARIES = ["stub", "minimal", *(["installed"] if library_is_installed() else [])]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_real_backend_keeps_the_contract(tmp_path, library):
    environment = stub_nvml.environment(tmp_path, minimal=library == "minimal")
    if library == "installed":
        environment["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
    command = [sys.executable, contract_nvml.__file__]
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0


# errors


def test_a_lost_gpu_is_unreachable_and_the_others_answer(stub):
    found = json.loads(stub(STUB_GPUS="3", STUB_ERRORS="*@1=15"))
    (error,) = found["unreachable"]
    assert error == {
        "kind": "GPU_LOST",
        "number": 15,
        "pci": "0000:43:00.0",
        "index": 1,
        "text": "nvmlDeviceGetTemperature of GPU 0000:43:00.0: GPU is lost",
    }
    assert [each["pci"] for each in found["gpus"]] == ["0000:1b:00.0", "0000:52:00.0"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [(15, "GPU_LOST"), (999, "GPU_LOST"), (16, "RESET_REQUIRED"), (4, "NO_PERMISSION"), (11, "OTHER")],
)
def test_a_gpu_without_a_handle_is_unreachable(stub, number, kind):
    found = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetHandleByIndex_v2@0={number}"))
    (error,) = found["unreachable"]
    assert (error["kind"], error["number"], error["pci"], error["index"]) == (kind, number, "", 0)
    assert "the GPU with index 0" in error["text"]
    assert [each["pci"] for each in found["gpus"]] == ["0000:43:00.0"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (15, "GPU_LOST"),
        (16, "RESET_REQUIRED"),
        (4, "NO_PERMISSION"),
        (10, "TIMEOUT"),
        (999, "OTHER"),
        (12345, "OTHER"),
    ],
)
def test_an_error_of_one_call_is_raised_with_its_kind(stub, number, kind):
    one = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetEccMode={number}"))["gpus"][0]
    assert one["ecc"][:2] == [kind, number]
    assert one["ecc"][2].startswith("nvmlDeviceGetEccMode of GPU 0000:1b:00.0: ")
    assert one["temperature"] == 29


@pytest.mark.parametrize("number", [3, 13])
def test_not_supported_and_function_not_found_are_none(stub, number):
    one = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetEccMode={number}"))["gpus"][0]
    assert one["ecc"] is None


@pytest.mark.parametrize(
    ("number", "kind"), [(9, "DRIVER_NOT_LOADED"), (18, "MISMATCH"), (4, "NO_PERMISSION"), (999, "OTHER"), (3, "OTHER")]
)
def test_a_library_that_cannot_be_opened_says_why(stub, number, kind):
    error = json.loads(stub(STUB_ERRORS=f"nvmlInitWithFlags={number}"))["error"]
    assert (error["kind"], error["number"], error["pci"]) == (kind, number, "")


def test_a_machine_without_the_library_says_so(tmp_path):
    # A file of that name that is no library stands before any real one.
    (tmp_path / stub_nvml.NAME).write_text("not a library")
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(stub_nvml.ROOT)}
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, stdout=subprocess.PIPE, timeout=60)
    assert json.loads(done.stdout)["error"]["kind"] == "LIBRARY_NOT_FOUND"


def test_a_failed_open_can_be_tried_again_in_the_same_process(stub):
    program = """
import ctypes
from healthd.nvml import NvmlError, open_real
setenv = ctypes.CDLL(None).setenv
for number in (b"9", b"999", b"0"):
    setenv(b"STUB_ERRORS", b"nvmlInitWithFlags=" + number, 1)
    try:
        nvml = open_real()
    except NvmlError as error:
        print(error.kind.name)
print(len(nvml.gpus()))
nvml.close()
print(len(open_real().gpus()))
"""
    assert stub(program) == "DRIVER_NOT_LOADED\nOTHER\n2\n2\n"


def test_a_library_that_appears_later_is_found(stub, tmp_path):
    program = """
import os, sys
from healthd.nvml import NvmlError, open_real
try:
    open_real()
except NvmlError as error:
    print(error.kind.name)
os.rename(sys.argv[1] + "/away", sys.argv[1] + "/libnvidia-ml.so.1")
print(len(open_real().gpus()))
"""
    library = stub_nvml.build(tmp_path) / stub_nvml.NAME
    library.rename(library.with_name("away"))
    environment = {"LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(stub_nvml.ROOT)}
    command = [sys.executable, "-c", program, str(library.parent)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "LIBRARY_NOT_FOUND\n2\n"


def test_a_shutdown_that_fails_is_raised(stub):
    error = json.loads(stub(STUB_ERRORS="nvmlShutdown=999"))["error"]
    assert error["text"] == "nvmlShutdown: Unknown Error"


# single calls


def test_a_field_that_failed_is_raised_and_the_others_are_read(stub):
    one = json.loads(stub(STUB_ERRORS="field230=15"))["gpus"][0]
    assert one["recovery"][:2] == ["GPU_LOST", 15]
    assert one["recovery"][2] == "nvmlDeviceGetFieldValues field 230 of GPU 0000:1b:00.0: GPU is lost"
    assert len(one["states"]) == 18


def test_a_field_that_the_driver_does_not_know_is_none(stub):
    one = json.loads(stub(STUB_ERRORS="field230=2,field161=3"))["gpus"][0]
    assert one["recovery"] is None
    assert one["links"][0][0] is None
    assert one["links"][0][1] is not None


@pytest.mark.parametrize("number", [4, 25, 3, 13])
def test_the_sram_flag_is_none_without_root_and_for_another_version_of_its_structure(stub, number):
    one = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetSramEccErrorStatus={number}"))["gpus"][0]
    assert one["threshold"] is None


def test_text_that_is_not_utf8_is_an_error_of_that_call(stub):
    found = json.loads(stub(STUB_NAME=b"\xff\xfe".decode("utf-8", "surrogateescape")))
    assert [error["kind"] for error in found["unreachable"]] == ["OTHER", "OTHER"]
    assert "not UTF-8" in found["unreachable"][0]["text"]


def test_the_stub_writes_to_the_file_where_it_is_to_hang(stub, tmp_path):
    path = tmp_path / "hang"
    stub(STUB_HANG_CALL="nvmlDeviceGetTemperature", STUB_HANG_PATH=str(path))
    assert path.read_text() == "xxxx", "two GPUs, once at the enumeration and once by hand"


# pure parts


@given(st.integers())
def test_every_number_has_a_kind(number):
    kind = kind_of(number)
    assert kind is NvmlErrorKind.OTHER or kind.value == number


@pytest.mark.parametrize(
    ("numbers", "address"),
    [((0, 0x1B, 0), "0000:1b:00.0"), ((1, 0xDF, 31), "0001:df:1f.0"), ((0x3F8CFDD, 0, 0), "3f8cfdd:00:00.0")],
)
def test_an_address_is_written_as_the_kernel_does(numbers, address):
    assert sysfs_address(*numbers) == address


def test_a_function_that_the_installed_binding_lacks_is_not_supported():
    class OldBinding:
        NVMLError = pynvml.NVMLError

    assert ask(OldBinding(), "nvmlDeviceGetSramEccErrorStatus") is None  # type: ignore[arg-type]
    with pytest.raises(NvmlError, match="not in the installed nvidia-ml-py"):
        ask(OldBinding(), "nvmlInit", absent=frozenset())  # type: ignore[arg-type]
