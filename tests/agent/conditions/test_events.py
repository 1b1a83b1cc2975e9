"""Tests of the events that a change of the ledger emits: each kind, and a reader can tell what is open."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.conditions import endings, events, store
from healthd.agent.conditions.ledger import MAX_CLEARED
from healthd.agent.conditions.store import ConditionStore
from healthd.agent.control import commands
from healthd.common import guard
from healthd.common.model import (
    Ack,
    Clears,
    Condition,
    ConditionState,
    Drain,
    DrainRecord,
    Leave,
    Mode,
    RunName,
    Severity,
    Slowness,
)
from healthd.events.schema import EVENTS, Event

NOW = 1795349480.0
MOUNT = Condition(
    check="mount",
    instance="/data",
    code="mount/missing",
    subject="/data",
    severity=Severity.DEGRADED,
    message="/data is not mounted",
    clears=Clears.PASS,
    state=ConditionState.OPEN,
    first_seen=NOW - 60,
    last_seen=NOW,
    count=1,
    boot_id="b1",
    opened_at=NOW,
    last_level_seen=NOW,
)
XID = replace(
    MOUNT,
    check="gpu_xid",
    instance="",
    code="gpu_xid/79",
    subject="0000:61:00.0",
    severity=Severity.CRITICAL,
    clears=Clears.REBOOT,
    last_level_seen=0.0,
    last_event=NOW,
    job="4711,4712",
)


class Node:
    """A condition store with its clock and the events that it emitted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.now = NOW
        self.lines: list[str] = []
        self.start()

    def start(self, disk: Callable[[], dict[str, str | None]] = dict, boot_id: str = "b1", alive: float = 0.0) -> None:
        self.memory = ConditionStore(str(self.directory), lambda: self.now, lambda: self.now - NOW + 100, "n1", "c1")
        self.memory.load(disk, boot_id, Mode.ACT, alive)

    def has(self, *conditions: Condition) -> None:
        self.memory.set_conditions({c.key: c for c in conditions})

    def told(self) -> list[dict[str, Any]]:
        """Return the events since the last call and acknowledge them, as the worker does."""
        new = self.memory.ledger.outbox.lines
        self.lines += new
        self.memory.stream.mark_written(new)
        return list(map(json.loads, new))

    def names(self) -> list[str]:
        return [event["event"] for event in self.told()]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    made.told()
    return made


def cleared(c: Condition, by: str, at: float) -> Condition:
    return replace(c, state=ConditionState.CLEARED, cleared_by=by, cleared_at=at)


def seen(c: Condition, count: int, at: float) -> Condition:
    return replace(c, count=count, last_seen=at)


# --- conditions


def test_a_condition_that_opens_is_told_with_all_that_is_known(node: Node) -> None:
    node.has(XID)
    (event,) = node.told()
    assert {name: event[name] for name in ("cluster", "node", "boot_id", "event", "check", "code", "subject")} == {
        "cluster": "c1",
        "node": "n1",
        "boot_id": "b1",
        "event": "opened",
        "check": "gpu_xid",
        "code": "gpu_xid/79",
        "subject": "0000:61:00.0",
    }
    assert (event["severity"], event["kind"], event["count"], event["jobs"]) == (
        "critical",
        "edge",
        1,
        ["4711", "4712"],
    )
    assert (event["first"], event["last"]) == ("2026-11-22T12:10:20.000Z", "2026-11-22T12:11:20.000Z")
    assert set(EVENTS["opened"].required) <= set(event)


def test_a_slowness_is_told_with_how_slow_since_when_and_whose_it_is_and_nothing_else_has_such_a_field(
    node: Node,
) -> None:
    slow = replace(MOUNT, code="failslow/job", subject="", job="4711", slowness=Slowness(0.26049, NOW - 300, ("4711",)))
    node.has(slow, MOUNT)
    told, other = node.told()
    assert (told["slowdown"], told["onset"], told["jobs"]) == (0.26, "2026-11-22T12:06:20.000Z", ["4711"])
    assert not {"slowdown", "onset"} & set(other)


