"""NVLinks that are down, and errors on those that are up.

Rules: a link that the other GPUs of this node have must be active (Meta's study counts NVLink errors as high severity;
DCGM, AzNHC and OCI compare with 12 links on A100, 18 on H100, H200 and B200). Replays and recoveries do not happen on
good links; of CRC errors a few do. With MIG there is no NVLink; on PCIe cards only where a bridge is plugged in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, ObservationKind, Severity
from healthd.nvml import NvmlGpu
from healthd.past import Past

USES = "nvml"
AFTER_EVENTS = ("xid", "sxid")

# Cards that have links without anything at their other end until somebody plugs in a bridge.
BRIDGED = re.compile(r"PCIE|\bNVL\b|RTX|QUADRO|TITAN|GEFORCE|\bA[0-9]{2}\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """links                    how many each GPU must have active; 0 = those that its peers on this node have
    inactive_confirm_seconds a link must be down for so long
    crc_degraded_per_second  so many CRC errors a second on one GPU are degraded; fewer warn
    clean_seconds            errors of a link are forgotten after so long without new ones under load
    """

    links: int = 0
    inactive_confirm_seconds: float = 60.0
    crc_degraded_per_second: float = 100.0
    clean_seconds: float = 24 * 3600.0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    states = {gpu: gpu.nvlink_states() or () for gpu in host.gpus() if not gpu.mig_enabled()}
    for gpu, links in states.items():
        if not links and not config.links:
            continue
        yield Observation("gpu_nvlinks_active", sum(links), labels=(("pci", gpu.pci),))
        peers = [other for peer, other in states.items() if peer is not gpu and peer.name == gpu.name]
        yield from _inactive(gpu, links, peers, config)
        yield from _errors(gpu, links, config, past)


def _inactive(
    gpu: NvmlGpu, links: tuple[bool, ...], peers: Sequence[tuple[bool, ...]], config: Config
) -> Iterator[Finding]:
    if config.links:
        message = f"{sum(links)} of {config.links} NVLinks are active"
        down = [] if sum(links) >= config.links else [link for link, active in enumerate(links) if not active]
        wrong = sum(links) < config.links
    elif not any(links) and BRIDGED.search(gpu.name):
        return
    else:
        most = max((len(other) for other in peers), default=0)
        has = [*links, *[False] * (most - len(links))]
        down = [link for link in range(most) if not has[link] and any(len(o) > link and o[link] for o in peers)]
        message = f"{len(down)} NVLinks are down that the other GPUs have"
        wrong = bool(down)
    if wrong:
        names = ", ".join(map(str, down))
        yield Finding(
            Severity.CRITICAL,
            "gpu_nvlink/inactive",
            gpu.pci,
            f"{message} (link {names})" if names else message,
            confirm_seconds=config.inactive_confirm_seconds,
        )


def _errors(gpu: NvmlGpu, links: tuple[bool, ...], config: Config, past: Past) -> Iterator[Finding | Observation]:
    """Sums over the links that count: one series a GPU, since 18 links of 8 GPUs are 432 numbers a round.

    Which links were summed is part of the name: a link that no longer answers must not look like a counter that fell.
    """
    answers = {link: gpu.nvlink_errors(link) for link in range(len(links))}
    for kind in ("replay", "recovery", "crc"):
        counts = {link: getattr(errors, kind, None) for link, errors in answers.items()}
        known = {link: count for link, count in counts.items() if count is not None}
        if not known:
            continue
        labels = (("pci", gpu.pci), ("error", kind), ("links", f"{sum(1 << link for link in known):#x}"))
        reading = Observation("gpu_nvlink_errors_total", sum(known.values()), ObservationKind.COUNTER, labels)
        yield reading
        growth = past.growth(reading, 0.0)  # since the last run
        if not growth:
            continue
        fast = kind == "crc" and (past.rate(reading) or 0.0) >= config.crc_degraded_per_second
        where = ", ".join(f"link {link}: {count}" for link, count in known.items() if count)
        yield Finding(
            Severity.WARNING if kind == "crc" and not fast else Severity.DEGRADED,
            "gpu_nvlink/crc_rate" if fast else f"gpu_nvlink/{kind}",
            gpu.pci,
            f"{growth:.0f} new NVLink {kind} errors (since the driver was loaded: {where})",
            clears=Clears.GPU_RESET,
            window_seconds=config.clean_seconds,
        )


_ERRORS_TODO = (
    "Look which links it is on both ends (nvidia-smi nvlink -e, nvidia-smi nvlink -R). A reset of all GPUs, or a "
    "reboot, trains the links anew. If the same link counts again: diagnostics (dcgmi diag -r 3), then reseat or "
    "replace the GPU or the baseboard."
)

EXPLAIN = {
    "gpu_nvlink/inactive": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "NVLinks of this GPU are not active although the other GPUs of the node have them.",
        "Collective operations between the GPUs fail, hang, or fall back to PCIe at a tenth of the speed.",
        "nvidia-smi nvlink -s; look for Xid 74 and SXids (journalctl -k) and at nvidia-fabricmanager. Reset all GPUs "
        "or reboot. If it stays down: reseat or replace the GPU or the baseboard.",
    ),
    "gpu_nvlink/replay": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "A link had to send packets again (replay errors grew). Good links do not.",
        "The link works but is weak: jobs get slower, and it is likely to fail.",
        _ERRORS_TODO,
    ),
    "gpu_nvlink/recovery": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "A link had to be trained anew while in use (recovery errors grew).",
        "Traffic stood still meanwhile; the next time it may fail for good and take the job with it.",
        _ERRORS_TODO,
    ),
    "gpu_nvlink/crc_rate": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "The links of this GPU count a hundred CRC errors a second or more.",
        "Bandwidth is lost to repetitions, and the link is likely to fail.",
        _ERRORS_TODO,
    ),
    "gpu_nvlink/crc": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "A link counted CRC errors, fewer than would cost bandwidth.",
        "None: damaged packets are repeated. Many of them announce a bad link.",
        "Watch whether it grows; see nvidia-smi nvlink -e.",
    ),
}
