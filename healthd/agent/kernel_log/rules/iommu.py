"""Rules for IOMMU faults: a device's DMA or interrupt was blocked, or the IOMMU does not execute commands.

    kind iommu. Fields: pci = the blocked device, or "" if the line does not name it; iommu = the reporting unit. Codes:
    dma_fault        the IOMMU blocked DMA; operation = "write" or "read"; driver, if the line names it
    interrupt_fault  the IOMMU blocked an interrupt message from the device
    stuck            the IOMMU (or the device, for AMD's IOTLB_INV_TIMEOUT) did not execute a command
    detail           a further line about one of these

"dmar_fault: 655 callbacks suppressed" is a dma_fault without a device. The line means that there were more faults than
the kernel printed.

Linux 6.12 prints no PCI segment for Intel, but 7.3 does. "01:00.0" is read as "0000:01:00.0", and checks/iommu.py looks
for the device in other segments. arm-smmu-v3 in 6.12 prints only the event's number; in 7.3 it names the device.

Formats: Linux 3.10 to 7.3, drivers/iommu/intel/dmar.c (dmar_fault_do_one), drivers/iommu/amd/iommu.c
(iommu_print_event, amd_iommu_report_page_fault), drivers/iommu/arm/arm-smmu-v3/arm-smmu-v3.c (arm_smmu_dump_event,
arm_smmu_gerror_handler), drivers/iommu/arm/arm-smmu/arm-smmu.c, lib/ratelimit.c.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import DETAIL, PCI, Rule, event, event_builder
from healthd.common.model import KernelEvent
from healthd.common.text import regex

_DEVICE = r"((?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])"

# --- Intel VT-d
#
# DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x2800000000 [fault reason 0x05] PTE Write ...
# DMAR: [DMA Read PASID 0x1] Request device [0000:01:00.0] fault addr 0x1000 [fault reason 0x71] ...           7.3
# DMAR: [DMA Write] Request device [01:00.0] fault addr fffe0000 [fault reason 05] PTE Write access is not set     4.x
# DMAR:[DMA Write] Request device [01:00.0] fault addr fffe0000                                                  3.10
# DMAR: [INTR-REMAP] Request device [01:00.0] fault index 0x22 [fault reason 0x26] Blocked an interrupt request ...
# DMAR: INTR-REMAP: Request device [[01:00.0] fault index 22                                                     3.10
# DMAR: [DMA Read NO_PASID] Request device [0x41:0x00.0] fault addr 0x7d3a0000 [fault reason 0x06] ...   about 5.14
_INTEL = regex(
    r"(?:dmar: |DMAR: ?)\[?(?:DMA (Write|Read)|(INTR-REMAP))(?: [\w ]{1,24})?\]?:? Request device "
    r"\[{1,2}((?:[0-9A-Fa-f]{4,8}:)?(?:0x)?[0-9A-Fa-f]{2}:(?:0x)?[0-9A-Fa-f]{2}\.[0-7])\]"
)
# DMAR: DRHD: handling fault status reg 3              printed before the faults, one for each interrupt
# DMAR:[fault reason 05] PTE Write access is not set   3.10: a fault's second line
_INTEL_MORE = regex(r"(?:dmar: |DMAR: ?)(?:DRHD: handling fault status reg [0-9a-f]|\[fault reason \w{1,4}\])")
# DMAR: VT-d detected Invalidation Time-out Error: SID 100
_INTEL_STUCK = regex(r"DMAR: VT-d detected Invalidation (?:Queue|Time-out|Completion) Error")


def _intel(kind: str, match: re.Match[str]) -> KernelEvent:
    operation, interrupt, device = match.groups()
    code = "interrupt_fault" if interrupt else "dma_fault"
    fields = (("operation", operation.lower() if operation else None),)
    return event(kind, match, code, device.replace("0x", ""), fields)


# --- AMD-Vi
#
# nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0019 address=0xfee00000 flags=0x0020]    5.8
# AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:01:00.0 domain=0x0019 address=0xfee00000 flags=0x0020]
# AMD-Vi: Event logged [IO_PAGE_FAULT device=01:00.0 domain=0x0019 address=0x00000000fee00000 flags=0x0020]  4.x
# pci 0000:40:00.2: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:41:00.0 address=0x10014a0a0]
# iommu ivhd0: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:41:00.0 address=0x10014a0a0]     4.20: the IOMMU
_IVHD = r"iommu ivhd\d{1,3}: "
_AMD = regex(
    rf"(?:([\w-]{{1,32}}) {PCI}: |{_IVHD})?AMD-Vi: Event logged \[(IO_PAGE_FAULT|ILLEGAL_DEV_TABLE_ENTRY"
    r"|DEV_TAB_HARDWARE_ERROR|PAGE_TAB_HARDWARE_ERROR|IOTLB_INV_TIMEOUT|INVALID_DEVICE_REQUEST|RMP_PAGE_FAULT|RMP_HW_ERROR)\b"
    rf"(?: device={_DEVICE})?(?:[^\]\n]{{0,120}}? flags=0x([0-9a-f]{{1,4}}))?"
)
# AMD-Vi: Completion-Wait loop timed out;     AMD-Vi: IOMMU 0000:40:00.2: Completion-Wait loop timed out
_AMD_STUCK = regex(
    rf"(?:[\w-]{{1,32}} {PCI}: |iommu (ivhd\d{{1,3}}): )?AMD-Vi: "
    rf"(?:(?:IOMMU {_DEVICE}: )?Completion-Wait loop timed out"
    r"|Event logged \[(?:ILLEGAL_COMMAND_ERROR|COMMAND_HARDWARE_ERROR) )"
)
_AMD_NO_DEVICE = regex(r"AMD-Vi: Event logged \[Device not attached to domain properly\]")
_AMD_MORE = regex(rf"(?:[\w-]{{1,32}} {PCI}: |{_IVHD})?AMD-Vi: (?:DTE\[\d\]|CMD\[\d\]|Control Reg ?):")
_INTERRUPT, _WRITE = 0x008, 0x020  # EVENT_FLAG_I, EVENT_FLAG_RW (drivers/iommu/amd/amd_iommu_types.h)


def _amd(kind: str, match: re.Match[str]) -> KernelEvent:
    driver, prefixed, name, named, flags = match.groups()
    bits = int(flags or "0", 16)
    if name == "IOTLB_INV_TIMEOUT":
        return event(kind, match, "stuck", named or "")
    # Page faults name the device in the prefix or in a field. In other events the prefix is the IOMMU.
    device, driver = (named, None) if named else (prefixed, driver)
    if bits & _INTERRUPT:
        return event(kind, match, "interrupt_fault", device or "", (("driver", driver),))
    operation = None if flags is None else "write" if bits & _WRITE else "read"
    return event(kind, match, "dma_fault", device or "", (("operation", operation), ("driver", driver)))


# --- Arm SMMU
#
# arm-smmu-v3 arm-smmu-v3.3.auto: event: F_TRANSLATION client: 0000:01:00.0 sid: 0x100 ssid: 0x0 iova: 0x1000 ipa: 0x0
# arm-smmu-v3 arm-smmu-v3.3.auto: event 0x10 received:                    6.12 prints only this
# arm-smmu-v3 arm-smmu-v3.3.auto: CMD_SYNC timeout at 0x00000010 [hwprod 0x00000010, hwcons 0x0000000f]
# arm-smmu-v3 arm-smmu-v3.3.auto: device has entered Service Failure Mode!
_SMMU = r"arm-smmu(?:-v3)? ([\w.:-]{1,40}): "
_ARM = regex(rf"{_SMMU}event: \w{{1,24}} client: (?:{PCI}|\(unassigned sid\)|[^\s]{{1,40}}) sid: 0x")
_ARM_UNNAMED = regex(
    rf"{_SMMU}(?:event 0x[0-9a-f]{{1,2}} received|Unhandled context fault: fsr=|Unexpected global fault"
    r"|Blocked unknown Stream ID )"
)
_ARM_STUCK = regex(
    rf"{_SMMU}(?:CMD_SYNC timeout|CMDQ timeout|CMDQ error \(cons |device has entered Service Failure Mode"
    r"|TLB sync timed out|unexpected global error reported)"
)


# dmar_fault: 655 callbacks suppressed          lib/ratelimit.c: the printing function, and how many lines it dropped
_SUPPRESSED = regex(
    r"(?:dmar_fault|amd_iommu_report_page_fault|amd_iommu_report_rmp_\w{1,16}|arm_smmu_evtq_thread|arm_smmu_dump_event"
    r"|arm_smmu_context_fault|arm_smmu_global_fault): \d{1,10} callbacks suppressed"
)

RULES = (
    Rule("iommu", ("Request device [",), _INTEL, _intel),
    Rule("iommu", ("DMAR:", "dmar: "), _INTEL_MORE, event_builder(DETAIL)),
    Rule("iommu", ("DMAR:",), _INTEL_STUCK, event_builder("stuck")),
    Rule("iommu", ("AMD-Vi: ",), _AMD, _amd, varies=("driver",)),
    Rule("iommu", ("AMD-Vi: ",), _AMD_STUCK, event_builder("stuck", iommu=(1, 2, 3))),
    Rule("iommu", ("AMD-Vi: ",), _AMD_NO_DEVICE, event_builder("dma_fault")),
    Rule("iommu", ("AMD-Vi: ",), _AMD_MORE, event_builder(DETAIL)),
    Rule("iommu", ("arm-smmu",), _ARM, event_builder("dma_fault", pci=2, iommu=1)),
    Rule("iommu", ("arm-smmu",), _ARM_UNNAMED, event_builder("dma_fault", iommu=1)),
    Rule("iommu", ("arm-smmu",), _ARM_STUCK, event_builder("stuck", iommu=1)),
    Rule("iommu", ("callbacks suppressed",), _SUPPRESSED, event_builder("dma_fault")),
)
