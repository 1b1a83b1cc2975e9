"""Tests of lines about memory and processors: machine checks, EDAC, pages with bad data, firmware records."""

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import LINES, fields, messages

from healthd.agent.kernel_log.coalesce import coalesce_events
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.common.model import KernelEvent


def coalesced(text: str) -> list[KernelEvent]:
    """Return the memory and processor events of lines within one second."""
    events = [make_event(RawLine(1000.0, message), "b") for message in messages(text)]
    recent, _, _ = coalesce_events((), [event for event in events if event is not None], 1)
    return [event for event in recent if event.kind == "mce_edac"]


def code(text: str) -> str:
    event = parse(text)
    assert event is not None, text
    assert event.kind == "mce_edac"
    return event.code


CAPTURED = {
    "k0083": ("logged", {}),
    "k0285": ("corrected", {"record": "2", "section": "memory error"}),
    "k0286": ("corrected", {"part": "mc0", "dimm": "unknown memory"}),
    "k0299": ("uncorrected", {"part": "mc0", "dimm": "CPU_SrcID#0_MC#0_Chan#1_DIMM#0"}),
    "k0300": ("page_recovered", {}),
    "k0305": ("fatal", {"bank": "0", "status": "b2000000c0060001"}),
}


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in LINES if row["kind"] == "mce_edac"])
def test_captured_error_is_single_event(row):
    (event,) = coalesced(row["text"])
    assert (event.code, fields(event)) == CAPTURED[row["id"]]


@pytest.mark.parametrize(
    ("status", "polled_code", "exception_code"),
    [
        ("8c00004000010092", "corrected", "corrected"),
        ("dc2040000400011b", "corrected", "corrected"),
        ("be00000000800400", "left_over", "fatal"),
        ("b200000000040151", "left_over", "fatal"),
        ("bd80000000100134", "left_over", "uncorrected"),
        ("9c2030000001085b", "deferred", "deferred"),
    ],
)
def test_machine_check_code_follows_from_status_register(status, polled_code, exception_code):
    for prefix in ("mce: [Hardware Error]: ", "[Hardware Error]: ", "mce: ", ""):
        assert code(f"{prefix}CPU 14: Machine Check: 0 Bank 7: {status}") == polled_code
        assert code(f"{prefix}CPU 14: Machine Check Exception: 0 Bank 7: {status}") == polled_code  # Linux 3.10
        assert code(f"{prefix}CPU 14: Machine Check Exception: 5 Bank 7: {status}") == exception_code
    assert code(f"EDAC sbridge MC0: CPU 0: Machine Check Event: 0 Bank 7: {status}") == polled_code
    assert code("CPU 0: Machine Check Exception: 0000000000000004") == "uncorrected"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mce: [Hardware Error]: Machine check: Processor context corrupt", "fatal"),
        ("mce: [Hardware Error]: Machine check: Data load in unrecoverable area of kernel", "fatal"),
        ("mce: Uncorrected hardware memory error in user-access at 3f1d5c0040", "uncorrected"),
        ("mce: [Hardware Error]: Machine check events logged", "logged"),
        ("[Hardware Error]: Machine check events logged", "logged"),
        ("mce: CMCI storm detected: switching to poll mode", "logged"),
        ("[Hardware Error]: Corrected error, no action required.", "corrected"),
        ("mce: [Hardware Error]: Corrected error, no action required.", "corrected"),
        ("[Hardware Error]: Error Status: Corrected error, no action required.", "corrected"),
        ("[Hardware Error]: Deferred error, no action required.", "deferred"),
        ("[Hardware Error]: Uncorrected, software restartable error.", "uncorrected"),
        ("[Hardware Error]: Uncorrected, software containable error.", "uncorrected"),
        ("[Hardware Error]: System Fatal error.", "left_over"),
        ("mce: CPUs not responding to MCE broadcast (may include false positives): 1-7", "fatal"),
        ("SError Interrupt on CPU12, code 0x00000000be000411 -- SError", "fatal"),
        ("NMI: PCI system error (SERR) for reason b1 on CPU 0.", "pci_parity"),
        ("RAS: Soft-offlining pfn: 0x7740c0", "detail"),
        (
            "[Hardware Error]: CPU:24 (17:31:0) MC17_STATUS[Over|CE|MiscV|AddrV|-|-|SyndV|CECC]: 0xdc2040000400011b",
            "detail",
        ),
        ("mce: [Hardware Error]: TSC 3b8cb60a66 PPIN 11d98332458e4ea9", "detail"),
        ("mce: [Hardware Error]: PROCESSOR 0:50654 TIME 1687470931 SOCKET 0 APIC 0 microcode 2006906", "detail"),
        ("mce: [Hardware Error]: Run the above through 'mcelog --ascii'", "detail"),
    ],
)
def test_parse_reads_machine_check_texts(text, expected):
    assert code(text) == expected


