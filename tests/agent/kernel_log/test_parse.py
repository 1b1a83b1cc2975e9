"""Tests of parsing kernel lines. Captured lines, with their public sources, are in tests/data/kernel_lines*.jsonl."""

import json
from pathlib import Path

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import captured, events

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.rules.rule import pci_address
from healthd.common.model import KernelEvent

DATA = sorted((Path(__file__).parents[2] / "data").glob("kernel_lines*.jsonl"))
LINES = [json.loads(line) for data in DATA for line in data.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("row", captured("benign", lines=LINES))
def test_parse_ignores_benign_line(row):
    assert events(row["text"]) == []


NAMED = [row for row in LINES if row["id"].startswith("n") and (row["expected"] or {}).keys() & {"pci", "comm"}]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in NAMED])
def test_parse_reads_part_or_process_in_captured_line(row):
    (event,) = (event for event in events(row["text"]) if event.kind == row["kind"])
    expected = row["expected"]
    assert event.pci == expected.get("pci", "")
    assert (event.pid, event.process) == (expected.get("pid"), expected.get("comm"))


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
def test_pci_address_has_sysfs_form(text, pci):
    assert pci_address(text) == pci


@given(st.text())
def test_parse_returns_event_or_none_for_any_text(text):
    assert parse(text) is None or isinstance(parse(text), KernelEvent)


STARTS = ["NVRM: Xid (PCI:0000:3b:00): 74, ", "nvidia-nvswitch0: SXid (PCI:0000:3b:00.0): 20034, ", "NVRM: GPU at "]
STARTS += ["NVRM: The NVIDIA GPU "]
STARTS += ["NVRM: Xid (PCI:0000:3b:00): 145, pid=1, name=", "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action "]


@given(st.sampled_from(STARTS), st.text(st.sampled_from(" ,'()[]<>=0x1aLinkFatal:\n-"), max_size=200))
def test_parse_accepts_any_text_after_driver_prefix(start, suffix):
    assert parse(start + suffix) is None or parse(start + suffix) is not None


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("piece", [" ", ",", "a", "a, ", "(", "0x1 ", "\nNVRM: ", "Link 1 "])
def test_parse_is_fast_for_long_line(start, piece):
    assert cpu_seconds(lambda: parse(start + piece * 50_000), 0.5) < 0.5
