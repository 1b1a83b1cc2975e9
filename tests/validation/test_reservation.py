"""`healthd validate --nodes`: each reservation and job is removed again, however the run ends."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import columns

from healthd.common.slurm.commands import Argv, CommandResult
from healthd.validation.across_nodes import InvalidPass, Role, role_in_pass
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

WANTED = ReservationRequest(
    ("n1", "n2"), "healthd-validate-1", "root", "healthd", 600.0, (), ((("n1", "n2"),), (("n2", "n1"),))
)


def states(**nodes: tuple[str, str]) -> bytes:
    """Return sinfo's table of these nodes with their address and state."""
    return b"".join(columns((name, *shown), STATE_COLUMNS) for name, shown in nodes.items())


IDLE = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"))
OK = CommandResult(0)


def labelled(*documents: dict[str, object]) -> str:
    """Return output of `srun --label`: lines of several tasks in any order."""
    lines = [f"{task}: {line}" for task, one in enumerate(documents) for line in json.dumps(one, indent=1).splitlines()]
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
    if argv[0] == "srun":
        return CommandResult(0, labelled({"node": "n1", "results": []}, {"node": "n2", "results": []}).encode())
    return OK


def run(
    answers: Callable[[Argv], CommandResult | Exception] = answer, wanted: ReservationRequest = WANTED
) -> tuple[NodesResult | Exception, list[Argv]]:
    """Return the result and the sent commands. An Exception is raised instead of an answer."""
    steps, sent = validate(wanted), []
    try:
        command = next(steps)
        while True:
            sent.append(command.argv)
            said = answers(command.argv)
            command = steps.throw(said) if isinstance(said, Exception) else steps.send(said)
    except StopIteration as end:
        return end.value, sent
    except (NoReservation, Stopped) as error:
        return error, sent


def words(sent: list[Argv]) -> list[str]:
    return [" ".join(argv[:2]) for argv in sent]


MADE = ["sinfo -h", "scontrol create", "salloc --no-shell"]
TAKEN_BACK = ["scancel --reservation=healthd-validate-1", "scontrol delete"]


def test_each_node_and_each_pass_is_a_step_of_one_job_in_the_reservation() -> None:
    found, sent = run()
    assert isinstance(found, NodesResult)
    assert words(sent) == [*MADE, *["srun --jobid=42"] * 3, *TAKEN_BACK]
    assert sent[1][-1] == "Flags=MAINT,PURGE_COMP=00:01:00"
    assert "IGNORE_JOBS" not in str(sent)
    assert sent[4][-1] == "n1 n2 10.0.0.2 18515"
    assert [one["node"] for one in found.documents] == ["n1", "n2"]
    assert [(one.sender, one.receiver) for one in found.transfers] == [("n1", "n2"), ("n2", "n1")]
    assert found.problems == ()


def test_the_reservation_is_longer_than_the_job_and_the_job_than_what_it_does() -> None:
    _, sent = run()
    assert job_minutes(WANTED) == 16
    assert "--time=16" in sent[2]
    assert "Duration=18" in sent[1]


@pytest.mark.parametrize("at", range(1, 6))
@pytest.mark.parametrize("said", [Stopped("enough"), CommandResult(None), CommandResult(1, b"", "Invalid user id")])
def test_whatever_happens_after_it_was_begun_the_reservation_is_removed(
    at: int, said: CommandResult | Exception
) -> None:
    number = iter(range(100))
    _, sent = run(lambda argv: said if next(number) == at else answer(argv))
    refused = at == 1 and isinstance(said, CommandResult) and said.status == 1
    assert words(sent)[-2:] == (["sinfo -h", "scontrol create"] if refused else TAKEN_BACK)


def test_one_that_is_in_use_is_deleted_when_it_is_no_more() -> None:
    deletes = iter([CommandResult(1, b"", "Requested reservation is in use")] * 3)
    found, sent = run(lambda argv: next(deletes, OK) if argv[:2] == ("scontrol", "delete") else answer(argv))
    assert isinstance(found, NodesResult)
    assert words(sent)[-3:] == ["scontrol delete", "sleep 1", "scontrol delete"]
    assert found.problems == ()


def test_one_that_cannot_be_deleted_is_told_with_the_command_that_does() -> None:
    no = CommandResult(1, b"", "Access/permission denied")
    found, _ = run(lambda argv: no if argv[:2] == ("scontrol", "delete") else answer(argv))
    assert isinstance(found, NodesResult)
    assert "scontrol delete ReservationName=healthd-validate-1" in found.problems[0]


