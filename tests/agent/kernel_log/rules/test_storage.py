"""Tests of disk lines. Each captured line has a comment with its public issue; the other lines follow the formats of
the kernel."""

from __future__ import annotations

import pytest
from cpu_time import cpu_seconds
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.kernel_log.parse import parse
from healthd.agent.kernel_log.rules import storage


def read(text: str) -> tuple[str, str, str]:
    """Return (kind, code, part) of a message, where part is the component that the line names."""
    event = parse(text)
    if event is None:
        return ("", "", "")
    event_fields = dict(event.fields)
    names = ("device", "controller", "port", "path", "scsi")
    return event.kind, event.code, event.pci or next((event_fields[name] for name in names if name in event_fields), "")


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        # github.com/linux-nvme/nvme-cli/issues/151
        ("nvme nvme2: I/O 0 QID 0 timeout, reset controller", "timeout", "nvme2"),
        ("nvme nvme2: Device not ready; aborting reset", "not_ready", "nvme2"),
        ("nvme nvme2: Removing after probe failure status: -19", "dead", "nvme2"),
        # github.com/oxidecomputer/crucible/issues/1239
        ("nvme nvme0: I/O 39 QID 3 timeout, aborting", "timeout", "nvme0"),
        ("nvme nvme0: Abort status: 0x0", "detail", "nvme0"),
        ("nvme nvme0: Device shutdown incomplete; abort shutdown", "not_ready", "nvme0"),
        ("nvme nvme0: I/O 5 QID 1 timeout, completion polled", "timeout", "nvme0"),
        ("nvme nvme0: I/O 5 QID 1 timeout, disable controller", "timeout", "nvme0"),
        ("nvme nvme0: I/O tag 5 (1005) QID 1 timeout, completion polled", "timeout", "nvme0"),
        (
            "nvme nvme1: I/O tag 5 (1005) opcode 0x2 (I/O Cmd) QID 3 timeout, aborting req_op:READ(0) size:4096",
            "timeout",
            "nvme1",
        ),
        ("nvme nvme1: I/O tag 5 (1005) opcode 0x1 (I/O Cmd) QID 3 timeout, reset controller", "timeout", "nvme1"),
        # github.com/leptonai/gpud, components/disk
        ("nvme nvme4: I/O tag 22 (2016) opcode 0x2 (Admin Cmd) QID 0 timeout, reset controller", "timeout", "nvme4"),
        ("nvme 0000:3b:00.0: I/O 17 QID 4 timeout, aborting", "timeout", "0000:3b:00.0"),
        ("nvme 10000:01:00.0: Device not ready; aborting initialisation", "not_ready", "10000:01:00.0"),
        ("nvme 0000:3b:00.0: Cancelling I/O 17 QID 4", "detail", "0000:3b:00.0"),
        ("nvme nvme0: Device not ready; aborting initialisation, CSTS=0x0", "not_ready", "nvme0"),
        ("nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS=0x10", "controller_down", "nvme0"),
        (
            "nvme nvme0: controller is down; will reset: CSTS=0x3, PCI_STATUS read failed (134)",
            "controller_down",
            "nvme0",
        ),
        ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff", "dead", "nvme0"),
        ("nvme 0000:3b:00.0: Failed status: 3, reset controller", "controller_down", "0000:3b:00.0"),
        ("nvme 0000:3b:00.0: Failed status: ffffffff, reset controller", "dead", "0000:3b:00.0"),
        ("nvme nvme0: Failed status: 0x3, reset controller.", "controller_down", "nvme0"),
        ("nvme nvme0: Disabling device after reset failure: -19", "dead", "nvme0"),
        ("nvme nvme0: failure state error detected, request disconnect", "dead", "nvme0"),
        ("nvme nvme0: frozen state error detected, reset controller", "frozen", "nvme0"),
        ("nvme nvme0: resetting controller due to AER", "internal_error", "nvme0"),
        ("nvme nvme0: resetting controller due to persistent internal error", "internal_error", "nvme0"),
        ("nvme nvme0: Fw activation timeout, reset controller", "internal_error", "nvme0"),
        ("nvme nvme0: Identify Controller failed (16641)", "init_failed", "nvme0"),
        ("nvme nvme0: failed to set APST feature (2)", "init_failed", "nvme0"),
        ("nvme nvme0: Could not set queue count (16385)", "init_failed", "nvme0"),
        ("nvme nvme0: IO queues not created", "init_failed", "nvme0"),
        ("nvme nvme0: restart after slot reset", "detail", "nvme0"),
        ("nvme nvme0: Identify namespace failed (-5)", "init_failed", "nvme0"),
        ("nvme nvme0: request 0x18 genctr mismatch (got 0x0 expected 0x1)", "internal_error", "nvme0"),
        ("nvme nvme0: invalid id 24 completed on queue 3", "internal_error", "nvme0"),
        ("nvme nvme5: Property Set error: 880, offset 0x14", "path_error", "nvme5"),
        ("nvme nvme5: starting error recovery", "path_error", "nvme5"),
        ("nvme nvme5: Reconnecting in 10 seconds...", "path_error", "nvme5"),
        ("nvme nvme5: Failed reconnect attempt 3", "path_error", "nvme5"),
        ("nvme nvme5: queue 2: timeout cid 0x4005 type 4 opcode 0x2 (Read)", "path_error", "nvme5"),
        ("nvme nvme5: I/O 12 QID 2 timeout", "path_error", "nvme5"),
        ("nvme nvme5: failed nvme_keep_alive_end_io error=10", "path_error", "nvme5"),
        ("nvme nvme5: NVME-FC{2}: controller connectivity lost. Awaiting Reconnect", "path_error", "nvme5"),
        ("nvme nvme5: Successfully reconnected (1 attempt)", "path_restored", "nvme5"),
        ("block nvme5n1: no usable path - requeuing I/O", "path_error", "nvme5n1"),
        ("block nvme5n1: no available path - failing I/O", "path_error", "nvme5n1"),
        ("nvme0: Admin Cmd(0x9), I/O Error (sct 0x0 / sc 0x6) DNR ", "admin_error", "nvme0"),
    ],
)
def test_parse_reads_nvme_faults(text: str, code: str, part: str) -> None:
    assert read(text) == ("nvme", code, part)


