"""CPUs that are offline, too slow or too hot.

Rules: gpud, AzNHC and node_exporter monitor the CPUs as well. One file shows which CPUs are online. Each frequency
policy has a file with its governor. With intel_pstate, amd-pstate and acpi-cpufreq each CPU has its own policy, so
reading these files is most of this check's cost. While all governors are as expected, each run reads a quarter of them.

On Intel CPUs the thermal interrupt counts throttling of cores and packages (thermal_throttle). Only the package counts
are read, because a hot core heats its whole package and there are few packages. AMD CPUs and virtual machines have no
throttle counts, so throttling is not checked there. They often have no cpufreq either.

NVIDIA's Grace has a power meter for each socket (acpi_power_meter) and a thermal zone (NVIDIA Grace Performance Tuning
Guide, Power and Thermals; NVIDIA/DCGM 4.6.0, modules/sysmon/DcgmSystemMonitor.cpp and DcgmModuleSysmon.cpp). Both are
metrics. A temperature is reported only if it has reached the kernel's critical trip point, at which the kernel powers
the machine off (Documentation/driver-api/thermal/sysfs-api.rst). Lower trip points slow the CPU down by design.

NVIDIA's Health Validation compares the number of NUMA nodes (numa_node_count: 34 on GB200 and GB300). Most of these
nodes are for the GPUs' memory, and depend on the driver's mode. Only NUMA nodes with CPUs are compared here. Their
number changes with BIOS settings (NPS, SNC) or with a missing CPU, so a different number is only a warning.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence

from healthd.api import (
    NOT_IN_BASELINE,
    Baseline,
    CheckSettings,
    Clears,
    Count,
    Cpus,
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
    ObservationKind,
    Severity,
    is_decimal,
    regex,
)

USES = ""
BASELINE = Baseline(("expected", "numa_nodes"), place=51)

CPUS = "/sys/devices/system/cpu"
NODES_WITH_CPUS = "/sys/devices/system/node/has_cpu"
GOVERNOR_PARTS = 4
SOC = "/sys/devices/soc0/soc_id"
GRACE = "jep106:036b:"  # NVIDIA's SoCs
METERS = "/sys/class/hwmon"
METER = regex(r"(Module|Grace|CPU|SysIO) Power Socket ([0-9]{1,3})")
ZONES = "/sys/class/thermal"
ZONE = regex(r"Thermal Zone Skt([0-9]{1,3}) TJMax")
TRIP_TYPE = regex(r"trip_point_([0-9]{1,3})_type")
MILLIDEGREES = regex(r"-?[0-9]{1,7}")
RANGES = regex(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


class Config(CheckSettings, frozen=True):
    """expected         how many CPUs must be online (getconf _NPROCESSORS_ONLN); 0 = not checked
    numa_nodes       how many NUMA nodes with CPUs there must be; a different number is a warning; 0 = not checked
    governors        accepted frequency governors; others are a warning; () = all are accepted. With intel_pstate and
                     amd-pstate-epp, "powersave" lets the hardware choose the speed; add it if the site uses it
    throttle_events  warn if heat throttled a CPU package more often than this between two runs
    """

    expected: Cpus = 0
    numa_nodes: Count = 0
    governors: tuple[str, ...] = ("performance",)
    throttle_events: Count = 0


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: list[str] = []
    judged = bool(config.expected or config.numa_nodes)
    try:
        online = _online(host, config)
        if online:
            yield from _count(len(online), config)
        if config.numa_nodes:
            yield from _numa_nodes(len(parse(host.read(NODES_WITH_CPUS) or "", NODES_WITH_CPUS)), config)
        for reading in _throttling(host, config, past, online, unreadable):
            judged = True
            yield reading
        if (host.read(SOC) or "").startswith(GRACE):
            yield from _power(host)
            for reading in _temperature(host):
                judged = True
                yield reading
    except (OSError, ValueError) as error:  # this error must not hide the governors
        unreadable.append(str(error))
    for reading in _governors(host, config, past, unreadable):
        judged = True
        yield reading
    if unreadable:
        raise ValueError("; ".join(unreadable))
    if not judged:
        yield NOT_IN_BASELINE


def _online(host: Host, config: Config) -> set[int]:
    path = f"{CPUS}/online"
    text = host.read(path)
    if text is None and not config.expected:
        return set()
    return parse(text or "", path)


def parse(text: str, path: str) -> set[int]:
    """Return the CPU numbers in a list such as "0-3,8". Raises ValueError for anything else."""
    cpus: set[int] = set()
    for part in text.split(",") if RANGES.fullmatch(text) else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    if not cpus:
        raise ValueError(f"{path}: not a list of CPUs as in 0-3,8: {text[:40]!r}")
    return cpus


def _count(online: int, config: Config) -> Iterator[Finding | Observation]:
    yield Observation("cpu_online", online)
    if online < config.expected:
        message = f"{online} CPUs are online; expected {config.expected}"
        yield Finding(Severity.DEGRADED, "cpu/missing", "", message, expects="expected")


def _numa_nodes(nodes: int, config: Config) -> Iterator[Finding | Observation]:
    yield Observation("cpu_numa_nodes", nodes)
    if nodes != config.numa_nodes:
        message = f"{nodes} NUMA node{'' if nodes == 1 else 's'} with CPUs; expected {config.numa_nodes}"
        yield Finding(Severity.WARNING, "cpu/numa_nodes", "", message, expects="numa_nodes")


def _throttling(
    host: Host, config: Config, past: History, online: set[int], unreadable: list[str]
) -> Iterator[Finding | Observation]:
    """Yield findings about throttled packages. Each package's count is read from its first CPU. Another file in that
    CPU's directory lists the package's other CPUs.
    """
    while online:
        cpu = min(online)
        path = f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_count"
        count = host.read(path)
        if count is None:
            return
        siblings = f"{CPUS}/cpu{cpu}/topology/core_siblings_list"  # old kernels have this name too
        online = online - {cpu} - parse(host.read(siblings) or "", siblings)
        if not (is_decimal(count) and int(count) < 2**64):
            unreadable.append(f"{path}: not a count: {count[:40]!r}")
            continue
        labels = (("cpu", str(cpu)),)
        reading = Observation("cpu_package_throttle_total", int(count), ObservationKind.COUNTER, labels)
        yield reading
        new = past.growth(reading, 0.0) or 0.0  # growth since the last run
        if new > config.throttle_events:
            message = f"the package of CPU {cpu} overheated {new:.0f} times since the last run and was slowed down"
            yield Finding(Severity.WARNING, "cpu/throttled", f"cpu{cpu}", message)


def _power(host: Host) -> Iterator[Observation]:
    """Yield the power of each socket and its parts. Power is only displayed, so a meter without a value is left out."""
    for meter in host.list(METERS):
        found = METER.fullmatch(host.read_or_empty(f"{METERS}/{meter}/device/power1_oem_info"))
        microwatts = host.read_or_empty(f"{METERS}/{meter}/device/power1_average") if found else ""
        if found and is_decimal(microwatts):
            labels = (("socket", found[2]), ("part", found[1].lower()))
            yield Observation("cpu_power_watts", int(microwatts) / 1e6, labels=labels)


def _temperature(host: Host) -> Iterator[Finding | Observation]:
    """Compare each socket's temperature with the kernel's critical trip point. Raises OSError or ValueError."""
    for zone in host.list(ZONES):
        folder = f"{ZONES}/{zone}"
        found = ZONE.fullmatch(host.read(f"{folder}/device/description") or "")
        if found is None:
            continue
        celsius = _celsius(host, f"{folder}/temp")
        yield Observation("cpu_temperature_celsius", celsius, labels=(("socket", found[1]),))
        for name in host.list(folder):
            if (trip := TRIP_TYPE.fullmatch(name)) and host.read(f"{folder}/{name}") == "critical":
                critical = _celsius(host, f"{folder}/trip_point_{trip[1]}_temp")
                if 0 < critical <= celsius:
                    message = f"{celsius:.1f} C; at {critical:.1f} C the kernel powers the machine off"
                    yield Finding(Severity.WARNING, "cpu/critical_temperature", f"socket{found[1]}", message)


def _celsius(host: Host, path: str) -> float:
    text = host.read(path) or ""
    if not MILLIDEGREES.fullmatch(text):
        raise ValueError(f"{path}: not a temperature: {text[:40]!r}")
    return int(text) / 1000


def _governors(host: Host, config: Config, past: History, unreadable: list[str]) -> Iterator[Finding | Observation]:
    """Read all governors in the first run, and one of GOVERNOR_PARTS groups in each later run. If any governor is
    unexpected, read all governors.
    """
    policies = [name for name in host.list(f"{CPUS}/cpufreq") if name.startswith("policy")] if config.governors else []
    if not policies:
        return
    last = past.last(Observation("cpu_governors_read_part", 0))
    part = int(last.value) % GOVERNOR_PARTS + 1 if last and last.value else 0  # 0 means all
    found = _read_governors(host, policies[part - 1 :: GOVERNOR_PARTS] if part else policies, unreadable)
    if part and not set(found) <= {*config.governors}:
        part, found = 0, _read_governors(host, policies, unreadable)
    is_expected = set(found) <= {*config.governors} and not unreadable
    yield Observation("cpu_governors_read_part", (part or GOVERNOR_PARTS) if is_expected else 0)
    unexpected = sorted(Counter(governor for governor in found if governor not in config.governors).items())
    if unexpected:
        counts = ", ".join(f"{count} have {governor[:20]!r}" for governor, count in unexpected)
        message = f"of {len(found)} CPU frequency policies, {counts}, not {' or '.join(config.governors)}"
        yield Finding(Severity.WARNING, "cpu/governor", "", message)


def _read_governors(host: Host, policies: Sequence[str], unreadable: list[str]) -> list[str]:
    found = []
    for policy in policies:
        try:
            governor = host.read(f"{CPUS}/cpufreq/{policy}/scaling_governor")
        except OSError as error:
            if error.errno != errno.EBUSY:  # EBUSY: all CPUs of this policy are offline
                unreadable.append(f"governor of {policy}: {error.strerror}")
            continue
        if governor:
            found.append(governor)
        else:
            unreadable.append(f"governor of {policy}: {'is missing' if governor is None else 'is empty'}")
    return found


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    online = parse(host.read(f"{CPUS}/online") or "", f"{CPUS}/online")
    offline = host.read_or_empty(f"{CPUS}/offline")
    yield Entry("cpu", "expected", len(online), note=f"online; offline: {offline}" if offline else "online")
    nodes = host.read_or_empty(NODES_WITH_CPUS)
    if nodes:
        yield Entry("cpu", "numa_nodes", len(parse(nodes, NODES_WITH_CPUS)), note="with CPUs")


OBSERVATIONS = {
    "cpu_online": Meaning("CPUs (hardware threads) that are online."),
    "cpu_numa_nodes": Meaning("NUMA nodes with CPUs. Only if the settings have the expected number."),
    "cpu_package_throttle_total": Meaning(
        "Number of times since boot that heat slowed down a CPU package; the label is the package's first CPU.",
        ("cpu",),
    ),
    "cpu_power_watts": Meaning(
        "Power of a Grace socket in watts. The part is the meter's name: module, grace, cpu or sysio.",
        ("socket", "part"),
    ),
    "cpu_temperature_celsius": Meaning("Highest temperature of a Grace socket in degrees Celsius.", ("socket",)),
    "cpu_governors_read_part": Meaning(
        "Number of the group of CPU governors that the last run read; 0 if it read all. For healthd's own use.",
    ),
}

EXPLAIN = {
    "cpu/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "Fewer CPUs are online than the settings require.",
        "Slurm takes a node out of service if it registers with fewer CPUs. Jobs pinned to the missing CPUs fail.",
        "lscpu -e shows which CPUs are offline. Look for 'smpboot' lines and machine checks in journalctl -k. Check "
        "SMT and the core count in the BIOS settings. If a whole package is missing, check the socket or its board.",
        expects="expected",
    ),
    "cpu/numa_nodes": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The number of NUMA nodes with CPUs differs from the setting numa_nodes.",
        "Jobs bind processes and memory to the wrong NUMA node, and speeds vary between nodes.",
        "No action tonight. numactl --hardware shows the NUMA nodes. Compare the BIOS settings with those of another "
        "node: NUMA nodes per socket (NPS) on AMD, sub-NUMA clustering (SNC) on Intel. If CPUs are missing too, see "
        "cpu/missing. If the number was changed on purpose, correct numa_nodes.",
        expects="numa_nodes",
    ),
    "cpu/governor": Explain(
        Severity.WARNING,
        Clears.PASS,
        "The CPUs' frequency governor is not listed in governors in [checks.cpu], so the CPUs may run below their "
        "full clock speed.",
        "Data loading, kernel launches and network traffic slow down, and speeds vary between nodes.",
        "No action tonight. Run cpupower frequency-set -g performance, or tuned-adm profile hpc-compute. Slurm's "
        "--cpu-freq changes the governor for one job. If 'powersave' of intel_pstate or amd-pstate is intended, add it "
        "to governors in [checks.cpu].",
    ),
    "cpu/throttled": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A CPU package reached its temperature limit and slowed itself down.",
        "Jobs run slower, and all nodes of a job wait for its slowest node.",
        "No action tonight. Run ipmitool sdr type Temperature and ipmitool sdr type Fan, or sensors. Check the fans, "
        "the air filters, the thermal paste and the room temperature.",
    ),
    "cpu/critical_temperature": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A Grace CPU is as hot as the kernel's critical trip point, at which the kernel powers the machine off.",
        "The machine is about to power off, which ends its jobs.",
        "Check the coolant flow and the leak sensors of the tray and the rack, or the fans (ipmitool sdr type "
        "Temperature and ipmitool sdr type Fan). If the temperature is right and the machine stays on, the trip point "
        "is wrong: compare /sys/class/thermal/thermal_zone*/trip_point_*_temp with another node, and update the "
        "firmware.",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.POWER),
    "cpu/missing": FailureCause.MEMORY,
    "cpu/numa_nodes": FailureCause.MEMORY,
}
ENDS_JOB = {
    "cpu/missing": EndsJob.ALWAYS,
    "cpu/numa_nodes": EndsJob.NEVER,
    "cpu/governor": EndsJob.NEVER,
    "cpu/throttled": EndsJob.NEVER,
    "cpu/critical_temperature": EndsJob.IF_ISOLATES,
}
PERMANENT = ("cpu/missing",)
