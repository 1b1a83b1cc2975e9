"""admin_comment: the comment that a job's user reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.admin_comment import MAX_BYTES, admin_comment

XID = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus"
TEXT = "healthd: node n1: gpu_xid/79 0000:1b:00.0: fell off the bus at 2026-11-20T20:51:30Z"
AT = 1_795_207_890.0


def comment_after(previous: str = "", node: str = "n1", at: float = AT, start: float = AT - 100) -> str:
    return admin_comment(previous, node, XID, at, start)


def test_admin_comment_has_node_fault_and_time() -> None:
    assert comment_after() == TEXT


def test_admin_comment_keeps_previous_text_in_front() -> None:
    assert comment_after("reserved for RMA 7") == f"reserved for RMA 7; {TEXT}"


def test_admin_comment_is_added_once_per_run_of_job() -> None:
    assert comment_after(TEXT, at=AT + 500) == TEXT


def test_admin_comment_replaces_comment_of_earlier_run() -> None:
    later = comment_after(f"x; {TEXT}", at=AT + 500, start=AT + 100)
    assert later == f"x; {TEXT.replace('20:51:30', '20:59:50')}"
    assert comment_after(f"{TEXT}; x", at=AT + 500, start=AT + 100) == later


def test_admin_comment_names_both_failed_nodes() -> None:
    comment = comment_after(comment_after(), node="n10")
    assert comment == f"{TEXT}; {TEXT.replace('n1', 'n10')}"
    assert comment_after(comment) == comment
    assert comment_after(comment, node="n10") == comment


def test_admin_comment_without_room_changes_nothing() -> None:
    full = "x" * (MAX_BYTES - len(TEXT) - 1)
    assert comment_after(full) == full
    assert len(comment_after(full[1:])) == MAX_BYTES


@given(st.text(max_size=1200), st.floats(0, 4e9), st.floats(0, 4e9))
def test_admin_comment_never_loses_previous_text(previous: str, at: float, start: float) -> None:
    assert comment_after(previous, at=at, start=start) in (
        previous,
        comment_after("", at=at) if not previous else f"{previous}; {comment_after('', at=at)}",
    )
