"""admin_comment: the comment that a job's user reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.admin_comment import MAX_BYTES, admin_comment

XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
TEXT = "healthd: node n1: gpu_xid/79 0000:1b:00.0: fell off the bus at 2026-11-20T20:51:30Z"
AT = 1_795_207_890.0


def told(found: str = "", node: str = "n1", at: float = AT, start: float = AT - 100) -> str:
    return admin_comment(found, node, XID, at, start)


def test_node_fault_and_time_are_said() -> None:
    assert told() == TEXT


def test_what_others_wrote_stays_in_front() -> None:
    assert told("reserved for RMA 7") == f"reserved for RMA 7; {TEXT}"


def test_one_run_of_a_job_is_told_once_however_often_the_fault_comes() -> None:
    assert told(TEXT, at=AT + 500) == TEXT


def test_a_later_run_of_the_job_is_told_anew() -> None:
    later = told(f"x; {TEXT}", at=AT + 500, start=AT + 100)
    assert later == f"x; {TEXT.replace('20:51:30', '20:59:50')}"
    assert told(f"{TEXT}; x", at=AT + 500, start=AT + 100) == later


def test_two_nodes_of_a_job_that_fail_at_once_are_both_named() -> None:
    both = told(told(), node="n10")
    assert both == f"{TEXT}; {TEXT.replace('n1', 'n10')}"
    assert told(both) == both
    assert told(both, node="n10") == both


def test_where_there_is_no_room_nothing_changes() -> None:
    full = "x" * (MAX_BYTES - len(TEXT) - 1)
    assert told(full) == full
    assert len(told(full[1:])) == MAX_BYTES


@given(st.text(max_size=1200), st.floats(0, 4e9), st.floats(0, 4e9))
def test_nothing_that_others_wrote_is_lost(found: str, at: float, start: float) -> None:
    assert told(found, at=at, start=start) in (found, told("", at=at) if not found else f"{found}; {told('', at=at)}")
