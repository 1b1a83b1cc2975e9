"""Chip-to-chip links (NVLink-C2C) between a GPU and its Grace CPU: links that are down, and errors.

Rules: a healthy GPU has all its links active (10 on GH200, `nvidia-smi c2c -s`). A GPU with fewer active links than
another GPU of this model is degraded, as Xid 173 is, with which the driver reports a dead C2C link. The numbers of the
links are not compared, because no source tells whether each GPU uses the same ones. Without such a peer, as on GH200,
an inactive link is only a warning, because no source tells how many links a model uses.

If no link of the node is active, the C2C mode decides (nvmlDeviceGetC2cModeInfoV; "C2C Mode" in nvidia-smi -q): if C2C
is on, all links of the GPU are down, which is degraded. If C2C is off, or the GPU has no such mode (a virtual machine,
or a driver without the call), C2C is not in use, and nothing is checked.

A link whose state the driver does not report is not down. It is a warning if another GPU of this model has more active
links.

NVIDIA's Xid catalogue ignores corrected C2C errors (Xid 121), and DCGM 4.6.0 only reports their counters. Growing
counters (NVML fields 231 to 233) are therefore warnings: of CRC errors, of replays, and of replays that follow each
other. The power state (field 234) is not judged: links save power while they are idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    NvmlGpu,
    Observation,
    ObservationKind,
    Seconds,
    Severity,
)
from healthd.nvidia.nvml import C2cLink

USES = "nvml"
AFTER_EVENTS = ("xid",)


class Config(CheckSettings, frozen=True):
    """inactive_confirm_seconds a link must be inactive for this long before it is reported
    clean_seconds            link errors clear after this long under load without new errors
    """

    inactive_confirm_seconds: Seconds = 60.0
    clean_seconds: Seconds = 24 * 3600.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    links: dict[NvmlGpu, tuple[C2cLink, ...]] = {}
    failed: list[NvmlError] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    for gpu in gpus:
        try:
            links[gpu] = gpu.c2c_links()
        except NvmlError as error:  # the other GPUs are still checked
            failed.append(error)
    is_used = bool(failed)
    for gpu, own in links.items():
        peers = [peer_links for peer, peer_links in links.items() if peer.name == gpu.name]
        try:
            if any(map(_active, peers)) or (_are_all_down(own) and gpu.c2c_enabled()):
                is_used = True
                yield from _states(gpu, own, peers, config)
                yield from _errors(gpu, own, config, past)
        except NvmlError as error:
            failed.append(error)
    if gpus and not is_used:
        yield NothingToCheck("no C2C link")
    if failed:
        raise failed[0]


def _active(links: Sequence[C2cLink]) -> list[int]:
    return [number for number, link in enumerate(links) if link.active]


def _are_all_down(links: Sequence[C2cLink]) -> bool:
    return bool(links) and all(link.active is False for link in links)


def _states(
    gpu: NvmlGpu, links: Sequence[C2cLink], peers: Sequence[Sequence[C2cLink]], config: Config
) -> Iterator[Finding | Observation]:
    """Compare the GPU's links with those of all GPUs of its model (`peers`)."""
    labels = (("pci", gpu.pci),)
    yield Observation("gpu_c2c_links_active", len(_active(links)), labels=labels)
    powers = [link.is_full_power for link in links if link.is_full_power is not None]
    if powers:
        yield Observation("gpu_c2c_links_full_power", sum(powers), labels=labels)
    most = max(len(_active(peer)) for peer in peers)
    down = [number for number, link in enumerate(links) if link.active is False]
    unreported = [n for n in range(max(map(len, peers))) if n >= len(links) or links[n].active is None]
    texts = []
    if down:
        verb = "is" if len(down) == 1 else "are"
        texts.append(f"{len(down)} of {len(links)} C2C links to the CPU {verb} down: {', '.join(map(str, down))}")
    if unreported and len(_active(links)) < most:
        numbers = ", ".join(map(str, unreported))
        texts.append(f"the driver reports no state of C2C links to the CPU: {numbers}")
    if texts:
        has_fewer = len(_active(links)) + len(unreported) < most
        if len(_active(links)) < most:
            texts.append(f"another GPU has {most} active links")
        yield Finding(
            Severity.DEGRADED if has_fewer or _are_all_down(links) else Severity.WARNING,
            "gpu_c2c/inactive",
            gpu.pci,
            "; ".join(texts),
            confirm_seconds=config.inactive_confirm_seconds,
        )


