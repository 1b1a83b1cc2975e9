"""The kernel log of the machine itself.

Root writes into it as programs do (facility user, one open per write). The kernel writes about processes, files and
cgroups with misleading names.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from of_this_run import name_with_run
from requirements import require, require_programs, require_root

from healthd.agent.kernel_log.file import FollowedFile
from healthd.agent.kernel_log.log_reader import RETRY_SECONDS, KernelLogReader
from healthd.agent.kernel_log.open_source import open_source
from healthd.agent.kernel_log.source import make_event
from healthd.host.host import Host

ROOT = Path(__file__).parents[2]


@pytest.fixture
def inject():
    """Return a function that writes one line into the kernel log. Its fault is on a GPU that does not exist."""
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")

    def write(text):
        with open("/dev/kmsg", "w", buffering=1) as file:
            file.write(f"<12>{text}\n")

    return write


@pytest.fixture
def kmsg():
    sources = []

    def kmsg(cursor=None, injected=True):
        sources.append(open_source("kmsg", "/", cursor, injected))
        return sources[-1]

    yield kmsg
    for source in sources:
        source.close()


def read_all(source):
    lines = source.read()
    while source.pending:
        lines += source.read()
    return lines


def unique_xid_line():
    """Return a line unique to this test, with an address of no GPU."""
    mark = uuid.uuid4().hex[:8]
    return f"NVRM: Xid (PCI:fffe:1f:1f): 79, pid=1, name={mark}, GPU has fallen off the bus."


def test_line_is_read_at_once_with_correct_time(inject, kmsg):
    source = kmsg()
    read_all(source)
    text, started_at = unique_xid_line(), time.time()
    inject(text)
    assert select.select([source.fileno()], [], [], 60)[0]
    (line,) = [line for line in read_all(source) if line.text == text]
    assert started_at - 2 < line.time < time.time() + 2
    assert not line.history
    event = make_event(line, Host().boot_id())
    assert event is not None
    assert (event.code, event.pci) == ("79", "fffe:1f:1f.0")


def test_line_of_program_counts_only_if_injection_is_accepted(inject, kmsg):
    text = unique_xid_line()
    inject(text)
    assert text not in [line.text for line in read_all(kmsg(injected=False))]
    assert text in [line.text for line in read_all(kmsg(injected=True))]


def test_restart_reads_each_line_once(inject, kmsg):
    source = kmsg()
    read_all(source)
    cursor, text = source.cursor, unique_xid_line()
    inject(text)
    reopened = kmsg(cursor)
    assert [line.text for line in read_all(reopened) if line.text == text] == [text]
    assert [line.text for line in read_all(kmsg(reopened.cursor)) if line.text == text] == []


# --- a reader that receives nothing, is closed, or is too slow


def test_silent_reader_is_detected_by_second_reader(inject, kmsg):
    source = kmsg()
    read_all(source)
    source.check_delivery()
    text = unique_xid_line()
    inject(text)
    source.check_delivery()
    assert text in [line.text for line in read_all(source)], "a reader that receives lines is not silent"
    source.check_delivery()
    empty_pipe, writer = os.pipe2(os.O_NONBLOCK)
    os.dup2(empty_pipe, source.fileno())  # gives neither a line nor an error
    inject(unique_xid_line())
    assert read_all(source) == []
    source.check_delivery()
    with pytest.raises(OSError, match="misses lines that another reader gets"):
        source.read()
    os.close(empty_pipe)
    os.close(writer)


def test_silent_or_closed_reader_is_reopened_without_loss(inject):
    now = 1000.0
    log = KernelLogReader("kmsg", "/", Host().boot_id(), True, time.time, lambda: now)
    log.open()
    read_texts(log)
    empty_pipe, writer = os.pipe2(os.O_NONBLOCK)
    for failures, break_reader in enumerate((lambda fd: os.dup2(empty_pipe, fd), os.close), start=1):
        log.end_round()
        ((descriptor, _),) = log.waits()
        break_reader(descriptor)
        text = unique_xid_line()
        inject(text)
        assert read_texts(log) == []
        log.end_round()
        read_texts(log)
        log.end_round()
        read_texts(log)
        assert (log.status.alive, log.status.restarts_total) == (False, failures), log.status
        assert [(source_status.source, source_status.up) for source_status in log.sources] == [
            ("kernel_log", False),
            ("journal", True),
        ]
        now += RETRY_SECONDS[0]
        assert text in read_texts(log)
        assert log.status.alive
        assert [(source_status.source, source_status.up) for source_status in log.sources] == [
            ("kernel_log", True),
            ("journal", True),
        ]
    log.close()
    os.close(empty_pipe)
    os.close(writer)


def read_texts(log):
    texts = [event.text for event in log.read()]
    while log.deadline == 0.0:
        texts += [event.text for event in log.read()]
    return texts


def test_overflow_of_ring_is_counted_as_lost_and_reported_for_journal(inject, kmsg):
    """This overwrites the machine's ring once: the old lines are gone afterwards, as after any storm."""
    ring_bytes = ctypes.CDLL(None, use_errno=True).klogctl(10, None, 0)
    if not 0 < ring_bytes <= 4 << 20:
        require(f"a ring of {ring_bytes} bytes is too large to be filled")
    source = kmsg()
    read_all(source)
    before, gaps = source.cursor["sequence"], source.gaps
    filler = "x" * 900
    for number in range(ring_bytes // 900 + 200):
        inject(f"healthd test fills the ring {number} {filler}")
    text = unique_xid_line()
    inject(text)
    received = read_all(source)
    assert text in [line.text for line in received], "the last line, apart from later lines of others"
    assert source.overruns >= 1
    assert source.lost > 0
    assert before + source.lost + len(received) >= source.cursor["sequence"] - 50, "each record is lost or received"
    (gap,) = source.gaps[len(gaps) :]
    assert gap.since_usec < gap.until_usec
    assert any("overwritten" in note for note in source.take_notes())


# --- misleading names: the kernel itself writes these lines

FAULT = "NVRM: Xid (PCI:0000:01:00): 79, pid=1, name=x, GPU has fallen off the bus."
CRASH = """
#include <sys/prctl.h>
int main(int argc, char **argv) {
    if (argc > 1) prctl(PR_SET_NAME, argv[1]);
    *(volatile int *) 0 = 0;
}
"""
HOG = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode())
memory = bytearray(200 << 20)
for place in range(0, len(memory), 4096):
    memory[place] = 1
