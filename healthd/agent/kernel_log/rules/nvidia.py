"""Rules for NVIDIA's drivers: Xid, SXid, GPUs that are lost or cannot be initialised, and messages without an Xid about
NVLink and the GPU's system processor (GSP).

    kind                code and fields
    xid                 the Xid's number; process, pid, and if the message has them link, unit, fatal, sm, ...
    sxid                the SXid's number; switch, fatal, link; shutdown, if the line reports one
    gpu_fallen_off_bus  fallen_off_bus: a GPU is lost, with or without an Xid 79
                        gpu_is_lost: a call failed because its GPU is lost
                        rm_init_failed: the driver could not initialise a GPU; status = the three numbers in the line
                        probe_failed: the driver did not accept a GPU at all; count
    peermem             invalid_context: from nvidia-peermem, through which network cards access GPU memory
    gsp                 rpc_timeout, crash, pmu_halted, boot_failed, boot_error, reset_required: a fault of the GSP
                        dump: registers and history that follow such a fault
                        message: any other line. Field of all: gpu = the driver's number of the GPU, if the line has one
    nvlink              rx_detect, training, error; gpu, link
    rc_watchdog         locked: the driver's own test channel makes no progress; gpu

Most gsp and nvlink lines have the form "NVRM: GPU6 _kgspBootGspRm: text", with the number since about driver 590;
only errors are printed.

Formats: the driver's source (open-gpu-kernel-modules: kernel_rc.c, osinit.c, osapi.c, common_nvswitch.h,
nvlog_printf.c, kernel_gsp*.c, kernel_nvlink*.c, nvlink_linux.c); for older drivers, users' logs.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import FURTHER, PCI, SM, Rule, event, event_builder
from healthd.common.model import KernelEvent
from healthd.common.text import regex

# Xid: NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
# Pasted logs may mask the address within "(...)"; the text after "PCI:" is then not an address. The first drivers
# printed no address ("NVRM: Xid: 13, ..."), or only bus and device ("(0001:00)").
# journald splits an injected "NVRM: Xid ..." into identifier and message, hence the optional "NVRM: ".
# A process may be called "Xid (0): 79, a", and some kernel lines begin with such a name of 15 characters. The
# text matched here is longer, or has letters where the kernel continues with the pid.
_XID = regex(
    r"(?:(?:NVRM: )?Xid \((PCI:[^\s()]{3,32}|[0-9A-Fa-f:.]{7,32})(?: GPU-I:(\d{1,3}))?(?: GPU-CI:(\d{1,3}))?\)"
    r"|NVRM: Xid(?=: \d{1,4}, {0,4}\w)): (\d{1,4})(?![\d.])(?:,\s*|\s|$)"
)
_PID = regex(r"pid=(?:'?(\d{1,10})'?|'?[^\d',=\s][^',=]{0,15}'?)\s*(?:,\s*|$)")
# A process name has at most 15 characters and may contain ", " itself, so it ends where known driver text begins.
_MESSAGES = (
    "Ch |Channel |channel |GPU |Graphics |MMU |NVLink|NVLINK|Timeout |Contained|Uncontained|Row |Dynamic Page "
    "|Page |An |errorString |RLW|TLW|SAW|NETIR|TREX|NVLPW|MSE|BAD_|CMDre|intr |engmask |physAddr |GSP |FECS |CTX "
    "|Key |Head |PE0|CE|ECC |DBE |SBE |DRAM|SRAM|Uncorrect|uncorrect|Unrecover|Unhandled |Corrected |High |Fault "
    "|Reset |Resource |PMU |PBDMA|LTC|PCIE_|PCIe |C2C |SEC|INFOROM|Inforom|InfoROM|Video |NVENC|NVDEC|NVJPG|OFA"
    "|Error|error|Failed |failed |Recovery |Shader |vGPU |RC |Class |SKED|ROBUST_|Memory |ESR |Watchdog|Unable "
    "|L1 |[0-9a-f]{8} |0x"
)
_NAME_ENDS = regex(rf",\s*(?={_MESSAGES})")
_QUOTED = regex(r"'([^']{0,64})'(?:,\s*|$)")


def _xid(kind: str, match: re.Match[str]) -> KernelEvent:
    address, instance, compute, code = match.groups()
    pid, process, message = _parse_process(match.string[match.end() :])
    fields = [("gpu_instance", instance), ("compute_instance", compute), *_xid_details(code, message)]
    return event(kind, match, str(int(code)), address or "", fields, pid, process)


def _parse_process(remainder: str) -> tuple[int | None, str | None, str]:
    """Return (pid, process, message) from the text after the Xid's number: "pid=12, name=python3, Ch 00000008"."""
    pid, process = None, None
    match = _PID.match(remainder)
    if match is not None:
        pid, remainder = int(match[1]) if match[1] else None, remainder[match.end() :]
    if remainder.startswith("name="):
        process, remainder = _name(remainder[5:])
    return pid, process if process != "<unknown>" else None, remainder


