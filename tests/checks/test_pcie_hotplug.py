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


def slot_line(port, text="Link Down", number="7"):
    return f"pcieport {port}: pciehp: Slot({number}): {text}"


findings_from = partial(findings_of, pcie_hotplug, node=NODE, interval=0.0)
finding_from = partial(finding_of, pcie_hotplug, node=NODE, interval=0.0)


@pytest.mark.parametrize(("port", "pci", "kind"), [(TO_GPU, GPU, "GPU"), (TO_NIC, NIC, "network card")])
@pytest.mark.parametrize("text", ["Link Down", "Card not present", "Power fault"])
def test_gpu_or_nic_that_loses_its_slot_is_critical_until_reboot(port, pci, kind, text):
    finding = finding_from(slot_line(port, text))
    assert (finding.severity, finding.clears, finding.window_seconds) == (Severity.CRITICAL, Clears.REBOOT, 0)
    assert (finding.subject, finding.message.startswith(f"{kind} {pci}: ")) == (pci, True)
    assert f"slot 7 (port {port})" in finding.message


def test_slot_is_found_by_number_if_another_port_reports():
    assert finding_from(slot_line("0000:16:00.0", number="21")).subject == GPU


@pytest.mark.parametrize(("port", "subject"), [(TO_NVME, NVME), (EMPTY, EMPTY)])
def test_removed_drive_and_unknown_slot_warn_for_a_day(port, subject):
    finding = finding_from(slot_line(port))
    assert (finding.severity, finding.subject, finding.window_seconds) == (Severity.WARNING, subject, 86400.0)


def test_lost_link_and_lost_card_are_one_finding():
    finding = finding_from(slot_line(TO_GPU), slot_line(TO_GPU, "Card not present"))
    assert (finding.code, len(finding.events)) == ("pcie_hotplug/link_down", 2)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (slot_line(TO_GPU, "No link"), "no_link"),
        (f"nvidia {GPU}: Unable to change power state from D3cold to D0, device inaccessible", "inaccessible"),
    ],
)
def test_faults_that_other_checks_evaluate_only_warn(line, code):
    finding = finding_from(line)
    assert (finding.code, finding.subject, finding.severity) == (f"pcie_hotplug/{code}", GPU, Severity.WARNING)


def test_card_without_link_in_unnumbered_slot_is_named_by_port():
    (finding,) = findings_from(f"pcieport {EMPTY}: pciehp: Failed to check link status")
    assert (finding.severity, finding.code, finding.subject) == (Severity.WARNING, "pcie_hotplug/no_link", EMPTY)
    assert finding.message == f"{EMPTY}: the card in the slot of port {EMPTY} has no link"


def test_lost_slot_without_inventory_warns():
    assert finding_from(slot_line(TO_GPU), node=Inventory()).severity is Severity.WARNING


def test_lost_gpu_drains_until_reboot_and_second_time_until_repaired():
    story = Story(pcie_hotplug, inventory=NODE).log_lines(slot_line(TO_GPU))
    assert (story.codes, story.drained, story.requeued) == (["pcie_hotplug/link_down"], True, True)
    story.wait(3 * 24 * 60).reset(GPU)
    assert story.drained
    story.reboot()
    assert (story.codes, story.drained) == ([], False)
    story.log_lines(slot_line(TO_GPU)).reboot()
    assert story.drained
    story.repaired("pcie_hotplug/link_down")
    assert not story.drained


def test_removed_drive_never_drains_and_clears_after_a_day():
    story = Story(pcie_hotplug, inventory=NODE).log_lines(slot_line(TO_NVME))
    assert (story.codes, story.drained) == (["pcie_hotplug/link_down"], False)
    story.wait(23 * 60)
    assert story.codes == ["pcie_hotplug/link_down"]
    story.wait(2 * 60)
    assert story.codes == []


def test_explain_has_worst_severity_of_every_code():
    lines = [slot_line(TO_GPU, text) for text in ("Link Down", "Card not present", "Power fault", "No link")]
    lines.append(f"nvidia {GPU}: Unable to change power state from D3cold to D0, device inaccessible")
    assert {finding.code for finding in findings_from(*lines)} == set(EXPLAIN)
    for code, text in EXPLAIN.items():
        worst = max(finding.severity for finding in findings_from(*lines) if finding.code == code)
        assert text.severity is worst