"""
COMMS = ("NVRM: Xid (PCI:0", "Xid (0): 79, a", "NVRM: Xid (0): ", "SXid (0): 11013", "\nXid (0): 79, a")


def assert_no_event(source, mark, tmp_path, lines=()):
    """Check that the kernel wrote lines with `mark` and that no source makes an event. `lines`: read before."""
    lines = list(lines)
    deadline = time.monotonic() + 60
    while not any(mark in line.text for line in lines) and time.monotonic() < deadline:
        select.select([source.fileno()], [], [], 0.2)
        lines += source.read()
    time.sleep(0.1)
    lines += read_all(source)
    matching = [line for line in lines if mark in line.text]
    assert matching, "the kernel wrote no such line"
    events = [event for line in lines if (event := make_event(line, "b1")) is not None]
    assert [event.text for event in events if event.kind != "oom" and mark in event.text] == []
    # The same lines as written by a syslog daemon that reads /dev/kmsg: one line per record, control characters
    # escaped.
    log = tmp_path / "kern.log"
    escaped = (line.text.replace("\n", "#012") for line in matching)
    log.write_text("".join(f"Nov 21 15:00:00 node17 kernel: [13696.658651] {text}\n" for text in escaped))
    followed = FollowedFile(str(log), None)
    events = [event for line in followed.read() if (event := make_event(line, "b1")) is not None]
    followed.close()
    assert [event.text for event in events if event.kind != "oom"] == []
    return matching


@pytest.mark.parametrize("comm", COMMS)
def test_crash_of_process_named_like_fault_is_no_event(kmsg, tmp_path, comm):
    require_root()
    require_programs("gcc", packages="gcc")
    program = tmp_path / f"x\n{FAULT}"  # the kernel also prints the name of the crashed file
    source = tmp_path / "crash.c"
    source.write_text(CRASH)
    subprocess.run(["gcc", "-o", str(program), str(source)], check=True)
    log = kmsg(injected=False)
    read_all(log)
    mark, lines = comm[:15].strip(), []
    for _ in range(60):  # the kernel rate-limits such lines: 10 in 5 s for the whole machine
        completed = subprocess.run([FAULT, comm], executable=str(program), check=False)
        assert completed.returncode == -signal.SIGSEGV
        time.sleep(0.2)
        lines += read_all(log)
        if any(mark in line.text for line in lines):
            break
        time.sleep(1)
    assert_no_event(log, mark, tmp_path, lines)


def test_oom_kill_in_cgroup_named_like_fault_is_only_oom_kill(kmsg, tmp_path):
    require_root()
    with limited_cgroup(f"{FAULT} {name_with_run('oom')}") as folder:
        log = kmsg(injected=False)
        read_all(log)
        join = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'
        argv = ["sh", "-c", join, "sh", folder, sys.executable, "-c", HOG, "Xid (0): 79, a"]
        completed = subprocess.run(argv, check=False)
        assert completed.returncode == -signal.SIGKILL
        lines = assert_no_event(log, "Xid (0): 79, a", tmp_path)
    assert any(f"memcg=/{FAULT}" in line.text for line in lines)


@contextlib.contextmanager
def limited_cgroup(name):
    """Yield the folder of a cgroup limited to 20 MiB (version 1 or 2)."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = f"{base}/{name}"
        try:
            os.mkdir(folder)
        except OSError:
            continue
        try:
            if os.path.exists(f"{folder}/{limit}"):
                Path(f"{folder}/{limit}").write_text("20M")
                with contextlib.suppress(OSError):
                    Path(f"{folder}/memory.swap.max").write_text("0")
                yield folder
                return
        finally:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    break
                time.sleep(0.1)
    require("no cgroup can limit memory here")