@pytest.mark.parametrize(
    ("text", "code", "part"),
    [
        ("blk_update_request: I/O error, dev sda, sector 28751848", "io_error", "sda"),
        ("end_request: I/O error, dev vda, sector 2048", "io_error", "vda"),
        ("end_request: critical medium error, dev sda, sector 2048", "medium_error", "sda"),
        # github.com/Requiem4Eternity/Appstream/issues/90
        ("print_req_error: I/O error, dev sdc, sector 628940360 flags 80700", "io_error", "sdc"),
        (
            "sd 1:0:2:0: [sdc] tag#3023 FAILED Result: hostbyte=DID_BAD_TARGET driverbyte=DRIVER_OK",
            "command_failed",
            "sdc",
        ),
        ("sd 1:0:2:0: [sdc] tag#3023 CDB: Read(10) 28 00 25 7c de 48 00 00 08 00", "detail", "sdc"),
        # github.com/longhorn/longhorn/issues/2775
        ("sd 7:0:0:1: [sdf] tag#2 Sense Key : Medium Error [current] ", "medium_error", "sdf"),
        ("sd 7:0:0:1: [sdf] tag#2 Add. Sense: Unrecovered read error", "detail", "sdf"),
        ("print_req_error: critical medium error, dev sdf, sector 960", "medium_error", "sdf"),
        ("sd 0:0:0:0: [sda] tag#0 Sense Key : Hardware Error [current] [descriptor]", "medium_error", "sda"),
        ("sd 0:0:0:0: [sda] tag#0 Sense Key : Aborted Command [current] ", "command_failed", "sda"),
        ("sd 0:0:0:0: [sda] tag#0 Sense Key : Illegal Request [current] ", "detail", "sda"),
        ("sd 2:0:0:0: [sda]  Sense Key : Medium Error [current] [descriptor]", "medium_error", "sda"),
        ("sd 2:0:0:0: [sda] Unhandled error code", "detail", "sda"),
        ("sd 2:0:0:0: [sda]  Result: hostbyte=DID_NO_CONNECT driverbyte=DRIVER_OK", "command_failed", "sda"),
        ("sd 2:0:0:0: [sda] tag#1 UNKNOWN(0x2003) Result: hostbyte=0x05 driverbyte=0x00", "command_failed", "sda"),
        ("sd 2:0:0:0: rejecting I/O to offline device", "offline", "2:0:0:0"),
        ("sd 2:0:0:0: [sdb] tag#1 rejecting I/O to dead device", "offline", "sdb"),
        ("sd 2:0:0:0: Device offlined - not ready after error recovery", "offline", "2:0:0:0"),
        ("sd 2:0:0:0: [sdb] Medium access timeout failure. Offlining disk!", "offline", "sdb"),
        ("sd 2:0:0:0: [sdb] Synchronize Cache(10) failed: Result: hostbyte=DID_NO_CONNECT", "command_failed", "sdb"),
        ("sd 2:0:0:0: [sdb] Test Unit Ready failed: Result: hostbyte=DID_NO_CONNECT", "command_failed", "sdb"),
        ("sd 0:2:0:0: [sda] tag#9 BRCM Debug mfi stat 0x2d, data len requested/completed 0x1000/0x0", "detail", "sda"),
        ("mpt3sas_cm0: Command Timeout", "controller_fault", "mpt3sas_cm0"),
        ("sd 2:0:0:0: timing out command, waited 180s", "timeout", "2:0:0:0"),
        ("sd 2:0:0:0: attempting task abort!scmd(0x00000000c0ffee00)", "timeout", "2:0:0:0"),
        (
            "critical target error, dev nvme0n1, sector 0 op 0x1:(WRITE) flags 0x800 phys_seg 1",
            "target_error",
            "nvme0n1",
        ),
        (
            "protection error, dev sda, sector 88 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
            "protection_error",
            "sda",
        ),
        ("device offline error, dev sdb, sector 88 op 0x1:(WRITE) flags 0x800 phys_seg 1", "io_error", "sdb"),
        ("timeout error, dev nvme0c1n1, sector 88 op 0x1:(WRITE) flags 0x800 phys_seg 1", "io_error", "nvme0c1n1"),
        ("reservation conflict error, dev sdb, sector 88 op 0x1:(WRITE) flags 0x800", "reservation", "sdb"),
        ("I/O error, dev loop3, sector 88 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2", "io_error", "loop3"),
        ("Buffer I/O error on device dm-0, logical block 2477053", "io_error", "dm-0"),
        ("Buffer I/O error on dev sdn, logical block 135872, lost async page write", "io_error", "sdn"),
        ("Buffer I/O error on dev sr0, logical block 0, async page read", "io_error", "sr0"),
        ("lost page write due to I/O error on dm-0", "io_error", "dm-0"),
        (
            "nvme0n1: Write(0x1) @ LBA 100492368, 2048 blocks, Data Transfer Error (sct 0x0 / sc 0x4) ",
            "io_error",
            "nvme0n1",
        ),
        (
            "nvme0n1: Read(0x2) @ LBA 8, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR ",
            "medium_error",
            "nvme0n1",
        ),
        ("nvme0n1: I/O Cmd(0x2) @ LBA 8, 8 blocks, I/O Error (sct 0x2 / sc 0x82) ", "protection_error", "nvme0n1"),
        # github.com/ocaml/infrastructure/issues/58, github.com/kdave/btrfs-progs/issues/948
        ("ata2.00: exception Emask 0x0 SAct 0x5c50001f SErr 0x0 action 0x0", "ata_error", "ata2.00"),
        ("ata2.00: failed command: READ FPDMA QUEUED", "ata_error", "ata2.00"),
        ("ata2.00: error: { UNC }", "ata_error", "ata2.00"),
        ("ata2.00: status: { DRDY ERR }", "detail", "ata2.00"),
        (
            "ata7.00: cmd 25/00:08:80:67:70/00:00:74:00:00/e0 tag 27 dma 4096 in\n"
            "         res 61/04:08:80:67:70/00:00:74:00:00/e0 Emask 0x1 (device error)",
            "detail",
            "ata7.00",
        ),
        ("ata1: hard resetting link", "detail", "ata1"),
        ("ata1: link is slow to respond, please be patient (ready=0)", "detail", "ata1"),
        ("ata1: COMRESET failed (errno=-16)", "ata_error", "ata1"),
        ("ata1.00: qc timeout (cmd 0xec)", "ata_error", "ata1.00"),
        ("ata1.00: revalidation failed (errno=-5)", "ata_error", "ata1.00"),
        ("ata1: limiting SATA link speed to 3.0 Gbps", "ata_error", "ata1"),
        ("ata1.00: disabled", "ata_error", "ata1.00"),
        (
            "megaraid_sas 0000:03:00.0: Found FW in FAULT state, will reset adapter scsi0.",
            "controller_fault",
            "0000:03:00.0",
        ),
        ("megaraid_sas 0000:03:00.0: resetting fusion adapter scsi0.", "controller_fault", "0000:03:00.0"),
        (
            "megaraid_sas 0000:02:00.0: 5381 (550404498s/0x0002/FATAL) - Unrecoverable medium error during recovery",
            "controller_fault",
            "0000:02:00.0",
        ),
        ("mpt3sas_cm0: fault_state(0x2100)!", "controller_fault", "mpt3sas_cm0"),
        ("mpt3sas_cm0: sending diag reset !!", "controller_fault", "mpt3sas_cm0"),
        ("mpt2sas0: SAS host is non-operational !!!!", "controller_fault", "mpt2sas0"),
        # github.com/trapexit/bbf/issues/29
        ("mpt2sas_cm0: log_info(0x31080000): originator(PL), code(0x08), sub_code(0x0000)", "detail", "mpt2sas_cm0"),
        ("smartpqi 0000:5c:00.0: controller is offline: status code 0x6100c", "controller_fault", "0000:5c:00.0"),
        ("hpsa 0000:03:00.0: Controller lockup detected: 0x00130000 after 30", "controller_fault", "0000:03:00.0"),
        ("device-mapper: multipath: Failing path 8:16.", "path_error", "8:16"),
        ("device-mapper: multipath: 253:3: Failing path 8:16.", "path_error", "8:16"),
        ("device-mapper: multipath: 253:3: Reinstating path 8:16.", "path_restored", "8:16"),
        ("device-mapper: thin: 253:4: switching pool to read-only mode", "dm_error", ""),
        ("device-mapper: verity: 254:0: data block 5 is corrupted", "dm_error", ""),
        (
            "md/raid1:md0: Disk failure on sdb1, disabling device.\nmd/raid1:md0: Operation continuing on 1 devices.",
            "raid_disk",
            "md0",
        ),
        ("md/raid:md127: Disk failure on nvme3n1, disabling device.", "raid_disk", "md127"),
        ("md/raid1:md0: Operation continuing on 1 devices.", "detail", "md0"),
        ("md/raid0:md127: Disk failure on nvme1n1 detected, failing array.", "raid_failed", "md127"),
        # github.com/leptonai/gpud, components/disk
        ("md/raid0md0: Disk failure on nvme0n1p1 detected, failing array.", "raid_failed", "md0"),
        ("md/raid10:md2: Disk failure on nvme2n1p1 detected, failing array", "raid_failed", "md2"),
        ("kworker/u203:1: attempt to access beyond end of device", "beyond_end", ""),
        ("attempt to access beyond end of device", "beyond_end", ""),
        (
            "python3: attempt to access beyond end of device\ndm-0: rw=1, sector=88, nr_sectors = 8 limit=80",
            "beyond_end",
            "dm-0",
        ),
        ("md/raid:md5: Cannot continue operation (2/4 failed).", "raid_failed", "md5"),
        ("md/raid:md5: read error not correctable (sector 8 on sdc1).", "raid_disk", "md5"),
        ("md: super_written gets error=-5", "raid_disk", ""),
        (" connection1:0: detected conn error (1020)", "path_error", "connection1:0"),
        (" session1: session recovery timed out after 120 secs", "path_error", "session1"),
        (" rport-1:0-3: blocked FC remote port time out: removing target", "path_error", "rport-1:0-3"),
    ],
)
def test_parse_reads_disk_path_and_array_faults(text: str, code: str, part: str) -> None:
    assert read(text) == ("block", code, part)


