"""Texts for `healthd explain gpu_xid/CODE`: NVIDIA's catalogue, written for the engineer on call.

The texts for frequent codes and for codes that drain are written by hand. The others are derived from the action in the
catalogue.
"""

from __future__ import annotations

from typing import NamedTuple

from healthd.common.model import Clears, Ends, Explain, Remedy, Severity
from healthd.common.text import is_decimal
from healthd.nvidia import codes, xid_table


class Text(NamedTuple):
    meaning: str
    matters: str
    todo: str


_RESET_TODO = (
    "After the drain, reset the GPU (nvidia-smi --gpu-reset -i PCI, with all clients stopped) or reboot. If the error "
    "recurs within days, run NVIDIA's field diagnostics and open a case with NVIDIA (nvidia-bug-report.sh)."
)
_MEMORY_TODO = (
    "After the drain, check nvidia-smi -q -d ECC,ROW_REMAPPER, then reset the GPU so that a pending row remap takes "
    "effect (nvidia-smi --gpu-reset -i PCI, with all clients stopped; a reboot works as well). If a remap failed or "
    "uncorrectable errors recur, run NVIDIA's field diagnostics and open a case with NVIDIA for replacement."
)
_APPLICATION_TODO = (
    "No action tonight. Look at the job that was running at the time; compute-sanitizer finds illegal accesses. If the "
    "same code appears on every node of one job, that job is the cause. Suspect the hardware only if different jobs "
    "trigger it on this one GPU."
)

