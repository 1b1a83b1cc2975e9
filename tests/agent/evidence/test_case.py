"""Stages of a case: what is collected when, and which faults belong to one case."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from healthd.agent.evidence.case import (
    MAX_ATTEMPTS,
    REPEAT_SECONDS,
    Case,
    Cause,
    Process,
    Result,
    Stage,
    View,
    after_request,
    after_result,
    make_id,
    next_case,
)
from healthd.agent.evidence.request import ID
from healthd.common.values import decode, encode

XID, ECC = Cause("gpu_xid/79 0000:1b:00.0", "a-1"), Cause("gpu_ecc/uncorrectable 0000:1c:00.0", "b-2")
HEALTHY = View((), 0.0, "", is_drained=False, is_idle=False, is_in_use=True)
DRAINING = View((XID,), 90.0, "healthd: gpu_xid/79", is_drained=True, is_idle=False, is_in_use=True)
IDLE = DRAINING._replace(is_idle=True, is_in_use=False)
FILE = "/state/evidence/x.tar.gz"


def begun(view: View = DRAINING) -> Case:
    case = next_case(None, view, "id", 100.0)
    assert case is not None
    return after_request(case)


def served(case: Case, **changes: object) -> Case:
    result = Result("id", case.stage.value, case.attempts, FILE, 10 * (1 + case.attempts))
    return after_result(case, replace(result, **changes))


def step(case: Case, view: View, now: float = 200.0) -> Case:
    after = next_case(case, view, "new", now)
    assert after is not None
    return after


def test_healthy_node_has_no_case() -> None:
    assert next_case(None, HEALTHY, "id", 100.0) is None


def test_case_passes_all_stages_on_draining_node() -> None:
    case = begun()
    assert (case.stage, case.fault_at, case.causes, case.has_drained) == (Stage.FIRST, 90.0, (XID,), True)
    assert step(case, IDLE).stage is Stage.FIRST, "one part at a time"
    case = served(case)
    assert (case.stage, case.path, case.attempts, case.is_requested) == (Stage.WAITING, FILE, 0, False)
    assert step(case, DRAINING).stage is Stage.WAITING, "a job still runs"
    case = after_request(step(case, IDLE))
    assert case.stage is Stage.FULL
    case = served(case)
    assert (case.stage, case.error) == (Stage.DONE, "")
    assert step(case, IDLE) == case, "one case per drain"


def test_case_without_drain_waits_for_its_end() -> None:
    """In mode observe, healthd never learns that the node is idle."""
    view = DRAINING._replace(is_drained=False)
    case = served(begun(view))
    assert step(case, view).stage is Stage.WAITING
    assert step(case, HEALTHY).stage is Stage.DONE


def test_operator_resume_ends_case_and_stops_full_part() -> None:
    case = after_request(step(served(begun()), IDLE))
    ended = step(case, HEALTHY)
    assert (ended.stage, ended.is_requested, ended.path) == (Stage.DONE, False, FILE)
    partial = after_result(ended, Result("id", "full", 1, FILE, 77, stopped="the node is in use"))
    assert (partial.stage, partial.bytes) == (Stage.DONE, 77)


def test_job_on_node_stops_full_part_until_it_is_idle_again() -> None:
    case = after_request(step(served(begun()), IDLE))
    waiting = step(case, DRAINING)
    assert (waiting.stage, waiting.is_requested) == (Stage.WAITING, False)
    assert step(waiting, IDLE).stage is Stage.FULL


def test_lost_contact_to_slurm_does_not_stop_full_part() -> None:
    case = after_request(step(served(begun()), IDLE))
    assert step(case, IDLE._replace(is_idle=False)).stage is Stage.FULL


def test_stopped_full_part_is_repeated_a_few_times() -> None:
    case, requests = served(begun()), 0
    while case.stage is not Stage.DONE:
        case = served(after_request(step(case, IDLE)), stopped="job 7 runs on the node")
        requests += 1
    assert requests == MAX_ATTEMPTS


def test_missing_result_is_requested_again_and_then_an_error() -> None:
    case, requests = begun(), 1
    while case.stage is Stage.FIRST:
        case = after_result(case, None)
        if case.stage is Stage.FIRST:
            assert not case.is_requested
            case = after_request(case)
            requests += 1
    assert requests == MAX_ATTEMPTS
    assert case.stage is Stage.WAITING
    assert case.error


def test_result_of_earlier_request_is_not_taken_for_a_later_one() -> None:
    case = after_request(step(served(begun()), IDLE))
    stopped = Result("id", "full", 1, stopped="job 7")
    again = after_request(step(after_result(case, stopped), IDLE))
    assert again.attempts == 2
    assert after_result(again, stopped) == replace(again, is_requested=False)


def test_failed_part_keeps_error_until_a_part_is_saved() -> None:
    failed = served(begun(), path="", error="no space")
    assert (failed.stage, failed.error) == (Stage.WAITING, "no space")
    assert served(after_request(step(failed, IDLE))).error == ""


def test_stuck_processes_of_all_parts_are_kept() -> None:
    case = served(begun(), stuck=(Process(7, 70),))
    case = served(after_request(step(case, IDLE)), stuck=(Process(8, 80),))
    assert case.stuck == (Process(7, 70), Process(8, 80))


def test_later_fault_joins_open_case_and_begins_new_case_after_it() -> None:
    both = DRAINING._replace(causes=(ECC, XID))
    case = step(served(begun()), both)
    assert case.causes == (XID, ECC)
    done = replace(served(begun()), stage=Stage.DONE)
    assert step(done, both).id == "new"


def test_fault_after_end_of_drain_begins_new_case() -> None:
    done = replace(served(begun()), stage=Stage.DONE)
    released = step(done, HEALTHY)
    assert (released.id, released.is_released) == ("id", True)
    assert step(released, DRAINING, 201.0).id == "new"


def test_returning_fault_without_drain_is_same_case_for_an_hour() -> None:
    view = DRAINING._replace(is_drained=False)
    done = step(served(begun(view)), HEALTHY)
    assert done.stage is Stage.DONE
    assert step(done, view, 99.0 + REPEAT_SECONDS).id == "id"
    assert step(done, view, 101.0 + REPEAT_SECONDS).id == "new"


VIEWS = st.builds(
    View,
    st.lists(st.sampled_from((XID, ECC)), unique=True).map(tuple),
    st.floats(0, 1e9),
    st.just("reason"),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


def test_case_stays_open_while_the_drain_is_in_force() -> None:
    """The fault comes and goes, or a check runs before the resume."""
    without = IDLE._replace(causes=(), reason="")
    case = step(served(begun()), without)
    assert (case.id, case.stage) == ("id", Stage.WAITING), "the node may be resumed at any time"
    case = after_request(step(case, IDLE))
    assert case.stage is Stage.FULL
    stopped = step(case, without)
    assert (stopped.stage, stopped.is_requested) == (Stage.WAITING, False)
    again = step(stopped, IDLE)
    assert (again.id, again.stage) == ("id", Stage.FULL)
    assert step(stopped, HEALTHY).stage is Stage.DONE


def test_fault_is_a_new_incident_after_the_clock_was_set_back() -> None:
    view = DRAINING._replace(is_drained=False)
    done = step(served(begun(view)), HEALTHY)
    assert step(done, view, now=50.0).id == "new"


def test_new_case_keeps_processes_that_hang() -> None:
    processes = tuple(Process(pid, 1) for pid in range(100))
    case = step(served(begun(), stuck=processes), HEALTHY)
    after = step(step(case, HEALTHY), DRAINING)
    assert (after.id, after.stuck) == ("new", processes[-20:])


@given(st.lists(st.tuples(VIEWS, st.sampled_from(("none", "lost", "saved", "stopped", "failed"))), max_size=30))
def test_any_history_requests_one_part_at_a_time_and_survives_restart(history: list[tuple[View, str]]) -> None:
    case: Case | None = None
    for number, (view, outcome) in enumerate(history):
        case = next_case(case, view, f"id{number}", 1000.0 * number)
        if case is None:
            continue
        if case.stage in (Stage.FIRST, Stage.FULL) and not case.is_requested:
            case = after_request(case)
        assert decode(Case, encode(case)) == case
        assert case.attempts <= MAX_ATTEMPTS
        if case.is_requested and outcome != "none":
            result = Result(case.id, case.stage.value, case.attempts, FILE, 1)
            results = {
                "lost": None,
                "saved": result,
                "stopped": replace(result, stopped="job 1"),
                "failed": replace(result, path="", error="full disk"),
            }
            case = after_result(case, results[outcome])
            assert not case.is_requested


@given(st.floats(0, 4e9), st.text(max_size=60))
def test_id_is_a_safe_file_name(now: float, code: str) -> None:
    import time

    assert ID.fullmatch(make_id(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)), (Cause(code),)))