def test_what_is_seen_at_each_look_is_a_level_and_what_a_line_says_is_an_edge(node: Node) -> None:
    node.has(MOUNT, XID)
    assert [(e["code"], e["kind"]) for e in node.told()] == [("mount/missing", "level"), ("gpu_xid/79", "edge")]


def test_what_waits_for_its_confirm_time_is_not_told_before_it_counts(node: Node) -> None:
    pending = replace(MOUNT, state=ConditionState.PENDING, opened_at=0.0)
    node.has(pending)
    node.has()
    node.has(pending)
    assert node.names() == []
    node.has(MOUNT)
    assert node.names() == ["opened"]


def test_a_condition_is_told_as_worse_only_where_it_is_worse_than_ever(node: Node) -> None:
    node.has(MOUNT)
    node.told()
    for severity in (Severity.WARNING, Severity.CRITICAL, Severity.DEGRADED, Severity.CRITICAL):
        node.has(replace(MOUNT, severity=severity))
    (event,) = node.told()
    assert (event["event"], event["was"], event["severity"]) == ("worsened", "degraded", "critical")


def test_an_end_names_the_same_condition_and_what_ended_it(node: Node) -> None:
    node.has(MOUNT)
    (opened,) = node.told()
    node.has(cleared(seen(MOUNT, 7, NOW + 300), "pass", NOW + 600))
    (event,) = node.told()
    assert (event["event"], event["cleared_by"], event["count"]) == ("cleared", "pass", 7)
    assert event["condition"] == opened["condition"]


def test_what_opens_and_ends_in_one_change_is_told_as_both(node: Node) -> None:
    node.has(cleared(XID, "nfs: server is back", NOW))
    assert node.names() == ["opened", "cleared"]


def test_what_ends_before_it_counted_is_not_told(node: Node) -> None:
    node.has(cleared(replace(MOUNT, opened_at=0.0), "no longer configured", NOW))
    assert node.names() == []


def test_what_comes_back_is_another_condition(node: Node) -> None:
    node.has(MOUNT)
    node.has(cleared(MOUNT, "pass", NOW))
    node.has(replace(MOUNT, first_seen=NOW + 900))
    first, _, again = node.told()
    assert again["event"] == "opened"
    assert again["condition"] != first["condition"]


def test_what_is_counted_among_others_is_over_by_its_own_name(node: Node) -> None:
    node.has(MOUNT, XID)
    node.told()
    node.has(XID)
    (event,) = node.told()
    assert (event["event"], event["code"], event["cleared_by"]) == ("cleared", "mount/missing", "others")


@pytest.mark.parametrize("many", [MAX_CLEARED, MAX_CLEARED + 1, 300])
def test_of_many_that_end_at_once_each_says_why_also_those_that_the_history_does_not_keep(
    node: Node, caplog: pytest.LogCaptureFixture, many: int
) -> None:
    node.has(*(replace(MOUNT, subject=f"/{number}") for number in range(many)))
    node.told()
    caplog.clear()
    with caplog.at_level("INFO"):
        node.memory.clear_runs({MOUNT.run}, "no longer configured")
    told = node.told()
    assert {(event["event"], event["cleared_by"]) for event in told} == {("cleared", "no longer configured")}
    assert len({event["subject"] for event in told}) == len(told) == many
    assert len([text for text in caplog.messages if text.endswith("cleared: no longer configured")]) == many
    assert len(node.memory.ledger.cleared) == MAX_CLEARED


def test_an_acknowledgement_says_who_why_and_until_when(node: Node) -> None:
    node.has(MOUNT)
    node.told()
    known = Ack(NOW + 60, "the cable is ordered", "ann (uid 1000)", Severity.DEGRADED, NOW)
    node.has(replace(MOUNT, state=ConditionState.ACKNOWLEDGED, ack=known))
    (event,) = node.told()
    assert (event["event"], event["who"], event["why"]) == ("acknowledged", "ann (uid 1000)", "the cable is ordered")
    assert event["until"] == "2026-11-22T12:12:20.000Z"
    node.has(replace(MOUNT, state=ConditionState.ACKNOWLEDGED, ack=replace(known, until=NOW + 90)))
    assert node.names() == ["acknowledged"]
    node.has(MOUNT)
    (event,) = node.told()
    assert (event["event"], event["was"]) == ("opened", "acknowledged")


