"""`healthd validate --nodes`: each reservation and job is removed again, however the run ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import columns

from healthd.common.slurm.commands import Argv, CommandResult
from healthd.validation.across_nodes import InvalidPass, Role, as_document, role_in_pass
from healthd.validation.reservation import (
    STATE_COLUMNS,
    NodesResult,
    NoReservation,
    ReservationRequest,
    Stopped,
    job_minutes,
    json_documents,
    pairs_as_text,
    validate,
)
from healthd.validation.transfers import AssessedTransfer, Suspect, Transfer, judge, parse_transfer, suspects

REQUEST = ReservationRequest(
    ("n1", "n2"), "healthd-validate-1", "root", "healthd", 600.0, (), ((("n1", "n2"),), (("n2", "n1"),))
)


def states(**nodes: tuple[str, str]) -> bytes:
    """Return sinfo's table of these nodes with their address and state."""
    return b"".join(columns((name, *address_and_state), STATE_COLUMNS) for name, address_and_state in nodes.items())


IDLE = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"))
OK = CommandResult(0)


def labelled(*documents: dict[str, object]) -> str:
    """Return output of `srun --label`: lines of several tasks in any order."""
    lines = [
        f"{task}: {line}"
        for task, document in enumerate(documents)
        for line in json.dumps(document, indent=1).splitlines()
    ]
    return "\n".join(sorted(lines, key=lambda line: line.partition(":")[0])) + "\n"


def transfers(sender: str, receiver: str) -> dict[str, object]:
    row = {
        "sender": sender,
        "receiver": receiver,
        "rail": "mlx5_0/1",
        "gbits": 390.0,
        "state": "measured",
        "message": "",
    }
    return {"node": sender, "transfers": [row]}


def answer(argv: Argv) -> CommandResult:
    """Answer like a Slurm without errors."""
    if argv[0] == "sinfo":
        return CommandResult(0, IDLE)
    if argv[0] == "salloc":
        return CommandResult(0, b"", "salloc: Granted job allocation 42\n")
    if argv[0] == "srun" and "--pair" in argv:
        sender, receiver = argv[-1].split()[:2]
        return CommandResult(0, labelled(transfers(sender, receiver), {"node": receiver, "transfers": []}).encode())
    if argv[0] == "srun" and "--mndiag" in argv:
        return CommandResult(0, labelled({"head": "n1", "mndiag": [], "verdict": "failed"}).encode())
    if argv[0] == "srun":
        return CommandResult(0, labelled({"node": "n1", "results": []}, {"node": "n2", "results": []}).encode())
    return OK


def run(
    answers: Callable[[Argv], CommandResult | Exception] = answer, request: ReservationRequest = REQUEST
) -> tuple[NodesResult | Exception, list[Argv]]:
    """Return the result and the sent commands. An Exception is raised instead of an answer."""
    steps, sent = validate(request), []
    try:
        command = next(steps)
        while True:
            sent.append(command.argv)
            response = answers(command.argv)
            command = steps.throw(response) if isinstance(response, Exception) else steps.send(response)
    except StopIteration as end:
        return end.value, sent
    except (NoReservation, Stopped) as error:
        return error, sent


def command_starts(sent: list[Argv]) -> list[str]:
    return [" ".join(argv[:2]) for argv in sent]


CREATED = ["sinfo -h", "scontrol create", "salloc --no-shell"]
REMOVED = ["scancel --reservation=healthd-validate-1", "scontrol delete"]


def test_each_node_and_pass_is_a_step_of_one_job_in_the_reservation() -> None:
    found, sent = run()
    assert isinstance(found, NodesResult)
    assert command_starts(sent) == [*CREATED, *["srun --jobid=42"] * 3, *REMOVED]
    assert sent[1][-1] == "Flags=MAINT,PURGE_COMP=00:01:00"
    assert "IGNORE_JOBS" not in str(sent)
    assert sent[4][-1] == "n1 n2 10.0.0.2 18515"
    assert [item["node"] for item in found.documents] == ["n1", "n2"]
    assert [(item.sender, item.receiver) for item in found.transfers] == [("n1", "n2"), ("n2", "n1")]
    assert found.problems == ()


def test_reservation_is_longer_than_job_and_job_longer_than_its_work() -> None:
    _, sent = run()
    assert job_minutes(REQUEST) == 16
    assert "--time=16" in sent[2]
    assert "Duration=18" in sent[1]


def test_domain_diagnostic_runs_on_first_node_over_all_nodes() -> None:
    request = REQUEST._replace(mndiag_seconds=900.0)
    found, sent = run(request=request)
    assert isinstance(found, NodesResult)
    assert command_starts(sent) == [*CREATED, *["srun --jobid=42"] * 4, *REMOVED]
    assert sent[6][3:5] == ("--nodes=1", "--ntasks=1")
    assert "--nodelist=n1" in sent[6]
    assert sent[6][sent[6].index("--mndiag") + 1] == "n1,n2"
    assert found.mndiag == {"head": "n1", "mndiag": [], "verdict": "failed"}
    assert as_document(request, found)["verdict"] == "failed"
    assert job_minutes(request) == 33


