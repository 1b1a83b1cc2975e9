"""The one way in: kernel events and results become conditions. `healthd scan` judges a line as the daemon does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import BOOT, NOW
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import LINES, messages

from healthd.cli.scan import correlate_all
from healthd.config import CheckConfig
from healthd.judge import intake
from healthd.judge.ledger import KEEP_EVENTS, Ledger
from healthd.kernel.source import RawLine, event_of
from healthd.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Finding,
    Inventory,
    KernelEvent,
    Outcome,
    Repair,
    Severity,
)
from healthd.scan import events as scan
from healthd.scan.log_file import Block
from healthd.settings import registry

GPU = "0000:61:00.0"
LISTENERS = [(check, check.config()) for check in registry.built_in().values() if check.listens]
EMPTY = Ledger(boot_id=BOOT)


def xid(number: int, pci: str = GPU[:-2], at: float = NOW, history: bool = False) -> KernelEvent:
    event = event_of(RawLine(at, f"NVRM: Xid (PCI:{pci}): {number}, pid=7, name=x, it failed", history), BOOT)
    assert event is not None
    return event


def heard(ledger: Ledger, *events: KernelEvent) -> Ledger:
    found = intake.heard(ledger, events, LISTENERS, NOW)
    assert not found.mistakes
    return found.ledger


def severities(ledger: Ledger) -> dict[str, Severity]:
    return {condition.code: condition.severity for condition in ledger.conditions}


def test_an_event_becomes_a_condition_and_is_kept_with_its_number():
    ledger = heard(EMPTY, xid(79))
    assert severities(ledger) == {"gpu_xid/79": Severity.CRITICAL}
    assert [(event.code, event.sequence) for event in ledger.events] == [("79", 1)]
    assert ledger.next_sequence == 2


def test_what_was_known_is_no_news_and_an_event_that_grew_is():
    first = intake.heard(EMPTY, [xid(79)], LISTENERS, NOW)
    again = intake.heard(first.ledger, [xid(79, at=NOW + 1), xid(31, at=NOW + 1)], LISTENERS, NOW + 1)
    assert [(event.code, event.lines) for event in again.news] == [("79", 2), ("31", 1)]
    assert intake.heard(again.ledger, [], LISTENERS, NOW + 2).news == ()


def test_history_is_known_and_no_news():
    found = intake.heard(EMPTY, [xid(79, history=True)], LISTENERS, NOW)
    assert found.news == ()
    assert severities(found.ledger) == {"gpu_xid/79": Severity.INFO}


def test_all_of_a_burst_is_judged_and_then_the_oldest_of_the_most_frequent_forgotten():
    burst = [xid(79), *(xid(31, f"{number:04x}:01:00") for number in range(1, KEEP_EVENTS + 100))]
    found = intake.heard(EMPTY, burst, LISTENERS, NOW)
    assert severities(found.ledger)["gpu_xid/79"] is Severity.CRITICAL
    assert (len(found.ledger.events), found.forgotten) == (KEEP_EVENTS, 100)


def test_what_was_repaired_makes_no_later_line_worse():
    ledger = heard(EMPTY, xid(74))
    (known,) = ledger.conditions
    over = dataclasses.replace(known, state=ConditionState.CLEARED, cleared_at=NOW + 60, cleared_by="repaired by ann")
    settled = dataclasses.replace(ledger, conditions=(), cleared=(over,))
    alone = severities(heard(settled, xid(74, at=NOW + 3600)))
    assert alone == severities(ledger), "as if it were the first"
    assert severities(heard(ledger, xid(74, at=NOW + 3600))) != alone


def test_the_repair_that_a_line_is_evidence_of_ends_what_waited_for_it():
    fault = dataclasses.replace(
        next(iter(heard(EMPTY, xid(79)).conditions)), clears=Clears.GPU_RESET, last_event=NOW - 60
    )

    class Resets:
        name = "resets"

        def correlate(self, *_: Any) -> list[Finding]:
            return []

        def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]:
            return [Repair(Clears.GPU_RESET, GPU, "it was reset", NOW - 1) for _ in events]

    known = dataclasses.replace(EMPTY, conditions=(fault,))
    after = intake.heard(known, [xid(31, "0000:ff:00")], [(Resets(), CheckConfig())], NOW).ledger
    assert after.conditions == ()
    assert [(c.code, c.state, c.cleared_at) for c in after.cleared] == [("gpu_xid/79", ConditionState.CLEARED, NOW)]


def test_an_event_that_a_check_fails_on_is_a_line_that_could_not_be_read_and_costs_no_other():
    odd = dataclasses.replace(xid(48), code="3x1")
    found = intake.heard(EMPTY, [odd, xid(79)], LISTENERS, NOW)
    assert [event.code for event, _ in found.mistakes] == ["3x1"]
    assert sorted(severities(found.ledger)) == ["gpu_xid/79", "kernel/unread"]
    assert not intake.heard(found.ledger, [xid(31)], LISTENERS, NOW).mistakes, "it is told of once"


def test_the_site_s_severity_holds():
    quiet = [
        (check, dataclasses.replace(config, severity={"gpu_xid/79": Severity.INFO})) for check, config in LISTENERS
    ]
    (condition,) = intake.heard(EMPTY, [xid(79)], quiet, NOW).ledger.conditions
    assert (condition.severity, condition.found) == (Severity.INFO, Severity.CRITICAL)


def test_the_jobs_that_became_known_later_are_those_of_the_event_and_its_condition():
    ledger = intake.told_of_jobs(heard(EMPTY, xid(79)), {1: "4711"}, LISTENERS, NOW)
    assert [condition.job for condition in ledger.conditions] == ["4711"]
    assert [event.field("job") for event in ledger.events] == ["4711"]


@pytest.mark.parametrize(
    ("outcome", "ended"), [(Outcome.COMPLETED, True), (Outcome.FAILED, True), (Outcome.TIMED_OUT, False)]
)
def test_what_a_run_saw_of_a_repair_counts_where_it_could_not_read_all(outcome: Outcome, ended: bool):
    waits = Finding(Severity.CRITICAL, "gpu_ecc/x", GPU, "it waits", clears=Clears.GPU_RESET)
    saw = CheckResult("gpu_ecc", "", Outcome.COMPLETED, NOW, 0.1, (waits,))
    ledger = intake.looked(EMPTY, saw, CheckConfig(), NOW)
    repair = Repair(Clears.GPU_RESET, GPU, "its counters fell", NOW + 1)
    after = CheckResult("gpu_ecc", "", outcome, NOW + 300, 0.1, repairs=(repair,))
    assert [c.code for c in intake.looked(ledger, after, CheckConfig(), NOW + 300).cleared] == ["gpu_ecc/x"] * ended


# --- a log of another machine is judged by the same steps


def scanned(lines: Sequence[str]) -> list[scan.Judged]:
    blocks = [Block(1, [line.encode() for line in lines])] if lines else []
    return list(scan.judged(scan.events(blocks, NOW, scan.Tally()), correlate_all()))


def worst(conditions: Sequence[Condition]) -> Severity:
    return max((condition.severity for condition in conditions), default=Severity.INFO)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in LINES])
def test_scan_finds_a_line_as_bad_as_the_daemon_does(row: dict[str, Any]):
    """With what the log itself has shown of its machine: more is not known of another's."""
    lines = [f"kernel: {message}" for message in messages(row["text"])]
    judged = scanned(lines)
    events = [event for line in lines if (event := event_of(RawLine(NOW, line[8:]), BOOT)) is not None]
    node = judged[-1].meaning.node if judged else Inventory()
    ledger = heard(dataclasses.replace(EMPTY, inventory=node), *events)
    assert max((one.severity for one in judged), default=Severity.INFO) == worst(ledger.conditions)


