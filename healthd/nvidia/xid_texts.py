"""What `healthd explain gpu_xid/CODE` says: NVIDIA's catalogue in words for the engineer who is woken at night.

Texts of the codes that drain or that are seen most are written by hand; the others come from the catalogue's action.
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
    "Let the node drain, then reset the GPU (nvidia-smi --gpu-reset -i PCI, with every client stopped) or reboot. "
    "If it comes back within days: run NVIDIA's field diagnostics and open a case with the log (nvidia-bug-report.sh)."
)
_MEMORY_TODO = (
    "Let the node drain, look at nvidia-smi -q -d ECC,ROW_REMAPPER, then reset the GPU so that a pending row remap "
    "takes effect (nvidia-smi --gpu-reset -i PCI, with every client stopped; a reboot does it too). A failed remap, or "
    "uncorrectable errors that come again, are a case for replacement: run NVIDIA's field diagnostics for it."
)
_APPLICATION_TODO = (
    "Look at the job that ran then: compute-sanitizer finds illegal accesses, and the same code on every node that "
    "one job touched is that job. Suspect the hardware only if different jobs show it on this one GPU."
)

_XIDS: dict[int, Text] = {
    13: Text(
        "A kernel of an application made the graphics engine raise an exception, mostly an access out of range "
        "or an illegal instruction.",
        "The process that did it is dead. The GPU and other jobs are not touched.",
        _APPLICATION_TODO,
    ),
    31: Text(
        "An application accessed GPU memory that is not mapped (page fault).",
        "The process that did it is dead. The GPU and other jobs are not touched.",
        _APPLICATION_TODO,
    ),
    43: Text(
        "The driver stopped a channel of an application after a fault of that application.",
        "The process that did it is dead. The GPU is healthy.",
        _APPLICATION_TODO,
    ),
    45: Text(
        "The driver removed the work of a process: it was killed, or another Xid came before.",
        "It follows from something else and says nothing of the GPU by itself.",
        "Look for another Xid on the same GPU just before it; alone it is a job that was killed.",
    ),
    48: Text(
        "The GPU found a double-bit ECC error: data in its memory was lost.",
        "What the job computed may be wrong, and the GPU may poison further processes until it is reset.",
        _MEMORY_TODO,
    ),
    62: Text(
        "The power management controller inside the GPU halted.",
        "The GPU no longer manages clocks and power; calls into the driver may hang.",
        _RESET_TODO,
    ),
    63: Text(
        "A row of GPU memory was marked to be replaced by a spare one (row remap, or page retirement).",
        "Bookkeeping after a memory error. The remap takes effect with the next reset of the GPU.",
        "Nothing by itself: gpu_row_remap says when a reset is due. Reset the GPU at the next opportunity.",
    ),
    64: Text(
        "A row remap or page retirement failed: the bad memory stays in use.",
        "The GPU goes on using memory that is known to be bad: errors and wrong results will follow.",
        "Drain, reset, and look at nvidia-smi -q -d ROW_REMAPPER. A remapping failure is a case for replacement.",
    ),
    74: Text(
        "A connection over NVLink showed an error: at this GPU, at its peer or switch, or between.",
        "Collective operations over the link fail or hang. One warns; it is CRITICAL when it repeats within 24 h, and "
        "at once where the line says that the link is down (failed to train) or its registers ask for a reset of the "
        "fabric. A link that is down in silence is judged by gpu_nvlink.",
        "nvidia-smi nvlink -s and -e show which link. After a reset of all GPUs of the baseboard a link that fails "
        "again is hardware: reseat or replace GPU or switch.",
    ),
    79: Text(
        "The GPU no longer answers on PCI Express.",
        "Every process on it is dead or stuck in the driver, and other GPUs of its job wait for it.",
        # Source: facts/xid.csv (RESTART_BM, then CONTACT_SUPPORT); gpud and NVSentinel ask for the same. A power cycle
        # is a reboot that also resets a GPU which no longer answers on the bus.
        "Save the evidence first (healthd record; nvidia-bug-report.sh --safe-mode). lspci -s PCI shows whether the "
        "GPU is still on the bus (rev ff, or no line: gone); journalctl -k | grep -iE 'xid|aer|pcieport' shows what "
        "came before, ipmitool sel elist whether power or heat was the cause. Then power-cycle the node: a warm reboot "
        "may leave the GPU off the bus. If it happens again, open a case with the vendor: reseat, then replace the "
        "GPU, riser or power cable.",
    ),
    94: Text(
        "An uncorrectable memory error was contained: only the process that used the memory was stopped.",
        "That process lost its data; others go on. The row is remapped at the next reset.",
        "Restart the job. gpu_row_remap and gpu_recovery_action say when the GPU must be reset.",
    ),
    95: Text(
        "An uncorrectable memory error could not be contained to one process.",
        "Every process on this GPU may have wrong data. Nothing may run on it before a reset.",
        _MEMORY_TODO,
    ),
    109: Text(
        "The GPU did not switch from one context to another in time.",
        "The channel is dead; the GPU may be hung until it is reset.",
        _RESET_TODO,
    ),
    119: Text(
        "The GPU's system processor (GSP) did not answer the driver in time.",
        "Calls into the driver hang for many seconds each, also those of nvidia-smi and of monitoring; processes "
        "get stuck in D state.",
        "Do not start more nvidia-smi on it. Let the node drain, keep the log (journalctl -k | grep NVRM; "
        "nvidia-bug-report.sh --safe-mode), then reset the GPU or reboot. Seen after monitoring agents were killed in "
        "a call and with driver bugs: check the driver's release notes, and ask NVIDIA if it comes again.",
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
        "The driver changed what it says is needed to recover the GPU: 1, 4 and 6 a reset, 2 and 7 a reboot, 3 "
        "draining peer-to-peer traffic, 5 recovering the IMEX domain.",
        "The driver itself holds the GPU unfit until that is done. It follows another Xid, which says why.",
        "Do what it asks, after the drain: for a reset (1, 4, 6) nvidia-smi --gpu-reset -i PCI, for a reboot (2, 7) "
        "systemctl reboot, each after healthd record. nvidia-smi -q | grep -i recovery shows the present state.",
    ),
    171: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in DRAM.",
        "It says more of the other Xid, which carries the action: beside it this is only recorded, alone it warns.",
        "Look for the other Xid on the same GPU, and at nvidia-smi -q -d ECC,ROW_REMAPPER.",
    ),
    172: Text(
        "The uncorrectable memory error that another Xid reports (48, 94, 95, 140) was in SRAM, inside the GPU.",
        "It says more of the other Xid, which carries the action: beside it this is only recorded, alone it warns.",
        "Look for the other Xid on the same GPU, and at nvidia-smi -q -d ECC. SRAM has no spare rows: many errors are "
        "a case for replacement.",
    ),
    173: Text(
        "The link between the Grace CPU and this GPU (NVLink-C2C) failed for good.",
        "What goes over it fails: the GPU's access to the CPU's memory, and the driver's to the GPU.",
        "Let the node drain and reboot it. If it comes again: a case for NVIDIA (nvidia-bug-report.sh).",
    ),
    174: Text(
        "The driver reset a channel and ended its process, as it was asked to.",
        "It says nothing of the GPU.",
        "Look for another Xid on the same GPU just before it; alone it is that process.",
    ),
    175: Text(
        "The GPU's system processor (GSP) did not answer in time, and the GPU's memory hangs. The driver prints it "
        "instead of Xid 119, and refuses the GPU until it is reset.",
        "Calls into the driver hang for many seconds each; processes get stuck in D state.",
        _RESET_TODO,
    ),
    176: Text(
        "The driver counted more corrected PCI Express errors of this GPU than it takes for normal.",
        "None yet but some bandwidth. It often comes before a link that gets slower or fails: see pcie_aer.",
        "lspci -vvv -s PCI. At the next maintenance: reseat the GPU, look at riser and cables.",
    ),
}
_NAMED: dict[str, Text] = {
    "fallen_off_bus": Text(
        "The driver says that a GPU has fallen off the bus, without an Xid.",
        "The GPU no longer answers on PCI Express: what ran on it is dead or stuck.",
        _XIDS[79].todo,
    ),
    "rm_init_failed": Text(
        "The driver could not initialise a GPU.",
        "The GPU is on the bus but no job can use it. It is only a warning where PCI does not show the GPU.",
        "Look at the lines before it in the kernel log (firmware, BAR, wrong driver for this GPU). Reboot; if that "
        "does not help, power-cycle the node; then replace the GPU.",
    ),
    "probe_failed": Text(
        "When it was loaded the driver could not take a GPU that is on the bus, or another driver has it.",
        "That GPU is not there for any job. gpu_count looks at once, and drains where one is missing.",
        "Look at the lines before it in the kernel log (firmware, BAR, wrong driver for this GPU); lspci -k says who "
        "has it. Load the driver again on the drained node, or reboot.",
    ),
    "peermem": Text(
        "nvidia-peermem, by which network cards reach the memory of GPUs, was called for memory that it does not know.",
        "A transfer between a network card and a GPU was ended; mostly its job had crashed before.",
        "Nothing, unless jobs of several users see it: then load nvidia-peermem and the network card's drivers again.",
    ),
    "gpu_is_lost": Text(
        "Calls into the driver fail because it lost a GPU, and neither an Xid nor another line says so.",
        "It mostly follows Xid 79, and is a warning where that was not seen. gpu_access and gpu_count say whether the "
        "GPU is there.",
        _XIDS[79].todo,
    ),
    "gsp": Text(
        "The driver says in its own words, without an Xid, that the GPU's system processor (GSP) is in trouble.",
        "At its worst the GPU cannot be used: its GSP does not boot (until a reboot), its power management halted, or "
        "the driver refuses it until it is reset. A crash or a call that timed out warns: where it is more, an Xid 119 "
        "or 120 comes with it, and then this is no finding of its own. Registers and tables that follow are only "
        "recorded. It is also only a warning where the line does not tell which GPU.",
        _RESET_TODO,
    ),
    "rc_watchdog": Text(
        "The driver's watchdog found that its own test channel on the GPU does not progress (\"GPU is probably "
        'locked!"), and no Xid of the same minute says more.',
        "Work on the GPU stands still. The driver tries to recover the channel and then prints an Xid 8; without it "
        "the GPU may hang until a reset.",
        "Look at the job on this GPU and at nvidia-smi. If it comes again or jobs hang: drain the node and reset the "
        "GPU, or reboot.",
    ),
    "nvlink": Text(
        "The driver says in its own words, without an Xid, that an NVLink or what is behind it is in trouble.",
        "Links may be missing: collective operations fail or are slow. gpu_nvlink and gpu_fabric judge the state "
        "itself.",
        "nvidia-smi nvlink -s shows the links, nvidia-smi -q (Fabric) and journalctl -u nvidia-fabricmanager the "
        "fabric. If it comes with each program that starts: restart the fabric manager on the drained node, or reboot.",
    ),
}
_WARNS, _APPLICATION = "warning_window_seconds", "application_window_seconds"
# How these codes are judged at their worst; the other codes are judged like a GPU that is gone.
_WORST = {
    "gpu_is_lost": (Severity.WARNING, Ends(Clears.REBOOT, _WARNS)),
    "nvlink": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNS)),
    "rc_watchdog": (Severity.WARNING, Ends(Clears.GPU_RESET, _WARNS)),
    "probe_failed": (Severity.WARNING, Ends(Clears.REBOOT, _WARNS)),
    "peermem": (Severity.WARNING, Ends(Clears.WINDOW, _APPLICATION)),
}
# What other lines of these codes are; the texts, or what the table of NVLink 5 says, tell which.
_ALSO: dict[str, tuple[Severity, ...]] = {
    "74": (Severity.WARNING,),
    "154": (Severity.DEGRADED, Severity.WARNING),
    **{str(code): (Severity.WARNING, Severity.INFO) for code in xid_table.NVLINK5},
    "171": (Severity.INFO,),
    "172": (Severity.INFO,),
    "rm_init_failed": (Severity.WARNING,),
    "gsp": (Severity.WARNING, Severity.INFO),
}
# What ends those others.
_MILDER = {
    "74": Ends(Clears.GPU_RESET, "nvlink_repeat_seconds"),
    "154": Ends(Clears.GPU_RESET, _WARNS),
    **{str(code): Ends(Clears.GPU_RESET, _WARNS) for code in xid_table.NVLINK5},
    "171": Ends(Clears.WINDOW, _APPLICATION),
    "172": Ends(Clears.WINDOW, _APPLICATION),
    "rm_init_failed": Ends(Clears.REBOOT, _WARNS),
    "gsp": Ends(Clears.GPU_RESET, _WARNS),
}
# What ends those that are only recorded.
_RECORDED = {str(code): Ends(Clears.WINDOW, _APPLICATION) for code in xid_table.NVLINK5}
# The kernel line decides what to do: which recovery the driver asks for, which row of the table of NVLink 5 it is.
_LINE_DECIDES = (str(xid_table.RECOVERY), *map(str, xid_table.NVLINK5))
# A GPU that no longer answers on the bus may stay away after a warm reboot.
_POWER_CYCLE = ("79", "fallen_off_bus", "gpu_is_lost")
_NVLINK5 = Text(
    "An NVLink 5 unit reported an error. The line names unit, link and registers; NVIDIA's table says which of them "
    "need a reset.",
    "A fatal one that the table answers with a reset takes the link, and collective operations fail. One that the "
    "table ignores, and that is not fatal, is recorded only. Others warn.",
    "",  # by row
)
_NVLINK5_WITHOUT_RESET = Text(
    "An NVLink 5 unit reported an error. The line names unit, link and registers; no row of NVIDIA's table needs a "
    "reset.",
    "NVLink traffic goes on. An error that is not fatal is recorded only. One that the line calls fatal, or that is in "
    "no row of the table, warns.",
    "",
)
_BY_ACTION: dict[str, tuple[str, str]] = {
    "RESET_GPU": ("The GPU needs a reset: it is not to be used before.", _RESET_TODO),
    "RESTART_APP": ("An application failed on the GPU. The GPU itself goes on.", _APPLICATION_TODO),
    "IGNORE": (
        "NVIDIA's catalogue says that nothing has to be done at once.",
        "Nothing, unless it comes often on one GPU and not on others: then open a case with NVIDIA.",
    ),
    "RESTART_VM": ("The GPU cannot be used before the machine was restarted.", "Reboot the node."),
    "CHECK_MECHANICALS": (
        "The GPU runs without its auxiliary power, if at all.",
        "Check the power cables of the GPU board.",
    ),
    "UPDATE_SWFW": ("A virtual GPU did not start.", "Check that the driver's versions on host and guest fit."),
}
_OTHER = (
    "It may be harmless: no source says that this code justifies a drain, so healthd only warns.",
    "No action tonight. If it comes back, look the code up in NVIDIA's Xid catalogue, run nvidia-bug-report.sh and "
    "open a case with NVIDIA.",
)


def explain(name: str) -> Explain | None:
    """`name` is the part after "gpu_xid/": "79", "fallen_off_bus"."""
    if name in _NAMED:
        severity, ends = _WORST.get(name, (Severity.CRITICAL, Ends(Clears.REBOOT)))
        return _explained(name, severity, ends, _NAMED[name])
    if is_decimal(name) and len(name) < 5:
        return _xid(int(name))
    return None


def _xid(code: int) -> Explain:
    worst = xid_table.worst(code)
    text = _XIDS.get(code)
    if text is None and code in xid_table.NVLINK5:
        text = _nvlink5(code, worst.severity)
    if text is None:
        fact = codes.xid(code)
        action = "RESET_GPU" if code in xid_table.RESET else fact.action if fact is not None else ""
        matters, todo = _BY_ACTION.get(action, _OTHER)
        named = (
            f"{xid_table.title(code)}."
            if fact is not None
            else f"Xid {code} is unknown to this version: it is in no catalogue that it has."
        )
        text = Text(named, matters, todo)
    warns = worst.severity < Severity.DEGRADED
    window = (_APPLICATION if worst.of_application else _WARNS) if warns else ""
    return _explained(str(code), worst.severity, Ends(worst.clears, window), text)


def _nvlink5(code: int, worst: Severity) -> Text:
    from healthd.nvidia.nvlink5_texts import to_do

    more = f"healthd explain nvlink5/{code} shows the table; the message names the sub-code ({code}:0)."
    general = _NVLINK5 if worst is Severity.CRITICAL else _NVLINK5_WITHOUT_RESET
    return Text(f"{xid_table.title(code)}. {general.meaning} {more}", general.matters, to_do(code))


def _explained(name: str, severity: Severity, ends: Ends, text: Text) -> Explain:
    return Explain(
        severity,
        ends.clears,
        *text,
        also=tuple(other for other in _ALSO.get(name, ()) if other < severity),
        window=ends.window,
        milder=_MILDER.get(name),
        recorded=_RECORDED.get(name),
        remedy=Remedy.POWER_CYCLE if name in _POWER_CYCLE else None,
        line_decides=name in _LINE_DECIDES,
    )
