"""Tests of counting repeated lines: no fault is lost or invented, and lines of one fault are those of the parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.kernel_log.coalesce import fault_key
from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.repeats import count_repeats, fault_head
from healthd.agent.kernel_log.source import RawLine, merge_repeats
from healthd.nvidia import codes

CORPUS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/kernel_lines.jsonl").read_text().splitlines()]
MESSAGES = sorted(
    {
        found.text.partition("): ")[2].partition(",")[2]
        for row in CORPUS
        for line in row["text"].splitlines()
        if (found := strip_prefix(line, 0.0)) is not None and found.text.startswith("NVRM: Xid (")
    }
)
XID = "NVRM: Xid (PCI:0000:%02x:00): %d, pid=%d, name=p%d, Ch %08x, intr 10000000. MMU Fault"


@pytest.mark.parametrize("number", codes.xid_numbers())
def test_lines_with_same_fault_head_have_same_fault_key(number: int) -> None:
    """Combine each Xid with every further text of a public Xid line."""
    lines = [f"NVRM: Xid (PCI:0000:3b:00): {number},{message}" for message in MESSAGES]
    assert len(lines) > 50
    parsed = {line: parse(line) for line in lines if fault_head(line)}
    events = [event for event in parsed.values() if event is not None]
    assert len(events) == len(parsed)
    # "gpu" is the driver's number of the GPU that the address already names.
    comparable = [replace(event, fields=tuple(item for item in event.fields if item[0] != "gpu")) for event in events]
    assert len({fault_key(event) for event in comparable}) <= 1


def test_xids_with_varying_part_have_no_fault_head() -> None:
    assert [number for number in range(1, 400) if not fault_head(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=1")] == [
        *(74, 144, 145, 146, 147, 148, 149, 150, 154)
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Nov 21 15:00:00 node17 slurmd[812]: NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "Nov 21 15:00:00 node17 user: kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "<12>NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "kern  :warn  : [ 1.000000] user NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "x NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "2026-11-21T15:00:00+00:00 node17 python: NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
    ],
)
def test_count_repeats_ignores_quoted_xid(line: str) -> None:
    assert count_repeats(f"{line}\n".encode() * 3).first == []
    kernel_line = b"NVRM: Xid (PCI:0000:3b:00): 79, pid=2\n"
    first, remaining = count_repeats(f"{line}\n".encode() * 2 + kernel_line * 3)
    assert first == [(kernel_line[:-1], 3)], "also if the program quotes the repeated line"
    assert remaining == f"{line}\n".encode() * 2


PREFIXES = (
    "",
    "[  123.456789] ",
    "Nov  1 15:00:00 n1 kernel: [123.456789] ",
    "2026-11-21T15:00:00.123456+00:00 n1 kernel: ",
)
LINES = st.one_of(
    st.builds(
        lambda prefix, gpu, number, pid, name: (prefix + XID % (gpu, number, pid, name, pid * 7)).encode(),
        st.sampled_from(PREFIXES),
        st.integers(0, 7),
        st.sampled_from((13, 31, 79, 95, 149)),
        st.integers(1, 99999),
        st.integers(0, 9),
    ),
    st.binary(max_size=80).map(lambda data: data.replace(b"\n", b"")),
    st.sampled_from([b"Nov 21 15:00:00 n1 sshd[1]: NVRM: Xid (PCI:0000:01:00): 79, pid=1", b"usb 1-1: new device"]),
)


@given(st.lists(LINES, max_size=60))
def test_count_repeats_counts_every_line_once(lines: list[bytes]) -> None:
    first, remaining = count_repeats(b"".join(line + b"\n" for line in lines))
    other_lines = remaining.split(b"\n")[:-1]
    assert sum(count for _, count in first) + len(other_lines) == len(lines)
    for line, count in first:
        assert line in lines
        assert count == sum(fault_text(input_line) == fault_text(line) for input_line in lines)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 74, pid=1, name=a, NVLink: fatal error detected on link 2(0x0, 0x0, 0x0)",
        "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Fatal, Link 30 Minion Link DLREQ interrupt",
        "pcieport 0000:15:01.0: AER: Corrected error received: 0000:18:00.0",
        "nvidia 0000:18:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    ],
)
def test_count_repeats_counts_equal_lines_without_fault_head(text: str) -> None:
    lines = b"".join(
        f"Nov  1 15:00:00 n1 kernel: [  12.{microseconds:06}] {text}\n".encode() for microseconds in range(1000)
    )
    longer_line = f"Nov  1 15:00:00 n1 kernel: [  13.000000] {text}, and more\n".encode()
    first, remaining = count_repeats(longer_line + lines)
    assert [(message(line), count) for line, count in first] == [(f"{text}, and more", 1), (text, 1000)]
    assert remaining == b""


def test_count_repeats_keeps_state_order() -> None:
    states = [b"mlx5_core 0000:1b:00.0 ib0: Link down\n", b"mlx5_core 0000:1b:00.0 ib0: Link up\n"]
    assert count_repeats(b"".join(states * 100)).first == []


def fault_text(line: bytes) -> str:
    text = message(line)
    return fault_head(text) or text


def message(line: bytes) -> str:
    stripped = strip_prefix(line.decode("utf-8", "replace"), 0.0)
    return stripped.text if stripped is not None else ""


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from((13, 31, 149)), st.floats(0, 20)), max_size=40))
def test_merge_repeats_keeps_line_count_per_fault(faults: list[tuple[int, int, float]]) -> None:
    lines = [RawLine(at, XID % (gpu, number, 7, 1, number)) for gpu, number, at in faults]
    merged = merge_repeats(lines)
    assert sum(line.lines for line in merged) == len(lines)
    assert {fault_head(line.text) or line.text for line in merged} == {
        fault_head(line.text) or line.text for line in lines
    }
    for line in merged:
        assert line.last_time - line.time <= 1.0


def test_merge_repeats_keeps_last_state_last() -> None:
    down, up = "nfs: server 10.0.0.5 not responding, still trying", "nfs: server 10.0.0.5 OK"
    lines = [RawLine(1.0, text) for text in (down, down, up, down)]
    assert [(line.text, line.lines) for line in merge_repeats(lines)] == [(down, 2), (up, 1), (down, 1)]
