"""New entries in the BMC's event log (SEL) that report broken hardware.

Rules: the check reports critical interrupts, fatal bus errors, lost power supplies and uncorrectable errors (in Meta's
study PCIe faults appear as IPMI critical interrupts; GCM reads the same log). Entries that exist at the first run are
ignored as history. The log is read through ipmitool and never cleared. Findings are warnings; with `enforce = true`
they drain the node. healthd remembers the newest entry, also across reboots, because a fatal error often causes a
reboot. Later entries are new. If the remembered entry is gone, the log was cleared or wrapped, and all entries are new.
A cleared log reuses record ids, so an entry is identified by its id and the minutes and seconds of its timestamp. The
date and hour are not used, because ipmitool 1.8.19 prints them differently from 1.8.18.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from healthd.api import (
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
    Observation,
    Period,
    Severity,
    is_decimal,
    regex,
)

USES = ""
HOLDS_RESUME = False  # a BMC that does not respond must not keep a node drained

DEVICES = ("/dev/ipmi0", "/dev/ipmi/0", "/dev/ipmidev/0")  # the paths that ipmitool tries
MAX_ENTRIES = 200
EMPTY_LOG = "SEL has no entries"
DIRECTIONS = ("Asserted", "Deasserted")
WITHOUT_SENSOR = ("OEM record ", "Linux kernel panic")
TIME = regex(r"[0-9]{2}:([0-9]{2}):([0-9]{2})( .*)?")
RULES = {  # code -> pattern of the entry's "sensor type and name | event"; the first match is used
    "ipmi_sel/bus_fatal": regex(r"critical interrupt.*\|.*(bus fatal|bus uncorrectable)", re.I),
    "ipmi_sel/critical_interrupt": regex(r"critical interrupt(?!.*\|.*(bus correctable|front panel))", re.I),
    "ipmi_sel/uncorrectable": regex(r".*\|.*(\buncorrectable|\bierr)", re.I),
    "ipmi_sel/power_supply": regex(r"power supply.*\|.*(failure detected|ac lost|inactive)", re.I),
}


class Config(CheckSettings, frozen=True):
    """interval_seconds  interval between runs; reading the log keeps a BMC busy for seconds
    timeout_seconds   time limit of one run; BMCs are slow
    enforce           true: findings drain
    """

    interval_seconds: Period | None = 3600.0
    timeout_seconds: Period = 60.0
    enforce: bool = False


class Entry(NamedTuple):
    """An entry in the SEL. `second` is the number of seconds since the full hour."""

    record: int
    second: int
    time: str
    sensor: str
    event: str
    asserted: bool

    @property
    def mark(self) -> int:
        return self.record * 3600 + self.second


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | NothingToCheck]:
    if not any(host.stat(device) for device in DEVICES):
        yield NothingToCheck("no BMC device", "modprobe -a ipmi_devintf ipmi_si")
        return
    result = host.run(("ipmitool", "sel", "elist", "last", str(MAX_ENTRIES)), config.timeout_seconds * 0.9)
    if result is None:
        yield NothingToCheck("ipmitool is not installed", "install ipmitool")
        return
    if result.status != 0 or not (result.stdout.strip() or EMPTY_LOG in result.stderr):
        raise RuntimeError(
            f"ipmitool: exit status {result.status}: {result.stderr.strip()[:200] or 'no error message'}"
        )
    entries = [parse(line) for line in result.stdout.split("\n") if line.strip()]
    reading = Observation("ipmi_sel_newest_entry_mark", entries[-1].mark if entries else 0)
    last = past.last(reading, any_boot=True)
    yield reading
    new = entries if last else []
    for index, entry in enumerate(entries):
        if last and entry.mark == last.value:
            new = entries[index + 1 :]
    yield from _judge(new)


def parse(line: str) -> Entry:
    """Parse "  1a | 11/20/2026 | 10:01:17 | Power Supply PS1 Status | Power Supply AC lost | Asserted", or " 1a |
    Pre-Init  |0000000123| ...". Raises ValueError if `line` is not an entry. OEM records have no sensor.
    """
    number, *fields = (field.strip() for field in line.split("|"))
    if regex("[0-9a-f]{1,4}").fullmatch(number) and fields:
        record = int(number, 16)
        if fields[0].startswith(WITHOUT_SENSOR):
            return Entry(record, 0, "", "", fields[0], False)
        time = TIME.fullmatch(fields[1]) if len(fields) > 2 else None
        since_start = fields[1] if len(fields) > 2 and fields[0] == "Pre-Init" and is_decimal(fields[1]) else ""
        if time or since_start:
            second = int(since_start) % 3600 if since_start else int(time[1]) * 60 + int(time[2]) if time else 0
            if fields[2].startswith(WITHOUT_SENSOR):
                return Entry(record, second, " ".join(fields[:2]), "", fields[2], False)
            for index in range(len(fields) - 1, 3, -1):
                if fields[index] in DIRECTIONS:
                    event = " | ".join(fields[3:index])
                    return Entry(record, second, " ".join(fields[:2]), fields[2], event, fields[index] == "Asserted")
    raise ValueError(f"ipmitool: not an entry of the SEL: {line[:80]!r}")


def _judge(new: list[Entry]) -> Iterator[Finding]:
    """Yield one finding for each code and sensor."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in new:
        code = next((code for code, rule in RULES.items() if rule.match(f"{entry.sensor}|{entry.event}")), None)
        if code and entry.asserted:
            found.setdefault((code, entry.sensor), []).append(entry)
        elif code == "ipmi_sel/power_supply":
            found.pop((code, entry.sensor), None)  # the power was restored
    for (code, sensor), entries in found.items():
        newest = entries[-1]
        count = f", {len(entries)} new entries" if len(entries) > 1 else ""
        message = f"{sensor}: {newest.event or 'no description'} ({newest.time}, record {newest.record:x}{count})"
        yield Finding(Severity.DEGRADED, code, sensor, message, clears=Clears.OPERATOR)


