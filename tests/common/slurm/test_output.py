"""Output of Slurm's commands, as healthd parses it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_text import ANY_BYTES, NOW, TYPED, columns, listpids, sinfo

from healthd.common.model import NodeState, PartitionCount
from healthd.common.slurm.commands import (
    CLAIM_COLUMNS,
    DRAINED_COLUMNS,
    FLEET_COLUMNS,
    JOB_COLUMNS,
    NAME_COLUMNS,
    NODE_COLUMNS,
    PARTITION_BYTES,
    REASON_COLUMNS,
    Columns,
    CommandResult,
)
from healthd.common.slurm.output import (
    Claim,
    NoSuchNode,
    PartitionService,
    SlurmError,
    parse_boot_time,
    parse_claims,
    parse_cluster_size,
    parse_controller,
    parse_domain_drains,
    parse_fleet,
    parse_in_service,
    parse_job,
    parse_lemons,
    parse_listpids,
    parse_node,
    parse_node_names,
    parse_processes,
    parse_reservation_names,
    parse_slurmctld_start,
    parse_whole_reason,
    readable_records,
    records,
    require_partitions,
)
from healthd.validation.reservation import STATE_COLUMNS

GPU = frozenset({"gpu"})


def test_parse_node_reads_fixed_columns() -> None:
    text = columns(
        ("gpu", "1", "allocated+drain", "1795207836", "root(0)", "healthd: x\nfoo | [y]", "(null)"), NODE_COLUMNS
    )
    flags = frozenset({"ALLOCATED", "DRAIN"})
    assert parse_node(text, "n1") == NodeState("n1", flags, "healthd: x foo | [y]", "root", 1795207836.0, GPU, 0)
    assert parse_node(sinfo("idle").stdout, "n1") == NodeState("n1", frozenset({"IDLE"}), partitions=GPU, gpu_count=0)
    assert parse_node(sinfo("down*+drain").stdout, "n1").flags == {"DOWN", "DRAIN"}  # up to Slurm 20.11
    assert parse_node(sinfo("IDLE+DRAIN").stdout, "n1").flags == {"IDLE", "DRAIN"}


def test_parse_node_reads_partitions_in_which_sinfo_counts_the_node() -> None:
    rows = [("other", "0", "n/a", "Unknown", "Unknown", "none", "gpu:8")]
    rows += [(name, "1", "idle+drain", "1795207836", "root(0)", "line\none", "gpu:8") for name in ("gpu", "all")]
    found = parse_node(b"".join(columns(row, NODE_COLUMNS) for row in rows), "n1")
    assert (found.partitions, found.flags, found.reason) == ({"gpu", "all"}, {"IDLE", "DRAIN"}, "line one")
    for text in (b"", columns(rows[0], NODE_COLUMNS)):
        with pytest.raises(SlurmError, match=r'^Slurm has no node "n1" in any partition$'):
            parse_node(text, "n1")


def test_parse_node_and_slurmctld_start_read_local_times() -> None:
    text = columns(("gpu", "1", "idle+drain", "2026-11-20T20:48:09", "root(0)", "x", "(null)"), NODE_COLUMNS)
    assert abs(parse_node(text, "n1").reason_time - 1795207689) < 15 * 3600
    assert parse_slurmctld_start("BOOT_TIME               = 2026-11-20T20:48:09\n") > 0


def test_parse_listpids_lists_a_job_once() -> None:
    assert parse_listpids(listpids("4", "4", "1", "4").text) == ["4", "1"]
    assert parse_listpids("PID JOBID\n-1 -\n7 12 batch\n") == ["12"]
    assert parse_listpids("") == []


@pytest.mark.parametrize("digits", ["9" * 5000, "12" * 10, "\u0661\u0662"], ids=["5000", "20", "arabic"])
def test_parsers_skip_numbers_that_slurm_does_not_print(digits: str) -> None:
    """int() raises an error above 4,300 digits, and accepts digits of any script."""
    table = f"PID JOBID STEPID\n{digits} {digits} 0\n7 12 0\n"
    assert parse_listpids(table) == ["12"]
    assert parse_processes(table) == {7: "12"}
    assert parse_cluster_size(f"PartitionName=a TotalNodes={digits * 2} X=1\nPartitionName=b TotalNodes=3 X=1\n") == 3
    with pytest.raises(SlurmError):
        parse_slurmctld_start(f"BOOT_TIME = {digits}\n")


def test_parsers_treat_times_out_of_range_as_missing() -> None:
    for since in ("9" * 40, "202611201204809"):
        row = ("gpu", "1", "idle", since, "root(0)", "x", "(null)")
        assert parse_node(columns(row, NODE_COLUMNS), "n1").reason_time == 0
    job = parse_job(columns(("12", "12", "RUNNING", "1", "9" * 40, "0", "1", "(null)"), JOB_COLUMNS), "12")
    assert job is not None
    assert job.start == 0


@pytest.mark.parametrize("name", ["1\0002", "\u0661", "all", "-1", b"1\xff", "1;x"])
def test_parse_job_rejects_invalid_job_name(name: str | bytes) -> None:
    with pytest.raises(SlurmError, match=r"^squeue printed no job 12: "):
        parse_job(columns(("12", name, "RUNNING", "1", "5", "0", "1", "(null)"), JOB_COLUMNS), "12")


def record_with(data: bytes, column_spec: Columns, *first_values: str) -> bytes:
    """Return a record with the words of `data` in these columns."""
    return columns([*first_values, *data.split(b" "), *[b""] * len(column_spec)][: len(column_spec)], column_spec)


def text_parser(parser: Callable[[str], object], before: str = "", after: str = "") -> Callable[[bytes], object]:
    return lambda data: parser(before + CommandResult(0, data).text + after)


PARSERS: dict[str, Callable[[bytes], object]] = {
    "node": lambda data: parse_node(data, "n1"),
    "node's columns": lambda data: parse_node(record_with(data, NODE_COLUMNS, "gpu", "1"), "n1"),
    "fleet": lambda data: parse_fleet(data, {"gpu"}, NOW),
    "fleet's columns": lambda data: parse_fleet(record_with(data, FLEET_COLUMNS, "gpu"), {"gpu"}, NOW),
    "lemons": parse_lemons,
    "claims": parse_claims,
    "claims' columns": lambda data: parse_claims(record_with(data, CLAIM_COLUMNS, "n1", "idle+drain")),
    "domain's drains": lambda data: parse_domain_drains(data, "1a2b3c4d", NOW),
    "domain's drains' columns": lambda data: parse_domain_drains(
        record_with(data, CLAIM_COLUMNS, "n1", "idle+drain"), "1a2b3c4d", NOW
    ),
    "node names": parse_node_names,
    "in service": lambda data: parse_in_service(data, {"gpu"}),
    "in service's columns": lambda data: parse_in_service(record_with(data, FLEET_COLUMNS, "gpu"), {"gpu"}),
    "whole reason": parse_whole_reason,
    "cluster": text_parser(parse_cluster_size, "TotalNodes="),
    "listpids": text_parser(parse_listpids),
    "listpids' rows": text_parser(
        lambda text: [parse(text) for parse in (parse_listpids, parse_processes)], "PID JOBID\n", " 12\n"
    ),
    "job": lambda data: parse_job(data, "12"),
    "job's columns": lambda data: parse_job(record_with(data, JOB_COLUMNS, "12"), "12"),
    "config": text_parser(parse_slurmctld_start),
    "boot time": text_parser(parse_boot_time, "NodeName=n1 BootTime=", " SlurmdStartTime="),
    "time": text_parser(parse_slurmctld_start, "BOOT_TIME = "),
}


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
@given(data=ANY_BYTES)
def test_parser_of_garbage_raises_only_slurm_error(parser: Callable[[bytes], object], data: bytes) -> None:
    sentence = "fine"
    try:
        parser(data)
    except SlurmError as problem:
        sentence = str(problem)
    assert sentence
    assert "\n" not in sentence


@given(
    reason=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=255),
    state=st.sampled_from(["idle+drain", "down", "mixed+drain+reboot_issued"]),
)
def test_parse_node_returns_reason_as_written(reason: str, state: str) -> None:
    row = ("gpu", "1", state, "1795207836", "alice(1000)", reason, "gpu:8")
    found = parse_node(columns(row, NODE_COLUMNS), "n1")
    assert (found.reason, found.reason_user) == (reason, "alice")


def test_parse_fleet_ignores_drains_newer_than_given_time() -> None:
    older, younger = (f"{NOW - 60:.0f}", f"{NOW - 59:.0f}")
    rows = [("gpu", "idle+drain", older, "healthd:", "100"), ("gpu", "idle+drain", younger, "healthd:", "900")]
    text = b"".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_fleet(text, {"gpu"}, NOW - 60) == [PartitionCount("gpu", 1000, 100)]
    assert parse_fleet(text, {"gpu"}, NOW) == [PartitionCount("gpu", 1000, 1000)]


def test_parse_fleet_counts_only_current_drains_of_healthd() -> None:
    rows = [
        ("gpu", "idle", "5", "healthd:", "1"),  # 24.11 keeps the reason after the drain has ended
        ("gpu", "down+drain+not_responding", "5", "healthd:", "2"),
        ("gpu", "mixed+cloud+completing+drain", "5", "healthd:", "4"),
        ("gpu", "idle+drain", "5", "mine", "8"),
        ("other", "idle+drain", "5", "healthd:", "16"),
        ("gpu", "idle+drain", "5", "Kill task", "32"),  # set by healthd or by Slurm: sinfo does not show which
        ("gpu", "inval+drain", "5", "gres/gpu", "64"),
    ]
    text = b"".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_fleet(text, {"gpu"}, NOW) == [PartitionCount("gpu", 111, 6)]


CUT = columns(("gpu", "idle", "5", "x", "12"), FLEET_COLUMNS)[:-9]  # truncated: 1 node instead of 12


@pytest.mark.parametrize(
    "text", [b"", b"slurm_load_node: oops\n", columns(("gpu", "idle", "5", "x", ""), FLEET_COLUMNS), CUT]
)
def test_parse_fleet_rejects_invalid_count(text: bytes) -> None:
    with pytest.raises(SlurmError):
        parse_fleet(text, {"gpu"}, NOW)


# --- text entered by users


def parsed_node(
    reason: str | bytes = "fan", user: str = "root(0)", gres: str = "gpu:h100:8", partition: str | bytes = "gpu"
) -> NodeState:
    return parse_node(columns((partition, "1", "idle+drain", "1790000000", user, reason, gres), NODE_COLUMNS), "n1")


def parsed_fleet(*rows: tuple[str | bytes, ...]) -> list[PartitionCount]:
    """Return the count of partition gpu, with 11 idle nodes in addition to these rows."""
    table = [*rows, ("gpu", "idle", "Unknown", "none", "11")]
    return parse_fleet(b"".join(columns(row, FLEET_COLUMNS) for row in table), ["gpu"], float("inf"))


# Reasons that broke the count on a real Slurm, and similar ones.
REASONS = [
    *(
        "L\u00fcfter tot",
        "\u0417\u0430\u043c\u0435\u043d\u0430 GPU",
        "\u05de\u05d0\u05d5\u05d5\u05e8\u05e8",
        "\u98ce\u6247",
        "\U0001f525 fan",
        "e\u0301e\u0301e\u0301",
    ),
    *("bad\nfan", "a\rb", "a\x0bb", "a\x0cb", "a\x1cb", "a\x85b", "a\u2028b", "\n", "\n" * 20, "fan\n\n"),
    *(b"caf\xe9", b"\xff\xfe", b"\xc3", "x" * 1000, "=|'\"$(id)\x1b[1m%s\t", "none", "(null)"),
]


@pytest.mark.parametrize("reason", REASONS)
def test_parse_fleet_counts_each_node_with_any_reason(reason: str | bytes) -> None:
    row = ("gpu", "idle+drain", "1790000000", reason)
    assert parsed_fleet((*row, "1")) == [PartitionCount("gpu", 12, 0)]
    assert parsed_fleet((*row, "10"), ("gpu", "idle+drain", "1790000000", "healthd: x", "3")) == [
        PartitionCount("gpu", 24, 3)
    ]


@pytest.mark.parametrize("name", ["gro\u00dfer", "\u0433\u043f\u0443", b"\xff\xfe", "a\x85b", "\u2028"])
def test_parse_fleet_counts_partitions_with_any_name(name: str | bytes) -> None:
    assert parsed_fleet((name, "idle", "Unknown", "none", "2")) == [PartitionCount("gpu", 11, 0)]
    (partition,) = parsed_node(partition=name).partitions
    table = columns((name, "idle", "Unknown", "none", "2"), FLEET_COLUMNS)
    assert parse_fleet(table, [partition], NOW) == [PartitionCount(partition, 2, 0)]


def test_parse_fleet_distinguishes_partitions_with_same_50_characters() -> None:
    first, second = "p" * 60, "p" * 61
    rows = [(first, "idle", "Unknown", "none", "3"), (second, "idle", "Unknown", "none", "5")]
    table = b"".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_fleet(table, [first, second], NOW) == [PartitionCount(first, 3, 0), PartitionCount(second, 5, 0)]


def test_parse_fleet_rejects_partition_name_that_may_be_truncated() -> None:
    name = "p" * PARTITION_BYTES
    (partition,) = parsed_node(partition=name + "q").partitions
    with pytest.raises(SlurmError, match="is longer than"):
        parse_fleet(columns((name, "idle", "Unknown", "none", "3"), FLEET_COLUMNS), [partition], NOW)


def test_parse_fleet_rejects_table_with_row_without_number() -> None:
    with pytest.raises(SlurmError, match="no number of nodes"):
        parsed_fleet(("other", "idle", "Unknown", "none", "many"))


@pytest.mark.parametrize("lost", range(1, 300, 7))
def test_parse_fleet_rejects_truncated_table(lost: int) -> None:
    rows = [("gpu", "idle+drain", "5", "bad\nfan", "1"), ("gpu", "idle", "5", "x", "12")]
    table = b"".join(columns(row, FLEET_COLUMNS) for row in rows)
    with pytest.raises(SlurmError):
        parse_fleet(table[:-lost], {"gpu"}, NOW)


@pytest.mark.parametrize("reason", ["L\u00fcfter tot", "\u0417\u0430\u043c\u0435\u043d\u0430 GPU", "fan \U0001f525"])
def test_parse_node_separates_reason_from_next_column(reason: str) -> None:
    assert parsed_node(reason).reason == reason


def test_parse_node_replaces_line_ends_and_escapes_raw_bytes() -> None:
    assert parsed_node("bad\nfan\u2028x").reason == "bad fan x"
    assert parsed_node(b"caf\xe9").reason == "caf\\xe9"


@pytest.mark.parametrize("length", range(395, 402))
def test_parse_node_reads_gpus_after_reason_truncated_within_character(length: int) -> None:
    assert parsed_node("x" * length + "\u00fc\u0416\U0001f525" * 9).gpu_count == 8


@pytest.mark.parametrize("letters", range(185, 265))
def test_parse_node_reads_gpus_after_cyrillic_reason(letters: int) -> None:
    assert parsed_node("\u0416" * letters).gpu_count == 8


def test_parse_node_reads_user_with_umlaut() -> None:
    found = parsed_node("fan dead", user="m\u00fcller(1000)")
    assert (found.reason, found.reason_user, found.gpu_count) == ("fan dead", "m\u00fcller", 8)


@pytest.mark.parametrize("gres", ["", "gpu", "gpu:h100:8,", "gpu:" + "x" * 500 + ":8"])
def test_parse_node_has_no_gpu_count_if_gres_is_invalid(gres: str) -> None:
    assert (parsed_node(gres=gres).gpu_count, parsed_node(gres=gres).single_type_gpu_count) == (None, None)


@given(reason=TYPED, user=TYPED, partition=TYPED.filter(lambda name: name.strip()), name=TYPED)
def test_parse_node_keeps_values_with_any_user_text(reason: bytes, user: bytes, partition: bytes, name: bytes) -> None:
    """The node's name is not a column, but users choose it and errors contain it."""
    rows = [
        (partition, "0", "n/a", "Unknown", "Unknown", "none", "(null)"),
        (partition, "1", "idle+drain", "1790000000", user, reason, "gpu:h100:8"),
    ]
    node_name = name.decode(errors="replace")
    found = parse_node(b"".join(columns(row, NODE_COLUMNS) for row in rows), node_name)
    assert (found.flags, found.reason_time, found.gpu_count, found.single_type_gpu_count) == (
        {"IDLE", "DRAIN"},
        1790000000,
        8,
        8,
    )
    assert len(found.partitions) == 1
    assert "\n" not in found.reason
    assert found.reason.isascii() or found.reason.encode()  # it can be written to a log


