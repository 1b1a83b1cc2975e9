import time

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.prefix import Record, Stripped, parse_record, strip_prefix

NOW = 1_760_000_000.0  # 2025-10-09
TEXT = "NVRM: Xid (PCI:0000:3b:00): 79, x"


def local(year, month, day, hour, minute, second):
    return time.mktime((year, month, day, hour, minute, second, 0, 0, -1))


@pytest.mark.parametrize(
    ("prefix", "uptime", "epoch"),
    [
        ("", None, None),
        ("[  123.456789] ", 123.456789, None),
        ("[123] ", 123.0, None),
        ("<4>[  123.456789] ", 123.456789, None),
        ("[ 130.456250] [ T1946] ", 130.45625, None),
        ("[   36.772366][  T291] ", 36.772366, None),
        ("kern  :warn  : [  101.5] ", 101.5, None),
        ("kern  :warn  : 2025-01-21T04:41:44,500000+00:00 ", None, 1737434504.5),
        ("2025-01-21T04:41:44.5Z host kernel: ", None, 1737434504.5),
        ("2025-01-21T00:41:44-0400 host kernel: ", None, 1737434504.0),
        ("2025-01-21T04:41:44,000000+00:00 host kernel: ", None, 1737434504.0),
        ("1737434504.500000 host kernel: ", None, 1737434504.5),
        ("Mar 29 15:38:59 host kernel: ", None, local(2025, 3, 29, 15, 38, 59)),
        ("Dec 31 15:38:59 host kernel: ", None, local(2024, 12, 31, 15, 38, 59)),
        ("Oct 16 20:47:19 host kernel: [ 12.5] ", 12.5, local(2024, 10, 16, 20, 47, 19)),
        ("Mar 29 15:38:59 kernel: ", None, local(2025, 3, 29, 15, 38, 59)),
        ("Dis 28 04:26:40 host kernel: ", None, None),
        ("touko 05 09:18:59 host kernel: ", None, None),  # Finnish; the next one is numeric, as in Japanese
        ("12月 20 10:00:00 host kernel: ", None, None),
        ("Tue 2025-01-21 04:41:44.500000 UTC host kernel: ", None, 1737434504.5),  # journalctl -o short-full
        ("Di 2025-01-21 04:41:44 CET host kernel: ", None, local(2025, 1, 21, 4, 41, 44)),
        ("Mon Jul 28 10:19:15 2025 kern.crit kernel: [ 7013.5] ", 7013.5, local(2025, 7, 28, 10, 19, 15)),
        ("Mar 29 15:38:59 host kern.warn kernel: [ 12.5] ", 12.5, local(2025, 3, 29, 15, 38, 59)),
        ("\x1b[32m[  12.5] \x1b[0m\x1b[31m", 12.5, None),  # dmesg --color
        ("kernel: [16450076.435595] ", 16450076.435595, None),
        ("[ 12.345678] host kernel: ", 12.345678, None),
        ("[May19 19:57] ", None, None),
        ("[  +0.000127] ", None, None),
        ("[Fri Aug 30 11:43:09 2024] ", None, local(2024, 8, 30, 11, 43, 9)),
        ("[2023-06-22 21:55:31.5][5975153.878190] ", 5975153.87819, local(2023, 6, 22, 21, 55, 31) + 0.5),
        ("node17: [14280.445220] ", 14280.44522, None),
        ("4,1234,12500000,-;", 12.5, None),
        ("4,1234,12500000;", 12.5, None),  # Linux 3.5
        ("Mar 29 15:38:59 ", None, local(2025, 3, 29, 15, 38, 59)),  # the rest was removed by the person who quoted it
        ("4,1234,12500000,-,caller=T1;", 12.5, None),
        ("<4>1 2025-01-21T04:41:44Z host kernel - - - ", None, 1737434504.0),
    ],
)
def test_strip_prefix_removes_log_file_prefixes(prefix, uptime, epoch):
    host = "host" if " host " in prefix else "node17" if prefix.startswith("node17: ") else ""
    assert strip_prefix(prefix + TEXT, NOW) == Stripped(TEXT, uptime, epoch, host)


