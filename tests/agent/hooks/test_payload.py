"""The document that a hook gets: which event runs which hook, and what the document says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.hooks.payload import MAX_CONDITIONS, VERSION, View, document, follow, hook_for_event, sample
from healthd.agent.settings.config import HOOKS
from healthd.common.values import decode, encode

HEAD = {"schema": 1, "cluster": "c1", "node": "n1", "stream_id": "a" * 16, "time": "2026-11-22T12:00:00.000Z"}


def event(name: str, seq: int = 1, **fields: Any) -> dict[str, Any]:
    return {**HEAD, "seq": seq, "event": name, **fields}


def opened(condition: str = "x-1", code: str = "gpu_xid/79", name: str = "opened", **fields: Any) -> dict[str, Any]:
    base = {"condition": condition, "check": code.partition("/")[0], "code": code, "subject": "0000:1b:00.0"}
    base |= {"severity": "critical", "message": "Xid 79", "first": HEAD["time"], "jobs": ["4711"]}
    return event(name, **{**base, **fields})


REASON = "healthd: gpu_xid/79 0000:1b:00.0: Xid 79"
DRAIN = event("drain", 5, stage="confirmed", reason=REASON)
RESUME = event("resume", 9, stage="confirmed", reason=REASON)


def after(*events: dict[str, Any]) -> View:
    view = View()
    for fields in events:
        view = follow(view, fields)
    return view


def document_of(*events: dict[str, Any]) -> dict[str, Any]:
    """Return the document for the last event."""
    before = after(*events[:-1])
    return document(hook_for_event(events[-1]), events[-1], before, follow(before, events[-1]))


@pytest.mark.parametrize(
    ("name", "stage", "hook"),
    [
        ("drain", "confirmed", "on_drain"),
        ("resume", "confirmed", "on_resume"),
        ("repair", "succeeded", "on_repair"),
        ("repair", "gave_up", "on_repair_failed"),
        ("drain", "sent", ""),
        ("drain", "refused", ""),
        ("resume", "sent", ""),
        ("repair", "begun", ""),
        ("requeue", "confirmed", ""),
    ],
)
def test_hook_for_event_returns_hook_for_confirmed_event_only(name, stage, hook):
    assert hook_for_event(event(name, stage=stage)) == hook


def test_document_of_drain_has_causes_with_reason_first():
    found = document_of(
        opened("m-1", "mount/missing", severity="degraded", subject="/data", jobs=[]),
        opened("x-1", serial="1650522012345"),
        opened("d-1", "disk_space/low", severity="warning"),
        DRAIN,
    )
    assert (found["v"], found["hook"], found["event"], found["node"]) == (VERSION, "on_drain", "drain", "n1")
    assert found["id"] == f"{'a' * 16}-5"
    assert [c["code"] for c in found["conditions"]] == ["gpu_xid/79", "mount/missing"]
    assert found["conditions"][0]["serial"] == "1650522012345"
    assert "serial" not in found["conditions"][1]
    assert found["jobs"] == ["4711"]
    assert "previous_reason" not in found
    assert "test" not in found


def test_document_of_changed_reason_names_previous_reason():
    worse = event("drain", 6, stage="confirmed", reason="healthd: gpu_xid/94", time="2026-11-22T13:00:00.000Z")
    found = document_of(opened(), DRAIN, worse)
    assert (found["previous_reason"], found["reason"]) == (REASON, "healthd: gpu_xid/94")
    assert found["drained_at"] == HEAD["time"]


def test_drain_after_lost_resume_is_a_new_drain():
    """The conditions of the first drain have been cleared, so Slurm ended this drain without an event."""
    evidence = event("evidence", 6, path="/var/lib/healthd/evidence/1.tar.gz")
    cleared = opened(name="cleared", cleared_by="a new boot")
    other = opened("m-1", "mount/missing", first="2026-11-22T12:59:00.000Z")
    later = event("drain", 9, stage="confirmed", reason="healthd: mount/missing", time="2026-11-22T13:00:00.000Z")
    found = document_of(opened(), DRAIN, evidence, cleared, other, later)
    assert found["drained_at"] == "2026-11-22T13:00:00.000Z"
    assert [c["code"] for c in found["conditions"]] == ["mount/missing"]
    assert found.keys() & {"previous_reason", "evidence"} == set()
    still_open = document_of(opened(), DRAIN, evidence, other, later)
    assert (still_open["drained_at"], still_open["previous_reason"]) == (HEAD["time"], REASON)


def test_dropped_lines_end_the_drain():
    dropped = event("dropped", 8, count=3, from_seq=5, to_seq=7)
    assert after(opened(), DRAIN, dropped).drain is None
    later = event("drain", 9, stage="confirmed", reason="healthd: gpu_xid/94", time="2026-11-22T13:00:00.000Z")
    found = document_of(opened(), DRAIN, dropped, later)
    assert found["drained_at"] == "2026-11-22T13:00:00.000Z"
    assert "previous_reason" not in found


def test_document_of_resume_has_conditions_of_drain():
    cleared = opened(name="cleared", cleared_by="repaired by root (uid 0)")
    found = document_of(opened(), DRAIN, cleared, {**RESUME, "who": "an operator"})
    assert [c["code"] for c in found["conditions"]] == ["gpu_xid/79"]
    assert (found["who"], found["drained_at"]) == ("an operator", HEAD["time"])
    assert after(opened(), DRAIN, cleared, RESUME) == View()


def test_document_of_repair_has_step_and_ignores_unknown_fields():
    repair = event("repair", 7, stage="gave_up", step="reboot", id="r-1", new_field={"a": 1})
    found = document_of(opened(), DRAIN, event("evidence", 6, path="/var/lib/healthd/evidence/1.tar.gz"), repair)
    assert found["repair"] == {"stage": "gave_up", "step": "reboot", "id": "r-1"}
    assert found["evidence"] == "/var/lib/healthd/evidence/1.tar.gz"
    assert found["reason"] == REASON


def test_acknowledged_and_forgeable_conditions_are_no_causes():
    acknowledged = opened(name="acknowledged", who="root (uid 0)")
    assert document_of(opened(), acknowledged, DRAIN)["conditions"] == []
    assert document_of(opened(), acknowledged, opened(was="acknowledged"), DRAIN)["conditions"] != []
    assert document_of(opened(observed=True), DRAIN)["conditions"] == []


def test_alive_drops_conditions_that_it_does_not_list():
    alive = event("alive", conditions=[{"condition": "x-2"}], checks=[])
    assert set(after(opened("x-1"), opened("x-2"), alive).conditions) == {"x-2"}
    assert set(after(opened("x-1"), {**alive, "conditions_more": 1}).conditions) == {"x-1"}


def test_view_keeps_limited_number_of_conditions():
    view = after(*(opened(f"x-{number}") for number in range(MAX_CONDITIONS + 5)))
    assert len(view.conditions) == MAX_CONDITIONS
    assert f"x-{MAX_CONDITIONS + 4}" in view.conditions


def test_view_survives_being_recorded():
    view = after(opened(serial="1"), DRAIN)
    assert decode(View, encode(view)) == view


@pytest.mark.parametrize("hook", HOOKS)
def test_sample_is_marked_and_has_fields_of_real_document(hook):
    found = sample(hook, "c1", "n1", HEAD["time"])
    assert found["test"] is True
    assert found["hook"] == hook
    stage = {"on_repair": "succeeded", "on_repair_failed": "gave_up"}.get(hook)
    last = {"on_drain": DRAIN, "on_resume": RESUME}.get(
        hook, event("repair", 7, stage=stage, step="reboot", attempt="r-1")
    )
    real = document_of(opened(serial="1"), *([] if hook == "on_drain" else [DRAIN]), last)
    assert set(found) - {"test"} == set(real)
    assert set(found["conditions"][0]) == set(real["conditions"][0])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ("stage", "condition", "code", "severity", "jobs", "conditions", "reason", "step", "path", "seq", "first")
EVENTS = st.sampled_from(("opened", "cleared", "acknowledged", "alive", "drain", "resume", "repair", "evidence"))
STAGES = st.sampled_from(("confirmed", "succeeded", "gave_up", "sent"))


@given(st.lists(st.tuples(EVENTS, STAGES, st.dictionaries(st.sampled_from(NAMES), JSON)), max_size=6))
def test_follow_and_document_accept_any_fields(parts):
    view = View()
    for name, stage, fields in parts:
        line = {"event": name, "stage": stage, **fields}
        before, view = view, follow(view, line)
        if hook := hook_for_event(line):
            encode(document(hook, line, before, view))
        assert decode(View, encode(view)) == view
