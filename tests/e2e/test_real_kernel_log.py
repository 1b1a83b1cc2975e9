"""The machine's own kernel log, written by root as programs do: facility user, one open per write."""

import json
import os
import select
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest
from requirements import require, require_programs, require_root

from healthd.host import Host
from healthd.kernel_log import event_of, open_source

ROOT = Path(__file__).parents[2]


@pytest.fixture
def inject():
    """Writes one line into the kernel's log. The fault in it is on a GPU that no machine has."""
    require_root()
    if not os.path.exists("/dev/kmsg"):
        require("there is no /dev/kmsg")

    def write(text):
        with open("/dev/kmsg", "w", buffering=1) as file:
            file.write(f"<12>{text}\n")

    return write


@pytest.fixture
def kmsg():
    opened = []

    def kmsg(cursor=None, injected=True):
        opened.append(open_source("kmsg", "/", cursor, injected))
        return opened[-1]

    yield kmsg
    for source in opened:
        source.close()


def drain(source):
    lines = source.read()
    while source.pending:
        lines += source.read()
    return lines


def xid():
    """A line that is only this test's, on an address that is no GPU's."""
    mark = uuid.uuid4().hex[:8]
    return f"NVRM: Xid (PCI:fffe:1f:1f): 79, pid=1, name={mark}, GPU has fallen off the bus."


def test_a_line_in_the_kernels_log_is_read_at_once_with_the_right_time(inject, kmsg):
    source = kmsg()
    drain(source)
    text = xid()
    inject(text)
    assert select.select([source.fileno()], [], [], 5)[0]
    (line,) = [line for line in drain(source) if line.text == text]
    assert abs(line.time - time.time()) < 2
    assert not line.history
    event = event_of(line, Host().boot_id())
    assert event is not None
    assert (event.code, event.pci) == ("79", "fffe:1f:1f.0")


def test_what_a_program_wrote_does_not_count_unless_it_is_admitted(inject, kmsg):
    text = xid()
    inject(text)
    assert text not in [line.text for line in drain(kmsg(injected=False))]
    assert text in [line.text for line in drain(kmsg(injected=True))]


def test_a_restart_reads_each_line_once(inject, kmsg):
    source = kmsg()
    drain(source)
    cursor, text = source.cursor, xid()
    inject(text)
    again = kmsg(cursor)
    assert [line.text for line in drain(again) if line.text == text] == [text]
    assert [line.text for line in drain(kmsg(again.cursor)) if line.text == text] == []


JOURNAL = textwrap.dedent(
    """
    import json, os, select, subprocess, sys, time
    from healthd.host import Host
    from healthd.kernel_journal import read_journal
    from healthd.kernel_log import open_source

    def inject(text):
        with open("/dev/kmsg", "w", buffering=1) as file:
            file.write(f"<12>{text}\\n")

    def until(source, text):
        got = []
        for _ in range(100):
            got += source.read()
            if any(text in line.text for line in got):
                return got
            select.select([source.fileno()], [], [], 0.1)
        raise SystemExit(f"{text} did not come through the journal")

    text, boot_id = sys.argv[1], Host().boot_id()
    kmsg = open_source("kmsg", "/", None, True)
    started = time.clock_gettime(time.CLOCK_MONOTONIC)
    inject(text + "1")
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
        "late": max(abs(line.time - time.time()) for line in filled if line.text.startswith(text)),
        "limited": len(read_journal(boot_id, 0, 2**62, 3)),
    }))
    """
)


def test_the_journal_gives_the_same_lines_as_the_ring_each_once(inject, tmp_path):
    """A journald of its own in a mount namespace of its own: nothing of it is left on the machine."""
    require_programs("unshare", packages="util-linux")
    journald = "/lib/systemd/systemd-journald"
    if not os.access(journald, os.X_OK) or not os.path.exists("/etc/machine-id"):
        require("there is no systemd-journald here")
    text = xid()[:-1]
    (tmp_path / "journal.py").write_text(JOURNAL)
    script = f"""
        mount --make-rprivate / && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/log &&
        mkdir -p /run/systemd/journal /run/log/journal && {journald} & journald=$!
        for _ in $(seq 50); do [ -e /run/systemd/journal/socket ] && break; sleep 0.1; done
        {sys.executable} {tmp_path}/journal.py "$1"; status=$?; kill $journald; wait; exit $status"""
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", text],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    late = told.pop("late")
    assert told == {
        "history": [True],
        "again": [text + "2"],
        "new": [False],
        "same_usec": True,
        "filled": [text + "1", text + "2"],
        "before": [text + "1"],
        "kernel_only": [],
        "limited": 3,
    }
    assert late < 30
