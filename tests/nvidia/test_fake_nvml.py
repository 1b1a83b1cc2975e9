"""fake_nvml: the fake NVML and its scenario files."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
import typing
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pynvml
import pytest
import smi_capture
from contract_nvml import assert_contract, assert_events, assert_gpu
from fake_gpus import fake_pci_gpus
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthd.common.codec import ConvertError, fields_of
from healthd.nvidia import fake_scenario
from healthd.nvidia.fake_nvml import FakeLibrary, open_fake
from healthd.nvidia.nvml import (
    FIELDS_LINK_ERRORS,
    SWITCH_CONNECTED,
    C2cLink,
    Fabric,
    Nvlink,
    Nvml,
    NvmlError,
    NvmlErrorKind,
    NvmlGpu,
    PendingRepair,
    Platform,
    RetiredPages,
    TemperatureLimits,
)

LINK_CALLS = '["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkErrorCounter"]'
GPUS = {
    "dgx-a100": 8,
    "dgx-b200": 8,
    "dgx-h100": 8,
    "dgx-h200": 8,
    "gb200-nvl72": 4,
    "gb300-nvl72": 4,
    "gh200": 1,
    "hgx-b300": 8,
    "rtx-pro-6000": 4,
}
WITHOUT_NVLINK = ("gh200", "rtx-pro-6000")
PROFILES = tuple(GPUS)


@pytest.fixture
def scenario(tmp_path):
    """Return a function that writes a scenario file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "scenario.toml"
        path.write_text(text)
        return str(path)

    return write


def gpu(path: str, index: int) -> NvmlGpu:
    return {gpu.index: gpu for gpu in open_fake(path).gpus()}[index]


def test_gpu_lost_later_becomes_unreachable_and_others_stay(scenario):
    nvml = open_fake(scenario('profile = "dgx-h100"\ngpu.3.lost_after = 2\n'))
    before, fourth = nvml.gpus(), nvml.gpus()[3]
    assert (len(before), fourth.ecc_mode(), nvml.lost_since_open) == (8, True, 0)
    for _ in range(2):
        with pytest.raises(NvmlError, match="GPU is lost"):
            fourth.temperature()
    assert nvml.gpus() == tuple(gpu for gpu in before if gpu is not fourth)
    (lost,) = nvml.unreachable
    assert (lost.kind, lost.pci, lost.call) == (NvmlErrorKind.GPU_LOST, fourth.pci, "nvmlDeviceGetTemperature")
    assert nvml.lost_since_open == 1


def test_other_error_makes_no_gpu_unreachable(scenario):
    text = 'profile = "dgx-h100"\n[gpu.3.errors]\nnvmlDeviceGetEccMode = "Unknown"\n'
    nvml = open_fake(scenario(text))
    with pytest.raises(NvmlError):
        nvml.gpus()[3].ecc_mode()
    assert (len(nvml.gpus()), nvml.unreachable) == (8, ())


# --- profiles


