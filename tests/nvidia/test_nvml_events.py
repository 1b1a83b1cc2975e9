"""Events of NVML, through ctypes with a compiled stub and from scenario files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stub_nvml

from healthd.nvidia.fake_nvml import open_fake
from healthd.nvidia.gpu_event import OPERATIONAL, GpuEvent
from healthd.nvidia.nvml import NvmlError
from healthd.nvidia.nvml_events import open_events

REPORT = """
import json, os
from msgspec.structs import asdict
from healthd.nvidia.nvml import NvmlError, open_real
from healthd.nvidia.nvml_events import open_events

nvml = open_real()
try:
    events = open_events(nvml, os.environ["PCIS"].split())
    found = [asdict(event) for event in iter(lambda: events.wait(1), None)]
    events.close()
    print(json.dumps({"operational": events.operational, "events": found}))
except NvmlError as error:
    print(json.dumps({"error": error.number}))
nvml.close()
"""


BOTH = "0000:1b:00.0 0000:43:00.0"


@pytest.fixture
def stub(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def report(minimal: bool = False, pcis: str = BOTH, **settings: str) -> dict[str, Any]:
        environment = {**stub_nvml.environment(tmp_path, minimal, **settings), "PCIS": pcis}
        command = [sys.executable, "-c", REPORT]
        text = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=240).stdout
        return dict(json.loads(text))

    return report


def kinds(found: dict[str, Any]) -> list[tuple[str, str, list[int]]]:
    return [(event["kind"], event["pci"], event["xids"]) for event in found["events"]]


def test_events_of_the_newest_driver(stub: Callable[..., dict[str, Any]]) -> None:
    found = stub(STUB_VALUES="event_xid@0=79,event_bit@1=32768,event_goe@0=63,event_goe@1=0")
    assert found["operational"] is True
    assert kinds(found) == [
        ("xid", "0000:1b:00.0", [79]),
        (OPERATIONAL, "0000:1b:00.0", [63]),
        ("recovery_action", "0000:43:00.0", []),
        (OPERATIONAL, "0000:43:00.0", []),
    ]
    event = found["events"][1]
    assert (event["module"], event["code"], event["severity"], event["primary"]) == (
        "GPU-MODULE-OF-16",
        7,
        "fatal",
        True,
    )


@pytest.mark.parametrize("number", [3, 13])
def test_older_driver_reports_event_bits_only(stub: Callable[..., dict[str, Any]], number: int) -> None:
    errors = f"nvmlEventSetRegisterGpuOperationalEvents_v1={number},nvmlEventSetWait_v3=13"
    found = stub(STUB_VALUES="event_xid@1=79,event_goe@1=79,event_bit@0=16384", STUB_ERRORS=errors)
    assert found["operational"] is False
    assert kinds(found) == [("unavailable", "0000:1b:00.0", []), ("xid", "0000:43:00.0", [79])]


@pytest.mark.parametrize("errors", ["nvmlDeviceGetSupportedEventTypes@0=15", "nvmlDeviceRegisterEvents@0=999"])
def test_failing_gpu_does_not_prevent_events_of_others(stub: Callable[..., dict[str, Any]], errors: str) -> None:
    found = stub(STUB_VALUES="event_xid=79", STUB_ERRORS=errors)
    assert kinds(found) == [("xid", "0000:43:00.0", [79])]


def test_only_the_given_gpus_are_registered(stub: Callable[..., dict[str, Any]]) -> None:
    found = stub(pcis="0000:43:00.0", STUB_VALUES="event_xid=79,event_goe=63")
    assert {pci for _, pci, _ in kinds(found)} == {"0000:43:00.0"}


@pytest.mark.parametrize("number", [6, 15, 999])
def test_gpu_without_handle_is_left_out(stub: Callable[..., dict[str, Any]], number: int) -> None:
    errors = f"nvmlDeviceGetHandleByPciBusId_v2@0={number}"
    assert kinds(stub(STUB_VALUES="event_xid=79", STUB_ERRORS=errors)) == [("xid", "0000:43:00.0", [79])]
    assert stub(pcis="0000:1b:00.0", STUB_ERRORS=errors) == {"error": number}


def test_unreadable_context_leaves_the_event(stub: Callable[..., dict[str, Any]]) -> None:
    found = stub(STUB_VALUES="event_goe@0=63", STUB_ERRORS="nvmlEventSetGetContextInfo_v1=999")
    assert kinds(found) == [(OPERATIONAL, "0000:1b:00.0", [])]


def test_library_without_events_raises_the_error(stub: Callable[..., dict[str, Any]]) -> None:
    assert stub(minimal=True) == {"error": 13}
    errors = "nvmlDeviceGetSupportedEventTypes=3,nvmlEventSetRegisterGpuOperationalEvents_v1=3"
    assert stub(STUB_ERRORS=errors) == {"error": 3}


def test_error_of_the_wait_is_raised(stub: Callable[..., dict[str, Any]]) -> None:
    assert stub(STUB_ERRORS="nvmlEventSetWait_v3=15") == {"error": 15}


def scenario_events(tmp_path: Path, text: str) -> list[GpuEvent]:
    (tmp_path / "gpus.toml").write_text(f'profile = "dgx-h100"\n{text}')
    nvml = open_fake(str(tmp_path / "gpus.toml"))
    events = open_events(nvml, [gpu.pci for gpu in nvml.gpus()])
    found = list(iter(lambda: events.wait(0), None))
    events.close()
    nvml.close()
    return found


def test_scenario_events_come_once_after_the_registration(tmp_path: Path) -> None:
    events = '[{kind = "xid", xid = 79}, {xid = 79, uncontained = true}, {severity = "corrected", simulated = true}]'
    xid, operational, simulated = scenario_events(tmp_path, f"gpu.3.events = {events}")
    assert xid == GpuEvent("xid", "0000:61:00.0", (79,))
    assert (operational.xids, operational.uncontained, operational.ignored) == ((79,), True, False)
    assert (simulated.severity, simulated.xids, simulated.ignored) == ("corrected", (), True)


def test_scenario_of_an_older_driver_has_no_operational_events(tmp_path: Path) -> None:
    missing = 'missing_functions = ["nvmlEventSetRegisterGpuOperationalEvents_v1"]\n'
    events = 'gpu.3.events = [{kind = "xid", xid = 79}, {xid = 63}]'
    assert [event.kind for event in scenario_events(tmp_path, missing + events)] == ["xid"]


def test_scenario_without_event_functions_raises(tmp_path: Path) -> None:
    with pytest.raises(NvmlError):
        scenario_events(tmp_path, 'missing_functions = ["nvmlEventSetCreate"]')
