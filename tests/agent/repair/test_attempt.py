"""The progress of a repair: claim, step, verification, and what follows from each outcome."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from healthd.agent.repair.attempt import (
    ActContext,
    Change,
    View,
    act_obstacles,
    advance,
    after_mode,
    after_order,
    after_stop,
    is_fresh,
    must_withdraw,
    next_moment,
    resume_wait,
    wanted_claim,
)
from healthd.agent.repair.journal import Entry, Journal, Outcome, with_entry
from healthd.agent.reporting.repair import SKIPPED_BY_ORDER
from healthd.agent.settings.config import RepairConfig
from healthd.common.model import DrainRecord, RepairClaim, RepairMode, RepairStep
from healthd.common.repair_plan import (
    Attempt,
    AttemptStage,
    CauseStep,
    FailedStep,
    Obstacle,
    Plan,
    Reason,
    RepairRecord,
    TakenStep,
)
from healthd.events.schema import EVENTS

GPU_RESET, REBOOT, POWER_CYCLE, PERSON = RepairStep
GPU, CODE = "0000:1b:00.0", "gpu_xid/119"
CAUSE = f"{CODE} {GPU}"
ACT = RepairConfig(RepairMode.ACT)
NOW, BOOT = 1_000_000.0, "boot-2"
ID = "20261129T060000Z-gpu_reset"
JOURNAL = Journal("boot-1")


def plan(step: RepairStep = GPU_RESET, *obstacles: Obstacle, parts: tuple[str, ...] = (GPU,)) -> Plan:
    following = {GPU_RESET: REBOOT, REBOOT: PERSON, PERSON: PERSON}[step]
    return Plan(step, following, (CauseStep(CODE, GPU, step, Reason.REMEDY),), parts, obstacles)


def view(**changes: Any) -> View:
    """Return the view of a drained, idle node with one fault that a reset ends."""
    drain = DrainRecord(reason="healthd: ...", drained_at=NOW - 60)
    usual = View(
        *(NOW, BOOT, plan(), (CAUSE,), (), (), drain, JOURNAL),
        is_served=True,
        is_stalled=False,
        is_drained=True,
        was_resumed=False,
        is_taken_over=False,
        is_clean=False,
        has_checked=False,
        is_held=False,
        is_driver_stuck=False,
        stopped="",
    )
    return usual._replace(**changes)


def context(**changes: Any) -> ActContext:
    return ActContext(JOURNAL, is_evidence_open=False, is_stalled=False, now=NOW, boot_id=BOOT)._replace(**changes)


def attempt(stage: AttemptStage, step: RepairStep = GPU_RESET, **changes: Any) -> Attempt:
    return Attempt(ID, step, stage, NOW - 10, BOOT, (CAUSE,), (), (GPU,), **changes)


def taking(step: RepairStep = GPU_RESET, **changes: Any) -> RepairRecord:
    return RepairRecord(plan(step), attempt(AttemptStage.STEP, step, **changes))


def verifying(step: RepairStep = GPU_RESET, **changes: Any) -> RepairRecord:
    """Return a record in stage VERIFY, which began 5 seconds ago."""
    usual = {"taken": TakenStep(ID, NOW - 5), "verify_since": NOW - 5}
    return RepairRecord(plan(step), attempt(AttemptStage.VERIFY, step), **{**usual, **changes})


def entry(outcome: Outcome, step: RepairStep = GPU_RESET, **changes: Any) -> Entry:
    return Entry(
        ID, step, changes.pop("at", NOW - 8), changes.pop("boot_id", BOOT), outcome, (CAUSE,), (GPU,), **changes
    )


def journal(outcome: Outcome, step: RepairStep = GPU_RESET, **changes: Any) -> Journal:
    return with_entry(JOURNAL, entry(outcome, step, **changes))


def step_once(record: RepairRecord, config: RepairConfig = ACT, **changes: Any) -> Change:
    """Advance once. Every event must match the schema."""
    change = advance(record, view(**changes), config, ID)
    for event in change.events:
        fields = EVENTS[event.name]
        assert {*fields.required} <= {*event.fields} <= {*fields.required, *fields.optional}
        assert event.fields["stage"] in fields.stages
    return change


def stages(change: Change) -> list[object]:
    return [event.fields["stage"] for event in change.events]


# --- before the claim


def test_drained_node_with_fault_claims_its_step() -> None:
    change = step_once(RepairRecord(plan()))
    assert change.record.attempt == Attempt(ID, GPU_RESET, AttemptStage.CLAIM, NOW, BOOT, (CAUSE,), (), (GPU,))
    assert stages(change) == [], "the claim is not in Slurm yet"


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (RepairRecord(), {"plan": plan(GPU_RESET, Obstacle.JOBS)}),
        (RepairRecord(), {"plan": plan(PERSON)}),
        (RepairRecord(), {"plan": None}),
        (RepairRecord(), {"is_drained": False}),
    ],
)
def test_no_claim_while_something_prevents_it(record: RepairRecord, changes: dict[str, Any]) -> None:
    assert step_once(record, **changes).record.attempt is None


def test_mode_advise_takes_step_only_on_order() -> None:
    advise = RepairConfig(RepairMode.ADVISE)
    assert step_once(RepairRecord(plan()), advise).record.attempt is None
    assert step_once(after_order(RepairRecord(plan()), "root"), advise).record.attempt is not None


def test_reset_is_skipped_while_driver_hangs() -> None:
    change = step_once(RepairRecord(plan()), is_driver_stuck=True)
    assert change.record.attempt is None
    assert [(failed.step, failed.causes) for failed in change.record.failed] == [(GPU_RESET, (CAUSE,))]
    assert stages(change) == ["failed"]
    assert change.events[0].fields["was_taken"] is False
    assert step_once(RepairRecord(plan(REBOOT)), plan=plan(REBOOT), is_driver_stuck=True).record.attempt is not None


def test_attempt_names_the_faults_that_its_step_does_not_end() -> None:
    person = CauseStep("mount/missing", "/data", PERSON, Reason.CAUSE)
    both = replace(plan(), causes=(*plan().causes, person))
    found = step_once(RepairRecord(), plan=both).record.attempt
    assert found is not None
    assert (found.causes, found.others) == ((CAUSE,), ("mount/missing /data",))


@pytest.mark.parametrize(
    ("record", "changes", "expected"),
    [
        (RepairRecord(), {}, []),
        (RepairRecord(), {"journal": None}, [Obstacle.JOURNAL]),
        (RepairRecord(), {"journal": None, "is_stalled": True}, [Obstacle.PROGRAM]),
        (RepairRecord(), {"journal": Journal("boot-1", problem="the disk is full")}, [Obstacle.JOURNAL]),
        (RepairRecord(), {"journal": Journal(BOOT)}, [Obstacle.STATE_DIR]),
        (RepairRecord(), {"is_evidence_open": True}, [Obstacle.EVIDENCE]),
        (RepairRecord(act_since=NOW), {}, [Obstacle.BEFORE_ACT]),
        (RepairRecord(retry_at=NOW + 1), {}, [Obstacle.RETRY]),
        (RepairRecord(stopped_by="ann"), {}, [Obstacle.STOPPED]),
        (RepairRecord(), {"journal": journal(Outcome.FAILED)}, [Obstacle.TRIED]),
        (RepairRecord(), {"journal": journal(Outcome.FAILED), "now": NOW + 86400}, []),
        (RepairRecord(), {"journal": journal(Outcome.FAILED, REBOOT)}, []),
        (RepairRecord(), {"journal": journal(Outcome.IMPOSSIBLE)}, []),
        (
            RepairRecord(ordered_by="ann", act_since=NOW),
            {"journal": journal(Outcome.FAILED), "is_evidence_open": True},
            [],
        ),
        (RepairRecord(ordered_by="ann", retry_at=NOW + 1), {}, [Obstacle.RETRY]),
    ],
)
def test_act_obstacles(record: RepairRecord, changes: dict[str, Any], expected: list[Obstacle]) -> None:
    assert list(act_obstacles(record, plan(), DrainRecord(drained_at=NOW - 60), context(**changes))) == expected


def test_dry_run_leaves_out_the_obstacles_that_an_order_skips() -> None:
    state = context(journal=journal(Outcome.FAILED), is_evidence_open=True)
    found = act_obstacles(RepairRecord(act_since=NOW), plan(), DrainRecord(drained_at=NOW - 60), state)
    assert set(found) == set(SKIPPED_BY_ORDER)


def test_time_of_mode_act_is_kept_until_another_mode() -> None:
    acting = after_mode(RepairRecord(), RepairMode.ACT, NOW)
    assert after_mode(acting, RepairMode.ACT, NOW + 1).act_since == NOW
    assert after_mode(acting, RepairMode.ADVISE, NOW + 1).act_since == 0


def test_mode_off_withdraws_order() -> None:
    ordered = after_order(taking(), "ann")
    assert after_mode(ordered, RepairMode.ADVISE, NOW).ordered_by == "ann"
    withdrawn = after_mode(ordered, RepairMode.OFF, NOW)
    off = RepairConfig(RepairMode.OFF)
    assert must_withdraw(withdrawn, off, is_driver_stuck=False)
    assert step_once(withdrawn, off).record.attempt is None
    assert step_once(replace(withdrawn, attempt=None), off).record.attempt is None


# --- the claim


def test_confirmed_claim_leads_to_step() -> None:
    record = RepairRecord(plan(), attempt(AttemptStage.CLAIM))
    assert step_once(record).record == record, "the claim does not stand in the Reason yet"
    change = step_once(record, drain=DrainRecord(reason="healthd: ...", claim=GPU_RESET))
    assert change.record.attempt is not None
    assert change.record.attempt.stage is AttemptStage.STEP
    assert stages(change) == ["claimed"]
    assert step_once(record, drain=DrainRecord(claim=REBOOT)).record == record, "another step's claim"


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": plan(GPU_RESET, Obstacle.PAUSED)},
        {"plan": plan(REBOOT)},
        {"plan": plan(parts=())},
        {"plan": None},
        {"boot_id": "boot-3"},
    ],
)
def test_claim_is_given_up_if_plan_changes(changes: dict[str, Any]) -> None:
    changes["drain"] = DrainRecord(claim=GPU_RESET)
    change = step_once(RepairRecord(plan(), attempt(AttemptStage.CLAIM)), **changes)
    assert change.record.attempt is None
    assert wanted_claim(change.record, ACT, BOOT, NOW) is None


@pytest.mark.parametrize("record", [RepairRecord(plan(), attempt(AttemptStage.CLAIM)), verifying()])
def test_another_user_stops_repair_of_this_drain(record: RepairRecord) -> None:
    change = step_once(record, is_taken_over=True, drain=DrainRecord(claim=GPU_RESET))
    assert change.record.attempt is None
    assert change.record.stopped_by
    assert stages(change) == ["stopped"]
    assert Obstacle.STOPPED in list(act_obstacles(change.record, plan(), DrainRecord(), context()))


def test_claim_is_wanted_from_begin_to_end() -> None:
    assert wanted_claim(RepairRecord(), ACT, BOOT, NOW) is None
    for stage in AttemptStage:
        record = RepairRecord(attempt=attempt(stage, REBOOT))
        assert wanted_claim(record, ACT, BOOT, NOW) == RepairClaim(REBOOT, 1)
        assert wanted_claim(record, ACT, "boot-3", NOW) == RepairClaim(REBOOT, 1, is_booted=True)
    assert wanted_claim(RepairRecord(has_given_up=True), ACT, BOOT, NOW) == RepairClaim(PERSON)


# --- the step


@pytest.mark.parametrize("changes", [{"journal": None}, {"is_served": False}, {"journal": JOURNAL}])
def test_step_without_result_continues(changes: dict[str, Any]) -> None:
    assert step_once(taking(), **changes) == Change(taking())


def test_step_that_was_never_recorded_is_dropped_after_boot() -> None:
    """Power was lost before healthd-repair recorded the step, so it was not taken."""
    assert step_once(taking(), boot_id="boot-3").record.attempt is None
    assert step_once(taking(), boot_id="boot-3").record.failed == ()


def test_reset_that_was_done_is_verified() -> None:
    change = step_once(taking(), journal=journal(Outcome.DONE, proof="uptime 3 s", seconds=12.34))
    assert change.record.attempt == replace(attempt(AttemptStage.VERIFY), since=NOW)
    assert (change.record.taken, change.record.verify_since) == (TakenStep(ID, NOW), NOW)
    assert stages(change) == ["taken"]
    assert (change.events[0].fields["proof"], change.events[0].fields["seconds"]) == ("uptime 3 s", 12.3)


@pytest.mark.parametrize(
    ("outcome", "was_taken"), [(Outcome.FAILED, True), (Outcome.UNKNOWN, True), (Outcome.IMPOSSIBLE, False)]
)
def test_step_without_effect_has_failed(outcome: Outcome, was_taken: bool) -> None:
    change = step_once(taking(), journal=journal(outcome, problem="In use by another client"))
    assert change.record.attempt is None
    assert [(failed.step, failed.causes) for failed in change.record.failed] == [(GPU_RESET, (CAUSE,))]
    assert stages(change) == ["failed"]
    assert (change.record.failed[0].was_taken, change.events[0].fields["was_taken"]) == (was_taken, was_taken)
    assert change.record.taken == (TakenStep(ID, NOW) if was_taken else None)


def test_refused_step_is_tried_again_later_and_later() -> None:
    record, waits = taking(), []
    for _ in range(8):
        change = step_once(record, journal=journal(Outcome.REFUSED, problem="a job runs"))
        assert change.record.attempt is None
        assert change.record.failed == ()
        waits.append(change.record.retry_at - NOW)
        record = replace(change.record, attempt=attempt(AttemptStage.STEP))
    assert waits == sorted(waits)
    assert waits[0] == 60
    assert waits[-1] == 900
    assert stages(change) == [], "the same refusal is reported once"


def test_reboot_is_done_in_another_boot_and_fails_without_one() -> None:
    record = taking(REBOOT)
    under_way = journal(Outcome.TAKING, REBOOT)
    assert step_once(record, journal=under_way).record == record
    booted = step_once(record, journal=under_way, boot_id="boot-3")
    assert booted.record.attempt is not None
    assert booted.record.attempt.stage is AttemptStage.VERIFY
    late = step_once(record, journal=under_way, now=NOW + ACT.boot_timeout_seconds)
    assert late.record.attempt is None
    assert (late.record.failed[0].step, late.record.failed[0].was_taken) == (REBOOT, False)
    after = step_once(late.record, journal=under_way, plan=plan(PERSON), boot_id="boot-3", now=NOW + 9000).record
    assert (after.booted, after.taken) == ("boot-3", TakenStep(ID, NOW + 9000)), "the machine booted after all"
    again = step_once(after, journal=under_way, plan=plan(PERSON), boot_id="boot-4", now=NOW + 9999).record
    assert again == after, "a later boot is not healthd's"


def test_step_that_only_the_journal_knows_is_continued() -> None:
    """The ledger's copy was older than the reboot."""
    change = step_once(RepairRecord(plan(REBOOT)), journal=journal(Outcome.TAKING, REBOOT), boot_id="boot-3")
    assert change.record.attempt is not None
    assert (change.record.attempt.id, change.record.attempt.stage) == (ID, AttemptStage.STEP)
    for record, changes in (
        (RepairRecord(concluded=ID), {}),
        (RepairRecord(), {"now": NOW + 2 * 86400}),
        (RepairRecord(), {"is_drained": False}),
    ):
        known = step_once(record, journal=journal(Outcome.TAKING, REBOOT), plan=None, **changes)
        assert known.record.attempt is None


