"""NVLink fabric: whether each GPU has joined the fabric and is healthy there (NVSwitch systems, Hopper and later).

Rules: only NVML shows whether there is a fabric; model names would give false alarms for PCIe cards, GH200 and GB200
(gpud). Until a GPU has joined, CUDA fails with 802 "system not yet initialized", but nvidia-smi looks normal. The cause
may be that the fabric manager (or NVLSM) is not running or has just started. systemd is queried for the cause only if a
GPU has not joined. If a GPU reports no fabric while others of its model have joined theirs, NVLink does not connect
this GPU.

Reduced bandwidth, limited capacity and routes in recovery slow jobs down without ending them, because traffic still has
its routes. These problems drain the node without a requeue. The summary "unhealthy" has no more information than the
health mask.

On a rack (GB200, GB300 NVL72), the GPUs of all trays join one NVLink domain. All GPUs of a tray have the same cluster
UUID and clique; a GPU that differs cannot reach the others (NVIDIA's dra-driver-nvidia-gpu@95932046, nvlib.go, refuses
such a node; azhpc-images PR 506 requires a UUID). If no GPU of a tray has a domain although their NVLinks lead to
switches outside the node, this is only a warning: single trays still work, and the DRA driver uses such a tray without
a domain. An HGX board (B200) is switch connected too, but has no chassis serial number and no cluster UUID.

The health mask's bit for the fabric manager's connection concerns only the control plane: DCGM ignores it, and no
source says that traffic stops. The node is drained without a requeue after join_seconds. If all GPUs have lost the
connection, the cause is the fabric manager, which on an NVL72 serves 18 trays.

If one GPU has not joined while others have, the fault is its own. If all GPUs of a rack's tray have less bandwidth, bad
routes, time-outs, no partition or not enough NVLinks, the cause may be outside this node, for example a dead switch or
a wrong partition: the finding then has a shared cause, jobs are not requeued, and healthd takes no repair step. A GPU
with a further problem also has a fault of its own. A wrong serial number, firmware or location is the tray's own fault,
and so is failed joining. On an HGX board the switches belong to the node.

If no GPU of a rack's tray has joined, jobs are not requeued either: error 802 is about programs that start, and no
source says that running programs stop.

These GPUs are not faulty:

- a GPU with MIG, which has no NVLink
- a GPU that a host shares as vGPUs
- a GPU whose joining completed with "not supported" (no NVSwitch, gpud#1206)
- a GPU on a host whose fabric manager shares the NVSwitches (FABRIC_MODE 1 and 2). The GPU's state stays "in progress"
  until a partition with the GPU is activated (github.com/NVIDIA/gpu-driver-container/pull/909).

In a virtual machine, only the operator of the host can activate such a partition, so the check warns. An NVL72 has no
such mode, because its partitions belong to the switches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

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
    PciFunction,
    Seconds,
    Severity,
    regex,
)
from healthd.host.inventory import device_kind
from healthd.nvidia.nvml import SWITCH_CONNECTED, Fabric, Platform

USES = "nvml"

SYSTEMD = "/run/systemd/system"  # this directory exists if systemd booted the machine: sd_booted(3)
UNIT = "nvidia-fabricmanager.service"
SYSTEMCTL_COMMAND = ("systemctl", "show", "--property=LoadState,ActiveState", UNIT)
# FABRIC_MODE: 0 all on this machine, 1 shared NVSwitches, 2 vGPU (Fabric Manager User Guide, config options)
MANAGER_SETTINGS = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
SHARED_MODE = regex(r"^[ \t]*FABRIC_MODE[ \t]*=[ \t]*[12][ \t]*$", re.MULTILINE)
IS_GUEST, IS_VGPU_HOST = (1, 2), (3, 4)  # nvmlGpuVirtualizationMode_t
NVL72 = "NVIDIA GB"  # GB200, GB300
NOT_SUPPORTED, IN_PROGRESS, COMPLETED = 0, 2, 3
NOT_SUPPORTED_STATUS = 3  # NVML_ERROR_NOT_SUPPORTED
SWITCH_SIDE = "all GPUs of this node report it: suspect the switch side"
STATES = {1: "not started", 2: "in progress"}
UNHEALTHY, LIMITED_CAPACITY = 2, 3
SUMMARIES = {UNHEALTHY: "unhealthy", LIMITED_CAPACITY: "limited capacity"}
HEALTHY_SUMMARIES = (None, 0, 1)
MANAGER_SHIFT = 14
MANAGER_DISCONNECTED = "the fabric manager is disconnected"
# Two-bit fields in the health mask: the field's first bit, its bad value and the meaning. 0 = not supported. The last
# two fields report a correct state, so 1 is good. The other fields report a problem.
FIELDS = (
    (0, 1, "bandwidth is degraded"),
    (2, 1, "routes are being recovered"),
    (4, 1, "routes are unhealthy"),
    (6, 1, "recovering from an access time-out"),
    (12, 2, "no partition is assigned"),
    (MANAGER_SHIFT, 2, MANAGER_DISCONNECTED),
)
SLOWDOWN_PROBLEMS = frozenset({"bandwidth is degraded", "routes are being recovered", SUMMARIES[LIMITED_CAPACITY]})
CONFIGURATION_SHIFT = 8  # four bits: 0 = not supported, 1 = good
NO_PARTITION, NOT_ENOUGH_LINKS = 4, 5
CONFIGURATIONS = {
    2: "wrong system GUID",
    3: "wrong chassis serial number",
    NO_PARTITION: "no partition",
    NOT_ENOUGH_LINKS: "not enough NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid state of the GPU",
}
INCORRECT_CONFIGURATION = "incorrect configuration: "
JOINING_FAILED = "joining failed with NVML error "
# Problems of the tray itself (nvml.h: NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*). The switches or the
# partitions of a rack can cause all others. So can problems that this version does not know, if all GPUs have them.
TRAY_PROBLEMS = frozenset(
    INCORRECT_CONFIGURATION + text
    for number, text in CONFIGURATIONS.items()
    if number not in (NO_PARTITION, NOT_ENOUGH_LINKS)
)


class Config(CheckSettings, frozen=True):
    """join_seconds      time that a GPU may take to join the fabric, for example after a boot, or to reach the fabric
                      manager again
    confirm_seconds   bad health must last this long before it is reported
    """

    join_seconds: Seconds = 300.0
    confirm_seconds: Seconds = 60.0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    failed: list[Exception] = []
    not_joined_count = 0
    without_fabric: list[NvmlGpu] = []
    fabrics: dict[NvmlGpu, Fabric] = {}
    gpus = host.gpus()
    for gpu in gpus:
        try:
            fabric = gpu.fabric()
        except NvmlError as error:  # this error must not hide the other GPUs
            failed.append(error)
            continue
        if fabric is None or fabric.state == NOT_SUPPORTED:
            without_fabric.append(gpu)
        else:
            fabrics[gpu] = fabric
            yield Observation("gpu_fabric_state", fabric.state, labels=(("pci", gpu.pci),))
    completed = {gpu: fabric for gpu, fabric in fabrics.items() if fabric.state == COMPLETED}
    joined = Counter(gpu.name for gpu in completed)  # by model
    for gpu, fabric in fabrics.items():
        try:
            for finding in _judge(gpu, fabric, fabrics, config):
                if not _is_exempt(gpu):
                    reported = _apply_partition_mode(host, gpu, finding) if fabric.state == IN_PROGRESS else finding
                    not_joined_count += reported is not None and reported.code == "gpu_fabric/not_joined"
                    yield from [reported] if reported else []
        except (NvmlError, ValueError, OSError) as error:
            failed.append(error)
    domains = Counter((fabric.cluster, fabric.clique) for fabric in completed.values() if fabric.cluster)
    found_count = 0
    for gpu in (*without_fabric, *completed):
        try:
            for result in _judge_together(gpu, completed, joined, domains, config):
                found_count += 1
                yield result
        except NvmlError as error:
            failed.append(error)
    if len(without_fabric) == len(gpus) and not found_count:
        yield NothingToCheck("no GPU on an NVSwitch fabric") if gpus else NO_GPU
    if not_joined_count:
        yield from _cause(host, config)
    if failed:
        raise failed[0]


def _judge_together(
    gpu: NvmlGpu,
    completed: Mapping[NvmlGpu, Fabric],
    joined: Mapping[str, int],
    domains: Mapping[tuple[str, int], int],
    config: Config,
) -> Iterator[Finding | Observation]:
    """Compare a GPU with the others of this node.

    `completed` are the GPUs that have completed joining, `joined` their number by model, and `domains` their number by
    NVLink domain and clique.
    """
    fabric = completed.get(gpu)
    findings: list[Finding] = []
    is_alone = fabric is None and joined[gpu.name] > 0
    if fabric is not None and _has_no_manager(fabric):
        findings.append(_manager_lost(gpu, completed, config))
    if is_alone:
        findings.append(_no_fabric(gpu, joined[gpu.name], config))
    elif fabric is not None and domains and _may_have_domain(fabric):
        findings += _other_domain(gpu, fabric, domains, config)
    if findings and not _is_exempt(gpu):
        yield from findings
    # Only the platform is queried below. Its error must not hide the findings.
    if not is_alone and not domains and _may_have_domain(fabric) and _is_in_rack(gpu) and not _is_exempt(gpu):
        yield _no_domain(gpu, config)
    if fabric is not None and fabric.cluster:
        yield Observation("gpu_fabric_info", 1, labels=_place(gpu, fabric, gpu.platform()))


def _may_have_domain(fabric: Fabric | None) -> bool:
    """Return False if joining failed, which _judge reports."""
    return fabric is None or fabric.status in (0, NOT_SUPPORTED_STATUS)


def _has_no_manager(fabric: Fabric) -> bool:
    return fabric.status != NOT_SUPPORTED_STATUS and (fabric.health_mask or 0) >> MANAGER_SHIFT & 0x3 == 2


def _manager_lost(gpu: NvmlGpu, completed: Mapping[NvmlGpu, Fabric], config: Config) -> Finding:
    lost = sum(map(_has_no_manager, completed.values()))
    return Finding(
        Severity.DEGRADED,
        "gpu_fabric/manager_lost",
        gpu.pci,
        f"{MANAGER_DISCONNECTED} ({lost} of {len(completed)} GPUs)",
        confirm_seconds=config.join_seconds,
        shared_cause=lost == len(completed),
    )


def _no_domain(gpu: NvmlGpu, config: Config) -> Finding:
    return Finding(
        Severity.WARNING,
        "gpu_fabric/no_domain",
        gpu.pci,
        "the GPU's NVLinks lead to switches outside the node, but the GPU has not joined their NVLink domain",
        confirm_seconds=config.join_seconds,
        shared_cause=True,
    )


def _other_domain(
    gpu: NvmlGpu, fabric: Fabric, domains: Mapping[tuple[str, int], int], config: Config
) -> Iterator[Finding]:
    """Yield a finding unless the GPU is in the domain and clique that has the most GPUs."""
    own, most = (fabric.cluster, fabric.clique), max(domains.values())
    if [domain for domain, number in domains.items() if number == most] != [own]:
        counts = ", ".join(f"{number} in {_domain_text(*domain)}" for domain, number in sorted(domains.items()))
        yield Finding(
            Severity.DEGRADED,
            "gpu_fabric/other_domain",
            gpu.pci,
            f"the GPU is in {_domain_text(*own)}; GPUs of this node: {counts}",
            confirm_seconds=config.confirm_seconds,
        )


def _domain_text(cluster: str, clique: int) -> str:
    return f"NVLink domain {cluster}, clique {clique}" if cluster else "no NVLink domain"


def _is_in_rack(gpu: NvmlGpu) -> bool:
    """Return True if NVML says that the GPU's NVLinks lead to switches outside the node. A GB200 or GB300 has no
    switches of its own; on the others, only the serial number of a chassis distinguishes them from an HGX board."""
    platform = gpu.platform()
    return platform is not None and (
        platform.is_in_rack or (platform.peer_type == SWITCH_CONNECTED and gpu.name.startswith(NVL72))
    )


def _place(gpu: NvmlGpu, fabric: Fabric, platform: Platform | None) -> tuple[tuple[str, str], ...]:
    platform = platform or Platform(0, "", 0, 0, 0, 0)
    has_place = bool(platform.chassis_serial)
    return (
        ("pci", gpu.pci),
        ("domain", fabric.cluster),
        ("clique", str(fabric.clique)),
        ("chassis", platform.chassis_serial),
        ("slot", str(platform.slot) if has_place else ""),
        ("tray", str(platform.tray) if has_place else ""),
    )


def _is_exempt(gpu: NvmlGpu) -> bool:
    return bool(gpu.mig_enabled()) or gpu.virtualization() in IS_VGPU_HOST


def _apply_partition_mode(host: Host, gpu: NvmlGpu, finding: Finding) -> Finding | None:
    """Return the finding for a GPU that is still joining while partitions may share its NVSwitches, or None if this is
    not a fault.

    Raises ValueError or OSError if the mode cannot be read.
    """
    try:
        settings = host.read(MANAGER_SETTINGS)
    except OSError as error:
        raise ValueError(f"{MANAGER_SETTINGS}: {error.strerror}") from None
    if settings is not None:
        return None if SHARED_MODE.search(settings) else finding
    if (
        gpu.virtualization() not in IS_GUEST
        or gpu.name.startswith(NVL72)
        or any(map(_is_nvswitch, host.pci_functions()))
    ):
        return finding
    message = "the GPU waits for this virtual machine's host to activate its NVLink partition"
    return replace(finding, severity=Severity.WARNING, code="gpu_fabric/partition", message=message, shared_cause=True)


def _is_nvswitch(function: PciFunction) -> bool:
    return device_kind(function.vendor, function.pci_class) == "nvswitch"


def _no_fabric(gpu: NvmlGpu, joined: int, config: Config) -> Finding:
    return Finding(
        Severity.DEGRADED,
        "gpu_fabric/no_fabric",
        gpu.pci,
        f"the GPU reports no NVLink fabric; {joined} other GPUs of this model have joined",
        confirm_seconds=config.confirm_seconds,
    )


def _judge(gpu: NvmlGpu, fabric: Fabric, fabrics: Mapping[NvmlGpu, Fabric], config: Config) -> Iterator[Finding]:
    """Yield findings about one GPU's fabric state. `fabrics` are those of all GPUs of the node. Raises ValueError for
    unknown numbers, which may come from a newer driver or be invalid.
    """
    if fabric.state != COMPLETED:
        if fabric.state not in STATES:
            raise ValueError(f"GPU {gpu.pci}: unknown fabric state {fabric.state}")
        is_shared = not any(other.state == COMPLETED for other in fabrics.values())
        is_switch_side = is_shared and len(fabrics) > 1 and _has_rack_switches(gpu, fabric)
        text = f"the GPU has not joined the NVLink fabric: {STATES[fabric.state]}"
        yield Finding(
            Severity.CRITICAL,
            "gpu_fabric/not_joined",
            gpu.pci,
            f"{text}; {SWITCH_SIDE}" if is_switch_side else text,
            confirm_seconds=config.join_seconds,
            shared_cause=is_shared,
        )
        return
    if fabric.status == NOT_SUPPORTED_STATUS:
        return
    found = _problems(fabric)
    if found:
        is_slowdown = SLOWDOWN_PROBLEMS.issuperset(found)
        is_switch_side = _is_switch_side(gpu, found, fabrics)
        text = f"the GPU is not healthy in the NVLink fabric: {', '.join(found)}"
        yield Finding(
            Severity.DEGRADED if is_slowdown else Severity.CRITICAL,
            "gpu_fabric/degraded" if is_slowdown else "gpu_fabric/unhealthy",
            gpu.pci,
            f"{text}; {SWITCH_SIDE}" if is_switch_side else text,
            confirm_seconds=config.confirm_seconds,
            shared_cause=is_switch_side,
        )
    elif fabric.summary not in (*HEALTHY_SUMMARIES, *SUMMARIES):
        raise ValueError(f"GPU {gpu.pci}: unknown fabric health summary {fabric.summary}")


def _problems(fabric: Fabric) -> list[str]:
    """Return the problems of a GPU that has completed joining, without the fabric manager's connection (see
    _manager_lost). Raises ValueError as `problems` does."""
    found = [f"{JOINING_FAILED}{fabric.status}"] if fabric.status else []
    found += problems(fabric.health_mask or 0)
    if fabric.summary in SUMMARIES and not (found and fabric.summary == UNHEALTHY):
        found.append(SUMMARIES[fabric.summary])
    return [text for text in found if text != MANAGER_DISCONNECTED]


def _is_switch_side(gpu: NvmlGpu, found: Sequence[str], fabrics: Mapping[NvmlGpu, Fabric]) -> bool:
    """Return True if all GPUs of a rack's tray have these problems, and the switches can cause all of them."""
    if any(text in TRAY_PROBLEMS or text.startswith(JOINING_FAILED) for text in found):
        return False
    others = [_has_problems(fabric, found) for other, fabric in fabrics.items() if other is not gpu]
    return True in others and False not in others and _has_rack_switches(gpu, fabrics[gpu])