_TODO = (
    "ipmitool sel elist lists the entries, and ipmitool sel get 0xRECORD shows details. The times are from the BMC's "
    "clock. Look for an Xid, a PCIe error or a memory error at the same time. When the broken part has been replaced "
    "or found healthy, run healthd repaired CODE PART. If the condition is only a warning, no action is needed "
    "tonight."
)

OBSERVATIONS = {
    "ipmi_sel_newest_entry_mark": Meaning(
        "Mark of the newest entry in the BMC's event log: its record number times 3600, plus the second of its time "
        "within the hour. healthd uses this mark to detect new entries.",
    ),
}

EXPLAIN = {
    "ipmi_sel/bus_fatal": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The BMC recorded a fatal or uncorrectable bus error. By default this is a warning; with enforce = true it "
        "drains the node.",
        "A PCIe device or its link failed. Work that used the device failed, or the error reset the whole node.",
        _TODO,
    ),
    "ipmi_sel/critical_interrupt": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The BMC recorded a critical interrupt (NMI, PERR, SERR or an unexplained one). By default this is a "
        "warning; with enforce = true it drains the node.",
        "A device reported an error that it could not handle. On GPU nodes this is usually a PCIe error.",
        _TODO,
    ),
    "ipmi_sel/uncorrectable": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The BMC recorded an uncorrectable memory or processor error. By default this is a warning; with enforce = "
        "true it drains the node.",
        "Data was lost. In most cases the error also reset the node.",
        _TODO,
    ),
    "ipmi_sel/power_supply": Explain(
        Severity.DEGRADED,
        Clears.OPERATOR,
        "The BMC recorded that a power supply failed or lost its input and did not recover at once. By default this "
        "is a warning; with enforce = true it drains the node.",
        "GPUs may be slowed down. Otherwise there is no effect while the other power supplies carry the load. The "
        "next failure stops the node.",
        f"Check the power supply's LEDs, its cable and the rack's power. {_TODO}",
    ),
}

CAUSES = {
    **dict.fromkeys(EXPLAIN, FailureCause.PCIE),
    "ipmi_sel/uncorrectable": FailureCause.MEMORY,
    "ipmi_sel/power_supply": FailureCause.POWER,
}
ENDS_JOB = dict.fromkeys(EXPLAIN, EndsJob.ALWAYS)
PERMANENT = ("ipmi_sel/power_supply",)
