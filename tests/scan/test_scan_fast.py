"""Fast paths of `healthd scan`: storms, search with re2, any block size. The results equal those of single lines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from healthd.cli.scan import correlate_all
from healthd.scan import candidates, messages
from healthd.scan.events import events
from healthd.scan.findings import event_json, judge
from healthd.scan.lines import Block, Tally
from healthd.scan.log_file import read_blocks

ROOT = Path(__file__).parents[2]
NOW = 1_760_000_000.0
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
LINK = "NVRM: Xid (PCI:0000:18:00): 74, pid=1, name=a, NVLink: fatal error detected on link 2(0x0, 0x0, 0x10000)"
NUMBERS = json.dumps(list(XID.encode()))
TEXTS = [
    XID,
    XID.replace("18:00", "2a:00"),
    LINK,
    "overlayfs: failed to resolve '/zz",
    "usb 1-1: new high-speed USB device",
    f"message repeated 3 times: [ {XID}]",
    f"[   10.000002] {XID}",
    "mlx5_core 0000:5c:00.0 ib0: Link down",
]
PREFIXES = [
    "",
    " " * 15,
    "[   {s:2}.{u:06}] ",
    "Mar 29 15:38:{s:02} gpu-1 kernel: ",
    "Mar 29 15:38:{s:02} gpu-1 kernel: [   {s:2}.{u:06}] ",
    "Mar 29 15:38:12 gpu-2 kernel: [   {s:2}.{u:06}] ",
    "2025-03-29T15:38:{s:02}+01:00 gpu-1 kernel: [   {s:2}.{u:06}] ",
    "2025-03-29T15:38:{s:02}.{u:06}+01:00 gpu-1 kernel: [   {s:2}.{u:06}] ",
    "Mar 29 15:38:{s:02} gpu-1 python3[4]: ",
    "gpu-1: [   {s:2}.{u:06}] ",
    "<3>[   {s:2}.{u:06}] ",
]


@cache
def correlate() -> Any:
    return correlate_all()


def scan_blocks(blocks: Iterator[Block]) -> tuple[list[dict[str, Any]], Tally]:
    tally = Tally()
    return [event_json(judged) for judged in judge(events(blocks, NOW, tally), correlate())], tally


def line_by_line(log: bytes) -> tuple[list[dict[str, Any]], Tally]:
    """Scan each line separately, without search across lines and without storm detection."""
    whole = [line for block in read_blocks(io.BytesIO(log), 1 << 20) for line in block.lines]
    return scan_blocks(Block.from_lines(number, [line]) for number, line in enumerate(whole, 1))


@st.composite
def storms(draw: st.DrawFn) -> list[str]:
    """Generate repetitions of a line, with times that rise, stay equal or fall."""
    prefix, text = draw(st.sampled_from(PREFIXES)), draw(st.sampled_from(TEXTS))
    second, micro = draw(st.integers(10, 12)), draw(st.sampled_from([0, 1, 999_990]))
    lines = []
    for step in draw(st.lists(st.sampled_from([1, 1, 1, 1, 0, -1, 700_000]), min_size=1, max_size=12)):
        micro = max(0, micro + step)
        lines.append(prefix.format(s=second + micro // 1_000_000, u=micro % 1_000_000) + text)
    return lines


OTHER_LINES = st.sampled_from(
    [
        "",
        "x",
        "Mar 29 15:38:12 gpu-1 sshd[4711]: Accepted publickey for alice from 10.1.2.3 port 22",
        f"Mar 29 15:38:12 gpu-1 sshd[4711]: {XID}",
        '{"_TRANSPORT":"kernel","MESSAGE":' + NUMBERS + "}",
        '{"_TRANSPORT":"kernel","_HOSTNAME":"Xid (","MESSAGE" : ' + NUMBERS + "}",
        f'{{"_TRANSPORT":"kernel","MESSAGE":"{XID}"}}',
        '"MESSAGE":[1]',
        "[   99.000000] usb 1-1: another boot is near",
        "[    1.000000] Linux version 6.1",
    ]
)
LOGS = st.lists(storms() | OTHER_LINES.map(lambda line: [line]), max_size=8).map(
    lambda parts: "\n".join(line for part in parts for line in part).encode()
)
# Alternating faults of one part, with detail lines: the fault of a detail line depends on the lines before it.
ALTERNATING = [
    "nvme nvme1: frozen state error detected, reset controller",
    "nvme nvme1: I/O 775 QID 2 timeout, aborting",
    "nvme nvme1: Abort status: 0x6",
    "{1}[Hardware Error]: event severity: corrected",
    "{2}[Hardware Error]: event severity: corrected",
    XID,
]
RISING = "\n".join(f"[   10.{micro:06}] {XID}" for micro in (1, 2, 3, 3, 4, 2, 5))


@pytest.mark.parametrize("search", ["skeletons", "re2"])
@given(log=LOGS, size=st.integers(40, 4000))
@example(log=RISING.encode(), size=4000)
@example(log=f"[   10.000003] overlayfs: x\n{RISING}".encode(), size=4000)
def test_fast_paths_equal_scan_of_single_lines(search: str, log: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "BLOCKS_WITHOUT_RE2", 0 if search == "re2" else -1)
        found, tally = scan_blocks(read_blocks(io.BytesIO(log), size))
    expected, plain = line_by_line(log)
    assert found == expected
    assert (tally.lines, tally.kernel) == (plain.lines, plain.kernel)


@pytest.mark.parametrize("search", ["skeletons", "re2"])
@pytest.mark.parametrize("room", [200, candidates.SKELETONS_BYTES])
def test_fast_paths_equal_single_lines_for_captured_lines(
    monkeypatch: pytest.MonkeyPatch, search: str, room: int
) -> None:
    """This includes a table of skeletons that repeatedly becomes full."""
    rows = (ROOT / "tests/data/kernel_lines.jsonl").read_text("utf-8").splitlines()
    usual = "Mar 29 15:38:12 gpu-1 sshd[{}]: Accepted publickey for alice from 10.1.2.3 port {} ssh2"
    text = "\n".join(f"{usual.format(number, number)}\n{json.loads(row)['text']}" for number, row in enumerate(rows))
    monkeypatch.setattr(candidates, "BLOCKS_WITHOUT_RE2", 0 if search == "re2" else -1)
    expected, _ = line_by_line(text.encode())
    monkeypatch.setattr(candidates, "SKELETONS_BYTES", room)
    assert len(expected) > 100
    for size in (1000, 1 << 20):
        assert scan_blocks(read_blocks(io.BytesIO(text.encode()), size))[0] == expected


def test_re2_search_finds_each_literal_with_its_line() -> None:
    search = candidates.make_re2_search()
    assert search is not None, "google-re2 is in the extra `dev`"
    for literal in (*candidates.rule_literals(), *candidates.IN_NUMBERS):
        text = b"\xff\x00 first\n\nbefore " + literal.encode() + b" behind\nlast"
        ((start, end),) = search(text, 0)
        assert text[start:end] == b"before " + literal.encode() + b" behind"


@pytest.mark.parametrize(
    "other_module", [SimpleNamespace(), SimpleNamespace(Options=None), SimpleNamespace(compile=len)]
)
def test_re2_search_is_none_for_another_package(monkeypatch: pytest.MonkeyPatch, other_module: object) -> None:
    """pyre2 and fb-re2 also have a module re2, but without Options."""
    monkeypatch.setitem(sys.modules, "re2", other_module)  # type: ignore[arg-type]
    assert candidates.make_re2_search() is None


def test_scan_without_re2_gives_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    assert candidates.make_re2_search() is None
    monkeypatch.setattr(candidates, "BLOCKS_WITHOUT_RE2", 0)
    assert scan_blocks(read_blocks(io.BytesIO(RISING.encode()))) == line_by_line(RISING.encode())


@given(texts=st.lists(st.sampled_from(ALTERNATING), max_size=12))
def test_small_message_table_changes_no_event(texts: list[str]) -> None:
    log = "".join(f"[   10.{micro:06}] {text}\n" for micro, text in enumerate(texts)).encode()
    expected, _ = scan_blocks(read_blocks(io.BytesIO(log)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "MESSAGES_BYTES", 1)
        assert scan_blocks(read_blocks(io.BytesIO(log)))[0] == expected