def test_program_cannot_write_with_kernel_facility(kmsg):
    """Only root may write to /dev/kmsg at all. The kernel changes facility 0 to that of users."""
    require_root()
    source = kmsg(injected=False)
    read_all(source)
    text = unique_xid_line()
    for priority in ("", "<0>", "<4>", "<7>", "<12>", "<2047>"):
        with open("/dev/kmsg", "w", buffering=1) as file:
            file.write(f"{priority}{text}\n")
    assert [line.text for line in read_all(source) if line.text == text] == []
    raw = kmsg(injected=True)
    assert [line.text for line in read_all(raw) if line.text == text] == [text] * 6


JOURNAL = textwrap.dedent(
    """
    import json, os, select, subprocess, sys, time
    from healthd.host.host import Host
    from healthd.agent.kernel_log.journal import read_journal
    from healthd.agent.kernel_log.open_source import open_source

    def inject(text):
        with open("/dev/kmsg", "w", buffering=1) as file:
            file.write(f"<12>{text}\\n")

    def entries_of(text):
        # Without "NVRM: ", which journald takes for the name of the writing program.
        from systemd import journal
        reader = journal.Reader()
        reader.seek_head()
        return len([entry for entry in reader if text[6:] in str(entry.get("MESSAGE"))])

    def until_taken(text, count):
        # journald stores an entry long after its sender has continued.
        for _ in range(1200):
            if entries_of(text) >= count:
                return
            time.sleep(0.1)
        raise SystemExit(f"{count} entries of {text} did not reach the journal")

    def until(source, text):
        got = []
        end = time.monotonic() + 120
        while time.monotonic() < end:
            got += source.read()
            if any(text in line.text for line in got):
                return got
            select.select([source.fileno()], [], [], 0.1)
        raise SystemExit(f"{text} did not come through the journal")

    text, boot_id = sys.argv[1], Host().boot_id()
    # Forged lines: logger(1) under every name, the output of a service with a priority, systemd's own protocol.
    forged = f"NVRM: Xid (PCI:0000:01:00): 79, pid=1, name={text[-14:-6]}F"
    for argv in (["-t", "kernel"], ["-t", "NVRM"], ["-p", "kern.crit", "-t", "kernel"], ["--id=1", "-t", "kernel"], []):
        subprocess.run(["logger", "-u", "/run/systemd/journal/dev-log", *argv, forged], check=True)
    subprocess.run(["systemd-cat", "-t", "kernel", "echo", f"<2>{forged}"], check=True)
    fields = f"MESSAGE={forged}\\nSYSLOG_FACILITY=0\\nSYSLOG_IDENTIFIER=kernel\\n_TRANSPORT=kernel\\n"
    subprocess.run(["logger", "--journald"], input=fields.encode(), check=True)
    until_taken(forged, 7)
    kmsg = open_source("kmsg", "/", None, True)
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    inject(text + "1")
    until_taken(text + "1", 1)  # this entry must be history when the reader starts
    live = open_source("journal", "/", None, True)
    first = until(live, text + "1")
    inject(text + "2")
    second = until(open_source("journal", "/", live.cursor, True), text + "2")
    lines = kmsg.read()
    while kmsg.pending:
        lines += kmsg.read()
    since = int((started - 1) * 1e6)
    filled = read_journal(boot_id, since, 2**62, 10000, True)
    usec = next(line.usec for line in lines if line.text == text + "2")
    before = read_journal(boot_id, since, usec, 10000, True)
    print(json.dumps({
        "history": [line.history for line in first if line.text == text + "1"],
        "again": [line.text for line in second if line.text.startswith(text)],
        "new": [line.history for line in second if line.text.startswith(text)],
        "same_usec": {line.usec for line in filled if line.text.startswith(text)}
            == {line.usec for line in lines if line.text.startswith(text)},
        "filled": [line.text for line in filled if line.text.startswith(text)],
        "before": [line.text for line in before if line.text.startswith(text)],
        "kernel_only": [line.text for line in read_journal(boot_id, since, 2**62, 10000) if text in line.text],
        "forged": [line.text for line in read_journal(boot_id, 0, 2**62, 10**6, True) if forged[6:] in line.text],
        "written": entries_of(forged),
        "late": max(abs(line.time - time.time()) for line in filled if line.text.startswith(text)),
        "limited": len(read_journal(boot_id, 0, 2**62, 3)),
    }))
    """
)


