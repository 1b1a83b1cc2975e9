"""The real NVML backend: loader, ctypes and pynvml with a compiled libnvidia-ml.so.1 (see stub_nvml.c)."""

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

from healthd.nvidia.nvml import (
    FIELD_VALUE,
    SWITCH_CONNECTED,
    VALUE_TYPES,
    NvmlError,
    NvmlErrorKind,
    call_nvml,
    error_kind,
    sysfs_address,
)

# Prints the GPUs of the stub as JSON in a child process.
REPORT = """
import json
from msgspec.structs import asdict
from healthd.nvidia.nvml import NvmlError, open_real

def value(function, *arguments):
    try:
        return function(*arguments)
    except NvmlError as error:
        return [error.kind.name, error.number, str(error)]

def error(each):
    return {"kind": each.kind.name, "number": each.number, "pci": each.pci, "index": each.index, "text": str(each)}

def gpu(each):
    rows, histogram, link = each.remapped_rows(), each.row_remap_histogram(), each.pcie_link()
    links = value(each.nvlinks) or []
    plain = lambda data: data and asdict(data)
    return {
        "pci": each.pci, "index": each.index, "uuid": each.uuid, "name": each.name,
        "vbios": each.vbios(), "temperature": value(each.temperature), "mig": each.mig_mode(),
        "instances": each.mig_instances(),
        "ecc": value(each.ecc_mode),
        "totals": [each.ecc_total(u, v) for u in (False, True) for v in (True, False)],
        "sram": each.ecc_count("sram", True, False), "dram": each.ecc_count("dram", False, True),
        "threshold": value(each.sram_threshold_exceeded),
        "rows": rows and [rows.correctable, rows.uncorrectable, rows.pending, rows.failure],
        "histogram": histogram and [histogram.max, histogram.high, histogram.partial, histogram.low, histogram.none],
        "recovery": value(each.recovery_action), "states": [link.active for link in links] or None,
        "links": [plain(links[number]) if links else None for number in (17, 11)],
        "unrepairable": each.unrepairable_memory(),
        "retired": plain(each.retired_pages()), "fabric": plain(each.fabric()), "reasons": each.clock_event_reasons(),
        "slowdown": each.slowdown_seconds(), "limits": plain(each.temperature_limits()),
        "margin": each.temperature_margin(), "memory_temperature": each.memory_temperature(),
        "replays": each.pcie_replays(), "used": each.utilization(), "persistence": each.persistence_mode(),
        "inforom": value(each.inforom_valid), "processes": value(each.compute_processes),
        "watts": [each.enforced_power_limit_watts(), each.default_power_limit_watts()],
        "pcie": [link.generation, link.width, link.max_generation, link.max_width],
        "platform": plain(each.platform()), "c2c": [plain(link) for link in each.c2c_links()] or None,
        "repair": plain(each.pending_repair()), "c2c_enabled": each.c2c_enabled(),
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
    """Return a function that runs a program in a process with the stub, and returns its output."""
    directory = tmp_path_factory.mktemp("nvml")

    def run(program: str = REPORT, minimal: bool = False, **settings: str) -> str:
        environment = stub_nvml.environment(directory, minimal, **settings)
        command = [sys.executable, "-W", "error", "-c", program]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240)
        assert done.returncode == 0
        return done.stdout

    return run


# --- all values


def test_every_value_is_read_through_ctypes(stub):
    found = json.loads(stub())
    assert found["driver"] == "999.99.99"
    assert found["unreachable"] == []
    first, second = found["gpus"]
    assert second["pci"] == "0000:43:00.0"
    assert first == {
        "pci": "0000:1b:00.0",
        "index": 0,
        "uuid": "GPU-00000000-0000-4000-8000-000000000000",
        "name": "Stub GPU",
        "vbios": "96.00.99.00.01",
        "temperature": 29,
        "mig": [False, True],
        "instances": 2,
        "ecc": True,
        "totals": [1, 3, 2, 4],
        "sram": 704,
        "dram": 201,
        "threshold": True,
        "rows": [3, 4, True, False],
        "histogram": [10, 11, 12, 13, 14],
        "recovery": 4,
        "states": [link != 5 for link in range(18)],
        "links": [hopper_link(17), hopper_link(11)],
        "unrepairable": True,
        "retired": {"single_bit": 2, "double_bit": 1, "pending": True},
        "fabric": {**NO_DOMAIN, "state": 3, "status": 0, "health_mask": 0x155, "summary": 1},
        "reasons": 0x48 | 1 << 40,
        "slowdown": {"hw_thermal": 7.5, "hw_power_brake": 9.0},
        "limits": {"slowdown": 91, "memory_max": 92, "slowdown_margin": -2},
        "margin": -3,
        "memory_temperature": 37,
        "replays": 150,
        "used": 0.4,
        "persistence": True,
        "inforom": True,
        "processes": [4000, 4001],
        "watts": [650.5, 700.0],
        "pcie": [1, 8, 5, 16],
        "platform": None,
        "c2c": None,
        "repair": {"channel": False, "tpc": False},
        "c2c_enabled": None,
    }


NO_DOMAIN = {"cluster": "", "clique": 0}
NO_LINK = {
    "active": True,
    "replay": None,
    "recovery": None,
    "crc": None,
    "recovered": None,
    "recovery_failed": None,
    "effective_ber": None,
    "symbol_ber": None,
    "packet_errors": {},
    "speed": None,
    "is_traffic_disabled": False,
}


def hopper_link(link):
    counts = {"replay": 161 + (link << 40), "recovery": 162 + (link << 40), "crc": 163 + (link << 40)}
    return {**NO_LINK, **counts, "speed": 26562}


# nvmlValueType_t -> the member of the union nvmlValue_t that has the value
UNION_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


@pytest.mark.parametrize(("kind", "member"), [*enumerate(UNION_MEMBERS)])
def test_field_value_layout_matches_the_binding(kind: int, member: str) -> None:
    field = pynvml.c_nvmlFieldValue_t(1, 2, 3, 4, kind, 999)
    setattr(field.value, member, 7)
    ((number, *type_and_status, value),) = FIELD_VALUE.iter_unpack(bytes(field))
    assert (number, type_and_status, VALUE_TYPES[kind].unpack_from(value)) == (1, [kind, 999], (7,))


def test_blackwell_is_read_through_its_own_fields(stub):
    device = json.loads(stub(STUB_FIELDS="blackwell"))["gpus"][0]
    (link, _) = device["links"]
    assert (link["replay"], link["recovery"], link["crc"]) == (None, None, None)
    assert (link["recovered"], link["recovery_failed"]) == (213 + (1 << 40), 214 + (1 << 40))
    assert (link["effective_ber"], link["symbol_ber"]) == (3e-5, 15e-255)
    assert [*link["packet_errors"].values()] == [field + (1 << 40) for field in range(206, 213)]
    assert device["states"] == [number != 5 for number in range(18)]
    assert link["speed"] == 53125


def test_rack_values_are_read_through_ctypes(stub):
    values = "cluster=1,clique=2,peer_type=1,c2c=2,repair_channel=1,repair_tpc@1=1"
    first, second = json.loads(stub(STUB_VALUES=values))["gpus"]
    assert (first["fabric"]["cluster"], first["fabric"]["clique"]) == ("01000000-0000-0000-0000-000000000000", 2)
    position = {"chassis_serial": "1820000000001", "slot": 14, "tray": 4, "host": 1}
    assert first["platform"] == {"peer_type": SWITCH_CONNECTED, **position, "module": 1}
    assert second["platform"]["module"] == 2
    link = {"active": True, "error_interrupts": 0, "replays": 1, "back_to_back_replays": 2, "is_full_power": False}
    assert first["c2c"][0] == link
    assert [other["replays"] for other in first["c2c"]] == [1, 11]
    assert (first["repair"], second["repair"]) == ({"channel": True, "tpc": False}, {"channel": True, "tpc": True})


def test_newest_fabric_version_is_read_through_ctypes(stub):
    device = json.loads(stub(STUB_FABRIC="4", STUB_VALUES="cluster=1,clique=2"))["gpus"][0]
    domain = {"cluster": "01000000-0000-0000-0000-000000000000", "clique": 2}
    assert device["fabric"] == {**domain, "state": 3, "status": 0, "health_mask": 0x155, "summary": 1}


@pytest.mark.parametrize(("value", "is_enabled"), [("0", False), ("1", True)])
def test_c2c_mode_is_read_through_ctypes(stub, value, is_enabled):
    assert json.loads(stub(STUB_VALUES=f"c2c_enabled={value}"))["gpus"][0]["c2c_enabled"] is is_enabled


@pytest.mark.parametrize("number", [3, 13, 25])
def test_platform_and_repairs_are_none_in_older_drivers(stub, number):
    errors = f"nvmlDeviceGetPlatformInfo={number},nvmlDeviceGetRepairStatus={number}"
    device = json.loads(stub(STUB_VALUES="peer_type=1", STUB_ERRORS=errors))["gpus"][0]
    assert (device["platform"], device["repair"]) == (None, None)


@pytest.mark.parametrize(
    ("newest", "fabric"),
    [
        ("2", {**NO_DOMAIN, "state": 3, "status": 0, "health_mask": 0x155, "summary": None}),
        ("1", {**NO_DOMAIN, "state": 2, "status": 0, "health_mask": None, "summary": None}),
    ],
)
def test_older_driver_is_queried_with_its_fabric_version(stub, newest, fabric):
    assert json.loads(stub(STUB_FABRIC=newest))["gpus"][0]["fabric"] == fabric


def test_older_driver_is_queried_with_older_function_names(stub):
    errors = "nvmlDeviceGetCurrentClocksEventReasons=13,nvmlDeviceGetComputeRunningProcesses_v3=13"
    device = json.loads(stub(STUB_ERRORS=errors))["gpus"][0]
    assert (device["reasons"], device["processes"]) == (0x80, [5000, 5001])


@pytest.mark.parametrize(("number", "valid"), [(14, False), (3, None), (13, None)])
def test_corrupted_inforom_is_a_value_and_no_error(stub, number, valid):
    device = json.loads(stub(STUB_ERRORS=f"nvmlDeviceValidateInforom={number}"))["gpus"][0]
    assert device["inforom"] is valid


def test_other_errors_of_inforom_and_processes_are_raised(stub):
    errors = "nvmlDeviceValidateInforom=15,nvmlDeviceGetComputeRunningProcesses_v3=4"
    device = json.loads(stub(STUB_ERRORS=errors))["gpus"][0]
    assert device["inforom"][0] == "GPU_LOST"
    assert device["processes"][0] == "NO_PERMISSION"


def test_library_without_most_symbols_returns_none(stub):
    found = json.loads(stub(minimal=True))
    assert found["driver"] is None
    device, _ = found["gpus"]
    assert (device.pop("pci"), device.pop("index"), device.pop("uuid"), device.pop("name")) == (
        "0000:1b:00.0",
        0,
        "",
        "",
    )
    assert device.pop("totals") == [None] * 4
    assert device.pop("links") == [None, None]
    assert device.pop("pcie") == [None] * 4
    assert device.pop("watts") == [None] * 2
    assert set(device.pop("limits").values()) == {None}
    assert set(device.values()) == {None}


def test_links_without_fields_are_read_with_older_calls(stub):
    device = json.loads(stub(STUB_FIELDS="off"))["gpus"][0]
    assert device["recovery"] is None
    assert device["states"] == [link != 5 for link in range(18)]
    assert device["links"] == [NO_LINK, {**NO_LINK, "replay": 1011, "recovery": 2011, "crc": 3011 + 4011}]


def library_is_installed() -> bool:
    try:
        ctypes.CDLL(stub_nvml.NAME)
    except OSError:
        return False
    return True


# A machine with a driver also has its library.
LIBRARIES = ["stub", "minimal", *(["installed"] if library_is_installed() else [])]


@pytest.mark.parametrize("library", LIBRARIES)
def test_real_backend_fulfils_the_contract(tmp_path, library):
    environment = stub_nvml.environment(tmp_path, minimal=library == "minimal")
    if library == "installed":
        environment["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
    command = [sys.executable, contract_nvml.__file__]
    assert subprocess.run(command, env=environment, timeout=240).returncode == 0


# --- errors


def test_lost_gpu_is_unreachable_and_others_respond(stub):
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
def test_gpu_without_handle_is_unreachable(stub, number, kind):
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
def test_error_of_one_call_is_raised_with_its_kind(stub, number, kind):
    device = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetEccMode={number}"))["gpus"][0]
    assert device["ecc"][:2] == [kind, number]
    assert device["ecc"][2].startswith("nvmlDeviceGetEccMode of GPU 0000:1b:00.0: ")
    assert device["temperature"] == 29


@pytest.mark.parametrize("number", [3, 13])
def test_not_supported_and_function_not_found_return_none(stub, number):
    device = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetEccMode={number}"))["gpus"][0]
    assert device["ecc"] is None


@pytest.mark.parametrize(
    ("number", "kind"), [(9, "DRIVER_NOT_LOADED"), (18, "MISMATCH"), (4, "NO_PERMISSION"), (999, "OTHER"), (3, "OTHER")]
)
def test_library_that_cannot_be_opened_reports_kind(stub, number, kind):
    error = json.loads(stub(STUB_ERRORS=f"nvmlInitWithFlags={number}"))["error"]
    assert (error["kind"], error["number"], error["pci"]) == (kind, number, "")


def test_missing_library_is_reported(tmp_path):
    # A file with this name that is no library is found before any real one.
    (tmp_path / stub_nvml.NAME).write_text("not a library")
    environment = {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(stub_nvml.ROOT)}
    done = subprocess.run([sys.executable, "-c", REPORT], env=environment, stdout=subprocess.PIPE, timeout=240)
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "LIBRARY_NOT_FOUND"
    with pytest.raises(pynvml.NVMLError) as expected:  # raised without the library, with pynvml's text
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert (error["number"], error["text"]) == (expected.value.value, f"nvmlInit: {expected.value}")


def test_failed_open_can_be_repeated_in_the_same_process(stub):
    program = """
