"""Tests of the intake of kernel events and results, and that `healthd scan` evaluates a line like the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fakes import BOOT, NOW
from hypothesis import given
from hypothesis import strategies as st
from kernel_lines import LINES, messages
from msgspec.structs import replace

from healthd.agent.conditions import endings, intake
from healthd.agent.conditions.ledger import MAX_EVENTS, Ledger, with_conditions
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings import registry
from healthd.agent.settings.config import CheckConfig
from healthd.cli.scan import correlate_all
from healthd.common.model import (
    CheckResult,
    Clears,
    Condition,
    ConditionState,
    Ending,
    Failures,
    Finding,
    Gpu,
    Inventory,
    KernelEvent,
    Outcome,
    Repair,
    Severity,
)
from healthd.scan import events as scan
from healthd.scan import findings as scan_judged
from healthd.scan.lines import Block, Tally

GPU = "0000:61:00.0"
LISTENERS = [(check, check.config()) for check in registry.built_in_checks().values() if check.reads_kernel_log]
EMPTY = Ledger(boot_id=BOOT)


def xid(number: int, pci: str = GPU[:-2], at: float = NOW, history: bool = False) -> KernelEvent:
    event = make_event(RawLine(at, f"NVRM: Xid (PCI:{pci}): {number}, pid=7, name=x, it failed", history), BOOT)
    assert event is not None
    return event


def heard(ledger: Ledger, *events: KernelEvent) -> Ledger:
    found = intake.take_kernel_events(ledger, events, LISTENERS, NOW)
    assert not found.failures
    return found.ledger


def severities(ledger: Ledger) -> dict[str, Severity]:
    return {condition.code: condition.severity for condition in ledger.conditions}


def test_an_event_becomes_a_condition_and_is_kept_with_its_number():
    ledger = heard(EMPTY, xid(79))
    assert severities(ledger) == {"gpu_xid/79": Severity.CRITICAL}
    assert [(event.code, event.sequence) for event in ledger.events] == [("79", 1)]
    assert ledger.next_sequence == 2


@pytest.mark.parametrize("name", ["ib\ufeff", "enp\u2028s0f0", "ml\x7f5_0", "p\u202e1"])
def test_the_name_of_a_part_is_printable_whatever_the_kernel_was_told_to_call_it(name: str):
    line = f"mlx5_core 0000:5e:00.0 {name}: TX timeout detected"
    event = make_event(RawLine(NOW, line, False), BOOT)
    assert event is not None
    (condition,) = heard(EMPTY, event).conditions
    assert condition.subject.isprintable()
    assert str(condition.key).isprintable()


def test_what_was_known_is_no_news_and_an_event_that_grew_is():
    first = intake.take_kernel_events(EMPTY, [xid(79)], LISTENERS, NOW)
    again = intake.take_kernel_events(first.ledger, [xid(79, at=NOW + 1), xid(31, at=NOW + 1)], LISTENERS, NOW + 1)
    assert [(event.code, event.lines) for event in again.new_events] == [("79", 2), ("31", 1)]
    assert intake.take_kernel_events(again.ledger, [], LISTENERS, NOW + 2).new_events == ()


def test_history_is_known_and_no_news():
    found = intake.take_kernel_events(EMPTY, [xid(79, history=True)], LISTENERS, NOW)
    assert found.new_events == ()
    assert severities(found.ledger) == {"gpu_xid/79": Severity.INFO}


def test_all_of_a_burst_is_judged_and_then_the_oldest_of_the_most_frequent_forgotten():
    burst = [xid(79), *(xid(31, f"{number:04x}:01:00") for number in range(1, MAX_EVENTS + 100))]
    found = intake.take_kernel_events(EMPTY, burst, LISTENERS, NOW)
    assert severities(found.ledger)["gpu_xid/79"] is Severity.CRITICAL
    assert (len(found.ledger.events), found.forgotten) == (MAX_EVENTS, 100)


def test_what_was_repaired_makes_no_later_line_worse():
    ledger = heard(EMPTY, xid(74))
    (known,) = ledger.conditions
    over = replace(known, state=ConditionState.CLEARED, cleared_at=NOW + 60, cleared_by="repaired by ann")
    settled = replace(ledger, conditions=(), cleared=(over,))
    alone = severities(heard(settled, xid(74, at=NOW + 3600)))
    assert alone == severities(ledger), "like the first line"
    assert severities(heard(ledger, xid(74, at=NOW + 3600))) != alone


def test_the_repair_that_a_line_is_evidence_of_ends_what_waited_for_it():
    fault = replace(next(iter(heard(EMPTY, xid(79)).conditions)), clears=Clears.GPU_RESET, last_event=NOW - 60)

    class Resets:
        name = "resets"

        def correlate(self, *_: Any) -> tuple[list[Finding], Failures]:
            return [], ()

        def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]:
            return [Repair(Clears.GPU_RESET, GPU, "it was reset", NOW - 1) for _ in events]

    known = replace(EMPTY, conditions=(fault,))
    after = intake.take_kernel_events(known, [xid(31, "0000:ff:00")], [(Resets(), CheckConfig())], NOW).ledger
    assert after.conditions == ()
    assert [(c.code, c.state, c.cleared_at) for c in after.cleared] == [("gpu_xid/79", ConditionState.CLEARED, NOW)]


def test_an_event_that_a_check_fails_on_is_a_line_that_could_not_be_read_and_costs_no_other():
    class Stumbles:
        name = "stumbles"

        def correlate(self, events: Sequence[KernelEvent], *_: Any) -> tuple[list[Finding], Failures]:
            return [], tuple((event, ValueError(event.code)) for event in events if event.code == "48")

        def repairs(self, _: Sequence[KernelEvent]) -> list[Repair]:
            return []

    listeners = [*LISTENERS, (Stumbles(), CheckConfig())]
    found = intake.take_kernel_events(EMPTY, [xid(48), xid(79)], listeners, NOW)
    assert [event.code for event, _ in found.failures] == ["48"]
    assert sorted(severities(found.ledger)) == ["gpu_xid/79", "kernel/rule_failed"]
    assert not intake.take_kernel_events(found.ledger, [xid(31)], listeners, NOW).failures, "reported only once"


def test_the_site_s_severity_holds():
    quiet = [(check, replace(config, severity={"gpu_xid/79": Severity.INFO})) for check, config in LISTENERS]
    (condition,) = intake.take_kernel_events(EMPTY, [xid(79)], quiet, NOW).ledger.conditions
    assert (condition.severity, condition.found_severity) == (Severity.INFO, Severity.CRITICAL)


def test_the_jobs_that_became_known_later_are_those_of_the_event_and_its_condition():
    ledger = intake.take_jobs(heard(EMPTY, xid(79)), {1: "4711"}, LISTENERS)
    assert [condition.job for condition in ledger.conditions] == ["4711"]
    assert [event.field("job") for event in ledger.events] == ["4711"]


@pytest.mark.parametrize(
    ("outcome", "ended"), [(Outcome.COMPLETED, True), (Outcome.FAILED, True), (Outcome.TIMED_OUT, False)]
)
def test_what_a_run_saw_of_a_repair_counts_where_it_could_not_read_all(outcome: Outcome, ended: bool):
    waits = Finding(Severity.CRITICAL, "gpu_ecc/x", GPU, "it waits", clears=Clears.GPU_RESET)
    saw = CheckResult("gpu_ecc", "", Outcome.COMPLETED, NOW, 0.1, (waits,))
    ledger = intake.take_result(EMPTY, saw, CheckConfig(), NOW).ledger
    repair = Repair(Clears.GPU_RESET, GPU, "its counters fell", NOW + 1)
    after = CheckResult("gpu_ecc", "", outcome, NOW + 300, 0.1, repairs=(repair,))
    ledger = intake.take_result(ledger, after, CheckConfig(), NOW + 300).ledger
    assert [c.code for c in ledger.cleared] == ["gpu_ecc/x"] * ended


def test_what_a_run_finds_is_judged_as_the_site_wants_it_as_what_is_heard_is() -> None:
    saw = CheckResult("gpu_ecc", "", Outcome.COMPLETED, NOW, 0.1, (Finding(Severity.CRITICAL, "gpu_ecc/x", GPU, "m"),))
    for config, severity in (
        (CheckConfig(), Severity.CRITICAL),
        (CheckConfig(enforce=False), Severity.WARNING),
        (CheckConfig(severity={"gpu_ecc/x": Severity.INFO}), Severity.INFO),
    ):
        ledger, result = intake.take_result(EMPTY, saw, config, NOW)
        assert [c.severity for c in ledger.conditions] == [f.severity for f in result.findings] == [severity]


# --- `healthd scan` takes the same steps for a log of another machine


def scanned(lines: Sequence[str]) -> list[scan_judged.Judged]:
    blocks = [Block.from_lines(1, [line.encode() for line in lines])] if lines else []
    return list(scan_judged.judge(scan.events(blocks, NOW, Tally()), correlate_all()))


def worst(conditions: Sequence[Condition]) -> Severity:
    return max((condition.severity for condition in conditions), default=Severity.INFO)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in LINES])
def test_scan_finds_a_line_as_bad_as_the_daemon_does(row: dict[str, Any]):
    """scan knows of the other machine only what the log itself shows."""
    lines = [f"kernel: {message}" for message in messages(row["text"])]
    judged = scanned(lines)
    events = [event for line in lines if (event := make_event(RawLine(NOW, line[8:]), BOOT)) is not None]
    node = judged[-1].meaning.node if judged else Inventory()
    ledger = heard(replace(EMPTY, inventory=node), *events)
    proven = [one.severity for one in judged if not one.unproven]
    assert max(proven, default=Severity.INFO) == worst(ledger.conditions)


def test_scan_finds_a_log_of_many_lines_as_bad_as_the_daemon_does():
    """Each code has the same severity at its worst, also for faults that become worse by repetition."""
    lines = [f"kernel: {message}" for row in LINES for message in messages(row["text"])]
    told: dict[str, Severity] = {}
    devices = {}
    for one in scanned([f"[{60.0 * n:12.6f}] {line[8:]}" for n, line in enumerate(lines, 1)]):
        told[one.code] = max(one.severity, told.get(one.code, Severity.INFO))
        devices.update({device.pci: device for device in one.meaning.node.devices})
    ledger = replace(EMPTY, inventory=Inventory(devices=tuple(devices.values())))
    known: dict[str, Severity] = {}
    for n, line in enumerate(lines, 1):
        event = make_event(RawLine(NOW + 60.0 * n, line[8:]), BOOT)
        if event is not None:
            ledger = heard(ledger, event)
            for condition in ledger.conditions:
                known[condition.code] = max(condition.severity, known.get(condition.code, Severity.INFO))
    # The severity of a GSP line follows from the related failure, which scan shows as an event of the same incident.
    both = (told.keys() & known.keys()) - {"gpu_xid/gsp"}
    assert len(both) > 50
    assert {code: told[code] for code in both} == {code: known[code] for code in both}


@given(st.lists(st.tuples(st.sampled_from([13, 31, 48, 74, 79, 95]), st.integers(0, 3), st.booleans()), max_size=12))
def test_no_burst_is_judged_twice_or_lost_whatever_it_is_cut_into(burst: list[tuple[int, int, bool]]):
    """Taken in one burst or in parts, the events give the same conditions, severities and counts."""
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


# --- the inventory becomes known after the fault

SEEN_LATER = Inventory(gpus=(Gpu(GPU, 3, "GPU-3", "H100"),), driver_version="570")


def test_a_fault_that_was_read_before_the_first_inventory_names_its_gpu_afterwards():
    before = heard(EMPTY, xid(79))
    (nameless,) = before.conditions
    assert "GPU 3" not in nameless.message
    after = intake.take_inventory(before, SEEN_LATER, LISTENERS)
    (named,) = after.conditions
    assert (named.key, named.message) == (nameless.key, "Xid 79: GPU has fallen off the bus, GPU 3 (GPU-3), x (pid 7)")
    assert replace(named, message=nameless.message) == nameless
    assert after.inventory == SEEN_LATER
    assert intake.take_inventory(after, SEEN_LATER, LISTENERS) == after


def test_history_is_named_too_and_stays_history():
    after = intake.take_inventory(heard(EMPTY, xid(79, history=True)), SEEN_LATER, LISTENERS)
    assert [(c.history, c.severity, "GPU 3" in c.message) for c in after.conditions] == [(True, Severity.INFO, True)]


def test_a_gpu_that_was_exchanged_does_not_give_its_name_to_the_fault_of_the_one_before():
    before = heard(replace(EMPTY, inventory=SEEN_LATER), xid(79))
    other = replace(SEEN_LATER, gpus=(Gpu(GPU, 3, "GPU-NEW", "H100"),), dmi_product="DGX")
    after = intake.take_inventory(before, other, LISTENERS)
    assert (after.conditions, after.inventory) == (before.conditions, other)


def test_what_was_repaired_before_the_inventory_came_does_not_come_back():
    before = heard(EMPTY, xid(79))
    (condition,) = before.conditions
    over = with_conditions(before, endings.repaired(before.by_key(), condition.code, None, "ann", NOW + 1))
    assert intake.take_inventory(over, SEEN_LATER, LISTENERS).conditions == ()


def test_a_line_that_has_only_the_drivers_number_of_a_gpu_gets_its_address_and_counts_once():
    text = "NVRM: GPU3 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted."
    event = make_event(RawLine(NOW, text), BOOT)
    assert event is not None
    before = heard(EMPTY, event)
    (old,) = before.conditions
    after = intake.take_inventory(before, SEEN_LATER, LISTENERS)
    assert [(c.code, c.subject, c.count) for c in after.conditions] == [(old.code, GPU, old.count)]
    assert [(c.key, c.ending, c.cleared_by) for c in after.cleared] == [
        (old.key, Ending.RENAMED, f"renamed to {old.code} {GPU}")
    ]