@given(
    reasons=st.lists(TYPED, max_size=5),
    partition=TYPED.filter(lambda name: name != b"gpu"),
    state=st.sampled_from(["idle", "down+drain"]),
)
def test_parse_fleet_keeps_count_with_any_user_text(reasons: list[bytes], partition: bytes, state: str) -> None:
    other_reasons = [reason if not reason.startswith((b"healthd:", b"lemon:")) else b"x" for reason in reasons]
    rows = [
        row
        for reason in other_reasons
        for row in (("gpu", state, "5", reason, "2"), (partition, state, "5", reason, "9"))
    ]
    assert parsed_fleet(*rows, ("gpu", "idle+drain", "5", "healthd: x", "4")) == [
        PartitionCount("gpu", 15 + 2 * len(other_reasons), 4)
    ]


@given(comment=TYPED, others=st.lists(TYPED, max_size=3))
def test_parse_job_keeps_values_with_any_user_text(comment: bytes, others: list[bytes]) -> None:
    """squeue also prints the other tasks of an array."""
    rows = [
        (f"{13 + number}", f"12_{number}", "RUNNING", "1", "5", "0", "1", comment_of_task)
        for number, comment_of_task in enumerate(others)
    ]
    row = ("12", "12_9", "RUNNING", "2", "1790000000", "3", "1", comment)
    table = b"".join(columns(each, JOB_COLUMNS) for each in (*rows, row))
    job = parse_job(table, "12")
    assert job is not None
    assert (job.name, job.state, job.batch, job.start, job.restarts, job.requeue) == (
        "12_9",
        "RUNNING",
        True,
        1790000000,
        3,
        True,
    )
    assert (
        job.comment is None or job.comment.encode() == comment.rstrip(b" ") or (job.comment, comment) == ("", b"(null)")
    )


