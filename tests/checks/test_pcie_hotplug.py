"""pcie_hotplug: slots whose link went down or whose card was removed."""

from __future__ import annotations

from functools import partial

import pytest
from kernel_lines import finding_of, findings_of
from story import Story

from healthd.checks import pcie_hotplug
from healthd.checks.pcie_hotplug import EXPLAIN
from healthd.common.model import Clears, Inventory, PciDevice, Severity

GPU, NIC, NVME = "0000:1b:00.0", "0000:18:00.0", "0000:04:00.0"
TO_GPU, TO_NIC, TO_NVME, EMPTY = "0000:17:00.0", "0000:17:01.0", "0000:01:00.0", "0000:02:00.0"
NODE = Inventory(
    devices=(
        PciDevice(GPU, "0x10de", "0x2330", "0x030200", "gpu", TO_GPU, "21"),
        PciDevice(NIC, "0x15b3", "0x1021", "0x020700", "nic", TO_NIC),
        PciDevice("0000:18:00.1", "0x15b3", "0x1021", "0x020700", "nic", TO_NIC),
        PciDevice(NVME, "0x144d", "0xa80a", "0x010802", "nvme", TO_NVME, "33"),
    )
)


def slot(port, text="Link Down", number="7"):
    return f"pcieport {port}: pciehp: Slot({number}): {text}"


found = partial(findings_of, pcie_hotplug, node=NODE, apart=0.0)
one = partial(finding_of, pcie_hotplug, node=NODE, apart=0.0)


@pytest.mark.parametrize(("port", "pci", "what"), [(TO_GPU, GPU, "GPU"), (TO_NIC, NIC, "network card")])
@pytest.mark.parametrize("text", ["Link Down", "Card not present", "Power fault"])
def test_a_gpu_or_network_card_that_loses_its_slot_is_critical_until_a_reboot(port, pci, what, text):
    finding = one(slot(port, text))
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.CRITICAL, Clears.REBOOT, 0)
    assert (finding.subject, finding.message.startswith(f"{what} {pci}: ")) == (pci, True)
    assert f"slot 7 (port {port})" in finding.message


def test_the_slot_is_found_by_its_number_where_another_port_speaks():
    assert one(slot("0000:16:00.0", number="21")).subject == GPU


@pytest.mark.parametrize(("port", "subject"), [(TO_NVME, NVME), (EMPTY, EMPTY)])
def test_a_drive_that_is_taken_out_and_an_unknown_slot_warn_for_a_day(port, subject):
    finding = one(slot(port))
    assert (finding.severity, finding.subject, finding.window_seconds) == (Severity.WARNING, subject, 86400.0)


def test_a_lost_link_and_a_lost_card_are_one_fault():
    finding = one(slot(TO_GPU), slot(TO_GPU, "Card not present"))
    assert (finding.code, len(finding.events)) == ("pcie_hotplug/link_down", 2)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (slot(TO_GPU, "No link"), "no_link"),
        (f"nvidia {GPU}: Unable to change power state from D3cold to D0, device inaccessible", "inaccessible"),
    ],
)
def test_what_other_checks_look_at_themselves_warns(line, code):
    finding = one(line)
    assert (finding.code, finding.subject, finding.severity) == (f"pcie_hotplug/{code}", GPU, Severity.WARNING)


def test_a_card_without_a_link_in_a_slot_without_a_number_is_named_by_its_port():
    (finding,) = found(f"pcieport {EMPTY}: pciehp: Failed to check link status")
    assert (finding.severity, finding.code, finding.subject) == (Severity.WARNING, "pcie_hotplug/no_link", EMPTY)
    assert finding.message == f"{EMPTY}: the card in the slot of port {EMPTY} has no link"


def test_without_an_inventory_it_warns():
    assert one(slot(TO_GPU), node=Inventory()).severity is Severity.WARNING


def test_a_lost_gpu_drains_and_requeues_until_the_reboot_and_the_second_time_an_engineer_must_say_so():
    life = Story(pcie_hotplug, inventory=NODE).says(slot(TO_GPU))
    assert (life.codes, life.drained, life.requeued) == (["pcie_hotplug/link_down"], True, True)
    life.wait(3 * 24 * 60).reset(GPU)
    assert life.drained
    life.reboot()
    assert (life.codes, life.drained) == ([], False)
    life.says(slot(TO_GPU)).reboot()
    assert life.drained
    life.repaired("pcie_hotplug/link_down")
    assert not life.drained


def test_a_drive_that_is_taken_out_never_drains_and_is_forgotten_after_a_day():
    life = Story(pcie_hotplug, inventory=NODE).says(slot(TO_NVME))
    assert (life.codes, life.drained) == (["pcie_hotplug/link_down"], False)
    life.wait(23 * 60)
    assert life.codes == ["pcie_hotplug/link_down"]
    life.wait(2 * 60)
    assert life.codes == []


def test_all_that_it_finds_is_explained():
    lines = [slot(TO_GPU, text) for text in ("Link Down", "Card not present", "Power fault", "No link")]
    lines.append(f"nvidia {GPU}: Unable to change power state from D3cold to D0, device inaccessible")
    assert {finding.code for finding in found(*lines)} == set(EXPLAIN)
    for code, text in EXPLAIN.items():
        worst = max(finding.severity for finding in found(*lines) if finding.code == code)
        assert text.severity is worst