def test_profiles_lists_all_profiles():
    assert fake_scenario.profiles() == list(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_profile_fulfils_the_contract(name):
    nvml = open_fake(name)
    assert_contract(nvml)
    assert_events(nvml)
    nvml.close()


@pytest.mark.parametrize("name", PROFILES)
def test_profile_is_a_healthy_machine(name):
    nvml = open_fake(name)
    assert [gpu.pci for gpu in nvml.gpus()] == fake_pci_gpus(name)
    assert len(nvml.gpus()) == GPUS[name]
    assert nvml.unreachable == ()
    for each in nvml.gpus():
        assert each.ecc_mode() is True
        assert each.ecc_total(uncorrected=True, volatile=True) == 0
        assert each.sram_threshold_exceeded() is False
        assert each.recovery_action() == (None if name == "gh200" else 0)  # its driver is older
        assert each.mig_mode() == (False, False)
        assert each.mig_instances() == 0
        assert each.retired_pages() is None
        assert each.persistence_mode() is True
        assert each.inforom_valid() is True
        assert each.compute_processes() == ()
        assert each.clock_event_reasons() == 1
        assert each.utilization() == 0.0
        assert each.enforced_power_limit_watts() == each.default_power_limit_watts()
        rows = each.remapped_rows()
        assert rows is not None
        assert (rows.pending, rows.failure) == (False, False)
        assert {link.active for link in each.nvlinks() or ()} == (set() if name in WITHOUT_NVLINK else {True})
        link = each.pcie_link()
        assert (link.width, link.generation) == (link.max_width, link.max_generation)


@pytest.mark.parametrize("name", PROFILES)
def test_profile_has_nvlinks_of_its_model(name):
    links = {"dgx-a100": 12, **dict.fromkeys(WITHOUT_NVLINK, 0)}.get(name, 18)
    assert all(len(each.nvlinks() or ()) == links for each in open_fake(name).gpus())


CAPTURES = {"dgx-b200": "b200x8", "dgx-h100": "h100x8", "gb200-nvl72": "gb200x4", "gb300-nvl72": "gb300x4"}
NOT_CAPTURED = {"compute_capability", "processes", "nvlinks", "nvlink_counters", "nvlink_speed", "c2c_links"}
VARIES = {"dgx-b200": {"persistence"}, "dgx-h100": {"fabric_summary"}}  # off in that capture; N/A, which is 0


@pytest.mark.parametrize("name", CAPTURES)
def test_profile_equals_capture_of_real_machine(name):
    (capture,) = [path for path in smi_capture.CAPTURES if path.stem == CAPTURES[name]]
    tree = ElementTree.parse(capture).getroot()
    cards = tree.findall("gpu")
    captured = smi_capture.fake_gpu(cards[0])
    _, (made, *_) = fake_scenario.state(fake_scenario.Scenario(profile=name), 0.0)
    different = {f.name for f in fields_of(fake_scenario.Gpu) if getattr(made, f.name) != getattr(captured, f.name)}
    assert different - NOT_CAPTURED == VARIES.get(name, set())
    assert len(cards) == GPUS[name]
    if name not in ("dgx-b200", "dgx-h100"):  # their addresses come from other sources
        assert [smi_capture.address_of(card) for card in cards] == fake_pci_gpus(name)
        assert tree.findtext("driver_version") == open_fake(name).driver_version()


def test_rtx_pro_6000_equals_partial_capture_of_real_card():
    (capture,) = [path for path in smi_capture.CAPTURES if path.stem == "rtxpro6000"]
    captured = smi_capture.fake_gpu(ElementTree.parse(capture).getroot().findall("gpu")[0])
    _, (made, *_) = fake_scenario.state(fake_scenario.Scenario(profile="rtx-pro-6000"), 0.0)
    empty = fake_scenario.Gpu()
    shown = {f.name for f in fields_of(type(made)) if getattr(captured, f.name) != getattr(empty, f.name)}
    assert {name for name in shown if getattr(made, name) != getattr(captured, name)} == {"name"}
    assert shown == {"name", "inforom", "temperature", "temperature_margin", "temperature_slowdown_margin"}
    assert made.name == f"{captured.name} Server Edition"
    assert made.temperature_memory is None


def test_hgx_b300_differs_from_dgx_b200_as_its_sources_show():
    (b300, *_), (b200, *_) = (open_fake(name).gpus() for name in ("hgx-b300", "dgx-b200"))
    assert (b300.name, b300.compute_capability(), b200.compute_capability()) == (
        "NVIDIA B300 SXM6 AC",
        (10, 3),
        (10, 0),
    )
    assert b300.enforced_power_limit_watts() == 1100
    assert b300.fabric() == b200.fabric()
    assert {link.speed for link in b300.nvlinks() or ()} == {53125}
    assert b300.platform() == Platform(SWITCH_CONNECTED, "", 0, 0, 1, 5)
    assert (b300.row_remap_histogram(), b300.pcie_link().max_width, b300.memory_temperature()) == (None, None, None)


def test_rack_profile_has_domain_platform_and_c2c_links():
    for name, clique, tray in (("gb200-nvl72", 2, 4), ("gb300-nvl72", 32766, 15)):
        device = open_fake(name).gpus()[0]
        fabric, platform = device.fabric(), device.platform()
        assert fabric is not None
        assert platform is not None
        assert (fabric.state, fabric.cluster, fabric.clique) == (3, "00000001-0000-0000-0000-000000000001", clique)
        assert (platform.peer_type, platform.chassis_serial, platform.tray) == (SWITCH_CONNECTED, "1820000000001", tray)
        assert device.c2c_links() == (C2cLink(True, 0, 0, 0, True),) * 5
        assert device.pending_repair() == PendingRepair(channel=False, tpc=False)
        assert {link.speed for link in device.nvlinks() or ()} == {53125}


def test_board_without_rack_has_no_domain_and_no_c2c_links():
    device = open_fake("dgx-b200").gpus()[0]
    fabric, platform = device.fabric(), device.platform()
    assert fabric is not None
    assert platform is not None
    assert (fabric.cluster, platform.peer_type, platform.chassis_serial) == ("", SWITCH_CONNECTED, "")
    assert device.c2c_links() == ()
    hopper = open_fake("dgx-h100").gpus()[0]
    assert (hopper.platform(), hopper.c2c_links()) == (None, ())


def test_rack_settings_of_scenario_are_returned(scenario):
    text = """
        profile = "gb200-nvl72"
        [gpu.1]
        fabric_cluster = ""
        fabric_clique = 7
        platform = { peer_type = 0 }
        c2c_inactive = [2]
        c2c_errors = { 0 = 3 }
        c2c_replays = { 1 = 5 }
        repair_pending_tpc = true
        nvlink_speeds = { 4 = 26562 }
        nvlink_inactive = [6]
        """
    device = gpu(scenario(text), 1)
    fabric = device.fabric()
    assert fabric is not None
    assert (fabric.cluster, fabric.clique) == ("", 7)
    assert device.platform() == Platform(0, "", 0, 0, 0, 0)
    assert [link.active for link in device.c2c_links()] == [True, True, False, True, True]
    assert [link.error_interrupts for link in device.c2c_links()] == [3, 0, 0, 0, 0]
    assert [link.replays for link in device.c2c_links()] == [0, 5, 0, 0, 0]
    assert device.pending_repair() == PendingRepair(channel=False, tpc=True)
    speeds = [link.speed for link in device.nvlinks() or ()]
    assert speeds == [26562 if link == 4 else None if link == 6 else 53125 for link in range(18)]


def test_hopper_and_blackwell_have_fabric_and_temperature_margin():
    hopper, blackwell = (open_fake(name).gpus()[0] for name in ("dgx-h100", "dgx-b200"))
    assert hopper.fabric() == Fabric(3, 0, 0, 0)
    assert blackwell.fabric() == Fabric(3, 0, 0x80, 1)
    assert hopper.temperature_limits() == TemperatureLimits(None, None, -2)
    assert (hopper.temperature_margin(), hopper.memory_temperature()) == (58, 37)
    assert hopper.slowdown_seconds() == {"hw_thermal": 0.0, "hw_power_brake": 0.0}
    assert hopper.pcie_replays() == 150


def test_a100_has_no_fabric_and_temperature_limits():
    ampere = open_fake("dgx-a100").gpus()[0]
    assert ampere.fabric() is None
    assert ampere.temperature_limits() == TemperatureLimits(89, 95, None)
    assert ampere.temperature_margin() is None
    assert ampere.slowdown_seconds() is None


def test_blackwell_counts_recoveries_and_packets_but_no_replays():
    (link, *_) = open_fake("dgx-b200").gpus()[0].nvlinks() or ()
    assert (link.replay, link.recovery, link.crc) == (None, None, None)
    assert (link.recovered, link.recovery_failed) == (0, 0)
    assert set(link.packet_errors.values()) == {0}
    assert link.effective_ber == link.symbol_ber == 15e-255


# --- scenarios: one GPU


def test_lost_gpu_is_unreachable_with_address(scenario):
    nvml = open_fake(scenario('profile = "dgx-h100"\ngpu.3.lost = true'))
    (error,) = nvml.unreachable
    assert (error.kind, error.pci, error.index) == (NvmlErrorKind.GPU_LOST, "0000:61:00.0", 3)
    assert len(nvml.gpus()) == 7
    assert "0000:61:00.0" not in [each.pci for each in nvml.gpus()]


def test_gpu_that_requires_reset_is_unreachable(scenario):
    (error,) = open_fake(scenario('profile = "dgx-h100"\ngpu.3.requires_reset = true')).unreachable
    assert (error.kind, error.pci) == (NvmlErrorKind.RESET_REQUIRED, "0000:61:00.0")


def test_unknown_error_for_handle_means_lost_gpu(scenario):
    (error,) = open_fake(scenario('profile = "dgx-h100"\ngpu.3.unreachable = true')).unreachable
    assert (error.kind, error.pci, error.index) == (NvmlErrorKind.GPU_LOST, "", 3)
    assert "Unknown Error" in str(error)


def test_gone_gpu_is_in_pci_but_not_in_nvml(scenario):
    path = scenario('profile = "dgx-h100"\ngpu.0.gone = true')
    nvml = open_fake(path)
    assert len(nvml.gpus()) == 7
    assert nvml.unreachable == ()
    assert nvml.gpus()[0].pci == fake_pci_gpus(path)[1]
    assert "0000:1b:00.0" in fake_pci_gpus(path)


def test_counters_of_scenario_are_returned(scenario):
    device = gpu(
        scenario(
            """
            profile = "dgx-h100"
            [gpu.3]
            ecc_volatile_uncorrected_sram = 2
            ecc_volatile_uncorrected_dram = 1
            ecc_aggregate_corrected_dram = 7
            remap_uncorrectable = 4
            remap_pending = true
            remap_failure = true
            unrepairable_memory = true
            remap_histogram = [2558, 1, 0, 0, 1]
            recovery_action = 4
            nvlink_inactive = [3, 17]
            nvlink_replay = {4 = 9}
            nvlink_crc = {16 = 5}
            """
        ),
        3,
    )
    assert device.ecc_count("sram", uncorrected=True, volatile=True) == 2
    assert device.ecc_count("dram", uncorrected=True, volatile=True) == 1
    assert device.ecc_total(uncorrected=True, volatile=True) == 3
    assert device.ecc_total(uncorrected=False, volatile=False) == 7
    rows, histogram = device.remapped_rows(), device.row_remap_histogram()
    assert rows is not None
    assert histogram is not None
    assert (rows.uncorrectable, rows.pending, rows.failure) == (4, True, True)
    assert (histogram.max, histogram.none) == (2558, 1)
    assert device.unrepairable_memory() is True
    assert device.recovery_action() == 4
    links = device.nvlinks()
    assert links is not None
    assert [number for number, link in enumerate(links) if not link.active] == [3, 17]
    assert (links[4].replay, links[4].recovery, links[16].crc) == (9, 0, 5)
    assert links[17] == Nvlink(active=False)


def test_a100_error_counters_come_from_older_call(scenario):
    links = gpu(scenario('profile = "dgx-a100"\ngpu.0.nvlink_recovery = {11 = 3}'), 0).nvlinks()
    assert links is not None
    assert links[11] == Nvlink(True, 0, 3, 0)


def test_blackwell_link_counters_are_returned(scenario):
    text = """
        nvlink_recovery = {1 = 2, 2 = 2}
        nvlink_recovery_failed = {2 = 1}
        nvlink_packet_errors = {2 = 5}
        nvlink_ber = {3 = 1.2e-5, 4 = 0.3}
        nvlink_symbol_ber = {3 = 2e-237}
    """
    links = gpu(scenario(f'profile = "dgx-b200"\n[gpu.0]\n{text}'), 0).nvlinks()
    assert links is not None
    assert [(links[number].recovered, links[number].recovery_failed) for number in (0, 1, 2)] == [
        (0, 0),
        (2, 0),
        (2, 1),
    ]
    assert [links[number].symbol_ber for number in (3, 4)] == [2e-237, 15e-255]
    assert links[2].packet_errors["receive errors"] == 5
    assert [links[number].effective_ber for number in (3, 4)] == [1e-5, 0.3]


def test_dead_link_with_failing_counters_is_reported_as_down(scenario):
    class DeadLinkLibrary(FakeLibrary):
        def nvmlDeviceGetFieldValues(self, handle, fieldIds):
            values = super().nvmlDeviceGetFieldValues(handle, fieldIds)
            for value in values:
                if value.scopeId == 5 and value.fieldId in FIELDS_LINK_ERRORS:
                    value.nvmlReturn = pynvml.NVML_ERROR_UNKNOWN
            return values

    def links(text):
        parsed, _ = fake_scenario.read(scenario(f'profile = "dgx-h100"\n{text}'))
        machine, gpus = fake_scenario.state(parsed, 0.0)
        return Nvml.open(DeadLinkLibrary(machine, fake_scenario.addresses(parsed), gpus)).gpus()[0].nvlinks()

    assert [link.active for link in links("gpu.0.nvlink_inactive = [5]") or ()] == [n != 5 for n in range(18)]
    with pytest.raises(NvmlError, match="field 161 of GPU"):
        links("")


def test_all_link_fields_are_read_with_one_call(scenario):
    for profile in ("dgx-h100", "dgx-b200"):
        device = gpu(scenario(f'profile = "{profile}"\ngpu.0.unsupported = {LINK_CALLS}'), 0)
        assert len(device.nvlinks() or ()) == 18


def test_state_of_scenario_is_returned(scenario):
    device = gpu(
        scenario(
            """
            profile = "dgx-h100"
            [gpu.3]
            retired_single_bit = 2
            retired_double_bit = 1
            retired_pending = true
            fabric_state = 2
            temperature_margin = -3
            persistence = false
            inforom = false
            clock_event_reasons = 0x48
            slowdown_hw_thermal_seconds = 12.5
            utilization_percent = 60
            power_limit_watts = 500.5
            processes = [7, 4, 7]
            mig_pending = true
            """
        ),
        3,
    )
    assert device.retired_pages() == RetiredPages(2, 1, True)
    assert device.fabric() == Fabric(2, 0, 0, 0)
    assert device.temperature_margin() == -3
    assert device.persistence_mode() is False
    assert device.inforom_valid() is False
    assert device.clock_event_reasons() == 0x48
    assert device.slowdown_seconds() == {"hw_thermal": 12.5, "hw_power_brake": 0.0}
    assert device.utilization() == 0.6
    assert (device.enforced_power_limit_watts(), device.default_power_limit_watts()) == (500.5, 700.0)
    assert device.compute_processes() == (4, 7)
    assert device.mig_mode() == (False, True)


@pytest.mark.parametrize(
    ("health", "summary", "answer"),
    [("0", "2", Fabric(3, 0, 0, 2)), ("1", None, Fabric(3, 0, 1, None)), (None, None, Fabric(3, 0, None, None))],
)
def test_older_fabric_versions_are_queried_as_fallback(scenario, health, summary, answer):
    lines = [f"fabric_health = {health}"] * bool(health) + [f"fabric_summary = {summary}"] * bool(summary)
    text = "\n".join(['profile = "dgx-a100"', "[gpu.0]", "fabric_state = 3", *lines])
    assert gpu(scenario(text), 0).fabric() == answer


@pytest.mark.parametrize(
    ("cliques", "clique"),  # of type 0: NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER
    [("[[0, 2], [1, 9], [2, 32766]]", 2), ("[[1, 9]]", 0), ("[]", 0)],
)
def test_newest_fabric_version_has_cliques_by_type(scenario, cliques, clique):
    text = f'profile = "gb200-nvl72"\ngpu.0.fabric_cliques = {cliques}\ngpu.0.fabric_clique = 7'
    first, second = open_fake(str(scenario(text))).gpus()[:2]
    assert first.fabric() == Fabric(3, 0, 0xAA, 1, "00000001-0000-0000-0000-000000000001", clique)
    assert second.fabric() == Fabric(3, 0, 0xAA, 1, "00000001-0000-0000-0000-000000000001", 2)


@given(st.sets(st.integers(0, 17)), st.sets(st.integers(0, 17)))
@settings(max_examples=40, suppress_health_check=also(HealthCheck.function_scoped_fixture))
def test_every_link_is_active_down_or_without_answer(scenario, down, unreported):
    for profile in ("dgx-h100", "dgx-b200"):
        text = f"nvlink_inactive = {sorted(down)}\nnvlink_unreported = {sorted(unreported)}"
        links = gpu(scenario(f'profile = "{profile}"\n[gpu.0]\n{text}'), 0).nvlinks() or ()
        assert [link.active for link in links] == [
            None if number in unreported else number not in down for number in range(18)
        ]


def test_gpu_without_link_count_has_no_links_if_none_answers(scenario):
    text = "unsupported_fields = [91]\nnvlink_unreported = [0]"
    assert gpu(scenario(f'profile = "dgx-h100"\n[gpu.0]\n{text}'), 0).nvlinks() is None


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)))
@settings(max_examples=40, suppress_health_check=also(HealthCheck.function_scoped_fixture))
def test_every_c2c_link_is_active_down_or_without_answer(scenario, down, unreported):
    text = f"c2c_links = 10\nc2c_inactive = {sorted(down)}\nc2c_unreported = {sorted(unreported)}"
    links = gpu(scenario(f'profile = "gh200"\n[gpu.0]\n{text}'), 0).c2c_links()
    assert [link.active for link in links] == [
        None if number in unreported else number not in down for number in range(10)
    ]


