"""Tests of reading dumps and logs of any content: plain data, or one sentence."""

from __future__ import annotations

from contextlib import suppress

import pytest
import stuck_jobs
from hypothesis import given
from hypothesis import strategies as st
from stuck_jobs import Job

from healthd.common.safe_pickle import UnsafePickle, load_plain
from healthd.fleet.collectives import dump, rank_log
from healthd.fleet.collectives.dump import InvalidDump
from healthd.fleet.collectives.waits import judge

LEAVES = st.none() | st.booleans() | st.integers(-(1 << 62), 1 << 62) | st.floats(allow_nan=False) | st.text()
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=30,
)
WHOLE = stuck_jobs.as_pickle(
    stuck_jobs.dumps(Job([(0, 1)], [(0, 0)] * 6), stuck_jobs.simulate(Job([(0, 1)], [(0, 0)] * 6)))[0]
)


@given(st.integers(2, len(WHOLE) - 1), st.binary(max_size=8))
def test_damaged_dump_is_read_or_rejected(at, put):
    try:
        view = dump.parse_dump(load_plain(WHOLE[:at] + put + WHOLE[at + len(put) :]))
    except (UnsafePickle, InvalidDump):
        return
    view.rank = 0
    judge([view])


@pytest.mark.parametrize(
    "values",
    [
        {"input_sizes": [[1 << 62, 1 << 62] * 200]},
        {"output_sizes": [[-1]]},
        {"input_sizes": [[1 << 62], [1 << 62]]},
        {"collective_seq_id": -5},
        {"record_id": -1},
        {"time_created_ns": -1},
        {"time_created_ns": float("nan")},
    ],
)
def test_dump_with_impossible_number_is_rejected(values):
    whole = load_plain(WHOLE)
    whole["entries"][-1].update(values)
    with pytest.raises(InvalidDump):
        dump.parse_dump(whole)


@pytest.mark.parametrize("ranks", [[-1, 5], [1 << 17], [0] * ((1 << 17) + 1)])
def test_dump_with_impossible_group_is_rejected(ranks):
    with pytest.raises(InvalidDump):
        dump.parse_dump({"entries": [], "pg_config": {"0": {"ranks": ranks}}})


@given(PLAIN)
def test_plain_data_is_empty_dump_or_rejected(value):
    with suppress(InvalidDump):
        dump.parse_dump({"entries": value, "pg_config": value, "pg_status": value})


VALID_LINES = (
    b"[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 7 Rank 1] Exception (either an "
    b"error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL work: 7.",
    b"[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, "
    b"OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.",
    b"gpu1:13135:13922 [0] NCCL INFO AllReduce: opCount 1a sendbuff 0x1 recvbuff 0x2 count 64 datatype 7 op 0 root 0 "
    b"comm 0x7f0c741162f0 [nranks=2] stream 0x7f0c74002f00",
)


@given(st.lists(st.sampled_from(VALID_LINES), max_size=4), st.integers(0, 300), st.binary(max_size=20))
def test_damaged_log_lines_are_views_or_nothing(lines, at, put):
    broken = [line[:at] + put + line[at:] for line in lines]
    views = {view.rank: view for view in rank_log.parse_views(broken, "x.log", "", 0)}
    judge(views.values())


@pytest.mark.parametrize(
    ("line", "group", "entered", "first"),
    [
        (
            "[rank2]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 2] Timeout at NCCL work: 1, last enqueued NCCL work: 3, "
            "last completed NCCL work: 0.",
            "0",
            3,
            1,
        ),
        (
            "[rank2]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 5 PG GUID 35(TENSOR) Rank 0] Exception (either "
            "an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work: 811, last completed NCCL "
            "work: 807.",
            "35",
            811,
            808,
        ),
        (
            "(WorkerDict pid=3490362) [rank2]:[E1118 20:32:23.9 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID "
            "0(default_pg) Rank 2]  failure detected by watchdog at work sequence id: 5 PG status: last enqueued work: "
            "5, last completed work: 4",
            "0",
            5,
            5,
        ),
        (
            "[rank2]:[E703 21:51:54.1 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 2] Received a "
            "dump signal due to a collective timeout from  rank 7 and we will try our best to dump the debug info. "
            "Last enqueued NCCL work: 56116, last completed NCCL work: 56116.This is most likely",
            "0",
            56116,
            None,
        ),
    ],
)
def test_watchdog_status_is_read_in_each_format(line, group, entered, first):
    (view,) = rank_log.parse_views([line.encode()], "x.log", "")
    lane = view.lanes[group]
    assert (view.rank, lane.entered, lane.first and lane.first.sequence) == (2, entered, first)