# --- the verification


def test_resume_ends_repair() -> None:
    failed = (FailedStep(GPU_RESET, NOW, (CAUSE,), "no effect"),)
    change = step_once(verifying(failed=failed, ordered_by="ann"), was_resumed=True, plan=None, causes=())
    assert stages(change) == ["succeeded"]
    assert is_fresh(replace(change.record, plan=None))
    assert change.record.concluded == ID


def test_fault_after_step_fails_it_once_all_checks_have_run() -> None:
    assert step_once(verifying()).record == verifying(), "checks from before the step do not count"
    assert step_once(verifying(), has_checked=True).record == verifying(), "it ends after more clean runs of its check"
    assert step_once(verifying(), seen=(CAUSE,)).record == verifying()
    change = step_once(verifying(), has_checked=True, seen=(CAUSE,))
    assert change.record.failed[0].step is GPU_RESET
    assert stages(change) == ["failed"]


def test_new_fault_that_needs_a_step_fails_the_last_one() -> None:
    other = ("gpu_xid/79 0000:43:00.0",)
    change = step_once(verifying(), has_checked=True, causes=other, seen=other)
    assert stages(change) == ["failed"]


def test_new_fault_for_a_person_may_pass_until_the_deadline() -> None:
    """A reset removes MIG instances until the site's service creates them again."""
    mig = ("gpu_mig/instances 0000:43:00.0",)
    changes: dict[str, Any] = {"has_checked": True, "causes": mig, "seen": mig, "plan": plan(PERSON)}
    assert step_once(verifying(), **changes).record == verifying()
    assert stages(step_once(verifying(), now=NOW + ACT.verify_timeout_seconds, **changes)) == ["failed"]