def test_older_function_names_are_used_as_fallback(scenario):
    names = '["nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetComputeRunningProcesses_v3"]'
    device = gpu(scenario(f'profile = "dgx-h100"\nmissing_functions = {names}\ngpu.0.processes = [9]'), 0)
    assert device.clock_event_reasons() == 1
    assert device.compute_processes() == (9,)


def test_unreadable_inforom_is_not_corrupted(scenario):
    device = gpu(scenario('profile = "dgx-h100"\ngpu.0.unsupported = ["nvmlDeviceValidateInforom"]'), 0)
    assert device.inforom_valid() is None
    device = gpu(scenario('profile = "dgx-h100"\ngpu.0.errors = {nvmlDeviceValidateInforom = "Unknown"}'), 0)
    with pytest.raises(NvmlError, match="nvmlDeviceValidateInforom"):
        device.inforom_valid()


def test_mig_devices_are_counted(scenario):
    device = gpu(scenario('profile = "dgx-h100"\n[gpu.0]\nmig = true\nmig_devices = 3'), 0)
    assert device.mig_mode() == (True, True)
    assert device.mig_instances() == 3
    assert device.utilization() is None


def test_unsupported_calls_return_none(scenario):
    device = gpu(
        scenario(
            """
            profile = "dgx-h100"
            [gpu.0]
            unsupported = ["nvmlDeviceGetEccMode", "nvmlDeviceGetTemperature", "nvmlDeviceGetFieldValues"]
            """
        ),
        0,
    )
    assert device.ecc_mode() is None
    assert device.temperature() is None
    assert device.recovery_action() is None
    assert len(device.nvlinks() or ()) == 18, "found by querying each link"