@given(reason=TYPED)
def test_parse_whole_reason_returns_every_byte(reason: bytes) -> None:
    rows = [("0", "none"), ("1", reason)]
    found = parse_whole_reason(b"".join(columns(row, REASON_COLUMNS) for row in rows))
    assert found is not None
    assert found.encode("utf-8", "surrogateescape") == reason.rstrip(b" ")


def test_parse_whole_reason_returns_none_if_longer_than_column() -> None:
    assert parse_whole_reason(columns(("1", "x" * 20_000), REASON_COLUMNS)) is None


@given(names=st.lists(st.tuples(TYPED, TYPED.filter(lambda reason: not reason.startswith(b"lemon:"))), max_size=5))
def test_parse_lemons_finds_lemon_with_any_user_text(names: list[tuple[bytes, bytes]]) -> None:
    rows = [*names, (b"n7", b"lemon: 3 Xids")]
    assert parse_lemons(b"".join(columns(row, DRAINED_COLUMNS) for row in rows)) == {"n7"}


@pytest.mark.parametrize("name", ["n" * 65, "n" * 80, "", "\u0416" * 33])
def test_parse_lemons_rejects_name_that_may_be_truncated(name: str) -> None:
    with pytest.raises(SlurmError):
        parse_lemons(columns((name, "lemon: 3 Xids"), DRAINED_COLUMNS))