def _name(remainder: str) -> tuple[str, str]:
    quoted = _QUOTED.match(remainder)
    if quoted is not None:
        return quoted[1], remainder[quoted.end() :]
    end = _NAME_ENDS.search(remainder, 0, 48)
    if end is not None:
        return remainder[: end.start()], remainder[end.end() :]
    name, _, message = remainder.partition(",")
    return name.rstrip()[:64], message.lstrip()


_RECOVERY = regex(r"GPU recovery action changed from 0x([0-9a-f]{1,8}) \([^)]*\) to 0x([0-9a-f]{1,8})", re.I)
_NVLINK5 = regex(
    r"([A-Z]\w{0,31}(?: Degraded)?)\s{1,8}(Non-?fatal|Link Fatal|Fatal)\s{1,8}XC\d{1,3}\s{1,8}i\d{1,3}\s{1,8}"
    r"Link\s{1,8}(-?\d{1,3})(?:\s{1,8}\((0x[0-9a-f]{1,8})\s{1,8}(0x[0-9a-f]{1,8}))?",
    re.I,
)
# GPUs up to Hopper. NVIDIA's catalogue describes the bits of the first, third, fourth and fifth of seven words.
#   NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)
#   NVLink: Failed to train link 3 to remote PCI:0000:08:00          (a link that is not up)
_NVLINK4 = regex(
    r"NVLink: (fatal|non-?fatal)? ?error detected on link (\d{1,3})"
    r"(?:\s?\(((?:0x)?[0-9a-f]{1,8}(?:, ?(?:0x)?[0-9a-f]{1,8}){0,9}))?",
    re.I,
)
_LINK_DOWN = regex(
    r"(?:NVLink|NVLINK): (?:failed to train link (\d{1,3})|link (\d{1,3})(?: is)? (?:down|inactive|disabled))", re.I
)
# The processor that raised the exception: GPC and TPC and, from Volta on, one of the TPC's two SMs.
#   Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter
_SM = regex(r"Graphics SM (?:Warp|Global) Exception on \(GPC (\d{1,3}), TPC (\d{1,3})(?:, SM (\d{1,3}))?\)")
_CAUSED_BY = regex(r" caused by previous Xid (\d{1,4})\s*$")


def _xid_details(code: str, message: str) -> list[tuple[str, str | None]]:
    number = int(code)
    details: list[tuple[str, str | None]] = []
    if number == 154 and (match := _RECOVERY.match(message)):
        # Use only the numbers, because the words in parentheses differ between driver branches.
        details = [("recovery_from", str(int(match[1], 16))), ("recovery_to", str(int(match[2], 16)))]
    elif 144 <= number <= 150 and (match := _NVLINK5.match(message)):
        fatal = "false" if match[2].lower().startswith("non") else "true"
        details = [("unit", match[1]), ("fatal", fatal), ("link", str(int(match[3])))]
        details += [("intr_info", match[4]), ("error_status", match[5])]
    elif number == 74 and (match := _NVLINK4.match(message)):
        word = (match[1] or "").lower()
        details = [("link", str(int(match[2]))), ("fatal", str(word == "fatal").lower() if word else None)]
        registers = regex(", ?").split(match[3]) if match[3] else []
        details += [
            ("register", " ".join(registers) or None),
            ("reset", "true" if _requires_reset(registers) else None),
        ]
    elif number == 74 and (match := _LINK_DOWN.match(message)):
        details = [("link", str(int(match[1] or match[2]))), ("inactive", "true")]
    elif match := _GSP_INSTANCE.search(message, 0, 200):
        details = [("gpu", match[1])]
    elif number == 13 and (match := _SM.match(message)):
        details = [(SM, ".".join(word for word in match.groups() if word))]
    caused = _CAUSED_BY.search(message, max(0, len(message) - 40))
    return [*details, ("caused_by", caused[1])] if caused else details


