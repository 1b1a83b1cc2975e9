"""What Slurm's commands print, as healthd reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import ANY_TEXT, NOW, columns, listpids, sinfo, squeue

from healthd.model import NodeState
from healthd.slurm.commands import FLEET_COLUMNS, JOB_COLUMNS, NODE_COLUMNS
from healthd.slurm.fleet_limit import PartitionCount
from healthd.slurm.output import (
    SlurmTrouble,
    parse_cluster_size,
    parse_fleet,
    parse_job,
    parse_listpids,
    parse_node,
    parse_processes,
    parse_slurmctld_start,
)

GPU = frozenset({"gpu"})


def test_a_node_is_read_from_fixed_columns() -> None:
    text = columns(
        ("gpu", "1", "allocated+drain", "1795207836", "root(0)", "healthd: x\nfoo | [y]", "(null)"), NODE_COLUMNS
    )
    flags = frozenset({"ALLOCATED", "DRAIN"})
    assert parse_node(text, "n1") == NodeState("n1", flags, "healthd: x foo | [y]", "root", 1795207836.0, GPU, 0)
    assert parse_node(sinfo("idle").stdout, "n1") == NodeState("n1", frozenset({"IDLE"}), partitions=GPU, gpus=0)
    assert parse_node(sinfo("down*+drain").stdout, "n1").flags == {"DOWN", "DRAIN"}  # up to 20.11
    assert parse_node(sinfo("IDLE+DRAIN").stdout, "n1").flags == {"IDLE", "DRAIN"}


def test_a_node_is_in_the_partitions_in_which_sinfo_counts_it() -> None:
    rows = [("other", "0", "n/a", "Unknown", "Unknown", "none", "gpu:8")]
    rows += [(name, "1", "idle+drain", "1795207836", "root(0)", "line\none", "gpu:8") for name in ("gpu", "all")]
    found = parse_node("".join(columns(row, NODE_COLUMNS) for row in rows), "n1")
    assert (found.partitions, found.flags, found.reason) == ({"gpu", "all"}, {"IDLE", "DRAIN"}, "line one")
    for text in ("", " \n", columns(rows[0], NODE_COLUMNS)):
        with pytest.raises(SlurmTrouble, match=r'^Slurm has no node "n1" in any partition$'):
            parse_node(text, "n1")


def test_local_times_are_read_too() -> None:
    text = columns(("gpu", "1", "idle+drain", "2026-11-20T20:48:09", "root(0)", "x", "(null)"), NODE_COLUMNS)
    assert abs(parse_node(text, "n1").reason_time - 1795207689) < 15 * 3600
    assert parse_slurmctld_start("BOOT_TIME               = 2026-11-20T20:48:09\n") > 0


def test_a_job_is_listed_once_however_many_processes_it_has() -> None:
    assert parse_listpids(listpids("4", "4", "1", "4").stdout) == ["4", "1"]
    assert parse_listpids("PID JOBID\n-1 -\n7 12 batch\n") == ["12"]
    assert parse_listpids("") == []


@pytest.mark.parametrize("digits", ["9" * 5000, "12" * 10, "\u0661\u0662"], ids=["5000", "20", "arabic"])
def test_a_number_that_slurm_does_not_print_is_none(digits: str) -> None:
    """int() raises for more than 4,300 digits, and takes those of any script."""
    table = f"PID JOBID STEPID\n{digits} {digits} 0\n7 12 0\n"
    assert parse_listpids(table) == ["12"]
    assert parse_processes(table) == {7: "12"}
    assert parse_cluster_size(f"PartitionName=a TotalNodes={digits * 2} X=1\nPartitionName=b TotalNodes=3 X=1\n") == 3
    with pytest.raises(SlurmTrouble):
        parse_slurmctld_start(f"BOOT_TIME = {digits}\n")


def test_times_beyond_all_calendars_are_none() -> None:
    for since in ("9" * 40, "202611201204809"):
        row = ("gpu", "1", "idle", since, "root(0)", "x", "(null)")
        assert parse_node(columns(row, NODE_COLUMNS), "n1").reason_time == 0
    job = parse_job(columns(("12", "12", "RUNNING", "1", "9" * 40, "0", "1", "(null)"), JOB_COLUMNS), "12")
    assert job is not None
    assert job.start == 0


@pytest.mark.parametrize("name", ["1\0002", "\u0661", "all", "-1", "1\ud800"])
def test_a_jobs_name_that_is_none_is_not_put_into_a_command(name: str) -> None:
    with pytest.raises(SlurmTrouble, match=r"^squeue printed no job 12: "):
        parse_job(columns(("12", name, "RUNNING", "1", "5", "0", "1", "(null)"), JOB_COLUMNS), "12")


@pytest.mark.parametrize("comment", ["a\0b", "\ud800"])
def test_a_comment_that_no_command_could_hold_is_left_alone(comment: str) -> None:
    job = parse_job(squeue(comment=comment).stdout, "12")
    assert job is not None
    assert job.comment is None


def of_columns(text: str, of: tuple[tuple[str, int], ...], *first: str) -> str:
    """A record with the words of `text` in these columns."""
    return columns((*first, *text.split(" "), *[""] * len(of))[: len(of)], of)


PARSERS: dict[str, Callable[[str], object]] = {
    "node": lambda text: parse_node(text, "n1"),
    "node's columns": lambda text: parse_node(of_columns(text, NODE_COLUMNS, "gpu", "1"), "n1"),
    "fleet": lambda text: parse_fleet(text, {"gpu"}, NOW),
    "fleet's columns": lambda text: parse_fleet(of_columns(text, FLEET_COLUMNS, "gpu"), {"gpu"}, NOW),
    "cluster": lambda text: parse_cluster_size(f"TotalNodes={text}"),
    "listpids": parse_listpids,
    "listpids' rows": lambda text: [f(f"PID JOBID\n{text} 12\n") for f in (parse_listpids, parse_processes)],
    "job": lambda text: parse_job(text, "12"),
    "job's columns": lambda text: parse_job(of_columns(text, JOB_COLUMNS, "12"), "12"),
    "config": parse_slurmctld_start,
    "time": lambda text: parse_slurmctld_start(f"BOOT_TIME = {text}"),
}


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
@given(text=ANY_TEXT)
def test_garbage_is_one_sentence_and_never_another_error(parser: Callable[[str], object], text: str) -> None:
    sentence = "fine"
    try:
        parser(text)
    except SlurmTrouble as trouble:
        sentence = str(trouble)
    assert sentence
    assert "\n" not in sentence


@given(
    reason=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255),
    state=st.sampled_from(["idle+drain", "down", "mixed+drain+reboot_issued"]),
)
def test_any_reason_is_read_back_as_it_was_written(reason: str, state: str) -> None:
    row = ("gpu", "1", state, "1795207836", "alice(1000)", reason, "gpu:8")
    found = parse_node(columns(row, NODE_COLUMNS), "n1")
    assert (found.reason, found.reason_user) == (reason, "alice")


def test_younger_drains_do_not_count_against_an_older_one() -> None:
    older, younger = (f"{NOW - 60:.0f}", f"{NOW - 59:.0f}")
    rows = [("gpu", "idle+drain", older, "healthd:", "100"), ("gpu", "idle+drain", younger, "healthd:", "900")]
    text = "".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_fleet(text, {"gpu"}, NOW - 60) == [PartitionCount("gpu", 1000, 100)]
    assert parse_fleet(text, {"gpu"}, NOW) == [PartitionCount("gpu", 1000, 1000)]


def test_only_drains_in_our_words_count_and_only_while_they_stand() -> None:
    rows = [
        ("gpu", "idle", "5", "healthd:", "1"),  # 24.11 keeps the reason of a drain that is over
        ("gpu", "down+drain+not_responding", "5", "healthd:", "2"),
        ("gpu", "mixed+cloud+completing+drain", "5", "healthd:", "4"),
        ("gpu", "idle+drain", "5", "mine", "8"),
        ("other", "idle+drain", "5", "healthd:", "16"),
        ("gpu", "idle+drain", "5", "Kill task", "32"),  # of ours or Slurm's own: nothing that sinfo shows tells
        ("gpu", "inval+drain", "5", "gres/gpu", "64"),
    ]
    text = "".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_fleet(text, {"gpu"}, NOW) == [PartitionCount("gpu", 111, 6)]


CUT = columns(("gpu", "idle", "5", "x", "12"), FLEET_COLUMNS)[:-9]  # too long to be read whole: 1 node, not 12


@pytest.mark.parametrize(
    "text", ["", "slurm_load_node: oops\n", columns(("gpu", "idle", "5", "x", ""), FLEET_COLUMNS), CUT]
)
def test_a_count_that_is_none_is_trouble(text: str) -> None:
    with pytest.raises(SlurmTrouble):
        parse_fleet(text, {"gpu"}, NOW)
