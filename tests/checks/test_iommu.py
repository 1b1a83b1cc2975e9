"""iommu: DMA accesses and interrupts that the IOMMU blocked."""

from __future__ import annotations

from functools import partial

import pytest
from kernel_lines import finding_of, findings_of
from story import Story

from healthd.checks import iommu
from healthd.checks.iommu import EXPLAIN
from healthd.common.model import Clears, Inventory, PciDevice, Severity

GPU, NIC, NVME, SWITCH = "0000:01:00.0", "0000:18:00.0", "0000:04:00.0", "0000:05:00.0"
USB = "0000:00:14.0"
NODE = Inventory(
    devices=(
        PciDevice(GPU, "0x10de", "0x2330", "0x030200", "gpu"),
        PciDevice(NIC, "0x15b3", "0x1021", "0x020700", "nic"),
        PciDevice(NVME, "0x144d", "0xa80a", "0x010802", "nvme"),
        PciDevice(SWITCH, "0x10de", "0x22a3", "0x068000", "nvswitch"),
        PciDevice("0001:61:00.0", "0x10de", "0x2330", "0x030200", "gpu"),
    )
)
SUPPRESSED = "dmar_fault: 655 callbacks suppressed"
STATUS = "DMAR: DRHD: handling fault status reg 3"
SYNC = "arm-smmu-v3 arm-smmu-v3.3.auto: CMD_SYNC timeout at 0x00000010 [hwprod 0x00000010, hwcons 0x0000000f]"


def write(pci: str = "01:00.0") -> str:
    return (
        f"DMAR: [DMA Write NO_PASID] Request device [{pci}] fault addr 0x2800000000 [fault reason 0x05] PTE Write "
        "access is not set"
    )


def amd(driver: str, pci: str, flags: str = "0x0020") -> str:
    return f"{driver} {pci}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0019 address=0xfee00000 flags={flags}]"


findings_from = partial(findings_of, iommu, node=NODE, interval=0.1)
finding_from = partial(finding_of, iommu, node=NODE, interval=0.1)


def test_faults_of_two_gpus_that_copy_to_each_other_name_both():
    second = write("02:00.0").replace("0x2800000000", "0x2000009000")
    lines = (STATUS, write(), SUPPRESSED, "DMAR: DRHD: handling fault status reg 2", second)
    findings = findings_from(*lines, node=Inventory())
    assert [(each.code, each.severity, each.subject) for each in findings] == [
        ("iommu/dma_fault", Severity.WARNING, GPU),
        ("iommu/dma_fault", Severity.WARNING, "0000:02:00.0"),
    ]


@pytest.mark.parametrize(("pci", "kind"), [(GPU, "GPU"), (NIC, "network card"), (NVME, "NVMe"), (SWITCH, "NVSwitch")])
def test_blocked_write_of_device_used_by_jobs_warns(pci, kind):
    finding = finding_from(write(pci.removeprefix("0000:")))
    assert (finding.severity, finding.code, finding.subject) == (Severity.WARNING, "iommu/dma_fault", pci)
    assert (finding.clears, finding.window_seconds) == (Clears.WINDOW, 86400.0)
    assert kind in finding.message
    assert pci in finding.message


def test_lines_without_device_belong_to_fault_nearby():
    findings = findings_from(STATUS, write(), SUPPRESSED, STATUS, write("04:00.0"))
    assert sorted(finding.subject for finding in findings) == [GPU, NVME]


def test_lines_without_device_warn_if_no_fault_nearby_has_one():
    finding = finding_from(STATUS, SUPPRESSED)
    assert (finding.severity, finding.subject) == (Severity.WARNING, "")
    later = findings_of(iommu, write(), SUPPRESSED, node=NODE, interval=3600.0)
    assert sorted(finding.subject for finding in later) == ["", GPU]


def test_device_is_found_in_another_segment_and_by_first_function():
    assert finding_from(write("61:00.0")).subject == "0001:61:00.0"
    assert finding_from(write("01:00.1")).subject == GPU


@pytest.mark.parametrize("line", [write("00:14.0"), amd("xhci_hcd", USB), amd("pci", USB)])
def test_device_not_used_by_jobs_is_only_recorded(line):
    finding = finding_from(line)
    assert (finding.severity, finding.subject) == (Severity.INFO, USB)


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        (write(), Severity.WARNING),
        (amd("nvidia", GPU), Severity.WARNING),
        (amd("bnxt_en", GPU), Severity.WARNING),
        (amd("vfio-pci", GPU), Severity.WARNING),
        (amd("xhci_hcd", GPU), Severity.INFO),
    ],
)
def test_severity_without_inventory_depends_on_driver(line, severity):
    assert finding_from(line, node=Inventory()).severity is severity


def test_blocked_interrupt_warns():
    line = (
        "DMAR: [INTR-REMAP] Request device [01:00.0] fault index 0x22 [fault reason 0x26] Blocked an interrupt request"
    )
    assert (finding_from(line).code, finding_from(line).severity) == ("iommu/interrupt_fault", Severity.WARNING)
    assert finding_from(amd("nvidia", GPU, "0x0008")).code == "iommu/interrupt_fault"


def test_stuck_iommu_warns_until_reboot():
    finding = finding_from(SYNC)
    assert (finding.code, finding.subject) == ("iommu/stuck", "arm-smmu-v3.3.auto")
    assert (finding.severity, finding.clears) == (Severity.WARNING, Clears.REBOOT)


def test_blocked_access_never_drains_and_clears_after_a_day():
    story = Story(iommu, inventory=NODE).log_lines(write())
    assert (story.codes, story.drained) == (["iommu/dma_fault"], False)
    story.wait(25 * 60)
    assert story.codes == []


def test_explain_has_worst_severity_of_every_code():
    findings = findings_from(write(), amd("nvidia", GPU, "0x0008"), SYNC)
    assert {finding.code: finding.severity for finding in findings} == {
        code: text.severity for code, text in EXPLAIN.items()
    }