def test_domain_diagnostic_without_answer_is_a_problem() -> None:
    request = REQUEST._replace(mndiag_seconds=900.0)
    found, sent = run(lambda argv: CommandResult(None) if "--mndiag" in argv else answer(argv), request)
    assert isinstance(found, NodesResult)
    assert (found.mndiag, len(found.problems)) == (None, 1)
    assert command_starts(sent)[-2:] == REMOVED


def node_document(name: str, verdict: str = "ok") -> dict[str, Any]:
    return {"node": name, "results": [], "verdict": verdict}


@pytest.mark.parametrize(
    ("seconds", "mndiag", "nodes", "verdict"),
    [
        (900.0, None, ("n1", "n2"), "not_measured"),  # srun failed
        (900.0, {"verdict": "not_measured"}, ("n1", "n2"), "not_measured"),
        (900.0, {}, ("n1", "n2"), "not_measured"),
        (900.0, {"verdict": "ok"}, ("n1", "n2"), "ok"),
        (900.0, {"verdict": "failed"}, ("n1",), "failed"),
        (0.0, None, ("n1", "n2"), "ok"),
        (0.0, None, ("n1",), "not_measured"),  # n2 returned nothing
        (0.0, None, (), "not_measured"),
    ],
)
def test_missing_result_of_requested_measurement_is_not_ok(
    seconds: float, mndiag: dict[str, Any] | None, nodes: tuple[str, ...], verdict: str
) -> None:
    found = NodesResult(tuple(map(node_document, nodes)), (), (), mndiag)
    assert as_document(REQUEST._replace(mndiag_seconds=seconds), found)["verdict"] == verdict


@pytest.mark.parametrize("verdict", ["failed", "slow"])
def test_fault_is_worse_than_missing_result(verdict: str) -> None:
    found = NodesResult((node_document("n1", verdict),), (), ())
    assert as_document(REQUEST, found)["verdict"] == verdict


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("response", [Stopped("enough"), CommandResult(None), CommandResult(1, b"", "Invalid user id")])
def test_reservation_is_removed_after_any_failure(at: int, response: CommandResult | Exception) -> None:
    number = iter(range(100))
    _, sent = run(lambda argv: response if next(number) == at else answer(argv))
    refused = at == 1 and isinstance(response, CommandResult) and response.status == 1
    assert command_starts(sent)[-2:] == (["sinfo -h", "scontrol create"] if refused else REMOVED)


def test_reservation_in_use_is_deleted_later() -> None:
    deletes = iter([CommandResult(1, b"", "Requested reservation is in use")] * 3)
    found, sent = run(lambda argv: next(deletes, OK) if argv[:2] == ("scontrol", "delete") else answer(argv))
    assert isinstance(found, NodesResult)
    assert command_starts(sent)[-3:] == ["scontrol delete", "sleep 1", "scontrol delete"]
    assert found.problems == ()


def test_failed_deletion_is_reported_with_the_command() -> None:
    no = CommandResult(1, b"", "Access/permission denied")
    found, _ = run(lambda argv: no if argv[:2] == ("scontrol", "delete") else answer(argv))
    assert isinstance(found, NodesResult)
    assert "scontrol delete ReservationName=healthd-validate-1" in found.problems[0]


@pytest.mark.parametrize("state", ["mixed", "idle+drain", "idle+reserved", "idle+maintenance", "down", "idle*"])
def test_busy_node_is_rejected_before_anything_is_created(state: str) -> None:
    table = CommandResult(0, states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", state)))
    error, sent = run(lambda argv: table if argv[0] == "sinfo" else answer(argv))
    assert str(error).startswith(f"n2 is {state.upper()}: each node must be idle")
    assert len(sent) == 1


def test_node_unknown_to_slurm_is_rejected() -> None:
    error, sent = run(
        lambda argv: CommandResult(0, states(n1=("10.0.0.1", "idle"))) if argv[0] == "sinfo" else answer(argv)
    )
    assert str(error) == "sinfo does not list node n2"
    assert len(sent) == 1


@pytest.mark.parametrize("lost", [1, 300])
def test_unreadable_rows_are_reported_if_a_node_is_missing(lost: int) -> None:
    table = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"))[:-lost]
    error, sent = run(lambda argv: CommandResult(0, table) if argv[0] == "sinfo" else answer(argv))
    assert str(error) == "sinfo does not list node n2: 1 row from sinfo could not be read"
    assert len(sent) == 1


def test_unreadable_row_of_another_node_is_skipped() -> None:
    table = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"), n3=("10.0.0.3", "idle"))[:-9]
    found, _ = run(lambda argv: CommandResult(0, table) if argv[0] == "sinfo" else answer(argv))
    assert isinstance(found, NodesResult)


def test_nodes_without_report_are_named() -> None:
    def fail_srun(argv: Argv) -> CommandResult:
        return CommandResult(1, b"", "srun: error: n2: task 1: Exited with exit code 127") if "srun" in argv else OK

    found, _ = run(lambda argv: fail_srun(argv) if argv[0] == "srun" else answer(argv))
    assert isinstance(found, NodesResult)
    assert found.problems == (
        "n1,n2 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
        "pass 1: n1>n2 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
        "pass 2: n2>n1 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
    )


@given(st.text())
def test_json_documents_accepts_any_text(text: str) -> None:
    assert all(isinstance(document, dict) for document in json_documents(text))
    assert json_documents(f"{text}\n") == json_documents(text)


@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=4))
def test_json_documents_joins_lines_of_several_tasks(documents: list[dict[str, str]]) -> None:
    assert json_documents(labelled(*documents)) == documents  # type: ignore[arg-type]


