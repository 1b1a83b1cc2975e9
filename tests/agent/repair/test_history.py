"""History of repairs: episodes from a node's event stream."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.repair.history import StepStage, episodes, steps
from healthd.common.model import Ending
from healthd.events.parse import Key, StreamEvent

DAY = 86400.0


def event(at: float, name: str, condition: str = "c1", **fields: Any) -> StreamEvent:
    whole = {"event": name, "condition": condition, "code": "gpu_xid/119", "subject": "gpu0", **fields}
    return StreamEvent(b"", whole, Key("", "n", "s"), 1, at)


def opened(at: float, condition: str = "c1", severity: str = "critical", **fields: Any) -> StreamEvent:
    return event(at, "opened", condition, severity=severity, **fields)


def cleared(at: float, by: str, condition: str = "c1") -> StreamEvent:
    return event(at, "cleared", condition, cleared_by=by)


def test_episode_has_advice_ending_and_return() -> None:
    advice = event(2.0, "repair", stage="advised", step="gpu_reset", causes=["gpu_xid/119 gpu0"])
    found = episodes([opened(1.0), advice, cleared(DAY, "gpu_reset: counters fell"), opened(3 * DAY, "c2")])
    first, second = found
    assert (first.advised, first.ended_at, first.ended_by) == ("gpu_reset", DAY, Ending.RESET)
    assert first.returned_at == 3 * DAY
    assert (second.ended_at, second.ended_by, second.returned_at) == (0.0, None, 0.0)


def test_episode_recognises_ending_texts() -> None:
    texts = ["pass", "reboot: anew", "repaired by root (uid 0)", "window", "others"]
    found = [episodes([opened(1.0), cleared(2.0, text)])[0].ended_by for text in texts]
    assert found == [Ending.PASS, Ending.REBOOT, Ending.REPAIRED, Ending.WINDOW, None]


def test_condition_that_was_renamed_has_not_returned() -> None:
    first, second = episodes([opened(1.0), cleared(2.0, "renamed to gpu1"), opened(3.0, "c2")])
    assert (first.ended_by, first.returned_at, second.ended_at) == (None, 0.0, 0.0)


def test_return_after_28_days_is_a_new_fault() -> None:
    first, _ = episodes([opened(1.0), cleared(2.0, "reboot"), opened(30 * DAY, "c2")])
    assert first.returned_at == 0.0


def test_warning_becomes_episode_when_it_drains() -> None:
    assert episodes([opened(1.0, severity="warning"), cleared(2.0, "pass")]) == []
    worse = event(5.0, "worsened", severity="degraded")
    assert [e.opened_at for e in episodes([opened(1.0, severity="warning"), worse])] == [5.0]


def test_observed_line_is_no_episode() -> None:
    assert episodes([opened(1.0, observed=True)]) == []


def test_repeated_opened_is_the_same_episode() -> None:
    assert len(episodes([opened(1.0), opened(2.0), cleared(3.0, "reboot")])) == 1


def test_steps_are_the_stages_of_steps_that_healthd_took() -> None:
    failed = {"stage": "failed", "step": "gpu_reset", "id": "r-1", "problem": "no effect", "was_taken": False}
    stream = [
        opened(1.0),
        event(2.0, "repair", stage="advised", step="gpu_reset", causes=["gpu_xid/119 gpu0"]),
        event(3.0, "repair", stage="claimed", step="gpu_reset", id="r-1"),
        event(4.0, "repair", **failed),
        event(5.0, "repair", stage="taken", step="reboot", id="r-2"),
        event(6.0, "repair", stage="succeeded", step="reboot", id="r-2"),
        event(7.0, "repair", stage="gave_up", step="person", problem="no effect"),
    ]
    assert steps(stream) == [
        StepStage(4.0, "gpu_reset", "failed", "r-1", "no effect", was_taken=False),
        StepStage(5.0, "reboot", "taken", "r-2"),
        StepStage(6.0, "reboot", "succeeded", "r-2"),
        StepStage(7.0, "person", "gave_up", "", "no effect"),
    ]


NAMES = st.sampled_from(["opened", "worsened", "cleared", "repair", "alive", "drain"])
FIELDS = st.fixed_dictionaries(
    {
        "severity": st.sampled_from(["info", "warning", "degraded", "critical"]),
        "cleared_by": st.text(max_size=20),
        "step": st.just("reboot"),
        "stage": st.sampled_from(["advised", "x"]),
        "causes": st.lists(st.just("gpu_xid/119 gpu0"), max_size=2),
    }
)


@given(st.lists(st.tuples(NAMES, st.sampled_from(["c1", "c2"]), FIELDS), max_size=20))
def test_episodes_of_any_stream_are_in_order(items: list[Any]) -> None:
    found = episodes(event(float(at), name, condition, **fields) for at, (name, condition, fields) in enumerate(items))
    assert [e.opened_at for e in found] == sorted(e.opened_at for e in found)
    assert all(e.ended_at >= e.opened_at for e in found if e.ended_at)
