"""The daemon and `healthd scan` evaluate a kernel line in the same way.

Every captured line is read by both, without other knowledge of the machine. Codes, severities and parts must agree.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import BOOT
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.conditions import intake
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.rules.rule import pci_address
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings import registry
from healthd.cli.scan import correlate_all
from healthd.common.model import Inventory, KernelEvent, Severity
from healthd.scan import coupled_events
from healthd.scan.events import events
from healthd.scan.findings import judge
from healthd.scan.lines import Block, Tally

DATA = Path(__file__).parents[1] / "data"
FILES = [*sorted(DATA.glob("kernel_lines*.jsonl")), DATA / "peer_lines.jsonl"]
ROWS: list[dict[str, Any]] = [json.loads(line) for file in FILES for line in file.read_text("utf-8").splitlines()]
LISTENERS = [(check, check.config()) for check in registry.built_in_checks().values() if check.reads_kernel_log]
CORRELATE = correlate_all()
# Code, severity and part. INFO findings open no condition that users see.
Assessment = tuple[str, Severity, str]
# Tests of gpud put a date in brackets before a host. Only scan reads this form, and the daemon has no such source.
SCAN_ONLY_PREFIX = "] ny2g1r12hh2 kernel: "


def by_scan(text: str) -> set[Assessment]:
    block = Block.from_lines(1, [line.encode() for line in text.split("\n")])
    found = judge(events([block], time.time(), Tally()), CORRELATE)
    return {
        (judged.code, judged.severity, judged.meaning.part)
        for judged in found
        if judged.severity > Severity.INFO and not judged.unproven
    }


def by_daemon(text: str) -> set[Assessment]:
    stripped = [strip_prefix(line.rpartition(SCAN_ONLY_PREFIX)[2], time.time()) for line in text.split("\n")]
    read = [make_event(RawLine(1000.0, each.text), BOOT) for each in stripped if each is not None]
    incoming = [event for event in read if event is not None]
    ledger = intake.take_kernel_events(Ledger(boot_id=BOOT, inventory=Inventory()), incoming, LISTENERS, 1000.0).ledger
    return {(each.code, each.severity, each.subject) for each in ledger.conditions if each.severity > Severity.INFO}


def same_part(part: str, subject: str) -> bool:
    """Return True if both name one part. If the daemon names none, scan has a word of the line ("CPU18")."""
    return part == subject or (not subject and not pci_address(part))


def differences(text: str) -> list[Assessment]:
    """Return the assessments that only one of them makes.

    The daemon keeps the worst of several lines about one disk, and scan returns each line: these count unless they are
    worse."""
    scanned, daemon = by_scan(text), by_daemon(text)
    only_daemon = [
        assessment
        for assessment in daemon
        if not any(
            assessment[:2] == counterpart[:2] and same_part(counterpart[2], assessment[2]) for counterpart in scanned
        )
    ]
    only_scan = [
        assessment
        for assessment in scanned
        if not any(
            same_part(assessment[2], counterpart[2])
            and assessment[1] <= counterpart[1]
            and (assessment[0] == counterpart[0] or assessment[0].startswith("block_device/"))
            for counterpart in daemon
        )
    ]
    return only_daemon + only_scan


def test_every_captured_line_gives_same_result_in_daemon_and_scan():
    assert len(ROWS) > 1200
    assert {row["text"]: found for row in ROWS if (found := differences(row["text"]))} == {}


# A firmware-first PCIe error as dmesg shows it (github.com/ovro-lwa/lwa-issues/issues/117), after an error of a DIMM.
UE = (
    "[11189.970968] EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0 "
    "page:0xb757589 offset:0x140 grain:32 -  OVERFLOW err_code:0101:0092 socket:1 imc:1 rank:0 bg:3 ba:0 row:1a1e8 "
    "col:180)"
)
RECORD = """\
[11219.196524] {1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 1
[11219.196558] {1}[Hardware Error]: event severity: recoverable
[11219.196576] {1}[Hardware Error]:  Error 0, type: recoverable
[11219.196591] {1}[Hardware Error]:   section_type: PCIe error
[11219.196606] {1}[Hardware Error]:   port_type: 0, PCIe end point
[11219.196622] {1}[Hardware Error]:   version: 3.0
[11219.196636] {1}[Hardware Error]:   command: 0x0546, status: 0xc110
[11219.196653] {1}[Hardware Error]:   device_id: 0000:5e:00.0
[11219.196668] {1}[Hardware Error]:   slot: 9
[11219.196673] mce: [Hardware Error]: Machine check events logged
[11219.196680] {1}[Hardware Error]:   secondary_bus: 0x00
[11219.196684] {1}[Hardware Error]:   vendor_id: 0x144d, device_id: 0xa808
[11219.196715] EDAC skx MC3: HANDLING MCE MEMORY ERROR"""
PCIE_ERROR = ("pcie_aer/nonfatal", Severity.WARNING, "0000:5e:00.0")
DIMM = ("memory_edac/uncorrected", Severity.CRITICAL, "mc3")


@pytest.mark.parametrize("read", [by_scan, by_daemon])
def test_firmware_record_of_a_pcie_error_names_the_device_and_is_no_machine_check(read):
    assert read(RECORD) == {PCIE_ERROR}
    assert read(f"{UE}\n{RECORD}") == {DIMM, PCIE_ERROR}


@pytest.mark.parametrize("read", [by_scan, by_daemon])
def test_second_firmware_record_is_a_separate_fault(read):
    second = RECORD.replace("{1}", "{2}").replace("5e:00.0", "86:00.0").replace("11219", "11220")
    assert {part for _, _, part in read(f"{RECORD}\n{second}")} == {"0000:5e:00.0", "0000:86:00.0"}


@pytest.mark.parametrize("read", [by_scan, by_daemon])
def test_failed_recovery_is_a_fault_only_without_a_preceding_error(read):
    error = (
        "pcieport 0000:80:1b.4: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer, (Receiver ID)"
    )
    failed = "pcieport 0000:80:1b.4: AER: device recovery failed"
    assert {code for code, _, _ in read(f"[   10.000000] {failed}")} == {"pcie_aer/not_recovered"}
    error_and_recovery = f"[   10.000000] {error}\n[   11.000000] {failed}"
    assert {code for code, _, _ in read(error_and_recovery)} == {"pcie_aer/nonfatal"}


@pytest.mark.parametrize("read", [by_scan, by_daemon])
def test_iommu_lines_without_device_add_no_fault_to_one_with_device(read):
    fault = "DMAR: [DMA Write NO_PASID] Request device [00:14.0] fault addr 0x1000 [fault reason 0x05] PTE Write access"
    suppressed = "dmar_fault: 655 callbacks suppressed"
    assert read(f"[   10.000000] {fault}\n[   12.000000] {suppressed}") == {
        ("iommu/dma_fault", Severity.WARNING, "0000:00:14.0")
    }


COUPLED = sorted(
    {
        found.text
        for row in ROWS
        for line in (*row["text"].split("\n"), *RECORD.split("\n"), UE)
        if (found := strip_prefix(line, 0.0)) is not None
        and (event := parse(found.text)) is not None
        and event.kind in coupled_events.KINDS
    }
)


@given(st.lists(st.sampled_from(COUPLED), min_size=1, max_size=5))
def test_any_coupled_lines_give_same_result_in_daemon_and_scan(lines):
    assert differences("\n".join(f"[   10.00000{number}] {line}" for number, line in enumerate(lines))) == []


FIELDS = st.lists(
    st.sampled_from([("record", "{1}"), ("record", "{2}"), ("part", "CPU0"), ("reporter", "0000:00:01.0")]), max_size=2
)
EVENTS = st.builds(
    KernelEvent,
    kind=st.sampled_from([*sorted(coupled_events.KINDS), "xid"]),
    code=st.sampled_from(["", "recovery_failed", "fatal", "nonfatal", "corrected"]),
    pci=st.sampled_from(["", "0000:1b:00.0"]),
    fields=FIELDS.map(tuple),
    observed=st.booleans(),
)


@given(event=EVENTS, other=EVENTS, apart=st.floats(-100, 100))
def test_event_that_cannot_be_coupled_is_coupled_with_none(event, other, apart):
    if (
        event.kind in coupled_events.KINDS
        and other.kind in coupled_events.KINDS
        and coupled_events.are_coupled(event, other, apart)
    ):
        assert coupled_events.may_be_coupled(event)
