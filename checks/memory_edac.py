"""Errors of the host's memory that ECC found, as the kernel's EDAC drivers count them.

Rules: an uncorrected error lost data of whatever used that memory (Meta's study counts it as a fault of the node). The
controller's count has them all, also those whose DIMM the hardware did not name. Corrected errors cost nothing, and
vendors' limits for them differ, so many in a day only warn. Files: Linux, ABI/testing/sysfs-devices-edac; drivers that
think in ranks (AMD) have rank0 for dimm0. Without an EDAC driver (virtual machines) nothing is judged.

The counts begin anew with each boot. One that the first look after a boot finds above 0 warns: it may be an error of
this boot, or what the firmware kept of the last one (it hands it over when its driver, ghes_edac, starts).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from healthd.config import CheckConfig
from healthd.host import Host
from healthd.model import Clears, Explain, Finding, Observation, ObservationKind, Severity
from healthd.past import Past

USES = ""

CONTROLLERS = "/sys/devices/system/edac/mc"
CONTROLLER = re.compile(r"mc[0-9]+")
DIMM = re.compile(r"(?:dimm|rank)[0-9]+")
ROW = re.compile(r"csrow[0-9]+")
DAY = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """corrected_per_day  more corrected errors than this on one DIMM within a day warn
    clean_seconds      they are forgotten after so long without new ones under load, or after a reboot
    """

    corrected_per_day: int = 1000
    clean_seconds: float = DAY


def validate(config: Config) -> str | None:
    if config.corrected_per_day < 0:
        return f"corrected_per_day: must not be negative, is {config.corrected_per_day}"
    return None


def run(host: Host, config: Config, past: Past) -> Iterator[Finding | Observation]:
    unreadable = []
    for controller in filter(CONTROLLER.fullmatch, host.list(CONTROLLERS)):
        names = host.list(f"{CONTROLLERS}/{controller}")
        dimms = [f"{controller}/{name}" for name in names if DIMM.fullmatch(name)]
        rows = [f"{controller}/{name}" for name in names if ROW.fullmatch(name)]  # all that Linux before 3.6 has
        counts = {
            "ue_count": [controller],
            "ce_noinfo_count": [controller],  # corrected ones whose DIMM the hardware did not name
            "dimm_ce_count": dimms,
            "ce_count": [] if dimms else rows,
        }
        for part, file in ((part, file) for file, parts in counts.items() for part in parts):
            error = "uncorrected" if file == "ue_count" else "corrected"
            try:
                count = parse(host.read(f"{CONTROLLERS}/{part}/{file}"), f"{part}/{file}")
            except (OSError, ValueError) as problem:  # must not hide the other DIMMs
                unreadable.append(str(problem))
                continue
            labels = (("part", part),)
            reading = Observation(f"memory_edac_{error}_errors_total", count, ObservationKind.COUNTER, labels)
            yield reading
            new = past.growth(reading, 0.0)  # since the last run
            rebooted = past.last(reading) is None and past.last(reading, any_boot=True) is not None
            if rebooted and count and error == "uncorrected":
                words = f"{count} uncorrected memory errors were counted before the first look of this boot"
                code = "memory_edac/uncorrected_at_boot"
                yield Finding(Severity.WARNING, code, controller, words, clears=Clears.REBOOT)
            if new and error == "uncorrected":
                yield _uncorrected(host, controller, dimms, new)
            elif new:
                # Of this boot: before it there may have been another DIMM in that slot.
                yield from _corrected(host, part, min(count, past.growth(reading, DAY) or 0.0), config)
    if unreadable:
        raise ValueError("; ".join(unreadable))


def parse(text: str | None, file: str) -> int:
    """A count of 32 bits. Raises ValueError for anything else, and where a controller has no such file."""
    if text is None or not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise ValueError(f"{CONTROLLERS}/{file}: {'is not there' if text is None else f'not a count: {text[:40]!r}'}")
    return int(text)


def _uncorrected(host: Host, controller: str, dimms: list[str], new: float) -> Finding:
    """Where the hardware named the DIMMs, their own counts tell which."""
    counts = {dimm: _if_told(host, f"{dimm}/dimm_ue_count") for dimm in dimms}
    bad = [f"{_named(host, dimm)} {count}" for dimm, count in counts.items() if count not in ("", "0")]
    message = f"{new:.0f} new uncorrected memory errors" + (f" (since boot: {', '.join(bad)})" if bad else "")
    return Finding(Severity.CRITICAL, "memory_edac/uncorrected", controller, message, clears=Clears.REBOOT)


def _corrected(host: Host, part: str, daily: float, config: Config) -> Iterator[Finding]:
    if daily > config.corrected_per_day:
        yield Finding(
            Severity.WARNING,
            "memory_edac/corrected",
            part,
            f"{daily:.0f} corrected memory errors within a day on {_named(host, part)}",
            clears=Clears.REBOOT,
            window_seconds=config.clean_seconds,
        )


def _named(host: Host, part: str) -> str:
    """With the name of the slot, as the board's firmware or the driver has it."""
    label = _if_told(host, f"{part}/dimm_label")
    return f"{label} ({part})" if label else part


def _if_told(host: Host, file: str) -> str:
    """Words for a message, "" if they cannot be read: that must not hide the fault."""
    try:
        return (host.read(f"{CONTROLLERS}/{file}") or "")[:60]
    except OSError:
        return ""


_FIND_TODO = "The label in the message names the slot; dmidecode -t memory and the BMC's log do, too. "

EXPLAIN = {
    "memory_edac/uncorrected": Explain(
        Severity.CRITICAL,
        Clears.REBOOT,
        "ECC found an error in the host's memory that it could not correct.",
        "Data was lost: a process was killed for it or computes with wrong bytes, and so may the kernel.",
        f"{_FIND_TODO}Drain and reboot; then test the memory. Comes back: replace the DIMM.",
    ),
    "memory_edac/uncorrected_at_boot": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "The first look of this boot found uncorrected errors of the host's memory: of this boot, or of the last, "
        "which they may have ended.",
        "If they are of this boot, a process or the kernel may compute with wrong bytes.",
        f"journalctl -k | grep -iE 'edac|mce|hardware error' says when they came. {_FIND_TODO}Test the memory; replace "
        "the DIMM if it comes back.",
    ),
    "memory_edac/corrected": Explain(
        Severity.WARNING,
        Clears.REBOOT,
        "One DIMM had far more corrected errors in a day than good ones have.",
        "None yet: all were corrected. It is often the beginning of a DIMM that fails; a storm also costs CPU time.",
        f"{_FIND_TODO}Reseat or replace that DIMM at the next maintenance. A day under load without more of "
        "them ends the warning, too.",
    ),
}