@pytest.mark.parametrize("state", ["mixed", "idle+drain", "idle+reserved", "idle+maintenance", "down", "idle*"])
def test_a_node_that_is_not_free_is_refused_before_anything_is_made(state: str) -> None:
    shown = CommandResult(0, states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", state)))
    error, sent = run(lambda argv: shown if argv[0] == "sinfo" else answer(argv))
    assert str(error).startswith(f"n2 is {state.upper()}: each node must be idle")
    assert len(sent) == 1


def test_a_node_that_slurm_does_not_know_is_refused() -> None:
    error, sent = run(
        lambda argv: CommandResult(0, states(n1=("10.0.0.1", "idle"))) if argv[0] == "sinfo" else answer(argv)
    )
    assert str(error) == "sinfo does not list node n2"
    assert len(sent) == 1


@pytest.mark.parametrize("lost", [1, 300])
def test_rows_that_cannot_be_read_are_reported_if_a_node_is_missing(lost: int) -> None:
    table = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"))[:-lost]
    error, sent = run(lambda argv: CommandResult(0, table) if argv[0] == "sinfo" else answer(argv))
    assert str(error) == "sinfo does not list node n2: 1 row from sinfo could not be read"
    assert len(sent) == 1


def test_a_row_of_another_node_that_cannot_be_read_is_skipped() -> None:
    table = states(n1=("10.0.0.1", "idle"), n2=("10.0.0.2", "idle"), n3=("10.0.0.3", "idle"))[:-9]
    found, _ = run(lambda argv: CommandResult(0, table) if argv[0] == "sinfo" else answer(argv))
    assert isinstance(found, NodesResult)


def test_who_told_nothing_is_named() -> None:
    def silent(argv: Argv) -> CommandResult:
        return CommandResult(1, b"", "srun: error: n2: task 1: Exited with exit code 127") if "srun" in argv else OK

    found, _ = run(lambda argv: silent(argv) if argv[0] == "srun" else answer(argv))
    assert isinstance(found, NodesResult)
    assert found.problems == (
        "n1,n2 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
        "pass 1: n1>n2 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
        "pass 2: n2>n1 reported nothing: srun: error: n2: task 1: Exited with exit code 127",
    )


@given(st.text())
def test_any_text_of_a_step_is_documents_or_nothing(text: str) -> None:
    assert all(isinstance(one, dict) for one in json_documents(text))
    assert json_documents(f"{text}\n") == json_documents(text)


@given(st.lists(st.dictionaries(st.text(), st.text()), max_size=4))
def test_what_several_tasks_print_at_once_is_put_together_again(documents: list[dict[str, str]]) -> None:
    assert json_documents(labelled(*documents)) == documents  # type: ignore[arg-type]


# --- a pass on one node


def test_a_node_finds_its_part_of_a_pass() -> None:
    text = pairs_as_text((("n1", "n2"), ("n3", "n4")), {"n2": "10.0.0.2", "n4": "fe80::4"})
    assert text == "n1 n2 10.0.0.2 18515,n3 n4 fe80::4 18579"
    assert role_in_pass(text, "n1") == Role("n1", "n2", "10.0.0.2", 18515, sends=True)
    assert role_in_pass(text, "n4") == Role("n3", "n4", "fe80::4", 18579, sends=False)
    assert role_in_pass(text, "n5") is None


@given(st.text() | st.lists(st.sampled_from(["n1", "-d", "10.0.0.2", "70000", "5", "²"]), max_size=5).map(" ".join))
def test_any_text_of_a_pass_is_a_role_or_refused(text: str) -> None:
    try:
        found = role_in_pass(text, "n1")
    except InvalidPass:
        return
    assert found is None or ("n1" in found[:2] and not found.address.startswith("-") and found.port > 0)


# --- judge and suspects


def sent(sender: str, receiver: str, gbits: float | None, state: str = "measured", rail: str = "mlx5_0/1") -> Transfer:
    return Transfer(sender, receiver, rail, gbits, state, "")


def ring(*speeds: float) -> list[Transfer]:
    count = len(speeds)
    return [sent(f"n{i}", f"n{(i + 1) % count}", speed) for i, speed in enumerate(speeds)]


def test_more_than_1_1_times_the_median_is_slow() -> None:
    assert [one.verdict for one in judge(ring(110.0, 110.0, 110.0, 100.0))] == ["ok"] * 4
    assert [one.verdict for one in judge(ring(110.0, 110.0, 110.0, 99.9))] == ["ok", "ok", "ok", "slow"]


def test_two_transfers_cannot_be_compared() -> None:
    assert [one.verdict for one in judge(ring(390.0, 20.0))] == ["ok", "ok"]
    assert all("too few" in one.message for one in judge(ring(390.0, 20.0)))


def test_rails_are_compared_with_their_own() -> None:
    storage = [sent(*pair, 97.0, rail="mlx5_8/1") for pair in (("n0", "n1"), ("n1", "n2"), ("n2", "n0"))]
    assert {one.verdict for one in judge([*ring(390.0, 391.0, 392.0), *storage])} == {"ok"}


def test_slow_in_both_pairs_is_the_node_in_one_the_link() -> None:
    assert suspects(judge(ring(390.0, 200.0, 200.0, 390.0))) == [
        Suspect("node", ("n2",), "slow in each of its 2 pairs")
    ]
    assert suspects(judge(ring(390.0, 200.0, 390.0, 390.0))) == [
        Suspect("link", ("n1", "n2"), "slow between these two only")
    ]


def test_of_two_nodes_nobody_knows_which_it_is() -> None:
    failed = [
        AssessedTransfer(sent("n0", "n1", None, "failed"), "failed", None, ""),
        AssessedTransfer(sent("n1", "n0", 390.0), "ok", None, ""),
    ]
    assert [one.kind for one in suspects(failed)] == ["link"]


def test_what_nobody_looked_at_makes_nobody_suspect() -> None:
    assert suspects(judge([sent("n0", "n1", None, "not_measured"), *ring(390.0, 390.0, 390.0)])) == []


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
def test_whatever_a_node_prints_is_judged_or_passed_over(rows: list[object]) -> None:
    found = [one for row in rows if (one := parse_transfer(row)) is not None]
    assert len(judge(found)) == len(found)
    suspects(judge(found))