@pytest.mark.parametrize(
    "text",
    [
        "nvme nvme0: pci function 0000:01:00.0",
        "nvme 0000:01:00.0: enabling device (0000 -> 0002)",
        "nvme nvme0: missing or invalid SUBNQN field.",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "nvme nvme0: allocated 64 MiB host memory buffer.",
        "nvme nvme0: Does your device have a faulty power saving mode enabled?",
        'nvme nvme0: Try "nvme_core.default_ps_max_latency_us=0 pcie_aspm=off" and report a bug',
        "nvme nvme0: Ignoring bogus Namespace Identifiers",
        "nvme nvme0: rescanning namespaces.",
        "nvme nvme0: D3 entry latency set to 10 seconds",
        "nvme nvme0: Shutdown timeout set to 10 seconds",
        'nvme nvme5: new ctrl: NQN "nqn.2014-08.org", addr 10.0.0.1:4420',
        'nvme nvme5: Removing ctrl: NQN "nqn.2014-08.org"',
        "nvme0: Admin Cmd(0x6), I/O Error (sct 0x0 / sc 0x2) DNR ",
        "nvme0: Identify(0x6), Invalid Field in Command (sct 0x0 / sc 0x2) DNR ",
        "nvme0n1: Dataset Management(0x9) @ LBA 0, 8 blocks, Invalid Field in Command (sct 0x0 / sc 0x2) DNR ",
        " nvme0n1: p1 p2 p3",
        "operation not supported error, dev loop0, sector 88 op 0x9:(WRITE_ZEROES) flags 0x800 phys_seg 0 prio class 2",
        # Commands that a disk may refuse. The kernel does not repeat them.
        "critical target error, dev nvme0n1, sector 0 op 0x3:(DISCARD) flags 0x800 phys_seg 1",
        "blk_update_request: critical target error, dev sda, sector 88 op 0x9:(WRITE_ZEROES) flags 0x800 phys_seg 0",
        # github.com/nfs-ganesha/nfs-ganesha/issues/656: smartctl queries a page that the adapter does not have
        "mpt3sas_cm0: log_info(0x30030101): originator(IOP), code(0x03), sub_code(0x0101)",
        "blk_update_request: I/O error, dev fd0, sector 0",
        "I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "Buffer I/O error on dev fd0, logical block 0, async page read",
        "blk_update_request: 59 callbacks suppressed",
        "buffer_io_error: 19980 callbacks suppressed",
        "sd 0:0:2:0: [sdb] Mode Sense: 1f 00 00 08",
        "sd 0:0:2:0: [sdb] Attached SCSI disk",
        "sd 0:0:2:0: Power-on or device reset occurred",
        "ata1: SATA link up 6.0 Gbps (SStatus 133 SControl 300)",
        "ata1: SATA link down (SStatus 0 SControl 300)",
        "ata1.00: configured for UDMA/133",
        "ata1: EH complete",
        "md/raid1:md0: active with 2 out of 2 mirrors",
        "md/raid1:md0: read error corrected (8 sectors at 88 on sda1)",
        "md: recovery of RAID array md0",
        "md: md0: recovery done.",
        "device-mapper: uevent: version 1.0.3",
        "device-mapper: ioctl: 4.48.0-ioctl (2023-03-01) initialised: dm-devel@redhat.com",
        "megaraid_sas 0000:03:00.0: FW now in Ready state",
        "mpt3sas_cm0: port enable: SUCCESS",
    ],
)
def test_parse_ignores_healthy_disk_lines(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "python3[1234]: segfault at 0 error 4 in nvme nvme0: Disabling device after reset failure: -19",
        "attempt to acces: Disabling device after reset failure, attempt to access beyond end of device",
        "myjob: nvme nvme0: Removing after probe failure",
        "oom-kill:constraint=CONSTRAINT_MEMCG,task=I/O error, dev sda, sector 5,pid=1,uid=0",
        "Memory cgroup out of memory: Killed process 7 (sd 0:0:0:0: rej) total-vm:1kB, rejecting I/O to offline device",
    ],
)
def test_parse_ignores_disk_text_from_users(text: str) -> None:
    event = parse(text)
    assert event is None or event.kind not in ("nvme", "block")