def test_a_resume_in_slurm_acknowledges_by_an_operator(node: Node) -> None:
    node.has(MOUNT)
    node.told()
    node.memory.set_conditions(endings.acknowledge_resumed(node.memory.conditions, NOW, NOW))
    (event,) = node.told()
    assert (event["event"], event["who"]) == ("acknowledged", "an operator")
    assert "until" not in event


def test_an_ack_of_what_did_not_count_yet_ends_with_it(node: Node) -> None:
    pending = replace(MOUNT, state=ConditionState.PENDING, opened_at=0.0)
    ack = Ack(NOW + 60, "known", "ann", Severity.DEGRADED, NOW)
    node.has(replace(pending, state=ConditionState.ACKNOWLEDGED, ack=ack))
    assert node.names() == ["opened", "acknowledged"]
    node.has(pending)
    (event,) = node.told()
    assert (event["event"], event["cleared_by"]) == ("cleared", "unconfirmed")


def test_history_and_what_can_be_forged_are_marked(node: Node) -> None:
    node.has(replace(XID, history=True), replace(MOUNT, observed=True))
    history, observed = node.told()
    assert (history["history"], "observed" in history) == (True, False)
    assert (observed["observed"], "history" in observed) == (True, False)


# --- seen again


def test_a_sight_is_told_at_ten_a_hundred_a_thousand_and_no_other_in_an_hour(node: Node) -> None:
    for count in range(1, 1101):
        node.now = NOW + count
        node.has(seen(MOUNT, count, node.now))
    assert [(e["event"], e["count"]) for e in node.told()] == [
        ("opened", 1),
        ("seen_again", 10),
        ("seen_again", 100),
        ("seen_again", 1000),
    ]


def test_a_sight_an_hour_after_its_last_line_is_told_and_none_before(node: Node) -> None:
    node.has(MOUNT)
    node.told()
    for seconds, told in ((3599, []), (3600, ["seen_again"]), (3601, []), (7199, []), (7200, ["seen_again"])):
        node.now = NOW + seconds
        node.has(seen(MOUNT, 2 + seconds % 7, node.now))
        assert node.names() == told, seconds


def test_what_gets_its_name_with_the_first_inventory_is_told_once_with_it(node: Node) -> None:
    node.has(XID, MOUNT)
    node.told()
    before = node.memory.ledger
    node.has(replace(XID, message="GPU 3 fell off the bus"), MOUNT)
    for told in (["GPU 3 fell off the bus"], []):
        node.memory.stream.emit(*events.renamed_part_events(before, node.memory.ledger, node.now))
        assert [event["message"] for event in node.told() if event["event"] == "seen_again"] == told
        before = node.memory.ledger


def test_what_only_stands_is_not_seen(node: Node) -> None:
    node.has(MOUNT)
    node.now = NOW + 86400
    node.has(replace(MOUNT, quiet_seconds=86400.0))
    assert node.names() == ["opened"]


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_a_clock_that_is_set_moves_the_hour_between_two_lines_with_it(node: Node, step: float) -> None:
    node.has(MOUNT)
    node.told()
    node.memory.apply_clock_step(step)
    assert node.names() == []
    node.now += step + 60
    node.has(seen(MOUNT, 2, node.now))
    assert node.names() == []
    node.now += 3600
    node.has(seen(MOUNT, 3, node.now))
    assert node.names() == ["seen_again"]


@pytest.mark.parametrize("step", [-86400.0, 86400.0])
def test_a_clock_that_is_set_after_a_jobs_end_neither_hastens_nor_repeats_what_is_told_of_its_last_minutes(
    node: Node, step: float
) -> None:
    node.has(MOUNT)
    node.memory.stream.emit_job_end()
    node.told()
    node.memory.apply_clock_step(step)
    node.now += step + 60
    node.memory.stream.flush_after_job()
    assert node.memory.ledger.emitted.job_ended == NOW + step
    node.now += 300
    node.memory.stream.flush_after_job()
    assert (node.memory.ledger.emitted.job_ended, node.names()) == (0.0, []), "its only observation is already written"


