"""NVLinks: links that are down or slow, and errors on active links.

Rules: a link that is active on this node's other GPUs must be active on every GPU (Meta's study counts NVLink errors as
high severity; DCGM, AzNHC and OCI expect 12 links on A100 and 18 on H100, H200 and B200). Healthy links have no replays
or recoveries, but a few CRC errors. With MIG, there is no NVLink, and PCIe cards have NVLink only with a bridge. GPUs
before Ampere may use different links on each GPU (on RWTH's nodes one V100 has links 0 and 2, the other 1 and 2). For
these GPUs only the number of active links is compared.

NVSwitches connect all links of a GPU (HGX and NVL72: 12 for A100, 18 later). Each of these links must therefore be
active: NVIDIA's Health Validation reports one inactive link as CRITICAL (docs.nvidia.com/health-validation,
nvlink_active). The setting `links` replaces this number.

In an NVL72, each of a GPU's 18 links leads to a different one of the rack's 18 switch chips (9 switch trays with two
chips of 72 ports for 72 GPUs: docs.nvidia.com/multi-node-nvlink-systems/multi-node-tuning-guide/system.html). If a
switch chip fails, every GPU of each tray loses one link. If all GPUs of a tray have lost links, the cause may therefore
be outside this node ("the switch side"): other trays may report it too, jobs are not requeued, and healthd takes no
repair step. A GPU that has lost more links than another GPU of the tray also has a fault of its own. On an HGX board
the switches belong to the node, so a link that is down is always the node's own fault. The numbers of the links are not
compared, because no source tells whether a number leads to the same switch chip on each GPU. For a dead link, the
driver also logs an Xid for each GPU. If all GPUs of a tray have such Xids within a minute, these requeue nothing either
(agent/slurm/affected_jobs.py). An Xid 154 requeues: with it, the driver requests a reset of this GPU, whatever the
cause.

A GPU for which the driver reports neither a number of links nor a link has no NVLink, as on a virtual machine with one
H100. If the driver reports the number of links, but not the state of some, these links are not down. If another GPU of
this model reports the same link, it is the same fault as a link that is down. Otherwise it is only a warning where
NVSwitches connect all links, because the driver may be the cause. The same applies on an NVL72 if the driver reports
fewer links than the generation has.

A link can also be active while its traffic is disabled (driver 615). No source tells why, so this is a warning.

These GPUs may have fewer active links without a fault, so their links are only compared with their peers':

- a GPU without NVSwitches: bridged PCIe cards, GH200, four directly connected GPUs
- an export model with fewer links, such as H800
- a vGPU, and a GPU that a host shares as vGPUs
- a GPU that has not joined its fabric, which gpu_fabric reports. An A100 has no such state, so while none of its links
  is active, nothing is reported until five minutes after the boot, as in gpu_fabric
- a GPU in a virtual machine with only some of the NVSwitches, or with none and without an active link. A partition of
  one GPU has no links, and a larger one has all 18 (maxNumNvLinks in nvidia-fabricmanager's list of partitions)

A link must also have its generation's speed. NVIDIA's Health Validation expects 53125 MB/s on GB200 and GB300, and
26562 on H100 (nvlink_bandwidth_count_speed). A slower link slows jobs down without ending them, so the node drains
without a requeue. If no link of the node has the full speed, this is only a warning: the site may have chosen a lower
NVLink bandwidth mode, and a driver may report the speed in another way.

Blackwell instead reports recoveries, damaged packets and bit error rates. In DCGM 4.6.0 a successful recovery is a
warning, and a failed recovery is a failure (DcgmHealthWatch.cpp, MonitorNVLinkErrorFields). In DCGM, a link also fails
if its effective bit error rate is above 1e-12 (DcgmUtilities.cpp, IsEffectiveBerThresholdExceeded) or its symbol bit
error rate is above 15e-238 (DcgmGPUHardwareLimits.h). In healthd, a high rate is only a warning, at the second reading,
because packets are resent and no job is lost. A failed recovery and a link that goes down have their own codes, which
drain.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

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
    PciFunction,
    Rate,
    Seconds,
    Severity,
    Share,
    regex,
)
from healthd.host.infiniband import settled_seconds
from healthd.host.inventory import device_kind
from healthd.nvidia.nvml import SWITCH_CONNECTED, Nvlink

T = TypeVar("T")

USES = "nvml"
AFTER_EVENTS = ("xid", "sxid", "nvlink", "job_end")
BASELINE = Baseline(("links",), place=11)

# Cards whose links are unconnected unless a bridge is installed.
BRIDGED_MODELS = regex(r"PCIE|\bNVL\b|RTX|QUADRO|TITAN|GEFORCE|\bACTIVE\b|\bA[0-9]{2}\b", re.IGNORECASE)
DEGRADED_KINDS = ("replay", "recovery", "recovery_failed")
ERROR_NAMES = {"recovered": "recoveries", "recovery_failed": "failed recoveries"}
MAX_DIRECT_LINKS = 6  # a V100 has 6, a P100 4; A100 and later have 12 or more
# By compute capability: A100; H100 and H200; B200 and GB200; B300 and GB300.
A100, H100, B200, B300 = (8, 0), (9, 0), (10, 0), (10, 3)
SWITCHED_LINKS = {A100: 12, H100: 18, B200: 18, B300: 18}
LINK_SPEEDS = {H100: 26562, B200: 53125, B300: 53125}  # MB/s
SLOW_SHARE = 0.9  # above 50000 and 25000 MB/s, the speeds without encoding overhead, which some tools report
BOARD_SWITCHES = {A100: 6, H100: 4}  # NVSwitches of a whole HGX board (Fabric Manager user guide, GPU baseboards)
NVL72 = "NVIDIA GB"  # GB200, GB300
EXPORT_MODELS = regex(r"\b[A-Z]800\b")
FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED = 1, 2, 3
NOT_SUPPORTED_STATUS = 3  # NVML_ERROR_NOT_SUPPORTED: joining completed without a fabric
PASSED_THROUGH, VGPU_MODES = 1, (2, 3, 4)  # nvmlGpuVirtualizationMode_t
TRAINING_SECONDS = 300.0  # after a boot, as gpu_fabric's join_seconds: the fabric manager trains the links
SWITCH_SIDE = "all GPUs of this node have lost links: suspect the switch side"


class Config(CheckSettings, frozen=True):
    """links                    number of active links that each GPU must have; 0 = all that its NVSwitches connect, and
                             as many as its peers on this node
    inactive_confirm_seconds a link must be down or slow for this long before it is reported
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
    failed: list[Exception] = []
    gpus = host.gpus()
    if not gpus:
        yield NO_GPU
    for gpu in gpus:
        try:
            if not gpu.mig_enabled():
                links[gpu] = gpu.nvlinks() or ()
        except NvmlError as error:  # the other GPUs are still checked
            failed.append(error)
    is_used = bool(failed or config.links)
    for gpu, own in links.items():
        peers = [[link.active for link in peer_links] for peer, peer_links in links.items() if peer.name == gpu.name]
        states = [link.active for link in own]
        if config.links or any(state is not None for state in states) or any(map(any, peers)):
            is_used = True
            yield Observation("gpu_nvlinks_active", states.count(True), labels=(("pci", gpu.pci),))
        try:
            found = itertools.chain(
                _slow(gpu, own, links, config),
                _traffic_disabled(gpu, own, config),
                _inactive(host, gpu, states, peers, config),
            )
            for finding in found:
                is_used = True
                yield finding
        except (NvmlError, ValueError, OSError) as error:
            failed.append(error)
        yield from _errors(gpu, own, config, past)
        yield from _bit_errors(gpu, own, config)
    if gpus and not is_used:
        yield NothingToCheck("no NVLink")
    if failed:
        raise failed[0]