def test_unsupported_fields_return_none(scenario):
    device = gpu(scenario('profile = "dgx-h100"\ngpu.0.unsupported_fields = [230, 161]'), 0)
    assert device.recovery_action() is None
    links = device.nvlinks()
    assert links is not None
    assert (links[0].replay, links[0].recovery) == (None, 0)


def test_ecc_counters_are_none_without_ecc(scenario):
    device = gpu(scenario('profile = "dgx-h100"\ngpu.0.ecc = false'), 0)
    assert device.ecc_mode() is False
    assert device.ecc_total(uncorrected=True, volatile=True) is None
    assert device.sram_threshold_exceeded() is None


def test_remapped_rows_are_none_with_mig(scenario):
    device = gpu(scenario('profile = "dgx-h200"\ngpu.0.mig = true'), 0)
    assert device.mig_enabled() is True
    assert device.remapped_rows() is None
    assert device.row_remap_histogram() is None


def test_scenario_can_raise_any_pynvml_error(scenario):
    device = gpu(scenario('profile = "dgx-h100"\ngpu.0.errors = {nvmlDeviceGetEccMode = "Unknown"}'), 0)
    with pytest.raises(NvmlError, match=r"nvmlDeviceGetEccMode of GPU 0000:1b:00\.0: Unknown Error") as caught:
        device.ecc_mode()
    assert caught.value.kind is NvmlErrorKind.OTHER
    assert device.temperature() == 29