# --- the claims of repairs

CLAIMED = "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus (repair: reboot)"


def claim_table(*rows: tuple[str | bytes, ...]) -> bytes:
    return b"".join(columns(row, CLAIM_COLUMNS) for row in rows)


@pytest.mark.parametrize(
    ("state", "reason", "is_claim", "is_renewed"),
    [
        ("idle+drain", CLAIMED, True, False),
        ("mixed+drain", CLAIMED, True, False),
        ("down+drain+not_responding", f"{CLAIMED} : Not responding", True, True),
        ("idle+drain+reboot_requested", CLAIMED, True, True),
        ("down+drain+reboot_issued", f"{CLAIMED} : reboot issued", True, True),
        ("idle+drain", f"{CLAIMED} : reboot issued", True, True),
        ("down", f"{CLAIMED} : reboot issued : reboot timed out", True, True),
        ("down", f"{CLAIMED} : reboot issued : reboot complete", True, True),
        # from 24.11 on, the Reason of an ended drain stays
        ("down", CLAIMED, False, False),
        ("down+not_responding", f"{CLAIMED} : reboot issued : Not responding", False, False),
        ("down", f"{CLAIMED} : reboot issued", False, False),
        ("idle+drain", "healthd: gpu_xid/79 0000:1b:00.0: x (repair failed: a person must act)", False, False),
        ("idle+drain", "healthd: gpu_xid/79 0000:1b:00.0: fell off the bus", False, False),
        ("idle+drain", "fan (repair: reboot)", False, False),
        ("idle+drain", "none", False, False),
        ("idle+drain", f"healthd: a/b: {'x' * 400} (repair: reboot)", False, False),
    ],
)
def test_parse_claims_finds_claims_in_force(state: str, reason: str, is_claim: bool, is_renewed: bool) -> None:
    table = claim_table(("n7", state, "1790000000", reason), ("n8", "idle+drain", "Unknown", "none"))
    assert parse_claims(table) == ([Claim("n7", 1790000000.0, is_renewed)] if is_claim else [])