def test_step_has_succeeded_if_only_a_person_can_end_the_rest() -> None:
    other = ("mount/missing /data",)
    record = verifying_with_others(*other)
    assert stages(step_once(record, has_checked=True, causes=other, seen=other)) == ["succeeded"]
    assert stages(step_once(record, causes=other, seen=other)) == []


def verifying_with_others(*others: str, **changes: Any) -> RepairRecord:
    record = verifying(**changes)
    assert record.attempt is not None
    return replace(record, attempt=replace(record.attempt, others=others))


def test_resume_waits_for_checks_and_validation_also_after_the_attempt() -> None:
    """A person ends the rest of the faults later in the same drain."""
    other = ("mount/missing /data",)
    person: dict[str, Any] = {"plan": plan(PERSON), "causes": other}
    after = step_once(verifying_with_others(*other), has_checked=True, **person).record
    assert after.attempt is None
    for _ in range(2):
        assert after.taken == TakenStep(ID, NOW - 5)
        assert resume_wait(after, has_checked=False, stopped="") != ""
        assert resume_wait(after, has_checked=True, stopped="") == ""
        after = step_once(after, **person).record
    assert step_once(after, plan=None, causes=(), is_drained=False, was_resumed=True).record.taken is None


def test_stop_lasts_until_the_drain_ends_although_the_step_succeeds() -> None:
    other = ("mount/missing /data",)
    stopped = after_stop(verifying_with_others(*other), "ann").record
    after = step_once(stopped, has_checked=True, causes=other, plan=plan(PERSON))
    assert (stages(after), after.record.stopped_by) == (["succeeded"], "ann")
    assert Obstacle.STOPPED in list(act_obstacles(after.record, plan(REBOOT), DrainRecord(), context()))
    assert step_once(after.record, was_resumed=True, is_drained=False).record.stopped_by == ""
    assert step_once(stopped, was_resumed=True).record.stopped_by == "", "the step's own drain ends"