# --- a job's end


def test_five_minutes_after_a_jobs_end_what_its_last_ten_showed_is_told_if_it_was_not(node: Node) -> None:
    old = replace(XID, subject="0000:1b:00.0")
    node.has(MOUNT, XID, old)
    node.told()
    node.has(seen(MOUNT, 2, NOW), XID, seen(old, 2, NOW + 1))
    node.now = NOW + 602
    node.memory.stream.emit_job_end()
    node.now += events.FLUSH_SECONDS - 1
    node.memory.stream.flush_after_job()
    assert node.names() == []
    node.has(seen(MOUNT, 3, NOW + 650), XID, seen(old, 2, NOW + 1))
    node.now += 1
    node.memory.stream.flush_after_job()
    (event,) = node.told()
    assert (event["event"], event["code"], event["count"]) == ("seen_again", "mount/missing", 3)
    node.memory.stream.flush_after_job()
    assert node.names() == []


def test_what_was_seen_ten_minutes_before_the_end_is_told_and_a_moment_earlier_is_not(node: Node) -> None:
    node.has(MOUNT, XID)
    node.told()
    node.has(seen(MOUNT, 2, NOW), seen(XID, 2, NOW - 1))
    node.now = NOW + events.BEFORE_JOB_END_SECONDS
    node.memory.stream.emit_job_end()
    node.now += events.FLUSH_SECONDS
    node.memory.stream.flush_after_job()
    assert [e["code"] for e in node.told()] == ["mount/missing"]


def test_jobs_that_end_before_a_flush_share_the_one_behind_it_and_it_survives_a_kill(node: Node) -> None:
    node.has(MOUNT)
    node.told()
    node.memory.stream.emit_job_end()
    for ended in (NOW + 100, NOW + 200):
        node.now = ended
        node.has(seen(MOUNT, 2, node.now))
        node.memory.stream.emit_job_end()
    node.memory.save()
    node.start()
    node.told()
    for at, count in ((NOW, 3), (NOW + 200, 4)):
        assert events.flush_time(node.memory.ledger.emitted) == at + events.FLUSH_SECONDS
        node.now = at + events.FLUSH_SECONDS
        node.has(seen(MOUNT, count, node.now))
        node.memory.stream.flush_after_job()
        assert node.names() == ["seen_again"]
    assert events.flush_time(node.memory.ledger.emitted) == float("inf")


# --- Slurm, operators


def test_our_drain_is_told_when_slurm_shows_it_and_not_at_each_look(node: Node) -> None:
    for slurm in (
        DrainRecord(pending_reason="healthd: a", pending_since=NOW),
        DrainRecord(reason="healthd: a", confirmed_at=NOW),
        DrainRecord(reason="healthd: a", confirmed_at=NOW + 1),
        DrainRecord(reason="healthd: b", confirmed_at=NOW + 2),
        DrainRecord(),
    ):
        node.memory.change(slurm=slurm)
    assert [(e["event"], e["stage"], e["reason"]) for e in node.told()] == [
        ("drain", "confirmed", "healthd: a"),
        ("drain", "confirmed", "healthd: b"),
    ]


def test_a_pause_is_told_when_it_begins_and_when_it_is_over(node: Node) -> None:
    commands.pause(node.memory, {"seconds": 60, "why": "driver upgrade"}, "ann (uid 1000)", NOW)
    commands.end_pause(node.memory, NOW + 60)
    assert [(e["event"], e["stage"], e["who"], e["why"], e["until"]) for e in node.told()] == [
        ("pause", stage, "ann (uid 1000)", "driver upgrade", "2026-11-22T12:12:20.000Z") for stage in ("begun", "ended")
    ]


