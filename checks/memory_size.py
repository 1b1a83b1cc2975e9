"""Amount of memory in the machine.

Rule: the firmware disables a DIMM that fails its test at boot, and the machine starts with less memory without any
message (AzNHC compares the size too). A few percent are tolerated because the kernel reserves a different amount after
each kernel or firmware update. File: /proc/meminfo.

On GH200, GB200 and GB300, the driver adds the GPUs' memory to the kernel's as NUMA nodes without CPUs, unless it runs
in the mode CDMM (release notes of driver 580). MemTotal then depends on the driver. On a machine with such NUMA nodes,
only the memory of NUMA nodes with CPUs counts (/sys/devices/system/node).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    Bytes,
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
    Meaning,
    NothingToCheck,
    Observation,
    Severity,
    Share,
    regex,
)

USES = ""
BASELINE = Baseline(("expected_bytes",), place=50)

MEMINFO = "/proc/meminfo"
MEM_TOTAL = regex(r"^(?:Node [0-9]{1,5} )?MemTotal: +([0-9]{1,12}) kB$", re.MULTILINE)
CPUINFO = "/proc/cpuinfo"
NODES = "/sys/devices/system/node"
NODE_LIST = regex(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


class Config(CheckSettings, frozen=True):
    """expected_bytes     MemTotal of a healthy node of this kind, without the memory of GPUs; 0 = not checked
    max_missing_share  up to this share of expected_bytes may be missing
    """

    expected_bytes: Bytes = 0
    max_missing_share: Share = 0.03


def validate(config: Config) -> str | None:
    if config.expected_bytes < 0:
        return f"expected_bytes: must not be negative, got {config.expected_bytes}"
    if not 0 <= config.max_missing_share < 1:
        return f"max_missing_share: must be at least 0 and below 1, got {config.max_missing_share:g}"
    return None


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not config.expected_bytes:
        yield NOT_IN_BASELINE
        return
    total = host_memory(host)
    yield Observation("memory_size_bytes", total)
    if total < config.expected_bytes * (1 - config.max_missing_share):
        missing = 1 - total / config.expected_bytes
        message = f"{_gib(total)} of memory; expected {_gib(config.expected_bytes)}: {missing:.0%} missing"
        yield Finding(Severity.DEGRADED, "memory_size/too_small", "", message, expects="expected_bytes")


def host_memory(host: Host) -> int:
    """Return the bytes of MemTotal; on an Arm machine with NUMA nodes that have memory but no CPUs, of all other nodes:
    these are the GPUs' memory on Grace. On x86, such nodes are CXL memory or HBM, which belong to the machine."""
    with_cpus, with_memory = (host.read(f"{NODES}/{name}") for name in ("has_cpu", "has_memory"))
    if not with_cpus or not with_memory:  # a kernel without NUMA
        return parse(host.read(MEMINFO) or "")
    cpu_nodes = parse_nodes(with_cpus, f"{NODES}/has_cpu")
    memory_nodes = parse_nodes(with_memory, f"{NODES}/has_memory")
    # /proc/cpuinfo comes last: it has a section for each CPU, and most machines have no such NUMA node.
    has_gpu_memory = (
        not memory_nodes <= cpu_nodes
        and not memory_nodes.isdisjoint(cpu_nodes)
        and "CPU implementer" in (host.read(CPUINFO) or "")
    )
    if not has_gpu_memory:
        return parse(host.read(MEMINFO) or "")
    paths = [f"{NODES}/node{node}/meminfo" for node in sorted(memory_nodes & cpu_nodes)]
    return sum(parse(host.read(path) or "", path) for path in paths)


def parse_nodes(text: str, path: str) -> set[int]:
    """Return the numbers in a list such as "0-1,8". Raises ValueError for anything else."""
    nodes: set[int] = set()
    for part in text.split(",") if NODE_LIST.fullmatch(text) else ():
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    if not nodes:
        raise ValueError(f"{path}: not a list of NUMA nodes as in 0-1,8: {text[:40]!r}")
    return nodes


def parse(meminfo: str, path: str = MEMINFO) -> int:
    """Return the bytes in the line "MemTotal:  2113447480 kB", which begins with "Node 0 " in the file of a NUMA node.
    Raises ValueError if there is no such line.
    """
    match = MEM_TOTAL.search(meminfo)
    if match is None or not int(match[1]):
        raise ValueError(f"{path}: has no MemTotal in kB: {meminfo[:60]!r}")
    return int(match[1]) * 1024


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    size = host_memory(host)
    yield Entry("memory_size", "expected_bytes", size, note=_gib(size))


OBSERVATIONS = {
    "memory_size_bytes": Meaning("Memory available to the kernel, in bytes (MemTotal), without the memory of GPUs."),
}

EXPLAIN = {
    "memory_size/too_small": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "The kernel has less memory than the setting expected_bytes.",
        "Jobs that request and use all of the node's memory are killed. A missing DIMM may also halve its memory "
        "channel's speed.",
        "dmidecode -t memory shows the empty slot, and the BMC's log shows the reason. Reseat or replace the DIMM. If "
        "the amount of memory was changed on purpose (for example with crashkernel=), correct expected_bytes.",
        expects="expected_bytes",
    ),
}

CAUSES = dict.fromkeys(EXPLAIN, FailureCause.MEMORY)
ENDS_JOB = {"memory_size/too_small": EndsJob.ALWAYS}
PERMANENT = ("memory_size/too_small",)
