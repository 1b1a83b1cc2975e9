"""What the daemon and its worker do not say again: checks are told, and answers say, what they would otherwise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.worker.process import Setup, Worker
from healthd.agent.worker.unchanged import SAID_AGAIN, Known, restored, shortened
from healthd.common import history
from healthd.common.model import Observation, ObservationKind
from healthd.host.host import Host

NOW = 1_800_000_000.0
KEEP = history.KEEP_SECONDS
# Reads what its settings say, and tells how much that has grown.
ECHO = """\
from dataclasses import dataclass
from healthd.agent.settings.config import CheckConfig
from healthd.common.model import Finding, Observation, ObservationKind, Severity

@dataclass(frozen=True, slots=True)
class Config(CheckConfig):
    readings: tuple[float, ...] = ()

def run(host, config, past):
    for number, value in enumerate(config.readings):
        reading = Observation("echo_total", value, ObservationKind.COUNTER, (("of", str(number)),))
        yield reading
        if grown := past.growth(reading, 3600.0):
            yield Finding(Severity.WARNING, "echo/grown", str(number), f"by {grown:g}")
"""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    checks = tmp_path_factory.mktemp("checks")
    (checks / "echo.py").write_text(ECHO)
    return Setup(checks_dir=str(checks))


class Pair:
    """A daemon's half, and a worker, which each request may find replaced."""

    def __init__(self, setup: Setup, brief: bool) -> None:
        self.setup, self.brief = setup, brief
        self.past, self.number = "", 0
        self.sent: list[dict[str, Any]] = []
        self.replace()

    def replace(self) -> None:
        self.worker = Worker(self.setup, Host("/"))
        self.known: Known | None = None

    def ask(self, readings: list[float]) -> dict[str, Any]:
        self.number += 1
        table = {"op": "run", "check": "echo", "instance": "", "config": {"readings": readings}}
        table |= {"past": self.past, "boot_id": "b", "now": NOW + 60 * self.number}
        known = self.known if self.brief else None
        request = {**shortened(table, known), "number": self.number}
        self.sent.append(request)
        answer = json.loads(self.worker.answer_line(json.dumps(request).encode()))
        answer, self.known = restored(answer, table, self.number, known)
        self.past = answer["past"]
        return answer


VALUES = st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]), max_size=3)
STEPS = st.lists(st.tuples(VALUES, st.sampled_from(["", "", "", "", "replace", "repaired", "forgotten"])), max_size=12)


@given(STEPS)
def test_what_is_left_out_changes_nothing_that_is_found_or_remembered(echo: Setup, steps: list[Any]) -> None:
    brief, whole = Pair(echo, brief=True), Pair(echo, brief=False)
    for readings, event in steps:
        for pair in (brief, whole):
            if event == "replace":
                pair.replace()
            elif event == "repaired":
                pair.past = history.encode(history.without_growth(history.decode(pair.past), "0"))
            elif event == "forgotten":
                pair.past = ""
        assert brief.ask(readings) == whole.ask(readings)


def test_a_worker_that_knows_a_run_is_told_only_what_is_new(echo: Setup) -> None:
    pair = Pair(echo, brief=True)
    for _ in range(3):
        answer = pair.ask([1.0, 2.0])
    assert [sorted(sent) for sent in pair.sent] == [
        ["boot_id", "check", "config", "instance", "now", "number", "op", "past"],
        *[["before", "boot_id", "check", "instance", "now", "number", "op"]] * 2,
    ]
    assert [item["value"] for item in json.loads(answer["observations"])] == [1.0, 2.0]
    pair.past = ""
    pair.ask([1.0, 2.0])
    assert "past" in pair.sent[-1]
    assert "config" not in pair.sent[-1]
    pair.replace()
    pair.ask([1.0, 2.0])
    assert {"config", "past"} <= set(pair.sent[-1])


def test_a_worker_that_is_asked_for_what_it_does_not_know_says_so_and_is_told_all_the_next_time(echo: Setup) -> None:
    pair = Pair(echo, brief=True)
    pair.ask([1.0])
    kept, pair.worker = pair.known, Worker(echo, Host("/"))
    request = {"op": "run", "check": "echo", "instance": "", "boot_id": "b", "before": 1, "number": 2, "now": NOW}
    answer = json.loads(pair.worker.answer_line(json.dumps(request).encode()))
    assert answer["error"] == "it does not know request 1"
    assert restored(answer, {}, 2, kept) == (answer, None)


def test_a_request_without_a_moment_is_never_shortened(echo: Setup) -> None:
    worker = Worker(echo, Host("/"))
    request = {"op": "run", "check": "echo", "instance": "", "config": {"readings": [1.0]}, "past": "", "boot_id": "b"}
    for number in (1, 2):
        answer = json.loads(worker.answer_line(json.dumps({**request, "number": number}).encode()))
        assert {*SAID_AGAIN, "past"} <= set(answer)
        assert restored(answer, request, number, None) == (answer, None)
    assert shortened(request, None) == request


READINGS = st.lists(
    st.builds(
        Observation,
        st.sampled_from(["a", "b_total"]),
        st.sampled_from([0.0, 1, 255.0]),
        st.sampled_from(ObservationKind),
        st.sampled_from([(), (("port", "1"),), (("port", "2"),)]),
        st.sampled_from([None, 8]),
    ),
    max_size=5,
)


@given(READINGS, READINGS, st.sampled_from(["b", "after"]))
def test_a_store_that_stands_is_what_the_same_readings_make_of_it(
    earlier: list[Observation], readings: list[Observation], boot_id: str
) -> None:
    store = history.update(history.update({}, earlier, NOW - KEEP / 2, "b"), readings, NOW, "b")
    until = history.stands_until(store, len(readings), NOW, boot_id)
    for now in (NOW + 60, NOW + KEEP / 2 - 1, NOW + KEEP / 2, NOW + KEEP):
        updated = history.update(store, readings, now, boot_id)
        if now < until:
            assert history.read_again(store, NOW, now) == updated
            assert history.decode(history.encoded_again(history.encode(store), NOW, now, boot_id)) == updated
        elif until > 0:
            assert history.read_again(store, NOW, now) != updated, "it stands for as long as it can"