@pytest.mark.parametrize(
    ("state", "reason", "is_hidden"),
    [
        ("idle+drain+invalid_reg", "gres/gpu count reported lower than configured (7 < 8)", True),
        ("down+drain", "Low RealMemory (reported:5 < 100.00% of configured:9) : Not responding", True),
        ("idle+drain", "Kill task failed (JobId=7 StepId=batch)", True),
        ("idle", "Low RealMemory", False),
        ("idle+drain", "Prolog error", False),
        ("idle+drain", "gres/gpu count reported lower than configured (7 < 8), we think", False),
    ],
)
def test_parse_claims_finds_reasons_that_may_hide_a_claim(state: str, reason: str, is_hidden: bool) -> None:
    found = parse_claims(claim_table(("n7", state, "1790000000", reason)))
    assert [(claim.node, claim.time) for claim in found if claim.is_hidden] == [("n7", 1790000000.0)] * is_hidden
    assert len(found) == is_hidden


def test_parse_claims_counts_a_node_in_several_partitions_once() -> None:
    rows = [(name, "idle+drain", "1790000000", CLAIMED) for name in ("n1", "n2", "n1")]
    assert [claim.node for claim in parse_claims(claim_table(*rows))] == ["n1", "n2"]


@pytest.mark.parametrize("name", ["n" * 65, "n" * 80, "", "\u0416" * 33])
def test_parse_claims_rejects_name_that_may_be_truncated(name: str) -> None:
    with pytest.raises(SlurmError):
        parse_claims(claim_table((name, "idle+drain", "1790000000", CLAIMED)))
    assert parse_claims(claim_table((name, "idle+drain", "1790000000", "fan"))) == []
    with pytest.raises(SlurmError):
        parse_node_names(columns((name,), NAME_COLUMNS))