_XIDS: dict[int, Text] = {
    13: Text(
        "An application's kernel caused an exception in the graphics engine, usually an out-of-range access or an "
        "illegal instruction.",
        "The process that caused it is dead. The GPU and other jobs are not affected.",
        _APPLICATION_TODO,
    ),
    31: Text(
        "An application accessed GPU memory that is not mapped (page fault).",
        "The process that caused it is dead. The GPU and other jobs are not affected.",
        _APPLICATION_TODO,
    ),
    43: Text(
        "The driver stopped an application's channel after a fault in that application.",
        "The process that caused it is dead. The GPU is healthy.",
        _APPLICATION_TODO,
    ),
    45: Text(
        "The driver removed a process's work from the GPU because the process was killed or another Xid occurred "
        "before.",
        "This Xid is a consequence of another event. By itself it says nothing about the GPU.",
        "No action needed. Look for an earlier Xid on the same GPU. If there is none, a job was simply killed.",
    ),
    48: Text(
        "The GPU detected a double-bit ECC error. Data in its memory was lost.",
        "The job's results may be wrong, and the GPU may corrupt further processes until it is reset.",
        _MEMORY_TODO,
    ),
    62: Text(
        "The power management controller inside the GPU halted.",
        "The GPU no longer manages its clocks and power, and calls into the driver may hang.",
        _RESET_TODO,
    ),
    63: Text(
        "A row of GPU memory was marked to be replaced by a spare row (row remap or page retirement).",
        "This is bookkeeping after a memory error. The remap takes effect at the next GPU reset.",
        "No immediate action needed. gpu_row_remap reports when a reset is due. Reset the GPU at the next opportunity.",
    ),
    64: Text(
        "A row remap or page retirement failed, so the bad memory stays in use.",
        "The GPU continues to use memory that is known to be bad. Errors and wrong results will follow.",
        "After the drain, reset the GPU and check nvidia-smi -q -d ROW_REMAPPER. If the remap failed, open a case with "
        "NVIDIA for replacement.",
    ),
    74: Text(
        "An NVLink connection had an error at this GPU, at its peer or switch, or on the way between them.",
        "Collective operations over the link fail or hang. A single error is a warning. An error that repeats within "
        "24 h is CRITICAL. An error is CRITICAL at once if the kernel line reports the link as down (failed to train), "
        "or if the registers in the line request a fabric reset. gpu_nvlink detects links that go down without a "
        "kernel line.",
        "If it is only a warning, no action is needed tonight. On an NVL72, if HealthdNvlinkDomainFault fires, or if "
        "all GPUs of the node have NVLink Xids, do not reset the node before the NVLink switches have been checked. "
        "Otherwise, nvidia-smi nvlink -s and -e show the link, and after the drain, reset all GPUs on the baseboard. "
        "If the error recurs on the same link, reseat or replace the GPU or the switch.",
    ),
    79: Text(
        "The GPU no longer answers on PCI Express.",
        "Every process on it is dead or stuck in the driver, and the job's other GPUs wait for it.",
        # Source: facts/xid.csv (RESTART_BM, then CONTACT_SUPPORT); gpud and NVSentinel recommend the same. Unlike a
        # warm reboot, a power cycle also resets a GPU that no longer responds on the bus.
        "Save the evidence first (healthd record; nvidia-bug-report.sh --safe-mode). lspci -s PCI shows whether the "
        "GPU is still on the bus (it is gone if the output is empty or shows rev ff). journalctl -k | grep -iE "
        "'xid|aer|pcieport' shows earlier errors, and ipmitool sel elist shows power or heat problems. Then "
        "power-cycle the node; after a warm reboot the GPU may still be missing. If the error recurs, open a case with "
        "the vendor. Reseat, then replace the GPU, riser or power cable.",
    ),
    94: Text(
        "An uncorrectable memory error was contained. Only the process that used the memory was stopped.",
        "That process lost its data, and other processes continue. The row is remapped at the next reset.",
        "No action tonight. Restart the job. gpu_row_remap and gpu_recovery_action report if the GPU must be reset.",
    ),
    95: Text(
        "An uncorrectable memory error could not be contained to one process.",
        "Every process on this GPU may have wrong data. No job may use it before a reset.",
        _MEMORY_TODO,
    ),
    109: Text(
        "The GPU did not switch from one context to another in time.",
        "The channel is dead, and the GPU may hang until it is reset.",
        _RESET_TODO,
    ),
    119: Text(
        "The GPU's system processor (GSP) did not respond to the driver in time.",
        "Each call into the driver hangs for many seconds, including calls by nvidia-smi and monitoring tools. "
        "Processes get stuck in D state.",
        "Do not start further nvidia-smi processes. After the drain, save the log (journalctl -k | grep NVRM; "
        "nvidia-bug-report.sh --safe-mode), then reset the GPU or reboot. Known causes are driver bugs (check the "
        "driver's release notes) and monitoring agents that were killed during a call. If the error recurs, open a "
        "case with NVIDIA.",
    ),
    120: Text(
        "The firmware of the GPU's system processor (GSP) crashed.",
        "The driver can no longer talk to the GPU.",
        _RESET_TODO,
    ),
    136: Text(
        "An NVLink failed to train.",
        "The GPU is missing links, so collective operations fail or are slow.",
        _RESET_TODO,
    ),
    140: Text(
        "The GPU detected an uncorrectable ECC error that the usual error handling did not catch.",
        "Data on the GPU may be wrong.",
        _MEMORY_TODO,
    ),
    143: Text("The GPU failed to initialise.", "No job can use it.", _RESET_TODO),
    154: Text(
        "The driver changed the recovery action that it requests for the GPU: 1, 4 or 6 is a reset, 2 or 7 a reboot, 3 "
        "draining peer-to-peer traffic, and 5 recovering the IMEX domain.",
        "The driver considers the GPU unusable until the action is done. An earlier Xid shows the reason.",
        "After the drain, run healthd record and then the requested action: nvidia-smi --gpu-reset -i PCI for a reset "
        "(1, 4, 6), systemctl reboot for a reboot (2, 7). Actions 3 and 5 only warn and need no action tonight. "
        "nvidia-smi -q | grep -i recovery shows the current state.",
    ),
    171: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in DRAM.",
        "This Xid adds detail to the other Xid, which determines the action. If the other Xid is present, this one is "
        "only recorded. Otherwise it is a warning.",
        "No action tonight for this Xid alone. Look for the other Xid on the same GPU, and check nvidia-smi -q -d "
        "ECC,ROW_REMAPPER.",
    ),
    172: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in SRAM, inside the GPU.",
        "This Xid adds detail to the other Xid, which determines the action. If the other Xid is present, this one is "
        "only recorded. Otherwise it is a warning.",
        "No action tonight for this Xid alone. Look for the other Xid on the same GPU, and check nvidia-smi -q -d ECC. "
        "SRAM has no spare rows. If there are many errors, open a case with NVIDIA for replacement.",
    ),
    173: Text(
        "The link between the Grace CPU and this GPU (NVLink-C2C) failed for good.",
        "The GPU can no longer access CPU memory, and the driver can no longer access the GPU over this link.",
        "Reboot after the drain. If the error recurs, open a case with NVIDIA (nvidia-bug-report.sh).",
    ),
    174: Text(
        "The driver reset a channel and ended its process because it was asked to.",
        "This says nothing about the GPU.",
        "No action needed. Look for an earlier Xid on the same GPU. If there is none, only that process is affected.",
    ),
    175: Text(
        "The GPU's system processor (GSP) did not respond in time, and accesses to the GPU's memory hang. The driver "
        "prints this Xid instead of Xid 119 and rejects all use of the GPU until it is reset.",
        "Each call into the driver hangs for many seconds, and processes get stuck in D state.",
        _RESET_TODO,
    ),
    176: Text(
        "The driver counted more corrected PCI Express errors on this GPU than it considers normal.",
        "Some bandwidth is lost, with no other effect yet. Such links often get slower or fail later; see pcie_aer.",
        "No action tonight. lspci -vvv -s PCI shows the link. At the next maintenance, reseat the GPU and check the "
        "riser and cables.",
    ),
}
_TEXT_CODES: dict[str, Text] = {
    "fallen_off_bus": Text(
        "The driver reports that a GPU has fallen off the bus, without an Xid.",
        "The GPU no longer answers on PCI Express. Every process on it is dead or stuck.",
        _XIDS[79].todo,
    ),
    "rm_init_failed": Text(
        "The driver could not initialise a GPU.",
        "The GPU is on the bus, but no job can use it. If the GPU is not visible on PCI, this is only a warning.",
        "If it is only a warning, no action is needed tonight. Read the preceding lines in the kernel log (firmware, "
        "BAR, wrong driver for this GPU). Reboot. If that does not help, power-cycle the node, then replace the GPU.",
    ),
    "probe_failed": Text(
        "While loading, the driver could not take over a GPU that is on the bus, possibly because another driver has "
        "it.",
        "No job can use that GPU. gpu_count runs at once and drains the node if a GPU is missing.",
        "If the node is drained, read the preceding lines in the kernel log (firmware, BAR, wrong driver for this "
        "GPU). lspci -k shows the GPU's driver. Reload the driver on the drained node, or reboot.",
    ),
    "peermem": Text(
        "nvidia-peermem, which gives network cards access to GPU memory, was called for memory that it does not know.",
        "A transfer between a network card and a GPU was aborted, usually because its job had already crashed.",
        "No action tonight, unless jobs of several users are affected. In that case reload nvidia-peermem and the "
        "network card's drivers.",
    ),
    "gpu_is_lost": Text(
        "Calls into the driver fail because it has lost a GPU, but there is no Xid or other kernel line about the "
        "loss.",
        "This usually follows Xid 79. Without that Xid it is a warning. gpu_access and gpu_count report whether the "
        "GPU is present.",
        _XIDS[79].todo,
    ),
    "gsp": Text(
        "The driver reports a problem with the GPU's system processor (GSP), without an Xid.",
        "In the worst case the GPU cannot be used: its GSP does not boot (until a reboot), its power management has "
        "halted, or the driver rejects it until it is reset. A crash or a timed-out call only warns, because a real "
        "fault also has an Xid 119 or 120, which replaces this finding. Register and table dumps that follow are only "
        "recorded. A line that does not name the GPU is also only a warning.",
        f"If it is only a warning, no action is needed tonight. {_RESET_TODO}",
    ),
    "rc_watchdog": Text(
        "The driver's watchdog found that its own test channel on the GPU makes no progress (\"GPU is probably "
        'locked!"), and no Xid within a minute gives details.',
        "Work on the GPU hangs. The driver tries to recover the channel and then prints an Xid 8. If that fails, the "
        "GPU may hang until a reset.",
        "No action tonight unless jobs on this GPU hang (nvidia-smi). If they hang or the message recurs, drain the "
        "node and reset the GPU, or reboot.",
    ),
    "operational_event": Text(
        "NVML reports a GPU Operational Event (driver 615 and later) that has no Xid.",
        "An event that is fatal or uncontained warns. All others, and events that follow another one, are only "
        "recorded. NVIDIA calls these events a preview, so they never drain. gpu_access and gpu_recovery_action run at "
        "once and drain if the GPU needs it.",
        "No action tonight. nvidia-smi event-log shows the event, and NVIDIA's event catalogue its module and code "
        "(docs.nvidia.com/deploy/gpu-operational-events).",
    ),
    "nvlink": Text(
        "The driver reports a problem with an NVLink or the device at its other end, without an Xid.",
        "Links may be missing, so collective operations fail or are slow. gpu_nvlink and gpu_fabric check the state of "
        "the links.",
        "No action tonight. nvidia-smi nvlink -s shows the links. nvidia-smi -q (Fabric) and journalctl -u "
        "nvidia-fabricmanager show the fabric. If the message appears at every program start, drain the node and "
        "restart the fabric manager, or reboot.",
    ),
}
_WARNING_WINDOW, _APPLICATION_WINDOW = "warning_window_seconds", "application_window_seconds"
# Worst severity of these codes. The other text codes are CRITICAL until a reboot.
_WORST = {
    "gpu_is_lost": (Severity.WARNING, Ends(Clears.REBOOT, _WARNING_WINDOW)),
    "nvlink": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNING_WINDOW)),
    "operational_event": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNING_WINDOW)),
    "rc_watchdog": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNING_WINDOW)),
    "probe_failed": (Severity.WARNING, Ends(Clears.REBOOT, _WARNING_WINDOW)),
    "peermem": (Severity.WARNING, Ends(Clears.WINDOW, _APPLICATION_WINDOW)),
}
# Milder severities that some lines with these codes have. The texts or the NVLink 5 table identify these lines.
_MILDER_SEVERITIES: dict[str, tuple[Severity, ...]] = {
    "74": (Severity.WARNING,),
    "154": (Severity.DEGRADED, Severity.WARNING),
    **{str(code): (Severity.WARNING, Severity.INFO) for code in xid_table.NVLINK5},
    "171": (Severity.INFO,),
    "172": (Severity.INFO,),
    "rm_init_failed": (Severity.WARNING,),
    "gsp": (Severity.WARNING, Severity.INFO),
    "operational_event": (Severity.INFO,),
}
# Endings of the milder lines.
_MILDER_ENDINGS = {
    "74": Ends(Clears.GPU_RESET, "nvlink_repeat_seconds"),
    "154": Ends(Clears.GPU_RESET, _WARNING_WINDOW),
    **{str(code): Ends(Clears.GPU_RESET, _WARNING_WINDOW) for code in xid_table.NVLINK5},
    "171": Ends(Clears.WINDOW, _APPLICATION_WINDOW),
    "172": Ends(Clears.WINDOW, _APPLICATION_WINDOW),
    "rm_init_failed": Ends(Clears.REBOOT, _WARNING_WINDOW),
    "gsp": Ends(Clears.GPU_RESET, _WARNING_WINDOW),
}
# Endings of lines that are only recorded.
_RECORDED_ENDINGS = {str(code): Ends(Clears.WINDOW, _APPLICATION_WINDOW) for code in xid_table.NVLINK5}
# The kernel line determines what to do, by the recovery that it requests or by its row in the NVLink 5 table.
_LINE_DECIDES = (str(xid_table.RECOVERY), *map(str, xid_table.NVLINK5))
# A GPU that no longer answers on the bus may still be missing after a warm reboot.
_POWER_CYCLE = ("79", "fallen_off_bus", "gpu_is_lost")
_NVLINK5 = Text(
    "An NVLink 5 unit reported an error. The kernel line names the unit, link and registers. NVIDIA's table lists the "
    "errors that need a reset.",
    "If an error is fatal and its row in the table requests a reset, the link goes down and collective operations "
    "fail. An error that is not fatal and that the table ignores is only recorded. All others warn.",
    "",  # by row
)
_NVLINK5_WITHOUT_RESET = Text(
    "An NVLink 5 unit reported an error. The kernel line names the unit, link and registers. No row of NVIDIA's table "
    "for this Xid requires a reset.",
    "NVLink traffic continues. A nonfatal error is only recorded. An error that the line marks as fatal, or that is "
    "not in the table, is a warning.",
    "",
)
_BY_ACTION: dict[str, tuple[str, str]] = {
    "RESET_GPU": ("The GPU must not be used again until it is reset.", _RESET_TODO),
    "RESTART_APP": ("An application failed on the GPU. The GPU itself continues to work.", _APPLICATION_TODO),
    "IGNORE": (
        "NVIDIA's catalogue lists no immediate action.",
        "No action needed. If the code is frequent on one GPU but not on others, open a case with NVIDIA.",
    ),
    "RESTART_VM": ("The GPU cannot be used until the machine is restarted.", "Reboot the node after the drain."),
    "CHECK_MECHANICALS": (
        "The GPU runs without auxiliary power, if it runs at all.",
        "Check the power cables of the GPU board.",
    ),
    "UPDATE_SWFW": ("A virtual GPU did not start.", "Check that the driver versions on host and guest match."),
}
_DEFAULT_TEXT = (
    "This code may be harmless. No source says that it justifies a drain, so healthd only warns.",
    "No action tonight. If the error recurs, look up the code in NVIDIA's Xid catalogue and open a case with NVIDIA "
    "(nvidia-bug-report.sh).",
)


