"""The copy for a vendor has no names of users, jobs, processes and files, and keeps the facts about the hardware."""

from __future__ import annotations

import gzip
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.evidence import archive
from healthd.agent.evidence.case import Cause
from healthd.agent.evidence.manifest import Manifest, SavedPart
from healthd.agent.evidence.redact import redact_file, redact_line, redact_manifest
from healthd.agent.evidence.redacted_copy import gunzip, write_redacted
from healthd.agent.evidence.sources import Entry

USERS = ["alice", "bob_b"]
# Each line contains a secret, marked with «», and facts that must stay.
LINES = [
    ("NVRM: Xid (PCI:0000:1b:00): 31, pid=4242, name=«train.py --user», Ch 8", "Xid (PCI:0000:1b:00): 31, pid=4242"),
    ("CPU: 3 PID: 812 Comm: «python3» Tainted: P", "CPU: 3 PID: 812"),
    ("INFO: task «python3»:812 blocked for more than 120 seconds.", "blocked for more than 120 seconds."),
    ("Out of memory: Killed process 812 («secretjob») total-vm:1kB", "Out of memory: Killed process 812"),
    ("oom-kill: task_memcg=/slurm/uid_«1000»/«job_77»,task=x,uid=«1000»", "oom-kill"),
    ("«python3»[812]: segfault at 0 ip 00007f sp 00007ffd", "segfault at 0"),
    ('audit: comm="«mytool»" exe="«/usr/bin/mytool»"', "audit"),
    ("nfs: server not responding «/home/alice/run»", "not responding"),
    ("mail to «carol@example.org»", "mail to"),
    ("hello «alice» and «bob_b».", "hello"),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s! [«my job»:812]", "CPU#3 stuck for 22s!"),
    ("[ 12.5] oom-kill:constraint=CONSTRAINT_MEMCG,task=«my,job»,pid=812,uid=«1000»", "CONSTRAINT_MEMCG"),
    ("kern  :warn  : 2026-11-29T06:00:00,1+00:00 «my job» invoked oom-killer: order=0", "06:00:00,1+00:00"),
    ("[   12.345678] «job» invoked oom-killer: gfp_mask=0xcc0", "[   12.345678] "),
    ("«a: b» invoked oom-killer: gfp_mask=0xcc0", "gfp_mask=0xcc0"),
    ("[   12.345] [    812]  «1000»   812    12345      567    89   0    0 «my job»", "[    812]"),
    ("x86/split lock detection: #AC: «my job»/812 took a split_lock trap at address: 0x1", "address: 0x1"),
    ("INFO: task «my secret»:1234 blocked for more than 120 seconds.", "blocked for more than 120 seconds."),
    ("INFO: task x:1 is blocked on a mutex likely owned by task «my secret»:1234.", "is blocked on a mutex"),
    ("CPU: 3 PID: 812 Comm: «my secret» Tainted: P", "Tainted: P"),
    ("CPU: 3 UID: «1000» PID: 812 Comm: «my secret» Not tainted 6.8", "Not tainted 6.8"),
    ("NVRM: Xid (PCI:0000:1b:00): 31, pid=4242, name=«a, alice-secret»", "pid=4242"),
    ("NVRM: Xid (PCI:0000:1b:00): 79, pid=4, name=«a, b», GPU has fallen off the bus.", "has fallen off the bus."),
    ("traps: «my job»[812] trap invalid opcode ip:55", "trap invalid opcode ip:55"),
    ("Memory cgroup out of memory: Killed process 812 («my (job)») total-vm:1kB", "total-vm:1kB"),
    ("task:«my job»       state:D stack:0     pid:812", "state:D"),
    *(
        (f"nfs: open of «{path}» failed", "failed")
        for path in ("/export/home/carol", "/u/carol", "/beegfs/x", "/run/user/5")
    ),
    ("open of «//ceph/carol:x,y», denied", "denied"),
]