def _has_problems(fabric: Fabric, expected: Sequence[str]) -> bool | None:
    """Return True if the GPU has these problems, or None if its health mask is invalid."""
    try:
        return fabric.state == COMPLETED and set(expected) <= set(_problems(fabric))
    except ValueError:
        return None


def _has_rack_switches(gpu: NvmlGpu, fabric: Fabric) -> bool:
    try:
        return bool(fabric.cluster) or _is_in_rack(gpu)
    except NvmlError:  # the finding itself is certain, so it is the node's own fault
        return False


def problems(mask: int) -> list[str]:
    """Return the problems that a health mask shows, or [] if there are none. An unknown configuration (newer driver) is
    also a problem.

    Raises ValueError if a two-bit field contains 3, which is not a valid value.
    """
    if any(mask >> shift & 0x3 == 0x3 for shift, _, _ in FIELDS):
        raise ValueError(f"not a health mask of the NVLink fabric: {mask:#x}")
    found = [text for shift, bad_value, text in FIELDS if mask >> shift & 0x3 == bad_value]
    configuration = mask >> CONFIGURATION_SHIFT & 0xF
    if configuration > 1:
        found.append(f"{INCORRECT_CONFIGURATION}{CONFIGURATIONS.get(configuration, configuration)}")
    return found


