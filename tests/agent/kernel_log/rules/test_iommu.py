"""Tests of IOMMU lines, in the formats of Linux 3.10 to 7.3 (drivers/iommu). The first block is a public report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.parse import parse

GPU = "0000:01:00.0"


def read(text: str) -> tuple[str, str, str] | None:
    """Return (code, device, operation) of a line, or None if no rule matches."""
    event = parse(text)
    if event is None:
        return None
    assert event.kind == "iommu"
    return event.code, event.pci, event.field("operation")


# Two GPUs copy to each other while VT-d translates (a user's dmesg, Linux 6.8).
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DMAR: DRHD: handling fault status reg 3", ("detail", "", "")),
        (
            "DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x2800000000 [fault reason 0x05] PTE Write "
            "access is not set",
            ("dma_fault", GPU, "write"),
        ),
        ("dmar_fault: 655 callbacks suppressed", ("dma_fault", "", "")),
    ],
)
def test_parse_reads_reported_intel_lines(text, expected):
    assert read(text) == expected


INTEL = [
    ("DMAR:[DMA Write] Request device [01:00.0] fault addr fffe0000", "dma_fault", "write"),
    ("dmar: [DMA Read] Request device [01:00.0] fault addr fffe0000 ", "dma_fault", "read"),
    (
        "DMAR: [DMA Write] Request device [01:00.0] fault addr fffe0000 [fault reason 05] PTE Write access is not set",
        "dma_fault",
        "write",
    ),
    (
        "DMAR: [DMA Read] Request device [01:00.0] PASID ffffffff fault addr fffe0000 [fault reason 06] PTE Read "
        "access is not set",
        "dma_fault",
        "read",
    ),
    (
        "DMAR: [DMA Read PASID 0x1] Request device [01:00.0] fault addr 0x1000 [fault reason 0x71] SM: Present bit in "
        "first-level paging entry is clear",
        "dma_fault",
        "read",
    ),
    (
        "DMAR: [DMA Write NO_PASID] Request device [0000:01:00.0] fault addr 0x1000 [fault reason 0x05] PTE Write "
        "access is not set",
        "dma_fault",
        "write",
    ),
    (
        "DMAR: [INTR-REMAP] Request device [01:00.0] fault index 0x22 [fault reason 0x26] Blocked an interrupt "
        "request due to source-id verification failure",
        "interrupt_fault",
        "",
    ),
    ("DMAR: INTR-REMAP: Request device [[01:00.0] fault index 22", "interrupt_fault", ""),
    (
        "DMAR: [DMA Read NO_PASID] Request device [0x01:0x00.0] fault addr 0x7d3a0000 [fault reason 0x06] PTE Read "
        "access is not set",
        "dma_fault",
        "read",
    ),
    (
        "DMAR: [DMA Write PASID 0x1] Request device [0x01:0x00.0] fault addr 0x1000 [fault reason 0x71] SM: Present "
        "bit in first-level paging entry is clear",
        "dma_fault",
        "write",
    ),
    (
        "DMAR: [INTR-REMAP] Request device [0x01:0x00.0] fault index 0x22 [fault reason 0x26] Blocked an interrupt "
        "request due to source-id verification failure",
        "interrupt_fault",
        "",
    ),
]
AMD = [
    (
        "nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0019 address=0xfee00000 flags=0x0020]",
        "dma_fault",
        "write",
    ),
    (
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:01:00.0 domain=0x0019 address=0x1000 flags=0x0000]",
        "dma_fault",
        "read",
    ),
    (
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=01:00.0 domain=0x0019 address=0x0000000000001000 flags=0x0030]",
        "dma_fault",
        "write",
    ),
    (
        "pci 0000:00:00.2: AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=0000:01:00.0 pasid=0x00000 "
        "address=0xfffffffdf8000000 flags=0x0a00]",
        "dma_fault",
        "read",
    ),
    (
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:01:00.0 domain=0x0019 address=0xfee00000 flags=0x0008]",
        "interrupt_fault",
        "",
    ),
    ("pci 0000:00:00.2: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:01:00.0 address=0x10014a0a0]", "stuck", ""),
    ("iommu ivhd0: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:01:00.0 address=0x10014a0a0]", "stuck", ""),
    (
        "iommu ivhd12: AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=0000:01:00.0 pasid=0x00000 "
        "address=0xfffffffdf8000000 flags=0x0a00]",
        "dma_fault",
        "read",
    ),
]


@pytest.mark.parametrize(("text", "code", "operation"), [*INTEL, *AMD])
def test_parse_names_device_in_every_intel_and_amd_form(text, code, operation):
    assert read(text) == (code, GPU, operation)


def test_parse_reads_driver_for_device_and_not_for_iommu():
    fault, table, *_ = (parse(text) for text, _, _ in (AMD[0], AMD[3]))
    assert (fault.field("driver"), table.field("driver")) == ("nvidia", "")


SMMU = "arm-smmu-v3 arm-smmu-v3.3.auto:"


@pytest.mark.parametrize(
    ("text", "code", "pci"),
    [
        (f"{SMMU} event: F_TRANSLATION client: {GPU} sid: 0x100 ssid: 0x0 iova: 0x1000 ipa: 0x0", "dma_fault", GPU),
        (f"{SMMU} event: C_BAD_STREAMID client: (unassigned sid) sid: 0x100 ssid: 0x0", "dma_fault", ""),
        (f"{SMMU} event 0x10 received:", "dma_fault", ""),
        (f"{SMMU} CMD_SYNC timeout at 0x00000010 [hwprod 0x00000010, hwcons 0x0000000f]", "stuck", ""),
        (f"{SMMU} CMDQ timeout", "stuck", ""),
        (f"{SMMU} device has entered Service Failure Mode!", "stuck", ""),
        ("arm-smmu 12600000.iommu: Unhandled context fault: fsr=0x402, iova=0x0, fsynr=0x1, cb=0", "dma_fault", ""),
        ("arm-smmu 12600000.iommu: TLB sync timed out -- SMMU may be deadlocked", "stuck", ""),
    ],
)
def test_parse_reads_arm_smmu_lines_with_reporting_unit(text, code, pci):
    event = parse(text)
    assert (event.kind, event.code, event.pci) == ("iommu", code, pci)
    assert event.field("iommu") in ("arm-smmu-v3.3.auto", "12600000.iommu")


@pytest.mark.parametrize(
    ("text", "pci"),
    [
        ("AMD-Vi: Completion-Wait loop timed out", ""),
        ("AMD-Vi: IOMMU 0000:40:00.2: Completion-Wait loop timed out", ""),
        ("DMAR: VT-d detected Invalidation Time-out Error: SID 100", ""),
        ("DMAR: VT-d detected Invalidation Queue Error: Reason 1", ""),
    ],
)
def test_parse_reads_iommu_that_does_not_execute_commands(text, pci):
    assert read(text) == ("stuck", pci, "")


@pytest.mark.parametrize("name", ["ILLEGAL_COMMAND_ERROR", "COMMAND_HARDWARE_ERROR"])
@pytest.mark.parametrize(
    ("prefix", "unit"), [("", ""), ("iommu ivhd3: ", "ivhd3"), ("pci 0000:40:00.2: ", "0000:40:00.2")]
)
def test_parse_names_amd_iommu_that_refused_command(prefix, unit, name):
    event = parse(f"{prefix}AMD-Vi: Event logged [{name} address=0x10014a0a0]")
    assert (event.kind, event.code, event.pci, event.field("iommu")) == ("iommu", "stuck", "", unit)


@pytest.mark.parametrize(
    "text",
    [
        "DMAR: IOMMU enabled",
        "DMAR: Host address width 46",
        "DMAR: DRHD base: 0x000000d0ffc000 flags: 0x0",
        "DMAR-IR: Enabled IRQ remapping in x2apic mode",
        "DMAR: [Firmware Bug]: RMRR entry for device 03:00.0 is broken - applying workaround",
        "pci 0000:00:00.2: AMD-Vi: IOMMU performance counters supported",
        "AMD-Vi: Virtual APIC enabled",
        f"{SMMU} ias 48-bit, oas 48-bit (features 0x001c1fff)",
        f"{SMMU} allocated 524288 entries for cmdq",
        "net_ratelimit: 12 callbacks suppressed",
        "python3: DMAR: [DMA Write] Request device [01:00.0] fault addr 0",
    ],
)
def test_parse_ignores_boot_lines_and_other_programs(text):
    assert parse(text) is None


@given(st.sampled_from([text for text, *_ in (*INTEL, *AMD)]), st.data())
def test_parse_returns_same_device_or_none_for_damaged_line(text, data):
    cut = data.draw(st.integers(0, len(text)))
    event = parse(text[:cut] + data.draw(st.text(max_size=20)))
    assert event is None or event.kind != "iommu" or event.pci in (GPU, "0000:00:00.2", "") or event.pci.startswith("0")