def test_step_has_succeeded_if_the_fault_only_waits_for_its_time() -> None:
    assert stages(step_once(verifying(), has_checked=True, waiting=(CAUSE,))) == ["succeeded"]
    assert stages(step_once(verifying(), waiting=(CAUSE,))) == []


def test_request_is_withdrawn_if_an_operator_or_a_pause_forbids_it() -> None:
    def withdraws(record: RepairRecord, config: RepairConfig = ACT, is_driver_stuck: bool = False) -> bool:
        return must_withdraw(record, config, is_driver_stuck)

    assert not withdraws(taking())
    assert not withdraws(RepairRecord(plan(GPU_RESET, Obstacle.JOBS), attempt(AttemptStage.STEP)))
    assert withdraws(RepairRecord(plan(GPU_RESET, Obstacle.PAUSED), attempt(AttemptStage.STEP)))
    assert withdraws(replace(taking(), stopped_by="ann"))
    assert withdraws(taking(is_taken_over=True))
    assert withdraws(replace(taking(), plan=None))
    assert withdraws(taking(), RepairConfig(RepairMode.ADVISE))
    assert withdraws(taking(), is_driver_stuck=True)
    assert not withdraws(taking(REBOOT), is_driver_stuck=True)
    assert not withdraws(RepairRecord(attempt=attempt(AttemptStage.VERIFY)))


