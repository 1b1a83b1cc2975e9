"""NVIDIA's drivers: Xid, SXid, a GPU that is gone or cannot be initialised.

    xid                 code = number; process, pid; link, unit, fatal, sm, ... where the message has them
    sxid                code = number; switch, fatal, link, shutdown (the line says so)
    gpu_fallen_off_bus  code "fallen_off_bus" (beside or without an Xid 79); "gpu_is_lost": calls that fail after it; or
                        "rm_init_failed": the driver could not initialise a GPU; status = its three numbers;
                        "probe_failed": it did not take one at all; count
    peermem             nvidia-peermem, by which network cards reach GPU memory: code "invalid_context"

Formats: the driver's own (open-gpu-kernel-modules: kernel_rc.c, osinit.c, osapi.c, common_nvswitch.h), older ones from
users' logs. Lines in the driver's own words are in nvidia_driver.py.
"""

from __future__ import annotations

import re

from healthd.agent.kernel_log.rules.rule import FURTHER, PCI, SM, Rule, event, reads
from healthd.common.model import KernelEvent
from healthd.common.text import regex

# Xid: NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
# Pasted logs may mask the address within "(...)": then what follows "PCI:" is no address. The first drivers gave no
# address ("NVRM: Xid: 13, ..."), or only bus and device ("(0001:00)").
# journald splits an injected "NVRM: Xid ..." into identifier and message, hence the optional "NVRM: ".
# A process may be called "Xid (0): 79, a", and some of the kernel's lines begin with such a name of 15 characters: the
# text matched here is longer, or has letters where the kernel goes on with the pid.
_XID = regex(
    r"(?:(?:NVRM: )?Xid \((PCI:[^\s()]{3,32}|[0-9A-Fa-f:.]{7,32})(?: GPU-I:(\d{1,3}))?(?: GPU-CI:(\d{1,3}))?\)"
    r"|NVRM: Xid(?=: \d{1,4}, {0,4}\w)): (\d{1,4})(?![\d.])(?:,\s*|\s|$)"
)
_PID = regex(r"pid=(?:'?(\d{1,10})'?|'?[^\d',=\s][^',=]{0,15}'?)\s*(?:,\s*|$)")
# A process name has at most 15 characters and may hold ", " itself: it ends before what drivers write next.
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
    pid, process, message = _who(match.string[match.end() :])
    fields = [("gpu_instance", instance), ("compute_instance", compute), *_xid_details(code, message)]
    return event(kind, match, str(int(code)), address or "", fields, pid, process)


def _who(rest: str) -> tuple[int | None, str | None, str]:
    """(pid, process, message) from the text after the number: "pid=12, name=python3, Ch 00000008"."""
    pid, process = None, None
    match = _PID.match(rest)
    if match is not None:
        pid, rest = int(match[1]) if match[1] else None, rest[match.end() :]
    if rest.startswith("name="):
        process, rest = _name(rest[5:])
    return pid, process if process != "<unknown>" else None, rest


def _name(rest: str) -> tuple[str, str]:
    quoted = _QUOTED.match(rest)
    if quoted is not None:
        return quoted[1], rest[quoted.end() :]
    end = _NAME_ENDS.search(rest, 0, 48)
    if end is not None:
        return rest[: end.start()], rest[end.end() :]
    name, _, message = rest.partition(",")
    return name.rstrip()[:64], message.lstrip()


_RECOVERY = regex(r"GPU recovery action changed from 0x([0-9a-f]{1,8}) \([^)]*\) to 0x([0-9a-f]{1,8})", re.I)
_NVLINK5 = regex(
    r"([A-Z]\w{0,31}(?: Degraded)?)\s{1,8}(Non-?fatal|Link Fatal|Fatal)\s{1,8}XC\d{1,3}\s{1,8}i\d{1,3}\s{1,8}"
    r"Link\s{1,8}(-?\d{1,3})(?:\s{1,8}\((0x[0-9a-f]{1,8})\s{1,8}(0x[0-9a-f]{1,8}))?",
    re.I,
)
# GPUs up to Hopper. NVIDIA's catalogue says what the bits of the first, third, fourth and fifth of seven words mean.
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
# Which of the GPU's processors raised the exception: GPC and TPC, and from Volta on the SM of the two in a TPC.
#   Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter
_SM = regex(r"Graphics SM (?:Warp|Global) Exception on \(GPC (\d{1,3}), TPC (\d{1,3})(?:, SM (\d{1,3}))?\)")
_CAUSED_BY = regex(r" caused by previous Xid (\d{1,4})\s*$")


