"""Rules for memory and processors: machine checks, EDAC, memory taken offline, firmware reports (APEI).

    kind mce_edac. Fields: part = the name in the line ("mc0", "device1", a PCI address); dimm, bank, section,
    error_type, record, pid, process. Codes:
    corrected                     no data was lost
    logged                        no data was lost; the kernel only reports that it logged something
    deferred                      data is bad, but has not been used yet
    scrubbed                      the memory's scrubber found an uncorrected error in data that was not read yet
    uncorrected                   data is lost
    fatal                         data and the processor's state are lost, and the kernel panics
    left_over                     found in a register without an exception; from the last boot, or harmless
    recoverable, fatal, corrected, info    in a firmware record (`record`): the severity that the firmware reports
    process_killed, page_recovered, page_not_recovered    how the kernel handled a page with bad data
    pci_parity                    PCI parity and system errors, from EDAC's polling or an NMI
    last_boot                     an error from the last boot, which the firmware kept (BERT)
    detail                        a further line about one of these; agent/kernel_log/coalesce.py adds it to the fault

A machine check's status register shows its type: bit 61 (UC) means uncorrected, bit 57 (PCC) means that the processor's
context is corrupt, and AMD's bit 44 means deferred. If there was no exception (MCIP, bit 2 of the global status, is not
set), the register was polled. A polled uncorrected error is usually left over in the register from the last boot (the
kernel reads it when it starts), or is bad memory that a scrubber found before any use. A live error that corrupts the
context raises an exception and a panic.

A scrubber gradually reads all memory. The errors it finds are marked by EDAC's drivers for Intel ("memory scrubbing
error"), by the code of a machine check (binary 0000 1000 1100 xxxx, where bit 12 and each x may be 0 or 1; severity.c
calls it "action optional"), and by the firmware (CPER's memory error type 14).

A firmware record is a block of lines that begin with "{2}[Hardware Error]: ". If its section is a PCIe error, pcie.py
produces events with the same number. Records without a number are from the last boot.

Formats: Linux 3.10 to 7.3: arch/x86/kernel/cpu/mce/{core,severity}.c, drivers/edac/{edac_mc,edac_device,mce_amd,
edac_pci_sysfs}.c and the chips' drivers, mm/memory-failure.c, drivers/firmware/efi/cper.c, drivers/acpi/apei.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import DETAIL, PCI, Rule, event, event_builder
from healthd.common.model import KernelEvent
from healthd.common.text import regex

# --- machine checks

_MCE = r"(?:mce: )?(?:\[Hardware Error\]: )?"
UNCORRECTED, CORRUPT, DEFERRED, MCIP = 1 << 61, 1 << 57, 1 << 44, 1 << 2
SCRUB_MASK, SCRUB = 0xEFF0, 0x00C0  # MCACOD_SCRUBMSK, MCACOD_SCRUB (arch/x86/include/asm/mce.h)

# mce: [Hardware Error]: CPU 0: Machine Check Exception: 4 Bank 0: b2000000c0060001
# mce: [Hardware Error]: CPU 14: Machine Check: 0 Bank 7: 8c00004000010092            (polled)
# EDAC sbridge MC0: CPU 0: Machine Check Event: 0 Bank 7: 8c00004000010092
# CPU 0: Machine Check Exception: 0000000000000004                                    (the oldest)
_MACHINE_CHECK = regex(
    rf"(?:EDAC \w{{1,20}} MC\d{{1,3}}: |{_MCE})CPU ?\d{{1,5}}: Machine Check(?: Exception| Event)?: "
    r"{1,8}([0-9a-f]{1,16})(?: Bank (\d{1,3}): ([0-9a-f]{1,16}))?",
    re.I,
)


def _machine_check(kind: str, match: re.Match[str]) -> KernelEvent:
    overall, bank, status = match.groups()
    bits = int(status, 16) if status else UNCORRECTED
    if bits & UNCORRECTED and int(overall, 16) & MCIP:
        code = "fatal" if bits & CORRUPT else "scrubbed" if bits & SCRUB_MASK == SCRUB else "uncorrected"
    elif bits & UNCORRECTED:
        code = "left_over"
    else:
        code = "deferred" if bits & DEFERRED else "corrected"
    return event(kind, match, code, fields=(("bank", bank), ("status", status)))


# mce: [Hardware Error]: Machine check: Processor context corrupt                     (a panic follows)
# mce: Uncorrected hardware memory error in user-access at 3f1d5c0040
# mce: [Hardware Error]: Machine check events logged
# [Hardware Error]: Uncorrected, software restartable error.                          (mce_amd)
_MCE_MESSAGE = regex(
    rf"{_MCE}(?:Error Status: )?(Machine check: \S|Uncorrected hardware memory error in user-access"
    r"|Memory error not recovered|Machine check events logged|Corrected error, no action|Deferred error, no action"
    r"|Uncorrected, software|System Fatal error|CPUs not responding to MCE|SError Interrupt on CPU"
    r"|(?:CPU \d{1,5}: )?CMCI storm detected)"
)
_MCE_CODES = {
    "Machine check: ": "fatal",
    "CPUs not responding to MCE": "fatal",
    "SError Interrupt on CPU": "fatal",  # arm64
    "Uncorrected hardware memory error in user-access": "uncorrected",
    "Memory error not recovered": "uncorrected",
    "Machine check events logged": "logged",
    "Corrected error, no action": "corrected",
    "Deferred error, no action": "deferred",
    "Uncorrected, software": "uncorrected",
    # The kernel panics before mce_amd prints a live error: this one is left over from the last boot.
    "System Fatal error": "left_over",
}


def _mce_message(kind: str, match: re.Match[str]) -> KernelEvent:
    code = next((code for phrase, code in _MCE_CODES.items() if match[1].startswith(phrase)), "logged")
    return event(kind, match, code)


# --- firmware records, and all other text after "[Hardware Error]:"

# {2}[Hardware Error]: event severity: corrected
# {1}[Hardware Error]: severity: 2, corrected                                         (3.10)
# [Hardware Error]: {3}event severity: recoverable                                    (acpi_extlog)
_NUMBER = r"(?:\{(\d{1,10})\}\[Hardware Error\]:|\[Hardware Error\]: ?(?:\{(\d{1,10})\})?) *"
_SEVERITY = regex(rf"{_NUMBER}(?:event )?severity: (?:\d, )?(recoverable|fatal|corrected|info)\b")
_SECTION = regex(rf"{_NUMBER}section_type: ([\w/ ]{{1,48}})")
# {1}[Hardware Error]:   error_type: 14, scrub uncorrected error
_ERROR_TYPE = regex(rf"{_NUMBER}error_type: (\d{{1,3}}), [\w -]{{1,48}}")
_FURTHER = regex(rf"mce: \[Hardware Error\]:|{_NUMBER}")


def _severity(kind: str, match: re.Match[str]) -> KernelEvent:
    number = match[1] or match[2]
    return event(kind, match, match[3] if number else "last_boot", fields=(("record", number),))


def _section(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, DETAIL, fields=(("record", match[1] or match[2]), ("section", match[3].rstrip())))


_LAST_BOOT = regex(r"BERT: Error records from previous boot:")


# --- EDAC

# EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x... ...)
# EDAC MC0: CE page 0x6, offset 0x80, grain 8, syndrome 0x0, row 0, channel 1, label "DIMM_B1": amd64_edac   (to 3.5)
# EDAC MC0: UE - no information available: ...; EDAC MC0: UE row 0, channel-a= 0 channel-b= 1 labels "-": ...
# "EDAC MC0: 1 UE" may be a process name, but no line that begins with a process name continues like EDAC's.
_EDAC = regex(
    r"EDAC (?:\w{1,20} )?MC(\d{1,3}): (?:\d{1,10} )?(CE|UE)\b(?! ?[(\[:/'])(?:(?! on )[^\n]){0,200}?"
    r"(?: on ((?:(?! \()[^\n]){1,64}) \(|, labels? \"([^\"\n]{1,64})\"|$|(?= - ))"
)
_EDAC_DEVICE = regex(r"EDAC DEVICE(\d{1,3}): (CE|UE): ")
_EDAC_FURTHER = regex(r"EDAC (?:\w{1,20} )?MC(\d{1,3}): (?:HANDLING |TSC |ADDR |MISC |PROCESSOR )")
_EDAC_PCI = regex(
    rf"EDAC PCI(\d{{0,3}}): (?:(?:Bridge )?(?:Signaled System|Master Data Parity|Detected Parity) Error on {PCI}"
    r"|(?:Non-)?Parity Error ctl: )"
)
# NMI: PCI system error (SERR) for reason b1 on CPU 0.
_NMI = regex(r"NMI: (?:PCI system error \(SERR\)|IOCK error)")
_EDAC_CODES = {"CE": "corrected", "UE": "uncorrected"}
_SCRUBBED = ("memory scrubbing error", "scrub uncorrected error")  # Intel's drivers; ghes_edac


def _edac(kind: str, match: re.Match[str]) -> KernelEvent:
    code = _EDAC_CODES[match[2]]
    if code == "uncorrected" and any(phrase in match[0].lower() for phrase in _SCRUBBED):
        code = "scrubbed"
    return event(kind, match, code, fields=(("part", f"mc{int(match[1])}"), ("dimm", match[3] or match[4])))


def _edac_device(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, _EDAC_CODES[match[2]], fields=(("part", f"device{int(match[1])}"),))


# --- pages

# Memory failure: 0x7740c0: recovery action for dirty page: Recovered                 (4.2 and newer)
# MCE 0x7740c0: dirty LRU page recovery: Recovered                                    (3.10)
# Memory failure: 0x7740c0: Sending SIGBUS to python3:4711 due to hardware memory corruption
# A process name is user text of at most 15 characters.
_PAGE = regex(
    r"(?:Memory failure: |MCE )0x[0-9a-f]{1,16}: (?:recovery action for [^:\n]{1,60}: (\w{1,16})"
    r"|[^:\n]{1,60} page recovery: (\w{1,16})"
    r"|(?:Killing|Sending SIGBUS to) ([^\n]{1,16}):(\d{1,10}) due to hardware memory corruption)?"
)
_SOFT_OFFLINE = regex(r"(?:Memory failure: )?[Ss]oft.offline: 0x[0-9a-f]{1,16}: |RAS: Soft-offlining pfn: 0x")


def _page(kind: str, match: re.Match[str]) -> KernelEvent:
    new, old, process, pid = match.groups()
    if pid:
        return event(kind, match, "process_killed", pid=int(pid), process=process)
    result = new or old
    if not result:
        return event(kind, match, DETAIL)
    return event(kind, match, "page_recovered" if result in ("Recovered", "Delayed") else "page_not_recovered")


# Every line of a scanned log is searched for each literal. There are therefore only a few literals, which several
# formats share.
RULES = (
    Rule("mce_edac", ("EDAC ",), _EDAC, _edac),
    Rule("mce_edac", ("EDAC ",), _EDAC_DEVICE, _edac_device),
    Rule("mce_edac", ("EDAC ",), _EDAC_FURTHER, event_builder(DETAIL)),
    Rule("mce_edac", ("EDAC ",), _EDAC_PCI, event_builder("pci_parity", pci=2)),
    Rule("mce_edac", ("NMI: ",), _NMI, event_builder("pci_parity")),
    Rule("mce_edac", ("Machine Check", "[Hardware Error]"), _MACHINE_CHECK, _machine_check, varies=("bank", "status")),
    Rule(
        "mce_edac",
        ("[Hardware Error]", "mce: ", "Machine check", "CMCI storm", "SError Interrupt"),
        _MCE_MESSAGE,
        _mce_message,
    ),
    Rule("mce_edac", ("Memory failure: ", "MCE 0x"), _PAGE, _page),
    Rule("mce_edac", ("offline: 0x", "Soft-offlining"), _SOFT_OFFLINE, event_builder(DETAIL)),
    Rule("mce_edac", ("BERT: ",), _LAST_BOOT, event_builder("last_boot")),
    Rule("mce_edac", ("[Hardware Error]",), _SEVERITY, _severity, varies=("record",)),
    Rule("mce_edac", ("[Hardware Error]",), _SECTION, _section, varies=("record", "section")),
    Rule(
        "mce_edac",
        ("[Hardware Error]",),
        _ERROR_TYPE,
        event_builder(DETAIL, record=(1, 2), error_type=3),
        varies=("record", "error_type"),
    ),
    Rule("mce_edac", ("[Hardware Error]",), _FURTHER, event_builder(DETAIL, record=(1, 2)), varies=("record",)),
)