States = list[bool | None]  # of a GPU's links, in the order of their numbers; None: not reported


def _inactive(host: Host, gpu: NvmlGpu, states: States, peers: Sequence[States], config: Config) -> Iterator[Finding]:
    """Compare the active links with the number in the settings. If the settings have no number, or only a profile's
    guess, first compare with other GPUs and with the number of links that NVSwitches connect.

    Raises an error of a further query after the finding, which is then judged without that query.
    """
    message, expects = "", ""
    failed: list[Exception] = []
    reported = states
    states = _try(lambda: _with_expected_links(gpu, reported), reported, failed)
    if config.links == 0 or "links" in config.guessed:
        message = _missing_links_message(gpu, states, peers)
        if not message and not all(states) and _try(lambda: _needs_all_links(host, gpu, states), False, failed):
            message = _count_message(states, len(states))
    if not message and states.count(True) < config.links:
        message, expects = _count_message(states, config.links), "links"
    if message and not _try(lambda: _is_training(host, gpu, states), False, failed):
        if _is_only_unreported(reported, peers, config.links if expects else 0):
            yield _unreported(gpu, message, expects, config)
        else:
            is_switch_side = _try(lambda: _is_switch_side(gpu, states, peers), False, failed)
            yield _down(gpu, message, expects, is_switch_side, config)
    if failed:
        raise failed[0]


