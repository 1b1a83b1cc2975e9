"""What NVIDIA's driver says in its own words, without an Xid, about the GPU's system processor (GSP) and NVLink.

    gsp     code = rpc_timeout, crash, pmu_halted, boot_failed, boot_error, reset_required; dump: registers and history
            after one of them; message: anything else. Field gpu: the driver's number of the GPU, where there is one
    nvlink  code = rx_detect, training, error; fields gpu and link
    rc_watchdog  code = locked: the driver's own test channel does not progress; field gpu

Most lines have the form "NVRM: GPU6 _kgspBootGspRm: text", with the number since about driver 590; only errors are
printed. Formats: open-gpu-kernel-modules (nvlog_printf.c; kernel_gsp*.c, kernel_nvlink*.c, nvlink_linux.c).
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import PCI, Rule, event, reads
from healthd.common.model import KernelEvent
from healthd.common.text import regex

# NVRM: GPU0 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted.
_GSP_WORDS = regex(
    r"NVRM: (?:GPU(\d{1,3}) )?(_?kgsp\w{1,64}|_?[gG]sp[A-Z]\w{1,64}|RmFetchGsp\w{1,40}|_?kfsp\w{1,64}"
    r"|gpuWaitForGfw\w{1,40}|_issueRpc\w{1,40}|rpcRmApi\w{1,40}|rpcSendMessage\w{0,40}): ([^\n]{0,400})"
)
# The first match counts: a line of a boot may say "timeout" as well. "Failed to boot GSP." is not the end: the driver
# tries again, and says "boot attempts exceeded" or that RmInitAdapter failed when it gives up.
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


def _gsp_words(kind: str, match: re.Match[str]) -> KernelEvent:
    index, function, text = match.groups()
    return event(kind, match, _gsp_code(function, text), "", (("gpu", index),))


def _gsp_code(function: str, text: str) -> str:
    # The head of a report is a row of asterisks with words in it; a row without words closes it.
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
_GSP_OTHER = regex(
    rf"NVRM: (?:GPU(\d{{1,3}}) )?RmInitAdapter: (?!Failed to load gsp_log)[^\n]{{0,80}}\bGSP\b"
    r"|NVRM: (Rate limiting GSP RPC) error prints for GPU at (PCI:[0-9A-Fa-f:.]{1,32})"
    rf"|nvidia {PCI}: Direct firmware load for nvidia/[\w./-]{{1,64}}/gsp(?!_log)\w{{0,32}}\.bin failed"
)


def _gsp_other(kind: str, match: re.Match[str]) -> KernelEvent:
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
# Printed as an error, but none: "Fabric base addr 8000000000 is assigned to GPU 3".
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
_NVLINK_WORDS = regex(
    rf"NVRM: (?!Xid)(?:GPU {PCI}: |GPU(\d{{1,3}}) )?((?:\w{{1,64}}: )?[^\n:]{{0,40}}\bNVLINK\b[^\n]{{0,300}})", re.I
)


def _nvlink_words(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _nvlink_fault(kind, match, match[2], match[3], match[1] or "")


# nvidia-nvlink: Unable to create cdev / nvidia-nvswitch0: Failed to initialize device; SXids have their own rule.
_NVLINK_CORE = regex(r"nvidia-(?:nvlink|nvswitch\d{0,3}): (?!SXid)([^\n]{0,400})")


def _nvlink_core(kind: str, match: re.Match[str]) -> KernelEvent | None:
    return _nvlink_fault(kind, match, None, match[1])


def _nvlink_fault(
    kind: str, match: re.Match[str], index: str | None, text: str, address: str = ""
) -> KernelEvent | None:
    """None if the line is no fault: these functions also say what they did."""
    if not _NVLINK_FAULT.search(text):
        return None
    code = "rx_detect" if regex("Rx ?Det", re.I).search(text) else "training" if _TRAINING.search(text) else "error"
    link, on_gpu = _LINK.search(text), _ON_GPU.search(text)
    fields = (("gpu", index or (on_gpu[1] if on_gpu else None)), ("link", link[1] if link else None))
    return event(kind, match, code, address, fields)


RULES = (
    Rule("rc_watchdog", ("RC watchdog",), _RC_WATCHDOG, reads("locked", gpu=1)),
    Rule("gsp", ("NVRM: ",), _GSP_WORDS, _gsp_words),
    Rule("gsp", ("NVRM: ", "Direct firmware load"), _GSP_OTHER, _gsp_other),
    Rule("gsp", ("watchdog timeout @",), _WATCHDOG, reads("dump")),
    Rule("gsp", ("NVRM: ",), _ASSERTION, _assertion),
    Rule("gsp", ("NVRM: ",), _DUMP, reads("dump", gpu=1)),
    Rule("nvlink", ("NVRM: ",), _KNVLINK, _knvlink),
    Rule("nvlink", ("NVRM: ",), _NVLINK_WORDS, _nvlink_words),
    Rule("nvlink", ("nvidia-nv",), _NVLINK_CORE, _nvlink_core),
)
