"""The GPUs' PCI Express links: lanes, generation and replays.

Rules: OCI and AzNHC also check lanes and generation; DCGM checks replays per minute, depending on generation and lanes.
According to nvidia-smi, an idle GPU may lower its generation and its lanes. Generation and lanes are therefore checked
only if the link is at its full generation or the GPU is busy. (With MIG the driver does not report whether the GPU is
busy.) A GPU on the root bus was passed to a virtual machine. The port above this GPU is not visible, so the port's
lanes are unknown (clouds give a T4 with 16 lanes only 8). NVML's maximum number of lanes is that of the card. A slot
may be built with fewer lanes; sysfs shows the lanes of the port above a GPU.

If the card and the port support more lanes, this machine may still never have had them, because risers, switches and
firmware can take lanes away. The check therefore only warns. It drains if the link had more lanes earlier in this boot.
It also drains if machines of this type have more lanes according to a profile; the profile's guess counts because card
and port confirm it. If the site or its baseline sets the number of lanes, fewer lanes drain. More lanes are not
required, but the check warns if the link had more lanes earlier in this boot.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec.structs import replace

from healthd.api import (
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
    Lanes,
    LeftOut,
    Meaning,
    NothingToCheck,
    NvmlGpu,
    Observation,
    ObservationKind,
    Rate,
    Remedy,
    Seconds,
    Severity,
    Share,
    regex,
)
from healthd.nvidia.nvml import PcieLink

USES = "nvml"
BASELINE = Baseline(("lanes",), place=14)

DEVICES = "/sys/bus/pci/devices"
MAX_LANES = 32  # the maximum in PCI Express; used for lanes and for generations
ON_ROOT_BUS = regex("[0-9a-f]+:00:")


class Config(CheckSettings, frozen=True):
    """lanes             lanes of each healthy GPU; 0 = as many as card and slot support, or as were seen in this boot
    confirm_seconds   fewer lanes or a lower generation must last this long before they are reported
    busy_share        a GPU busy for a smaller share of the time than this may save power and is not checked
    lane_replays_per_minute   warn at more replays per lane than this, for generation 1, 2, ...
    clean_seconds     replays and a lower generation clear after this long under load without new cases
    """

    lanes: Lanes = 0
    confirm_seconds: Seconds = 120.0
    busy_share: Share = 0.5
    lane_replays_per_minute: tuple[Rate, ...] = (0.15, 0.3, 0.48, 0.96, 1.92, 3.84)
    clean_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    if not 0 <= config.lanes <= MAX_LANES:
        return f"lanes: must be between 0 and {MAX_LANES}, got {config.lanes}"
    if not 0 < config.busy_share <= 1:
        return f"busy_share: must be above 0 and at most 1, got {config.busy_share:g}"
    if not config.lane_replays_per_minute or min(config.lane_replays_per_minute) < 0:
        return "lane_replays_per_minute: must have a number for each generation, 0 or more"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU reports its PCIe link")
    yield from host.each_gpu(lambda gpu: _check_gpu(host, gpu, config, past), unsupported)


def _check_gpu(host: Host, gpu: NvmlGpu, config: Config, past: History) -> Iterator[Finding | Observation]:
    link = gpu.pcie_link()
    yield from _check_link(host, gpu, link, config, past)
    yield from _check_replays(gpu, link, config, past)


def _check_link(
    host: Host, gpu: NvmlGpu, link: PcieLink, config: Config, past: History
) -> Iterator[Finding | Observation]:
    labels = (("pci", gpu.pci),)
    if link.width is not None:
        yield Observation("gpu_pcie_link_lanes", link.width, labels=labels)
    if link.generation is not None:
        yield Observation("gpu_pcie_link_generation", link.generation, labels=labels)
    is_narrow = _is_below(link.width, link.max_width, f"GPU {gpu.pci}: lanes")
    is_slow = _is_below(link.generation, link.max_generation, f"GPU {gpu.pci}: PCIe generation")
    highest = Observation("gpu_pcie_link_lanes_max", link.width or 0, labels=labels)
    previous = past.last(highest)
    highest = replace(highest, value=max(highest.value, previous.value if previous else 0.0))
    if link.width is not None:
        yield highest
    if not is_narrow and not is_slow:
        return
    is_full_generation = link.generation is not None and link.generation == link.max_generation
    is_busy = not is_full_generation and (gpu.utilization() or 0.0) >= config.busy_share
    if is_slow and is_busy:
        yield Finding(
            Severity.WARNING,
            "gpu_pcie/generation",
            gpu.pci,
            f"the PCIe link runs at generation {link.generation} of {link.max_generation} while the GPU is busy",
            clears=Clears.REBOOT,
            confirm_seconds=config.confirm_seconds,
            window_seconds=config.clean_seconds,
        )
    if is_narrow and (is_full_generation or is_busy):
        possible = min(link.max_width or 0, _slot_lanes(host, gpu.pci))
        observed, configured = min(highest.value, possible), min(config.lanes, possible)
        is_configured = config.lanes and "lanes" not in config.guessed
        expected = configured if is_configured else max(observed, configured)
        reference = max(observed, configured) if is_configured or ON_ROOT_BUS.match(gpu.pci) else possible
        if (link.width or 0) < reference:
            is_degraded = (link.width or 0) < expected
            yield Finding(
                Severity.DEGRADED if is_degraded else Severity.WARNING,
                "gpu_pcie/lanes",
                gpu.pci,
                f"the PCIe link has {link.width} of {expected if is_degraded else reference:.0f} lanes",
                clears=Clears.REBOOT,
                confirm_seconds=config.confirm_seconds,
            )


def _slot_lanes(host: Host, pci: str) -> float:
    """Return the number of lanes of the port above a GPU, or infinity if it is unknown. Raises ValueError for an
    invalid number."""
    port = next((function.upstream for function in host.pci_functions() if function.pci == pci), "")
    path = f"{DEVICES}/{port}/max_link_width"
    text = host.read(path) if port else None
    if text in (None, "0", "255"):  # there is no file, or this is the value of a port without a link
        return math.inf
    if not regex(r"[1-9][0-9]?").fullmatch(text or ""):
        raise ValueError(f"{path}: not a number of lanes: {(text or '')[:40]!r}")
    return int(text or 0)


def _is_below(current: int | None, maximum: int | None, subject: str) -> bool:
    """Return True if `current` is below `maximum`. Raises ValueError if `current` is above, because a dead link reads
    as 63 lanes.
    """
    if current is None or maximum is None:
        return False
    if not 0 < maximum <= MAX_LANES:
        raise ValueError(f"{subject}: the maximum {maximum} is not valid")
    if current > maximum:
        raise ValueError(f"{subject}: {current}, but the maximum is {maximum}")
    return current < maximum


def _check_replays(gpu: NvmlGpu, link: PcieLink, config: Config, past: History) -> Iterator[Finding | Observation]:
    replays = gpu.pcie_replays()
    if replays is None:
        return
    reading = Observation("gpu_pcie_replays_total", replays, ObservationKind.COUNTER, (("pci", gpu.pci),))
    yield reading
    # Use the highest generation, because the GPU may be idle by now and have lowered it.
    lanes, generation = link.width or link.max_width, link.max_generation or link.generation
    new, per_second, last = past.growth(reading, 0.0), past.rate(reading), past.last(reading)
    if not new or not per_second or not lanes or not generation:
        return
    if last is None or replays < last.value:
        return  # the counter restarted: replays during link training (150 on a healthy H100) are not a fault
    rates = config.lane_replays_per_minute
    limit = math.ceil(rates[min(generation, len(rates)) - 1] * lanes)
    per_minute = round(min(new, per_second * 60), 1)  # two runs within a minute give no reliable rate
    if per_minute > limit:
        yield Finding(
            Severity.WARNING,
            "gpu_pcie/replays",
            gpu.pci,
            f"{new:.0f} PCIe replays, {per_minute:g} per minute (limit {limit})",
            clears=Clears.WINDOW,
            window_seconds=config.clean_seconds,
        )


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    """Yield the number of lanes that all GPUs have now. Yield no number if a GPU has fewer lanes than its port
    supports, because this GPU may be idle.
    """
    lanes = set()
    for gpu in host.gpus():
        link = gpu.pcie_link()
        if link.width is None or link.max_width is None:
            continue
        possible = link.width if ON_ROOT_BUS.match(gpu.pci) else min(link.max_width, _slot_lanes(host, gpu.pci))
        if link.width < possible:
            yield LeftOut("gpu_pcie", f"GPU {gpu.pci} has {link.width} of {possible:.0f} lanes", "lanes")
            return
        lanes.add(link.width)
    if len(lanes) > 1:
        yield LeftOut("gpu_pcie", f"GPUs have {' or '.join(map(str, sorted(lanes)))} lanes", "lanes")
    for count in lanes if len(lanes) == 1 else ():
        yield Entry("gpu_pcie", "lanes", count)


_CARD_TODO = (
    "nvidia-smi -q -i PCI (GPU Link Info) and lspci -vvv -s PCI (LnkSta) show the link. Power-cycle the node. If the "
    "problem recurs, reseat the GPU, its riser and cables, and check the slot's BIOS settings."
)

OBSERVATIONS = {
    "gpu_pcie_link_lanes": Meaning("Current number of lanes of the GPU's PCIe link.", ("pci",)),
    "gpu_pcie_link_generation": Meaning(
        "Current PCIe generation of the GPU's link; an idle GPU lowers its generation.", ("pci",)
    ),
    "gpu_pcie_link_lanes_max": Meaning("Highest number of lanes seen on the GPU's PCIe link.", ("pci",)),
    "gpu_pcie_replays_total": Meaning("PCIe packets that the GPU resent, from the driver's counter.", ("pci",)),
}

EXPLAIN = {
    "gpu_pcie/lanes": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The GPU's PCI Express link has fewer lanes than the GPU and its slot support. The node drains if the link "
        "had more lanes earlier in this boot, or if machines of this type have more. Otherwise this is a warning. "
        "The site's file or the baseline may set lanes in [checks.gpu_pcie]. In that case fewer lanes than the "
        "setting drain, and fewer lanes than earlier in this boot warn.",
        "Data transfers to and from the GPU take at least twice as long. More lanes often fail later.",
        f"If the condition is only a warning, no action is needed tonight. {_CARD_TODO} If the machine is built with "
        "fewer lanes, set lanes in [checks.gpu_pcie]. Then run systemctl reload healthd and healthd repaired "
        "gpu_pcie/lanes.",
        also=(Severity.WARNING,),
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_pcie/generation": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The GPU is busy, but its PCI Express link runs at a lower generation than it supports.",
        "Data transfers to and from the GPU take at least twice as long. The link may have failed to train at full "
        "speed at boot.",
        f"No action tonight. At the next maintenance: {_CARD_TODO}",
        confirm="confirm_seconds",
        window="clean_seconds",
    ),
    "gpu_pcie/replays": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets on the GPU's PCI Express link are damaged and resent more often than on healthy links.",
        "There is little effect, because the resent data arrives correctly. Such links often get slower or fail later.",
        f"No action tonight. At the next maintenance: {_CARD_TODO}",
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "gpu_pcie/lanes": EndsJob.NEVER,
    "gpu_pcie/generation": EndsJob.NEVER,
}