def _cause(host: Host, config: Config) -> Iterator[Finding]:
    """Yield a finding if the fabric manager's unit is installed but not running. On an NVL72 the fabric manager runs on
    the switches instead.
    """
    result = host.run(SYSTEMCTL_COMMAND, seconds=5.0) if host.exists(SYSTEMD) else None
    if result is None:
        return
    properties = dict(line.split("=", 1) for line in result.stdout.split("\n") if "=" in line)
    state = properties.get("ActiveState")
    if result.status != 0 or not state or "LoadState" not in properties:
        output = (result.stderr or result.stdout).strip()
        raise ValueError(f"systemctl: no state of {UNIT}: {output[:80]!r}")
    if properties["LoadState"] != "not-found" and state not in ("active", "reloading"):
        yield Finding(
            Severity.DEGRADED,
            "gpu_fabric/manager",
            "",
            f"{UNIT} is {state}; GPUs need it to join the NVLink fabric",
            confirm_seconds=config.join_seconds,
            shared_cause=True,
        )


_INSPECT_TODO = (
    "Check nvidia-smi -q -i PCI (Fabric), journalctl -u nvidia-fabricmanager and journalctl -k | grep -iE 'sxid|xid'."
)

OBSERVATIONS = {
    "gpu_fabric_state": Meaning(
        "The GPU's state in the NVSwitch fabric: 0 not supported, 1 not started, 2 in progress, 3 completed.",
        ("pci",),
    ),
    "gpu_fabric_info": Meaning(
        "Always 1; the labels are the GPU's NVLink domain (cluster UUID), its clique in the domain, and its place in "
        "the rack. Only for GPUs whose domain may span several nodes (GB200, GB300).",
        ("pci", "domain", "clique", "chassis", "slot", "tray"),
    ),
}

