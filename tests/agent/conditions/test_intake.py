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


def take(ledger: Ledger, *events: KernelEvent) -> Ledger:
    taken = intake.take_kernel_events(ledger, events, LISTENERS, NOW)
    assert not taken.failures
    return taken.ledger


def severities(ledger: Ledger) -> dict[str, Severity]:
    return {condition.code: condition.severity for condition in ledger.conditions}


def test_event_becomes_condition_and_is_kept():
    ledger = take(EMPTY, xid(79))
    assert severities(ledger) == {"gpu_xid/79": Severity.CRITICAL}
    assert [(event.code, event.sequence) for event in ledger.events] == [("79", 1)]
    assert ledger.next_sequence == 2


@pytest.mark.parametrize("name", ["ib\ufeff", "enp\u2028s0f0", "ml\x7f5_0", "p\u202e1"])
def test_part_name_is_printable(name: str):
    line = f"mlx5_core 0000:5e:00.0 {name}: TX timeout detected"
    event = make_event(RawLine(NOW, line, False), BOOT)
    assert event is not None
    (condition,) = take(EMPTY, event).conditions
    assert condition.subject.isprintable()
    assert str(condition.key).isprintable()


def test_new_events_has_new_and_grown_events():
    first = intake.take_kernel_events(EMPTY, [xid(79)], LISTENERS, NOW)
    second = intake.take_kernel_events(first.ledger, [xid(79, at=NOW + 1), xid(31, at=NOW + 1)], LISTENERS, NOW + 1)
    assert [(event.code, event.lines) for event in second.new_events] == [("79", 2), ("31", 1)]
    assert intake.take_kernel_events(second.ledger, [], LISTENERS, NOW + 2).new_events == ()


def test_history_is_not_in_new_events():
    taken = intake.take_kernel_events(EMPTY, [xid(79, history=True)], LISTENERS, NOW)
    assert taken.new_events == ()
    assert severities(taken.ledger) == {"gpu_xid/79": Severity.INFO}


def test_burst_is_evaluated_before_oldest_events_are_dropped():
    burst = [xid(79), *(xid(31, f"{number:04x}:01:00") for number in range(1, MAX_EVENTS + 100))]
    taken = intake.take_kernel_events(EMPTY, burst, LISTENERS, NOW)
    assert severities(taken.ledger)["gpu_xid/79"] is Severity.CRITICAL
    assert (len(taken.ledger.events), taken.forgotten) == (MAX_EVENTS, 100)


def test_repaired_fault_does_not_worsen_later_line():
    ledger = take(EMPTY, xid(74))
    (condition,) = ledger.conditions
    repaired = replace(condition, state=ConditionState.CLEARED, cleared_at=NOW + 60, cleared_by="repaired by ann")
    after_repair = replace(ledger, conditions=(), cleared=(repaired,))
    expected = severities(take(after_repair, xid(74, at=NOW + 3600)))
    assert expected == severities(ledger), "like the first line"
    assert severities(take(ledger, xid(74, at=NOW + 3600))) != expected


def test_repair_in_kernel_log_clears_waiting_condition():
    fault = replace(next(iter(take(EMPTY, xid(79)).conditions)), clears=Clears.GPU_RESET, last_event=NOW - 60)

    class ResetCheck:
        name = "resets"

        def correlate(self, *_: Any) -> tuple[list[Finding], Failures]:
            return [], ()

        def repairs(self, events: Sequence[KernelEvent]) -> list[Repair]:
            return [Repair(Clears.GPU_RESET, GPU, "it was reset", NOW - 1) for _ in events]

    ledger = replace(EMPTY, conditions=(fault,))
    after = intake.take_kernel_events(ledger, [xid(31, "0000:ff:00")], [(ResetCheck(), CheckConfig())], NOW).ledger
    assert after.conditions == ()
    assert [(c.code, c.state, c.cleared_at) for c in after.cleared] == [("gpu_xid/79", ConditionState.CLEARED, NOW)]


def test_check_that_fails_on_event_reports_rule_failed():
    class FailingCheck:
        name = "stumbles"

        def correlate(self, events: Sequence[KernelEvent], *_: Any) -> tuple[list[Finding], Failures]:
            return [], tuple((event, ValueError(event.code)) for event in events if event.code == "48")

        def repairs(self, _: Sequence[KernelEvent]) -> list[Repair]:
            return []

    listeners = [*LISTENERS, (FailingCheck(), CheckConfig())]
    taken = intake.take_kernel_events(EMPTY, [xid(48), xid(79)], listeners, NOW)
    assert [event.code for event, _ in taken.failures] == ["48"]
    assert sorted(severities(taken.ledger)) == ["gpu_xid/79", "kernel/rule_failed"]
    assert not intake.take_kernel_events(taken.ledger, [xid(31)], listeners, NOW).failures, "reported only once"