def _requires_reset(registers: list[str]) -> bool:
    """Return True if bit 18 of an Xid 74's fourth word is set: "a reset of the fabric is required" (NVIDIA's
    catalogue).

    The bit has its own field, because two lines with different values of the bit report two faults.
    """
    return len(registers) > 3 and bool(int(registers[3], 16) >> 18 & 1)


# "... RPC response from GPU4 GSP!": the GPU's driver-internal number in lines without an address.
_GSP_INSTANCE = regex(r" from GPU(\d{1,3}) GSP!")


# SXid: nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Non-fatal, Link 60 Minion Link DLREQ interrupt
# Two or more further lines of an event follow, mixed with those of other switches ("Severity 0 Engine instance 60 ...",
# "Data {0x0000003c, ...}"). The field `further` adds these lines to the event. On their own, they still name the switch
# and the code.
_SXID = regex(
    r"(?:nvidia-nvswitch(\d{1,3}): )?SXid \((PCI:[^\s()]{3,32}|[0-9A-Fa-f:.]{7,32})\): (\d{1,6})(?!\d)"
    r"(?:(,\s*(?:Severity \d+ Engine instance|Data \{))|(?:,\s*(Fatal|Non-fatal)\b)?(?:,\s*Link (-?\d{1,3})\b)?)",
)
# Some lines without a severity report that the switch shuts down, even if their code usually means less:
#   10004, PMGR OVERT Threshold reached. Shutting Down; 28005, OSFP Thermal SOE Heartbeat Shutdown
_SHUTS_DOWN = regex(r",[^\n]{1,80}?\bShut(?:ting D|d)own\s*$")


def _sxid(kind: str, match: re.Match[str]) -> KernelEvent:
    switch, address, code, further, severity, link = match.groups()
    shutdown = not (further or severity) and _SHUTS_DOWN.match(match.string, match.end())
    fatal = {"Fatal": "true", "Non-fatal": "false"}.get(severity)
    number = str(int(link)) if link else None
    fields = (("switch", switch), ("fatal", fatal), ("link", number), (FURTHER, "true" if further else None))
    return event(kind, match, str(int(code)), address, (*fields, ("shutdown", "true" if shutdown else None)))


# NVRM: GPU at 0000:01:00.0 has fallen off the bus.           (to driver 390)
# NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.         (newer)
# NVRM: The NVIDIA GPU 0000:b3:00.0 / NVRM: (PCI ID: 10de:26b5) installed in this system has / NVRM: fallen off
# the bus and is not responding to commands.                  (at probe: one record of three lines)
# NVRM: GPU 0000:01:00.0: GPU is lost, skipping PM event / NVRM: nvCheckOkFailedNoLog: Check failed: GPU lost from
# the bus [NV_ERR_GPU_IS_LOST] (0x0000000F) returned from ... (calls that fail from then on, often hundreds of lines)
# NVRM: GPU0 _intrServiceStallCommonCheckBegin: Failed GPU reg read : 0xffffffff. Check whether ...
# NVRM: _threadNodeCheckTimeout: API_GPU_ATTACHED_SANITY_CHECK failed!
_SHORT_PCI = r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?)"
_LOST = regex(
    rf"NVRM: (?:GPU (?:at )?(?:PCI:)?{_SHORT_PCI}:? (?:GPU )?has fallen off the bus"
    rf"|The NVIDIA GPU {PCI}[^\n]{{0,80}}(?:\n {{0,40}}NVRM: [^\n]{{0,80}}){{0,2}}fallen off the bus"
    r"|(?!Xid|GPU at|API)[^\n'(]{0,80}fallen off the bus)"
)
_CALLS_FAIL = regex(
    rf"NVRM: (?:GPU {PCI}: GPU is lost\b|(?:GPU(\d{{1,3}}) )?(?:(?:Check|Assertion) failed: )?"
    r"GPU lost from the bus \[NV_ERR_GPU_IS_LOST\]"
    r"|(?:GPU(\d{1,3}) )?\w{1,64}: (?:[^\n]{0,200}\[NV_ERR_GPU_IS_LOST\]"
    r"|Failed GPU reg read ?: 0xf{8}\b|API_GPU_ATTACHED_SANITY_CHECK failed))"
)


# NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168); old drivers do not name the GPU.
# NVRM: GPU 0000:a1:00.0: rm_init_adapter failed, device minor number 6
_RM_INIT = regex(
    rf"NVRM: (?:GPU (?:at )?{PCI}: )?(?:RmInitAdapter failed!(?: \(([0-9A-Fa-fx:]{{1,40}})\))?"
    r"|rm_init_adapter failed\b)"
)


# NVRM: The NVIDIA probe routine failed for 1 device(s).           (kernel-open/nvidia/nv.c, when the module is loaded)
# NVRM: The NVIDIA probe routine was not called for 1 device(s).   (another driver uses them)
# NVRM: None of the NVIDIA devices were initialized.                 (older: graphics adapters ... initialized!)
# NVRM: No NVIDIA devices probed.
_PROBE = regex(
    r"NVRM: (?:The NVIDIA probe routine (?:failed|was not called) for (\d{1,4}) device|No NVIDIA devices probed"
    r"|None of the NVIDIA (?:devices|graphics adapters) were initialized)"
)


# nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing
_PEERMEM = regex(r"nvidia-peermem:? \w{1,64}:\d{1,6} ERROR detected invalid context")


# NVRM: GPU0 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted.
_GSP_MESSAGE = regex(
    r"NVRM: (?:GPU(\d{1,3}) )?(_?kgsp\w{1,64}|_?[gG]sp[A-Z]\w{1,64}|RmFetchGsp\w{1,40}|_?kfsp\w{1,64}"
    r"|gpuWaitForGfw\w{1,40}|_issueRpc\w{1,40}|rpcRmApi\w{1,40}|rpcSendMessage\w{0,40}): ([^\n]{0,400})"
)
# The first match is used, because a boot line may also contain "timeout". "Failed to boot GSP." is not final: the
# driver tries again and, when it gives up, prints "boot attempts exceeded" or that RmInitAdapter failed.
_GSP_CODES = (
    ("pmu_halted", regex(r"PMU has halted", re.I)),
    ("crash", regex(r"GSP-CrashCat|GSP-RM entered into ICD|trigger bugcheck|GSP \w{1,16} (?:exception|panic)")),
    (
        "boot_failed",
        regex(
            r"cannot proceed with booting GSP|GPU (?:is likely|may be) in a bad state|boot attempts exceeded"
            r"|Cannot initialize GSP",
            re.I,
        ),
    ),
    ("reset_required", regex(r"marked for reset|marking GPU\d{1,3} for reset", re.I)),
    (
        "dump",
        regex(r"^(?:\*{8}|Note: |GSP: MAILBOX|GSP bin buildId|Gsp Trace Crash Buffer|\d+,\d+,\d+,|={4,} *$)"),
    ),
    (
        "rpc_timeout",
        regex(
            r"heartbeat timed out|unresponsive|GSP-RM is slow|timed?[ -]?out for fn"
            r"|sanity check failed|Rate limiting GSP RPC|Timeout waiting for RPC|rpcSendMessage failed",
            re.I,
        ),
    ),
)
_BOOT = regex(r"boot|Init|WaitForRm|Fwsec|FWSEC|Booter|Scrubber|Fetch|_?kfsp|Vbios|VBIOS|Gfw", re.I)
_FAILS = regex(r"\b(?:fail|error|unable|cannot|could not|time(?:d )?-?out|no |not )", re.I)