def test_amd_decoder_lines_are_single_event():
    (event,) = coalesced(
        "[Hardware Error]: Uncorrected, software containable error.\n"
        "[Hardware Error]: CPU:24 (17:31:0) MC17_STATUS[-|UE|MiscV|AddrV|-|-|SyndV|UECC]: 0xbc2040000400011b\n"
        "[Hardware Error]: Error Addr: 0x00000007d41b7940\n"
        "[Hardware Error]: Unified Memory Controller Extended Error Code: 0\n"
        "[Hardware Error]: cache level: L3/GEN, tx: GEN, mem-tx: RD\n"
        "mce: [Hardware Error]: Machine check events logged"
    )[:1]
    assert (event.code, event.lines) == ("uncorrected", 5)


@pytest.mark.parametrize(
    ("text", "expected", "part", "dimm"),
    [
        ("MC0: 1 CE memory read error on CPU_SrcID#0 (channel:0 slot:0)", "corrected", "mc0", "CPU_SrcID#0"),
        ("MC12: 262 UE error on any memory (page:0x0 offset:0x0)", "uncorrected", "mc12", "any memory"),
        ("MC0: 1 CE on mc#0csrow#2channel#1 (csrow:2 channel:1)", "corrected", "mc0", "mc#0csrow#2channel#1"),
        ("MC1: 1 UE ie31200 UE on csrow#0 or csrow#1 (csrow:0)", "uncorrected", "mc1", "csrow#0 or csrow#1"),
        ('MC0: CE page 0x6, grain 8, row 0, channel 1, label "DIMM_B1": amd64_edac', "corrected", "mc0", "DIMM_B1"),
        ('MC0: UE page 0x6, grain 8, row 0, labels "DIMM_B1": i3200 UE', "uncorrected", "mc0", "DIMM_B1"),
        ("MC0: UE - no information available: e752x UE log register overflow", "uncorrected", "mc0", None),
        ('MC0: UE row 0, channel-a= 0 channel-b= 1 labels "-": NON_RETRY', "uncorrected", "mc0", None),
        ("amd64 MC3: CE ERROR_ADDRESS= 0x7d41b7940", "corrected", "mc3", None),
        ("DEVICE0: UE: XGene-L1 instance: l2c block: l2c '0'", "uncorrected", "device0", None),
        ("DEVICE1: CE: thunderx-l2c instance: 0 block: N/A 'L2 ECC'", "corrected", "device1", None),
    ],
)
def test_parse_reads_edac_lines_from_all_drivers_and_kernels(text, expected, part, dimm):
    event = parse(f"EDAC {text}")
    assert event is not None
    assert (event.kind, event.code, fields(event).get("part")) == ("mce_edac", expected, part)
    assert dimm is None or fields(event)["dimm"] == dimm


def test_lines_around_edac_error_belong_to_error():
    lines = """\
EDAC sbridge MC1: HANDLING MCE MEMORY ERROR
EDAC sbridge MC1: CPU 1: Machine Check Event: 0 Bank 11: 8c00004f000800c2
EDAC sbridge MC1: TSC 0
EDAC sbridge MC1: ADDR ee30a0000
EDAC sbridge MC1: MISC 900040004001e8c
EDAC sbridge MC1: PROCESSOR 0:306e4 TIME 1519356496 SOCKET 1 APIC 20
EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#1_Ha#0_Chan#0_DIMM#0 (channel:0 slot:0 page:0xee30a0)"""
    assert {event.code for event in coalesced(lines)} == {"corrected"}


def test_edac_pci_error_names_device():
    event = parse("EDAC PCI: Bridge Master Data Parity Error on 0000:00:1c.0")
    assert event is not None
    assert (event.code, event.pci) == ("pci_parity", "0000:00:1c.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Memory failure: 0x7740c0: recovery action for dirty LRU page: Recovered", "page_recovered"),
        ("Memory failure: 0x7740c0: recovery action for huge page: Delayed", "page_recovered"),
        ("Memory failure: 0x7740c0: recovery action for reserved kernel page: Ignored", "page_not_recovered"),
        ("Memory failure: 0x7740c0: recovery action for clean LRU page: Failed", "page_not_recovered"),
        ("MCE 0x7740c0: dirty LRU page recovery: Recovered", "page_recovered"),
        ("MCE 0x7740c0: recovery action for kernel slab page: Ignored", "page_not_recovered"),
        ("Memory failure: 0x7740c0: already hardware poisoned", "detail"),
        ("Memory failure: 0x7740c0: dirty LRU page still referenced by 2 users", "detail"),
        ("soft offline: 0x7740c0: migration failed 1, type 2", "detail"),
        ("soft_offline: 0x7740c0: invalidated", "detail"),
    ],
)
def test_parse_reads_memory_failures(text, expected):
    assert code(text) == expected


@pytest.mark.parametrize(
    "line_start", ["Memory failure: 0x7740c0: Killing", "Memory failure: 0x1: Sending SIGBUS to", "MCE 0x7: Killing"]
)
@pytest.mark.parametrize("name", ["python3", "a b:12", "x:1 due to hard", "Recovered", ": UE"])
def test_parse_names_process_killed_by_memory_failure(line_start, name):
    event = parse(f"{line_start} {name}:4711 due to hardware memory corruption")
    assert event is not None
    assert (event.code, event.pid, event.process) == ("process_killed", 4711, name)