@pytest.mark.parametrize(("line", "fact"), LINES)
def test_redact_line_removes_secret_and_keeps_fact(line: str, fact: str) -> None:
    redacted = redact_line(line.replace("«", "").replace("»", ""), USERS)
    secrets = [part.partition("»")[0] for part in line.split("«")[1:]]
    assert [secret for secret in secrets if secret in redacted] == []
    assert fact in redacted


def test_hardware_lines_stay() -> None:
    for line in (
        "NVRM: GPU at PCI:0000:1b:00: GPU-6a1b, GPU Board Serial Number: 1650",
        "*** /proc/driver/nvidia/./version and /usr/lib64/libcuda.so.1, /dev/nvidia0 and /sys/bus/pci/devices",
        "LnkCap: Port #0, Speed 32GT/s, Width x16, ASPM L0s/L1, N/A, 0 / 8, <a>1650</a>",
    ):
        assert redact_line(line, USERS) == line


def test_redact_line_takes_linear_time() -> None:
    for piece in ("/", "name=a, ", "task ", "Killed process 1 (", "[1] 1 1 1", "comm=a", "soft lockup [", "#AC: "):
        started = time.process_time()
        redact_line(piece * 20_000, USERS)
        assert time.process_time() - started < 5.0, piece


@given(st.text())
def test_redact_file_survives_any_text(text: str) -> None:
    for name in (
        "first/kernel.log",
        "first/journal-vendor.log",
        "full/nvidia-smi.txt",
        "full/nvidia-bug-report.log.gz",
    ):
        redact_file(name, text, USERS)


JOURNAL = """\
2026-11-29T06:00:00.000001+00:00 gpu-1 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=7, name=secretjob, GPU lost
2026-11-29T06:00:00.000002+00:00 gpu-1 nvidia-persistenced[811]: device 0000:1b:00.0 - persistence mode enabled.
2026-11-29T06:00:00.000003+00:00 gpu-1 sshd[900]: session opened for user alice
2026-11-29T06:00:00.000004+00:00 gpu-1 slurmstepd[901]: job secretjob
    a continued line with secretjob
"""


def test_journal_keeps_kernel_and_nvidia_only() -> None:
    text = redact_file("first/journal-vendor.log", JOURNAL, USERS) or ""
    assert "Xid (PCI:0000:1b:00): 79" in text
    assert "persistence mode enabled" in text
    assert [word for word in ("secretjob", "alice", "gpu-1", "sshd", "slurmstepd") if word in text] == []


SMI = """\
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Serial Number                         : 1650
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 812
            Type                          : C
            Name                          : secretjob --user alice
            Used GPU Memory               : 1000 MiB
GPU 00000000:1C:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
"""
TABLE = "|    0   N/A  N/A       812      C   secretjob                         1000MiB |"


@pytest.mark.parametrize(
    "text", [SMI, "<process_name>secretjob</process_name><serial>1650</serial>", f"1650\n{TABLE}\n"]
)
def test_smi_has_no_process_names(text: str) -> None:
    redacted = redact_file("full/nvidia-smi.txt", text, USERS) or ""
    assert "secretjob" not in redacted
    assert "1650" in redacted
    assert redacted.count("H100") == text.count("H100")


LINE = "____________________________________________"
BUG_REPORT = f"""
{LINE}

Start of NVIDIA bug report log file.

nvidia-bug-report.sh Version: 1
{LINE}

*** /proc/driver/nvidia/./version
*** ls: -r--r--r-- 1 root root 0 2026-11-29
NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15
{LINE}

*** /etc/passwd-like
alice:x:1000
{LINE}

/usr/bin/ps aux | grep nvidia-smi
alice secretjob
{LINE}

/usr/bin/nvidia-smi -q

{SMI}"""


def test_bug_report_keeps_hardware_sections_only() -> None:
    text = redact_file("full/nvidia-bug-report.log.gz", BUG_REPORT, USERS) or ""
    assert [word for word in ("secretjob", "alice") if word in text] == []
    assert [fact for fact in ("570.86.15", "1650", "nvidia-bug-report.sh Version: 1") if fact not in text] == []
    assert text.count(LINE) == BUG_REPORT.count(LINE)