def test_failing_temperature_sensor_is_no_lost_gpu(scenario):
    nvml = open_fake(scenario('profile = "dgx-h100"\ngpu.0.errors = {nvmlDeviceGetTemperature = "Unknown"}'))
    assert len(nvml.gpus()) == 8
    assert nvml.unreachable == ()


# --- scenarios: the whole machine


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("driver_not_loaded", NvmlErrorKind.DRIVER_NOT_LOADED),
        ("mismatch", NvmlErrorKind.MISMATCH),
        ("library_not_found", NvmlErrorKind.LIBRARY_NOT_FOUND),
    ],
)
def test_library_setting_makes_open_fail(scenario, word, kind):
    with pytest.raises(NvmlError, match="nvmlInit") as caught:
        open_fake(scenario(f'profile = "dgx-h100"\nlibrary = "{word}"'))
    assert caught.value.kind is kind
    assert caught.value.pci == ""


def test_missing_functions_return_none(scenario):
    missing = '["nvmlDeviceGetRemappedRows", "nvmlSystemGetDriverVersion", "nvmlDeviceGetUUID"]'
    nvml = open_fake(scenario(f'profile = "dgx-h100"\nmissing_functions = {missing}'))
    assert nvml.driver_version() is None
    assert nvml.gpus()[0].remapped_rows() is None
    assert nvml.gpus()[0].uuid == ""


def test_missing_pci_function_is_an_error_of_the_library(scenario):
    nvml = open_fake(scenario('profile = "dgx-h100"\nmissing_functions = ["nvmlDeviceGetPciInfo"]'))
    with pytest.raises(NvmlError, match="nvmlDeviceGetPciInfo"):
        nvml.gpus()


