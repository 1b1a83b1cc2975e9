"""Number of GPUs: all GPUs on PCI must respond, and there must be as many as the settings expect.

Rules: if NVML does not show a GPU that is on PCI, or if the GPU's configuration space reads all ones, the node needs a
reboot (AzNHC, GCM and OCI compare NVML with PCI). If there are fewer GPUs than the settings expect, the node is
degraded. A GPU that NVML does not show is reported as missing after a minute, because an epilog may be resetting it.
There is no delay if slurmd has not started yet, the GPU has no driver, or the kernel log reports the GPU as gone. The
same delay applies to a GPU that reads all ones, because a device also reads all ones during a bus reset.
"""

from __future__ import annotations

from collections.abc import Iterator

from healthd.api import (
    NO_GPU,
    Baseline,
    CheckSettings,
    Clears,
    EndsJob,
    Entry,
    Explain,
    FailureCause,
    Finding,
    Gpus,
    History,
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    NvmlErrorKind,
    Observation,
    Remedy,
    Seconds,
    Severity,
    regex,
)
from healthd.host import gpu_reset

USES = "nvml"
AFTER_EVENTS = ("xid", "gpu_fallen_off_bus", "pcie_hotplug", "pci_remove")
BASELINE = Baseline(("expected",), place=10)

REVISION, WIDTH = regex(r"0x[0-9a-f]{2}"), regex(r"[0-9]{1,3}")
DEAD_REVISION = "0xff"
DEAD_WIDTHS = ("63", "255")  # all bits of the register are set; some kernels also use this value for "unknown"
REPORTED_BY_GPU_ACCESS = (NvmlErrorKind.GPU_LOST, NvmlErrorKind.RESET_REQUIRED)


class Config(CheckSettings, frozen=True):
    """expected          number of GPUs in this node; 0 = not checked
    confirm_seconds   a GPU must be missing for this long before it is reported; a reset takes seconds. There is no
                      wait if slurmd has not started yet or the kernel reports that the GPU is gone"""

    expected: Gpus = 0
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    on_pci = list(host.pci_gpus())
    yield Observation("gpus_on_pci", len(on_pci))
    if not on_pci and not config.expected and not host.gpus():
        yield NO_GPU
    dead, unread = [], []
    for pci in on_pci:
        try:
            if _is_dead(host, pci):
                dead.append(pci)
        except (OSError, ValueError) as error:  # the other GPUs are still checked
            unread.append(error)
    in_reset = _in_reset(host, dead)
    for pci in dead:
        yield Finding(
            Severity.CRITICAL,
            "gpu_count/dead",
            pci,
            f"GPU {pci} is dead on the bus: its configuration space reads all ones",
            clears=Clears.REBOOT,
            confirm_seconds=config.confirm_seconds if pci in in_reset else 0.0,
            confirmed_by=gpu_reset.PERMANENT_LOSS_CODES,
        )
    answering = {gpu.pci for gpu in host.gpus()}
    accounted_for = set(answering)
    if host.nvml_is_open:
        accounted_for |= {error.pci for error in host.nvml.unreachable if error.kind in REPORTED_BY_GPU_ACCESS}
        for refusal in host.nvml.unreachable:
            if refusal.kind is NvmlErrorKind.NO_PERMISSION:
                raise refusal  # NVML counts this GPU but cannot identify it, so the missing GPUs are unknown
    absent = sorted({*on_pci} - answering - {*dead})
    resetting = _in_reset(host, [*absent, *dead])
    for pci in absent:
        if pci not in accounted_for:
            yield Finding(
                Severity.CRITICAL,
                "gpu_count/missing",
                pci,
                f"GPU {pci} is on the PCI bus but NVML does not show it",
                clears=Clears.REBOOT,
                confirm_seconds=config.confirm_seconds if pci in resetting else 0.0,
                confirmed_by=gpu_reset.PERMANENT_LOSS_CODES,
            )
    if len(answering) < config.expected:
        yield Finding(
            Severity.DEGRADED,
            "gpu_count/fewer_than_expected",
            "",
            f"{len(answering)} GPUs respond; expected {config.expected}",
            confirm_seconds=config.confirm_seconds if len(answering) + len(resetting) >= config.expected else 0.0,
            confirmed_by=gpu_reset.PERMANENT_LOSS_CODES,
            expects="expected",
        )
    if unread:
        raise unread[0]