def test_scan_finds_a_log_of_many_lines_as_bad_as_the_daemon_does():
    """Each code as bad at its worst: among them faults that repetition makes worse."""
    lines = [f"kernel: {message}" for row in LINES for message in messages(row["text"])]
    told: dict[str, Severity] = {}
    devices = {}
    for one in scanned([f"[{60.0 * n:12.6f}] {line[8:]}" for n, line in enumerate(lines, 1)]):
        told[one.code] = max(one.severity, told.get(one.code, Severity.INFO))
        devices.update({device.pci: device for device in one.meaning.node.devices})
    ledger = dataclasses.replace(EMPTY, inventory=Inventory(devices=tuple(devices.values())))
    known: dict[str, Severity] = {}
    for n, line in enumerate(lines, 1):
        event = event_of(RawLine(NOW + 60.0 * n, line[8:]), BOOT)
        if event is not None:
            ledger = heard(ledger, event)
            for condition in ledger.conditions:
                known[condition.code] = max(condition.severity, known.get(condition.code, Severity.INFO))
    # How bad a GSP's words are tells the failure beside them, which scan shows as an event of the same incident.
    both = (told.keys() & known.keys()) - {"gpu_xid/gsp"}
    assert len(both) > 50
    assert {code: told[code] for code in both} == {code: known[code] for code in both}


@given(st.lists(st.tuples(st.sampled_from([13, 31, 48, 74, 79, 95]), st.integers(0, 3), st.booleans()), max_size=12))
def test_no_burst_is_judged_twice_or_lost_whatever_it_is_cut_into(burst: list[tuple[int, int, bool]]):
    """All at once, or event by event: the same conditions stand, as bad, of as many events."""
    events = [xid(n, f"0000:{gpu:02x}:00", NOW + 10 * at) for at, (n, gpu, _) in enumerate(burst)]
    together = heard(EMPTY, *events)
    one_by_one, part = EMPTY, []
    for event, (_, _, ends) in zip(events, burst, strict=True):
        part.append(event)
        if ends:
            one_by_one, part = heard(one_by_one, *part), []
    one_by_one = heard(one_by_one, *part)

    def facts(ledger: Ledger) -> set[tuple[Any, ...]]:
        return {(c.key, c.severity, c.count, c.last_event) for c in ledger.conditions}

    assert facts(one_by_one) == facts(together)
    assert one_by_one.events == together.events
