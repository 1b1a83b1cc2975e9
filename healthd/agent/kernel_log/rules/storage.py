"""Rules for disks: NVMe controllers, the block layer, SCSI, ATA, RAID.

    kind nvme. Fields: controller = "nvme0", or pci if the line has only the address; csts. Codes:
    dead                     the driver gave up on the controller, or it is gone from the bus (all CSTS bits set)
    controller_down, timeout, frozen, not_ready, internal_error, init_failed, admin_error   the controller may recover
    path_error, path_restored   state of NVMe over a network, or of one of several paths
    detail                   a further line about one of these

    kind block. Fields: device = the kernel name ("sda", "nvme0n1p1", "dm-3"); operation = READ, WRITE, ... Codes:
    io_error, medium_error, protection_error, offline   data on `device` was not read or written. A disk without any
                                                        sectors counts as io_error
    target_error, reservation, space   the device refused a command
    beyond_end               a request for sectors that the device does not have, or no longer has
    command_failed, timeout, ata_error, dm_error, path_error, path_restored
    raid_disk, raid_failed   faults of an array; `device` is the array; disk
    controller_fault         a fault of a RAID or host bus adapter; controller
    detail                   a further line about one of these

Floppies are ignored, because virtual machines show a drive that does not exist. Sources: Linux 3.10 to 7.3,
drivers/nvme/host, block/blk-core.c, blk-mq.c, fs/buffer.c, drivers/scsi, drivers/ata, drivers/md.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import PCI, Rule, event, event_builder, find_code
from healthd.common.model import KernelEvent
from healthd.common.text import regex

DEVICE = r"([A-Za-z][\w.!-]{0,31})"  # a name of the block layer; "!" replaces "/"
_FLOPPY = regex(r"fd\d")


def _code_table(table: tuple[tuple[str, str], ...]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((regex(pattern), code) for pattern, code in table)


# --- NVMe controllers
#
# nvme nvme0: I/O 775 QID 2 timeout, aborting             nvme 0000:01:00.0: the same until 4.7, and during probing
# nvme nvme0: I/O tag 5 (1005) opcode 0x2 (I/O Cmd) QID 3 timeout, aborting req_op:READ(0) size:4096      from 6.1 on
_NVME = regex(rf"nvme (?:(nvme\d{{1,5}})|{PCI}): (?:NVME-FC\{{\d{{1,5}}\}}: )?(.{{1,300}})", re.S)
_NVME_CODES = _code_table(
    (
        (r"(?:controller is down; will reset|Failed status: )", "controller_down"),
        (r"(?:timing out )?I/O (?:tag )?\d{1,6}\b.{0,100}? QID \d{1,5} timeout, ", "timeout"),
        (r"I/O (?:tag )?\d{1,6}\b.{0,100}? QID \d{1,5} timeout", "path_error"),  # rdma, tcp
        (r"(?:Abort status: ?|Cancelling I/O |Timeout I/O |restart after slot reset)", "detail"),
        (r"Disabling device after reset failure|Removing after probe failure|Device failed to resume", "dead"),
        (r"failure state error detected, request disconnect", "dead"),
        (r"frozen state error detected, reset controller", "frozen"),
        (r"Device not ready; aborting|Device shutdown incomplete", "not_ready"),
        (r"resetting controller due to|Fw activation timeout|Firmware activation timeout", "internal_error"),
        (r"request 0x[0-9a-f]{1,8} genctr mismatch|invalid id \d{1,8} completed on queue", "internal_error"),
        (r"(?:Could not set queue count|Identify (?:Controller|Descriptors|namespace|NS List) failed)", "init_failed"),
        (r"(?:Reading (?:CAP|VS) failed|failed to set APST feature|IO queues (?:not created|lost))", "init_failed"),
        (r"IO queues tagset allocation failed|failed to mark controller", "init_failed"),
        (r"Successfully reconnected|controller connectivity re-established|reconnected", "path_restored"),
        (r"(?:starting error recovery|Reconnecting in \d|Failed reconnect attempt|Removing controller)", "path_error"),
        (r"queue \d{1,5}: (?:timeout|connect|receive|send)|failed nvme_keep_alive_end_io", "path_error"),
        (r"(?:receive failed|failed to send request|failed to connect (?:socket|queue)|socket error)", "path_error"),
        (r"(?:Connect (?:command failed|rejected)|rdma connection establishment failed|disconnected \()", "path_error"),
        (r"(?:address|route) resolution error|ANATT timeout|keep[- ]alive (?:failed|timed out)", "path_error"),
        (r"Property (?:Set|Get) error|Failed to get ANA log", "path_error"),
        (r"controller connectivity lost|io failed due to|transport (?:association event|error)", "path_error"),
    )
)
_CSTS = regex(r"controller is down; will reset: CSTS=(0x[0-9a-fA-F]{1,8})\b|Failed status: (?:0x)?([0-9a-f]{1,8})")


def _nvme(kind: str, match: re.Match[str]) -> KernelEvent | None:
    controller, pci, text = match.groups()
    code = find_code(text, _NVME_CODES)
    status = _CSTS.match(text)
    csts = int(status[1] or status[2], 16) if status is not None else None
    if csts == 0xFFFFFFFF:
        code = "dead"
    fields = (("controller", controller), ("csts", None if csts is None else f"{csts:#x}"))
    return event(kind, match, code, pci or "", fields) if code else None


# block nvme0n1: no usable path - requeuing I/O
_NVME_PATH = regex(rf"block {DEVICE}: no (?:usable|available) path - ")


# nvme0n1: I/O Cmd(0x2) @ LBA 32545872, 8 blocks, I/O Error (sct 0x3 / sc 0x71)      without NVME_VERBOSE_ERRORS
# nvme0n1: Read(0x2) @ LBA 2048, 8 blocks, Unrecovered Read Error (sct 0x2 / sc 0x81) DNR      with it
# nvme0: Admin Cmd(0xa), I/O Error (sct 0x0 / sc 0x6) MORE DNR
_NVME_STATUS = regex(
    r"(nvme\d{1,5})((?:c\d{1,5})?n\d{1,9})?: [A-Za-z][\w /-]{0,60}\(0x([0-9a-f]{1,2})\)"
    r"(?: @ LBA \d{1,20}, \d{1,10} blocks)?, .{0,100}? \(sct 0x([0-9a-f]{1,2}) / sc 0x([0-9a-f]{1,2})\)"
)
_OPERATIONS = {0x0: "FLUSH", 0x1: "WRITE", 0x2: "READ", 0x5: "COMPARE", 0x7D: "ZONE_APPEND"}  # NVM command set
_MEDIA = 2  # status code type: media and data integrity errors; 0 generic, 1 specific to the command, 3 path


def _nvme_status(kind: str, match: re.Match[str]) -> KernelEvent | None:
    controller, namespace, *numbers = match.groups()
    opcode, status_type, status = (int(number, 16) for number in numbers)
    if namespace is None:
        # At each boot, the driver sends requests that some controllers do not support (invalid opcode, field, page).
        is_probe = status_type == 1 or (status_type == 0 and status in (0x1, 0x2, 0xB))
        return None if is_probe else event("nvme", match, "admin_error", fields=(("controller", controller),))
    if opcode not in _OPERATIONS:  # discards, reservations
        return None
    code = "io_error" if status_type != _MEDIA else "protection_error" if 0x82 <= status <= 0x84 else "medium_error"
    fields = (("device", controller + namespace), ("operation", _OPERATIONS[opcode]))
    return event(kind, match, code, fields=fields)


# --- the block layer
#
# end_request: I/O error, dev sda, sector 2048                                            to 3.18
# blk_update_request: critical medium error, dev sda, sector 2048 [op 0x0:(READ) ...]     4.x, 5.x
# print_req_error: I/O error, dev nvme0n1, sector 2048 flags 1                            4.13 to 5.2
# I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x80700 phys_seg 1 prio class 2     from 5.16 on
_REQUEST = regex(
    r"(?:(?:end_request|blk_update_request|print_req_error|blk_print_req_error): )?"
    rf"([A-Za-z/][A-Za-z/ -]{{0,38}}?) error, dev {DEVICE}, sector \d{{1,20}}"
    r"(?: op 0x[0-9a-f]{1,4}:\((\w{1,24})\))?"
)
_STATUSES = {
    **dict.fromkeys(("I/O", "timeout", "device offline", "recoverable transport", "critical transport"), "io_error"),
    **dict.fromkeys(("critical medium", "medium"), "medium_error"),
    "protection": "protection_error",
    **dict.fromkeys(("critical target", "invalid", "duration limit exceeded"), "target_error"),
    **dict.fromkeys(("critical nexus", "reservation conflict"), "reservation"),
    "critical space allocation": "space",
    "operation not supported": "",  # a discard that the device does not support
}


# Operations that a device may refuse. The block layer tries them only once.
_OPTIONAL = frozenset({"DISCARD", "SECURE_ERASE", "WRITE_SAME", "WRITE_ZEROES"})


def _request(kind: str, match: re.Match[str]) -> KernelEvent | None:
    status, device, operation = match.groups()
    code = _STATUSES.get(status, "io_error")
    if code == "target_error" and operation in _OPTIONAL:
        return None
    return _device_event(kind, match, code, device, operation)


def _device_event(
    kind: str, match: re.Match[str], code: str, device: str, operation: str | None = None
) -> KernelEvent | None:
    if not code or _FLOPPY.match(device):
        return None
    return event(kind, match, code, fields=(("device", device), ("operation", operation)))


# Buffer I/O error on device sda1, logical block 5                to 3.18
# Buffer I/O error on dev sda1, logical block 5, lost async page write
_BUFFER = regex(
    rf"Buffer I/O error on dev(?:ice)? {DEVICE}, logical block \d{{1,20}}(?:, (lost|async page read))?"
    rf"|lost page write due to I/O error on {DEVICE}"
)


def _buffer(kind: str, match: re.Match[str]) -> KernelEvent | None:
    operation = {"lost": "WRITE", "async page read": "READ"}.get(match[2] or ("lost" if match[3] else ""))
    return _device_event(kind, match, "io_error", match[1] or match[3], operation)


# kworker/u203:1: attempt to access beyond end of device\ndm-0: rw=1, sector=88, nr_sectors = 8 limit=80
# From 5.14 on, the name of the requesting process comes first.
_BEYOND = regex(rf"(?:.{{1,16}}: )?attempt to access beyond end of device(?:\s{{1,4}}{DEVICE}: rw=)?", re.S)


# nvme2n1: detected capacity change from 800166076416 to 0         block/genhd.c: in bytes up to 5.9, in sectors since
# sda: detected capacity change from 7814037168 to 0               (loop, zram, dm, sr print it when they are released)
_NO_CAPACITY = regex(
    r"(nvme\d{1,5}(?:c\d{1,5})?n\d{1,9}|sd[a-z]{1,4}): detected capacity change from [1-9]\d{0,19} to 0\s*$"
)


# --- SCSI: sd 0:0:0:0: [sda] tag#12 FAILED Result: hostbyte=DID_OK driverbyte=DRIVER_SENSE cmd_age=2s
_SCSI = regex(
    r"(?:sd|scsi|sr|ses|st|sg) (\d{1,5}:\d{1,5}:\d{1,5}:\d{1,9}): (?:\[([a-z]{1,8}\d{0,4})\] ?)?"
    r" {0,4}(?:tag#\d{1,6} ?)?(.{1,200})",
    re.S,
)
_SCSI_CODES = _code_table(
    (
        (r"Sense Key ?: (?:Medium|Hardware) Error", "medium_error"),
        (r"Sense Key ?: (?:Not Ready|Aborted Command|Data Protect)", "command_failed"),
        (r"Sense Key ?: |Add\. Sense: |CDB: |Unhandled (?:error|sense) code|ASC=0x", "detail"),
        (r"rejecting I/O to (?:offline|dead) device|Device offlined - |Medium access timeout failure", "offline"),
        (r"(?:FAILED |UNKNOWN\(0x[0-9a-f]{1,8}\) |Timed out |TIMEOUT_ERROR )?Result: hostbyte=", "command_failed"),
        (r"(?:Synchronize Cache|Read Capacity)\(\d{1,2}\) failed|Test Unit Ready failed", "command_failed"),
        (r"BRCM Debug mfi stat", "detail"),
        (r"timing out command, waited|attempting (?:task abort|\w{1,10} reset)|task abort: ", "timeout"),
    )
)


def _scsi(kind: str, match: re.Match[str]) -> KernelEvent | None:
    address, device, text = match.groups()
    code = find_code(text, _SCSI_CODES)
    return event(kind, match, code, fields=(("device", device), ("scsi", address))) if code else None


# iSCSI and Fibre Channel:  connection1:0: detected conn error (1020)
_SCSI_PATH = regex(
    r" {0,2}(connection\d{1,5}:\d{1,5}|session\d{1,5}|rport-\d{1,5}:\d{1,5}-\d{1,5}): {1,2}"
    r"(?:detected conn error|session recovery timed out|blocked FC remote port time out)"
)


# --- ATA: ata1.00: exception Emask 0x0 SAct 0x0 SErr 0x0 action 0x6 frozen
_ATA = regex(r"(ata\d{1,4}(?:\.\d{1,2})?): (.{1,80})", re.S)
_ATA_CODES = _code_table(
    (
        (r"exception Emask|failed command: |error: \{ [A-Z ]{0,40}UNC|COMRESET failed|qc timeout", "ata_error"),
        (r"revalidation failed|limiting S?ATA link speed|NCQ disabled due to|disabled$|disable device", "ata_error"),
        (r"limiting speed to|failed to (?:IDENTIFY|recover|read log)|reset failed, giving up", "ata_error"),
        (
            r"hard resetting (?:link|port)|link is slow to respond|(?:status|error|SError): \{ |cmd [0-9a-f]{2}/",
            "detail",
        ),
    )
)


def _ata(kind: str, match: re.Match[str]) -> KernelEvent | None:
    code = find_code(match[2].rstrip(), _ATA_CODES)
    return event(kind, match, code, fields=(("port", match[1]),)) if code else None


# --- RAID and host bus adapters
_ADAPTER = regex(
    rf"(?:(?:megaraid_sas|smartpqi|hpsa|aacraid|arcmsr|mpi3mr) {PCI}: (?:scsi\d{{1,4}}: )?"
    r"|(megasas|aacraid|mpt[23]sas(?:_cm)?\d{1,4}|mpi3mr\d{1,4}|hpsa\d{1,4}): )(.{1,160})",
    re.S,
)
_ADAPTER_CODES = _code_table(
    (
        (
            r"(?:Found )?FW (?:is )?in FAULT state|FW detected to be in fault|resetting (?:fusion )?adapter",
            "controller_fault",
        ),
        (r".{0,60}?(?:will reset adapter|kill(?:ing)? ?adapter|[Aa]dapter is dead)", "controller_fault"),
        (r"\d{1,10} \(\w{1,16}/0x[0-9a-f]{1,4}/(?:CRIT|FATAL|DEAD)\) - ", "controller_fault"),
        (r"(?:_?\w{1,40}: ?)?fault_state\(0x|SAS host is non-operational|sending diag reset", "controller_fault"),
        (r"diag reset: FAILED|\w{0,40} ?: hard reset: failed|[Cc]ontroller lockup detected", "controller_fault"),
        (
            r"controller is offline|Host (?:adapter|bus|device) (?:abort|reset) request|(?:\w{1,40}: )?Command Timeout",
            "controller_fault",
        ),
        # Messages about links and drives (originator PL) or RAID (IR), not the firmware's own about unusual requests.
        (r"log_info\(0x3[12]", "detail"),
    )
)


def _adapter(kind: str, match: re.Match[str]) -> KernelEvent | None:
    pci, name, text = match.groups()
    code = find_code(text, _ADAPTER_CODES)
    return event(kind, match, code, pci or "", (("controller", name),)) if code else None


# --- device mapper and software RAID
#
# device-mapper: multipath: 253:3: Failing path 8:16.     to 4.x without the first numbers
_MULTIPATH = regex(r"device-mapper: multipath: (?:\d{1,4}:\d{1,7}: )?(Failing|Reinstating) path (\d{1,4}:\d{1,7})")
_DM = regex(
    r"device-mapper: (?:thin|cache|raid|verity|integrity|crypt|table|snapshots?|space map \w{1,12}): "
    r"(?:\d{1,4}:\d{1,7}: |dm-\d{1,6}: )?.{0,80}?(?:switching pool to (?:read-only|out-of-data-space|failure)"
    r"|aborting current metadata|is corrupted|INTEGRITY|Checksum failed|Invalidating snapshot|I/O error|failed: error)",
    re.S,
)
# md/raid1:md0: Disk failure on sdb1, disabling device.\nmd/raid1:md0: Operation continuing on 1 devices.
_MD = regex(
    rf"md/(?:raid\d{{0,2}}|linear|multipath):?{DEVICE}: (?:Disk failure on {DEVICE}(,| detected, failing)"
    r"|(?:[a-z][a-z\d]{0,31}: )?(Operation continuing on|Cannot continue operation|not enough operational"
    r"|read error not correctable|Raid device exceeded read_error threshold|unrecoverable I/O))"
)
_MD_SUPERBLOCK = regex(r"md: super_written gets error")


def _multipath(kind: str, match: re.Match[str]) -> KernelEvent:
    code = "path_error" if match[1] == "Failing" else "path_restored"
    return event(kind, match, code, fields=(("path", match[2]),))


def _md(kind: str, match: re.Match[str]) -> KernelEvent:
    array, disk, suffix, text = match.groups()
    if text == "Operation continuing on":
        code = "detail"
    else:
        code = (
            "raid_failed"
            if suffix not in (",", None) or (text or "").startswith(("Cannot", "not enough"))
            else "raid_disk"
        )
    return event(kind, match, code, fields=(("device", array), ("disk", disk)))


RULES: tuple[Rule, ...] = (
    Rule("nvme", ("nvme nvme", "nvme 0", "nvme 1"), _NVME, _nvme),
    Rule("nvme", ("able path - ",), _NVME_PATH, event_builder("path_error", device=1)),
    Rule("block", ("(sct 0x",), _NVME_STATUS, _nvme_status),
    Rule("block", (" error, dev ",), _REQUEST, _request),
    Rule("block", ("Buffer I/O error on", "lost page write due"), _BUFFER, _buffer),
    Rule("block", ("attempt to access beyond",), _BEYOND, event_builder("beyond_end", device=1)),
    Rule("block", ("capacity change from",), _NO_CAPACITY, event_builder("io_error", device=1)),
    Rule(
        "block",
        (
            *(" Sense", " CDB: ", "Result: hostbyte=", "rejecting I/O to", "Device offlined", "Offlining disk"),
            *("timing out command", "task abort", " Unhandled ", "attempting ", "BRCM Debug"),
        ),
        _SCSI,
        _scsi,
    ),
    Rule(
        "block",
        ("detected conn error", "session recovery timed", "FC remote port time"),
        _SCSI_PATH,
        event_builder("path_error", path=1),
    ),
    Rule(
        "block",
        (
            *(" Emask", "failed command: ", "{ DRDY", "{ UNC", "COMRESET", "qc timeout", "revalidation failed"),
            *("link is slow", "hard resetting", "SATA link speed", "NCQ disabled", ".00: disable", ".01: disable"),
        ),
        _ATA,
        _ata,
    ),
    Rule(
        "block",
        ("megaraid_sas ", "megasas: ", "mpt2sas", "mpt3sas", "mpi3mr", "smartpqi ", "hpsa ", "aacraid"),
        _ADAPTER,
        _adapter,
    ),
    Rule("block", ("device-mapper: ",), _MULTIPATH, _multipath),
    Rule("block", ("device-mapper: ",), _DM, event_builder("dm_error")),
    Rule("block", ("Disk failure on ", "md/raid"), _MD, _md),
    Rule("block", ("super_written gets",), _MD_SUPERBLOCK, event_builder("raid_disk")),
)