def test_severity_from_site_overrides_found_severity():
    configured = [(check, replace(config, severity={"gpu_xid/79": Severity.INFO})) for check, config in LISTENERS]
    (condition,) = intake.take_kernel_events(EMPTY, [xid(79)], configured, NOW).ledger.conditions
    assert (condition.severity, condition.found_severity) == (Severity.INFO, Severity.CRITICAL)


def test_take_jobs_adds_job_to_event_and_condition():
    ledger = intake.take_jobs(take(EMPTY, xid(79)), {1: "4711"}, LISTENERS)
    assert [condition.job for condition in ledger.conditions] == ["4711"]
    assert [event.field("job") for event in ledger.events] == ["4711"]


@pytest.mark.parametrize(
    ("outcome", "cleared_count"), [(Outcome.COMPLETED, True), (Outcome.FAILED, True), (Outcome.TIMED_OUT, False)]
)
def test_take_result_accepts_repair_from_failed_run(outcome: Outcome, cleared_count: bool):
    waiting = Finding(Severity.CRITICAL, "gpu_ecc/x", GPU, "it waits", clears=Clears.GPU_RESET)
    first = CheckResult("gpu_ecc", "", Outcome.COMPLETED, NOW, 0.1, (waiting,))
    ledger = intake.take_result(EMPTY, first, CheckConfig(), NOW).ledger
    repair = Repair(Clears.GPU_RESET, GPU, "its counters fell", NOW + 1)
    after = CheckResult("gpu_ecc", "", outcome, NOW + 300, 0.1, repairs=(repair,))
    ledger = intake.take_result(ledger, after, CheckConfig(), NOW + 300).ledger
    assert [c.code for c in ledger.cleared] == ["gpu_ecc/x"] * cleared_count


def test_take_result_applies_site_settings() -> None:
    check_result = CheckResult(
        "gpu_ecc", "", Outcome.COMPLETED, NOW, 0.1, (Finding(Severity.CRITICAL, "gpu_ecc/x", GPU, "m"),)
    )
    for config, severity in (
        (CheckConfig(), Severity.CRITICAL),
        (CheckConfig(enforce=False), Severity.WARNING),
        (CheckConfig(severity={"gpu_ecc/x": Severity.INFO}), Severity.INFO),
    ):
        ledger, result = intake.take_result(EMPTY, check_result, config, NOW)
        assert [c.severity for c in ledger.conditions] == [f.severity for f in result.findings] == [severity]


# --- `healthd scan` takes the same steps for a log of another machine


def scanned(lines: Sequence[str]) -> list[scan_judged.Judged]:
    blocks = [Block.from_lines(1, [line.encode() for line in lines])] if lines else []
    return list(scan_judged.judge(scan.events(blocks, NOW, Tally()), correlate_all()))


def worst(conditions: Sequence[Condition]) -> Severity:
    return max((condition.severity for condition in conditions), default=Severity.INFO)


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in LINES])
def test_scan_severity_equals_daemon_severity_for_line(row: dict[str, Any]):
    """scan knows of the other machine only what the log itself shows."""
    lines = [f"kernel: {message}" for message in messages(row["text"])]
    judged = scanned(lines)
    events = [event for line in lines if (event := make_event(RawLine(NOW, line[8:]), BOOT)) is not None]
    inventory = judged[-1].meaning.node if judged else Inventory()
    ledger = take(replace(EMPTY, inventory=inventory), *events)
    proven = [record.severity for record in judged if not record.unproven]
    assert max(proven, default=Severity.INFO) == worst(ledger.conditions)


def test_scan_severity_equals_daemon_severity_for_log():
    """Each code has the same severity at its worst, also for faults that become worse by repetition."""
    lines = [f"kernel: {message}" for row in LINES for message in messages(row["text"])]
    scanned_severity: dict[str, Severity] = {}
    devices = {}
    for record in scanned([f"[{60.0 * n:12.6f}] {line[8:]}" for n, line in enumerate(lines, 1)]):
        scanned_severity[record.code] = max(record.severity, scanned_severity.get(record.code, Severity.INFO))
        devices.update({device.pci: device for device in record.meaning.node.devices})
    ledger = replace(EMPTY, inventory=Inventory(devices=tuple(devices.values())))
    daemon_severity: dict[str, Severity] = {}
    for n, line in enumerate(lines, 1):
        event = make_event(RawLine(NOW + 60.0 * n, line[8:]), BOOT)
        if event is not None:
            ledger = take(ledger, event)
            for condition in ledger.conditions:
                daemon_severity[condition.code] = max(
                    condition.severity, daemon_severity.get(condition.code, Severity.INFO)
                )
    # The severity of a GSP line follows from the related failure, which scan shows as an event of the same incident.
    common = (scanned_severity.keys() & daemon_severity.keys()) - {"gpu_xid/gsp"}
    assert len(common) > 50
    assert {code: scanned_severity[code] for code in common} == {code: daemon_severity[code] for code in common}


