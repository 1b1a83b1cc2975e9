"""CPUs that are away, run slower than they can, or get too hot.

Rules: gpud, AzNHC and node_exporter watch these. One file says which CPUs are online. The frequency governor is read
once a policy: with intel_pstate, amd-pstate and acpi-cpufreq that is one a CPU, and most of what this check costs, so a
quarter of them in each look where all were right.
Throttling is counted by Intel's thermal interrupt (thermal_throttle), for cores and for packages. Only the packages'
counts are read: a core that gets too hot takes its package with it, and they are few. AMD's CPUs and virtual machines
have neither these counts nor, often, cpufreq: nothing is judged then.
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
    Host,
    LeftOut,
    Meaning,
    NothingToCheck,
    Observation,
    ObservationKind,
    Past,
    Severity,
    is_decimal,
    regex,
)

USES = ""
BASELINE = Baseline(("expected",), place=51)

CPUS = "/sys/devices/system/cpu"
GOVERNOR_TURNS = 4
RANGES = regex(r"[0-9]{1,5}(-[0-9]{1,5})?(,[0-9]{1,5}(-[0-9]{1,5})?)*")


class Config(CheckSettings, frozen=True):
    """expected         how many CPUs must be online (getconf _NPROCESSORS_ONLN); 0 = not judged
    governors        frequency governors that are right; another warns, () = any is right. "powersave" of intel_pstate
                     and amd-pstate-epp lets the hardware choose, which a site may want: then it adds it
    throttle_events  more thermal throttling than this on a CPU package from one run to the next warns
    """

    expected: Cpus = 0
    governors: tuple[str, ...] = ("performance",)
    throttle_events: Count = 0


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation | NothingToCheck]:
    unreadable: list[str] = []
    judged = bool(config.expected)
    try:
        online = _online(host, config)
        if online:
            yield from _count(len(online), config)
        for reading in _throttled(host, config, past, online, unreadable):
            judged = True
            yield reading
    except (OSError, ValueError) as error:  # it must not hide the governors
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
    """CPU numbers from "0-3,8". Raises ValueError for anything else."""
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
        message = f"{online} CPUs are online, {config.expected} are expected"
        yield Finding(Severity.DEGRADED, "cpu/missing", "", message, expects="expected")


def _throttled(
    host: Host, config: Config, past: Past, online: set[int], unreadable: list[str]
) -> Iterator[Finding | Observation]:
    """The first CPU of each package tells its package's count and its siblings."""
    while online:
        cpu = min(online)
        path = f"{CPUS}/cpu{cpu}/thermal_throttle/package_throttle_count"
        count = host.read(path)
        if count is None:
            return
        siblings = f"{CPUS}/cpu{cpu}/topology/core_siblings_list"  # old kernels know this name too
        online = online - {cpu} - parse(host.read(siblings) or "", siblings)
        if not (is_decimal(count) and int(count) < 2**64):
            unreadable.append(f"{path}: not a count: {count[:40]!r}")
            continue
        labels = (("cpu", str(cpu)),)
        reading = Observation("cpu_package_throttle_total", int(count), ObservationKind.COUNTER, labels)
        yield reading
        new = past.growth(reading, 0.0) or 0.0  # growth since the last run
        if new > config.throttle_events:
            message = f"the package of CPU {cpu} was too hot {new:.0f} times since the last look, and was slowed down"
            yield Finding(Severity.WARNING, "cpu/throttled", f"cpu{cpu}", message)


def _governors(host: Host, config: Config, past: Past, unreadable: list[str]) -> Iterator[Finding | Observation]:
    """The first look reads all; later ones read one in GOVERNOR_TURNS, in turn; all again if one is or was wrong."""
    policies = [name for name in host.list(f"{CPUS}/cpufreq") if name.startswith("policy")] if config.governors else []
    if not policies:
        return
    last = past.last(Observation("cpu_governors_read_part", 0))
    turn = int(last.value) % GOVERNOR_TURNS + 1 if last and last.value else 0  # 0: all
    found = _read_governors(host, policies[turn - 1 :: GOVERNOR_TURNS] if turn else policies, unreadable)
    if turn and not set(found) <= {*config.governors}:
        turn, found = 0, _read_governors(host, policies, unreadable)
    is_right = set(found) <= {*config.governors} and not unreadable
    yield Observation("cpu_governors_read_part", (turn or GOVERNOR_TURNS) if is_right else 0)
    others = sorted(Counter(governor for governor in found if governor not in config.governors).items())
    if others:
        has = ", ".join(f"{count} have {governor[:20]!r}" for governor, count in others)
        message = f"of {len(found)} CPU frequency policies {has}, not {' or '.join(config.governors)}"
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
            unreadable.append(f"governor of {policy}: {'is not there' if governor is None else 'is empty'}")
    return found


def baseline(host: Host, config: Config) -> Iterator[Entry | LeftOut]:
    online = parse(host.read(f"{CPUS}/online") or "", f"{CPUS}/online")
    offline = host.told(f"{CPUS}/offline")
    yield Entry("cpu", "expected", len(online), note=f"online; offline: {offline}" if offline else "online")


OBSERVATIONS = {
    "cpu_online": Meaning("CPUs (hardware threads) that are online."),
    "cpu_package_throttle_total": Meaning(
        "Times since the boot that a CPU package was slowed down for its heat; the label is its first CPU.",
        ("cpu",),
    ),
    "cpu_governors_read_part": Meaning(
        "Which share of the CPUs' governors was read last: 0 if all, else the turn; for healthd itself.",
    ),
}

EXPLAIN = {
    "cpu/missing": Explain(
        Severity.DEGRADED,
        Clears.PASS,
        "Fewer CPUs are online than the site's settings say.",
        "Slurm takes a node that registers with fewer CPUs out of service, and jobs pinned to those CPUs fail.",
        "lscpu -e shows which are offline; journalctl -k for 'smpboot' and machine checks. Look at SMT and the core "
        "count in the BIOS settings. A whole package away: the socket or its board.",
        expects="expected",
    ),
    "cpu/governor": Explain(
        Severity.WARNING,
        Clears.PASS,
        "CPUs may run below their full clock: their frequency governor is not the one that the site wants.",
        "What feeds the GPUs (data loading, kernel launches, the network) gets slower and uneven between nodes.",
        "cpupower frequency-set -g performance, or tuned-adm profile hpc-compute; Slurm's --cpu-freq changes it for a "
        "job. 'powersave' of intel_pstate or amd-pstate may be meant so: add it to governors in [checks.cpu].",
    ),
    "cpu/throttled": Explain(
        Severity.WARNING,
        Clears.PASS,
        "A CPU package reached its temperature limit and slowed itself down.",
        "Jobs run slower, and all nodes of a job wait for the slowest.",
        "sensors, ipmitool sdr type Temperature and Fan: fans, air filters, the heat sink's paste, the room.",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.POWER),
    "cpu/missing": FailureCause.MEMORY,
}
ENDS_JOB = {
    "cpu/missing": EndsJob.ALWAYS,
    "cpu/governor": EndsJob.NEVER,
    "cpu/throttled": EndsJob.NEVER,
}
PERMANENT = ("cpu/missing",)
