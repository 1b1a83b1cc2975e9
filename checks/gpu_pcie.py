"""GPUs whose PCI Express link has fewer lanes or a lower generation than it could, or sends packets again too often.

Rules: lanes and generation as OCI and AzNHC compare them; replays a minute as DCGM, by generation and lanes. nvidia-smi
says that an idle GPU may lower its generation, and its lanes: so these are judged only where the link is at its full
generation or the GPU works. (With MIG the driver does not tell whether it works.) A GPU on the root bus is one that a
virtual machine was given: the port above it is not to be seen, and how many lanes that has nobody says (clouds give a
T4 of 16 lanes 8 of them). NVML's maximum of lanes is the card's: a slot with fewer is as built, and the port above a
GPU says so in sysfs.

That card and port could do more is no proof that this machine ever did (risers, switches and firmware take lanes away):
it warns. It drains where more were seen: in this boot, or on machines of this type (a profile, whose guess counts here
since card and port say the same). Where the site or its baseline says how many there are, that alone is what must be
there: fewer drain, and more than that are not missed, but for a link that had more in this boot, which warns.
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
    Host,
    Lanes,
    LeftOut,
    Meaning,
    NothingToCheck,
    NvmlGpu,
    Observation,
    ObservationKind,
    Past,
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
MOST_LANES = 32  # PCI Express has no more lanes, nor more generations
ON_ROOT_BUS = regex("[0-9a-f]+:00:")


class Config(CheckSettings, frozen=True):
    """lanes             how many each GPU has when it is well; 0 = what card and slot can, or this boot has seen
    confirm_seconds   fewer lanes or a lower generation must last for so long
    busy_share        a GPU that computes for less than this share of the time may save power
    lane_replays_per_minute   for generation 1, 2, ...: more replays than this for each lane warn
    clean_seconds     replays, and a lower generation, are forgotten after so long without new ones under load
    """

    lanes: Lanes = 0
    confirm_seconds: Seconds = 120.0
    busy_share: Share = 0.5
    lane_replays_per_minute: tuple[Rate, ...] = (0.15, 0.3, 0.48, 0.96, 1.92, 3.84)
    clean_seconds: Seconds = 24 * 3600.0


def validate(config: Config) -> str | None:
    if not 0 <= config.lanes <= MOST_LANES:
        return f"lanes: must be between 0 and {MOST_LANES}, got {config.lanes}"
    if not 0 < config.busy_share <= 1:
        return f"busy_share: must be above 0 and at most 1, got {config.busy_share:g}"
    if not config.lane_replays_per_minute or min(config.lane_replays_per_minute) < 0:
        return "lane_replays_per_minute: must have a number of 0 or more for each generation"
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    unsupported = NothingToCheck("no GPU that reports its PCIe link")
    yield from host.each_gpu(lambda gpu: _look(host, gpu, config, past), unsupported)


def _look(host: Host, gpu: NvmlGpu, config: Config, past: Past) -> Iterator[Finding | Observation]:
    link = gpu.pcie_link()
    yield from _link(host, gpu, link, config, past)
    yield from _replays(gpu, link, config, past)


def _link(host: Host, gpu: NvmlGpu, link: PcieLink, config: Config, past: Past) -> Iterator[Finding | Observation]:
    labels = (("pci", gpu.pci),)
    if link.width is not None:
        yield Observation("gpu_pcie_link_lanes", link.width, labels=labels)
    if link.generation is not None:
        yield Observation("gpu_pcie_link_generation", link.generation, labels=labels)
    narrow = _less(link.width, link.max_width, f"GPU {gpu.pci}: lanes")
    slow = _less(link.generation, link.max_generation, f"GPU {gpu.pci}: PCIe generation")
    seen = Observation("gpu_pcie_link_lanes_max", link.width or 0, labels=labels)
    before = past.last(seen)
    seen = replace(seen, value=max(seen.value, before.value if before else 0.0))
    if link.width is not None:
        yield seen
    if not narrow and not slow:
        return
    full = link.generation is not None and link.generation == link.max_generation
    busy = not full and (gpu.utilization() or 0.0) >= config.busy_share
    if slow and busy:
        yield Finding(
            Severity.WARNING,
            "gpu_pcie/generation",
            gpu.pci,
            f"the PCIe link runs at generation {link.generation} of {link.max_generation} while the GPU works",
            clears=Clears.REBOOT,
            confirm_seconds=config.confirm_seconds,
            window_seconds=config.clean_seconds,
        )
    if narrow and (full or busy):
        most = min(link.max_width or 0, _slot_lanes(host, gpu.pci))
        had, said = min(seen.value, most), min(config.lanes, most)
        by_a_person = config.lanes and "lanes" not in config.guessed
        known = said if by_a_person else max(had, said)
        built = max(had, said) if by_a_person or ON_ROOT_BUS.match(gpu.pci) else most
        if (link.width or 0) < built:
            drains = (link.width or 0) < known
            yield Finding(
                Severity.DEGRADED if drains else Severity.WARNING,
                "gpu_pcie/lanes",
                gpu.pci,
                f"the PCIe link has {link.width} of {known if drains else built:.0f} lanes",
                clears=Clears.REBOOT,
                confirm_seconds=config.confirm_seconds,
            )


def _slot_lanes(host: Host, pci: str) -> float:
    """How many lanes the port above a GPU has; infinite if nothing tells. Raises ValueError for a bad number."""
    port = next((function.upstream for function in host.pci_functions() if function.pci == pci), "")
    path = f"{DEVICES}/{port}/max_link_width"
    text = host.read(path) if port else None
    if text in (None, "0", "255"):  # no file, or the value of a port without a link
        return math.inf
    if not regex(r"[1-9][0-9]?").fullmatch(text or ""):
        raise ValueError(f"{path}: not a number of lanes: {(text or '')[:40]!r}")
    return int(text or 0)


def _less(now: int | None, most: int | None, what: str) -> bool:
    """Raises ValueError for more than there can be: a dead link reads so (63 lanes)."""
    if now is None or most is None:
        return False
    if not 0 < most <= MOST_LANES:
        raise ValueError(f"{what}: at most {most}, which is no number of them")
    if now > most:
        raise ValueError(f"{what}: {now}, and there are at most {most}")
    return now < most


def _replays(gpu: NvmlGpu, link: PcieLink, config: Config, past: Past) -> Iterator[Finding | Observation]:
    replays = gpu.pcie_replays()
    if replays is None:
        return
    reading = Observation("gpu_pcie_replays_total", replays, ObservationKind.COUNTER, (("pci", gpu.pci),))
    yield reading
    # The highest generation: by now the GPU may be idle and have lowered it.
    lanes, generation = link.width or link.max_width, link.max_generation or link.generation
    new, per_second, last = past.growth(reading, 0.0), past.rate(reading), past.last(reading)
    if not new or not per_second or not lanes or not generation:
        return
    if last is None or replays < last.value:
        return  # it began anew: replays of link training after a reset (150 on a healthy H100) are no fault
    rates = config.lane_replays_per_minute
    limit = math.ceil(rates[min(generation, len(rates)) - 1] * lanes)
    per_minute = round(min(new, per_second * 60), 1)  # two looks within a minute are no rate
    if per_minute > limit:
        yield Finding(
            Severity.WARNING,
            "gpu_pcie/replays",
            gpu.pci,
            f"{new:.0f} packets were sent again, {per_minute:g} a minute (limit {limit})",
            clears=Clears.WINDOW,
            window_seconds=config.clean_seconds,
        )


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    """The lanes that all GPUs have now, unless one has fewer than it and its port could, as while it is idle."""
    lanes = set()
    for gpu in host.gpus():
        link = gpu.pcie_link()
        if link.width is None or link.max_width is None:
            continue
        most = link.width if ON_ROOT_BUS.match(gpu.pci) else min(link.max_width, _slot_lanes(host, gpu.pci))
        if link.width < most:
            yield LeftOut("gpu_pcie", f"GPU {gpu.pci} has {link.width} of {most:.0f} lanes", "lanes")
            return
        lanes.add(link.width)
    if len(lanes) > 1:
        yield LeftOut("gpu_pcie", f"GPUs have {' or '.join(map(str, sorted(lanes)))} lanes", "lanes")
    for count in lanes if len(lanes) == 1 else ():
        yield Entry("gpu_pcie", "lanes", count)


_CARD_TODO = (
    "nvidia-smi -q -i PCI (GPU Link Info) and lspci -vvv -s PCI (LnkSta). Reboot, with the power off for a moment; if "
    "it comes back, reseat the GPU, its riser and cables, and look at the slot's settings in the BIOS."
)

OBSERVATIONS = {
    "gpu_pcie_link_lanes": Meaning("Lanes of the GPU's PCIe link now.", ("pci",)),
    "gpu_pcie_link_generation": Meaning("PCIe generation of the GPU's link now; an idle GPU lowers it.", ("pci",)),
    "gpu_pcie_link_lanes_max": Meaning("The most lanes that the GPU's link was seen to have.", ("pci",)),
    "gpu_pcie_replays_total": Meaning("PCIe packets that the GPU sent again, by the driver's count.", ("pci",)),
}

EXPLAIN = {
    "gpu_pcie/lanes": Explain(
        Severity.DEGRADED,
        Clears.REBOOT,
        "The GPU's PCI Express link has fewer lanes than the GPU and its slot can have. It drains where more were "
        "seen: in this boot, or on machines of this type; else it warns. Where lanes in [checks.gpu_pcie] says how "
        "many there are (the site's file or the baseline), fewer drain, and fewer than this boot saw warn.",
        "Data to and from the GPU takes twice as long or more, and a lane that failed is seldom the last one.",
        f"{_CARD_TODO} A machine that is built so: write how many there are as lanes in [checks.gpu_pcie], then "
        "systemctl reload healthd and healthd repaired gpu_pcie/lanes.",
        also=(Severity.WARNING,),
        confirm="confirm_seconds",
        remedy=Remedy.POWER_CYCLE,
    ),
    "gpu_pcie/generation": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The GPU works, but its PCI Express link runs at a lower generation than it could.",
        "Data to and from the GPU takes twice as long or more. The link may have been trained badly at boot.",
        _CARD_TODO,
        confirm="confirm_seconds",
        window="clean_seconds",
    ),
    "gpu_pcie/replays": Explain(
        Severity.WARNING,
        Clears.WINDOW,
        "Packets on the GPU's PCI Express link are damaged and sent again more often than on good links.",
        "Little: the data is right in the end. It often comes before a link that gets slower or fails.",
        f"At the next maintenance: {_CARD_TODO}",
        window="clean_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.PCIE)
ENDS_JOB = {
    "gpu_pcie/lanes": EndsJob.NEVER,
    "gpu_pcie/generation": EndsJob.NEVER,
}
