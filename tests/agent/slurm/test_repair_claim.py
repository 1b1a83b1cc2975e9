"""The claim of a repair: its limit, its counts, the Reason, and the reconciliation that writes and removes it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from slurm_text import NOW, columns, sinfo

from healthd.agent.conditions.ledger import Pause
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.repair.attempt import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS
from healthd.agent.settings.config import Settings
from healthd.agent.slurm import repair_claim
from healthd.agent.slurm.controller import SlurmController
from healthd.agent.slurm.policy import (
    SETTLED_SECONDS,
    Owner,
    Policy,
    after_drain_ended,
    after_reading,
    decide,
    drain_owner,
)
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord, reconcile
from healthd.common.model import (
    ClaimHold,
    Decision,
    Drain,
    DrainRecord,
    EndedDrain,
    Health,
    Leave,
    Mode,
    NodeState,
    RepairClaim,
    RepairStep,
    Resume,
    Severity,
    Verdict,
)
from healthd.common.repair_plan import Attempt, AttemptStage, RepairRecord
from healthd.common.slurm import commands
from healthd.common.slurm.commands import CLAIM_COLUMNS, FLEET_COLUMNS, NAME_COLUMNS, Command, CommandResult
from healthd.common.slurm.output import Claim, PartitionService
from tests.agent.slurm.test_reconcile import ACT, PRIMARY, SUCCESS, XID, cause, failed, run_reconcile

RESET, REBOOT = RepairClaim(RepairStep.GPU_RESET), RepairClaim(RepairStep.REBOOT)
PERSON, BOOTED = RepairClaim(RepairStep.PERSON), RepairClaim(RepairStep.REBOOT, is_booted=True)
XID_RESET, XID_REBOOT = f"{XID} (repair: gpu_reset)", f"{XID} (repair: reboot)"
XID_FAILED = f"{XID} (repair failed: a person must act)"
FAULT = Verdict(Health.DEGRADED, causes=(cause(Severity.DEGRADED),))
OTHER_FAULT = Verdict(
    Health.DEGRADED, causes=(replace(cause(Severity.DEGRADED), code="gpu_ecc/uncorrected", message="3 errors"),)
)
OTHER_REASON = "healthd: gpu_ecc/uncorrected 0000:1b:00.0: 3 errors"
CLEAN, NOT_YET = Verdict(Health.HEALTHY, may_resume=True), Verdict(Health.UNKNOWN)
RECORD = DrainRecord(reason=XID, confirmed_at=NOW - 60, boot_id="b1", reason_time=NOW - 60)
HOLD = ClaimHold(until=NOW + 60, times=1, problem="n2 is being repaired")


def claimed(step: RepairStep | None = RepairStep.GPU_RESET, text: str = XID_RESET) -> DrainRecord:
    return replace(RECORD, reason=text, claim=step)


def node(state: str, reason: str = "") -> NodeState:
    return NodeState("n1", frozenset(state.split("+")), reason, "root" if reason else "", NOW - 60 if reason else 0.0)


# --- limit and counts


@pytest.mark.parametrize(
    ("max_concurrent", "nodes", "expected"),
    [
        (1, 10, 1),
        (3, 0, 3),
        ("2%", 10, 1),
        ("2%", 149, 2),
        ("2%", 150, 3),
        ("0%", 1000, 1),
        ("100%", 7, 7),
        ("5%", 0, 1),
    ],
)
def test_limit_for(max_concurrent: int | str, nodes: int, expected: int) -> None:
    assert repair_claim.limit_for(max_concurrent, nodes) == expected


def test_earlier_claims_include_equal_time_and_renewed() -> None:
    claims = [Claim("n1", 5.0), Claim("n2", 5.0), Claim("n3", 6.0), Claim("n4", 7.0, is_renewed=True), Claim("n5", 0.0)]
    assert [each.node for each in repair_claim.earlier_claims(claims, "n1", 5.0)] == ["n2", "n4", "n5"]
    assert [each.node for each in repair_claim.earlier_claims(claims, "n1", 0.0)] == ["n2", "n3", "n4", "n5"]


def test_hidden_claims_count_for_a_while() -> None:
    hidden = repair_claim.HIDDEN_SECONDS
    claims = [
        Claim("n1", 500.0, is_hidden=True),
        Claim("n2", 500.0 - hidden - 1, is_hidden=True),
        *(Claim(name, at, is_hidden=True) for name, at in (("n3", 500.0 - hidden), ("n4", 505.0))),
        Claim("n5", 505.0),
    ]
    assert [each.node for each in repair_claim.earlier_claims(claims, "n1", 500.0)] == ["n3", "n4"]
    assert [each.node for each in repair_claim.other_claims(claims, "n1", 500.0)] == ["n3", "n4", "n5"]
    assert [each.node for each in repair_claim.earlier_claims(claims, "n1", 0.0)] == ["n5"]


class SimulatedCluster:
    """Nodes that all need a repair, with the counts of repair_claim.py and random delays. Slurm replaces the Reason of
    some nodes during their step."""

    def __init__(self, nodes: int, limit: int, seed: int) -> None:
        self.limit, self.random = limit, random.Random(seed)
        self.reasons: dict[str, Claim] = {}  # in Slurm
        self.holds: dict[str, ClaimHold] = {}
        self.refusals = dict.fromkeys((f"n{number}" for number in range(nodes)), 0)
        self.waiting = set(self.refusals)
        self.running: set[str] = set()
        self.most = 0
        self.events: list[tuple[float, int, Callable[[str, float], None], str]] = []
        for name in self.refusals:
            self.at(1e6 + self.random.choice([0.0, 5.0]), self.count_before, name)

    def at(self, now: float, event: Callable[[str, float], None], name: str, most: float = 1.0) -> None:
        heapq.heappush(self.events, (now + self.random.uniform(0.0, most), self.random.getrandbits(60), event, name))

    def run(self) -> float:
        now = 0.0
        while self.events:
            now, _, event, name = heapq.heappop(self.events)
            event(name, now)
        return now

    def problem(self, claims: list[Claim]) -> str:
        return repair_claim.count_problem(claims, self.limit)

    def hold(self, name: str, now: float) -> None:
        self.holds[name] = repair_claim.backoff(self.holds.get(name), "full", name, now)
        self.at(self.holds[name].until, self.count_before, name)

    def count_before(self, name: str, now: float) -> None:
        if self.problem(repair_claim.earlier_claims(self.reasons.values(), name, 0.0)):
            self.hold(name, now)
        else:
            self.at(now, self.claim, name)

    def claim(self, name: str, now: float) -> None:
        self.reasons[name] = Claim(name, float(int(now)))
        self.at(now, self.count_after, name)

    def count_after(self, name: str, now: float) -> None:
        if self.problem(repair_claim.earlier_claims(self.reasons.values(), name, self.reasons[name].time)):
            self.at(now, self.remove, name)
            self.hold(name, now + 1.0)
        else:
            self.holds.pop(name, None)
            self.at(now, self.begin_step, name, most=5.0)

    def remove(self, name: str, now: float) -> None:
        del self.reasons[name]

    def begin_step(self, name: str, now: float) -> None:
        if self.problem(repair_claim.other_claims(self.reasons.values(), name, self.reasons[name].time)):
            wait = min(FIRST_RETRY_SECONDS * 2.0 ** self.refusals[name], MAX_RETRY_SECONDS)
            self.refusals[name] += 1
            self.at(now, self.remove, name)
            self.at(now + 1.0 + wait, self.count_before, name)
            return
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        if self.random.random() < 0.7:
            self.at(now, self.replace_reason, name, most=100.0)
        self.at(now + 200.0, self.end, name, most=200.0)

    def replace_reason(self, name: str, now: float) -> None:
        self.reasons[name] = Claim(name, float(int(now)), is_hidden=True)
        self.at(now, self.claim_again, name, most=40.0)

    def claim_again(self, name: str, now: float) -> None:
        self.reasons[name] = Claim(name, float(int(now)))

    def end(self, name: str, now: float) -> None:
        self.remove(name, now)
        self.running.remove(name)
        self.waiting.remove(name)


def test_cluster_never_exceeds_limit_and_repairs_each_node() -> None:
    for seed in range(200):
        limit = 1 + seed % 3
        simulated = SimulatedCluster(nodes=limit + seed % 10, limit=limit, seed=seed)
        simulated.run()
        assert simulated.waiting == set(), seed
        assert 0 < simulated.most <= limit, seed


@given(
    times=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5), min_size=1),
    renewed=st.sets(st.sampled_from("abcdefgh")),
    limit=st.integers(1, 4),
)
def test_nodes_that_keep_their_claims_never_exceed_limit(times: dict[str, int], renewed: set[str], limit: int) -> None:
    """All nodes count at the same moment, after all claims were written."""
    claims = [Claim(name, float(time), name in renewed) for name, time in times.items()]
    kept = [
        claim
        for claim in claims
        if not repair_claim.count_problem(repair_claim.earlier_claims(claims, claim.node, claim.time), limit)
    ]
    assert len(kept) <= limit
    if len(claims) <= limit:
        assert kept == claims


def test_count_and_service_problems() -> None:
    claims = [Claim(f"n{number}", 1.0) for number in range(1, 6)]
    assert repair_claim.count_problem(claims[:1], 2) == ""
    assert "n1" in repair_claim.count_problem(claims[:1], 1)
    assert "n5" not in repair_claim.count_problem(claims, 5)
    alone, served, empty = (PartitionService(*row) for row in (("one", 1, 0), ("gpu", 2, 1), ("night", 2, 0)))
    assert repair_claim.service_problem([alone, served]) == ""
    assert "night" in repair_claim.service_problem([alone, served, empty])


def test_backoff_doubles_to_its_maximum_with_jitter() -> None:
    hold: ClaimHold | None = None
    waits = []
    for times in range(1, 9):
        hold = repair_claim.backoff(hold, "full", "n1", NOW)
        assert (hold.times, hold.problem) == (times, "full")
        waits.append(hold.until - NOW)
    first, last = repair_claim.MIN_HOLD_SECONDS, repair_claim.MAX_HOLD_SECONDS
    assert 0.8 * first <= waits[0] <= 1.2 * first
    assert 0.8 * last <= waits[-1] <= 1.2 * last
    assert repair_claim.backoff(None, "full", "n2", NOW) != repair_claim.backoff(None, "full", "n1", NOW)


# --- decision


@pytest.mark.parametrize(
    ("verdict", "state", "record", "claim", "decision"),
    [
        # the claim is written to healthd's drain, with or without a cause
        (FAULT, node("IDLE+DRAIN", XID), RECORD, RESET, Drain(XID_RESET, False)),
        (NOT_YET, node("IDLE+DRAIN", XID), RECORD, RESET, Drain(XID_RESET, False)),
        (FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), RESET, Drain(XID_RESET, False)),
        (FAULT, node("IDLE+DRAIN", XID_RESET), claimed(None), RESET, Drain(XID_RESET, False)),
        (FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), REBOOT, Drain(XID_REBOOT, False)),
        (FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), PERSON, Drain(XID_FAILED, False)),
        # and to no other drain
        (FAULT, node("IDLE"), DrainRecord(), RESET, Drain(XID, False)),
        (FAULT, node("IDLE+DRAIN", "fan"), DrainRecord(), RESET, Leave('drained by root: "fan"')),
        (CLEAN, node("IDLE"), DrainRecord(), RESET, Leave("nothing to do")),
        # nor while it waits
        (FAULT, node("IDLE+DRAIN", XID), replace(RECORD, claim_hold=HOLD), RESET, Drain(XID, False)),
        (FAULT, node("IDLE+DRAIN", XID_RESET), replace(claimed(None), claim_hold=HOLD), RESET, Drain(XID, False)),
        (FAULT, node("IDLE+DRAIN", XID), replace(RECORD, claim_hold=HOLD), PERSON, Drain(XID_FAILED, False)),
        (
            FAULT,
            node("IDLE+DRAIN", XID),
            replace(RECORD, claim_hold=replace(HOLD, until=NOW)),
            RESET,
            Drain(XID_RESET, False),
        ),
        (FAULT, node("IDLE+DRAIN", XID), replace(RECORD, awaits_count=True), RESET, Drain(XID, False)),
        # it is removed
        (FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), None, Drain(XID, False)),
        (NOT_YET, node("IDLE+DRAIN", XID_RESET), claimed(), None, Drain(XID, False)),
        (FAULT, node("IDLE+DRAIN", XID_FAILED), claimed(RepairStep.PERSON, XID_FAILED), None, Drain(XID, False)),
        (
            FAULT,
            node("IDLE+DRAIN", f"{XID_REBOOT} : reboot issued"),
            claimed(RepairStep.REBOOT, XID_REBOOT),
            None,
            Drain(XID, False),
        ),
        # but not while the reboot is pending
        (
            FAULT,
            node("DOWN+DRAIN+REBOOT_ISSUED", f"{XID_REBOOT} : reboot issued"),
            claimed(RepairStep.REBOOT, XID_REBOOT),
            None,
            Drain(f"{XID_REBOOT} : reboot issued", False),
        ),
        # Slurm's suffix stays
        (
            FAULT,
            node("IDLE+DRAIN", f"{XID_REBOOT} : reboot issued"),
            claimed(RepairStep.REBOOT, XID_REBOOT),
            BOOTED,
            Drain(f"{XID_REBOOT} : reboot issued", False),
        ),
        # Slurm's own Reason is replaced
        (FAULT, node("IDLE+DRAIN", "Low RealMemory"), claimed(), RESET, Drain(XID_RESET, False)),
        (FAULT, node("IDLE+DRAIN", "Low RealMemory"), RECORD, RESET, Drain(XID_RESET, False)),
        (FAULT, node("IDLE+DRAIN", "Low RealMemory"), RECORD, None, Drain("Low RealMemory", False)),
        # a confirmed claim keeps its text, and another worst cause changes any other
        (OTHER_FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), RESET, Drain(XID_RESET, False)),
        (
            OTHER_FAULT,
            node("IDLE+DRAIN", XID_RESET),
            claimed(None),
            RESET,
            Drain(f"{OTHER_REASON} (repair: gpu_reset)", False),
        ),
        (OTHER_FAULT, node("IDLE+DRAIN", XID_RESET), claimed(), None, Drain(OTHER_REASON, False)),
        # resume
        (
            CLEAN,
            node("IDLE+DRAIN", XID_RESET),
            claimed(),
            RESET,
            Resume("every check that can drain has completed clean"),
        ),
    ],
)
def test_claim_in_reason(
    verdict: Verdict, state: NodeState, record: DrainRecord, claim: RepairClaim | None, decision: Decision
) -> None:
    assert decide(verdict, state, record, replace(ACT, claim=claim), NOW) == decision


PAUSED, OBSERVING = replace(ACT, paused_until=NOW + 1), replace(ACT, mode=Mode.OBSERVE)
BY_REBOOT = claimed(RepairStep.REBOOT, XID_REBOOT)


@pytest.mark.parametrize("policy", [PAUSED, OBSERVING], ids=["pause", "observe"])
@pytest.mark.parametrize(
    ("state", "record", "claim", "is_removed"),
    [
        (node("IDLE+DRAIN", XID_RESET), claimed(), None, True),
        (node("IDLE+DRAIN", XID_RESET), claimed(None), None, True),
        (node("DOWN+DRAIN", XID_RESET), claimed(), None, True),
        (node("IDLE+DRAIN", f"{XID_RESET} : Not responding"), claimed(), PERSON, True),
        (node("IDLE+DRAIN", XID_RESET), claimed(), RESET, False),  # its step has begun
        (node("IDLE+DRAIN", XID), RECORD, RESET, False),
        (node("IDLE+DRAIN", XID_FAILED), claimed(RepairStep.PERSON, XID_FAILED), None, False),
        (node("DOWN+DRAIN+REBOOT_ISSUED", f"{XID_REBOOT} : reboot issued"), BY_REBOOT, None, False),
        (node("DOWN", f"{XID_REBOOT} : reboot timed out"), BY_REBOOT, None, False),
        (node("IDLE", XID_RESET), DrainRecord(), None, False),  # 24.11 keeps the Reason of an ended drain
        (node("IDLE+DRAIN", XID_RESET), DrainRecord(), None, False),
        (node("IDLE+DRAIN", "fan"), DrainRecord(overriding_reason="fan"), None, False),
    ],
)
def test_only_unused_claim_is_removed_during_pause(
    policy: Policy, state: NodeState, record: DrainRecord, claim: RepairClaim | None, is_removed: bool
) -> None:
    for verdict in (FAULT, CLEAN, NOT_YET):
        decision = decide(verdict, state, record, replace(policy, claim=claim), NOW)
        assert (decision == Drain(XID, False)) is is_removed
        assert is_removed or isinstance(decision, Leave)


@pytest.mark.parametrize(
    ("flags", "claim", "is_resumed"),
    [
        ("DOWN+DRAIN", BOOTED, True),
        ("DOWN+DRAIN", REBOOT, False),
        ("DOWN+DRAIN", None, False),
        ("IDLE+DRAIN", BOOTED, True),
        ("IDLE+DRAIN+NOT_RESPONDING", BOOTED, False),
        ("DOWN+DRAIN+NOT_RESPONDING", BOOTED, False),
        ("DOWN+DRAIN+REBOOT_ISSUED", BOOTED, False),
        ("DOWN+DRAIN+POWERING_DOWN", BOOTED, False),
        ("IDLE+DRAIN+INVALID_REG", BOOTED, False),
    ],
)
def test_down_node_is_resumed_only_after_own_boot(flags: str, claim: RepairClaim | None, is_resumed: bool) -> None:
    record = claimed(RepairStep.REBOOT, XID_REBOOT)
    decision = decide(CLEAN, node(flags, f"{XID_REBOOT} : reboot issued"), record, replace(ACT, claim=claim), NOW)
    assert isinstance(decision, Resume) == is_resumed


ENDED = DrainRecord(ended_drain=EndedDrain(XID_REBOOT, XID_REBOOT, NOW - 60, NOW))


@pytest.mark.parametrize(
    ("flags", "reason", "record", "claim", "is_resumed"),
    [
        ("DOWN", "Node unexpectedly rebooted", DrainRecord(), BOOTED, True),
        ("DOWN", f"{XID_REBOOT} : reboot issued", ENDED, BOOTED, True),
        ("DOWN", "Node unexpectedly rebooted", DrainRecord(), REBOOT, False),
        ("DOWN", "Node unexpectedly rebooted", DrainRecord(), None, False),
        ("DOWN+NOT_RESPONDING", "Node unexpectedly rebooted", DrainRecord(), BOOTED, False),
        ("DOWN", "Not responding", DrainRecord(), BOOTED, False),
        ("DOWN", "fan", ENDED, BOOTED, False),
        ("IDLE", "Node unexpectedly rebooted", DrainRecord(), BOOTED, False),
    ],
)
def test_undrained_down_node_is_resumed_only_after_own_boot(
    flags: str, reason: str, record: DrainRecord, claim: RepairClaim | None, is_resumed: bool
) -> None:
    decision = decide(CLEAN, node(flags, reason), record, replace(ACT, claim=claim), NOW)
    assert isinstance(decision, Resume) == is_resumed
    waits = replace(CLEAN, before_resume="a program has ended")
    assert isinstance(decide(waits, node(flags, reason), record, replace(ACT, claim=claim), NOW), Leave)


@pytest.mark.parametrize(
    ("flags", "suffix", "text", "owner"),
    [
        ("DOWN", " : reboot issued : reboot timed out", XID_REBOOT, Owner.HEALTHD),
        ("DOWN", " : reboot issued : reboot complete", XID_REBOOT, Owner.HEALTHD),
        ("DOWN+NOT_RESPONDING", " : reboot issued : reboot timed out", XID_REBOOT, Owner.HEALTHD),
        ("DOWN", " : reboot issued", XID_REBOOT, Owner.NONE),  # an operator resumed the node during the boot
        ("DOWN", "", XID_REBOOT, Owner.NONE),
        ("IDLE", " : reboot issued : reboot timed out", XID_REBOOT, Owner.NONE),
        ("DOWN", " : reboot issued : reboot timed out", XID, Owner.NONE),  # no repair
    ],
)
def test_drain_that_slurm_removed_at_own_reboot_is_set_again(flags: str, suffix: str, text: str, owner: Owner) -> None:
    record, state = claimed(RepairStep.REBOOT, text), node(flags, text + suffix)
    assert drain_owner(state, record) is owner
    policy = replace(ACT, claim=BOOTED)
    decision = decide(NOT_YET, state, record, policy, NOW)
    assert decision == (Drain(text, False) if owner is Owner.HEALTHD else Leave("nothing to do"))
    foreign = replace(record, reason=XID_RESET)
    assert drain_owner(state, foreign) is Owner.NONE


# --- record


def test_record_of_claim_ends_with_drain_and_with_its_text() -> None:
    record = replace(claimed(), claim_hold=HOLD)
    same = after_reading(record, node("IDLE+DRAIN", XID_RESET), "b1", NOW)
    assert (same.claim, same.claim_hold) == (RepairStep.GPU_RESET, HOLD)
    assert after_reading(record, node("IDLE+DRAIN", "Low RealMemory"), "b1", NOW).claim is RepairStep.GPU_RESET
    written = replace(record, pending_reason=XID_REBOOT, pending_since=NOW)
    assert after_reading(written, node("IDLE+DRAIN", XID_REBOOT), "b1", NOW).claim is None
    for reason in ("fan", "healthd: mount/missing /data: gone"):
        foreign = after_reading(record, node("IDLE+DRAIN", reason), "b1", NOW)
        assert (foreign.claim, foreign.claim_hold) == (None, None)
    ended = after_drain_ended(record, node("IDLE"), NOW)
    assert (ended.claim, ended.claim_hold) == (None, None)


# --- reconciliation


def cluster(
    *claims: tuple[str, str, float],
    in_service: int = 5,
    counts: list[tuple[str, ...]] | None = None,
    later: tuple[tuple[str, str, float], ...] | None = None,
) -> Callable[[tuple[str, ...]], CommandResult]:
    """Return the answers to queries about the cluster. `claims` are (node, Reason, time); `later` replaces them from
    the second query on. `counts` receives the queries."""
    queries: list[tuple[str, ...]] = [] if counts is None else counts

    def answer(argv: tuple[str, ...]) -> CommandResult:
        queries.append(argv)
        if argv == commands.claims():
            rows = claims if later is None or queries.count(argv) == 1 else later
            table = [columns((name, "idle+drain", f"{at:.0f}", text), CLAIM_COLUMNS) for name, text, at in rows]
        elif argv == commands.node_names():
            table = [columns((f"n{number}",), NAME_COLUMNS) for number in range(100)]
        else:
            assert argv == commands.fleet()
            rows_of = (("gpu", "idle", "Unknown", "none", f"{in_service}"), ("gpu", "idle+drain", "1", "healthd:", "2"))
            table = [columns(row, FLEET_COLUMNS) for row in rows_of]
        return CommandResult(0, b"".join(table))

    return answer


UNCLAIMED_NODE, CLAIMED_NODE = sinfo("idle+drain", XID), sinfo("idle+drain", XID_RESET, since=NOW)
OWN, N2_BEFORE, N2_SAME, N2_AFTER = (
    ("n1", XID_RESET, NOW),
    *(("n2", XID_RESET, NOW + seconds) for seconds in (-5, 0, 5)),
)


def reconcile_claim(
    *answers: CommandResult, claim: RepairClaim | None = RESET, record: DrainRecord = RECORD, **fields: object
) -> tuple[ReconcileReport, list[str]]:
    """Return the report and the Reasons that were written."""
    result = run_reconcile(FAULT, answers, record, replace(ACT, claim=claim), **fields)  # type: ignore[arg-type]
    return result.report, [line.partition("Reason=")[2] for line in result.changes()]


def test_claim_is_counted_written_and_counted_again() -> None:
    queries: list[tuple[str, ...]] = []
    fleet = cluster(later=(OWN, N2_AFTER), counts=queries)
    report, written = reconcile_claim(UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE, fleet=fleet)
    assert written == [XID_RESET]
    assert (report.record.claim, report.record.claim_hold) == (RepairStep.GPU_RESET, None)
    assert report.record.reason == XID_RESET
    assert queries == [commands.claims(), commands.fleet(), commands.claims()]
    assert report.settled


def test_pending_reason_is_saved_before_the_claim_is_written() -> None:
    result = run_reconcile(
        FAULT, [UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE], RECORD, replace(ACT, claim=RESET), fleet=cluster()
    )
    saved = next(step for step in result.steps if isinstance(step, DrainRecord))
    assert (saved.pending_reason, saved.claim) == (XID_RESET, None)


@pytest.mark.parametrize(
    "fleet",
    [
        cluster(N2_BEFORE),
        cluster(N2_AFTER),
        cluster(in_service=0),
        lambda argv: failed("sinfo: timed out"),
        lambda argv: CommandResult(0, b"cut"),
        lambda argv: failed("x") if argv == commands.fleet() else cluster()(argv),
    ],
    ids=["earlier claim", "later claim", "no node in service", "no answer", "unreadable", "no states"],
)
def test_no_claim_without_room(fleet: Callable[[tuple[str, ...]], CommandResult]) -> None:
    report, written = reconcile_claim(UNCLAIMED_NODE, fleet=fleet)
    assert (written, report.record.claim) == ([], None)
    assert report.record.claim_hold is not None
    assert (report.record.claim_hold.times, report.problem) == (1, "")
    assert report.decision == Drain(XID, False)


def test_percentage_queries_node_names_only_if_other_nodes_claim() -> None:
    queries: list[tuple[str, ...]] = []
    percent = replace(RESET, max_concurrent="2%")
    report, _ = reconcile_claim(
        UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE, claim=percent, fleet=cluster(N2_BEFORE, counts=queries)
    )
    assert report.record.claim is RepairStep.GPU_RESET
    assert queries.count(commands.node_names()) == 2
    queries.clear()
    reconcile_claim(UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE, claim=percent, fleet=cluster(counts=queries))
    assert commands.node_names() not in queries
    third = replace(RESET, max_concurrent="1%")
    assert reconcile_claim(UNCLAIMED_NODE, claim=third, fleet=cluster(N2_BEFORE))[1] == []


@pytest.mark.parametrize("other", [N2_BEFORE, N2_SAME, ("n2", f"{XID_RESET} : reboot issued", NOW + 5)])
def test_claim_is_removed_if_another_node_claimed_at_the_same_moment(other: tuple[str, str, float]) -> None:
    answers = (UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE, SUCCESS, UNCLAIMED_NODE)
    report, written = reconcile_claim(*answers, fleet=cluster(later=(OWN, other)))
    assert written == [XID_RESET, XID]
    assert (report.record.claim, report.record.reason) == (None, XID)
    assert report.record.claim_hold is not None
    assert report.decision == Drain(XID, False)


@pytest.mark.parametrize(
    ("at", "is_confirmed"), [(NOW - 30, False), (NOW + 1, False), (NOW - repair_claim.HIDDEN_SECONDS - 1, True)]
)
def test_reason_that_slurm_has_replaced_may_hide_a_claim(at: float, is_confirmed: bool) -> None:
    replaced = ("n2", "gres/gpu count reported lower than configured (7 < 8)", at)
    answers = (UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE) + (() if is_confirmed else (SUCCESS, UNCLAIMED_NODE))
    report, written = reconcile_claim(*answers, fleet=cluster(OWN, replaced))
    assert written == ([XID_RESET] if is_confirmed else [XID_RESET, XID])
    assert report.record.claim is (RepairStep.GPU_RESET if is_confirmed else None)
    assert is_confirmed or "n2" in report.record.claim_hold.problem  # type: ignore[union-attr]


def test_claim_is_removed_if_it_cannot_be_counted_again() -> None:
    first = cluster()
    queries: list[tuple[str, ...]] = []

    def fleet(argv: tuple[str, ...]) -> CommandResult:
        queries.append(argv)
        return first(argv) if len(queries) < 3 else failed("sinfo: timed out")

    report, written = reconcile_claim(UNCLAIMED_NODE, SUCCESS, CLAIMED_NODE, SUCCESS, UNCLAIMED_NODE, fleet=fleet)
    assert (written, report.record.claim) == ([XID_RESET, XID], None)


@pytest.mark.parametrize(
    "record",
    [replace(RECORD, pending_reason=XID_RESET, pending_since=NOW - 5), claimed(None)],
    ids=["killed after the command", "killed before the count"],
)
def test_unconfirmed_claim_is_only_counted(record: DrainRecord) -> None:
    queries: list[tuple[str, ...]] = []
    report, written = reconcile_claim(CLAIMED_NODE, record=record, fleet=cluster(OWN, counts=queries))
    assert (written, report.record.claim) == ([], RepairStep.GPU_RESET)
    assert queries == [commands.claims()]


def test_confirmed_claim_is_not_counted_again() -> None:
    queries: list[tuple[str, ...]] = []
    report, written = reconcile_claim(CLAIMED_NODE, record=claimed(), fleet=cluster(N2_BEFORE, counts=queries))
    assert (written, queries, report.record.claim) == ([], [], RepairStep.GPU_RESET)
    replaced = sinfo("idle+drain", "Low RealMemory")
    report, written = reconcile_claim(replaced, SUCCESS, CLAIMED_NODE, record=claimed(), fleet=cluster(counts=queries))
    assert (written, queries, report.record.claim) == ([XID_RESET], [], RepairStep.GPU_RESET)


def test_next_step_is_counted_and_otherwise_removes_the_last_claim() -> None:
    rebooting = sinfo("idle+drain", XID_REBOOT, since=NOW)
    report, written = reconcile_claim(
        CLAIMED_NODE, SUCCESS, rebooting, claim=REBOOT, record=claimed(), fleet=cluster(OWN)
    )
    assert (written, report.record.claim) == ([XID_REBOOT], RepairStep.REBOOT)
    report, written = reconcile_claim(
        CLAIMED_NODE, SUCCESS, UNCLAIMED_NODE, claim=REBOOT, record=claimed(), fleet=cluster(OWN, N2_BEFORE)
    )
    assert (written, report.record.claim, report.record.reason) == ([XID], None, XID)


def test_failed_repair_is_written_without_a_count() -> None:
    failed_node, record = sinfo("idle+drain", XID_FAILED), replace(RECORD, claim_hold=HOLD)
    queries: list[tuple[str, ...]] = []
    fleet = cluster(N2_BEFORE, counts=queries)
    report, written = reconcile_claim(UNCLAIMED_NODE, SUCCESS, failed_node, claim=PERSON, record=record, fleet=fleet)
    assert (written, queries) == ([XID_FAILED], [])
    assert (report.record.claim, report.record.claim_hold) == (RepairStep.PERSON, None)


@pytest.mark.parametrize("policy", [PAUSED, OBSERVING], ids=["pause", "observe"])
def test_removal_of_a_claim_is_the_only_change_during_pause(policy: Policy) -> None:
    steps = reconcile(FAULT, claimed(), policy, "n1", "b1", lambda: NOW)
    answers = iter([CLAIMED_NODE, PRIMARY, CLAIMED_NODE, SUCCESS, UNCLAIMED_NODE])
    sent: list[Command] = []
    answer: CommandResult | None = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            report = end.value
            break
        answer = None if isinstance(step, SaveRecord) else next(answers)
        sent += [step] if isinstance(step, Command) else []
    assert [(command.argv, command.in_pause) for command in sent if command.changes] == [
        (commands.drain("n1", XID), True)
    ]
    assert (report.record.claim, report.record.reason, report.owner) == (None, XID, Owner.HEALTHD)


@pytest.mark.parametrize(
    ("record", "state", "claim"),
    [
        (RECORD, UNCLAIMED_NODE, RESET),
        (claimed(), CLAIMED_NODE, REBOOT),
        (DrainRecord(), sinfo("idle"), None),
        (DrainRecord(), sinfo("idle", XID_RESET), None),
    ],
    ids=["a claim", "another claim", "a drain", "a drain with an old Reason"],
)
def test_other_changes_are_not_sent_during_pause(
    record: DrainRecord, state: CommandResult, claim: RepairClaim | None
) -> None:
    steps = reconcile(FAULT, record, replace(ACT, claim=claim), "n1", "b1", lambda: NOW)
    answer: CommandResult | None = None
    while True:
        step = steps.send(answer)
        if isinstance(step, SaveRecord):
            answer = None
        elif step.changes:
            assert not step.in_pause
            break
        elif step.argv == commands.config():
            answer = PRIMARY
        elif step.argv in (commands.claims(), commands.fleet()):
            answer = cluster()(step.argv)
        else:
            answer = state


def test_node_is_read_after_the_record_of_a_resume_is_saved() -> None:
    """The daemon publishes the verdict between two commands. The prolog must not refuse a job after the resume."""
    other = sinfo("idle+drain", XID, since=NOW - 30)  # another tool has renewed the time stamp
    steps = reconcile(CLEAN, RECORD, ACT, "n1", "b1", lambda: NOW)
    readings, after_save = iter([sinfo("idle+drain", XID), other, other]), []
    answer: CommandResult | None = None
    while True:
        step = steps.send(answer)
        if isinstance(step, SaveRecord):
            answer, after_save = None, []
            assert step.record.resume_sent_at == NOW
            continue
        after_save.append(step.argv)
        if step.changes:
            break
        answer = PRIMARY if step.argv == commands.config() else next(readings)
    assert after_save == [commands.node("n1"), commands.undrain("n1")]
    assert next(readings, None) is None


def test_claim_that_is_no_longer_wanted_is_removed() -> None:
    record = replace(claimed(), claim_hold=HOLD)
    report, written = reconcile_claim(CLAIMED_NODE, SUCCESS, UNCLAIMED_NODE, claim=None, record=record)
    assert (written, report.record.claim, report.record.claim_hold) == ([XID], None, None)


def test_operator_reason_before_the_claim_is_kept() -> None:
    report, written = reconcile_claim(UNCLAIMED_NODE, fleet=cluster(), changed_nodes=[sinfo("idle+drain", "fan")])
    assert (written, report.owner, report.record.claim) == ([], Owner.OTHER, None)


def test_node_down_after_own_boot_is_resumed_with_state_resume() -> None:
    record, down = claimed(RepairStep.REBOOT, XID_REBOOT), sinfo("down+drain", f"{XID_REBOOT} : reboot issued")
    result = run_reconcile(CLEAN, [down, SUCCESS, sinfo("idle")], record, replace(ACT, claim=BOOTED))
    assert result.changes() == [" ".join(commands.resume("n1"))]
    assert (result.report.resumed, result.report.record.claim) == (True, None)


@pytest.mark.parametrize(
    ("boot_time", "booted_at", "claim", "is_resumed"),
    [
        (f"{NOW - 3600:.0f}", NOW - 60, BOOTED, False),
        ("None", NOW - 60, BOOTED, False),
        (f"{NOW - 90:.0f}", NOW - 60, BOOTED, True),
        ("", 0.0, BOOTED, True),  # not queried
        ("", NOW - 60, REBOOT, True),
        ("", NOW - 60, None, True),
    ],
)
def test_node_is_resumed_only_after_slurmd_has_registered(
    boot_time: str, booted_at: float, claim: RepairClaim | None, is_resumed: bool
) -> None:
    text = f"NodeName=n1 OS=Linux 6.1  BootTime={boot_time} SlurmdStartTime=5 Reason=x BootTime=9 SlurmdStartTime=9\n"
    record, state = claimed(RepairStep.REBOOT, XID_REBOOT), sinfo("idle+drain", XID_REBOOT)
    answers = [state, *([CommandResult(0, text.encode())] if boot_time else [])]
    answers += [SUCCESS, sinfo("idle")] if is_resumed else []
    if claim is None:
        record, answers[0] = RECORD, sinfo("idle+drain", XID)
    result = run_reconcile(CLEAN, answers, record, replace(ACT, claim=claim, booted_at=booted_at))
    assert result.report.resumed == is_resumed
    assert isinstance(result.report.decision, Resume) == is_resumed


def test_registration_that_cannot_be_read_is_a_problem() -> None:
    record, policy = claimed(RepairStep.REBOOT, XID_REBOOT), replace(ACT, claim=BOOTED, booted_at=NOW)
    for answer in (failed("timed out"), CommandResult(0, b"NodeName=n1")):
        result = run_reconcile(CLEAN, [sinfo("idle+drain", XID_REBOOT), answer], record, policy)
        assert (result.report.resumed, result.changes(), bool(result.report.problem)) == (False, [], True)


def test_unconfirmed_claim_is_not_confirmed_during_pause() -> None:
    policy = replace(ACT, claim=RESET, paused_until=NOW + 60)
    result = run_reconcile(FAULT, [CLAIMED_NODE], claimed(None), policy, fleet=cluster(OWN))
    assert (result.changes(), result.fleet_queries, result.report.record.claim) == ([], [], None)


# --- controller


def make_controller(tmp_path: Path, record: DrainRecord, mode: Mode = Mode.ACT) -> SlurmController:
    store = ConditionStore(str(tmp_path), lambda: NOW)
    store.change(slurm=record)
    return SlurmController(Settings(mode=mode, runtime_dir=str(tmp_path)), store, "b1", lambda: NOW, lambda: 100.0)


@pytest.mark.parametrize(
    ("record", "mode", "expected"),
    [
        (claimed(), Mode.ACT, True),
        (claimed(), Mode.DRAIN, True),
        (claimed(), Mode.OBSERVE, False),
        (claimed(None), Mode.ACT, False),
        (claimed(RepairStep.PERSON, XID_FAILED), Mode.ACT, False),
    ],
)
def test_prolog_refuses_jobs_from_claim_to_resume(
    tmp_path: Path, record: DrainRecord, mode: Mode, expected: bool
) -> None:
    assert make_controller(tmp_path, record, mode).must_refuse_jobs(CLEAN) is expected


@pytest.mark.parametrize(
    ("stage", "flags", "seconds", "expected"),
    [
        (AttemptStage.STEP, "IDLE+DRAIN", SETTLED_SECONDS - 1, True),
        (AttemptStage.STEP, "IDLE+DRAIN", SETTLED_SECONDS + 1, True),
        (AttemptStage.VERIFY, "IDLE+DRAIN", SETTLED_SECONDS - 1, True),
        (AttemptStage.VERIFY, "IDLE+DRAIN", SETTLED_SECONDS + 1, False),
        (AttemptStage.VERIFY, "DOWN+DRAIN", SETTLED_SECONDS + 1, True),
    ],
)
def test_prolog_refuses_jobs_during_verification_only_until_slurm_keeps_them_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: AttemptStage, flags: str, seconds: float, expected: bool
) -> None:
    drained, record = node(flags, XID_RESET), claimed()

    def fake_reconcile(*_: object) -> object:
        yield SaveRecord(record)
        return ReconcileReport(record, node=drained)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    now = drained.reason_time + seconds
    store = ConditionStore(str(tmp_path), lambda: now)
    attempt = Attempt("1", RepairStep.GPU_RESET, stage, NOW - 60, "b1", ("gpu_xid/79",))
    store.change(slurm=record, repair=RepairRecord(attempt=attempt))
    controller = SlurmController(Settings(mode=Mode.ACT), store, "b1", lambda: now, lambda: 100.0)
    assert controller.must_refuse_jobs(CLEAN), "Slurm has not answered yet"
    assert controller.reconcile_if_due(CLEAN, round_ended=True) is not None
    assert controller.must_refuse_jobs(CLEAN) is expected
    assert controller.refusal_ends_at > now, "the daemon does not wake up again and again"


@pytest.mark.parametrize(
    ("sent_at", "confirmed_at", "expected"),
    [
        (NOW - 1, NOW - 60, False),
        (NOW - 1000, NOW - 2000, False),  # its effect has not been read
        (NOW - 1000, NOW - 60, True),  # it had no effect
        (0.0, NOW - 60, True),
    ],
)
def test_prolog_refuses_no_job_once_healthd_resumes_the_node(
    tmp_path: Path, sent_at: float, confirmed_at: float, expected: bool
) -> None:
    record = replace(claimed(), resume_sent_at=sent_at, confirmed_at=confirmed_at)
    controller = make_controller(tmp_path, record)
    assert controller.must_refuse_jobs(CLEAN) is expected
    assert controller.must_refuse_jobs(FAULT), "a fault during the resume"


@pytest.mark.parametrize(
    ("record", "is_queried"),
    [
        (claimed(), True),
        (replace(RECORD, pending_reason=XID_RESET), True),
        (RECORD, False),
        (claimed(RepairStep.PERSON, XID_FAILED), False),
    ],
)
def test_mode_observe_queries_slurm_only_while_the_reason_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: DrainRecord, is_queried: bool
) -> None:
    policies: list[Policy] = []

    def fake_reconcile(verdict: Verdict, record: DrainRecord, policy: Policy, *_: object) -> object:
        policies.append(policy)
        yield SaveRecord(RECORD)
        return ReconcileReport(RECORD, settled=True)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    controller = make_controller(tmp_path, record, Mode.OBSERVE)
    assert (controller.reconcile_if_due(FAULT, round_ended=True) is not None) is is_queried
    assert [policy.mode for policy in policies] == [Mode.OBSERVE] * is_queried
    assert controller.reconcile_if_due(FAULT, round_ended=True) is None, "the claim is gone"
    assert isinstance(controller.decision, Leave)


def test_pause_does_not_end_refusal_of_a_claimed_repair(tmp_path: Path) -> None:
    store = ConditionStore(str(tmp_path), lambda: NOW)
    store.change(slurm=claimed(), pause=Pause(NOW + 60, "maintenance", "ann"))
    controller = SlurmController(Settings(mode=Mode.ACT), store, "b1", lambda: NOW, lambda: 100.0)
    assert controller.must_refuse_jobs(CLEAN)


def test_changed_claim_is_reconciled_at_once_and_read_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[RepairClaim | None] = []
    record = RECORD

    def fake_reconcile(verdict: Verdict, record_before: DrainRecord, policy: object, *_: object) -> object:
        claims.append(policy.claim)  # type: ignore[attr-defined]
        yield SaveRecord(record)
        return ReconcileReport(record, settled=True)

    monkeypatch.setattr("healthd.agent.slurm.driver.reconcile", fake_reconcile)
    controller = make_controller(tmp_path, RECORD)
    assert controller.reconcile_if_due(FAULT, round_ended=False)
    assert controller.deadline == float("inf")
    assert controller.reconcile_if_due(FAULT, round_ended=False) is None
    controller.claim = RESET
    assert controller.reconcile_if_due(FAULT, round_ended=False)
    assert claims == [None, RESET]
    assert controller.deadline == 100.0 + repair_claim.READ_SECONDS
    assert controller.reconcile_if_due(FAULT, round_ended=False) is None
    record = replace(RECORD, claim_hold=HOLD)
    controller.claim = REBOOT
    assert controller.reconcile_if_due(FAULT, round_ended=False)
    assert controller.deadline == 100.0 + HOLD.until - NOW
    controller.claim = PERSON
    assert controller.reconcile_if_due(FAULT, round_ended=False)
    assert controller.deadline == float("inf")
