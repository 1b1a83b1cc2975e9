"""NVLinks: links that are down, and errors on active links.

Rules: a link that is active on this node's other GPUs must be active on every GPU (Meta's study counts NVLink errors as
high severity; DCGM, AzNHC and OCI expect 12 links on A100 and 18 on H100, H200 and B200). Good links have no replays or
recoveries, but a few CRC errors. With MIG there is no NVLink, and PCIe cards have NVLink only with a bridge. GPUs
before Ampere may use different links on each GPU (on RWTH's nodes one V100 has links 0 and 2, the other 1 and 2). For
these GPUs only the number of active links is compared.

Blackwell instead reports recoveries, damaged packets and bit error rates. In DCGM 4.6.0 a successful recovery is a
warning, and a failed recovery is a failure (DcgmHealthWatch.cpp, MonitorNVLinkErrorFields). In DCGM a link also fails
if its effective bit error rate is above 1e-12 (DcgmUtilities.cpp, IsEffectiveBerThresholdExceeded) or its symbol bit
error rate is above 15e-238 (DcgmGPUHardwareLimits.h). In healthd a high rate is only a warning, at the second reading,
because packets are resent and no job is lost. A failed recovery and a link that goes down have their own codes, which
drain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

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
    History,
    Host,
    LeftOut,
    Links,
    Meaning,
    NothingToCheck,
    NvmlError,
    NvmlGpu,
    Observation,
    ObservationKind,
    Rate,
    Seconds,
    Severity,
    Share,
    regex,
)
from healthd.nvidia.nvml import Nvlink

USES = "nvml"
AFTER_EVENTS = ("xid", "sxid", "nvlink", "job_end")
BASELINE = Baseline(("links",), place=11)

# Cards whose links are unconnected unless a bridge is installed.
BRIDGED_MODELS = regex(r"PCIE|\bNVL\b|RTX|QUADRO|TITAN|GEFORCE|\bACTIVE\b|\bA[0-9]{2}\b", re.IGNORECASE)
DEGRADED_KINDS = ("replay", "recovery", "recovery_failed")
ERROR_NAMES = {"recovered": "recoveries", "recovery_failed": "failed recoveries"}
MAX_DIRECT_LINKS = 6  # a V100 has 6, a P100 4; A100 and later have 12 or more


class Config(CheckSettings, frozen=True):
    """links                    number of active links that each GPU must have; 0 = as many as its peers on this node
    inactive_confirm_seconds a link must be down for this long before it is reported
    crc_degraded_per_second  degraded at this many CRC errors per second on one GPU; a lower rate warns
    bit_error_rate           Blackwell: warn above this share of wrong bits on a link after forward error correction
    symbol_bit_error_rate    Blackwell: warn above this share of symbols that forward error correction could not repair
    bit_errors_confirm_seconds a bit error rate must be above its limit for this long and in two readings
    clean_seconds            link errors clear after this long under load without new errors
    """

    links: Links = 0
    inactive_confirm_seconds: Seconds = 60.0
    crc_degraded_per_second: Rate = 100.0
    bit_error_rate: Share = 1e-12
    symbol_bit_error_rate: Share = 15e-238
    bit_errors_confirm_seconds: Seconds = 60.0
    clean_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    if config.links < 0:
        return f"links must be 0 or more, got {config.links}"
    for name in ("bit_error_rate", "symbol_bit_error_rate"):
        if not 0 < getattr(config, name) < 1:
            return f"{name} must be between 0 and 1, got {getattr(config, name):g}"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    links: dict[NvmlGpu, tuple[Nvlink, ...]] = {}
    failed: list[NvmlError] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    for gpu in gpus:
        try:
            if not gpu.mig_enabled():
                links[gpu] = gpu.nvlinks() or ()
        except NvmlError as error:  # the other GPUs are still checked
            failed.append(error)
    if gpus and not failed and not config.links and not any(links.values()):
        yield NothingToCheck("no NVLink")
    for gpu, own in links.items():
        peers = [[link.active for link in peer_links] for peer, peer_links in links.items() if peer.name == gpu.name]
        if not own and not config.links and not any(map(any, peers)):
            continue
        active = [link.active for link in own]
        yield Observation("gpu_nvlinks_active", sum(active), labels=(("pci", gpu.pci),))
        yield from _inactive(gpu, active, peers, config)
        yield from _errors(gpu, own, config, past)
        yield from _bit_errors(gpu, own, config)
    if failed:
        raise failed[0]


def _inactive(gpu: NvmlGpu, active: list[bool], peers: Sequence[list[bool]], config: Config) -> Iterator[Finding]:
    """Compare the active links with the number in the settings. If the settings have no number, or only a profile's
    guess, first compare with other GPUs.
    """
    is_configured = config.links > 0 and "links" not in config.guessed
    message, expects = "" if is_configured else _missing_links_message(gpu, active, peers), ""
    if not message and sum(active) < config.links:
        down = [link for link, is_active in enumerate(active) if not is_active]
        message = f"{sum(active)} of {_links_text(config.links)} {_verb(config.links)} active{_down_links_text(down)}"
        expects = "links"
    if message:
        yield Finding(
            Severity.CRITICAL,
            "gpu_nvlink/inactive",
            gpu.pci,
            message,
            confirm_seconds=config.inactive_confirm_seconds,
            expects=expects,
        )


def _missing_links_message(gpu: NvmlGpu, active: list[bool], peers: Sequence[list[bool]]) -> str:
    """Return a message about links that are active on peers of this model but not on this GPU, or "" if there are
    none."""
    if not any(active) and BRIDGED_MODELS.search(gpu.name):
        return ""
    if len(active) <= MAX_DIRECT_LINKS:
        peer_maximum, own = max(map(sum, peers)), sum(active)
        return f"{_links_text(own)} {_verb(own)} active, other GPUs have {peer_maximum}" if own < peer_maximum else ""
    expected_links = {link for peer in peers for link, is_active in enumerate(peer) if is_active}
    down = sorted(expected_links - {link for link, is_active in enumerate(active) if is_active})
    return (
        f"{_links_text(len(down))} {_verb(len(down))} down, active on other GPUs{_down_links_text(down)}"
        if down
        else ""
    )


def _links_text(number: int) -> str:
    return f"{number} NVLink{'' if number == 1 else 's'}"


def _verb(number: int) -> str:
    return "is" if number == 1 else "are"


def _down_links_text(down: Sequence[int]) -> str:
    """Return text such as "; down: 5, 17", or "" if the driver does not report which links are down."""
    return f"; down: {', '.join(map(str, down))}" if down else ""


def _errors(gpu: NvmlGpu, links: Sequence[Nvlink], config: Config, past: History) -> Iterator[Finding | Observation]:
    """Sum the errors over all links, with one series for each GPU and error kind. Separate series for 18 links on 8
    GPUs would make 432 numbers in each round.

    A label names the links in the sum. If a link no longer responds, the label changes, so that the lower sum is not
    taken for a falling counter.
    """
    kinds = {
        "replay": [link.replay for link in links],
        "recovery": [link.recovery for link in links],
        "recovered": [link.recovered for link in links],
        "recovery_failed": [link.recovery_failed for link in links],
        "crc": [link.crc for link in links],
        "packet": [sum(link.packet_errors.values()) if link.packet_errors else None for link in links],
    }
    for kind, counts in kinds.items():
        counts_by_link = {link: count for link, count in enumerate(counts) if count is not None}
        if not counts_by_link:
            continue
        labels = (("pci", gpu.pci), ("error", kind), ("links", f"{sum(1 << link for link in counts_by_link):#x}"))
        reading = Observation("gpu_nvlink_errors_total", sum(counts_by_link.values()), ObservationKind.COUNTER, labels)
        yield reading
        growth, last = past.growth(reading, 0.0), past.last(reading)  # growth since the last run
        if not growth or last is None or reading.value < last.value:
            continue  # after a reset or a boot, a counter shows only the errors during link training
        is_fast = kind == "crc" and (past.rate(reading) or 0.0) >= config.crc_degraded_per_second
        where = ", ".join(f"link {link}: {count}" for link, count in counts_by_link.items() if count)
        yield Finding(
            Severity.DEGRADED if is_fast or kind in DEGRADED_KINDS else Severity.WARNING,
            "gpu_nvlink/crc_rate" if is_fast else f"gpu_nvlink/{kind}",
            gpu.pci,
            f"{growth:.0f} new NVLink {ERROR_NAMES.get(kind, f'{kind} errors')} (since the driver was loaded: {where})",
            clears=Clears.GPU_RESET,
            window_seconds=config.clean_seconds,
        )


def _bit_errors(gpu: NvmlGpu, links: Sequence[Nvlink], config: Config) -> Iterator[Finding]:
    kinds = (
        ("effective", config.bit_error_rate, [link.effective_ber for link in links]),
        ("symbol", config.symbol_bit_error_rate, [link.symbol_ber for link in links]),
    )
    above = []
    for kind, limit, rates in kinds:
        above_limit = [
            f"link {link}: {rate:.2g}" for link, rate in enumerate(rates) if rate is not None and rate > limit
        ]
        above += [f"the {kind} bit error rate is above {limit:g} ({', '.join(above_limit)})"] if above_limit else []
    if above:
        yield Finding(
            Severity.WARNING,
            "gpu_nvlink/bit_errors",
            gpu.pci,
            "; ".join(above),
            confirm_seconds=config.bit_errors_confirm_seconds,
        )


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    links = [gpu.nvlinks() or () for gpu in host.gpus() if not gpu.mig_enabled()]
    active = sorted({sum(link.active for link in own) for own in links})
    if len(active) > 1:
        yield LeftOut("gpu_nvlink", f"some GPUs have {active[0]} active links, others {active[-1]}", "links")
    elif active and active[0] < max(map(len, links)):
        if active[0]:
            yield LeftOut("gpu_nvlink", f"{active[0]} of {max(map(len, links))} links are active", "links")
    elif active and active[0]:
        yield Entry("gpu_nvlink", "links", active[0], note="active, on each GPU")


_ERRORS_TODO = (
    "nvidia-smi nvlink -e and nvidia-smi nvlink -R show the link and its other end. After the drain, reset all GPUs or "
    "reboot, which retrains the links. If the errors recur on the same link, run diagnostics (dcgmi diag -r 3), then "
    "reseat or replace the GPU or the baseboard. If healthd did not detect the reset, run healthd repaired CODE PCI."
)

OBSERVATIONS = {
    "gpu_nvlinks_active": Meaning("Number of active NVLinks on the GPU.", ("pci",)),
    "gpu_nvlink_errors_total": Meaning(
        "The GPU's NVLink errors since the driver was loaded; the label links is a bit mask of the counted links.",
        ("pci", "error", "links"),
    ),
}

EXPLAIN = {
    "gpu_nvlink/inactive": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "Some NVLinks of this GPU are not active although the same links are active on the node's other GPUs.",
        "Collective operations between the GPUs fail, hang, or use PCIe at a tenth of the speed.",
        "nvidia-smi nvlink -s shows the links. Look for Xid 74 and SXids (journalctl -k), and check "
        "nvidia-fabricmanager. After the drain, reset all GPUs or reboot. If the fault recurs, reseat or replace the "
        "GPU or the baseboard.",
        confirm="inactive_confirm_seconds",
    ),
    "gpu_nvlink/replay": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "An NVLink resent packets (its replay errors increased). Good links do not resend packets.",
        "The link works but is weak. Jobs get slower, and the link is likely to fail.",
        _ERRORS_TODO,
        window="clean_seconds",
    ),
    "gpu_nvlink/recovery": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "An NVLink had to be retrained while in use (its recovery errors increased).",
        "Traffic paused during the retraining. Next time the link may fail permanently and end the job.",
        _ERRORS_TODO,
        window="clean_seconds",
    ),
    "gpu_nvlink/recovered": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "An NVLink of a Blackwell GPU had to be retrained while in use, and works again.",
        "Traffic on the link paused. Repeated recoveries indicate a bad link.",
        "No action tonight. If the same link is retrained again (nvidia-smi nvlink -e), drain the node and run dcgmi "
        "diag -r 3.",
        window="clean_seconds",
    ),
    "gpu_nvlink/recovery_failed": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "An NVLink of a Blackwell GPU could not be retrained after an error.",
        "The link is down or unreliable. Collective operations hang or fall back to slower paths.",
        _ERRORS_TODO,
        window="clean_seconds",
    ),
    "gpu_nvlink/crc_rate": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "This GPU's NVLinks have a hundred CRC errors per second or more.",
        "Bandwidth is lost to retransmissions, and the link is likely to fail.",
        _ERRORS_TODO,
        window="clean_seconds",
    ),
    "gpu_nvlink/crc": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "An NVLink had CRC errors, but too few to cost bandwidth.",
        "No effect, because damaged packets are resent. Many CRC errors indicate a bad link.",
        "No action tonight. Check whether the count keeps growing (nvidia-smi nvlink -e).",
        window="clean_seconds",
    ),
    "gpu_nvlink/packet": Explain(
        Severity.WARNING,
        Clears.GPU_RESET,
        "An NVLink of a Blackwell GPU counted packets that were damaged, rejected or discarded.",
        "There is no effect if the packets were resent. Many of these errors indicate a bad link.",
        "No action tonight. nvidia-smi nvlink -e shows the link and the counter. Check whether the count keeps "
        "growing.",
        window="clean_seconds",
    ),
    "gpu_nvlink/bit_errors": Explain(
        Severity.WARNING,
        Clears.PASS,
        "An NVLink's bit error rate after forward error correction is above NVIDIA's limit.",
        "Packets are resent, which costs bandwidth, and the link is likely to fail.",
        f"No action tonight. If the rate stays high: {_ERRORS_TODO}",
        confirm="bit_errors_confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.NVLINK)
ENDS_JOB = {
    "gpu_nvlink/inactive": EndsJob.ALWAYS,
    "gpu_nvlink/replay": EndsJob.ALWAYS,
    "gpu_nvlink/recovery": EndsJob.ALWAYS,
    "gpu_nvlink/recovery_failed": EndsJob.ALWAYS,
    "gpu_nvlink/crc_rate": EndsJob.ALWAYS,
}