def _try(query: Callable[[], T], default: T, failed: list[Exception]) -> T:
    """Return the result of a query. If it fails, add the error to `failed` and return `default`."""
    try:
        return query()
    except (NvmlError, ValueError, OSError) as error:
        failed.append(error)
        return default


def _down(gpu: NvmlGpu, message: str, expects: str, is_switch_side: bool, config: Config) -> Finding:
    return Finding(
        Severity.CRITICAL,
        "gpu_nvlink/inactive",
        gpu.pci,
        f"{message}; {SWITCH_SIDE}" if is_switch_side else message,
        confirm_seconds=config.inactive_confirm_seconds,
        expects=expects,
        shared_cause=is_switch_side,
    )


def _unreported(gpu: NvmlGpu, message: str, expects: str, config: Config) -> Finding:
    return Finding(
        Severity.WARNING,
        "gpu_nvlink/unreported",
        gpu.pci,
        message,
        confirm_seconds=config.inactive_confirm_seconds,
        expects=expects,
    )


def _is_only_unreported(states: States, peers: Sequence[States], expected: int) -> bool:
    """Return True if no call reports the state of the missing links, on any GPU of this model.

    `expected` is the number of links in the settings, which the GPU must have, or 0.
    """
    missing = [link for link in range(max(map(len, peers), default=0)) if not _state(states, link)]
    is_reported = any(_state(peer, link) is not None for peer in (states, *peers) for link in missing)
    return not is_reported and len(states) >= expected


def _state(states: States, link: int) -> bool | None:
    return states[link] if link < len(states) else None


def _is_switch_side(gpu: NvmlGpu, states: States, peers: Sequence[States]) -> bool:
    """Return True if the cause may be the switches: all GPUs of a rack's tray have lost links, and this GPU no more
    than another one."""
    total = max(len(states), *map(len, peers))
    lost = [total - peer.count(True) for peer in peers]
    if len(peers) < 2 or 0 in lost:
        return False
    return total - states.count(True) == min(lost) and _is_in_rack(gpu)


def _is_in_rack(gpu: NvmlGpu) -> bool:
    """Return True if the GPU's NVLinks lead to switches outside the node. A virtual machine may show only the NVLink
    domain, whose UUID is all zeros on a GPU whose fabric ends at its own baseboard."""
    fabric = gpu.fabric()
    if fabric is not None and fabric.state == FABRIC_COMPLETED and fabric.cluster:
        return True
    platform = gpu.platform()
    return platform is not None and platform.is_in_rack