def test_strip_prefix_removes_alert_text_around_line():
    line = f"May 19 07:08:57 node17 kernel: [680111.646286] {TEXT}"
    stripped = strip_prefix(f"Xid errors on instance: node17, Error: {line}", NOW)
    assert stripped is not None
    assert (stripped.text, stripped.host, stripped.uptime) == (TEXT, "node17", 680111.646286)
    for program_prefix in (
        "Mar 29 15:38:59 host myprog: ",
        "Tue 2025-01-21 04:41:44 UTC host myprog: ",
        "2025-01-21T04:41:44.5Z host myprog: ",
        "user  :warn  : ",
    ):
        assert strip_prefix(program_prefix + line, NOW) is None
    for program_prefix in ("[   12.500000] ", "oom-kill:task_memcg=/x: "):
        assert strip_prefix(program_prefix + line, NOW).text.endswith(line)


def test_strip_prefix_keeps_collector_host():
    assert strip_prefix(f"gpu-042: [Fri Aug 30 11:43:09 2024] {TEXT}", NOW) == Stripped(
        TEXT, None, local(2024, 8, 30, 11, 43, 9), "gpu-042"
    )
    assert strip_prefix(f"gpu-042: 4,1234,12500000,-;{TEXT}", NOW) == Stripped(TEXT, 12.5, None, "gpu-042")
    stripped = strip_prefix(f"gpu-042: Mar 29 15:38:59 n42 kernel: {TEXT}", NOW)
    assert stripped is not None
    assert (stripped.host, stripped.text) == ("gpu-042", TEXT)
    assert strip_prefix(f"gpu-042: Mar 29 15:38:59 n42 myprog: {TEXT}", NOW) is None
    assert strip_prefix(f"<4>1 2025-01-21T04:41:44Z - kernel - - - {TEXT}", NOW).host == ""


def test_strip_prefix_reads_talosctl_prefix():
    date = "[2024-05-13T15:13:11.5Z]: "
    assert strip_prefix(f"10.5.0.3: kern:   alert: {date}{TEXT}", NOW) == Stripped(TEXT, None, 1715613191.5, "10.5.0.3")
    assert strip_prefix(f"kern: warning: {date}{TEXT}", NOW) == Stripped(TEXT, None, 1715613191.5, "")
    assert strip_prefix(f"10.5.0.3: user: warning: {date}{TEXT}", NOW) is None
    assert strip_prefix(f"10.5.0.3: user: warning: {date}{TEXT}", NOW, injected=True).text == TEXT


def test_strip_prefix_accepts_kernel_line_without_date():
    assert strip_prefix(f"node17 kernel: {TEXT}", NOW) == Stripped(TEXT, None, None, "node17")
    assert strip_prefix(f"Nov 22 10:00:00 [kernel] {TEXT}", NOW).text == TEXT  # metalog
    assert strip_prefix(f"Nov 22 10:00:00 [sshd] {TEXT}", NOW) is None
    assert strip_prefix(f"node17 myprog: kernel: {TEXT}", NOW).text != TEXT


@pytest.mark.parametrize(
    "prefix",
    [
        "Mar 29 15:38:59 host myprog[12]: ",
        "touko 05 09:18:59 host myprog[12]: ",
        "Tue 2025-01-21 04:41:44 UTC host myprog[12]: ",
        "Mon Jul 28 10:19:15 2025 user.err myprog: ",
        "Mar 29 15:38:59 host bumblebeed[1734]: [91063.874832] ",
        "Mar 29 15:38:59 host myprog: ",
        "Mar 29 15:38:59 host ",  # logger -t NVRM
        "Mar 29 15:38:59 NVRM[4711]: ",
        "2025-01-21T04:41:44.5Z host myprog: ",
        "2025-01-21T04:41:44.5Z ",
        "1737434504.500000 host myprog[1]: ",
        "<12>[  123.456789] ",
        "<12>1 2025-01-21T04:41:44Z host myprog 12 - - ",
        "<4>1 2025-01-21T04:41:44Z host myprog 12 - - ",
        "user  :warn  : [  101.5] ",
        "12,1234,12500000,-;",
    ],
)
def test_strip_prefix_rejects_other_program_lines(prefix):
    assert strip_prefix(prefix + TEXT, NOW) is None