def test_a_repair_is_told_with_who_and_what_it_ended(node: Node) -> None:
    node.has(XID)
    node.told()
    request = {"code": "gpu_xid/79", "part": XID.subject, "why": "reseated"}
    commands.repaired(node.memory, request, "ann (uid 1000)", NOW)
    repaired, over = node.told()
    assert (repaired["event"], repaired["who"], repaired["code"]) == ("repaired", "ann (uid 1000)", "gpu_xid/79")
    assert (repaired["subject"], repaired["why"]) == (XID.subject, "reseated")
    assert (over["event"], over["cleared_by"]) == ("cleared", "repaired by ann (uid 1000): reseated")


def test_a_decision_is_told_in_a_word_and_a_sentence() -> None:
    assert events.decision(Drain("healthd: a", requeue=True), "drain and requeue: healthd: a").fields == {
        "decision": "drain",
        "text": "drain and requeue: healthd: a",
    }
    assert events.decision(Leave("paused"), "paused").fields["decision"] == "leave"


# --- checks


def test_a_check_is_told_when_it_comes_when_it_changes_and_when_it_goes(node: Node) -> None:
    data, home = RunName("mount", "/data"), RunName("mount", "/home")
    node.memory.stream.emit_checks({data: ("1.0", "aa"), home: ("1.0", "bb")})
    node.now += 10
    node.memory.stream.emit_checks({data: ("1.1", "aa"), home: ("1.0", "bb")})
    node.memory.stream.emit_checks({data: ("1.1", "aa"), home: ("1.0", "bb")})
    node.now += 10
    node.memory.stream.emit_checks({data: ("1.1", "ab")})
    told = [(e["event"], e["instance"], e["version"], e["settings"], e["since"][17:19]) for e in node.told()]
    assert told == [
        ("check_enabled", "/data", "1.0", "aa", "20"),
        ("check_enabled", "/home", "1.0", "bb", "20"),
        ("check_changed", "/data", "1.1", "aa", "20"),
        ("check_disabled", "/home", "1.0", "bb", "20"),
        ("check_changed", "/data", "1.1", "ab", "20"),
    ]
    node.now += 10
    node.memory.stream.emit_checks({data: ("1.1", "ab"), home: ("1.0", "bb")})
    (again,) = node.told()
    assert (again["event"], again["since"][17:19]) == ("check_enabled", "50"), "enabled without a break since then"


# --- start, stop and alive


def test_a_start_says_when_the_one_before_was_last_alive_and_whether_it_had_stopped(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (first,) = node.told()
    assert (first["event"], first["mode"], first["last_alive"], first["clean"]) == ("started", "act", None, False)
    node.memory.save()
    node.start(alive=NOW - 5)
    (killed,) = node.told()
    assert (killed["last_alive"], killed["clean"]) == ("2026-11-22T12:11:15.000Z", False)
    node.memory.stream.emit_stopped("requested")
    node.memory.save()
    node.start(alive=NOW + 100)
    stopped, started = node.told()
    assert (stopped["event"], started["clean"]) == ("stopped", True)
    assert started["last_alive"] is None, "the clock was ahead at that time"


def test_alive_names_what_stands_and_who_looks_at_a_start_and_once_a_day(node: Node) -> None:
    node.has(MOUNT, replace(XID, state=ConditionState.PENDING))
    (opened,) = node.told()
    node.memory.stream.emit_alive(["mount", "gpu_xid"], force=True)
    (alive,) = node.told()
    assert alive["checks"] == ["gpu_xid", "mount"]
    assert alive["conditions"] == [
        {
            "condition": opened["condition"],
            "check": "mount",
            "instance": "/data",
            "code": "mount/missing",
            "subject": "/data",
            "severity": "degraded",
            "state": "open",
        }
    ]
    for seconds, told in ((86399, []), (86400, ["alive"]), (86401, []), (2 * 86400, ["alive"])):
        node.now = NOW + seconds
        node.memory.stream.emit_alive([], force=False)
        assert node.names() == told, seconds
    node.now = NOW
    node.memory.stream.emit_alive([], force=False)
    assert node.names() == ["alive"], "the clock was set back"


# --- stream identity


def test_a_restart_goes_on_with_its_stream_and_a_boot_begins_another(node: Node) -> None:
    node.has(MOUNT)
    node.memory.save()
    copy = (node.directory / store.FILE).read_text()
    before = node.memory.ledger.outbox
    node.start()
    assert (node.memory.ledger.outbox.stream_id, len(before.stream_id)) == (before.stream_id, 16)
    assert [json.loads(line)["seq"] for line in node.memory.ledger.outbox.lines] == [2, 3]
    (node.directory / store.FILE).unlink()
    node.start(lambda: {store.FILE: copy}, boot_id="b2")
    lines = node.told()
    assert [e["event"] for e in lines] == ["opened", "started"], "pending lines are written; no condition is repeated"
    assert [e["seq"] for e in lines] == [2, 1]
    assert lines[0]["stream_id"] == before.stream_id != lines[1]["stream_id"]


def test_a_cluster_that_no_setting_names_is_that_of_slurms_settings(tmp_path: Path) -> None:
    memory = ConditionStore(str(tmp_path), lambda: NOW)
    memory.load(dict, "b1", Mode.ACT)
    memory.stream.set_cluster("")
    memory.stream.set_cluster("tux")
    memory.stream.emit_stopped("requested")
    memory.save()
    again = ConditionStore(str(tmp_path), lambda: NOW)
    again.load(dict, "b1", Mode.ACT)
    assert [json.loads(line)["cluster"] for line in again.ledger.outbox.lines] == ["", "tux", "tux"]


def test_a_mistake_in_telling_costs_the_change_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "dropped", guard.Counter())
    monkeypatch.setattr(events, "change_events", lambda *_: 1 / 0)
    node.has(MOUNT)
    assert MOUNT.key in node.memory.conditions
    assert guard.dropped["stream"] == 1