def test_pci_setting_defines_the_gpus(scenario):
    path = scenario('profile = "dgx-a100"\npci = ["0001:03:00.0", "0000:3b:1f.0"]')
    nvml = open_fake(path)
    assert [each.pci for each in nvml.gpus()] == fake_pci_gpus(path) == ["0001:03:00.0", "0000:3b:1f.0"]
    assert len({each.uuid for each in nvml.gpus()}) == 2


def test_rewritten_scenario_applies_at_next_open(scenario):
    path = scenario('profile = "dgx-h100"')
    nvml = open_fake(path)
    assert len(nvml.gpus()) == 8
    scenario('profile = "dgx-h100"\ngpu.0.lost = true')
    assert len(nvml.gpus()) == 8
    assert len(open_fake(path).gpus()) == 7


def test_closed_library_raises_uninitialized():
    nvml = open_fake("dgx-h100")
    device = nvml.gpus()[0]
    nvml.close()
    with pytest.raises(NvmlError, match="Uninitialized"):
        device.temperature()


# --- timelines


TIMELINE = """
profile = "dgx-h100"
start = 1000.0
[[at]]
seconds = 60
gpu = 3
lost = false
[[at]]
seconds = 30
gpu = 3
lost = true
[[at]]
seconds = 40
library = "driver_not_loaded"
[[at]]
seconds = 50
library = "fine"
"""


def unreachable_count(path: str, time: float) -> int:
    return len(open_fake(path, lambda: time).unreachable)


def test_timeline_counts_from_start(scenario):
    path = scenario(TIMELINE)
    assert unreachable_count(path, 1029.9) == 0
    assert unreachable_count(path, 1030.0) == 1
    with pytest.raises(NvmlError, match="Driver Not Loaded"):
        open_fake(path, lambda: 1045.0)
    assert unreachable_count(path, 1055.0) == 1
    assert unreachable_count(path, 1060.0) == 0


def test_timeline_without_start_counts_from_file_time(scenario):
    path = scenario('profile = "dgx-h100"\n[[at]]\nseconds = 30\ngpu = 3\nlost = true')
    os.utime(path, (5000.0, 5000.0))
    assert unreachable_count(path, 5029.0) == 0
    assert unreachable_count(path, 5031.0) == 1


# --- random failures, hangs and crashes


def test_random_failures_are_frequent_and_reproducible(scenario):
    path = scenario('profile = "dgx-h100"\nrandom_failures = 0.3\nseed = 7')
    program = (
        "from healthd.nvidia.fake_nvml import open_fake\n"
        "from healthd.nvidia.nvml import NvmlError\n"
        "for _ in range(3):\n"
        f"    for gpu in open_fake({path!r}).gpus():\n"
        "        try: print(gpu.ecc_mode())\n"
        "        except NvmlError as error: print(error.kind.name)\n"
    )
    runs = [run(program).stdout for _ in range(2)]
    assert runs[0] == runs[1]
    rounds = [runs[0].split()[i : i + 8] for i in (0, 8, 16)]
    assert all("OTHER" in each and "True" in each for each in rounds)
    assert rounds[0] != rounds[1]


def test_random_failures_lose_no_gpu(scenario):
    nvml = open_fake(scenario('profile = "dgx-h100"\nrandom_failures = 1.0'))
    assert len(nvml.gpus()) == 8


def test_hang_setting_delays_a_call(scenario):
    path = scenario('profile = "dgx-h100"\n[gpu.2]\nhang = "nvmlDeviceGetEccMode"\nhang_seconds = 10.0')
    program = (
        "import time; from healthd.nvidia.fake_nvml import open_fake\n"
        f"one, two = open_fake({path!r}).gpus()[1:3]\n"
        "start = time.monotonic(); one.ecc_mode(); between = time.monotonic(); two.ecc_mode()\n"
        "print(between - start < 10.0, time.monotonic() - between >= 10.0)\n"
    )
    assert run(program).stdout == "True True\n"


def test_crash_setting_kills_the_process(scenario):
    path = scenario('profile = "dgx-h100"\ncrash = "nvmlDeviceGetRemappedRows"')
    opened = f"from healthd.nvidia.fake_nvml import open_fake; g = open_fake({path!r}).gpus()[0]"
    program = f"{opened}\ng.ecc_mode(); g.remapped_rows()"
    assert run(program, check=False).returncode == -9