def _in_reset(host: Host, missing: list[str]) -> set[str]:
    """Return the missing GPUs that may only be in a reset."""
    in_reset = {pci for pci in missing if gpu_reset.has_driver(host, pci)}
    return in_reset if in_reset and gpu_reset.may_reset(host) else set()


def _is_dead(host: Host, pci: str) -> bool:
    """Return True if all registers read as ones. On older kernels and virtual machines either file may be missing.

    Raises ValueError if a file does not contain a revision or a width.
    """
    device = f"/sys/bus/pci/devices/{pci}"
    revision, width = host.read(f"{device}/revision"), host.read(f"{device}/current_link_width")
    if revision is not None and not REVISION.fullmatch(revision):
        raise ValueError(f"{device}/revision: not a revision like 0xa1: {revision[:40]!r}")
    if width is not None and not WIDTH.fullmatch(width):
        raise ValueError(f"{device}/current_link_width: not a number of lanes: {width[:40]!r}")
    # a sleeping GPU's registers also read as ones
    return (revision == DEAD_REVISION or width in DEAD_WIDTHS) and host.read(f"{device}/power_state") != "D3cold"


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    gpus = host.gpus()
    unreachable = [str(error) for error in host.nvml.unreachable] if host.nvml_is_open else []
    silent = sorted({*host.pci_gpus()} - {gpu.pci for gpu in gpus})
    if unreachable or silent:
        reason = "; ".join(unreachable) or f"GPU {silent[0]} is on PCI and does not respond"
        yield LeftOut("gpu_count", f"{len(gpus)} GPUs respond, but {reason}", "expected")
    elif gpus:
        models = ", ".join(sorted({gpu.name for gpu in gpus}))
        yield Entry("gpu_count", "expected", len(gpus), note=models)


OBSERVATIONS = {
    "gpus_on_pci": Meaning("Number of GPUs on the PCI bus, including GPUs that the driver does not manage."),
}

EXPLAIN = {
    "gpu_count/dead": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "The GPU is still listed on PCI, but reads return all ones (revision ff, link width 63).",
        "The GPU has fallen off the bus. All work on this GPU is dead, and calls into the driver may hang.",
        "Save the evidence first: healthd record. Look for Xid 79 and PCIe errors (journalctl -k). Then power-cycle "
        "the node; after a warm reboot the GPU may still be missing. If the fault recurs in the same slot, reseat or "
        "replace the GPU.",
        confirm="confirm_seconds",
        at_once=True,
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_count/missing": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "PCI shows this GPU, but NVML does not. The driver could not start the GPU or has given up on it.",
        "Jobs on this node get fewer GPUs than Slurm allocated to them, or fail at once.",
        "Look for 'RmInitAdapter failed' or Xid 79 in journalctl -k. Reboot. If the GPU is still missing, reseat or "
        "replace it. If the GPU is meant for another purpose, such as a virtual machine, bind it to vfio-pci.",
        confirm="confirm_seconds",
        at_once=True,
    ),
    "gpu_count/fewer_than_expected": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "Fewer GPUs respond than the setting expected in [checks.gpu_count] requires.",
        "Jobs that request all of the node's GPUs fail.",
        "Compare nvidia-smi -L with lspci -d 10de:. If the GPU is missing on PCI as well, power-cycle the node, then "
        "reseat the GPU. If the node really has fewer GPUs, correct the setting.",
        confirm="confirm_seconds",
        at_once=True,
        expects="expected",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.GPU_LOST)
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.ALWAYS)