PIECES = [literal for rule in storage.RULES for literal in rule.literals] + [
    *(
        "nvme0",
        "sda",
        "0000:01:00.0",
        "sd 0:0:0:0: ",
        "ata1.00: ",
        "[sda] ",
        "tag#1 ",
        ": ",
        "(0x2)",
        " @ LBA 1, 2 blocks, ",
    ),
    *(
        "md/raid1:md0: ",
        "QID 3 timeout, ",
        "I/O 5 ",
        "I/O error",
        "device-mapper: thin: ",
        "A" * 40,
        " " * 40,
        "0" * 40,
    ),
]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=20)), max_size=12))
def test_parse_accepts_any_text(pieces: list[str]) -> None:
    event = parse("".join(pieces))
    if event is not None and event.kind in ("nvme", "block"):
        assert all(len(value) <= 128 for _, value in event.fields)


@pytest.mark.parametrize("piece", [*PIECES, "nvme nvme0: I/O 5 (", "end_request: a ", "nvme0: a ", "md/raid1:a"])
def test_parse_is_fast_for_long_line(piece: str) -> None:
    for prefix in (
        "",
        "nvme nvme0: I/O 1 ",
        "sd 0:0:0:0: [sda] ",
        "megaraid_sas 0000:03:00.0: ",
        "device-mapper: thin: ",
    ):
        text = prefix + piece * (16_000 // len(piece))
        assert cpu_seconds(lambda text=text: [parse(text) for _ in range(20)], 0.5) < 0.5


@pytest.mark.parametrize("status", ["device resource", "zone open", "nonblocking retry", "of a later kernel"])
def test_unlisted_block_status_is_io_error(status: str) -> None:
    assert read(f"{status} error, dev sda, sector 88 op 0x1:(WRITE) flags 0x800") == ("block", "io_error", "sda")


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("nvme2n1: detected capacity change from 800166076416 to 0", "nvme2n1"),
        ("nvme0c1n3: detected capacity change from 7814037168 to 0", "nvme0c1n3"),
        ("sda: detected capacity change from 7814037168 to 0", "sda"),
    ],
)
def test_capacity_change_to_zero_is_io_error(text, device):
    event = parse(text)
    assert (event.kind, event.code, event.field("device")) == ("block", "io_error", device)


@pytest.mark.parametrize(
    "text",
    [
        "loop0: detected capacity change from 4096 to 0",
        "zram0: detected capacity change from 32742400 to 0",
        "dm-4: detected capacity change from 34359738368 to 0",
        "sr0: detected capacity change from 1024 to 0",
        "sda1: detected capacity change from 7814037168 to 0",
        "sda: detected capacity change from 0 to 7814037168",
        "sda: detected capacity change from 0 to 0",
        "nvme2n1: detected capacity change from 800166076416 to 960197124096",
        "nvme2n1: detected capacity change from 800166076416 to 05",
    ],
)
def test_other_capacity_changes_are_no_event(text):
    assert parse(text) is None