def test_recording_and_unknown_files_are_left_out() -> None:
    assert redact_file("first/record.rec", "x") is None
    assert redact_file("full/something-new.txt", "x") is None


def test_journal_with_forged_identifiers_is_left_out() -> None:
    assert redact_file("first/journal.log", JOURNAL) is None


MANIFEST = Manifest(
    "20261129T060000Z-gpu_xid-79",
    "gpu-1",
    "0.1",
    "boot",
    10.0,
    9.0,
    cluster="secretcluster",
    reason="healthd: job of alice",
    causes=(Cause("gpu_xid/79 0000:1b:00.0", "a-1"), Cause("mount/missing /home/alice", "b-2")),
    parts=(SavedPart("first", 10.0, 1.0, (Entry("record.rec", ("/usr/bin/python3", "--config", "/home/alice/x")),)),),
)


def test_manifest_has_no_names() -> None:
    redacted = redact_manifest(MANIFEST)
    assert redacted.redacted
    assert [word for word in ("gpu-1", "secretcluster", "alice") if word in str(redacted)] == []
    assert redacted.causes[0] == MANIFEST.causes[0]


def members(text: str) -> bytes:
    """Return the file as nvidia-bug-report.sh writes it: each section is compressed and appended."""
    return b"".join(gzip.compress(section.encode()) for section in re.split(f"(?={LINE})", text))


@given(st.lists(st.binary()), st.integers(0, 100), st.integers(0, 60))
def test_gunzip_reads_every_member(sections: list[bytes], cut: int, limit: int) -> None:
    whole, data = b"".join(sections), b"".join(map(gzip.compress, sections))
    assert gunzip(data, 1 << 20) == (whole, bool(sections))
    found, is_whole = gunzip(data[: max(len(data) - cut, 0)], 1 << 20)
    assert whole.startswith(found)
    assert is_whole or cut or not sections
    assert gunzip(data, limit) == (whole[:limit], len(whole) <= limit and bool(sections))


@given(st.binary(), st.binary())
def test_gunzip_survives_any_data(before: bytes, data: bytes) -> None:
    gunzip(data, 100)
    assert gunzip(gzip.compress(before) + data, 1 << 20)[0].startswith(before)


def test_write_redacted_copy(tmp_path: Path) -> None:
    folder = archive.prepare_folder(str(tmp_path))
    names = {"first/journal-vendor.log": JOURNAL.encode(), "first/record.rec": b"x", "first/journal.log": b"x"}
    names["first/kernel.log"] = b"gpu-1 kernel: gpu-1-ib0 of secretcluster is down"
    names["full/nvidia-bug-report.log.gz"] = members(BUG_REPORT)[:-8]  # cut off at a deadline
    files = {}
    for number, (name, data) in enumerate(names.items()):
        files[name] = str(tmp_path / str(number))
        Path(files[name]).write_bytes(data)
    source = f"{folder}/{MANIFEST.id}.tar.gz"
    archive.write_archive(source, MANIFEST, files)
    target = str(tmp_path / "vendor.tar.gz")
    left_out, size = write_redacted(source, target, USERS)
    assert left_out == ["first/record.rec", "first/journal.log", "full/nvidia-bug-report.log.gz"]
    assert size == Path(target).stat().st_size
    assert Path(target).stat().st_mode & 0o777 == 0o600
    assert archive.read_manifest(target).redacted
    with archive.open_archive(target) as tar:
        for member in tar:
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            text = (gzip.decompress(data) if member.name.endswith(".gz") else data).decode()
            assert [word for word in ("secretjob", "alice", "gpu-1", "secretcluster") if word in text] == [], (
                member.name
            )
            if member.name.endswith(".gz"):
                assert [fact for fact in ("Version: 1", "570.86.15", "1650") if fact not in text] == []