def test_what_did_not_fit_is_counted_since_the_start(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthd.events.outbox.MAX_LINES", 3)
    for number in range(5):
        node.has(replace(MOUNT, subject=f"/{number}"))
    assert (node.memory.stream.dropped, node.memory.ledger.outbox.dropped) == (6, 6)
    assert node.names() == ["opened", "opened", "cleared"]
    assert node.names() == ["dropped"]
    assert (node.memory.stream.dropped, node.memory.ledger.outbox.dropped) == (6, 0)


# --- any sequence of changes


def replayed(lines: list[str]) -> dict[str, str]:
    """Return the open conditions by the stream alone, "CODE SUBJECT" -> state, as docs/events.md describes."""
    stands: dict[str, tuple[str, str]] = {}
    for event in map(json.loads, lines):
        if event["event"] in ("opened", "acknowledged"):
            state = "open" if event["event"] == "opened" else "acknowledged"
            stands[event["condition"]] = (f"{event['code']} {event['subject']}".strip(), state)
        elif event["event"] == "cleared":
            del stands[event["condition"]]
        elif event["event"] in ("seen_again", "worsened"):
            assert event["condition"] in stands
    assert len({key for key, _ in stands.values()}) == len(stands), "one part has two conditions of one code"
    return dict(stands.values())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["open", "pending", "ack", "clear", "vanish", "worse", "again", "restart", "boot", "clock", "all"]
        ),
        st.integers(0, 4),
        st.integers(1, 5000),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whatever_changes_the_events_say_what_stands(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    node = Node(tmp_path_factory.mktemp("run"))
    for step, number, seconds in steps:
        node.now += seconds
        part = replace(MOUNT, subject=f"/{number}", first_seen=node.now, last_seen=node.now, opened_at=node.now)
        key, conditions = part.key, dict(node.memory.conditions)
        old = conditions.get(key, part)
        if step == "open":
            conditions[key] = replace(old, state=ConditionState.OPEN, ack=None)
        elif step == "pending" and key not in conditions:
            conditions[key] = replace(part, state=ConditionState.PENDING, opened_at=0.0)
        elif step == "ack":
            ack = Ack(node.now + 60, "known", "ann", old.severity, node.now)
            conditions[key] = replace(old, state=ConditionState.ACKNOWLEDGED, ack=ack)
        elif step == "clear":
            conditions[key] = cleared(old, "pass", node.now)
        elif step == "vanish":
            conditions.pop(key, None)
        elif step == "worse":
            conditions[key] = replace(old, severity=Severity(min(old.severity + 1, 3)))
        elif step == "again":
            conditions[key] = seen(old, old.count + seconds, node.now)
        elif step == "all":
            conditions = {each: cleared(c, "reboot", node.now) for each, c in conditions.items()}
        node.memory.set_conditions(conditions)
        if step == "clock":
            node.memory.apply_clock_step(float(seconds - 2500))
            node.now += seconds - 2500
        if step in ("restart", "boot"):
            node.memory.save()
            node.start(boot_id=f"b{number}" if step == "boot" else node.memory.ledger.boot_id)
        if number % 2:
            node.told()
    node.told()
    standing = {str(c.key): c.state for c in node.memory.ledger.conditions if c.state is not ConditionState.PENDING}
    assert replayed(node.lines) == {key: state.value for key, state in standing.items()}
    seqs = [json.loads(line)["seq"] for line in node.lines]
    assert sorted(set(seqs)) == list(range(1, len(set(seqs)) + 1))


# --- volume


@pytest.mark.one_python
def test_a_year_of_a_node_is_as_large_as_the_page_says(tmp_path: Path) -> None:
    """docs/events.md assumes 40 checks, a new version each month, ten faults that drain, and one warning that is open
    for a month and is found in each round."""
    node, names = Node(tmp_path), {RunName(name): ("", "") for name in (f"check_number_{n:02d}" for n in range(40))}
    quiet = warning = fault = 0

    def size() -> int:
        return sum(len(json.dumps(event, separators=(",", ":"))) + 1 for event in node.told())

    for day in range(365):
        if day % 30 == 0:
            node.memory.stream.emit_stopped("requested")
            node.memory.save()
            node.start(alive=node.now)
            node.memory.stream.emit_checks(dict.fromkeys(names, (f"1.{day}.0", "0123abcd")))
            node.memory.stream.emit([events.decision(Leave("nothing to do"), "nothing to do")])
        node.memory.stream.emit_alive([name.check for name in names], force=day % 30 == 0)
        quiet += size()
        if day % 36 == 5:
            broken = replace(XID, first_seen=node.now, opened_at=node.now, last_seen=node.now)
            node.has(broken)
            reason = "healthd: gpu_xid/79 0000:61:00.0: Xid 79: GPU has fallen off the bus"
            node.memory.stream.emit([events.decision(Drain(reason, requeue=True), f"drain and requeue: {reason}")])
            node.memory.stream.emit([Event("drain", {"stage": "sent", "reason": reason})])
            node.memory.change(slurm=DrainRecord(reason=reason))
            node.memory.stream.emit(
                [Event("requeue", {"stage": stage, "job": "4711"}) for stage in ("sent", "confirmed")]
            )
            node.memory.stream.emit([events.decision(Leave("drained"), "the drain stands")])
            commands.repaired(node.memory, {"code": "gpu_xid/79", "why": "reseated"}, "ann (uid 1000)", node.now)
            node.memory.stream.emit([Event("resume", {"stage": "sent"})])
            node.memory.stream.emit([Event("resume", {"stage": "confirmed", "reason": reason})])
            node.memory.change(slurm=DrainRecord())
            fault += size()
        if 100 <= day < 130:
            for number in range(288):
                node.now += 300
                node.has(seen(MOUNT, (day - 100) * 288 + number + 1, node.now))
            warning += size()
        else:
            node.has()
            node.now += 86400
    text = (Path(__file__).parents[3] / "docs/events.md").read_text("utf-8")
    said = re.search(r"quiet node: (\d+) KB.* fault that drains: (\d+) KB.* open for a day: (\d+) KB", text, re.S)
    assert said is not None
    measured = (quiet / 1e3, fault / 1e4, warning / 3e4)
    print(measured)  # pytest -s shows it
    assert [float(figure) for figure in said.groups()] == pytest.approx(measured, rel=0.15)
