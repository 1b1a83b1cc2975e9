"""pcie_devices: expected devices that are missing or replaced by others."""

from __future__ import annotations

import shutil

import pytest
from fakes import codes, findings, observed, run_check, until_it_fails
from health_checks import also
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from story import Story
from trees import PCI, pci_device

from healthd.checks import pcie_devices
from healthd.checks.pcie_devices import Config, validate
from healthd.common.model import Clears, Finding, Severity
from healthd.host.host import Host

GPU, NIC, NVME = "0000:1b:00.0", "0000:18:00.0", "0000:04:00.0"
EXPECTED = Config(expected={GPU: "10de:2330", NIC: "15b3:1021", NVME: "144d:a824"})


def healthy(tmp_path):
    pci_device(tmp_path, GPU, "0x030200", device="0x2330")
    pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device="0x1021")
    pci_device(tmp_path, NVME, "0x010802", vendor="0x144d", device="0xa824")
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


def test_a_node_as_its_baseline_says_gives_no_finding(node):
    given = run_check(pcie_devices, node, EXPECTED)
    assert [item for item in given if isinstance(item, Finding)] == []
    assert [item.value for item in observed(given, "pcie_devices_missing")] == [0]


def test_without_an_expectation_nothing_is_looked_at(node):
    assert run_check(pcie_devices, node) == []


@pytest.mark.parametrize("pci", [GPU, NIC, NVME])
def test_a_device_that_is_gone_is_degraded_until_it_is_back(node, tmp_path, pci):
    remove(tmp_path, pci)
    (finding,) = findings(pcie_devices, node, EXPECTED)
    assert (finding.code, finding.subject, finding.expects) == ("pcie_devices/gone", pci, "expected")
    assert (finding.severity, finding.clears) == (Severity.DEGRADED, Clears.PASS)


def test_a_host_that_has_read_the_device_before_sees_that_it_is_another_now(node, tmp_path):
    assert findings(pcie_devices, node, EXPECTED) == []
    remove(tmp_path, NIC)
    shutil.rmtree(tmp_path / f"sys/devices/pci0000:00/{NIC}")
    assert codes(findings(pcie_devices, node, EXPECTED)) == ["pcie_devices/gone"]
    pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device="0x1017")
    (finding,) = findings(pcie_devices, node, EXPECTED)
    assert finding.code == "pcie_devices/changed"
    assert "15b3:1017" in finding.message
    assert "15b3:1021" in finding.message


def test_a_device_that_is_being_taken_out_is_gone(node, tmp_path):
    (tmp_path / PCI[1:] / NIC / "vendor").unlink()
    assert codes(findings(pcie_devices, node, EXPECTED)) == ["pcie_devices/gone"]


def test_a_machine_without_pci_misses_what_is_expected(tmp_path):
    assert len(findings(pcie_devices, Host(str(tmp_path)), EXPECTED)) == 3


def test_more_devices_than_expected_are_no_finding(node, tmp_path):
    pci_device(tmp_path, "0000:19:00.0", "0x020000", vendor="0x8086", device="0x1533")
    assert findings(pcie_devices, node, EXPECTED) == []


def test_a_card_that_is_gone_drains_until_it_is_back_however_long_that_takes(node, tmp_path):
    life = Story(pcie_devices, EXPECTED).look(node)
    remove(tmp_path, NIC)
    life.look(node).look(node, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["pcie_devices/gone"], True, False)
    life.looks(node, 300).reboot().looks(node, 3)
    assert life.drained  # neither time nor a reboot restores it
    healthy(tmp_path)
    assert life.look(node).drained
    assert not life.look(node).drained


def test_another_card_drains_until_the_right_one_is_in_its_place(node, tmp_path):
    def put(device):
        """Return a new host without a cache: the node is off while cards are replaced."""
        pci_device(tmp_path, NIC, "0x020700", vendor="0x15b3", device=device)
        return Host(str(tmp_path))

    life = Story(pcie_devices, EXPECTED).look(node)
    wrong = put("0x1017")
    life.look(wrong)
    assert (life.codes, life.drained) == ([], False)
    life.look(wrong, minutes=1)
    assert (life.codes, life.drained, life.requeued) == (["pcie_devices/changed"], True, False)
    life.looks(wrong, 300).reboot().looks(wrong, 3)
    assert (life.codes, life.drained) == (["pcie_devices/changed"], True)  # neither a day nor a reboot changes the card
    right = put("0x1021")
    assert life.look(right).drained
    life.look(right)
    assert (life.codes, life.drained) == ([], False)


def test_a_card_that_is_back_within_a_minute_was_reset_and_drains_nothing(node, tmp_path):
    life = Story(pcie_devices, EXPECTED).look(node)
    remove(tmp_path, NIC)
    life.look(node).look(node, minutes=0.8)
    healthy(tmp_path)
    life.look(node, minutes=0.2).looks(node, 3)
    assert (life.codes, life.drained) == ([], False)


def test_what_a_profile_guessed_never_drains(node, tmp_path):
    remove(tmp_path, NIC)
    life = Story(pcie_devices, Config(expected=EXPECTED.expected, guessed=("expected",))).looks(node, 10)
    assert (life.codes, life.drained) == (["pcie_devices/gone"], False)


@pytest.mark.parametrize("pci", ["", "1b:00.0", "0000:1B:00.0", "0000:1b:00", "0000:1b:00.8", "00000000:1b:00"])
def test_what_is_no_pci_address_is_refused(pci):
    assert "not a PCI address" in (validate(Config(expected={pci: "10de:2330"})) or "")


@pytest.mark.parametrize("model", ["", "10de", "0x10de:0x2330", "10DE:2330", "10de:2330:1", "NVIDIA:H100"])
def test_what_is_no_vendor_and_device_is_refused(model):
    assert "not a vendor and device" in (validate(Config(expected={GPU: model})) or "")
    assert validate(EXPECTED) is None


@settings(max_examples=60, suppress_health_check=also(HealthCheck.function_scoped_fixture))
@given(name=st.sampled_from(["vendor", "device"]), text=st.binary(max_size=12))
def test_no_other_content_of_a_file_is_the_expected_device(tmp_path, name, text):
    node = healthy(tmp_path)[0]
    (tmp_path / PCI[1:] / NIC / name).write_bytes(text)
    if text.strip() in (b"0x15b3", b"0x1021"):
        return
    found, error = until_it_fails(pcie_devices, node, EXPECTED)
    assert error or codes([item for item in found if isinstance(item, Finding)])