def _gsp_message(kind: str, match: re.Match[str]) -> KernelEvent:
    index, function, text = match.groups()
    return event(kind, match, _gsp_code(function, text), "", (("gpu", index),))


def _gsp_code(function: str, text: str) -> str:
    # A report begins with a row of asterisks that contains text, and ends with a row without text.
    if text.startswith("*") and ("GSP Timeout" in text or "GSP Failure" in text):
        return "rpc_timeout"
    for code, pattern in _GSP_CODES:
        if pattern.search(text):
            return code
    if "DumpDebugState" in function or "CoreDump" in function:
        return "dump"
    return "boot_error" if _BOOT.search(function) and _FAILS.search(text) and "(non-fatal)" not in text else "message"


# NVRM: GPU6 RmInitAdapter: Cannot initialize GSP firmware RM
# NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00 (printing 1 of every 30). The GPU likely ...
# nvidia 0000:01:00.0: Direct firmware load for nvidia/535.129.03/gsp_ga10x.bin failed with error -2
_GSP_EVENT = regex(
    rf"NVRM: (?:GPU(\d{{1,3}}) )?RmInitAdapter: (?!Failed to load gsp_log)[^\n]{{0,80}}\bGSP\b"
    r"|NVRM: (Rate limiting GSP RPC) error prints for GPU at (PCI:[0-9A-Fa-f:.]{1,32})"
    rf"|nvidia {PCI}: Direct firmware load for nvidia/[\w./-]{{1,64}}/gsp(?!_log)\w{{0,32}}\.bin failed"
)


def _gsp_event(kind: str, match: re.Match[str]) -> KernelEvent:
    index, limited, limited_pci, load_pci = match.groups()
    code = "rpc_timeout" if limited else "boot_error" if load_pci else "boot_failed"
    return event(kind, match, code, limited_pci or load_pci or "", (("gpu", index),))


# A watchdog's report has no Xid and no prefix: GSP task watchdog timeout @ pc:0x1b3e200, partition:4#0, task:3
_WATCHDOG = regex(r"(?:NVRM: )?GSP \w{1,16} watchdog timeout @ pc:")


# NVRM: GPU0 nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED]
# NVRM: nvAssertFailedNoLog: Assertion failed: Back to back GSP RPC timeout detected! GPU marked for reset @ ...
# NVRM: GPU0 nvAssertOkFailedNoLog: Assertion failed: ... returned from kgspWaitForRmInitDone(pGpu, pKernelGsp) @ ...
_ASSERTION = regex(
    r"NVRM: (?:GPU(\d{1,3}) )?nv(?:Assert|Check)\w{1,32}: "
    r"(?:[^\n]{0,200}?(NV_ERR_RESET_REQUIRED|marked for reset)|[^\n]{0,300}?(?:kgsp|kernel_gsp|rpcRecvPoll|kfsp))"
)


def _assertion(kind: str, match: re.Match[str]) -> KernelEvent:
    return event(kind, match, "reset_required" if match[2] else "message", "", (("gpu", match[1]),))


# NVRM: GPU0 krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7
# (kernel_rc_watchdog_callback.c, 595.45.04; without the number in older drivers)
_RC_WATCHDOG = regex(r"NVRM: (?:GPU(\d{1,3}) )?krcWatchdog\w{0,40}: RC watchdog: GPU is probably locked!")


# Lines that follow a fault of the GSP: a table of remote calls, registers, stacks; indented, or with the number alone.
# NVRM: GPU4 RPC history (CPU -> GSP): / NVRM:      0    76   GSP_RM_CONTROL        0x0000000020801813 ...
_DUMP = regex(
    r"NVRM: (?:GPU(\d{1,3}) )?(?:GSP RPC buffer contains function|RPC (?:event )?history \(CPU|kflcnCoreDump\w{0,32}: "
    r"|_?kcrashcat\w{0,40}: | {3,}[^\s\n]| *-{8,}\[ end crash report)"
)