def test_parse_claims_rejects_cut_table() -> None:
    with pytest.raises(SlurmError):
        parse_claims(claim_table(("n1", "idle+drain", "1790000000", CLAIMED))[:-1])


@given(rows=st.lists(st.tuples(TYPED, TYPED, TYPED, TYPED.filter(lambda text: b"repair" not in text)), max_size=5))
def test_parse_claims_finds_claim_among_any_user_text(rows: list[tuple[bytes, ...]]) -> None:
    table = claim_table(*rows, ("n7", "idle+drain", "1790000000", CLAIMED), *rows)
    assert parse_claims(table) == [Claim("n7", 1790000000.0)]


@pytest.mark.parametrize(
    ("state", "in_service"),
    [
        *((state, 2) for state in ("idle", "mixed", "allocated", "idle+planned", "allocated+completing", "idle+cloud")),
        *((state, 0) for state in ("idle+drain", "mixed+drain", "down", "down+drain", "idle+not_responding")),
        *((state, 0) for state in ("idle+reboot_requested", "idle+powered_down", "idle+maintenance", "idle+fail")),
        *((state, 0) for state in ("unknown", "future", "n/a", "", "idle+invalid_reg", f"idle+{'x' * 60}")),
    ],
)
def test_parse_in_service_counts_nodes_that_may_run_jobs(state: str, in_service: int) -> None:
    rows = [
        *(("gpu", state, "Unknown", "none", "2"), ("gpu", "down", "Unknown", "none", "1")),
        ("full", "idle", "Unknown", "none", "9"),
    ]
    table = b"".join(columns(row, FLEET_COLUMNS) for row in rows)
    assert parse_in_service(table, {"gpu"}) == [PartitionService("gpu", 3, in_service)]
    with pytest.raises(SlurmError):
        parse_in_service(table, {"gpu", "night"})


