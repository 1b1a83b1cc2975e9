"""Tests of the control protocol: the form of each request, and which requests are refused before any change."""

from __future__ import annotations

from typing import Any

import pytest

from healthd.agent.control import protocol
from healthd.agent.control.commands import COMMANDS, FAILSLOW_COMMANDS
from healthd.agent.control.protocol import RequestRefused, parse_command, parse_requested_at
from healthd.agent.daemon import Daemon
from healthd.agent.repair.orders import ORDERS
from tests.agent.test_daemon_guards import daemon  # noqa: F401  # a fixture

REQUESTS = [
    protocol.simple_request(protocol.STATUS),
    protocol.simple_request(protocol.RELOAD),
    protocol.simple_request(protocol.UNPAUSE),
    protocol.simple_request(protocol.FAILSLOW_UNPAUSE),
    protocol.simple_request(protocol.REPAIR_NOW),
    protocol.simple_request(protocol.REPAIR_STOP),
    protocol.pending_runs(17.0),
    protocol.job_ended("4711"),
    protocol.repaired("gpu_xid/79", None, None),
    protocol.ack("gpu_xid/79", "0000:61:00.0", 60.0, "known"),
    protocol.unack("gpu_xid/79", None),
    protocol.pause(60.0, "a move"),
    protocol.pause(60.0, "a benchmark", protocol.FAILSLOW_PAUSE),
]


def test_every_client_request_is_handled_by_daemon() -> None:
    names = {parse_command(request, "root (uid 0)", may_command=True) for request in REQUESTS}
    assert names == {*protocol.QUERIES, *protocol.COMMANDS}
    assert {*COMMANDS, *FAILSLOW_COMMANDS, *ORDERS} == names - {"status", "pending-runs", "job-ended", "reload"}


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request["command"])
def test_parse_command_requires_permission_for_commands(request_: dict[str, Any]) -> None:
    name = request_["command"]
    if name in protocol.QUERIES:
        assert parse_command(request_, "ann (uid 1000)", may_command=False) == name
    else:
        with pytest.raises(
            RequestRefused, match=r"permission denied for ann \(uid 1000\): run it as root \(sudo healthd "
        ):
            parse_command(request_, "ann (uid 1000)", may_command=False)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({}, "command: must be text"),
        ({"command": 7}, "command: must be text"),
        ({"command": "drain"}, "unknown command 'drain'"),
        ({"command": "x" * 100}, f"unknown command '{'x' * 39}"),
    ],
)
def test_parse_command_refuses_unknown_command(request_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestRefused) as raised:
        parse_command(request_, "root (uid 0)", may_command=True)
    assert str(raised.value) == sentence


@pytest.mark.parametrize("requested_at", [None, "now", -1, 1e13, float("nan"), [], float("inf")])
def test_parse_requested_at_refuses_invalid_time(requested_at: object) -> None:
    with pytest.raises(RequestRefused, match="requested_at: must be seconds"):
        parse_requested_at(protocol.pending_runs(requested_at))


def test_refusal_is_single_bounded_line(daemon: Daemon) -> None:  # noqa: F811
    reply = daemon.answer(protocol.ack("gpu\n_xid/79", None, 60.0, "known"), "root (uid 0)", True)
    assert reply.keys() == {"error"}
    assert reply["error"].startswith("ack: no condition gpu?_xid/79; ")
    assert "\n" not in reply["error"]
    assert daemon.answer({"command": "no"}, "root (uid 0)", True) == {"error": "unknown command 'no'"}
    assert daemon.answer(protocol.pending_runs("x"), "ann", False)["error"].startswith("requested_at: ")


def test_daemon_answers_every_request(daemon: Daemon) -> None:  # noqa: F811
    for request in REQUESTS:
        reply = daemon.answer(request, "root (uid 0)", True)
        assert reply.keys() & {"status", "pending", "done", "error"}, request
    assert daemon.command_counts == {"pause": 1, "failslow-pause": 1}, "a refused command is not counted"


def test_log_names_user_for_commands_and_not_for_queries(
    daemon: Daemon,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    daemon.answer(protocol.simple_request(protocol.STATUS), "ann (uid 1000)", False)
    daemon.answer(protocol.pause(60.0, "a move"), "root (uid 0)", True)
    logged = [record.getMessage() for record in caplog.records]
    assert [message.partition(":")[0] for message in logged if "(uid " in message] == ["pause by root (uid 0)"]
