"""Check that the leaf switch of each rail answers. It uses everything a check may declare, except for swap.py's."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from healthd.api import (
    CheckConfig,
    Clears,
    Explain,
    Finding,
    History,
    Host,
    Observation,
    ObservationKind,
    Repair,
    Severity,
)

USES = ""
PER = "rail"
AFTER_EVENTS = ("xid", "job_end")
HOLDS_RESUME = False


@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    """Settings.

    file        output of the switch's agent
    max_errors  more errors than this within an hour warn
    """

    file: str = "/leaf"
    max_errors: int = 10
    overdue_seconds: float = 0.5


def validate(config: Config) -> str | None:
    return None if config.max_errors >= 0 else "max_errors must not be negative"


def run(host: Host, config: Config, past: History) -> Iterator[Finding | Observation | Repair]:
    while host.exists("/leaf-hangs"):  # it hangs until the test removes the file
        time.sleep(0.05)
    state, errors = (host.read(config.file) or "").split()
    reading = Observation("leaf_errors_total", float(errors), ObservationKind.COUNTER, (("rail", config.name),))
    yield reading
    grown, before = past.growth(reading, 3600.0), past.last(reading)
    if grown is not None and grown > config.max_errors:
        yield Finding(Severity.WARNING, "leaf/errors", config.name, f"{grown:g} errors within an hour")
    if state == "down":
        yield Finding(Severity.DEGRADED, "leaf/down", config.name, f"the leaf of {config.name} is down")
    if before is not None and reading.value < before.value:
        yield Repair(Clears.GPU_RESET, config.name, "the leaf was started again", before.time)


def overdue(config: Config, seconds: float) -> Iterator[Finding]:
    if seconds >= config.overdue_seconds:
        yield Finding(Severity.WARNING, "leaf/hang", config.name, f"no answer for {seconds:.0f} s")


def explain(code: str) -> Explain | None:
    if code == "leaf/down":
        return Explain(Severity.DEGRADED, Clears.PASS, "The leaf is down.", "The rail has no network.", "Look at it.")
    if code in known_codes():
        return Explain(Severity.WARNING, Clears.PASS, "The leaf is ill.", "The rail is slow.", "Look at its log.")
    return None


def known_codes() -> list[str]:
    return ["leaf/down", "leaf/errors", "leaf/hang"]


def explain_more(code: str) -> Explain | None:
    if code not in known_more():
        return None
    return Explain(Severity.INFO, Clears.PASS, "A port of the leaf.", "Its node hangs on it.", "Nothing.")


def known_more() -> list[str]:
    return ["leafport/1"]
