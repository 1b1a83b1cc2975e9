"""`healthd scan`: a line that may be a further line of another message, or quoted by a program, is unproven."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.scan import correlate_all
from healthd.scan import continuation
from healthd.scan import events as scan
from healthd.scan import findings as scan_judged
from healthd.scan.continuation import LEADING_BLANKS, MAX_FOREIGN_LINES, MAX_LINES, RECORD_BYTES, PrecedingLines
from healthd.scan.lines import Block, Tally
from healthd.scan.quoted import begins_as_the_kernels, find_dated_quote, find_quoted
from tests.scan.test_scan import NOW, XID, run_scan, scanned

UE = (
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x1 offset:0x0 grain:32)"
)
OVL = "overlayfs: failed to resolve '/zz"


def summaries(*lines: str) -> list[tuple[int, str, str, bool]]:
    """Return (line, code, severity, unproven) of each event."""
    return [
        (judged.log_event.line, judged.code, judged.severity.name.lower(), judged.unproven)
        for judged in scanned(*lines)
    ]


def is_a_kernel_log(*lines: str) -> bool:
    tally = Tally()
    for _ in scan.events([Block.from_lines(1, [line.encode() for line in lines])], NOW, tally):
        pass
    return tally.kernel


# One record, "overlayfs: failed to resolve '/zz", a line break, an Xid, as written by util-linux 2.38 (dmesg, -T, -x,
# --raw, -H), by syslog(2) through dmesg -S, imklog and a console, and by journalctl: the prefix of the previous record,
# of the first line, and of the second line.
WRITTEN = [
    pytest.param("[  683.000001] ", "[  684.296997] ", "               ", id="dmesg"),
    pytest.param("[Sun Nov 22 08:51:08 2026] ", "[Sun Nov 22 08:51:09 2026] ", " " * 27, id="dmesg -T"),
    pytest.param("kern  :info  : [  683.000001] ", "kern  :err   : [  684.296997] ", " " * 30, id="dmesg -x"),
    pytest.param("<6>[  683.000001] ", "<3>[  684.296997] ", " " * 18, id="dmesg --raw"),
    pytest.param("[  +0.001000] ", "[  +0.001487] ", " " * 14, id="dmesg -H"),
    pytest.param("[  683.000001] ", "[  684.296997] ", "", id="dmesg before 2.36"),
    pytest.param("[Sun Nov 22 08:51:08 2026] ", "[Sun Nov 22 08:51:09 2026] ", "", id="dmesg -T before 2.36"),
    pytest.param("[  683.000001] ", "[  684.296997] ", "[  684.296997] ", id="dmesg -S, console"),
    pytest.param("<6>[  683.000001] ", "<3>[  684.296997] ", "<3>[  684.296997] ", id="dmesg -S --raw, pstore"),
    pytest.param(
        "2026-11-22T08:51:08,296997+00:00 ",
        "2026-11-22T08:51:09,296997+00:00 ",
        "2026-11-22T08:51:09,296997+00:00 ",
        id="dmesg -S --time-format=iso",
    ),
    pytest.param(
        "Nov 22 08:51:08 node17 kernel: [  683.000001] ",
        "Nov 22 08:51:09 node17 kernel: [  684.296997] ",
        "Nov 22 08:51:10 node17 kernel: [  684.296997] ",
        id="imklog",
    ),
    pytest.param("node17: [  683.000001] ", "node17: [  684.296997] ", "node17: [  684.296997] ", id="pdsh dmesg -S"),
    pytest.param(
        "Nov 22 08:51:08 node17 kernel: ", "Nov 22 08:51:09 node17 kernel: ", " " * 31, id="journalctl, short"
    ),
    pytest.param(
        "[  683.000001] node17 kernel: ", "[  684.296997] node17 kernel: ", " " * 30, id="journalctl, short-monotonic"
    ),
]


@pytest.mark.parametrize(("previous", "head", "further"), WRITTEN)
def test_second_line_of_a_record_is_an_unproven_warning(previous: str, head: str, further: str) -> None:
    lines = [f"{previous}usb 1-1: new device", f"{head}{OVL}", f"{further}{XID}': -2"]
    (judged,) = scanned(*lines)
    assert (judged.log_event.line, judged.code, judged.severity.name, judged.unproven) == (
        3,
        "gpu_xid/79",
        "WARNING",
        True,
    )
    assert judged.message.startswith("unproven, may not be the kernel's own line: Xid 79: ")
    at = scanned(f"{head}{XID}")[0].log_event
    assert (judged.log_event.host, judged.log_event.uptime, judged.log_event.epoch) == (at.host, at.uptime, at.epoch), (
        "those of the first line"
    )


@pytest.mark.parametrize(("previous", "head", "further"), WRITTEN)
def test_first_line_of_a_record_is_proven(previous: str, head: str, further: str) -> None:
    lines = [f"{previous}usb 1-1: new device", f"{head}{XID}", f"{further}{UE}", f"{previous}usb 1-1: gone"]
    assert summaries(*lines) == [(2, "gpu_xid/79", "critical", False), (3, "memory_edac/uncorrected", "warning", True)]


@pytest.mark.parametrize("between", [[], ["[    1.000001] so"] * 5, [""] * 40, ["on"] * 40])
@pytest.mark.parametrize("own", ["", "[    1.000001] ", "Nov 22 01:00:00 other kernel: "])
def test_prefix_inside_a_further_line_is_ignored(between: list[str], own: str) -> None:
    """Its time could begin another boot, and its host could be another machine."""
    indent = " " * len("[  684.296997] ")
    log = [f"[  684.296997] {OVL}", *(f"{indent}{line}" for line in between), f"{indent}{own}{XID}"]
    (judged,) = scanned(*log, "[  700.000000] usb 1-1: x")
    assert (judged.severity.name, judged.unproven, judged.log_event.host, judged.log_event.uptime) == (
        "WARNING",
        True,
        "",
        684.296997,
    )


def test_lines_of_other_hosts_may_separate_a_record() -> None:
    other_lines = [f"Nov 22 08:51:09 node{n} kernel: [  684.29699{n % 10}] usb 1-1: x" for n in range(100, 120)]
    head = f"Nov 22 08:51:09 node17 kernel: [  684.296997] {OVL}"
    forged = f"Nov 22 08:51:09 node17 kernel: [  684.296997] {XID}"
    assert summaries(head, *other_lines, forged) == [(22, "gpu_xid/79", "warning", True)]
    assert summaries(head.replace("node17", "node18"), *other_lines, forged) == [(22, "gpu_xid/79", "critical", False)]


@pytest.mark.parametrize("between", [0, 31, 32, 33, 2000])
def test_flood_does_not_separate_lines_of_a_record_that_starts_with_a_fault(between: int) -> None:
    head, forged = (f"Nov 22 08:51:09 node17 kernel: [  684.296997] {text}" for text in (UE, XID))
    flood = [f"Nov 22 08:51:09 node17 app[7]: {number}" for number in range(between)]
    assert summaries(head, *flood, forged)[-1] == (between + 2, "gpu_xid/79", "warning", True)


def test_repeated_real_line_is_not_unproven() -> None:
    line = f"2026-11-22T08:51:09+00:00 <pc> kernel: [   12.345678] {XID}"
    assert {(severity, unproven) for _, _, severity, unproven in summaries(line, line)} == {
        (severity, unproven) for _, _, severity, unproven in summaries(line)
    }


def test_real_fault_is_not_counted_or_worsened_with_a_forged_one() -> None:
    xid_74 = "NVRM: Xid (PCI:0000:61:00): 74, pid=7, name=x, NVLink: fatal error detected on link 3(0x0, 0x0, 0x0, 0x0)"
    indent = " " * len("[  684.296997] ")
    found = summaries(f"[  684.296997] {OVL}", f"{indent}{XID}", f"[  684.400000] {XID}", f"[  684.500000] {XID}")
    assert found == [(2, "gpu_xid/79", "warning", True), (3, "gpu_xid/79", "critical", False)]
    (alone,) = summaries(f"[  700.000000] {xid_74}")
    _, (_, _, severity, unproven) = summaries(f"[  684.296997] {OVL}", f"{indent}{xid_74}", f"[  700.000000] {xid_74}")
    assert (severity, unproven) == (alone[2], False)


def test_forged_xid_proves_no_gpu() -> None:
    broken = "[  700.000000] NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x24:0xffff:1211)"
    forged = [f"[  684.296997] {OVL}", f"{' ' * 15}{XID}"]
    assert summaries(f"[  684.296997] {XID}", broken)[1][2] == "critical"
    assert summaries(*forged, broken)[1][2] == summaries(broken)[0][2] == "warning"


def test_table_separates_real_and_forged_lines() -> None:
    log = f"[  684.296997] {OVL}\n[  684.296997] {XID}\n[  684.400000] {XID}\n"
    done = run_scan("-", log=log)
    assert done.status == 2
    assert "warning   gpu_xid/79  unproven, may not be the kernel's own line: Xid 79" in done.out
    assert "critical  gpu_xid/79  Xid 79" in done.out
    assert run_scan("-", log=log[: log.index("[  684.4")]).status == 1
    (forged, true) = run_scan("-", "--json", log=log).objects
    assert (forged["unproven"], forged["severity"], true["unproven"], true["severity"]) == (
        True,
        "warning",
        False,
        "critical",
    )


# --- similar lines that are the kernel's own


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["[    0.000000] Linux version 6.1", f"[    0.000000] {UE}"], id="early in a boot"),
        pytest.param([f"[  684.296997] {XID}", f"[  684.296997] {XID.replace('18', '2a', 1)}"], id="one burst"),
        pytest.param(["[  684.296996] usb 1-1: x", f"[  684.296997] {XID}"], id="a microsecond later"),
        pytest.param(["Here is what dmesg says:", f"    [88001.100300] {XID}"], id="pasted with an indent"),
        pytest.param(["    [88000.100300] usb 1-1: x", f"    [88001.100300] {XID}"], id="all pasted with an indent"),
        pytest.param(["usb 1-1: x", XID], id="dmesg -t"),
        pytest.param([f"[  684.296997] {OVL}", *["usb 1-1: x" * 20] * 11, XID], id="too far for a record"),
        pytest.param(
            [
                "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0",
                "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
                "               NVRM: fallen off the bus and is not responding to commands.",
            ],
            id="the driver's record of three lines",
        ),
    ],
)
def test_similar_lines_of_the_kernel_are_proven(lines: list[str]) -> None:
    found = summaries(*lines)
    assert found
    assert not any(unproven for _, _, _, unproven in found)


def test_line_with_text_of_a_client_is_not_trusted_as_driver_line() -> None:
    mismatch = "[  684.296997] NVRM: API mismatch: the client 'x' (pid 7) has the version 1"
    assert summaries(mismatch, f"[  684.296997] {XID}")[-1] == (2, "gpu_xid/79", "warning", True)


def test_record_start_is_searched_within_limits() -> None:
    width = len("[  684.296997] ")
    near = PrecedingLines(lambda line: width if line.startswith(b"[") else 0)
    for lines, found in ((RECORD_BYTES - 4, True), (RECORD_BYTES + 1, False), (MAX_LINES + 5, False)):
        block = [b"[  684.296997] x", *[b""] * lines, b"NVRM: "]
        near.enter(b"\n".join(block), len(block))
        assert (near.head(len(block), len(b"\n".join(block[:-1])) + 1, block[-1]) is not None) is found
    for foreign_lines, found in ((MAX_FOREIGN_LINES, True), (MAX_FOREIGN_LINES + 1, False)):
        block = [b"n17: [  684.296997] x", *[b"n18: [  684.300000] y"] * foreign_lines, b"n17: [  684.296997] NVRM: "]
        near = PrecedingLines(lambda line: 21)  # a new object, because a known time is not searched again
        near.enter(b"\n".join(block), len(block))
        assert (near.head(len(block), len(b"\n".join(block[:-1])) + 1, block[-1]) is not None) is found


@given(st.lists(st.sampled_from([f"n{host}: [  684.00000{micro}] x" for host in "12" for micro in "1234"])))
def test_preceding_lines_keep_recent_times_and_drop_older_ones(lines: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuation, "MAX_LINES", 3)
        near, last = PrecedingLines(lambda line: 21), {}
        for number, line in enumerate(map(str.encode, lines), 1):
            near.enter(line, 1)
            near.head(number, 0, line)
            last[line.partition(b"] ")[0] + b"]"] = number
            kept_times = {
                host_name + time: line_number
                for (host_name, time), (line_number, _) in (near._older_heads | near._heads).items()
            }
            assert {
                stamp: line_number for stamp, line_number in last.items() if line_number > number - 3
            }.items() <= kept_times.items()
            assert len(kept_times) <= 2 * (3 + 1)


@pytest.mark.parametrize(
    ("blanks", "indent", "unproven"),
    [
        (0, 15, True),
        (0, 16, False),  # deeper than the preceding text
        (LEADING_BLANKS - 1, 15, True),
        (LEADING_BLANKS, 15, False),
        (0, 15 - LEADING_BLANKS + 1, True),
        (0, 15 - LEADING_BLANKS, False),
    ],
)
def test_indent_belongs_to_a_record_or_a_pasted_log(blanks: int, indent: int, unproven: bool) -> None:
    """The text of a record may begin with spaces. Its second line is indented by the width of the prefix only."""
    head = f"[  684.296997] {' ' * blanks}{OVL}"
    (judged,) = scanned(head, f"{' ' * indent}[    1.000001] {XID}", "[  700.000000] usb 1-1: x")
    assert (judged.unproven, judged.severity.name) == (unproven, "WARNING" if unproven else "CRITICAL")


@given(st.lists(st.sampled_from([f"[  684.296997] {OVL}", XID, f"{' ' * 15}{XID}", "", "x"]), max_size=12), st.data())
def test_result_does_not_depend_on_block_ends(lines: list[str], data: Any) -> None:
    """A pipe delivers lines in arbitrary blocks."""
    whole = [line.encode() for line in lines]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))) | {0, len(whole)})
    blocks = [Block.from_lines(a + 1, whole[a:b]) for a, b in itertools.pairwise(cuts) if b > a]
    found = [
        [
            scan_judged.event_json(judged)
            for judged in scan_judged.judge(scan.events(given_blocks, NOW, Tally()), correlate_all())
        ]
        for given_blocks in ([Block.from_lines(1, whole)] if whole else [], blocks)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "lines",
    [
        [b"[  684.296997] x", *[b"[  684.296997] " + XID.encode()] * 30_000],
        [b"[  684.296997] x", *[b" " * 15 + XID.encode()] * 30_000],
        [XID.encode()] * 30_000,
        [b"n%d: [  684.296997] %s" % (n % 3000, XID.encode()) for n in range(30_000)],
    ],
    ids=["one time", "indented", "bare", "many hosts"],
)
def test_log_of_further_lines_is_read_in_linear_time(lines: list[bytes]) -> None:
    """Comparing each line with all previous ones would take half a billion comparisons."""
    blocks = [Block.from_lines(n + 1, lines[n : n + 5000]) for n in range(0, len(lines), 5000)]
    assert sum(log_event.count for log_event in scan.events(blocks, NOW, Tally())) > 25_000
    assert cpu_seconds(lambda: list(scan.events(blocks, NOW, Tally())), 5.0) < 5.0


# --- quotations by people and programs

QUOTED = [
    ("diff:371;NVRM: Xid (PCI:0000:37:00): 95, pid=5171, Uncontained: FBHUB. RST: Yes, D-RST: No", "gpu_xid/95"),
    ("[ 140.054924 ] NVRM: Xid (PCI:0000:01:00): 61, 1927(16e4) 00000000 000000", "gpu_xid/61"),
    ("[ 140.05 ] NVRM: Xid (PCI:0000:01:00): 61, 1927(16e4) 00000000 000000", "gpu_xid/61"),
    (f"2026-10-04T14:16:55+03:00 <pc> kernel: {XID}", "gpu_xid/79"),
    (f"Oct  4 14:16:55 <pc> kernel: {XID}", "gpu_xid/79"),
    (f"<pc> kernel: {XID}", "gpu_xid/79"),
    (f"<pc> {XID}", "gpu_xid/79"),
    (f"[Sun Dec  1 14:54:40 2024] node17 kernel: {XID}", "gpu_xid/79"),
    (f"kern:4;[ 140.05 ] {XID}", "gpu_xid/79"),
]


@pytest.mark.parametrize(("line", "code"), QUOTED)
def test_line_quoted_by_people_is_read(line: str, code: str) -> None:
    (judged,) = scanned(line)
    assert (judged.code, judged.unproven) == (code, False)
    assert is_a_kernel_log(line)


def test_prefix_of_a_quotation_gives_time_and_host() -> None:
    (typed,) = scanned(QUOTED[1][0])
    assert (typed.log_event.uptime, typed.log_event.host) == (140.054924, "")
    (posted,) = scanned(QUOTED[3][0])
    assert (posted.log_event.epoch, posted.log_event.host) == (1791112615.0, "pc")
    (tagged,) = scanned(QUOTED[7][0])
    assert (tagged.log_event.epoch, tagged.log_event.host) == (
        time.mktime((2024, 12, 1, 14, 54, 40, 0, 0, -1)),
        "node17",
    )


@pytest.mark.parametrize(
    "prefix",
    [
        "[gpu-health] [CRITICAL] GPU-1234: XID: ",  # modal.com/docs/guide/gpu-health
        "[2026-08-26T09:57:11Z] node-47.hpc.internal GPU 3: ",
        "mynode-066 | ERROR: nhc: Health check failed: check_gpu_xid: GPU Xid errors detected: [ 3606.832215] ",
        "E0312 12:00:00.000000    1234 log_monitor.go:160] ",
        'time=now level=error msg="',
        "2024-01-01 00:00:00,000 INFO monitor: ",  # Python's logging, in the formats of its documentation
        "2024-01-01 00:00:00,000 - monitor - ERROR - ",
        "2024-01-01 00:00:00,000 [ERROR] monitor: ",
        "2024-01-01 00:00:00.123 | ERROR    | monitor:look:12 - ",  # loguru
        "2024-01-01 00:00:00 WARNING monitor: ",
        "2024-01-01T00:00:00Z WARN monitor: ",
        "2024-01-01 00:00:00+00:00 ERROR monitor: ",
    ],
)
def test_line_quoted_by_another_program_is_an_unproven_warning(prefix: str) -> None:
    assert summaries(f"{prefix}{XID}") == [(1, "gpu_xid/79", "warning", True)]
    assert is_a_kernel_log(f"{prefix}{XID}")


@pytest.mark.parametrize(
    "line",
    [
        f"syslog had a cryptic error message: {XID}",
        f"[  684.296997] overlayfs: failed to resolve '[x] ERROR: {XID}': -2",
        f"Oct  4 14:16:55 node17 sshd[7]: <pc> kernel: {XID}",
        f"Oct  4 14:16:55 node17 sshd[7]: diff:371;{XID}",
        f"Oct  4 14:16:55 node17 x: [x] ERROR: {XID}",
        f"2026-10-04T14:16:55.123456+03:00 node17 ERROR: {XID}",
        f"2026-10-04T14:16:55.123456+03:00 node17 x: ERROR: {XID}",
        f"2026-10-04T14:16:55,123456+03:00 overlayfs: failed to resolve 'ERROR: {XID}': -2",
        f"2026-10-04 14:16:55 it said: {XID}",
        '{"MESSAGE": "<pc> kernel: ' + XID + '"}',
    ],
)
def test_prose_and_messages_of_programs_and_users_are_ignored(line: str) -> None:
    assert scanned(line) == []


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "pcieport 0000:15:01.0: PME: Signaling with IRQ 24",
        "mlx5_core 0000:5c:00.0: firmware version: 28.39.1002",
        "EXT4-fs (vda): mounted filesystem r/w with ordered data mode.",
        "<pc> kernel: NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "diff:371;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
        "[ 140.05 ] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    ],
)
def test_file_with_typical_kernel_line_is_a_kernel_log(line: str) -> None:
    """The line may come after the lines that are searched for a prefix, and no line needs to be a fault."""
    assert is_a_kernel_log(*["a title"] * 200, line)
    assert not is_a_kernel_log(*["a title"] * 200, f"of {line}")


def test_exit_status_is_0_for_kernel_log_and_3_for_other_text() -> None:
    log = "a title\n" * 200 + "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15\n"
    assert (run_scan("-", log=log).status, run_scan("-", log=log[:-60]).status) == (0, 3)


PIECES = [
    "diff:371;",
    "[ 140.05 ] ",
    "<pc> ",
    "kernel: ",
    "node17 ",
    XID,
    "[x] ",
    "ERROR: ",
    "a" * 300,
    "[",
    "<",
    ";",
    " ",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=10).map("".join))
def test_find_quoted_accepts_any_text(text: str) -> None:
    found = find_quoted(text, by_programs=True)
    assert found is None or (found.text != text and text.endswith(found.text))
    assert begins_as_the_kernels(text.encode("utf-8", "replace")) in (True, False)


@pytest.mark.parametrize(
    "piece", ["a:1;", "[ 1.5 ] ", "<a> ", "kernel: ", "[x] ", "ERROR: ", "ERROR ", "level=a ", "NVRM", "I0101 "]
)
def test_find_quoted_takes_linear_time(piece: str) -> None:
    text = piece * (64_000 // len(piece))
    assert cpu_seconds(lambda: [find_quoted(text, by_programs=True) for _ in range(20)], 1.0) < 1.0
    dated = f"2024-01-01 00:00:00,000 INFO {text}"
    assert cpu_seconds(lambda: [find_dated_quote(dated) for _ in range(20)], 1.0) < 1.0