@pytest.mark.parametrize(
    ("record", "config"),
    [
        (replace(taking(), stopped_by="ann"), ACT),
        (taking(), RepairConfig(RepairMode.ADVISE)),
        (taking(), RepairConfig(RepairMode.OFF)),
    ],
)
def test_step_that_was_withdrawn_before_it_began_is_over(record: RepairRecord, config: RepairConfig) -> None:
    assert step_once(record, config).record.attempt is None
    assert step_once(record, config, is_served=False).record.attempt is not None


def test_step_that_is_not_served_is_refused_at_its_deadline() -> None:
    late = NOW + 2 * ACT.reset_timeout_seconds
    assert step_once(taking(), is_served=False, is_stalled=True).record == taking()
    assert step_once(taking(), is_served=False, now=late).record == taking(), "the program runs"
    change = step_once(taking(), is_served=False, is_stalled=True, now=late)
    assert stages(change) == ["refused"]
    assert change.record.retry_at > late
    assert stages(step_once(taking(), now=NOW + 600)) == ["refused"], "it could never be requested"


def test_refusal_and_stopped_claim_leave_the_last_step_concluded() -> None:
    """Otherwise the step before would be taken up again from the journal."""
    old = Entry("20261128T060000Z-gpu_reset", GPU_RESET, NOW - 600, BOOT, Outcome.FAILED, (CAUSE,), (GPU,))
    before = with_entry(JOURNAL, old)
    record = replace(taking(REBOOT), concluded=old.id)
    refused = step_once(record, journal=with_entry(before, entry(Outcome.REFUSED, REBOOT)), plan=plan(REBOOT))
    assert refused.record.concluded == old.id
    claiming = RepairRecord(plan(), attempt(AttemptStage.CLAIM), concluded=old.id)
    assert step_once(claiming, is_taken_over=True).record.concluded == old.id
    assert after_stop(claiming, "ann").record.concluded == old.id
    waiting = step_once(refused.record, journal=before, plan=plan(REBOOT, Obstacle.RETRY))
    assert waiting == Change(refused.record)