def _errors(gpu: NvmlGpu, links: Sequence[C2cLink], config: Config, past: History) -> Iterator[Finding | Observation]:
    """Sum the errors over all links, one series for each GPU and kind of error, as in gpu_nvlink."""
    kinds = {
        "crc": ("CRC errors", [link.error_interrupts for link in links]),
        "replay": ("replays", [link.replays for link in links]),
        "replay_repeated": ("back-to-back replays", [link.back_to_back_replays for link in links]),
    }
    grown = []
    for kind, (name, counts) in kinds.items():
        by_link = {number: count for number, count in enumerate(counts) if count is not None}
        if not by_link:
            continue
        labels = (("pci", gpu.pci), ("error", kind), ("links", f"{sum(1 << number for number in by_link):#x}"))
        reading = Observation("gpu_c2c_errors_total", sum(by_link.values()), ObservationKind.COUNTER, labels)
        yield reading
        growth, last = past.growth(reading, 0.0), past.last(reading)  # growth since the last run
        if growth and last is not None and reading.value >= last.value:  # a lower value follows a reset or a boot
            where = ", ".join(f"link {number}: {count}" for number, count in by_link.items() if count)
            grown.append(f"{growth:.0f} new {name} (since the driver was loaded: {where})")
    if grown:
        yield Finding(
            Severity.WARNING,
            "gpu_c2c/errors",
            gpu.pci,
            f"C2C links to the CPU: {'; '.join(grown)}",
            clears=Clears.GPU_RESET,
            window_seconds=config.clean_seconds,
        )


OBSERVATIONS = {
    "gpu_c2c_links_active": Meaning("Number of active C2C links between the GPU and its Grace CPU.", ("pci",)),
    "gpu_c2c_links_full_power": Meaning("Number of the GPU's C2C links that are at full power.", ("pci",)),
    "gpu_c2c_errors_total": Meaning(
        "The GPU's C2C link errors since the driver was loaded; the label links is a bit mask of the counted links.",
        ("pci", "error", "links"),
    ),
}

EXPLAIN = {
    "gpu_c2c/inactive": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "Some chip-to-chip links (NVLink-C2C) between this GPU and its Grace CPU are not active. This is degraded if "
        "another GPU of this node has more active links, or if all links of the GPU are down. Otherwise, or if the "
        "driver merely does not report their state, it is a warning.",
        "Copies between CPU and GPU memory lose bandwidth. If all links of the GPU are down, the GPU cannot be used.",
        "nvidia-smi c2c -s shows the links. Look for Xid 173 (journalctl -k). After the drain, reboot the node. If the "
        "link is still down, replace the board with the CPU and the GPU.",
        also=(Severity.WARNING,),
        confirm="inactive_confirm_seconds",
    ),
    "gpu_c2c/errors": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "A chip-to-chip link (NVLink-C2C) between this GPU and its Grace CPU had CRC errors or resent packets.",
        "No data was lost, because damaged packets are resent. Many errors indicate a bad link.",
        "No action tonight. nvidia-smi c2c -e shows the counters. Check whether they keep growing, and look for Xids "
        "121 and 173 (journalctl -k).",
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.NVLINK)
ENDS_JOB = {"gpu_c2c/inactive": EndsJob.IF_ISOLATES, "gpu_c2c/errors": EndsJob.NEVER}
