"""Tests of user text in the kernel's own log: names of processes (15 characters, any), of programs and of cgroups.

Lines that begin or end with such names must yield no event.
The forms are the kernel's: arch/x86/mm/fault.c, arch/x86/kernel/traps.c, arch/*/kernel/signal*.c, mm/oom_kill.c,
mm/page_alloc.c, kernel/signal.c, kernel/exit.c, fs/drop_caches.c, fs/exec.c, kernel/capability.c.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.prefix import parse_record, strip_prefix

CORPUS = [json.loads(line) for line in (Path(__file__).parents[2] / "data/kernel_lines.jsonl").read_text().splitlines()]
COMM = 15  # TASK_COMM_LEN - 1

# {comm}: name of the process; {file}: name of the file that it runs or maps (up to 255 characters).
FORMS = (
    "{comm}[26436]: segfault at 0 ip 00007fbf2e385ad8 sp 00007ffc16813bb8 error 4 in {file}[167ad8,7fbf2e24+156000]",
    "{comm}[26436]: segfault at 0 ip 00007fbf2e385ad8 sp 00007ffc16813bb8 error 4",
    "{comm}[812] general protection ip:7f0cd4b3 sp:7ffd error:0 in {file}[7f0cd4a00000+1b5000]",
    "{comm}[812] trap divide error ip:400f2b sp:7ffd error:0 in {file}[400000+1000]",
    "traps: {comm}[812] trap invalid opcode ip:400f2b sp:7ffd error:0 in {file}[400000+1000]",
    "traps: {comm}[812] general protection fault ip:7f0cd4b3 sp:7ffd error:0 in {file}[7f0cd4a00000+1b5000]",
    "{comm}[812]: unhandled signal 11 code 0x1 at 0x0000000000000000 in {file}[400000+1000]",
    "{comm}[812]: unhandled exception: DABT (lower EL), ESR 0x92000006, level 2 translation fault in {file}[40+10]",
    "{comm}[812] bad frame in rt_sigreturn frame:000000007ffd ip:7f sp:7ffd orax:ffffffffffffffff in {file}[40+10]",
    "{comm}/812: potentially unexpected fatal signal 11.",
    "{comm}: page allocation failure: order:4, mode:0xcc0(GFP_KERNEL), nodemask=(null),cpuset={file},mems_allowed=0",
    "{comm} (812): drop_caches: 3",
    "{comm} (812) used greatest stack depth: 11432 bytes left",
    "{comm} (812) uses deprecated CAP_SETPCAP",
    "{comm} (812): /proc/812/oom_adj is deprecated, please use /proc/812/oom_score_adj instead.",
    "{comm} (812): Using mlock ulimits for SHM_HUGETLB is obsolete",
    "{comm}[812] vsyscall attempted with vsyscall=none ip:ffffffffff600000 cs:33 sp:7ffd ax:0 si:0 di:0",
    "{comm}[812] vsyscall read attempt denied -- look up the vsyscall kernel parameter ip:ffffffffff600000 cs:33",
    "{comm}[812] attempts to use CLI/STI, pretending it's a NOP, ip:400f2b sp:7ffd",
    "{comm}:812 map pfn expected mapping type uncached-minus for [mem 0xf0000000-0xf0000fff], got write-combining",
    "{comm}: attempt to access beyond end of device\\ndm-0: rw=1, sector=88, nr_sectors = 8 limit=80",
    "{comm}:812 conflicting memory types f0000000-f0001000 uncached-minus<->write-combining",
    "warning: `{comm}' uses 32-bit capabilities (legacy support in use)",
    "process '{file}' started with executable stack",
    "{comm} invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset={file},mems_allowed=0,oom_memcg=/{file},"
    "task_memcg=/{file},task={comm},pid=812,uid=1000",
    "Memory cgroup out of memory: Killed process 812 ({comm}) total-vm:10240kB, anon-rss:4096kB, file-rss:0kB, "
    "shmem-rss:0kB, UID:1000 pgtables:64kB oom_score_adj:0",
    "oom_reaper: reaped process 812 ({comm}), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
    "Task in /{file} killed as a result of limit of /{file}",
    "[   812]  1000   812    12345     1024    65536        0             0 {comm}",
    "CPU: 1 PID: 812 Comm: {comm} Tainted: G           OE     6.8.0 #1",
    "usb 1-1: Product: {file}",
    "usb 1-1: Manufacturer: {file}",
    "input: {file} as /devices/pci0000:00/0000:00:14.0/usb1/1-1/input/input7",
    "hid-generic 0003:046D:C077.0001: input,hidraw0: USB HID v1.11 Mouse [{file}] on usb-0000:00:14.0-1/input0",
    "scsi 2:0:0:0: Direct-Access     {file} PMAP PQ: 0 ANSI: 6",
)
MEMORY_LINE = re.compile(r"oom-kill|oom_reaper|.*invoked oom-killer|Memory cgroup out of memory|Task in /", re.DOTALL)


def messages() -> list[str]:
    """Return every message of the public captures, with and without its driver prefix, where a name may begin."""
    message_set = set()
    for row in CORPUS:
        for line in row["text"].splitlines():
            stripped = strip_prefix(line, 0.0)
            if stripped is not None and stripped.text:
                message_set |= {stripped.text, re.sub(r"^[\w-]{1,16}: ", "", stripped.text)}
    return sorted(message_set)


MESSAGES = messages()


def event_text(line: str) -> str:
    """Return the event of a line as text, or "" for none and for a genuine out-of-memory line."""
    event = parse(line)
    if event is None or (event.kind == "oom" and MEMORY_LINE.match(line)):
        return ""
    if (event.kind, event.code) == ("block", "beyond_end") and "attempt to access" in line:
        return ""
    return f"{event.kind}/{event.code} {event.pci}: {line[:200]}"


@pytest.mark.one_python
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[:32])
def test_forged_process_and_file_names_yield_no_event(form: str) -> None:
    forged = {
        event_text(form.format(comm=message[:length], file=message[file_start:][:255]))
        for message in MESSAGES
        for length in range(1, COMM + 1)
        for file_start in (length, 0)
    }
    assert sorted(forged - {""}) == []


XID_LIKE_NAMES = (
    "Xid (0): 79, a",
    "Xid (1:0): 79, ",
    "NVRM: Xid (0): ",
    "SXid (0): 11013",
    "SXid (0): 1, ",
    "NVRM: Xid (PCI:",
    *("Xid (PCI:1): 79", "NVRM: Xid: 79, ", "NVRM: Xid: 79,", "NVRM: Xid: 79", "EDAC MC0: 1 UE"),
)


@pytest.mark.parametrize("comm", XID_LIKE_NAMES)
def test_process_name_yields_no_xid_with_any_suffix(comm: str) -> None:
    """There are more such lines than FORMS, so the rules themselves require more characters than a name can have."""
    suffixes = (
        " (812): text",
        "[812] text",
        "[812]: text",
        ":812 text",
        "/812: text",
        ": text",
        "'s text",
        " (812) text",
    )
    assert len(comm) <= COMM
    assert {event.kind for text in suffixes if (event := parse(comm + text)) is not None} <= set()


@given(
    st.sampled_from(FORMS),
    st.one_of(st.sampled_from(XID_LIKE_NAMES), st.text(max_size=COMM)),
    st.sampled_from(MESSAGES),
)
def test_deceptive_names_yield_no_event(form: str, comm: str, message: str) -> None:
    for file in (message, "x\n" + message):
        assert event_text(form.format(comm=comm[:COMM], file=file[:255])) == ""


XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("log_line", "is_kernel_line"),
    [
        (f"Nov 21 15:00:00 node17 kernel: {XID_79}", True),  # `logger -t kernel` writes the same: not distinguishable
        (f"2026-11-21T15:00:00.123456+00:00 node17 kernel: {XID_79}", True),
        (f"<13>Nov 21 15:00:00 node17 kernel: {XID_79}", False),  # priority of logger: user.notice
        (f"<13>1 2026-11-21T15:00:00.123456+00:00 node17 kernel - - - {XID_79}", False),
        (f"user  :notice: [   12.345678] {XID_79}", False),  # dmesg -x for text written to /dev/kmsg
        (f"<4>1 2026-11-21T15:00:00.123456+00:00 node17 kernel - - - {XID_79}", True),
    ],
)
def test_kernel_line_requires_facility_kern(log_line, is_kernel_line):
    """docs/scan.md and the manual of kernel_log.source state this."""
    stripped = strip_prefix(log_line, 1.8e9)
    assert (stripped is not None and parse(stripped.text) is not None) == is_kernel_line


# Linux 6.18, by an unprivileged user: unshare -Ur -m, then mount(2) of tmpfs, and of an overlay, with a line break in
# an option. /dev/kmsg returns one record; syslog(2), used by imklog and `dmesg -S`, splits it into lines.
RECORDS = (
    rb"3,344,643536300,-;tmpfs: Unknown parameter 'zz\x0aNVRM: Xid (PCI:0000:3b:00): 79'",
    rb"3,346,684296997,-;overlayfs: failed to resolve '/zz\x0aNVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=x, "
    rb"GPU has fallen off the bus.': -2",
    rb"3,349,684302007,-;tmpfs: Unknown parameter 'zz\x0aEXT4-fs error (device vda): ext4_find_entry:1455: inode #2: "
    rb"comm ls: reading directory lblock 0'",
)


@pytest.mark.parametrize("record", RECORDS)
def test_line_break_in_kmsg_record_forges_nothing(record: bytes) -> None:
    parsed_record = parse_record(record)
    assert parsed_record is not None
    assert "\n" in parsed_record.text
    assert parse(parsed_record.text) is None


def test_record_cut_into_lines_yields_forged_event() -> None:
    """Therefore no source of lines is proof: a followed file is only observed (test_observed_log.py)."""
    parsed_record = parse_record(RECORDS[1])
    assert parsed_record is not None
    _, second = (strip_prefix(f"[  684.296997] {line}", 1.8e9) for line in parsed_record.text.split("\n"))
    assert second is not None
    assert event_text(second.text).startswith("xid/79 0000:3b:00.0")
