"""`healthd scan`: the real program with real and made-up logs, and its steps."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions.incidents import GAP_SECONDS
from healthd.agent.kernel_log import prefix as prefix_module
from healthd.agent.kernel_log.parse import LITERALS, parse
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.cli.main import main
from healthd.cli.scan import correlate_all
from healthd.common.model import Finding, Inventory, KernelEvent, PciDevice, Severity
from healthd.scan import candidates, messages, prefixes
from healthd.scan import events as scan
from healthd.scan import findings as scan_judged
from healthd.scan import table as scan_table
from healthd.scan.lines import Block, Tally
from healthd.scan.log_file import read_blocks
from healthd.scan.prefixes import stripped
from healthd.scan.table import summary

ROOT = Path(__file__).parents[2]
NOW = 1_760_000_000.0  # 2025-10-09
XID = "NVRM: Xid (PCI:0000:18:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
USUAL = "Mar 29 15:38:59 gpu-042 sshd[4711]: Accepted publickey for alice from 10.1.2.3 port 22 ssh2"
STORY = """\
Mar 29 05:56:30 gpu-042 kernel: [88000.100000] pcieport 0000:15:01.0: AER: Uncorrected (Fatal) error received: 0000:18:00.0
Mar 29 05:56:30 gpu-042 sshd[4711]: Accepted publickey for alice from 10.1.2.3 port 22 ssh2
Mar 29 05:56:31 gpu-042 kernel: [88001.100300] NVRM: Xid (PCI:0000:18:00): 79, pid=4711, name=python3, GPU has fallen off the bus.
Mar 29 05:56:31 gpu-042 kernel: [88001.100400] NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.
Mar 29 05:56:31 gpu-042 kernel: [88001.200500] pcieport 0000:15:01.0: pciehp: Slot(21): Link Down
Mar 29 05:56:32 gpu-042 python3[4711]: NVRM: Xid (PCI:0000:2a:00): 79, pid=4711, name=a, GPU has fallen off the bus.
Mar 29 09:00:00 gpu-042 kernel: [99001.000000] NVRM: Xid (PCI:0000:2a:00): 31, pid=12, name=python3, Ch 00000008, MMU Fault
"""  # noqa: E501


class ScanOutput:
    def __init__(self, done: subprocess.CompletedProcess[bytes]) -> None:
        self.status, self.out, self.err = done.returncode, done.stdout.decode(), done.stderr.decode()
        assert "Traceback" not in self.err, self.err

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


def run_scan(*arguments: object, log: bytes | str = b"") -> ScanOutput:
    argv = [sys.executable, "-m", "healthd", "scan", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "LC_ALL": "C.UTF-8"}
    data = log.encode() if isinstance(log, str) else log
    return ScanOutput(subprocess.run(argv, input=data, capture_output=True, timeout=240, env=env))


def scanned(*lines: str | bytes) -> list[scan_judged.Judged]:
    data = [line.encode() if isinstance(line, str) else line for line in lines]
    blocks = [Block.from_lines(number, [line]) for number, line in enumerate(data, 1)]
    return list(scan_judged.judge(scan.events(blocks, NOW, Tally()), correlate_all()))


def summaries(*lines: str | bytes) -> list[tuple[int, str, str]]:
    """Return (line, code, severity) of each event."""
    return [(judged.log_event.line, judged.code, judged.severity.name.lower()) for judged in scanned(*lines)]


# --- output


def test_table_has_one_incident_per_fault_with_first_cause_on_top():
    done = run_scan("-", log=STORY)
    assert done.status == 2
    first, _, second = done.out.partition("\nwarning")
    assert first.splitlines()[0] == "standard input: 1 critical, 1 warning in 7 lines"
    rows = [line for line in first.splitlines() if line.startswith("  05:56:3")]
    assert [row.split()[2] for row in rows][:2] == ["pcie_aer/fatal", "gpu_xid/79"]
    assert len(rows) == 4
    assert "Xid 79: GPU has fallen off the bus, python3 (pid 4711)" in first
    assert "  healthd explain pcie_aer/fatal" in first
    assert "gpu_xid/31" in second
    assert "0000:2a:00.0  (line 7)" in second


def test_json_has_one_object_per_event():
    done = run_scan("--json", "-", log=STORY)
    assert done.status == 2
    xid = next(scanned_event for scanned_event in done.objects if scanned_event.get("xid") == 79)
    when = time.mktime(time.strptime(f"{time.localtime().tm_year} Mar 29 05:56:31", "%Y %b %d %H:%M:%S"))
    assert xid == {
        "line": 3,
        "time": when if when < time.time() + 86400 else xid["time"],
        "uptime": 88001.1003,
        "host": "gpu-042",
        "kind": "xid",
        "code": "gpu_xid/79",
        "xid": 79,
        "pci": "0000:18:00.0",
        "pid": 4711,
        "name": "python3",
        "severity": "critical",
        "clears": "reboot",
        "unproven": False,
        "count": 1,
        "text": XID,
    }
    assert [scanned_event["line"] for scanned_event in done.objects] == [1, 3, 4, 5, 7]


def test_explain_knows_every_code_of_an_incident():
    done = run_scan("-", log=STORY)
    codes = [line.split()[-1] for line in done.out.splitlines() if line.startswith("  healthd explain ")]
    assert len(codes) == 2
    for code in codes:
        assert main(["explain", code]) == 0


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("log", "status"),
    [
        (f"[ 12.000000] {XID}", 2),
        ("[ 12.000000] NVRM: Xid (PCI:0000:18:00): 31, pid=1, name=a, MMU Fault", 1),
        ("[ 12.000000] usb 1-1: new high-speed USB device number 4 using xhci_hcd", 0),
        ("", 3),
        (USUAL, 3),
        (b"\x7fELF\x00\x01\x02" * 1000, 3),
    ],
)
def test_exit_status_is_that_of_the_worst_event(log, status):
    done = run_scan("-", log=log)
    assert done.status == status
    assert bool(done.err) == (status == 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("none", "no such file"),
        ("", "is a directory, not a log"),
        ("empty", "is empty"),
        ("journal", "is a journal, not text; run: journalctl -k -o json --file"),
        ("zstd", "is compressed with zstd; run: zstdcat"),
        ("readme", "no line has a kernel prefix (dmesg, syslog, journalctl); lines read: 2"),
    ],
)
def test_file_that_is_no_log_gives_one_sentence(tmp_path, name, sentence):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "journal").write_bytes(b"LPKSHHRH" + bytes(100))
    (tmp_path / "zstd").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    (tmp_path / "readme").write_text("# A program\nthat does things\n")
    if name == "zstd" and sys.version_info >= (3, 14):
        pytest.skip("this Python reads it")
    done = run_scan(tmp_path / name)
    assert (done.status, done.out) == (3, "")
    assert len(done.err.splitlines()) == 1
    assert f"{tmp_path / name}".rstrip("/") in done.err
    assert sentence in done.err


def test_unreadable_file_is_reported(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "log").write_text(STORY)
    (tmp_path / "log").chmod(0)
    assert "Permission denied" in run_scan(tmp_path / "log").err


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress, bytes])
def test_compressed_logs_are_unpacked(tmp_path, pack):
    (tmp_path / "kern.log.2").write_bytes(pack(STORY.encode()))
    done = run_scan("--json", tmp_path / "kern.log.2")
    assert [scanned_event["line"] for scanned_event in done.objects] == [1, 3, 4, 5, 7]
    assert run_scan("--json", "-", log=pack(STORY.encode())).out == done.out


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, bz2.compress])
def test_damaged_archive_is_read_up_to_the_damage(pack):
    chance = __import__("random").Random(1)
    noise = "".join(f"{USUAL}{chance.getrandbits(64)}\n" for _ in range(30_000))
    packed = pack((STORY + noise).encode())
    done = run_scan("-", log=packed[: len(packed) // 2])
    assert done.status == (2 if done.out else 3)
    assert "standard input: " in done.err
    assert "compressed data" in done.err
    broken = bytearray(packed)
    broken[len(broken) // 2 : len(broken) // 2 + 50] = bytes(50)
    assert "compressed data" in run_scan("-", log=bytes(broken)).err


def test_pipe_is_read_line_by_line():
    argv = [sys.executable, "-m", "healthd", "scan", "--json", "-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"[ 12.000000] {XID}\n[ 30.000000] {XID.replace('18:00', '2a:00')}\n".encode())
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["pci"] == "0000:18:00.0"
        process.stdin.close()
        assert json.loads(process.stdout.readline())["pci"] == "0000:2a:00.0"


def test_ctrl_c_and_closed_output_end_quietly():
    # A background process of a shell, perhaps this test too, ignores Ctrl-C.
    argv = ["env", "--default-signal=INT", sys.executable, "-m", "healthd", "scan", "--json", "-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for end in ("interrupt", "close"):
        with subprocess.Popen(argv, env=env, **pipes) as process:
            lines = "".join(f"[ {number}0.000000] {XID}\n" for number in range(1, 4000))
            process.stdin.write(f"[ 1.000000] {XID}\n[ 2.000000] {XID}\n[ 30.000000] {XID}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline()
            if end == "interrupt":
                process.send_signal(signal.SIGINT)
                assert process.wait(240) == 130
            else:
                process.stdout.close()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(process, "stdout", None)
                    _, errors = process.communicate(lines.encode(), timeout=240)
                assert errors == b""
                continue
            assert process.stderr.read() == b""


# --- input formats

PREFIXES = [
    "",
    "[   12.345678] ",
    "[Fri Aug 30 11:43:09 2024] ",
    "kern  :err   : [   12.345678] ",
    "2025-01-21T04:41:44,283302+00:00 ",
    "Mar 29 15:38:59 gpu-042 kernel: [   12.345678] ",
    "Mar 29 15:38:59 gpu-042 kernel: ",
    "2025-01-21T04:41:44.283302+00:00 gpu-042 kernel: [   12.345678] ",
    "2025-01-21T04:41:44+0000 gpu-042 kernel: ",
    "1737434504.500000 gpu-042 kernel: ",
    "[   12.345678] gpu-042 kernel: ",
    "3,1234,12345678,-;",
    "<3>[   12.345678] ",
    "<3>1 2025-01-21T04:41:44Z gpu-042 kernel - - - ",
    "[2023-06-22 21:55:31.352446] [   12.345678] ",
    "gpu-042: [   12.345678] ",
    "gpu-042: [Fri Aug 30 11:43:09 2024] ",
    "gpu-042: Mar 29 15:38:59 gpu-042 kernel: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_is_read(prefix):
    (judged,) = scanned(USUAL, prefix + XID)
    assert (judged.log_event.line, judged.code, judged.log_event.event.text) == (2, "gpu_xid/79", XID)
    assert judged.log_event.host == ("gpu-042" if "gpu-042" in prefix else "")
    assert judged.log_event.uptime == (12.345678 if "12.345678" in prefix or "12345678" in prefix else None)


JOURNAL = {
    "__CURSOR": "s=0123;i=1",
    "__REALTIME_TIMESTAMP": "1737434504500000",
    "__MONOTONIC_TIMESTAMP": "12845678",
    "_SOURCE_MONOTONIC_TIMESTAMP": "12345678",
    "_BOOT_ID": "0123456789abcdef0123456789abcdef",
    "_TRANSPORT": "kernel",
    "_HOSTNAME": "gpu-042",
    "SYSLOG_FACILITY": "0",
    "SYSLOG_IDENTIFIER": "kernel",
    "PRIORITY": "3",
    "MESSAGE": XID,
}


@pytest.mark.parametrize(
    "entry",
    [JOURNAL, {**JOURNAL, "MESSAGE": list(XID.encode())}, {**JOURNAL, "MESSAGE": f"{XID}\nmore"}],
)
def test_json_of_journalctl_is_read(entry):
    (judged,) = scanned(json.dumps({**JOURNAL, "MESSAGE": "usb 1-1: x"}), json.dumps(entry))
    assert (judged.log_event.line, judged.code, judged.log_event.host) == (2, "gpu_xid/79", "gpu-042")
    assert (judged.log_event.epoch, judged.log_event.uptime) == (1737434504.0, 12.345678)


def test_export_format_of_journalctl_is_read():
    fields = [f"{name}={value}" for name, value in JOURNAL.items()]
    syslog_fields = [line for line in fields if not line.startswith("_TRANSPORT")] + ["_TRANSPORT=syslog"]
    (judged,) = scanned(*syslog_fields, "", *fields, "")
    assert (judged.log_event.line, judged.code, judged.log_event.host) == (
        len(syslog_fields) + 1 + len(fields),
        "gpu_xid/79",
        "gpu-042",
    )
    size = len(XID).to_bytes(8, "little")
    (judged,) = scanned(*fields[:-1], "MESSAGE", size + XID.encode(), "")
    assert judged.code == "gpu_xid/79"


@pytest.mark.parametrize(
    "line",
    [
        f"Mar 29 15:38:59 gpu-042 python3[4711]: {XID}",
        f"Mar 29 15:38:59 gpu-042 logger: kernel: {XID}",
        f"Mar 29 15:38:59 gpu-042 python3[4711]: kernel: {XID}",
        f"gpu-042: Mar 29 15:38:59 gpu-042 python3[4711]: {XID}",
        f"<13>1 2025-01-21T04:41:44Z gpu-042 python3 - - - {XID}",
        f"12,1234,12345678,-;{XID}",
        f"user  :warn  : [   12.345678] {XID}",
        json.dumps({**JOURNAL, "_TRANSPORT": "syslog"}),
        json.dumps({**JOURNAL, "SYSLOG_FACILITY": "3"}),
        json.dumps({**JOURNAL, "SYSLOG_IDENTIFIER": "python3"}),
        json.dumps([JOURNAL]),
        json.dumps({**JOURNAL, "_TRANSPORT": "stdout", "X": '"_TRANSPORT":"kernel"'}),
        "{" * 5000,
    ],
)
def test_lines_of_other_programs_are_ignored(line):
    assert scanned(line) == []


FORGED = (
    XID,
    f"[88001.100300] {XID}",
    f"Mar 29 05:56:31 gpu-042 kernel: [88001.100300] {XID}",
    f"   kernel: {XID}",
)


@pytest.mark.one_python
@pytest.mark.parametrize("owner", ["Mar 29 15:38:59 gpu-042 bob[4711]: ", "[ 12.345678] gpu-042 bob[4711]: "])
@pytest.mark.parametrize("forged", FORGED)
def test_further_line_of_a_service_message_is_ignored_in_journalctl_output(owner, forged):
    """`logger $'hello\nNVRM: Xid ...'` writes one message. journalctl indents its further lines by the prefix."""
    further = "\n".join(" " * len(owner) + text for text in ("so", forged, "on", forged))
    kernels = f"Mar 29 05:56:30 gpu-042 kernel: [88000.100000] {XID.replace('18', '2a', 1)}"
    done = run_scan("-", "--json", log=f"{kernels}\n{owner}hello\n{further}\n")
    assert [found["line"] for found in done.objects] == [1]


def test_indented_pasted_log_is_read():
    done = run_scan("-", "--json", log=f"Here is what dmesg says:\n    [88001.100300] {XID}\n")
    assert [found["line"] for found in done.objects] == [2]


def test_message_with_many_lines_is_read_in_linear_time():
    owner = b"Mar 29 15:38:59 gpu-042 bob[4711]: "
    lines = [owner + b"hello", *[b" " * len(owner) + XID.encode()] * 200_000]
    blocks = [Block.from_lines(n + 1, lines[n : n + 50_000]) for n in range(0, len(lines), 50_000)]
    assert list(candidates.candidates(blocks, Tally())) == []
    assert cpu_seconds(lambda: list(candidates.candidates(blocks, Tally())), 10.0) < 10.0


@given(st.sampled_from(PREFIXES), st.sampled_from([XID, "text", "[1] x", " x", "é\udc80", "kernel: [1.5] x", ""]))
def test_fast_path_for_usual_prefixes_equals_strip_prefix(prefix, text):
    line = (prefix + text).encode("utf-8", "surrogateescape")
    assert stripped(line, NOW) == strip_prefix(line.decode("utf-8", "replace"), NOW)


# Cuba and Chile change the clock at midnight.
ZONES = ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns", "America/Havana", "America/Santiago"]
DAYS = {"Mar 29", "Mar 30", "Oct 26", "Apr  6", "Oct  5", "Nov  1", "Feb 29", "Feb 30"}  # Europe, Lord Howe, Canada
DAYS |= {"Mar  8", "Mar  9", "Nov  2", "Apr  4", "Apr  5", "Sep  6", "Sep  7"}  # Cuba, Chile


@pytest.mark.parametrize("zone", ZONES)
@given(
    day=st.sampled_from(sorted(DAYS)),
    hour=st.integers(0, 25),
    minute=st.integers(0, 61),
    written=st.sampled_from(["{day} {hour:02}:{minute:02}:00", "2025-10-26T{hour:02}:{minute:02}:07.250000{east}"]),
    east=st.sampled_from(["Z", "+01:00", "-03:30"]),
    now=st.integers(0, 400 * 24 * 60).map(lambda minutes: NOW + 60.0 * minutes),
)
def test_cached_dates_equal_strip_prefix_on_clock_changes(zone, day, hour, minute, written, east, now):
    line = f"{written.format(day=day, hour=hour, minute=minute, east=east)} gpu-042 kernel: [   12.345678] {XID}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        caches = (prefixes._minute, prefixes._day_start, prefix_module._minute)
        for cached in caches:
            cached.cache_clear()
        try:
            assert stripped(line.encode(), now) == strip_prefix(line, now)
        finally:
            for cached in caches:
                cached.cache_clear()
    time.tzset()


DATA = sorted((ROOT / "tests/data").glob("kernel_lines*.jsonl"))
CAPTURED = [json.loads(line) for data in DATA for line in data.read_text("utf-8").splitlines()]


def test_search_finds_every_line_that_a_rule_reads():
    lines = [line for row in CAPTURED for line in row["text"].split("\n")]
    read = {
        number
        for number, line in enumerate(lines, 1)
        if (found := strip_prefix(line, NOW)) is not None and parse(found.text) is not None
    }
    assert len(read) > 150
    blocks = [Block.from_lines(1, [line.encode() for line in lines])]
    candidate_numbers = {number for number, *_ in candidates.candidates(blocks, Tally())}
    assert read <= candidate_numbers
    assert len(scanned(*lines)) > 100


@pytest.mark.parametrize("literal", sorted(LITERALS))
def test_search_finds_each_literal_without_varying_characters(literal):
    line = f"[ 1.5] 0af1{literal}9c".encode()
    ((_, _, _, found, _),) = candidates.candidates([Block.from_lines(1, [line])], Tally())
    assert literal in found
    assert len(literal.encode().translate(None, candidates.VARIES)) >= 2, "every line contains it"


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_any_bytes_are_scanned(lines):
    for judged in scanned(*(line.replace(b"\n", b"") for line in lines)):
        assert judged.code


# --- events and incidents


def test_repeated_lines_are_one_event_with_count():
    lines = [f"[   {second}.000000] {XID}" for second in (10, 11, 12, 13, 60)]
    assert [(judged.log_event.line, judged.log_event.count) for judged in scanned(*lines)] == [(1, 4), (5, 1)]


def test_repetitions_counted_by_rsyslog_are_added():
    prefix = "Mar 29 15:38:59 gpu-1 kernel: "
    lines = [f"{prefix}[   10.000000] {XID}", f"{prefix}message repeated 41 times: [ [   10.000000] {XID}]"]
    assert [(judged.log_event.line, judged.log_event.count) for judged in scanned(*lines)] == [(1, 42)]
    assert [(judged.log_event.line, judged.log_event.count) for judged in scanned(lines[1], lines[0])] == [(1, 42)]


def test_severity_is_that_of_the_event_and_increases_only_by_repetition():
    nvlink = (
        "NVRM: Xid (PCI:0000:18:00): 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link 2"
        "(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)"
    )
    assert [severity for _, _, severity in summaries(f"[   10.000000] {nvlink}", f"[ 3000.000000] {nvlink}")] == [
        "warning",
        "critical",
    ]
    fatal = "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, {}, Link 30 Minion Link DLREQ interrupt"
    summaries_of_both = summaries(
        f"[   10.000000] {fatal.format('Fatal')}", f"[   90.000000] {fatal.format('Non-fatal')}"
    )
    alone = summaries(f"[   90.000000] {fatal.format('Non-fatal')}")
    assert summaries_of_both[1][2] == alone[0][2]


def test_repetition_on_two_hosts_or_boots_does_not_count():
    nvlink = "NVRM: Xid (PCI:0000:18:00): 74, pid=1, name=a, NVLink: fatal error detected on link 2(0x0, 0x0, 0x0)"
    dates = ("Mar 29 10:00:00", "Mar 29 11:00:00")
    two_hosts = [f"{date} gpu-{number} kernel: {nvlink}" for number, date in enumerate(dates)]
    assert {severity for _, _, severity in summaries(*two_hosts)} == {"warning"}
    two_boots = (f"[ 9000.000000] {nvlink}", f"[  100.000000] {nvlink}")
    assert {severity for _, _, severity in summaries(*two_boots)} == {"warning"}


def test_failed_initialisation_is_critical_if_an_xid_showed_the_gpu():
    failed = "[  90.000000] NVRM: GPU 0000:18:00.0: RmInitAdapter failed! (0x62:0x40:2168)"
    assert [severity for _, _, severity in summaries(failed)] == ["warning"]
    assert summaries(f"[  10.000000] {XID}", failed)[-1][1:] == ("gpu_xid/rm_init_failed", "critical")


def test_hosts_of_a_collected_log_are_separate():
    lines = [f"gpu-{number}: [  10.00000{number}] {XID}" for number in range(3)]
    found = summary(scanned(*lines))
    assert sorted(incident.host for incident in found.incidents.values()) == ["gpu-0", "gpu-1", "gpu-2"]


def test_recurring_incident_is_shown_once():
    lines = [f"[ {100 + 200 * time}.000000] {XID}" for time in range(5)]
    (incident,) = summary(scanned(*lines)).incidents.values()
    assert incident.repeats == 4
    assert sum(row.count for row in incident.rows.values()) == 5
    assert GAP_SECONDS < 200


# --- limits


def many_faults(count: int) -> Iterable[Block]:
    """Yield blocks with `count` different faults, some seconds apart."""
    for number in range(count):
        pci = f"{number // 8192 % 65536:04x}:{number // 32 % 256:02x}:{number % 32:02x}"
        yield Block.from_lines(number + 1, [f"[{number * 9:>5}.000000] {XID.replace('0000:18:00', pci)}".encode()])


@pytest.mark.one_python
def test_log_of_different_faults_needs_limited_memory(monkeypatch):
    for bound in ("MAX_WAITING", "MAX_NAMES", "MAX_DEVICES"):
        monkeypatch.setattr(scan, bound, 100)
    for bound in ("MAX_FAULTS", "MAX_MEANINGS"):
        monkeypatch.setattr(scan_judged, bound, 100)
    monkeypatch.setattr(messages, "MESSAGES_BYTES", 100_000)
    monkeypatch.setattr(scan_table, "MAX_INCIDENTS", 50)

    def peak(count: int) -> int:
        tracemalloc.start()
        correlate = correlate_all()
        tracemalloc.reset_peak()
        found = summary(scan_judged.judge(scan.events(many_faults(count), NOW, Tally()), correlate))
        assert len(found.incidents) + found.hidden_incidents == count
        assert len(found.incidents) == 50
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(1000)  # loads late imports and permanent caches
    assert peak(6000) < peak(3000) + 500_000


def test_devices_of_a_node_are_stored_once_for_all_events():
    lines = [f"[    1.{number:06}] {XID.replace('18:00', f'{number:02x}:00')}".encode() for number in range(100)]
    lines += [f"[{number * 9:>5}.000000] {XID.replace('79', str(number))}".encode() for number in range(200, 300)]
    found = scan_judged.judge(scan.events([Block.from_lines(1, lines)], NOW, Tally()), correlate_all())
    assert len({id(device) for judged in [*found] for device in judged.meaning.node.devices}) == 100


def test_storm_is_one_event_and_hides_no_other():
    storm = [f"[   10.{number:06}] {XID.replace('4711', str(number))}".encode() for number in range(20_000)]
    other_line = f"[   10.010000] {XID.replace('18:00', '2a:00')}".encode()
    lines = [*storm[:10_000], other_line, *storm[10_000:]]
    found = list(scan.events([Block.from_lines(1, lines)], NOW, Tally()))
    assert [(log_event.line, log_event.count) for log_event in found] == [(1, 20_000), (10_001, 1)]


class Trickle:
    """A pipe that returns its data a few bytes at a time."""

    def __init__(self, data: bytes, step: int) -> None:
        self.data, self.step = data, step

    def read1(self, _size: int) -> bytes:
        piece, self.data = self.data[: self.step], self.data[self.step :]
        return piece


LINES_OF = st.binary(max_size=40).map(lambda line: line.translate(None, b"\n\0\xef"))  # without zero bytes and BOM


@given(st.lists(LINES_OF, max_size=8), st.integers(1, 50))
def test_read_blocks_returns_whole_numbered_lines_for_any_pieces(lines, step):
    data = b"\n".join(lines)
    found = [
        (block.first + number, line)
        for block in read_blocks(Trickle(data, step), max_line=20)  # type: ignore[arg-type]
        for number, line in enumerate(block.lines)
    ]
    expected = data.split(b"\n")
    while expected and not expected[-1]:
        expected.pop()
    numbers = dict(found)
    assert [numbers.get(number, b"") for number in range(1, len(expected) + 1)] == [line[:20] for line in expected]


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", b"a line\n" + bytes(5), b"a line\n" + bytes(300_000)])
def test_byte_order_mark_and_zero_bytes_hide_no_line(before):
    log = before + f"[88001.100300] {XID}\n".encode()
    for block in (1000, len(log)):
        found = scan.events(read_blocks(io.BytesIO(log), block), NOW, Tally())
        assert [log_event.line for log_event in found] == [1 + before.count(b"\n")]


def test_endless_line_needs_limited_memory():
    blocks = list(read_blocks(Trickle(b"x" * 3_000_000 + b"\nlast\n", 65_536)))  # type: ignore[arg-type]
    assert [(block.first, [len(line) for line in block.lines]) for block in blocks] == [(1, [16384]), (2, [4])]


def test_page_explains_every_key_of_an_event():
    text = (ROOT / "docs/json.md").read_text("utf-8").partition("## `healthd scan --json`")[2].partition("\n## ")[0]
    for judged in scanned(
        f"[   10.000000] {XID}", "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 20034, Fatal, Link 30 x"
    ):
        assert [key for key in scan_judged.event_json(judged) if f"`{key}`" not in text] == []


# --- equivalent results


@pytest.mark.parametrize(
    "prefix",
    [
        "Mar 29 15:{minute:02}:{second:02} {host} kernel: [{uptime:12.6f}] ",
        "2026-03-29T15:{minute:02}:{second:02}.123456+01:00 {host} kernel: ",
        "{host}: [{uptime:12.6f}] ",
    ],
)
def test_result_of_a_line_does_not_depend_on_earlier_lines(prefix):
    """Each captured message occurs twice, each time with another host. The whole log gives the same results as its
    lines."""
    texts = [found.text for row in CAPTURED for line in row["text"].split("\n") if (found := strip_prefix(line, NOW))]
    correlate = correlate_all()

    def objects(blocks: Iterable[Block]) -> list[dict[str, Any]]:
        return [
            scan_judged.event_json(judged) for judged in scan_judged.judge(scan.events(blocks, NOW, Tally()), correlate)
        ]

    lines = []
    for number, text in enumerate(texts[:900] * 2):
        minute, second = divmod(number, 60)
        line_prefix = prefix.format(minute=minute, second=second, uptime=88000.5 + number, host=f"gpu-{number}")
        lines.append((line_prefix + text).encode())
    together = objects([Block.from_lines(1, lines)])
    assert together == [
        each for number, line in enumerate(lines, 1) for each in objects([Block.from_lines(number, [line])])
    ]
    assert len(together) > 500


def test_event_line_equals_event_json():
    lines = [line for row in CAPTURED for line in row["text"].split("\n")]
    for judged in scanned(*lines, *lines):
        assert json.loads(scan_judged.event_line(judged)) == scan_judged.event_json(judged)
        assert scan_judged.event_line(judged) == json.dumps(scan_judged.event_json(judged)) + "\n"


def test_only_listed_events_get_worse_by_repetition():
    correlate = correlate_all()
    for row in CAPTURED:
        for line in row["text"].split("\n"):
            found = strip_prefix(line, NOW)
            event = parse(found.text) if found is not None else None
            if event is None or (event.kind, event.code) in scan_judged._WORSE_IF_REPEATED:
                continue
            for node in (Inventory(), Inventory(devices=(PciDevice(event.pci, "", "", "", "gpu", ""),))):
                for apart in (6.0, 90.0, 3600.0, 80_000.0):
                    times = [1e6 + apart * number for number in range(4)]
                    again = [replace(event, time=at, last_time=at, sequence=int(at)) for at in times]
                    alone = worst(correlate(again[-1:], node), again[-1])
                    assert worst(correlate(again, node), again[-1]) <= alone, line


def test_checks_ignore_process_and_text_of_an_event():
    correlate = correlate_all()
    for row in CAPTURED:
        for line in row["text"].split("\n"):
            found = strip_prefix(line, NOW)
            event = parse(found.text) if found is not None else None
            if event is None:
                continue
            for node in (Inventory(), Inventory(devices=(PciDevice(event.pci, "", "", "", "gpu", ""),))):
                bare = replace(event, pid=None, process=None, text="")
                assert [(f.code, f.severity, f.clears, f.recovered) for f in correlate((event,), node)] == [
                    (f.code, f.severity, f.clears, f.recovered) for f in correlate((bare,), node)
                ], line


def worst(findings: Iterable[Finding], event: KernelEvent) -> Severity:
    found = scan_judged._worst(findings, event)
    return Severity.INFO if found is None else found.severity