def _is_training(host: Host, gpu: NvmlGpu, states: States) -> bool:
    """Return True if no link is active yet because the GPU is still joining its fabric, or has no fabric state (A100)
    and the machine has just booted. Raises OSError or ValueError."""
    if any(states):
        return False
    fabric = gpu.fabric()
    if fabric is None:
        return settled_seconds(host, TRAINING_SECONDS) < 0
    return fabric.state in (FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS)


def _needs_all_links(host: Host, gpu: NvmlGpu, states: States) -> bool:
    """Return True if NVSwitches connect all of the GPU's links, so that each must be active."""
    chip = gpu.compute_capability() or (0, 0)
    if _switched_links(gpu) != len(states) or BRIDGED_MODELS.search(gpu.name):
        return False
    mode = gpu.virtualization()
    if mode in VGPU_MODES or not _may_have_links(gpu):
        return False
    if _is_in_rack(gpu):
        return True
    switches = sum(map(_is_nvswitch, host.pci_functions()))
    if mode == PASSED_THROUGH:
        return switches >= BOARD_SWITCHES.get(chip, 1) if switches else any(states) and _has_fabric(gpu)
    platform = gpu.platform()
    return bool(switches) or (platform is not None and platform.peer_type == SWITCH_CONNECTED)


def _switched_links(gpu: NvmlGpu) -> int:
    """Return how many links NVSwitches connect on a GPU of this generation, or 0 if unknown."""
    return 0 if EXPORT_MODELS.search(gpu.name) else SWITCHED_LINKS.get(gpu.compute_capability() or (0, 0), 0)


def _with_expected_links(gpu: NvmlGpu, states: States) -> States:
    """Return the states of all links of a GPU in a rack, even if the driver reports fewer links."""
    if len(states) >= max(SWITCHED_LINKS.values()) or not gpu.name.startswith(NVL72) or not _is_in_rack(gpu):
        return states
    if gpu.virtualization() in VGPU_MODES or not _may_have_links(gpu):
        return states
    return [*states, *[None] * (_switched_links(gpu) - len(states))]


def _has_fabric(gpu: NvmlGpu) -> bool:
    fabric = gpu.fabric()
    return fabric is not None and fabric.state == FABRIC_COMPLETED and not fabric.status


def _may_have_links(gpu: NvmlGpu) -> bool:
    """Return False if the GPU is still joining its fabric, or has none, for example because the driver was loaded with
    NVreg_NvLinkDisable."""
    fabric = gpu.fabric()
    if fabric is None:
        return True
    return fabric.state == FABRIC_COMPLETED and fabric.status != NOT_SUPPORTED_STATUS


def _is_nvswitch(function: PciFunction) -> bool:
    return device_kind(function.vendor, function.pci_class) == "nvswitch"


def _count_message(states: States, expected: int) -> str:
    numbers = _numbers_text(dict(enumerate(states)))
    return f"{states.count(True)} of {_links_text(expected)} {_verb(expected)} active{numbers}"


def _slow(
    gpu: NvmlGpu, own: Sequence[Nvlink], links: Mapping[NvmlGpu, Sequence[Nvlink]], config: Config
) -> Iterator[Finding]:
    """Compare the speed of the active links with the speed of their generation. A speed of 0 is not a measurement."""
    speeds = {number: link.speed for number, link in enumerate(own) if link.speed}
    expected = LINK_SPEEDS.get(gpu.compute_capability() or (0, 0), 0) if speeds else 0
    slow = {number: speed for number, speed in speeds.items() if speed < expected * SLOW_SHARE}
    if not slow:
        return
    fastest = max(link.speed or 0 for peer in links for link in links[peer] if peer.name == gpu.name)
    yield Finding(
        Severity.DEGRADED if fastest >= expected * SLOW_SHARE else Severity.WARNING,
        "gpu_nvlink/slow",
        gpu.pci,
        f"{_links_text(len(slow))} {_verb(len(slow))} slower than {expected} MB/s "
        f"({', '.join(f'link {number}: {speed}' for number, speed in slow.items())})",
        confirm_seconds=config.inactive_confirm_seconds,
    )