@given(st.lists(st.tuples(st.sampled_from([13, 31, 48, 74, 79, 95]), st.integers(0, 3), st.booleans()), max_size=12))
def test_conditions_do_not_depend_on_burst_boundaries(burst: list[tuple[int, int, bool]]):
    """Taken in one burst or in parts, the events give the same conditions, severities and counts."""
    events = [xid(n, f"0000:{gpu:02x}:00", NOW + 10 * at) for at, (n, gpu, _) in enumerate(burst)]
    together = take(EMPTY, *events)
    in_parts, part = EMPTY, []
    for event, (_, _, ends) in zip(events, burst, strict=True):
        part.append(event)
        if ends:
            in_parts, part = take(in_parts, *part), []
    in_parts = take(in_parts, *part)

    def facts(ledger: Ledger) -> set[tuple[Any, ...]]:
        return {(c.key, c.severity, c.count, c.last_event) for c in ledger.conditions}

    assert facts(in_parts) == facts(together)
    assert in_parts.events == together.events


# --- the inventory becomes known after the fault

FIRST_INVENTORY = Inventory(gpus=(Gpu(GPU, 3, "GPU-3", "H100"),), driver_version="570")


def test_take_inventory_names_gpu_for_earlier_fault():
    before = take(EMPTY, xid(79))
    (unnamed,) = before.conditions
    assert "GPU 3" not in unnamed.message
    after = intake.take_inventory(before, FIRST_INVENTORY, LISTENERS)
    (named,) = after.conditions
    assert (named.key, named.message) == (unnamed.key, "Xid 79: GPU has fallen off the bus, GPU 3 (GPU-3), x (pid 7)")
    assert replace(named, message=unnamed.message) == unnamed
    assert after.inventory == FIRST_INVENTORY
    assert intake.take_inventory(after, FIRST_INVENTORY, LISTENERS) == after


def test_take_inventory_names_history():
    after = intake.take_inventory(take(EMPTY, xid(79, history=True)), FIRST_INVENTORY, LISTENERS)
    assert [(c.history, c.severity, "GPU 3" in c.message) for c in after.conditions] == [(True, Severity.INFO, True)]


def test_take_inventory_keeps_fault_on_replaced_gpu():
    before = take(replace(EMPTY, inventory=FIRST_INVENTORY), xid(79))
    replaced = replace(FIRST_INVENTORY, gpus=(Gpu(GPU, 3, "GPU-NEW", "H100"),), dmi_product="DGX")
    after = intake.take_inventory(before, replaced, LISTENERS)
    assert (after.conditions, after.inventory) == (before.conditions, replaced)


def test_take_inventory_keeps_the_last_nvlink_domain():
    joined = intake.take_inventory(EMPTY, replace(FIRST_INVENTORY, domain="d-1"), LISTENERS)
    for lost in (None, ""):
        after = intake.take_inventory(joined, replace(FIRST_INVENTORY, domain=lost), LISTENERS)
        assert after.inventory.domain == "d-1"
    assert intake.take_inventory(joined, replace(FIRST_INVENTORY, domain="d-2"), LISTENERS).inventory.domain == "d-2"
    assert intake.take_inventory(EMPTY, replace(FIRST_INVENTORY, domain=""), LISTENERS).inventory.domain == ""


def test_take_inventory_does_not_reopen_repaired_fault():
    before = take(EMPTY, xid(79))
    (condition,) = before.conditions
    repaired = with_conditions(before, endings.repaired(before.by_key(), condition.code, None, "ann", NOW + 1))
    assert intake.take_inventory(repaired, FIRST_INVENTORY, LISTENERS).conditions == ()


def test_take_inventory_resolves_gpu_number_to_address():
    text = "NVRM: GPU3 _kgspRpcGspEventPmuHalted: Received signal from GSP that PMU has halted."
    event = make_event(RawLine(NOW, text), BOOT)
    assert event is not None
    before = take(EMPTY, event)
    (old,) = before.conditions
    after = intake.take_inventory(before, FIRST_INVENTORY, LISTENERS)
    assert [(c.code, c.subject, c.count) for c in after.conditions] == [(old.code, GPU, old.count)]
    assert [(c.key, c.ending, c.cleared_by) for c in after.cleared] == [
        (old.key, Ending.RENAMED, f"renamed to {old.code} {GPU}")
    ]
