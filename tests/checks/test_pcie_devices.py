"""pcie_devices: expected devices that are missing or replaced by others."""

from __future__ import annotations

import shutil

import pytest
from fakes import codes, findings, observations_named, run_check, run_until_error
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import PCI, add_pci_device

from healthd.checks import pcie_devices
from healthd.checks.pcie_devices import Config, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

GPU, NIC, NVME = "0000:1b:00.0", "0000:18:00.0", "0000:04:00.0"
EXPECTED = Config(expected={GPU: "10de:2330", NIC: "15b3:1021", NVME: "144d:a824"})


def healthy(tmp_path):
    add_pci_device(tmp_path, GPU, "0x030200", device="0x2330")
    add_pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device="0x1021")
    add_pci_device(tmp_path, NVME, "0x010802", vendor="0x144d", device="0xa824")
    return Host(str(tmp_path)), EXPECTED


ABSENT_IS_FINE = {
    r".*/class": "the class of the device is not evaluated here",
    r"/sys/bus/pci/devices/[^/]+": "the port above is not evaluated here",
}


@pytest.fixture
def node(tmp_path):
    return healthy(tmp_path)[0]


def remove(tmp_path, pci):
    (tmp_path / PCI[1:] / pci).unlink()


def test_expected_devices_give_no_finding(node):
    results = run_check(pcie_devices, node, EXPECTED)
    assert [item for item in results if isinstance(item, Finding)] == []
    assert [item.value for item in observations_named(results, "pcie_devices_missing")] == [0]


def test_pcie_devices_reports_nothing_without_expectation(node):
    assert run_check(pcie_devices, node) == []


@pytest.mark.parametrize("pci", [GPU, NIC, NVME])
def test_missing_device_is_degraded_until_restored(node, tmp_path, pci):
    remove(tmp_path, pci)
    (finding,) = findings(pcie_devices, node, EXPECTED)
    assert (finding.code, finding.subject, finding.expects) == ("pcie_devices/gone", pci, "expected")
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.PASS)


def test_host_that_cached_a_device_detects_its_replacement(node, tmp_path):
    assert findings(pcie_devices, node, EXPECTED) == []
    remove(tmp_path, NIC)
    shutil.rmtree(tmp_path / f"sys/devices/pci0000:00/{NIC}")
    assert codes(findings(pcie_devices, node, EXPECTED)) == ["pcie_devices/gone"]
    add_pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device="0x1017")
    (finding,) = findings(pcie_devices, node, EXPECTED)
    assert finding.code == "pcie_devices/changed"
    assert "15b3:1017" in finding.message
    assert "15b3:1021" in finding.message


def test_device_being_removed_is_missing(node, tmp_path):
    (tmp_path / PCI[1:] / NIC / "vendor").unlink()
    assert codes(findings(pcie_devices, node, EXPECTED)) == ["pcie_devices/gone"]


def test_machine_without_pci_lacks_expected_devices(tmp_path):
    assert len(findings(pcie_devices, Host(str(tmp_path)), EXPECTED)) == 3


def test_additional_devices_give_no_finding(node, tmp_path):
    add_pci_device(tmp_path, "0000:19:00.0", "0x020000", vendor="0x8086", device="0x1533")
    assert findings(pcie_devices, node, EXPECTED) == []


def test_missing_card_drains_until_restored(node, tmp_path):
    story = Story(pcie_devices, EXPECTED).run_check(node)
    remove(tmp_path, NIC)
    story.run_check(node).run_check(node, minutes=1)
    assert (story.codes, story.drained, story.requeued) == (["pcie_devices/gone"], True, False)
    story.run_checks(node, 300).reboot().run_checks(node, 3)
    assert story.drained  # neither time nor a reboot restores it
    healthy(tmp_path)
    assert story.run_check(node).drained
    assert not story.run_check(node).drained


def test_replaced_card_drains_until_the_expected_one_is_back(node, tmp_path):
    def replace_card(device):
        """Return a new host without a cache: the node is off while cards are replaced."""
        add_pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device=device)
        return Host(str(tmp_path))

    story = Story(pcie_devices, EXPECTED).run_check(node)
    other_card = replace_card("0x1017")
    story.run_check(other_card)
    assert (story.codes, story.drained) == ([], False)
    story.run_check(other_card, minutes=1)
    assert (story.codes, story.drained, story.requeued) == (["pcie_devices/changed"], True, False)
    story.run_checks(other_card, 300).reboot().run_checks(other_card, 3)
    assert (story.codes, story.drained) == (
        ["pcie_devices/changed"],
        True,
    )  # neither a day nor a reboot changes the card
    expected_card = replace_card("0x1021")
    assert story.run_check(expected_card).drained
    story.run_check(expected_card)
    assert (story.codes, story.drained) == ([], False)


def test_card_restored_within_a_minute_does_not_drain(node, tmp_path):
    story = Story(pcie_devices, EXPECTED).run_check(node)
    remove(tmp_path, NIC)
    story.run_check(node).run_check(node, minutes=0.8)
    healthy(tmp_path)
    story.run_check(node, minutes=0.2).run_checks(node, 3)
    assert (story.codes, story.drained) == ([], False)


def test_devices_guessed_by_profile_never_drain(node, tmp_path):
    remove(tmp_path, NIC)
    story = Story(pcie_devices, Config(expected=EXPECTED.expected, guessed=("expected",))).run_checks(node, 10)
    assert (story.codes, story.drained) == (["pcie_devices/gone"], False)


@pytest.mark.parametrize("pci", ["", "1b:00.0", "0000:1B:00.0", "0000:1b:00", "0000:1b:00.8", "00000000:1b:00"])
def test_validate_rejects_invalid_pci_address(pci):
    assert "not a PCI address" in (validate(Config(expected={pci: "10de:2330"})) or "")


@pytest.mark.parametrize("model", ["", "10de", "0x10de:0x2330", "10DE:2330", "10de:2330:1", "NVIDIA:H100"])
def test_validate_rejects_invalid_vendor_and_device(model):
    assert "not a vendor and device" in (validate(Config(expected={GPU: model})) or "")
    assert validate(EXPECTED) is None


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["vendor", "device"]), text=st.binary(max_size=12))
def test_other_file_content_is_not_the_expected_device(tmp_path, name, text):
    node = healthy(tmp_path)[0]
    (tmp_path / PCI[1:] / NIC / name).write_bytes(text)
    if text.strip() in (b"0x15b3", b"0x1021"):
        return
    found, error = run_until_error(pcie_devices, node, EXPECTED)
    assert error or codes([item for item in found if isinstance(item, Finding)])