def _traffic_disabled(gpu: NvmlGpu, own: Sequence[Nvlink], config: Config) -> Iterator[Finding]:
    disabled = [number for number, link in enumerate(own) if link.is_traffic_disabled]
    if disabled:
        yield Finding(
            Severity.WARNING,
            "gpu_nvlink/traffic_disabled",
            gpu.pci,
            f"the driver has disabled traffic on {_links_text(len(disabled), 'active ')}: {_link_list(disabled)}",
            confirm_seconds=config.inactive_confirm_seconds,
        )


def _missing_links_message(gpu: NvmlGpu, states: States, peers: Sequence[States]) -> str:
    """Return a message about links that are active on peers of this model but not on this GPU, or "" if there are
    none."""
    if not any(states) and BRIDGED_MODELS.search(gpu.name):
        return ""
    if len(states) <= MAX_DIRECT_LINKS:
        peer_maximum, own = max(peer.count(True) for peer in peers), states.count(True)
        return f"{_links_text(own)} {_verb(own)} active, other GPUs have {peer_maximum}" if own < peer_maximum else ""
    active_on_peers = {link for peer in peers for link, is_active in enumerate(peer) if is_active}
    missing = {link: _state(states, link) for link in sorted(active_on_peers) if not _state(states, link)}
    if not missing:
        return ""
    count = f"{_links_text(len(missing))} {_verb(len(missing))}"
    if None in missing.values():
        return f"{count} not active here, but active on other GPUs{_numbers_text(missing)}"
    return f"{count} down here, but active on other GPUs: {_link_list(missing)}"


def _links_text(number: int, kind: str = "") -> str:
    return f"{number} {kind}NVLink{'' if number == 1 else 's'}"


def _verb(number: int) -> str:
    return "is" if number == 1 else "are"


def _numbers_text(states: Mapping[int, bool | None]) -> str:
    """Return text such as "; down: links 5, 17; state not reported: link 3", or "" if all links are active."""
    down = [link for link, state in states.items() if state is False]
    unreported = [link for link, state in states.items() if state is None]
    down_text = f"; down: {_link_list(down)}" if down else ""
    return down_text + (f"; state not reported: {_link_list(unreported)}" if unreported else "")