# NVRM: GPU0 knvlinkLogAliDebugMessages_GB100: ALI Error for GPU 0::linkId 3: 0x10001
# Printed as an error, but not an error: "Fabric base addr 8000000000 is assigned to GPU 3".
_KNVLINK = regex(r"NVRM: (?:GPU(\d{1,3}) )?_?(?:k?nvlink\w{1,64}): ([^\n]{0,400})")
_NVLINK_FAULT = regex(
    r"fail|\berror|unable|unavailable|time(?:d ?)?-?out|lost|dropp|degraded|bad state|doesn't have|out of memory"
    r"|unexpected|assertion|disabled due",
    re.I,
)
_TRAINING = regex(r"\btrain|ALI Error|\bALI\b|to active|activate link", re.I)
_LINK = regex(r"\blink(?:Id|id)?:? ?(\d{1,3})\b", re.I)
_ON_GPU = regex(r"\bGPU ?(\d{1,3})\b")


def _knvlink(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _nvlink_fault(kind, match, match[1], match[2])


# NVRM: NVLink training failed ... / NVRM: GPU 0000:65:00.0: NVLink ... error
_NVLINK_MESSAGE = regex(
    rf"NVRM: (?!Xid)(?:GPU {PCI}: |GPU(\d{{1,3}}) )?((?:\w{{1,64}}: )?[^\n:]{{0,40}}\bNVLINK\b[^\n]{{0,300}})", re.I
)


def _nvlink_message(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _nvlink_fault(kind, match, match[2], match[3], match[1] or "")


# nvidia-nvlink: Unable to create cdev / nvidia-nvswitch0: Failed to initialize device; SXids have their own rule.
_NVLINK_CORE = regex(r"nvidia-(?:nvlink|nvswitch\d{0,3}): (?!SXid)([^\n]{0,400})")


def _nvlink_core(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _nvlink_fault(kind, match, None, match[1])


def _nvlink_fault(
    kind: str, match: re.Match[str], index: str | None, text: str, address: str = ""
) -> KernelEvent | None:
    """Return the event, or None if the line reports no fault. The driver's functions also log normal actions."""
    if not _NVLINK_FAULT.search(text):
        return None
    code = "rx_detect" if regex("Rx ?Det", re.I).search(text) else "training" if _TRAINING.search(text) else "error"
    link, on_gpu = _LINK.search(text), _ON_GPU.search(text)
    fields = (("gpu", index or (on_gpu[1] if on_gpu else None)), ("link", link[1] if link else None))
    return event(kind, match, code, address, fields)


RULES = (
    Rule("xid", ("Xid (", "NVRM: "), _XID, _xid, varies=("recovery_from", "register", "caused_by", SM)),
    Rule("sxid", ("Xid (",), _SXID, _sxid),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _LOST, event_builder("fallen_off_bus", pci=(1, 2))),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _CALLS_FAIL, event_builder("gpu_is_lost", pci=1, gpu=(2, 3))),
    Rule(
        "gpu_fallen_off_bus",
        ("NVRM: ",),
        _RM_INIT,
        event_builder("rm_init_failed", pci=1, status=2),
        varies=("status",),
    ),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _PROBE, event_builder("probe_failed", count=1), varies=("count",)),
    Rule("peermem", ("nvidia-peermem",), _PEERMEM, event_builder("invalid_context")),
    Rule("rc_watchdog", ("RC watchdog",), _RC_WATCHDOG, event_builder("locked", gpu=1)),
    Rule("gsp", ("NVRM: ",), _GSP_MESSAGE, _gsp_message),
    Rule("gsp", ("NVRM: ", "Direct firmware load"), _GSP_EVENT, _gsp_event),
    Rule("gsp", ("watchdog timeout @",), _WATCHDOG, event_builder("dump")),
    Rule("gsp", ("NVRM: ",), _ASSERTION, _assertion),
    Rule("gsp", ("NVRM: ",), _DUMP, event_builder("dump", gpu=1)),
    Rule("nvlink", ("NVRM: ",), _KNVLINK, _knvlink),
    Rule("nvlink", ("NVRM: ",), _NVLINK_MESSAGE, _nvlink_message),
    Rule("nvlink", ("nvidia-nv",), _NVLINK_CORE, _nvlink_core),
)