def explain(name: str) -> Explain | None:
    """Return the text for a code without its prefix "gpu_xid/" ("79", "fallen_off_bus"), or None if there is no such
    code."""
    if name in _TEXT_CODES:
        severity, ends = _WORST.get(name, (Severity.CRITICAL, Ends(Clears.REBOOT)))
        return _explained(name, severity, ends, _TEXT_CODES[name])
    if is_decimal(name) and len(name) < 5:
        return _xid(int(name))
    return None


def _xid(code: int) -> Explain:
    worst = xid_table.worst_meaning(code)
    text = _XIDS.get(code)
    if text is None and code in xid_table.NVLINK5:
        text = _nvlink5(code, worst.severity)
    if text is None:
        fact = codes.xid(code)
        action = "RESET_GPU" if code in xid_table.RESET_XIDS else fact.action if fact is not None else ""
        matters, todo = _BY_ACTION.get(action, _DEFAULT_TEXT)
        named = (
            f"{xid_table.title(code)}." if fact is not None else f"Xid {code} is unknown to this version of healthd."
        )
        text = Text(named, matters, todo)
    warns = worst.severity < Severity.DEGRADED
    window = (_APPLICATION_WINDOW if worst.caused_by_application else _WARNING_WINDOW) if warns else ""
    return _explained(str(code), worst.severity, Ends(worst.clears, window), text)


def _nvlink5(code: int, worst: Severity) -> Text:
    from healthd.nvidia.nvlink5_texts import todo_text

    more = f"healthd explain nvlink5/{code} shows the table. The message names the sub-code (for example {code}:0)."
    general = _NVLINK5 if worst is Severity.CRITICAL else _NVLINK5_WITHOUT_RESET
    return Text(f"{xid_table.title(code)}. {general.meaning} {more}", general.matters, todo_text(code))


def _explained(name: str, severity: Severity, ends: Ends, text: Text) -> Explain:
    return Explain(
        severity,
        ends.clears,
        *text,
        also=tuple(milder for milder in _MILDER_SEVERITIES.get(name, ()) if milder < severity),
        window=ends.window,
        milder=_MILDER_ENDINGS.get(name),
        recorded=_RECORDED_ENDINGS.get(name),
        remedy=Remedy.POWER_CYCLE if name in _POWER_CYCLE else None,
        line_decides=name in _LINE_DECIDES,
    )