def test_driver_that_hangs_ends_claim_of_a_reset() -> None:
    claiming = RepairRecord(plan(), attempt(AttemptStage.CLAIM))
    assert step_once(claiming, is_driver_stuck=True, drain=DrainRecord(claim=GPU_RESET)).record.attempt is None


def test_boot_by_healthd_is_remembered_until_the_drain_ends() -> None:
    journal_ = journal(Outcome.TAKING, REBOOT)
    booted = step_once(taking(REBOOT), journal=journal_, boot_id="boot-3", plan=plan(REBOOT)).record
    assert booted.booted == "boot-3"
    failed = step_once(
        booted, journal=journal_, boot_id="boot-3", plan=plan(REBOOT), has_checked=True, seen=(CAUSE,)
    ).record
    assert (failed.attempt, failed.booted) == (None, "boot-3")
    assert wanted_claim(failed, ACT, "boot-3", NOW) == RepairClaim(None, is_booted=True)
    assert wanted_claim(failed, ACT, "boot-4", NOW) is None
    assert step_once(failed, plan=None, causes=(), is_drained=False).record.booted == ""


@pytest.mark.parametrize(("is_clean", "stage"), [(True, "succeeded"), (False, "failed")])
def test_verification_ends_at_its_deadline(is_clean: bool, stage: str) -> None:
    late = NOW - 5 + ACT.verify_timeout_seconds
    changes: dict[str, Any] = {"causes": (), "plan": None, "is_clean": is_clean}
    assert stages(step_once(verifying(), now=late - 1, **changes)) == []
    assert stages(step_once(verifying(), now=late, **changes)) == [stage]