def test_journal_gives_same_lines_as_ring_each_once(inject, tmp_path):
    """A separate journald in its own mount namespace leaves no trace on the machine."""
    require_programs("unshare", packages="util-linux")
    journald = "/lib/systemd/systemd-journald"
    if not os.access(journald, os.X_OK) or not os.path.exists("/etc/machine-id"):
        require("there is no systemd-journald here")
    text = unique_xid_line()[:-1]
    (tmp_path / "journal.py").write_text(JOURNAL)
    script = f"""
        mount --make-rprivate / && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/log &&
        mkdir -p /run/systemd/journal /run/log/journal && {journald} & journald=$!
        for _ in $(seq 600); do [ -e /run/systemd/journal/socket ] && break; sleep 0.1; done
        {sys.executable} {tmp_path}/journal.py "$1"; status=$?; kill $journald; wait; exit $status"""
    completed = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", text],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    results = json.loads(completed.stdout)
    clock_difference = results.pop("late")
    assert results == {
        "history": [True],
        "again": [text + "2"],
        "new": [False],
        "same_usec": True,
        "filled": [text + "1", text + "2"],
        "before": [text + "1"],
        "kernel_only": [],
        "limited": 3,
        "forged": [],
        "written": 7,
    }
    assert clock_difference < 300


FORGE = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"none", b"/mnt", b"tmpfs", 0, ("zz\\n" + sys.argv[1]).encode())
"""


def test_line_break_in_mount_option_forges_only_unproven_line_in_dmesg(kmsg):
    """A user without privileges can do the same in a user namespace, but some distributions forbid that for a test."""
    require_root()
    require_programs("unshare", "dmesg", packages="util-linux")
    disk = f"fake{os.getpid()}"
    forged = f"EXT4-fs error (device {disk}): ext4_find_entry:1455: inode #2: comm ls: reading directory lblock 0"
    subprocess.run(["unshare", "--mount", sys.executable, "-c", FORGE, forged], check=True, timeout=240)
    (line,) = [line for line in read_all(kmsg(injected=False)) if disk in line.text]
    assert f"'zz\n{forged}" in line.text
    assert make_event(line, "b") is None
    for dmesg_options in (["-S"], [], ["-T"]):
        output = subprocess.run(["dmesg", *dmesg_options], check=True, capture_output=True, timeout=240).stdout
        assert disk.encode() in output
        argv = [sys.executable, "-m", "healthd", "scan", "--json", "-"]
        scanned = subprocess.run(argv, input=output, capture_output=True, timeout=240)
        events = [event for event in map(json.loads, scanned.stdout.splitlines()) if disk in event["text"]]
        assert [(event["code"], event["unproven"]) for event in events] == [("filesystem/errors", True)], dmesg_options