import ctypes
from healthd.nvidia.nvml import NvmlError, open_real
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


def test_library_that_appears_later_is_found(stub, tmp_path):
    program = """
import os, sys
from healthd.nvidia.nvml import NvmlError, open_real
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
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=240)
    assert done.stdout == "LIBRARY_NOT_FOUND\n2\n"


def test_failed_shutdown_is_raised(stub):
    error = json.loads(stub(STUB_ERRORS="nvmlShutdown=999"))["error"]
    assert error["text"] == "nvmlShutdown: Unknown Error"


# --- single calls


def test_failed_field_is_raised_and_other_fields_are_read(stub):
    device = json.loads(stub(STUB_ERRORS="field230=15"))["gpus"][0]
    assert device["recovery"][:2] == ["GPU_LOST", 15]
    assert device["recovery"][2] == "nvmlDeviceGetFieldValues field 230 of GPU 0000:1b:00.0: GPU is lost"
    assert len(device["states"]) == 18


def test_field_unknown_to_the_driver_is_none(stub):
    device = json.loads(stub(STUB_ERRORS="field230=2,field161=3"))["gpus"][0]
    assert device["recovery"] is None
    assert device["links"][0]["replay"] is None
    assert device["links"][0]["recovery"] is not None


@pytest.mark.parametrize("number", [4, 25, 3, 13])
def test_sram_flag_is_none_without_root_or_with_other_struct_version(stub, number):
    device = json.loads(stub(STUB_ERRORS=f"nvmlDeviceGetSramEccErrorStatus={number}"))["gpus"][0]
    assert device["threshold"] is None


def test_text_that_is_not_utf8_is_an_error_of_that_call(stub):
    found = json.loads(stub(STUB_NAME=b"\xff\xfe".decode("utf-8", "surrogateescape")))
    assert [error["kind"] for error in found["unreachable"]] == ["OTHER", "OTHER"]
    assert "not UTF-8" in found["unreachable"][0]["text"]


def test_stub_writes_to_file_before_it_hangs(stub, tmp_path):
    path = tmp_path / "hang"
    stub(STUB_HANG_CALL="nvmlDeviceGetTemperature", STUB_HANG_PATH=str(path))
    assert path.read_text() == "xxxx", "two GPUs, once during enumeration and once by the program"


# --- pure functions


@given(st.integers())
def test_error_kind_accepts_every_number(number):
    kind = error_kind(number)
    assert kind is NvmlErrorKind.OTHER or kind.value == number


@pytest.mark.parametrize(
    ("numbers", "address"),
    [((0, 0x1B, 0), "0000:1b:00.0"), ((1, 0xDF, 31), "0001:df:1f.0"), ((0x3F8CFDD, 0, 0), "3f8cfdd:00:00.0")],
)
def test_sysfs_address_has_format_of_the_kernel(numbers, address):
    assert sysfs_address(*numbers) == address


def test_call_nvml_returns_none_for_function_missing_in_binding():
    class OldBinding:
        NVMLError = pynvml.NVMLError

    assert call_nvml(OldBinding(), "nvmlDeviceGetSramEccErrorStatus") is None  # type: ignore[arg-type]
    with pytest.raises(NvmlError, match="not in the installed nvidia-ml-py"):
        call_nvml(OldBinding(), "nvmlInit", absent=frozenset())  # type: ignore[arg-type]