def _link_list(numbers: Collection[int]) -> str:
    """Return text such as "link 5" or "links 5, 17"."""
    return f"link{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def _errors(gpu: NvmlGpu, links: Sequence[Nvlink], config: Config, past: History) -> Iterator[Finding | Observation]:
    """Sum the errors over all links. There is one series for each GPU and error kind, because 18 links on 8 GPUs would
    make 432 numbers in each round.

    A label names the links in the sum. If a link no longer responds, the label changes, so that the lower sum does not
    look like a falling counter.
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
    active = sorted({sum(link.active is True for link in own) for own in links})
    if len(active) > 1:
        yield LeftOut("gpu_nvlink", f"some GPUs have {active[0]} active links, others {active[-1]}", "links")
    elif active and active[0] < max(map(len, links)):
        if active[0]:
            yield LeftOut("gpu_nvlink", f"{active[0]} of {max(map(len, links))} links are active", "links")
    elif active and active[0]:
        yield Entry("gpu_nvlink", "links", active[0], note="active, on each GPU")


_SHOW_LINK = "nvidia-smi nvlink -e and nvidia-smi nvlink -R show the link and its other end."
_ERRORS_TODO = (
    f"{_SHOW_LINK} After the drain, reset all GPUs or reboot, which retrains the links. If the errors recur on the "
    "same link, run diagnostics (dcgmi diag -r 3), then reseat or replace the GPU or the baseboard. If healthd did "
    "not detect the reset, run healthd repaired CODE PCI."
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
        "Some NVLinks of this GPU are not active, although NVSwitches connect all of its links, or the same links are "
        "active on the node's other GPUs.",
        "Collective operations between the GPUs fail, hang, or use PCIe at a tenth of the speed.",
        "nvidia-smi nvlink -s shows the links. Look for Xid 74 and SXids (journalctl -k), and check "
        "nvidia-fabricmanager. If the message suspects the switch side, do not reset this node: check the rack's "
        "NVLink switches and its other trays (healthd fleet status), then the tray's cable connector. If it does not, "
        "reset all GPUs or reboot after the drain. If the fault recurs, reseat or replace the GPU or the baseboard.",
        confirm="inactive_confirm_seconds",
        shared=None,
    ),
    "gpu_nvlink/unreported": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The driver does not report the state of some NVLinks of this GPU, although NVSwitches connect all of its "
        "links. Another GPU of this model does not report these links either.",
        "Unknown: the links may be active. A fault of these links is not found.",
        "No action tonight. Compare nvidia-smi nvlink -s with a node that has no warning. Look for Xid 74 and Xids 144 "
        "to 150 (journalctl -k), and check whether the driver was changed. If NVLink is off on purpose, set links in "
        "[checks.gpu_nvlink], or acknowledge the warning.",
        confirm="inactive_confirm_seconds",
    ),
    "gpu_nvlink/traffic_disabled": Explain(
        Severity.WARNING,
        Clears.PASS,
        "Some NVLinks of this GPU are active, but the driver has disabled their traffic.",
        "Unknown: NVIDIA documents no reason. Traffic between GPUs may use fewer links.",
        "No action tonight. Compare the GPU's NVLink state with a node that has no warning (nvidia-smi nvlink -s, "
        "nvidia-smi -q). On an NVL72, check the rack's NVLink switches. If jobs are slow, drain the node and reset all "
        "GPUs.",
        confirm="inactive_confirm_seconds",
    ),
    "gpu_nvlink/slow": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "Some NVLinks of this GPU are active, but at a lower speed than their generation has. If no link of the node "
        "has the full speed, this is only a warning.",
        "Traffic between GPUs continues, but more slowly. A job on many GPUs runs only as fast as its slowest link.",
        "nvidia-smi nvlink -s shows the speeds. If no link has the full speed, check the NVLink bandwidth mode "
        "(nvidia-smi nvlink -gBwMode) and the firmware of the switches. After a drain, reset all GPUs or reboot, which "
        "retrains the links. If the fault recurs on the same link, reseat or replace the GPU or the baseboard, or on "
        "an NVL72 the cable cartridge.",
        also=(Severity.WARNING,),
        confirm="inactive_confirm_seconds",
    ),
    "gpu_nvlink/replay": Explain(
        Severity.DEGRADED,
        Clears.GPU_RESET,
        "An NVLink resent packets (its replay errors increased). Healthy links do not resend packets.",
        "The link works but is marginal. Jobs slow down, and the link is likely to fail.",
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
        "An NVLink had CRC errors, but too few to reduce bandwidth.",
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
        f"No action tonight. {_SHOW_LINK} If the rate stays high, drain the node by hand, then reset all GPUs or "
        "reboot, which retrains the links. If the errors recur on the same link, run diagnostics (dcgmi diag -r 3), "
        "then reseat or replace the GPU or the baseboard.",
        confirm="bit_errors_confirm_seconds",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.NVLINK)
ENDS_JOB = {
    "gpu_nvlink/inactive": EndsJob.ALWAYS,
    "gpu_nvlink/unreported": EndsJob.NEVER,
    "gpu_nvlink/traffic_disabled": EndsJob.NEVER,
    "gpu_nvlink/slow": EndsJob.NEVER,
    "gpu_nvlink/replay": EndsJob.ALWAYS,
    "gpu_nvlink/recovery": EndsJob.ALWAYS,
    "gpu_nvlink/recovery_failed": EndsJob.ALWAYS,
    "gpu_nvlink/crc_rate": EndsJob.ALWAYS,
}