def test_time_in_which_node_cannot_be_resumed_does_not_count() -> None:
    """During a pause, while Slurm does not answer, and while a stopped service does not start."""
    timeout, usual = ACT.verify_timeout_seconds, {"causes": (), "plan": None}
    held = step_once(verifying(), is_held=True, **usual).record
    held = step_once(held, is_held=True, now=NOW + 2 * timeout, **usual).record
    assert held.attempt is not None
    counted = step_once(held, now=NOW + 2 * timeout, **usual).record
    assert (counted.verify_since, counted.held_since) == (NOW - 5 + 2 * timeout, 0.0)
    assert next_moment(counted, ACT, NOW + 2 * timeout) == NOW - 5 + 3 * timeout
    assert stages(step_once(counted, now=NOW - 6 + 3 * timeout, **usual)) == []
    assert stages(step_once(counted, now=NOW - 5 + 3 * timeout, **usual)) == ["failed"]
    assert stages(step_once(held, is_held=True, has_checked=True, seen=(CAUSE,))) == ["failed"]


def test_claim_is_given_up_in_a_long_pause() -> None:
    held = step_once(verifying(), is_held=True, causes=(), plan=None).record
    assert wanted_claim(held, ACT, BOOT, NOW) == RepairClaim(GPU_RESET, 1)
    later = NOW + ACT.verify_timeout_seconds
    assert wanted_claim(held, ACT, BOOT, later) is None
    resumed = step_once(held, now=later, causes=(), plan=None).record
    assert wanted_claim(resumed, ACT, BOOT, later) == RepairClaim(GPU_RESET, 1)


def test_resume_waits_for_step_and_checks() -> None:
    assert resume_wait(RepairRecord(), has_checked=False, stopped="") == ""
    assert resume_wait(taking(), has_checked=True, stopped="") != ""
    assert resume_wait(verifying(), has_checked=False, stopped="") != ""
    assert resume_wait(verifying(), has_checked=True, stopped="") == ""


@pytest.mark.parametrize("record", [RepairRecord(), verifying()])
def test_resume_waits_for_stopped_services(record: RepairRecord) -> None:
    assert STOPPED in resume_wait(record, has_checked=True, stopped=STOPPED)


STOPPED = "stopped for a GPU reset and not started again: nvidia-dcgm.service"
SERVICE_CAUSE = "services/not_running nvidia-dcgm"


@pytest.mark.parametrize("causes", [(), (SERVICE_CAUSE,)])
def test_service_that_does_not_start_fails_no_step(causes: tuple[str, ...]) -> None:
    end = NOW + ACT.verify_timeout_seconds
    changes: dict[str, Any] = {
        "has_checked": True,
        "causes": causes,
        "seen": causes,
        "plan": plan(PERSON) if causes else None,
        "stopped": STOPPED,
    }
    assert step_once(verifying(), **changes).record == replace(verifying(), plan=verifying().plan)
    change = step_once(verifying(), now=end, **changes)
    assert (stages(change), change.events[0].fields["problem"]) == (["gave_up"], STOPPED)
    record = change.record
    assert (record.attempt, record.failed, record.has_given_up, record.concluded) == (None, (), True, ID)
    later = step_once(record, now=end + 60, journal=journal(Outcome.DONE), **changes)
    assert (later.record, later.events) == (record, ()), "it is reported once, and no step follows"
    assert wanted_claim(record, ACT, BOOT, NOW) == RepairClaim(PERSON), "other nodes may be repaired meanwhile"
    resumed = step_once(record, plan=None, causes=(), is_drained=False)
    assert is_fresh(replace(resumed.record, plan=None))


def test_fault_beside_a_stopped_service_fails_the_step() -> None:
    end = NOW + ACT.verify_timeout_seconds
    for changes in (
        {"causes": (CAUSE,)},
        {"causes": ("gpu_xid/79 0000:43:00.0",)},
        {"causes": (), "has_checked": False},
        {"causes": (), "stopped": ""},
    ):
        found = step_once(verifying(), now=end, **{"has_checked": True, "stopped": STOPPED, **changes})
        assert stages(found) == ["failed"], changes


# --- the end of the ladder