# --- a pass on one node


def test_role_in_pass_returns_part_of_the_node() -> None:
    text = pairs_as_text((("n1", "n2"), ("n3", "n4")), {"n2": "10.0.0.2", "n4": "fe80::4"})
    assert text == "n1 n2 10.0.0.2 18515,n3 n4 fe80::4 18579"
    assert role_in_pass(text, "n1") == Role("n1", "n2", "10.0.0.2", 18515, sends=True)
    assert role_in_pass(text, "n4") == Role("n3", "n4", "fe80::4", 18579, sends=False)
    assert role_in_pass(text, "n5") is None


@given(st.text() | st.lists(st.sampled_from(["n1", "-d", "10.0.0.2", "70000", "5", "²"]), max_size=5).map(" ".join))
def test_role_in_pass_of_any_text_gives_role_or_error(text: str) -> None:
    try:
        found = role_in_pass(text, "n1")
    except InvalidPass:
        return
    assert found is None or ("n1" in found[:2] and not found.address.startswith("-") and found.port > 0)


# --- judge and suspects


def transfer(
    sender: str, receiver: str, gbits: float | None, state: str = "measured", rail: str = "mlx5_0/1"
) -> Transfer:
    return Transfer(sender, receiver, rail, gbits, state, "")


def ring_transfers(*speeds: float) -> list[Transfer]:
    count = len(speeds)
    return [transfer(f"n{i}", f"n{(i + 1) % count}", speed) for i, speed in enumerate(speeds)]


def test_transfer_slower_than_1_1_times_the_median_is_slow() -> None:
    assert [assessed.verdict for assessed in judge(ring_transfers(110.0, 110.0, 110.0, 100.0))] == ["ok"] * 4
    assert [assessed.verdict for assessed in judge(ring_transfers(110.0, 110.0, 110.0, 99.9))] == [
        "ok",
        "ok",
        "ok",
        "slow",
    ]


def test_two_transfers_are_too_few_to_compare() -> None:
    assert [assessed.verdict for assessed in judge(ring_transfers(390.0, 20.0))] == ["ok", "ok"]
    assert all("too few" in assessed.message for assessed in judge(ring_transfers(390.0, 20.0)))


def test_rails_are_compared_separately() -> None:
    storage = [transfer(*pair, 97.0, rail="mlx5_8/1") for pair in (("n0", "n1"), ("n1", "n2"), ("n2", "n0"))]
    assert {assessed.verdict for assessed in judge([*ring_transfers(390.0, 391.0, 392.0), *storage])} == {"ok"}


def test_suspect_is_the_node_if_slow_in_both_pairs_else_the_link() -> None:
    assert suspects(judge(ring_transfers(390.0, 200.0, 200.0, 390.0))) == [
        Suspect("node", ("n2",), "slow in each of its 2 pairs")
    ]
    assert suspects(judge(ring_transfers(390.0, 200.0, 390.0, 390.0))) == [
        Suspect("link", ("n1", "n2"), "slow only between these two nodes")
    ]


def test_suspect_of_two_nodes_is_the_link() -> None:
    failed = [
        AssessedTransfer(transfer("n0", "n1", None, "failed"), "failed", None, ""),
        AssessedTransfer(transfer("n1", "n0", 390.0), "ok", None, ""),
    ]
    assert [suspect.kind for suspect in suspects(failed)] == ["link"]


def test_unmeasured_transfer_makes_no_suspect() -> None:
    assert suspects(judge([transfer("n0", "n1", None, "not_measured"), *ring_transfers(390.0, 390.0, 390.0)])) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)
ROW = st.fixed_dictionaries(
    {
        "sender": st.text() | st.none(),
        "receiver": st.text(),
        "rail": st.text(),
        "gbits": st.floats() | st.none() | st.booleans(),
        "state": st.sampled_from(["measured", "failed", "not_measured", "x"]),
        "message": st.text(),
    }
)


@given(st.lists(JSON | ROW))
def test_parse_transfer_accepts_or_skips_any_output(rows: list[object]) -> None:
    found = [parsed for row in rows if (parsed := parse_transfer(row)) is not None]
    assert len(judge(found)) == len(found)
    suspects(judge(found))