def test_parse_node_names_counts_each_node_once() -> None:
    table = b"".join(columns((name,), NAME_COLUMNS) for name in ("n1", "n2", "n1"))
    assert parse_node_names(table) == {"n1", "n2"}


TABLES = {
    "node": NODE_COLUMNS,
    "claims": CLAIM_COLUMNS,
    "job": JOB_COLUMNS,
    "fleet": FLEET_COLUMNS,
    "reason": REASON_COLUMNS,
    "out": DRAINED_COLUMNS,
    "state": STATE_COLUMNS,
    # fields that healthd does not read from a table today
    "other": (("Comment", 40), ("Extra", 40), ("Features", 40), ("Name", 40), ("UserName", 12), ("NodeList", 12)),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@given(data=st.data())
def test_records_keeps_values_with_any_user_text_in_any_column(table: Columns, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(*[TYPED] * len(table)), max_size=4))
    found = records(b"".join(columns(row, table) for row in rows), table)
    widths = [width for _, width in table]
    assert found == [[value[:width].rstrip(b" ") for value, width in zip(row, widths, strict=True)] for row in rows]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@given(data=st.data())
def test_readable_records_keeps_rows_before_a_cut_and_counts_others(table: Columns, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(*[TYPED] * len(table)), min_size=1, max_size=4))
    whole = b"".join(columns(row, table) for row in rows)
    length = data.draw(st.integers(0, len(whole)))
    size = len(whole) // len(rows)
    found, unread = readable_records(whole[:length], table)
    assert found == records(whole, table)[: length // size]
    assert unread == (1 if length % size else 0)
    if unread:
        with pytest.raises(SlurmError):
            records(whole[:length], table)


# --- unreadable rows

PARTITIONS = ["gpu", "all", "night"]


def node_rows(*changed: tuple[int, int, str]) -> bytes:
    """Return the rows of a node in PARTITIONS with some values changed, given as (row, column, value)."""
    rows = [[name, "1", "idle+drain", "1790000000", "root(0)", "fan", "gpu:8"] for name in PARTITIONS]
    for row, column, value in changed:
        rows[row][column] = value
    return b"".join(columns(row, NODE_COLUMNS) for row in rows)


@pytest.mark.parametrize(
    ("table", "partitions"),
    [
        (node_rows((0, 1, "many")), ["all", "night"]),
        (node_rows((0, 2, "???")), ["all", "night"]),
        (node_rows((1, 2, "")), ["gpu", "night"]),
        (node_rows()[:-1], ["gpu", "all"]),
        (node_rows()[:-900], ["gpu", "all"]),
    ],
    ids=["number", "state", "empty state", "no line end", "cut"],
)
def test_parse_node_skips_and_counts_unreadable_row(table: bytes, partitions: list[str]) -> None:
    found = parse_node(table, "n1")
    assert (found.flags, found.reason, found.gpu_count) == ({"IDLE", "DRAIN"}, "fan", 8)
    assert (found.partitions, found.unread_rows) == (set(partitions), 1)
    with pytest.raises(SlurmError, match="could not be read"):
        require_partitions(found)


def test_require_partitions_returns_partitions_of_completely_read_node() -> None:
    assert require_partitions(parse_node(node_rows(), "n1")) == set(PARTITIONS)
    elsewhere = node_rows((0, 1, "0"), (0, 2, "n/a"))
    assert require_partitions(parse_node(elsewhere, "n1")) == {"all", "night"}


@pytest.mark.parametrize("table", [node_rows()[:100], node_rows(*[(row, 1, "x") for row in range(3)])])
def test_parse_node_without_readable_row_is_not_a_missing_node(table: bytes) -> None:
    with pytest.raises(SlurmError) as error:
        parse_node(table, "n1")
    assert not isinstance(error.value, NoSuchNode)


# --- `scontrol show config` and `show partition`, which have no columns


ONE_LINE = TYPED.map(lambda typed: typed.replace(b"\n", b" ").decode("utf-8", "backslashreplace"))


@given(comment=ONE_LINE, name=ONE_LINE)
def test_parse_slurmctld_start_ignores_user_text(comment: str, name: str) -> None:
    config = (
        f"AccountingStorageHost   = {comment}\nBOOT_TIME               = 1790000000\nClusterName             = {name}\n"
        f"Epilog                  = {comment}\n\nSlurmctld(primary) at ctl1 is UP\n"
    )
    text = CommandResult(0, config.encode("utf-8", "surrogateescape")).text
    assert (parse_slurmctld_start(text), parse_controller(text)) == (1790000000.0, "1790000000 ctl1")


@given(name=ONE_LINE, typed=ONE_LINE)
def test_parse_cluster_size_is_not_reduced_by_user_text(name: str, typed: str) -> None:
    """The cluster size spreads the first counts of a shared cause."""
    line = (
        f"PartitionName={name} AllowGroups={typed} Nodes=n[1-9] TotalCPUs=72 TotalNodes=9 SelectTypeParameters=NONE\n"
    )
    assert parse_cluster_size(CommandResult(0, line.encode("utf-8", "surrogateescape")).text) >= 9


# --- reservations


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("No reservations in the system\n", frozenset()),
        (
            "ReservationName=healthd-no-repair StartTime=1796000000 EndTime=1796000060 Nodes=n1 State=INACTIVE\n"
            "ReservationName=maint StartTime=1796000000 EndTime=1796000060 Nodes=n2 State=ACTIVE\n",
            frozenset({"healthd-no-repair", "maint"}),
        ),
    ],
)
def test_parse_reservation_names_reads_each_line(text: str, names: frozenset[str]) -> None:
    assert parse_reservation_names(text) == names