def test_last_failed_step_leaves_node_to_person_once() -> None:
    failed = RepairRecord(plan(PERSON), failed=(FailedStep(REBOOT, NOW, (CAUSE,), "no boot"),))
    change = step_once(failed, plan=plan(PERSON))
    assert change.record.has_given_up
    assert stages(change) == ["gave_up"]
    assert step_once(change.record, plan=plan(PERSON)) == Change(change.record)


def test_node_without_fault_that_is_not_clean_in_time_is_left_to_person() -> None:
    """A check cannot complete after the step, so nothing else would end the repair."""
    late = NOW - 5 + ACT.verify_timeout_seconds
    usual: dict[str, Any] = {"now": late, "causes": (), "plan": None}
    failed = step_once(verifying(), **usual)
    assert stages(failed) == ["failed"]
    change = step_once(failed.record, **usual)
    assert stages(change) == ["gave_up"]
    assert change.events[0].fields["problem"] == "the checks were not clean in time"
    assert wanted_claim(change.record, ACT, BOOT, NOW) == RepairClaim(PERSON)
    assert step_once(change.record, **usual) == Change(change.record)


def test_fault_that_ends_after_failed_step_leaves_time_for_checks_and_validation() -> None:
    failed = RepairRecord(failed=(FailedStep(GPU_RESET, NOW, (CAUSE,), "no effect"),), verify_since=NOW - 1e5)
    usual: dict[str, Any] = {"causes": (), "plan": None}
    waiting = step_once(step_once(failed, plan=plan(REBOOT, Obstacle.JOBS)).record, **usual)
    assert (stages(waiting), waiting.record.verify_since) == ([], NOW)
    late = NOW + ACT.verify_timeout_seconds
    assert stages(step_once(waiting.record, now=late, **usual)) == ["gave_up"]
    for changes in ({"is_clean": True}, {"is_held": True}, {"causes": (CAUSE,)}, {"is_drained": False}):
        assert stages(step_once(waiting.record, now=late, **{**usual, **changes})) == []
    assert stages(step_once(RepairRecord(), now=late, **usual)) == [], "no step has failed"


def test_fault_for_person_is_no_failed_repair() -> None:
    assert step_once(RepairRecord(), plan=plan(PERSON)) == Change(RepairRecord())


def test_record_is_fresh_after_the_drain() -> None:
    used = RepairRecord(
        None, failed=(FailedStep(REBOOT, NOW, (), ""),), has_given_up=True, stopped_by="ann", act_since=5.0
    )
    assert step_once(used, plan=None, causes=(), is_drained=False).record == RepairRecord(act_since=5.0)


# --- operators


def test_stop_ends_claim_but_no_step_that_is_being_taken() -> None:
    change = after_stop(RepairRecord(plan(), attempt(AttemptStage.CLAIM)), "ann")
    assert change.record.attempt is None
    assert stages(change) == ["stopped"]
    for record in (taking(), verifying()):
        change = after_stop(record, "ann")
        assert change.record.attempt == record.attempt
        assert change.record.stopped_by == "ann"


@pytest.mark.parametrize(("outcome", "stage"), [(Outcome.DONE, "taken"), (Outcome.FAILED, "failed")])
def test_user_who_takes_over_during_step_ends_repair_after_it(outcome: Outcome, stage: str) -> None:
    during = step_once(taking(), is_taken_over=True, is_served=False)
    assert during.record.attempt is not None
    assert during.record.attempt.stage is AttemptStage.STEP
    change = step_once(during.record, journal=journal(outcome))
    assert stages(change) == [stage, "stopped"]
    assert change.record.attempt is None
    assert change.record.stopped_by


def test_order_ends_stop_and_wait() -> None:
    stopped = RepairRecord(plan(), stopped_by="ann", retry_at=NOW + 60, refusals=3, refused="a job runs")
    assert after_order(stopped, "bob") == RepairRecord(plan(), ordered_by="bob")


def test_next_moment_lies_ahead() -> None:
    """A moment in the past would wake the daemon without end."""
    for record in (RepairRecord(), RepairRecord(retry_at=NOW), taking(), taking(REBOOT), verifying()):
        for now in (NOW, NOW + 1e6):
            assert next_moment(record, ACT, now) > now