def _xid_details(code: str, message: str) -> list[tuple[str, str | None]]:
    number = int(code)
    details: list[tuple[str, str | None]] = []
    if number == 154 and (match := _RECOVERY.match(message)):
        # Only the numbers: the words in parentheses change with the driver branch.
        details = [("recovery_from", str(int(match[1], 16))), ("recovery_to", str(int(match[2], 16)))]
    elif 144 <= number <= 150 and (match := _NVLINK5.match(message)):
        fatal = "false" if match[2].lower().startswith("non") else "true"
        details = [("unit", match[1]), ("fatal", fatal), ("link", str(int(match[3])))]
        details += [("intr_info", match[4]), ("error_status", match[5])]
    elif number == 74 and (match := _NVLINK4.match(message)):
        word = (match[1] or "").lower()
        details = [("link", str(int(match[2]))), ("fatal", str(word == "fatal").lower() if word else None)]
        words = regex(", ?").split(match[3]) if match[3] else []
        details += [("register", " ".join(words) or None), ("reset", "true" if _asks_for_reset(words) else None)]
    elif number == 74 and (match := _LINK_DOWN.match(message)):
        details = [("link", str(int(match[1] or match[2]))), ("inactive", "true")]
    elif match := _GSP_INSTANCE.search(message, 0, 200):
        details = [("gpu", match[1])]
    elif number == 13 and (match := _SM.match(message)):
        details = [(SM, ".".join(word for word in match.groups() if word))]
    caused = _CAUSED_BY.search(message, max(0, len(message) - 40))
    return [*details, ("caused_by", caused[1])] if caused else details


def _asks_for_reset(words: list[str]) -> bool:
    """Bit 18 of the fourth word of an Xid 74: "a reset of the fabric is required" (NVIDIA's catalogue). It has a field
    of its own: two lines that differ in it are two faults."""
    return len(words) > 3 and bool(int(words[3], 16) >> 18 & 1)


# "... RPC response from GPU4 GSP!": the number by which the driver calls this GPU in lines that give no address.
_GSP_INSTANCE = regex(r" from GPU(\d{1,3}) GSP!")


# SXid: nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Non-fatal, Link 60 Minion Link DLREQ interrupt
# Two or more further lines of one event follow, among those of other switches ("Severity 0 Engine instance 60 ...",
# "Data {0x0000003c, ...}"): the field `further` has them counted into it. Alone, they still name switch and code.
_SXID = regex(
    r"(?:nvidia-nvswitch(\d{1,3}): )?SXid \((PCI:[^\s()]{3,32}|[0-9A-Fa-f:.]{7,32})\): (\d{1,6})(?!\d)"
    r"(?:(,\s*(?:Severity \d+ Engine instance|Data \{))|(?:,\s*(Fatal|Non-fatal)\b)?(?:,\s*Link (-?\d{1,3})\b)?)",
)
# Of lines without a severity some say that the switch shuts down, also under a code that mostly says less:
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
_GONE = regex(
    rf"NVRM: (?:GPU {PCI}: GPU is lost\b|(?:GPU(\d{{1,3}}) )?(?:(?:Check|Assertion) failed: )?"
    r"GPU lost from the bus \[NV_ERR_GPU_IS_LOST\]"
    r"|(?:GPU(\d{1,3}) )?\w{1,64}: (?:[^\n]{0,200}\[NV_ERR_GPU_IS_LOST\]"
    r"|Failed GPU reg read ?: 0xf{8}\b|API_GPU_ATTACHED_SANITY_CHECK failed))"
)


# NVRM: GPU 0000:a1:00.0: RmInitAdapter failed! (0x62:0x40:2168); old drivers do not say which GPU.
# NVRM: GPU 0000:a1:00.0: rm_init_adapter failed, device minor number 6
_RM_INIT = regex(
    rf"NVRM: (?:GPU (?:at )?{PCI}: )?(?:RmInitAdapter failed!(?: \(([0-9A-Fa-fx:]{{1,40}})\))?"
    r"|rm_init_adapter failed\b)"
)


# NVRM: The NVIDIA probe routine failed for 1 device(s).           (kernel-open/nvidia/nv.c, when the module is loaded)
# NVRM: The NVIDIA probe routine was not called for 1 device(s).   (another driver has them)
# NVRM: None of the NVIDIA devices were initialized.                 (older: graphics adapters ... initialized!)
# NVRM: No NVIDIA devices probed.
_PROBE = regex(
    r"NVRM: (?:The NVIDIA probe routine (?:failed|was not called) for (\d{1,4}) device|No NVIDIA devices probed"
    r"|None of the NVIDIA (?:devices|graphics adapters) were initialized)"
)


# nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing
_PEERMEM = regex(r"nvidia-peermem:? \w{1,64}:\d{1,6} ERROR detected invalid context")


RULES = (
    Rule("xid", ("Xid (", "NVRM: "), _XID, _xid, varies=("recovery_from", "register", "caused_by", SM)),
    Rule("sxid", ("Xid (",), _SXID, _sxid),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _LOST, reads("fallen_off_bus", pci=(1, 2))),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _GONE, reads("gpu_is_lost", pci=1, gpu=(2, 3))),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _RM_INIT, reads("rm_init_failed", pci=1, status=2), varies=("status",)),
    Rule("gpu_fallen_off_bus", ("NVRM: ",), _PROBE, reads("probe_failed", count=1), varies=("count",)),
    Rule("peermem", ("nvidia-peermem",), _PEERMEM, reads("invalid_context")),
)
