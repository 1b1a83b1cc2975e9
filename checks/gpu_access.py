"""Whether the driver and every GPU answer NVML.

Rule: Meta's reliability study counts "GPU inaccessible" as high severity (arXiv 2410.21680: 57 % of PCIe faults show as
an unreachable GPU, without any Xid). A driver that does not match the library is degraded: running jobs go on, new ones
fail. A call that does not come back warns at first: NVML hangs for 45 s and more on healthy GPUs too (DCGM#313); in the
second round it is degraded. Together with Xid 79, 119 or 120 it is critical: gpu_xid says that by itself, from the
kernel log in the daemon, which no hung worker holds up. So it is not judged here once more, and a Xid of hours ago
never makes a requeue of a hang of now. A lost GPU counts after a minute, since an epilog's reset looks the same, but at
once before slurmd has started, and where the kernel has lost the GPU too. That a GPU which had to be reset answers
again is no evidence of its reset, but the driver's word that nothing is to be done any more is. A driver that is being
loaded, or whose device files nobody has made yet, is not "not loaded": then NVML cannot be asked, and that is no fault.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_GPU,
    CheckSettings,
    Clears,
    Explain,
    Finding,
    Host,
    Meaning,
    NothingToCheck,
    NvmlError,
    NvmlErrorKind,
    NvmlGpu,
    Observation,
    Past,
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

MODULE, CONTROL = "/sys/module/nvidia/initstate", "/dev/nvidiactl"
CLOSED = {
    NvmlErrorKind.LIBRARY_NOT_FOUND: (
        "library_missing",
        "PCI shows NVIDIA GPUs but libnvidia-ml.so.1 is not installed",
    ),
    NvmlErrorKind.DRIVER_NOT_LOADED: ("driver_not_loaded", "the NVIDIA driver is not loaded"),
    NvmlErrorKind.MISMATCH: ("driver_mismatch", "the loaded NVIDIA driver and its library are of different versions"),
}


class Config(CheckSettings, frozen=True):
    """confirm_seconds         a GPU must be lost for so long: a reset takes seconds. 0 before slurmd has started, and
                            where the kernel says that the GPU is gone
    hang_degraded_seconds   NVML that has not answered for so long is degraded: in the second round at the default
                            interval
    """

    confirm_seconds: Seconds = 60.0
    hang_degraded_seconds: Seconds = 240.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | Repair | NothingToCheck]:
    try:
        nvml = host.nvml
    except NvmlError as error:
        if error.kind not in CLOSED or (error.kind is NvmlErrorKind.DRIVER_NOT_LOADED and _has_driver(host)):
            raise
        if error.kind is NvmlErrorKind.MISMATCH or host.has_nvidia_hardware():
            what, message = CLOSED[error.kind]
            shared = error.kind is NvmlErrorKind.MISMATCH
            yield Finding(Severity.DEGRADED, f"gpu_access/{what}", "", message, shared_cause=shared)
        else:
            yield NO_GPU
        return
    yield Observation("gpus", len(nvml.gpus()))
    yield Observation("gpus_unreachable", len(nvml.unreachable))
    for unreachable in nvml.unreachable:
        if unreachable.kind is not NvmlErrorKind.NO_PERMISSION:
            yield _unreachable(unreachable, host, config)
        if unreachable.kind is NvmlErrorKind.RESET_REQUIRED and unreachable.pci:
            yield _refused(unreachable.pci, True)
    yield from host.each_gpu(lambda gpu: _answers(gpu, past))
    yield Observation("gpu_driver_info", 1, labels=(("version", nvml.driver_version() or ""),))
    for unreachable in nvml.unreachable:
        if unreachable.kind is NvmlErrorKind.NO_PERMISSION:
            raise unreachable  # healthd's own lack of rights is no fault of the GPU


def _has_driver(host: Host) -> bool:
    """Whether the kernel has the driver, or is loading it, and NVML says "not loaded" all the same: at boot, and where
    nobody has made the device files yet (the unit keeps NVML from making them; check device_nodes tells of them)."""
    state = host.told(MODULE)
    return state == "coming" or (state == "live" and not host.exists(CONTROL))


def _unreachable(error: NvmlError, host: Host, config: Config) -> Finding:
    said = f"{error.call} says: {error.message}"
    which = error.pci or f"index {error.index}"
    if error.kind is NvmlErrorKind.GPU_LOST:
        may_be_reset = (not error.pci or gpu_reset.has_driver(host, error.pci)) and gpu_reset.may_reset(host)
        return Finding(
            Severity.CRITICAL,
            "gpu_access/lost",
            error.pci,
            f"GPU {which} is lost, {said}",
            clears=Clears.REBOOT,
            confirm_seconds=config.confirm_seconds if may_be_reset else 0.0,
            confirmed_by=gpu_reset.GONE,
        )
    if error.kind is NvmlErrorKind.RESET_REQUIRED:
        return Finding(
            Severity.CRITICAL,
            "gpu_access/reset_required",
            error.pci,
            f"GPU {which} must be reset, {said}",
            clears=Clears.GPU_RESET,
        )
    return Finding(Severity.DEGRADED, "gpu_access/no_answer", error.pci, f"GPU {which} does not answer, {said}")


def _answers(gpu: NvmlGpu, past: Past) -> Iterator[Observation | Repair]:
    """Whether a GPU that answers was reset since it had to be.

    The driver refuses a GPU by what its own memory of the GPU says ("This property will be cleared on RM init, by which
    time the client should have reset the GPUs"): once nothing holds the GPU it forgets that, without a reset. What it
    wants done follows from a mark in the GPU, set with almost each such refusal, taken away for tests only, and read
    anew with the GPU: then no Xid 154 tells that the mark is gone. Source: NVIDIA's open kernel modules 595.45.04,
    src/nvidia/src/kernel: rmapi/alloc_free.c, gpu/gpu.c (gpuUnmarkDeviceForReset, _gpuRefreshRecoveryActionInLock),
    gpu/gsp/kernel_gsp.c. A driver before 570 does not say what it wants.
    """
    refused = _refused(gpu.pci, False)
    last = past.last(refused)
    if last is not None and last.value and gpu.recovery_action() == 0:
        yield refused
        why = "it had to be reset, answers again, and the driver asks for no recovery"
        yield Repair(Clears.GPU_RESET, gpu.pci, why, before=last.time)


def _refused(pci: str, is_refused: bool) -> Observation:
    return Observation("gpu_refused_until_reset", int(is_refused), labels=(("pci", pci),))


def overdue(config: Config, seconds: float) -> Iterator[Finding]:
    yield Finding(
        Severity.WARNING,
        "gpu_access/hang",
        "",
        f"NVML has not answered for {max(seconds, 1):.0f} s",
        worsens=Worsens(config.hang_degraded_seconds, Severity.DEGRADED),
    )


OBSERVATIONS = {
    "gpus": Meaning("GPUs that the driver has."),
    "gpus_unreachable": Meaning("GPUs that the driver has and cannot open."),
    "gpu_refused_until_reset": Meaning(
        "1 of a GPU that the driver refuses until it is reset, 0 when it was reset and answers again.", ("pci",)
    ),
    "gpu_driver_info": Meaning("Always 1; the label is the version of NVIDIA's driver.", ("version",)),
}

EXPLAIN = {
    "gpu_access/lost": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The GPU is known to the driver but no longer on the bus (NVML: GPU is lost, or Unknown Error for its handle).",
        "Every process on it is dead or hangs, and so are multi-GPU jobs that use it.",
        "Look for Xid 79 and PCIe errors just before it (journalctl -k). Power the node off and on rather than reboot "
        "it warm. If it comes back on the same slot: reseat or replace the GPU, look at power and cooling.",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_access/reset_required": Explain(
        Severity.CRITICAL,
        Clears.GPU_RESET,
        "The GPU answers every question with: reset required.",
        "Nothing can start on it until it is reset, and what ran on it has failed.",
        "Let the node drain, stop what holds the GPU (DCGM, persistence daemon), nvidia-smi --gpu-reset -i PCI; on "
        "machines with NVSwitches all GPUs together, or reboot. Look for the Xid that came before. After the reset the "
        "condition clears by itself with driver 570 and later. If it does not: healthd repaired "
        "gpu_access/reset_required PCI.",
    ),
    "gpu_access/no_answer": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "NVML counts this GPU but cannot open it, with another error than lost or reset required.",
        "New work cannot start on it; running work may go on.",
        "The message has NVML's words. Insufficient power: look at the external power cables. Otherwise look at the "
        "kernel log, and try nvidia-smi -i PCI; a reboot settles most of them.",
    ),
    "gpu_access/library_missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs but the driver's library libnvidia-ml.so.1 is not found.",
        "No job can use the GPUs. Nodes like this one swallow queues, since every job fails at once.",
        "Install the driver, or put it back into the image; run ldconfig -p | grep nvidia-ml.",
    ),
    "gpu_access/driver_not_loaded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The machine has NVIDIA GPUs but the kernel module nvidia is not loaded.",
        "No job can use the GPUs. Nodes like this one swallow queues, since every job fails at once.",
        "modprobe nvidia, and read dmesg: mostly a new kernel without a module for it (dkms status), or secure boot.",
    ),
    "gpu_access/driver_mismatch": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The driver's library was upgraded while the older kernel module stayed loaded.",
        "Running jobs go on with what they have loaded; everything that starts now fails to initialise NVML or CUDA.",
        "Let the node drain, then reload the modules (stop persistence daemon, DCGM and fabric manager, rmmod) or "
        "reboot. If all nodes have it: an unattended upgrade. Pin the driver's packages.",
        shared=True,
    ),
    "gpu_access/hang": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A call into the NVIDIA driver did not come back in time. It warns at first and is degraded when it lasts.",
        "While it hangs nothing on this node says how its GPUs are. Resets, bug reports and storms of ECC errors hang "
        "it for a minute on good GPUs; a dead GPU hangs it for good (then Xid 79, 119 or 120 say so).",
        "Read journalctl -k for Xids. Is a GPU reset or nvidia-bug-report.sh running? Do not kill what hangs in the "
        "driver: that has frozen GPUs. If it lasts: drain and reboot. Where no persistence daemon runs, opening the "
        "driver takes 1 to 3 s a GPU: start nvidia-persistenced, or raise timeout_seconds.",
        worsens=WorsensBy("hang_degraded_seconds", Severity.DEGRADED),
    ),
}
