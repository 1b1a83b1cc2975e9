"""The control socket's protocol: what each request looks like, and which are refused before anything is done."""

from __future__ import annotations

from typing import Any

import pytest

from healthd.agent.control import protocol
from healthd.agent.control.commands import COMMANDS, OF_DETECTION
from healthd.agent.control.protocol import Refused, asked_of, command_of
from healthd.agent.daemon import Daemon
from tests.agent.test_daemon_guards import daemon  # noqa: F401  # a fixture

MADE = [
    protocol.plain(protocol.STATUS),
    protocol.plain(protocol.RELOAD),
    protocol.plain(protocol.UNPAUSE),
    protocol.plain(protocol.FAILSLOW_UNPAUSE),
    protocol.looks_left(17.0),
    protocol.job_ended("4711"),
    protocol.repaired("gpu_xid/79", None, None),
    protocol.ack("gpu_xid/79", "0000:61:00.0", 60.0, "known"),
    protocol.unack("gpu_xid/79", None),
    protocol.pause(60.0, "a move"),
    protocol.pause(60.0, "a benchmark", protocol.FAILSLOW_PAUSE),
]


def test_each_request_that_a_client_makes_is_known_to_the_daemon_and_the_other_way_round() -> None:
    names = {command_of(request, "root (uid 0)", may_command=True) for request in MADE}
    assert names == {*protocol.QUESTIONS, *protocol.COMMANDS}
    assert {*COMMANDS, *OF_DETECTION} == names - {"status", "looks-left", "job-ended", "reload"}


@pytest.mark.parametrize("request_", MADE, ids=lambda request: request["command"])
def test_anyone_may_ask_and_only_who_may_command_may_tell(request_: dict[str, Any]) -> None:
    name = request_["command"]
    if name in protocol.QUESTIONS:
        assert command_of(request_, "ann (uid 1000)", may_command=False) == name
    else:
        with pytest.raises(Refused, match=r"permission denied for ann \(uid 1000\): run it as root \(sudo healthd "):
            command_of(request_, "ann (uid 1000)", may_command=False)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({}, "command: must be text"),
        ({"command": 7}, "command: must be text"),
        ({"command": "drain"}, "there is no command 'drain'"),
        ({"command": "x" * 100}, f"there is no command '{'x' * 39}"),
    ],
)
def test_what_is_no_command_is_refused_in_one_bounded_sentence(request_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        command_of(request_, "root (uid 0)", may_command=True)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("asked", [None, "now", -1, 1e13, float("nan"), [], float("inf")])
def test_a_time_that_is_none_is_refused(asked: object) -> None:
    with pytest.raises(Refused, match="asked: must be a time"):
        asked_of(protocol.looks_left(asked))


def test_what_the_daemon_refuses_is_quoted_in_bounds_and_on_one_line(daemon: Daemon) -> None:  # noqa: F811
    said = daemon.answer(protocol.ack("gpu\n_xid/79", None, 60.0, "known"), "root (uid 0)", True)
    assert said == {"error": "ack: there is no condition gpu?_xid/79; there are: none"}
    assert daemon.answer({"command": "no"}, "root (uid 0)", True) == {"error": "there is no command 'no'"}
    assert daemon.answer(protocol.looks_left("x"), "ann", False)["error"].startswith("asked: must be")


def test_each_question_and_command_is_answered_by_the_daemon(daemon: Daemon) -> None:  # noqa: F811
    for request in MADE:
        said = daemon.answer(request, "root (uid 0)", True)
        assert said.keys() & {"status", "left", "done", "error"}, request
    assert daemon.commanded == {"pause": 1, "failslow-pause": 1}, "what is refused is no command"


def test_the_log_names_who_gave_each_command_and_who_only_asked_not(
    daemon: Daemon,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon.answer(protocol.plain(protocol.STATUS), "ann (uid 1000)", False)
    daemon.answer(protocol.pause(60.0, "a move"), "root (uid 0)", True)
    logged = [record.getMessage() for record in caplog.records]
    assert [words.partition(":")[0] for words in logged if "(uid " in words] == ["pause by root (uid 0)"]