@pytest.mark.parametrize("severity", ["recoverable", "fatal", "corrected", "info"])
def test_firmware_record_is_single_event_with_section(severity):
    block = [
        "Hardware error from APEI Generic Hardware Error Source: 4",
        f"event severity: {severity}",
        f" Error 0, type: {severity}",
        " fru_text: Card01, ChnA, DIMM0",
        "  section_type: memory error",
        "  error_status: 0x0000000000000000",
        "  physical_address: 0x0000000e16677000",
        "  DIMM location: CPU 1 DIMM 5",
    ]
    for prefix in ("{1}[Hardware Error]: ", "[Hardware Error]: {1}"):
        (event,) = coalesced("\n".join(prefix + line for line in block))
        assert (event.code, event.lines) == (severity, 8)
        assert fields(event)["section"] == "memory error"
    assert code(f"{{1}}[Hardware Error]: severity: 2, {severity}") == severity  # Linux 3.10


def test_firmware_record_from_last_boot_has_own_code():
    assert code("BERT: Error records from previous boot:") == "last_boot"
    assert code("[Hardware Error]: event severity: fatal") == "last_boot"
    assert code("[Hardware Error]:  Error 0, type: fatal") == "detail"


@pytest.mark.parametrize(
    "text",
    [
        "EDAC MC: Ver: 3.0.0",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake IMC#0: DEV 0000:3a:0a.0 (INTERRUPT)",
        "EDAC MC0: Removed device 0 for skx_edac",
        "EDAC PCI0: Giving out device to module e752x_edac controller e752x: DEV 0000:00:00.1 (POLLED)",
        "EDAC DEVICE0: Giving out device to module zynqmp_ocm_edac",
        "EDAC i10nm: No hbm memory",
        "EDAC amd64: F17h detected (node 0).",
        "EDAC sbridge:  Ver: 1.1.2 ",
        "EDAC skx MC0: Couldn't find a DIMM",
        "mce: CPU supports 32 MCE banks",
        "mce: Using 20 MCE banks",
        "mce: mce_register_decode_chain fn=sbridge_mce_check_error+0x0/0x92 [sb_edac] pri=2",
        "mce_notify_irq: 14 callbacks suppressed",
        "MCE: In-kernel MCE decoding enabled.",
        "CMCI storm subsided: switching to interrupt mode",
        "ERST: Error Record Serialization Table (ERST) support is initialized.",
        "GHES: APEI firmware first mode is enabled by APEI bit and WHEA _OSC.",
        "HEST: Table parsing has been initialized.",
        "BERT: Total records found: 1",
        "RAS: Correctable Errors collector initialized.",
        "Uhhuh. NMI received for unknown reason 80 on CPU 0.",
        "mcelog: Machine Check",
        "python3[1]: EDAC MC0: 1 UE memory read error on x (y)",
        "a Memory failure: 0x7740c0: recovery action for dirty page: Failed",
    ],
)
def test_parse_ignores_boot_lines_and_quoted_lines(text):
    assert parse(text) is None


STARTS = [
    "EDAC MC0: 1 UE ",
    "EDAC MC0: UE page 0x6, label \"",
    "EDAC DEVICE0: UE: ",
    "mce: [Hardware Error]: CPU 0: Machine Check Exception: ",
    "mce: [Hardware Error]: Machine check: ",
    "Memory failure: 0x7740c0: recovery action for ",
    "Memory failure: 0x7740c0: Killing ",
    "{1}[Hardware Error]: ",
    "{1}[Hardware Error]:   section_type: ",
    "",
]  # fmt: skip
ENDS = [
    "",
    " (",
    ": Recovered",
    ":1 due to hardware memory corruption",
    ' labels "-": ',
    " Machine Check [Hardware Error]",
]


@given(st.sampled_from(STARTS), st.text(st.sampled_from(" ,'()[]:\"on.0x1aD\n-"), max_size=200), st.sampled_from(ENDS))
def test_parse_accepts_any_text(start, middle, end):
    assert parse(start + middle + end) is None or parse(start + middle + end) is not None


@given(st.text(max_size=15), st.integers(1, 4_194_304))
def test_process_name_cannot_forge_pid_or_fault(name, pid):
    event = parse(f"Memory failure: 0x1: Killing {name}:{pid} due to hardware memory corruption")
    if event is not None and event.code == "process_killed":
        assert (event.pid, event.process) == (pid, name)
    else:
        assert event is None or event.code == "detail"


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("piece", [" ", " on ", "a", "a ", "(", "0", ":", '"', "\n"])
def test_parse_is_fast_for_long_line(start, piece):
    assert cpu_seconds(lambda: [parse(start + piece * 50_000 + end) for end in ENDS], 1.0) < 1.0