@pytest.mark.parametrize("prefix", ["<12>[  123.456789] ", "user  :warn  : [  101.5] ", "12,1234,12500000,-;"])
def test_strip_prefix_accepts_injected_lines_if_configured(prefix):
    stripped = strip_prefix(prefix + TEXT, NOW, injected=True)
    assert stripped is not None
    assert stripped.text == TEXT


def test_parse_record_decodes_escapes_and_drops_continuation():
    record = parse_record(b"6,339,5140900,-;caf\\xc3\\xa9 a\\x0ab \\x5c\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
    assert record == Record(0, 339, 5140900, "café a\nb \\")


def test_parse_record_replaces_invalid_bytes():
    assert parse_record(b"4,1,2,-;\\xff\xfe") == Record(0, 1, 2, "\ufffd\ufffd")


def test_strip_prefix_gives_no_time_for_impossible_date():
    assert strip_prefix(f"Feb 99 15:38:59 host kernel: {TEXT}", NOW) == Stripped(TEXT, host="host")


@given(st.binary())
def test_parse_record_returns_record_or_none_for_any_bytes(data):
    assert parse_record(data) is None or isinstance(parse_record(data), Record)


PIECES = ["[", "]", " ", "<4>", "123.456", "Mar 29 15:38:59", "2025-01-21T04:41:44,5+00:00", "kernel: ", "host", ":"]
PIECES += ["4,5,6,-;", "[...] ", "[Fri Aug 30 11:43:09 2024]", "kern  :warn  : ", "\udc80", "0000-99-99T99:99:99Z "]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join))
def test_strip_prefix_returns_stripped_or_none_for_any_line(line):
    assert strip_prefix(line, NOW) is None or isinstance(strip_prefix(line, NOW), Stripped)


@pytest.mark.parametrize("piece", ["[", "a", " ", "1", "[...] ", "x-", "\\x0a", "Mar 29 ", "1,"])
def test_strip_prefix_is_fast_for_long_line(piece):
    assert cpu_seconds(lambda: strip_prefix(piece * 50_000, NOW), 0.5) < 0.5


@pytest.mark.parametrize(
    ("line", "text", "uptime", "lines"),
    [
        ("Mar 29 15:38:59 n1 kernel: message repeated 3 times: [ [  12.500000] NVRM: Xid x]", "NVRM: Xid x", 12.5, 3),
        ("2026-03-29T15:38:59+00:00 n1 kernel: message repeated 2 times: [ NVRM: Xid x]", "NVRM: Xid x", None, 2),
        ("[ 12.500000] message repeated 3 times: [ NVRM: Xid x]", "message repeated 3 times: [ NVRM: Xid x]", 12.5, 1),
        ("Mar 29 15:38:59 n1 last message repeated 3 times", None, None, 1),
    ],
)
def test_strip_prefix_counts_rsyslog_repeats(line: str, text: str | None, uptime: float | None, lines: int) -> None:
    stripped = strip_prefix(line, 1_760_000_000.0)
    assert (stripped and (stripped.text, stripped.uptime, stripped.lines)) == (text and (text, uptime, lines))


def test_strip_prefix_rejects_repeat_from_other_program() -> None:
    assert strip_prefix("Mar 29 15:38:59 n1 sshd[1]: message repeated 3 times: [ NVRM: Xid x]", 1_760_000_000.0) is None
