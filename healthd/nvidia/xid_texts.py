"""Texts of `healthd explain gpu_xid/CODE`: NVIDIA's catalogue for the engineer on call.

Texts of codes that drain or that are frequent are written by hand; the others come from the catalogue's action.
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
    "After the drain reset the GPU (nvidia-smi --gpu-reset -i PCI, with all clients stopped) or reboot. If it comes "
    "back within days: run NVIDIA's field diagnostics and open a case with NVIDIA (nvidia-bug-report.sh)."
)
_MEMORY_TODO = (
    "After the drain check nvidia-smi -q -d ECC,ROW_REMAPPER, then reset the GPU so that a pending row remap takes "
    "effect (nvidia-smi --gpu-reset -i PCI, with all clients stopped; a reboot does it as well). If a remap failed, "
    "or if uncorrectable errors come back: run NVIDIA's field diagnostics and open a case with NVIDIA for "
    "replacement."
)
_APPLICATION_TODO = (
    "No action tonight. Look at the job that ran then: compute-sanitizer finds illegal accesses. The same code on "
    "every node of one job is caused by that job. Suspect the hardware only if different jobs show it on this one "
    "GPU."
)

_XIDS: dict[int, Text] = {
    13: Text(
        "A kernel of an application made the graphics engine raise an exception, usually an access out of range or an "
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
        "The driver stopped a channel of an application after a fault of that application.",
        "The process that caused it is dead. The GPU is healthy.",
        _APPLICATION_TODO,
    ),
    45: Text(
        "The driver removed the work of a process: it was killed, or another Xid came before.",
        "It follows from another event and shows nothing about the GPU by itself.",
        "No action needed. Look for another Xid on the same GPU just before it; alone it is a job that was killed.",
    ),
    48: Text(
        "The GPU found a double-bit ECC error: data in its memory was lost.",
        "The results of the job may be wrong, and the GPU may poison further processes until it is reset.",
        _MEMORY_TODO,
    ),
    62: Text(
        "The power management controller inside the GPU halted.",
        "The GPU no longer manages clocks and power; calls into the driver may hang.",
        _RESET_TODO,
    ),
    63: Text(
        "A row of GPU memory was marked for replacement by a spare row (row remap, or page retirement).",
        "Bookkeeping after a memory error. The remap takes effect with the next reset of the GPU.",
        "No action needed by itself: gpu_row_remap reports when a reset is due. Reset the GPU at the next opportunity.",
    ),
    64: Text(
        "A row remap or page retirement failed: the bad memory stays in use.",
        "The GPU continues to use memory that is known to be bad: errors and wrong results will follow.",
        "After the drain reset the GPU and check nvidia-smi -q -d ROW_REMAPPER. If the remap failed: open a case with "
        "NVIDIA for replacement.",
    ),
    74: Text(
        "A connection over NVLink had an error: at this GPU, at its peer or switch, or between them.",
        "Collective operations over the link fail or hang. A single error warns. It is CRITICAL when it repeats within "
        "24 h, and at once if the line reports the link as down (failed to train) or its registers request a reset of "
        "the fabric. gpu_nvlink detects a link that goes down without a line.",
        "If it is only a warning: no action tonight. nvidia-smi nvlink -s and -e show the link. After the drain "
        "reset all GPUs of the baseboard. If it comes back on the same link: reseat or replace GPU or switch.",
    ),
    79: Text(
        "The GPU no longer answers on PCI Express.",
        "Every process on it is dead or stuck in the driver, and other GPUs of its job wait for it.",
        # Source: facts/xid.csv (RESTART_BM, then CONTACT_SUPPORT); gpud and NVSentinel request the same. A power cycle
        # is a reboot that also resets a GPU which no longer responds on the bus.
        "Save the evidence first (healthd record; nvidia-bug-report.sh --safe-mode). lspci -s PCI shows whether the "
        "GPU is still on the bus (rev ff, or no line: gone); journalctl -k | grep -iE 'xid|aer|pcieport' shows "
        "earlier errors, ipmitool sel elist a power or heat problem. Then power-cycle the node: a warm reboot may "
        "leave the GPU off the bus. If it comes back: open a case with the vendor; reseat, then replace the GPU, "
        "riser or power cable.",
    ),
    94: Text(
        "An uncorrectable memory error was contained: only the process that used the memory was stopped.",
        "That process lost its data; other processes continue. The row is remapped at the next reset.",
        "No action tonight. Restart the job. gpu_row_remap and gpu_recovery_action report when the GPU must be reset.",
    ),
    95: Text(
        "An uncorrectable memory error could not be contained to one process.",
        "Every process on this GPU may have wrong data. No job may use it before a reset.",
        _MEMORY_TODO,
    ),
    109: Text(
        "The GPU did not switch from one context to another in time.",
        "The channel is dead; the GPU may be hung until it is reset.",
        _RESET_TODO,
    ),
    119: Text(
        "The GPU's system processor (GSP) did not respond to the driver in time.",
        "Calls into the driver hang for many seconds each, also those of nvidia-smi and of monitoring; processes get "
        "stuck in D state.",
        "Do not start further nvidia-smi processes. After the drain save the log (journalctl -k | grep NVRM; "
        "nvidia-bug-report.sh --safe-mode), then reset the GPU or reboot. It was seen after monitoring agents were "
        "killed during a call, and with driver bugs: check the driver's release notes. If it comes back: open a case "
        "with NVIDIA.",
    ),
    120: Text(
        "The firmware of the GPU's system processor (GSP) crashed.",
        "The driver can no longer talk to the GPU.",
        _RESET_TODO,
    ),
    136: Text(
        "Training of an NVLink failed.",
        "The GPU is missing links: collective operations fail or are slow.",
        _RESET_TODO,
    ),
    140: Text(
        "An uncorrectable ECC error was found that the usual handling did not catch.",
        "Data on the GPU may be wrong.",
        _MEMORY_TODO,
    ),
    143: Text("The GPU failed to initialise.", "No job can use it.", _RESET_TODO),
    154: Text(
        "The driver changed its requested recovery action for the GPU: 1, 4 and 6 a reset, 2 and 7 a reboot, 3 "
        "draining peer-to-peer traffic, 5 recovering the IMEX domain.",
        "The driver itself considers the GPU unusable until that is done. It follows another Xid, which shows the "
        "reason.",
        "Do the requested action after the drain: for a reset (1, 4, 6) nvidia-smi --gpu-reset -i PCI, for a reboot "
        "(2, 7) systemctl reboot, each after healthd record. Actions 3 and 5 only warn: no action tonight. "
        "nvidia-smi -q | grep -i recovery shows the present state.",
    ),
    171: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in DRAM.",
        "It adds detail to the other Xid, which decides the action: with that Xid it is only recorded, alone it warns.",
        "No action tonight by itself. Look for the other Xid on the same GPU, and check nvidia-smi -q -d "
        "ECC,ROW_REMAPPER.",
    ),
    172: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in SRAM, inside the GPU.",
        "It adds detail to the other Xid, which decides the action: with that Xid it is only recorded, alone it warns.",
        "No action tonight by itself. Look for the other Xid on the same GPU, and check nvidia-smi -q -d ECC. SRAM "
        "has no spare rows: if there are many errors, open a case with NVIDIA for replacement.",
    ),
    173: Text(
        "The link between the Grace CPU and this GPU (NVLink-C2C) failed for good.",
        "Traffic over it fails: the GPU's access to the CPU's memory, and the driver's access to the GPU.",
        "Reboot after the drain. If it comes back: open a case with NVIDIA (nvidia-bug-report.sh).",
    ),
    174: Text(
        "The driver reset a channel and ended its process, on request.",
        "It shows nothing about the GPU.",
        "No action needed. Look for another Xid on the same GPU just before it; alone it concerns only that process.",
    ),
    175: Text(
        "The GPU's system processor (GSP) did not respond in time, and the GPU's memory hangs. The driver prints it "
        "instead of Xid 119, and refuses the GPU until it is reset.",
        "Calls into the driver hang for many seconds each; processes get stuck in D state.",
        _RESET_TODO,
    ),
    176: Text(
        "The driver counted more corrected PCI Express errors of this GPU than it considers normal.",
        "None yet except for some bandwidth. It often precedes a link that gets slower or fails: see pcie_aer.",
        "No action tonight. lspci -vvv -s PCI. At the next maintenance: reseat the GPU, check riser and cables.",
    ),
}
_TEXT_CODES: dict[str, Text] = {
    "fallen_off_bus": Text(
        "The driver reports that a GPU has fallen off the bus, without an Xid.",
        "The GPU no longer answers on PCI Express: what ran on it is dead or stuck.",
        _XIDS[79].todo,
    ),
    "rm_init_failed": Text(
        "The driver could not initialise a GPU.",
        "The GPU is on the bus but no job can use it. It is only a warning if PCI does not show the GPU.",
        "If it is only a warning: no action tonight. Read the lines before it in the kernel log (firmware, BAR, wrong "
        "driver for this GPU). Reboot; if that does not help, power-cycle the node; then replace the GPU.",
    ),
    "probe_failed": Text(
        "When it was loaded the driver could not take a GPU that is on the bus, or another driver has it.",
        "No job can use that GPU. gpu_count runs at once, and drains if a GPU is missing.",
        "If the node is drained: read the lines before it in the kernel log (firmware, BAR, wrong driver for this "
        "GPU); lspci -k shows the GPU's driver. Load the driver again on the drained node, or reboot.",
    ),
    "peermem": Text(
        "nvidia-peermem, through which network cards access the memory of GPUs, was called for unknown memory.",
        "A transfer between a network card and a GPU was ended; usually its job had crashed before.",
        "No action tonight, unless jobs of several users have it: then load nvidia-peermem and the network card's "
        "drivers again.",
    ),
    "gpu_is_lost": Text(
        "Calls into the driver fail because it lost a GPU, without an Xid or another line about it.",
        "It usually follows Xid 79, and is a warning if that was not seen. gpu_access and gpu_count report whether "
        "the GPU is present.",
        _XIDS[79].todo,
    ),
    "gsp": Text(
        "The driver reports a problem of the GPU's system processor (GSP) without an Xid.",
        "At its worst the GPU cannot be used: its GSP does not boot (until a reboot), its power management halted, "
        "or the driver refuses it until it is reset. A crash or a call that timed out only warns: a real fault has "
        "an Xid 119 or 120 as well, which replaces this finding. Registers and tables that follow are only recorded. "
        "It is also only a warning if the line does not name the GPU.",
        f"If it is only a warning: no action tonight. {_RESET_TODO}",
    ),
    "rc_watchdog": Text(
        "The driver's watchdog found that its own test channel on the GPU does not progress (\"GPU is probably "
        'locked!"), and no Xid within a minute gives details.',
        "Work on the GPU hangs. The driver tries to recover the channel and then prints an Xid 8; without that the "
        "GPU may hang until a reset.",
        "No action tonight unless jobs on this GPU hang (nvidia-smi). If they hang, or if it comes back: drain the "
        "node and reset the GPU, or reboot.",
    ),
    "nvlink": Text(
        "The driver reports a problem of an NVLink or its other end, without an Xid.",
        "Links may be missing: collective operations fail or are slow. gpu_nvlink and gpu_fabric judge the state "
        "itself.",
        "No action tonight. nvidia-smi nvlink -s shows the links, nvidia-smi -q (Fabric) and journalctl -u "
        "nvidia-fabricmanager the fabric. If it comes with each program start: restart the fabric manager on the "
        "drained node, or reboot.",
    ),
}
_WARNING_WINDOW, _APPLICATION_WINDOW = "warning_window_seconds", "application_window_seconds"
# Worst severity of these codes; the other codes are judged like a GPU that is gone.
_WORST = {
    "gpu_is_lost": (Severity.WARNING, Ends(Clears.REBOOT, _WARNING_WINDOW)),
    "nvlink": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNING_WINDOW)),
    "rc_watchdog": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNING_WINDOW)),
    "probe_failed": (Severity.WARNING, Ends(Clears.REBOOT, _WARNING_WINDOW)),
    "peermem": (Severity.WARNING, Ends(Clears.WINDOW, _APPLICATION_WINDOW)),
}
# Severities of other lines of these codes; the texts, or the table of NVLink 5, name the lines.
_MILDER_SEVERITIES: dict[str, tuple[Severity, ...]] = {
    "74": (Severity.WARNING,),
    "154": (Severity.DEGRADED, Severity.WARNING),
    **{str(code): (Severity.WARNING, Severity.INFO) for code in xid_table.NVLINK5},
    "171": (Severity.INFO,),
    "172": (Severity.INFO,),
    "rm_init_failed": (Severity.WARNING,),
    "gsp": (Severity.WARNING, Severity.INFO),
}
# Endings of those other lines.
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
# The kernel line decides what to do: the requested recovery, or the row of the table of NVLink 5.
_LINE_DECIDES = (str(xid_table.RECOVERY), *map(str, xid_table.NVLINK5))
# A GPU that no longer answers on the bus may stay away after a warm reboot.
_POWER_CYCLE = ("79", "fallen_off_bus", "gpu_is_lost")
_NVLINK5 = Text(
    "An NVLink 5 unit reported an error. The line names unit, link and registers; NVIDIA's table lists the "
    "errors that need a reset.",
    "A fatal error whose row requests a reset takes the link down, and collective operations fail. An error that "
    "the table ignores, and that is not fatal, is only recorded. Others warn.",
    "",  # by row
)
_NVLINK5_WITHOUT_RESET = Text(
    "An NVLink 5 unit reported an error. The line names unit, link and registers; no row of NVIDIA's table needs a "
    "reset.",
    "NVLink traffic continues. An error that is not fatal is only recorded. An error that the line calls fatal, "
    "or that is in no row of the table, warns.",
    "",
)
_BY_ACTION: dict[str, tuple[str, str]] = {
    "RESET_GPU": ("The GPU needs a reset and must not be used before.", _RESET_TODO),
    "RESTART_APP": ("An application failed on the GPU. The GPU itself continues to work.", _APPLICATION_TODO),
    "IGNORE": (
        "NVIDIA's catalogue lists no immediate action.",
        "No action needed, unless it comes often on one GPU and not on others: then open a case with NVIDIA.",
    ),
    "RESTART_VM": ("The GPU cannot be used before the machine was restarted.", "Reboot the node after the drain."),
    "CHECK_MECHANICALS": (
        "The GPU runs without its auxiliary power, if at all.",
        "Check the power cables of the GPU board.",
    ),
    "UPDATE_SWFW": ("A virtual GPU did not start.", "Check that the driver versions on host and guest match."),
}
_DEFAULT_TEXT = (
    "It may be harmless: no source reports that this code justifies a drain, so healthd only warns.",
    "No action tonight. If it comes back: look the code up in NVIDIA's Xid catalogue and open a case with NVIDIA "
    "(nvidia-bug-report.sh).",
)


def explain(name: str) -> Explain | None:
    """Return the text for the part after "gpu_xid/": "79", "fallen_off_bus"."""
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
            f"{xid_table.title(code)}."
            if fact is not None
            else f"Xid {code} is unknown to this version: none of its catalogues lists it."
        )
        text = Text(named, matters, todo)
    warns = worst.severity < Severity.DEGRADED
    window = (_APPLICATION_WINDOW if worst.caused_by_application else _WARNING_WINDOW) if warns else ""
    return _explained(str(code), worst.severity, Ends(worst.clears, window), text)


def _nvlink5(code: int, worst: Severity) -> Text:
    from healthd.nvidia.nvlink5_texts import todo_text

    more = f"healthd explain nvlink5/{code} shows the table; the message names the sub-code (for example {code}:0)."
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
