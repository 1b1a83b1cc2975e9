"""Access to the NVIDIA driver and to every GPU through NVML.

Rule: Meta's reliability study counts "GPU inaccessible" as high severity (arXiv 2410.21680: 57 % of PCIe faults show as
an unreachable GPU, without any Xid). A driver that does not match the library is degraded: running jobs continue, new
ones fail. A call that does not return warns at first: NVML hangs for 45 s and more on healthy GPUs too (DCGM#313); in
the second round it is degraded. Together with Xid 79, 119 or 120 the fault is critical. gpu_xid reports that from the
kernel log in the daemon, which a hung worker does not delay. This check does not report it again, so an Xid of hours
ago never turns a new hang into a requeue.

A lost GPU counts after a minute, because a reset by an epilog looks the same. It counts at once before slurmd has
started, and if the kernel has lost the GPU too. A GPU that had to be reset and responds again may not have been reset;
the driver's report that no action is needed is evidence. A driver that is being loaded, or whose device files do not
exist yet, is not "not loaded": NVML cannot be queried then, which is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_GPU,
    CheckSettings,
    Clears,
    EndsJob,
    Explain,
    FailureCause,
    Finding,
    History,
    Host,
    Meaning,
    NothingToCheck,
    NvmlError,
    NvmlErrorKind,
    NvmlGpu,
    Observation,
    Remedy,
    Repair,
    Seconds,
    Severity,
    Worsens,
    WorsensBy,
)
from healthd.host import gpu_reset

USES = "nvml"
AFTER_EVENTS = ("xid", "gpu_fallen_off_bus", "gsp", "pcie_hotplug", "pci_remove", "job_end", "nvml_trouble")

MODULE_STATE_FILE, CONTROL_DEVICE = "/sys/module/nvidia/initstate", "/dev/nvidiactl"
OPEN_FAILURES = {
    NvmlErrorKind.LIBRARY_NOT_FOUND: (
        "library_missing",
        "PCI shows NVIDIA GPUs but libnvidia-ml.so.1 is not installed",
    ),
    NvmlErrorKind.DRIVER_NOT_LOADED: ("driver_not_loaded", "the NVIDIA driver is not loaded"),
    NvmlErrorKind.MISMATCH: ("driver_mismatch", "the loaded NVIDIA driver and its library have different versions"),
}


class Config(CheckSettings, frozen=True):
    """confirm_seconds         a GPU must be lost for this long: a reset takes seconds. 0 before slurmd has started, and
                            if the kernel reports that the GPU is gone
    hang_degraded_seconds   NVML that has not responded for this long is degraded: in the second round at the default
                            interval
    """

    confirm_seconds: Seconds = 60.0
    hang_degraded_seconds: Seconds = 240.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    try:
        nvml = host.nvml
    except NvmlError as error:
        if error.kind not in OPEN_FAILURES or (error.kind is NvmlErrorKind.DRIVER_NOT_LOADED and _has_driver(host)):
            raise
        if error.kind is NvmlErrorKind.MISMATCH or host.has_nvidia_hardware():
            name, message = OPEN_FAILURES[error.kind]
            is_shared = error.kind is NvmlErrorKind.MISMATCH
            yield Finding(Severity.DEGRADED, f"gpu_access/{name}", "", message, shared_cause=is_shared)
        else:
            yield NO_GPU
        return
    yield Observation("gpus", len(nvml.gpus()))
    yield Observation("gpus_unreachable", len(nvml.unreachable))
    for unreachable in nvml.unreachable:
        if unreachable.kind is not NvmlErrorKind.NO_PERMISSION:
            yield _unreachable(unreachable, host, config)
        if unreachable.kind is NvmlErrorKind.RESET_REQUIRED and unreachable.pci:
            yield _refusal(unreachable.pci, True)
    yield from host.each_gpu(lambda gpu: _detect_reset(gpu, past))
    yield Observation("gpu_driver_info", 1, labels=(("version", nvml.driver_version() or ""),))
    for unreachable in nvml.unreachable:
        if unreachable.kind is NvmlErrorKind.NO_PERMISSION:
            raise unreachable  # missing permissions of healthd are no fault of the GPU


def _has_driver(host: Host) -> bool:
    """Return True if the kernel has the driver, or is loading it, although NVML reports "not loaded": at boot, or while
    the device files do not exist (the unit keeps NVML from creating them; see the check device_nodes)."""
    state = host.read_or_empty(MODULE_STATE_FILE)
    return state == "coming" or (state == "live" and not host.exists(CONTROL_DEVICE))


def _unreachable(error: NvmlError, host: Host, config: Config) -> Finding:
    detail = f"{error.call}: {error.message}"
    label = error.pci or f"index {error.index}"
    if error.kind is NvmlErrorKind.GPU_LOST:
        may_be_reset = (not error.pci or gpu_reset.has_driver(host, error.pci)) and gpu_reset.may_reset(host)
        return Finding(
            Severity.CRITICAL,
            "gpu_access/lost",
            error.pci,
            f"GPU {label} is lost ({detail})",
            clears=Clears.REBOOT,
            confirm_seconds=config.confirm_seconds if may_be_reset else 0.0,
            confirmed_by=gpu_reset.PERMANENT_LOSS_CODES,
        )
    if error.kind is NvmlErrorKind.RESET_REQUIRED:
        return Finding(
            Severity.CRITICAL,
            "gpu_access/reset_required",
            error.pci,
            f"GPU {label} must be reset ({detail})",
            clears=Clears.GPU_RESET,
        )
    return Finding(Severity.DEGRADED, "gpu_access/no_answer", error.pci, f"GPU {label} does not respond ({detail})")


def _detect_reset(gpu: NvmlGpu, past: History) -> Iterator[Observation | Repair]:
    """Yield a repair if a GPU that responds was reset since it had to be.

    The driver refuses a GPU because of its own record of the GPU ("This property will be cleared on RM init, by which
    time the client should have reset the GPUs"): once nothing holds the GPU the driver drops that record, without a
    reset. Its recovery action comes from a mark in the GPU. The mark is set with almost each such refusal, removed for
    tests only, and read again with the GPU: then no Xid 154 reports that the mark is gone. Source: NVIDIA's open kernel
    modules 595.45.04, src/nvidia/src/kernel: rmapi/alloc_free.c, gpu/gpu.c (gpuUnmarkDeviceForReset,
    _gpuRefreshRecoveryActionInLock), gpu/gsp/kernel_gsp.c. A driver before 570 does not report a recovery action.
    """
    refusal = _refusal(gpu.pci, False)
    last = past.last(refusal)
    if last is not None and last.value and gpu.recovery_action() == 0:
        yield refusal
        reason = "it had to be reset, responds again, and the driver requests no recovery"
        yield Repair(Clears.GPU_RESET, gpu.pci, reason, before=last.time)


def _refusal(pci: str, is_refused: bool) -> Observation:
    return Observation("gpu_refused_until_reset", int(is_refused), labels=(("pci", pci),))


def overdue(config: Config, seconds: float) -> Iterator[Finding]:
    yield Finding(
        Severity.WARNING,
        "gpu_access/hang",
        "",
        f"NVML has not responded for {max(seconds, 1):.0f} s",
        worsens=Worsens(config.hang_degraded_seconds, Severity.DEGRADED),
    )


OBSERVATIONS = {
    "gpus": Meaning("GPUs that the driver has."),
    "gpus_unreachable": Meaning("GPUs that the driver has and cannot open."),
    "gpu_refused_until_reset": Meaning(
        "1 for a GPU that the driver refuses until it is reset, 0 once it was reset and responds again.", ("pci",)
    ),
    "gpu_driver_info": Meaning("Always 1; the label is the version of NVIDIA's driver.", ("version",)),
}

EXPLAIN = {
    "gpu_access/lost": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The driver has this GPU, but the GPU is no longer on the bus (NVML: GPU is lost, or Unknown Error for its "
        "handle).",
        "Every process on it is dead or hangs, and so are multi-GPU jobs that use it.",
        "Save the evidence first: healthd record. Look for Xid 79 and PCIe errors just before it (journalctl -k). "
        "Then power-cycle the node: a warm reboot may leave the GPU off the bus. If it comes back on the same slot, "
        "reseat or replace the GPU, and check power and cooling.",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_access/reset_required": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "NVML answers every query to this GPU with: reset required.",
        "No program can start on it until it is reset, and the work that ran on it has failed.",
        "After the drain, stop all clients of the GPU (DCGM, persistence daemon), then nvidia-smi --gpu-reset -i PCI. "
        "On machines with NVSwitches reset all GPUs together, or reboot. Look for the Xid that came before. With "
        "driver 570 and later the condition clears by itself after the reset. If it does not, run healthd repaired "
        "gpu_access/reset_required PCI.",
    ),
    "gpu_access/no_answer": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "NVML counts this GPU but cannot open it. The error is neither lost nor reset required.",
        "New work cannot start on it; running work may continue.",
        "The message contains NVML's error. Insufficient power: check the external power cables. Other errors: read "
        "the kernel log and try nvidia-smi -i PCI; a reboot resolves most errors.",
    ),
    "gpu_access/library_missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs, but the driver's library libnvidia-ml.so.1 is missing.",
        "No job can use the GPUs. A node like this drains the queue, because every job on it fails at once.",
        "Install the driver, or restore it in the image; check with ldconfig -p | grep nvidia-ml.",
    ),
    "gpu_access/driver_not_loaded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs, but the kernel module nvidia is not loaded.",
        "No job can use the GPUs. A node like this drains the queue, because every job on it fails at once.",
        "modprobe nvidia, and read dmesg. Usual causes: a new kernel without a module for it (dkms status), or secure "
        "boot.",
    ),
    "gpu_access/driver_mismatch": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The driver's library was upgraded while the older kernel module stayed loaded.",
        "Running jobs continue with the library that they have loaded. New processes fail to initialise NVML or CUDA.",
        "After the drain, reload the modules (stop persistence daemon, DCGM and fabric manager, then rmmod) or "
        "reboot. If all nodes have it: an unattended upgrade. Pin the driver's packages.",
        shared=True,
    ),
    "gpu_access/hang": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A call into the NVIDIA driver did not return in time. It warns at first and is degraded when it lasts.",
        "Meanwhile healthd cannot read the state of the GPUs. Resets, bug reports and storms of ECC errors hang the "
        "driver for a minute on healthy GPUs; a dead GPU hangs it for good (then Xid 79, 119 or 120 follows).",
        "While it is only a warning, no action tonight. Read journalctl -k for Xids. Check whether a GPU reset or "
        "nvidia-bug-report.sh is running. Do not kill a process that hangs in the driver: that has frozen GPUs. If "
        "the node is drained, reboot it. Without a persistence daemon opening the driver takes 1 to 3 s for each "
        "GPU: start nvidia-persistenced, or raise timeout_seconds.",
        worsens=WorsensBy("hang_degraded_seconds", Severity.DEGRADED),
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.GPU_LOST),
    "gpu_access/reset_required": FailureCause.GPU,
    "gpu_access/library_missing": FailureCause.DRIVER,
    "gpu_access/driver_not_loaded": FailureCause.DRIVER,
    "gpu_access/driver_mismatch": FailureCause.DRIVER,
}
ENDS_JOB = {
    "gpu_access/lost": EndsJob.ALWAYS,
    "gpu_access/reset_required": EndsJob.ALWAYS,
    "gpu_access/no_answer": EndsJob.ALWAYS,
    "gpu_access/library_missing": EndsJob.ALWAYS,
    "gpu_access/driver_not_loaded": EndsJob.ALWAYS,
    "gpu_access/driver_mismatch": EndsJob.ALWAYS,
}
