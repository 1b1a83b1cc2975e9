"""What lines of the kernel say. Captured lines: tests/data/kernel_lines.jsonl, each with its public source."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.kernel_lines.rule import pci_address
from healthd.kernel_parse import parse
from healthd.kernel_prefix import strip_prefix
from healthd.model import KernelEvent

DATA = (Path(__file__).parent / "data/kernel_lines.jsonl").read_text("utf-8")
LINES = [json.loads(line) for line in DATA.strip().split("\n")]

# A program's text that quotes an Xid is not the driver's line, wherever in it the Xid stands.
QUOTED = {"k0023", "k0061", "k0062"}
# Firmware-first PCIe errors have another form, which no rule reads yet.
FIRMWARE_FIRST = {"k0281", "k0282", "k0284"}


def events(text: str) -> list[KernelEvent]:
    stripped = [strip_prefix(line, time.time()) for line in text.split("\n")]
    return [event for s in stripped if s is not None and (event := parse(s.text)) is not None]


def captured(*kinds: str) -> list[object]:
    return [pytest.param(row, id=row["id"]) for row in LINES if row["kind"] in kinds]


def fields(event: KernelEvent) -> dict[str, str]:
    return dict(event.fields)


@pytest.mark.parametrize("row", captured("xid"))
def test_a_captured_xid_is_read_with_its_gpu_and_process(row):
    expected = row["expected"]
    if row["id"] in QUOTED:
        assert events(row["text"]) == []
        return
    (event,) = events(row["text"])
    assert (event.kind, event.code, event.pci) == ("xid", str(expected["xid"]), pci_address(expected["pci"]))
    unknown = (None, "<unknown>")
    assert event.pid == (None if expected["pid"] in unknown else int(expected["pid"]))
    assert event.process == (None if expected["name"] in unknown else expected["name"])
    for name in ("link", "unit", "intr_info", "error_status"):
        if name in expected:
            assert fields(event)[name] == str(expected[name])


@pytest.mark.parametrize("row", captured("sxid"))
def test_a_captured_sxid_is_one_event_and_its_further_lines_are_none(row):
    expected = row["expected"]
    if "Severity 0 Engine" in row["text"] or "Data {" in row["text"]:
        assert events(row["text"]) == []
        return
    (event,) = events(row["text"])
    assert (event.kind, event.code, event.pci) == ("sxid", str(expected["sxid"]), expected["pci"])
    assert fields(event)["switch"] == str(expected["nvswitch"])
    assert fields(event).get("fatal") == {"Fatal": "true", "Non-fatal": "false", None: None}[expected["severity"]]
    assert fields(event).get("link") == (None if expected["link"] is None else str(expected["link"]))


@pytest.mark.parametrize("row", captured("benign", "gsp", "nvlink"))
def test_a_line_without_a_fault_is_no_event(row):
    assert events(row["text"]) == []


@pytest.mark.parametrize("row", captured("pcie_aer"))
def test_captured_pcie_errors_are_read_with_their_severity_and_device(row):
    found = events(row["text"])
    expected = row["expected"]
    severity = expected.get("aer_severity")
    says_so = "severity=" in row["text"] or "error message received" in row["text"] or "error received" in row["text"]
    if not says_so or row["id"] in FIRMWARE_FIRST:
        assert found == []
        return
    code = "corrected" if severity.startswith("Correct") else "nonfatal" if "Non-Fatal" in severity else "fatal"
    assert {(event.kind, event.code) for event in found} == {("pcie_aer", code)}
    assert expected["device"] in {event.pci for event in found}


def test_a_link_that_goes_down_in_a_hotplug_slot_names_port_and_slot():
    (event,) = events("[ 85.201433] pcieport 0004:00:00.0: pciehp: Slot(41): Link Down")
    assert event == KernelEvent("pcie_hotplug", "link_down", "0004:00:00.0", text=event.text, fields=(("slot", "41"),))
    (old,) = events("pciehp 0000:00:1c.0:pcie004: Slot(0): Link Down")
    assert (old.kind, old.pci) == ("pcie_hotplug", "0000:00:1c.0")
    assert events("pcieport 0004:00:00.0: pciehp: Slot(41): Link Up") == []
    assert events("pcieport 0004:00:00.0: pciehp: Slot(41): Link Down/Up ignored (recovered by DPC)") == []


def test_a_gpu_that_cannot_be_initialised_is_named():
    (event,) = events("[  101.209077] NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168)")
    assert (event.code, event.pci, fields(event)) == ("rm_init_failed", "0000:a1:00.0", {"status": "0x62:0x40:2168"})
    (old,) = events("NVRM: RmInitAdapter failed! (0x26:0xffff:1096)")
    assert (old.code, old.pci) == ("rm_init_failed", "")


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU at 0000:01:00.0 has fallen off the bus.",
        "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:01:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:1e07)\n"
        "NVRM: installed in this system has fallen off the bus and is not responding to commands.",
    ],
)
def test_a_gpu_that_fell_off_the_bus_is_found_without_an_xid(text):
    event = parse(text)
    assert event is not None
    assert (event.kind, event.pci) == ("gpu_fallen_off_bus", "0000:01:00.0")


def test_a_lost_gpu_whose_address_stands_on_another_line_is_still_lost():
    event = parse("NVRM: fallen off the bus and is not responding to commands.")
    assert event is not None
    assert (event.kind, event.pci) == ("gpu_fallen_off_bus", "")


@pytest.mark.parametrize(
    ("text", "pci"),
    [
        ("0000:3B:00", "0000:3b:00.0"),
        ("PCI:0008:01:00", "0008:01:00.0"),
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:03:00.1", "0000:03:00.1"),
        ("0001:00", "0000:01:00.0"),
        ("3b:00.0", "0000:3b:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0000:10:1c", "0000:10:1c.0"),
        ("0000:01:20", ""),
        ("0000:XX:00", ""),
        ("", ""),
    ],
)
def test_addresses_are_written_as_in_sysfs(text, pci):
    assert pci_address(text) == pci


def test_a_masked_address_is_no_address_but_the_xid_counts():
    event = parse("NVRM: Xid (PCI:XXXX:XX:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    assert event is not None
    assert (event.code, event.pci) == ("79", "")


@pytest.mark.parametrize(
    ("rest", "pid", "process"),
    [
        ("79, pid=12, name=python3, GPU has fallen off the bus.", 12, "python3"),
        ("79, pid='12', name='python3', GPU has fallen off the bus.", 12, "python3"),
        ("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", None, None),
        ("79, pid=<unknown>, name=<unknown>, GPU has fallen off the bus.", None, None),
        ("43, pid=12, name=a, b, Ch 00000008", 12, "a, b"),
        ("43, pid=12, name=Plex Media Serv, Ch 00000008", 12, "Plex Media Serv"),
        ("43, pid=12, name='a' \"b\", Ch 00000008", 12, "'a' \"b\""),
        ("43, pid=12, name=nvc:[driver], Ch 00000008", 12, "nvc:[driver]"),
        ("79, GPU has fallen off the bus.", None, None),
        ("79", None, None),
        ("79 GPU has fallen off the bus.", None, None),
    ],
)
def test_process_names_with_blanks_quotes_and_commas(rest, pid, process):
    event = parse(f"NVRM: Xid (PCI:0000:3b:00): {rest}")
    assert event is not None
    assert (event.pid, event.process) == (pid, process)


def test_a_process_name_cannot_pretend_another_code_or_gpu():
    event = parse("NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=): 79, x, Graphics Exception")
    assert event is not None
    assert (event.code, event.pci) == ("13", "0000:3b:00.0")


@pytest.mark.parametrize(
    "text",
    [
        "myprog: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/NVRM: Xid (PCI:0000:3b:00): 79, x",
        "NVRM: Xid (43, pid: 5678): ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR",
        "NVRM: Xid (PCI:0000:3b:00): , pid=1",
        "NVRM: Xid (PCI:0000:3b:00): 79.5",
        "NVRM: Xid (PCI:0000:3b:00): 99999999",
    ],
)
def test_what_only_looks_like_an_xid_is_none(text):
    assert parse(text) is None


def test_a_mig_instance_is_kept():
    event = parse("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:02): 94, pid=7194, Contained: CE User Channel (0x9).")
    assert event is not None
    assert event.pci == "0000:01:00.0"
    assert fields(event) == {"gpu_instance": "05", "compute_instance": "02"}


def test_the_recovery_action_is_read_by_its_number_not_its_label():
    event = parse("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0xa (PF FLR)")
    assert event is not None
    assert fields(event) == {"recovery_from": "0", "recovery_to": "10"}


def test_an_nvlink_error_names_its_link_and_what_caused_it():
    event = parse(
        "NVRM: Xid (PCI:0000:b9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link "
        "6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0) caused by previous Xid 45"
    )
    assert event is not None
    assert fields(event) == {"link": "6", "fatal": "true", "register": "0x10000", "caused_by": "45"}


def test_an_injected_line_that_journald_split_is_still_read():
    event = parse("Xid (PCI:0000:3b:00): 79, pid=1, name=a, GPU has fallen off the bus.")
    assert event is not None
    assert (event.kind, event.code) == ("xid", "79")


@given(st.text())
def test_any_text_is_an_event_or_none(text):
    assert parse(text) is None or isinstance(parse(text), KernelEvent)


STARTS = ["NVRM: Xid (PCI:0000:3b:00): 74, ", "nvidia-nvswitch0: SXid (PCI:0000:3b:00.0): 20034, ", "NVRM: GPU at "]
STARTS += ["nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=", "NVRM: The NVIDIA GPU "]
STARTS += ["NVRM: Xid (PCI:0000:3b:00): 145, pid=1, name=", "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action "]


@given(st.sampled_from(STARTS), st.text(st.sampled_from(" ,'()[]<>=0x1aLinkFatal:\n-"), max_size=200))
def test_the_rest_of_a_driver_line_may_be_anything(start, rest):
    assert parse(start + rest) is None or parse(start + rest) is not None


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("piece", [" ", ",", "a", "a, ", "(", "0x1 ", "\nNVRM: ", "Link 1 "])
def test_a_very_long_line_takes_no_longer_than_its_length(start, piece):
    began = time.process_time()
    parse(start + piece * 50_000)
    assert time.process_time() - began < 0.5