def run(program: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run([sys.executable, "-c", program], env=environment, check=check, capture_output=True, text=True)


# --- behaviour of pynvml


def test_fake_raises_errors_of_pynvml(scenario):
    parsed, _ = fake_scenario.read(scenario('profile = "dgx-h100"\ngpu.0.lost = true'))
    machine, gpus = fake_scenario.state(parsed, 0.0)
    library = FakeLibrary(machine, fake_scenario.addresses(parsed), gpus)
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        library.nvmlDeviceGetCount()
    library.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        library.nvmlDeviceGetHandleByIndex(8)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        library.nvmlDeviceGetEccMode(library.nvmlDeviceGetHandleByIndex(0))
    handle = library.nvmlDeviceGetHandleByIndex(1)
    assert library.nvmlDeviceGetPciInfo(handle).busId == "00000000:43:00.0"
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        library.nvmlDeviceGetNvLinkState(handle, 18)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        library.nvmlDeviceGetMemoryErrorCounter(handle, 1, 0, 3)


def test_scenario_serial_is_another_gpu_in_the_slot(scenario):
    first, swapped = (
        open_fake(scenario(f'profile = "dgx-h100"\n{text}')).gpus() for text in ("", 'gpu.3.serial = "7"')
    )
    assert swapped[3].serial() == "7"
    assert [gpu.index for gpu, other in zip(first, swapped, strict=True) if gpu.uuid != other.uuid] == [3]
    assert [gpu.index for gpu, other in zip(first, swapped, strict=True) if gpu.serial() != other.serial()] == [3]
    assert gpu(scenario('profile = "dgx-h100"\ngpu.3.unsupported = ["nvmlDeviceGetSerial"]'), 3).serial() is None


def test_scenario_calls_are_all_calls_of_the_fake():
    assert {name for name in vars(FakeLibrary) if name.startswith("nvml")} == fake_scenario.CALLS


def test_fake_has_argument_names_of_pynvml():
    for name in fake_scenario.CALLS:
        arguments = list(inspect.signature(getattr(FakeLibrary, name)).parameters)[1:]
        assert arguments == list(inspect.signature(getattr(pynvml, name)).parameters), name


# --- invalid files


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('profile = "dgx-h10"', 'profile: there is no "dgx-h10"; did you mean "dgx-h100"?'),
        ("", 'missing profile; write profile = "dgx-a100"'),
        ('profil = "dgx-h100"', 'top level: unknown setting "profil"; did you mean "profile"?'),
        ("profile = ", "is not TOML: "),
        pytest.param(f'profile = "dgx-h100"\nseed = {"9" * 5000}', "is not TOML: ", id="5000 digits"),
        pytest.param(f'profile = "dgx-h100"\nseed = 0x{"f" * 5000}', "is not TOML: an integer has more", id="hex"),
        pytest.param(f'profile = "dgx-h100"\ngpu.0.processes = [0x{"f" * 5000}]', "is not TOML: an int", id="list"),
        pytest.param(f'profile = "dgx-h100"\ngpu.0.{"a." * 100}b = 1', "nested too deeply", id="deep"),
        ('profile = "dgx-h100"\ngpu.3.lst = true', 'gpu.3: unknown setting "lst"; did you mean "lost"?'),
        ('profile = "dgx-h100"\ngpu.3.lost = 1', "gpu.3.lost: must be true or false, got 1"),
        ('profile = "dgx-h100"\ngpu.8.lost = true', "gpu.8: this machine has GPUs 0 to 7"),
        ('profile = "dgx-h100"\ngpu.03.lost = true', "gpu.03: this machine has GPUs 0 to 7"),
        ('profile = "dgx-h100"\ngpu = 3', "gpu: must be a table, got 3"),
        ('profile = "dgx-h100"\nlibrary = "mismatched"', 'did you mean "mismatch"?'),
        ('profile = "dgx-h100"\nhang = "nvmlDeviceGetTemp"', 'did you mean "nvmlDeviceGetTemperature"?'),
        ('profile = "dgx-h100"\ngpu.1.unsupported = ["x"]', 'gpu.1.unsupported: healthd does not call "x"'),
        ('profile = "dgx-h100"\ngpu.1.errors = {nvmlInit = "GpuLost"}', 'did you mean "GpuIsLost"?'),
        ('profile = "dgx-h100"\ngpu.1.ecc_volatile_corrected_dram = -1', "must be between 0 and 4294967295"),
        ('profile = "dgx-h100"\ngpu.1.remap_histogram = [1, 2]', "must have 5 items, but has 2"),
        ('profile = "dgx-a100"\ngpu.1.nvlink_inactive = [12]', "there is no link 12; this GPU has 12"),
        ('profile = "dgx-h100"\ngpu.1.nvlinks = 65', "gpu.1.nvlinks: must be between 0 and 64, got 65"),
        ('profile = "dgx-b200"\ngpu.1.nvlink_ber = {3 = 2}', "the rate of link 3 must be between 0 and 1, got 2"),
        ('profile = "dgx-h100"\ngpu.1.mig_devices = 8', "gpu.1.mig_devices: must be between 0 and 7, got 8"),
        ('profile = "dgx-h100"\ngpu.1.temperature_margin = -2000', "must be between -1000 and 1000, got -2000"),
        ('profile = "dgx-h100"\npci = ["1b:00.0"]', 'a unique address like "0000:1b:00.0", got "1b:00.0"'),
        ('profile = "dgx-h100"\nrandom_failures = 2', "random_failures: must be between 0 and 1, got 2"),
        ('profile = "dgx-h100"\n[[at]]\ngpu = 3\nlost = true', "at[0]: missing seconds"),
        ('profile = "dgx-h100"\n[[at]]\nseconds = 1\ngpu = 9', "at[0].gpu: this machine has GPUs 0 to 7"),
        ('profile = "dgx-h100"\n[[at]]\nseconds = "1"', "at[0].seconds: must be a number"),
        ('profile = "dgx-h100"\n[[at]]\nseconds = 1\nlost = true', 'at[0]: unknown setting "lost"'),
        ('profile = "dgx-h100"\n[[at]]\nseconds = -1\ngpu = 1', "at[0].seconds: must be between 0 and"),
    ],
)
def test_invalid_scenario_gives_one_sentence_with_file_and_setting(scenario, text, sentence):
    path = scenario(text)
    with pytest.raises(ConvertError) as caught:
        open_fake(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_name_gives_nearest_profile():
    with pytest.raises(ConvertError, match='there is no profile or file "dgx-h10"; did you mean "dgx-h100"'):
        open_fake("dgx-h10")


def test_unreadable_scenario_gives_one_sentence(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes.toml"):
        with pytest.raises(ConvertError, match="cannot be read"):
            open_fake(str(path))
    with pytest.raises(ConvertError, match="cannot be read"):
        open_fake("\0")


# --- any content

SCALARS = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**64]),
    st.integers(-1, 20),
    st.floats(),
    st.text('ab"\n\0é', max_size=3),
    st.sampled_from(sorted(fake_scenario.CALLS)),
    st.sampled_from(["dgx-h100", "mismatch", "GpuIsLost", "fields", "0000:1b:00.0"]),
)
TABLES = st.dictionaries(st.sampled_from(["0", "3", "x", "nvmlDeviceGetEccMode"]), SCALARS, max_size=2)
VALUES = SCALARS | st.lists(SCALARS, max_size=5) | TABLES