@given(st.text())
def test_parse_reservation_names_of_any_text_raises_only_slurm_error(text: str) -> None:
    with suppress(SlurmError):
        assert parse_reservation_names(text)


# --- the drains of an NVLink domain

OF_DOMAIN = "healthd: gpu_xid/79: fell off the bus (domain 1a2b3c4d)"


def domain_count(*rows: tuple[str, str, str, str], until: float = float("inf")) -> int:
    table = b"".join(columns(row, CLAIM_COLUMNS) for row in rows)
    found = parse_domain_drains(table, "1a2b3c4d", until)
    assert found == PartitionCount("1a2b3c4d", 0, found.drained, is_domain=True)
    return found.drained


def test_parse_domain_drains_counts_current_drains_of_the_domain_once() -> None:
    rows = [
        ("n1", "idle+drain", "5", OF_DOMAIN),
        ("n1", "idle+drain", "5", OF_DOMAIN),  # in two partitions
        ("n2", "mixed+drain+not_responding", "5", f"{OF_DOMAIN} (repair: reboot) : reboot issued"),
        ("n3", "down", "5", OF_DOMAIN),  # 24.11 keeps the Reason after the drain has ended
        ("n4", "idle+drain", "5", OF_DOMAIN.replace("1a2b", "ffff")),
        ("n5", "idle+drain", "5", "healthd: gpu_xid/79: fell off the bus"),
        ("n6", "idle+drain", "5", "fan (domain 1a2b3c4d)"),
        ("n7", "down+drain", "7", OF_DOMAIN),
    ]
    assert domain_count(*rows) == 3
    assert domain_count(*rows, until=6) == 2
    assert domain_count() == 0


def test_parse_domain_drains_rejects_truncated_table_and_name() -> None:
    with pytest.raises(SlurmError):
        parse_domain_drains(columns(("n1", "idle+drain", "5", OF_DOMAIN), CLAIM_COLUMNS)[:-9], "1a2b3c4d", NOW)
    with pytest.raises(SlurmError, match="no node name of less than 65 bytes"):
        domain_count(("n" * 70, "idle+drain", "5", OF_DOMAIN))