EXPLAIN = {
    "gpu_fabric/not_joined": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "The GPU belongs to an NVLink fabric but has not joined it within join_seconds. If other GPUs of this node "
        "have joined, the fault is this GPU's own.",
        'CUDA does not start on the GPU (error 802, "system not yet initialized"), so every new job fails at once.',
        "On an NVL72, check the NVLink switch trays and the fabric manager on them (NMX). On an HGX board, run "
        "systemctl restart nvidia-fabricmanager. Its version must match the driver's, and on B200 and later, NVLSM "
        f"must run as well. {_INSPECT_TODO}",
        confirm="join_seconds",
        shared=None,
    ),
    "gpu_fabric/partition": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The host has not activated an NVLink partition with this GPU. The GPU belongs to this virtual machine, but "
        "the NVSwitches belong to the host.",
        'Until the partition is activated, CUDA does not start on this GPU (error 802, "system not yet initialized").',
        "No action tonight on this node. Ask the operator of the hypervisor to activate the partition in the fabric "
        "manager (FABRIC_MODE 1 or 2).",
        confirm="join_seconds",
        shared=True,
    ),
    "gpu_fabric/degraded": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU's NVLink fabric has less bandwidth or capacity than it should, or is recovering routes.",
        "Traffic between GPUs continues, but more slowly. A job on many GPUs runs only as fast as this GPU.",
        f"{_INSPECT_TODO} If the message suspects the switch side, do not reset this node: check the rack's NVLink "
        "switches and its other trays. If it does not, and the fabric does not recover after the drain, reset all GPUs "
        "on the node or reboot. If the problem recurs, check the links, then the switches, then the GPU.",
        confirm="confirm_seconds",
        shared=None,
    ),
    "gpu_fabric/unhealthy": Explain(
        Severity.CRITICAL,
        Clears.PASS,
        "This GPU has joined its NVLink fabric but is not healthy there. For example, the GPU has no routes or a "
        "wrong configuration.",
        "Traffic between GPUs fails or hangs.",
        f"{_INSPECT_TODO} If the message suspects the switch side, do not reset this node: check the rack's NVLink "
        "switches, its partitions and its other trays. If it does not, reset all GPUs on the node or reboot after the "
        "drain. If the problem recurs, check the switches, then the cables (NVL72), then the GPU.",
        confirm="confirm_seconds",
        shared=None,
    ),
    "gpu_fabric/no_fabric": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU reports no NVLink fabric, but others of the same model on this node have joined theirs.",
        "The GPU is not connected by NVLink. Collective operations fail or fall back to PCIe.",
        f"{_INSPECT_TODO} nvidia-smi nvlink -s -i PCI shows its NVLinks. After the drain, reset all GPUs on the node "
        "or reboot. If the problem recurs, replace the GPU or the baseboard.",
        confirm="confirm_seconds",
    ),
    "gpu_fabric/other_domain": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU is in no NVLink domain, or in a different domain or clique from the other GPUs of this node. If no "
        "domain has the most GPUs, every GPU is reported.",
        "The GPU and the others cannot reach each other over NVLink. Jobs that use them together fail or hang.",
        "Compare cliqueId and clusterUuid of all GPUs (nvidia-smi -q, Fabric), and the partitions in the fabric "
        f"manager on the switch trays (NMX). {_INSPECT_TODO} If the partitions are right, reboot the node after the "
        "drain.",
        confirm="confirm_seconds",
    ),
    "gpu_fabric/no_domain": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The GPU's NVLinks lead to switches outside the node, but the GPU reports no fabric, or no NVLink domain "
        "(clusterUuid is zero).",
        "Jobs on several nodes cannot use NVLink between this node and the others of the rack.",
        "No action tonight. Check the rack's NVLink switches, and that the node is in a partition in the fabric "
        f"manager on the switch trays (NMX). {_INSPECT_TODO}",
        confirm="join_seconds",
        shared=True,
    ),
    "gpu_fabric/manager_lost": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The GPU has lost its connection to the fabric manager (GFM in the health mask). If all GPUs of the node have "
        "lost it, the fabric manager is the likely cause.",
        "Running jobs continue, but the fabric manager cannot route around a new fault, or change partitions.",
        "On an HGX board, check nvidia-fabricmanager. On an NVL72, check the fabric manager on the switch trays (NMX); "
        f"if it fails, all trays of the rack report this condition. {_INSPECT_TODO}",
        confirm="join_seconds",
        shared=None,
    ),
    "gpu_fabric/manager": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "GPUs have not joined their NVLink fabric, and nvidia-fabricmanager is not running.",
        "CUDA does not start on these GPUs (error 802).",
        "Check journalctl -u nvidia-fabricmanager. The fabric manager's version must match the driver's. Then run "
        "systemctl restart nvidia-fabricmanager.",
        confirm="join_seconds",
        shared=True,
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.NVLINK),
    "gpu_fabric/manager": FailureCause.SERVICES,
}
ENDS_JOB = {
    "gpu_fabric/not_joined": EndsJob.ALWAYS,
    "gpu_fabric/degraded": EndsJob.NEVER,
    "gpu_fabric/unhealthy": EndsJob.ALWAYS,
    "gpu_fabric/no_fabric": EndsJob.ALWAYS,
    "gpu_fabric/other_domain": EndsJob.ALWAYS,
    "gpu_fabric/manager_lost": EndsJob.NEVER,
    "gpu_fabric/manager": EndsJob.ALWAYS,
}