COUNTS = st.integers(0, 13)
NAMES = st.sampled_from(sorted(fake_scenario.CALLS))
VALID_VALUES: dict[object, st.SearchStrategy[object]] = {
    bool: st.booleans(),
    bool | None: st.booleans(),
    int: COUNTS,
    int | None: COUNTS,
    float: st.floats(0, 1),
    float | None: st.floats(0, 1),
    tuple[int, ...] | None: st.lists(COUNTS, max_size=3),
    dict[str, float]: st.dictionaries(st.sampled_from(["0", "11"]), st.floats(0, 1)),
    str: st.just(""),
    tuple[int, ...]: st.lists(COUNTS, max_size=3),
    tuple[int, int, int, int, int] | None: st.lists(COUNTS, min_size=5, max_size=5),
    tuple[str, ...]: st.lists(NAMES, max_size=3),
    dict[str, int]: st.dictionaries(st.sampled_from(["0", "11"]), COUNTS),
    dict[str, str]: st.dictionaries(NAMES, st.sampled_from(sorted(fake_scenario.ERRORS))),
    fake_scenario.Library: st.sampled_from(["fine", "mismatch"]),
    fake_scenario.LinkCounters: st.sampled_from(["none", "fields", "calls", "nvlink5"]),
}


@st.composite
def settings_table(draw: st.DrawFn, kind: type) -> dict[str, object]:
    """Generate mostly valid names and values. One in ten tables has a value of any kind."""
    hints = typing.get_type_hints(kind)
    names = draw(st.lists(st.sampled_from(sorted(hints)), max_size=4))
    strategies = {name: VALID_VALUES.get(hints[name], VALUES) for name in names}
    if draw(st.integers(0, 9)) == 0:
        strategies[draw(st.sampled_from([*hints, "wrong"]))] = VALUES
    return {name: draw(strategy) for name, strategy in strategies.items()}


@st.composite
def timeline_entry(draw: st.DrawFn) -> dict[str, object]:
    """Generate one entry of [[at]]."""
    if draw(st.booleans()):
        return {"seconds": draw(st.floats(0, 10)), **draw(settings_table(fake_scenario.Machine))}
    return {
        "seconds": draw(st.floats(0, 10)),
        "gpu": draw(st.integers(0, 7)),
        **draw(settings_table(fake_scenario.Gpu)),
    }


@given(
    settings_table(fake_scenario.Machine),
    st.dictionaries(st.sampled_from(["0", "3", "7"]), settings_table(fake_scenario.Gpu), max_size=2),
    st.lists(timeline_entry(), max_size=2),
    st.floats(0, 20),
)
def test_check_of_any_table_gives_a_machine_or_error(machine_table, gpu_tables, at, elapsed):
    try:
        scenario = fake_scenario.check({"profile": "dgx-a100", **machine_table, "gpu": gpu_tables, "at": at})
    except ConvertError:
        return
    machine, gpus = fake_scenario.state(scenario, elapsed)
    if any(part.hang or part.crash for part in (machine, *gpus)):
        return
    with contextlib.suppress(NvmlError):
        nvml = Nvml.open(FakeLibrary(machine, fake_scenario.addresses(scenario), gpus))
        for each in nvml.gpus():
            with contextlib.suppress(NvmlError):
                assert_gpu(each)


@given(st.text())
def test_parse_of_any_text_gives_a_scenario_or_error(text):
    with contextlib.suppress(ConvertError):
        fake_scenario.parse(text)


PAGE = (Path(__file__).resolve().parents[2] / "docs/scenario-files.md").read_text("utf-8")


def test_page_of_scenario_files_mentions_every_setting():
    settings = {f.name for kind in (fake_scenario.Scenario, fake_scenario.Gpu) for f in fields_of(kind)}
    named = set(re.findall(r"`([a-z_0-9]+)`", PAGE))
    assert settings - named == set()
    values = {member.value.lower() for member in fake_scenario.LinkCounters}
    values |= {name.lower() for name in fake_scenario.Library.__members__}
    assert values - named == set()


def test_example_of_page_is_a_scenario_file():
    (example,) = re.findall(r"(?s)```toml\n(.*?)```", PAGE)
    machine, gpus = fake_scenario.state(fake_scenario.parse(example), 130.0)
    assert (machine.hang, gpus[3].lost, gpus[5].temperature) == ("nvmlDeviceGetTemperature", True, 92)
