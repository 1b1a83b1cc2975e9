"""Access to the NVIDIA driver and to every GPU through NVML.

Rule: Meta's reliability study counts "GPU inaccessible" as high severity (arXiv 2410.21680: 57 % of PCIe faults show as
an unreachable GPU, without any Xid). A driver that does not match the library is degraded: running jobs continue, but
new jobs fail. A call that does not return is a warning at first, because NVML can hang for 45 s and more even on
healthy GPUs (DCGM#313). If the call still hangs in the second round, the condition is degraded. A hang with Xid 79, 119
or 120 is critical: gpu_xid reports these Xids from the kernel log. gpu_xid runs in the daemon, so a hung worker does
not delay that check. gpu_access does not report those Xids itself, so that an Xid from hours ago never turns a new hang
into a requeue.

A lost GPU is reported only after a minute, because a GPU looks the same while an epilog resets it. It is reported at
once if slurmd has not started yet or if the kernel has lost the GPU too. If a GPU that had to be reset responds again,
this does not prove that the GPU was reset. The proof is the driver's report that no action is needed. A driver that is
still loading, or whose device files do not exist yet, is not reported as "not loaded". NVML cannot be queried at that
time, but that is not a fault.
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
AFTER_EVENTS = (
    *("xid", "gpu_fallen_off_bus", "gsp", "gpu_event", "gpu_unavailable"),
    *("pcie_hotplug", "pci_remove", "job_end", "nvml_trouble"),
)

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
    """confirm_seconds         a GPU must be lost for this long before it is reported; a reset takes seconds. No wait
                            if slurmd has not started, or if the kernel reports that the GPU is gone
    hang_degraded_seconds   degraded if NVML has not responded for this long (at the default interval: in the second
                            round)
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
            raise unreachable  # healthd lacks permissions, which is not a fault of the GPU


def _has_driver(host: Host) -> bool:
    """Return True if NVML reports "not loaded" although the kernel has loaded the driver or is loading it. This happens
    at boot, and while the device files do not exist. healthd's unit keeps NVML from creating them; see the check
    device_nodes.
    """
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
    """Yield a repair if a GPU that had to be reset was reset and responds again.

    The driver rejects a GPU because of a flag in the driver itself ("This property will be cleared on RM init, by which
    time the client should have reset the GPUs"). When no process uses the GPU any more, the driver drops that flag even
    without a reset. The recovery action comes from a mark in the GPU instead. The driver sets the mark almost every
    time it rejects a GPU, and removes it only in tests. When the driver initialises the GPU, it reads the mark again;
    no Xid 154 then reports that the mark is gone. Source: NVIDIA's open kernel modules 595.45.04,
    src/nvidia/src/kernel: rmapi/alloc_free.c, gpu/gpu.c (gpuUnmarkDeviceForReset, _gpuRefreshRecoveryActionInLock),
    gpu/gsp/kernel_gsp.c. A driver before 570 does not report a recovery action.
    """
    refusal = _refusal(gpu.pci, False)
    last = past.last(refusal)
    if last is not None and last.value and gpu.recovery_action() == 0:
        yield refusal
        reason = "the GPU had to be reset, responds again, and the driver requests no recovery"
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
    "gpus": Meaning("Number of GPUs that the driver manages."),
    "gpus_unreachable": Meaning("Number of GPUs that the driver manages but cannot open."),
    "gpu_refused_until_reset": Meaning(
        "1 if the driver rejects the GPU until the GPU is reset; 0 after a reset, when the GPU responds again.",
        ("pci",),
    ),
    "gpu_driver_info": Meaning("Always 1; the label is the version of the NVIDIA driver.", ("version",)),
}

EXPLAIN = {
    "gpu_access/lost": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The driver lists this GPU, but the GPU is no longer on the bus (NVML: GPU is lost, or Unknown Error for its "
        "handle).",
        "Every process on this GPU, and every multi-GPU job that uses it, has died or hangs.",
        "Save the evidence first: healthd record. Look for Xid 79 and PCIe errors just before the loss (journalctl "
        "-k). Then power-cycle the node; after a warm reboot the GPU may still be missing. If the fault recurs in "
        "the same slot, reseat or replace the GPU, and check power and cooling.",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_access/reset_required": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "NVML answers every query about this GPU with the error 'reset required'.",
        "No program can start on the GPU until a reset. Work that was running on the GPU has failed.",
        "After the drain, stop all clients of the GPU (DCGM, persistence daemon), then run nvidia-smi --gpu-reset -i "
        "PCI. On machines with NVSwitches, reset all GPUs together, or reboot. Look for an earlier Xid. With driver "
        "570 and later, the condition clears by itself after the reset. If the condition stays open, run healthd "
        "repaired gpu_access/reset_required PCI.",
    ),
    "gpu_access/no_answer": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "NVML counts this GPU but cannot open it. The error is neither 'GPU is lost' nor 'reset required'.",
        "New work cannot start on the GPU. Running work may continue.",
        "The message contains NVML's error. For insufficient power, check the external power cables. For other "
        "errors, check the kernel log and try nvidia-smi -i PCI. A reboot resolves most of these errors.",
    ),
    "gpu_access/library_missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs, but the driver's library libnvidia-ml.so.1 is missing.",
        "No job can use the GPUs. Such a node quickly empties the job queue, because every job on this node fails at "
        "once.",
        "Install the driver, or restore it in the image; check with ldconfig -p | grep nvidia-ml.",
    ),
    "gpu_access/driver_not_loaded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs, but the kernel module nvidia is not loaded.",
        "No job can use the GPUs. Such a node quickly empties the job queue, because every job on this node fails at "
        "once.",
        "Run modprobe nvidia, and check dmesg. The usual cause is secure boot, or a new kernel for which no module "
        "was built (dkms status).",
    ),
    "gpu_access/driver_mismatch": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The driver's library was upgraded while the old kernel module stayed loaded.",
        "Running jobs continue with the library that they have already loaded. New processes fail to initialise NVML "
        "or CUDA.",
        "After the drain, reload the modules (stop the persistence daemon, DCGM and the fabric manager, then rmmod), "
        "or reboot. If all nodes are affected, the likely cause is an unattended upgrade; pin the driver's packages.",
        shared=True,
    ),
    "gpu_access/hang": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A call into the NVIDIA driver did not return in time. The condition is a warning at first. It becomes "
        "degraded if the hang lasts.",
        "During the hang, healthd cannot read the state of the GPUs. On healthy GPUs, resets, bug reports and storms "
        "of ECC errors can block the driver for a minute. A dead GPU blocks the driver permanently, and Xid 79, 119 "
        "or 120 follows.",
        "While the condition is only a warning, no action is needed tonight. Look for Xids in journalctl -k. Check "
        "whether a GPU reset or nvidia-bug-report.sh is running. Do not kill a process that hangs in the driver, "
        "because such kills have frozen GPUs. If the node is drained, reboot it. Without a persistence daemon, "
        "opening the driver takes 1 to 3 s for each GPU. In that case, start nvidia-persistenced, or raise "
        "timeout_seconds.",
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
