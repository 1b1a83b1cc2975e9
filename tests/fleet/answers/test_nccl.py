"""Tests of `healthd fleet nccl DIR`: dumps and logs of stuck jobs, also from hostile folders."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import stuck_jobs
from fleet_views import text_of
from stuck_jobs import Job

from healthd.cli.main import main
from healthd.common.page import Page
from healthd.fleet.answers import nccl
from healthd.fleet.answers.document import Unanswerable

REAL = Path(__file__).parents[2] / "data" / "flight_recorder" / "gpu_error_1st"
# Eight ranks, two tensor parallel groups of four, data parallel pairs; the program of rank 5 stops after 20 calls.
JOB = Job(
    [tuple(range(8)), (0, 1, 2, 3), (4, 5, 6, 7), *((rank, rank + 4) for rank in range(4))],
    [(1, 1), (2, 1), (3, 0), (4, 0), (5, 0), (6, 0), (0, 0)] * 20,
    {5: 20},
    2,
)


def write_dumps(tmp_path, job=JOB, name="nccl_trace_rank_{}", write=stuck_jobs.as_pickle, **options):
    for rank, dump in stuck_jobs.dumps(job, stuck_jobs.simulate(job), **options).items():
        path = tmp_path / name.format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(dump))
    return tmp_path


def answer(path) -> dict:
    document = nccl.nccl(str(path))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


# --- a real job


def test_nccl_names_ranks_with_gpu_error_in_real_job():
    """The data is of NVIDIA's own fault injection; none of its numbers was chosen for this test.

    Rank 12 never entered the collective that ranks 13 to 15 wait in. Rank 14 did not leave a collective that rank 15
    left.
    """
    document = answer(REAL)
    assert (document["kind"], document["suspects"], document["held_up"]) == ("missing", [12, 14], 14)
    assert [(entry["rank"], entry["why"]) for entry in document["reasons"]] == [(12, "missing"), (14, "stayed")]
    first = document["groups"][0]
    assert first["description"] == "EXPERT_MODEL_PARALLEL_GROUP"
    assert (first["collective"], first["sequence"]) == ("all_to_all", 20537)
    assert (first["entered"], first["missing"]) == ([13, 14, 15], [12])


@pytest.mark.parametrize("gone", [0, 3, 4, 7, 8, 11])
def test_nccl_finds_same_suspects_without_dump_of_waiting_rank(tmp_path, gone):
    for path in REAL.iterdir():
        if path.name != f"_dump_{gone}":
            shutil.copy(path, tmp_path)
    document = answer(tmp_path)
    assert (document["suspects"], document["ranks_without_dump"]) == ([12, 14], [gone])


def test_lowest_sequence_over_all_groups_is_no_suspect():
    """In the real job ranks 4 to 11 have far lower numbers in their tensor parallel groups than rank 12, and wait."""
    assert not {4, 5, 6, 7, 8, 9, 10, 11} & set(answer(REAL)["suspects"])


# --- formats of dumps and names


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("nccl_trace_rank_{}", ""),
        ("_dump_{}", ""),
        ("comm_lib_trace_rank_{}", ""),
        ("gpu-0412_rank{}.pkl", "gpu-0412"),
        ("gpu-0412/_dump_{}", "gpu-0412"),
        ("job-77/gpu-0412/nccl_trace_rank_{}.pickle", "gpu-0412"),
        ("rank{}_20261101.json", ""),
        ("{}", ""),
    ],
)
def test_rank_and_host_are_read_from_file_name(tmp_path, name, host):
    document = answer(write_dumps(tmp_path, name=name))
    assert document["suspects"] == [5]
    assert [entry["rank"] for entry in document["files"]] == list(range(8))
    assert document["reasons"][0]["host"] == host


# Here the groups of a dump do not identify its rank.
ONE_GROUP = Job([tuple(range(8))], [(0, 0)] * 10, {3: 9})


@pytest.mark.parametrize(
    "name",
    [
        "dump_{rank}.gpu-{node}",
        "{rank}.node0{node}",
        "trace_{rank}_20261122",
        "{rank}_v2.pkl",
        "nccl_trace_gpu{node}_{rank}",
        "rank_{rank}_of_8.pkl",
        "rank_{rank}_local_rank_{local}",
        "job_5_rank_{rank}_attempt_0",
        "gpu-{node}/trace_{rank}",
        "{rank}",
    ],
)
@pytest.mark.parametrize("gone", [(), (1, 2), (0, 1, 2, 4, 5)])
def test_rank_number_is_found_over_all_names_of_folder(tmp_path, name, gone):
    for rank, dump in stuck_jobs.dumps(ONE_GROUP, stuck_jobs.simulate(ONE_GROUP)).items():
        if rank not in gone:
            path = tmp_path / name.format(rank=rank, node=rank // 4 + 1, local=rank % 4)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(stuck_jobs.as_pickle(dump))
    document = answer(tmp_path)
    assert [entry["rank"] for entry in document["files"]] == [rank for rank in range(8) if rank not in gone]
    assert (document["suspects"], document["unread"]) == ([3], [])


def test_repeated_ranks_per_node_are_usage_error(tmp_path, capsys):
    for rank, dump in stuck_jobs.dumps(ONE_GROUP, stuck_jobs.simulate(ONE_GROUP)).items():
        path = tmp_path / f"node{rank // 4}" / f"nccl_trace_{rank % 4}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(stuck_jobs.as_pickle(dump))
    assert main(["fleet", "nccl", str(tmp_path)]) == 3
    error = capsys.readouterr().err
    assert re.search(r"node0/nccl_trace_0 .*node1/nccl_trace_0 .*rank 0\b", error)


def test_groups_of_dump_decide_rank_when_name_is_ambiguous(tmp_path):
    """The name has the numbers 3 and 99, but only 3 is in the groups of the dump."""
    document = answer(write_dumps(tmp_path, name="trace-{}-of-99"))
    assert [entry["rank"] for entry in document["files"]] == list(range(8))


@pytest.mark.parametrize("version", ["2.0", "2.1", "2.3", "2.4", "2.7", "2.9", "2.10"])
@pytest.mark.parametrize("write", [stuck_jobs.as_pickle, stuck_jobs.as_json, lambda dump: pickle.dumps(dump, 4)])
def test_dumps_of_all_versions_are_read_as_pickle_and_json(tmp_path, version, write):
    document = answer(write_dumps(tmp_path, write=write, version=version))
    assert (document["suspects"], document["files"][0]["version"]) == ([5], version)


def test_dumps_of_version_1_are_read(tmp_path):
    def first_version(dump):
        for entry in dump["entries"]:
            entry["seq_id"] = entry.pop("collective_seq_id")
            for key in ("p2p_seq_id", "op_id", "is_p2p", "input_dtypes", "output_dtypes", "timeout_ms"):
                del entry[key]
            entry["process_group"] = entry["process_group"][0]
        return pickle.dumps({"version": "1.3", "entries": dump["entries"]}, 2)

    document = answer(write_dumps(tmp_path, write=first_version))
    assert (document["kind"], document["suspects"]) == ("missing", [5])


def test_overwritten_ring_buffer_entries_are_not_missing(tmp_path):
    """The group of all ranks is used once at the start; later some buffers no longer have that entry."""
    job = Job([(0, 1, 2, 3), (0, 1), (2, 3)], [(0, 0)] + [(1, 0), (2, 0)] * 40, {3: 30}, 2)
    document = answer(write_dumps(tmp_path, job=job, buffer=5, status=False))
    assert (document["suspects"], [row["group"] for row in document["groups"]]) == ([3], ["2"])


def test_newer_of_two_dumps_of_rank_is_used(tmp_path):
    write_dumps(tmp_path)
    old = Job(JOB.groups, JOB.program[:10])
    dump = stuck_jobs.dumps(old, stuck_jobs.simulate(old))[5]
    (tmp_path / "attempt1_rank_5").write_bytes(pickle.dumps(dump, 2))
    document = answer(tmp_path)
    assert document["suspects"] == [5]
    assert [entry["file"] for entry in document["unread"]] == ["attempt1_rank_5"]


def test_restarted_rank_counts_as_gone(tmp_path):
    write_dumps(tmp_path)
    fresh = Job(JOB.groups, JOB.program[:14])
    dump = stuck_jobs.dumps(fresh, stuck_jobs.simulate(fresh))[5]
    for entry in dump["entries"]:
        entry["time_created_ns"] += 600 * 10**9
    (tmp_path / "nccl_trace_rank_5").write_bytes(pickle.dumps(dump, 2))
    document = answer(tmp_path)
    assert (document["suspects"], document["ranks_without_dump"]) == ([5], [5])
    assert any("restarted" in note for note in document["notes"])


def test_dump_of_earlier_run_is_ignored(tmp_path):
    write_dumps(tmp_path)
    dump = stuck_jobs.dumps(JOB, stuck_jobs.simulate(JOB))[2]
    for entry in dump["entries"]:
        entry["time_created_ns"] -= 86_400 * 10**9
        entry["collective_seq_id"] += 500
    (tmp_path / "nccl_trace_rank_2").write_bytes(pickle.dumps(dump, 2))
    document = answer(tmp_path)
    assert (document["suspects"], document["ranks_without_dump"]) == ([5], [2])
    assert any("earlier run" in note for note in document["notes"])


# --- ranks without dump


def test_awaited_rank_without_dump_is_suspect(tmp_path):
    write_dumps(tmp_path, status=False)
    (tmp_path / "nccl_trace_rank_5").unlink()
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"], document["ranks_without_dump"]) == ("missing", [5], [5])
    assert document["reasons"][0]["why"] == "no_dump"


def test_rank_without_dump_is_no_suspect_if_other_rank_explains_wait(tmp_path):
    write_dumps(tmp_path)
    (tmp_path / "nccl_trace_rank_6").unlink()
    document = answer(tmp_path)
    assert (document["suspects"], document["ranks_without_dump"]) == ([5], [6])


def test_no_rank_is_suspect_if_most_dumps_are_missing(tmp_path):
    write_dumps(tmp_path)
    for rank in (0, 1, 2, 3, 5, 7):
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    document = answer(tmp_path)
    assert document["suspects"] == []
    assert document["ranks_without_dump"] == [0, 1, 2, 3, 5, 7]


def test_ranks_of_dead_node_are_suspects(tmp_path, capsys):
    write_dumps(tmp_path, job=Job([tuple(range(16))], [(0, 0)] * 10, dict.fromkeys(range(8, 16), 9)))
    for rank in range(8, 16):
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"], document["held_up"]) == ("missing", list(range(8, 16)), 8)
    assert {entry["why"] for entry in document["reasons"]} == {"no_dump"}
    assert main(["fleet", "nccl", str(tmp_path)]) == 1
    assert "they died" in " ".join(capsys.readouterr().out.split())


def test_killed_rank_of_two_is_suspect(tmp_path):
    write_dumps(tmp_path, job=Job([(0, 1)], [(0, 0)] * 10, {1: 9}))
    (tmp_path / "nccl_trace_rank_1").unlink()
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"], document["held_up"]) == ("missing", [1], 1)


def test_incomplete_folder_names_no_suspect_and_is_finding(tmp_path, capsys):
    write_dumps(tmp_path, job=Job([tuple(range(16))], [(0, 0)] * 10, {15: 9}))
    for rank in range(4, 16):
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    assert main(["fleet", "nccl", str(tmp_path)]) == 1
    assert "12 of 16 ranks" in " ".join(capsys.readouterr().out.split())
    assert (answer(tmp_path)["kind"], answer(tmp_path)["suspects"]) == ("none", [])


def without_groups(dump):
    return pickle.dumps({"version": "1.3", "entries": dump["entries"]}, 2)


@pytest.mark.parametrize(("killed", "kind", "suspects"), [(3, "missing", [3]), (0, "missing", [0]), (7, "network", [])])
def test_gap_in_ranks_counts_as_missing_dump_without_groups(tmp_path, killed, kind, suspects):
    """Without the highest rank there is no gap, so the answer notes that the members of the group are not known."""
    write_dumps(tmp_path, job=Job([tuple(range(8))], [(0, 0)] * 10, {killed: 9}), write=without_groups)
    (tmp_path / f"nccl_trace_rank_{killed}").unlink()
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"], document["ranks_without_dump"]) == (kind, suspects, suspects)
    assert any("are not recorded" in note for note in document["notes"]) == (kind == "network")


def test_missing_dumps_are_listed_up_to_limit_and_all_counted(tmp_path):
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(100_000)])}}
    (dump, *_) = stuck_jobs.dumps(
        Job([(0, 1)], [(0, 0)], {1: 0}), stuck_jobs.simulate(Job([(0, 1)], [(0, 0)], {1: 0}))
    ).values()
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({**dump, "pg_config": config}, 2))
    document = answer(tmp_path)
    assert (len(document["ranks_without_dump"]), document["ranks_without_dump_count"]) == (4096, 99_999)


# --- sends and receives


def pair_entry(record, sequence, kind, own_place, peer_place, state="scheduled", **more):
    arrow = "->" if kind == "send" else "<-"
    return {
        "record_id": record,
        "pg_id": 1,
        "process_group": ("1", "PIPELINE"),
        "collective_seq_id": 0,
        "p2p_seq_id": sequence,
        "op_id": sequence,
        "profiling_name": f"nccl:{kind} {own_place}{arrow}{peer_place}",
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "output_sizes": [[8]],
        "output_dtypes": ["Float"],
        "time_created_ns": stuck_jobs.START_NS + record,
        "state": state,
        "retired": state == "completed",
        "is_p2p": True,
        **more,
    }


def pipeline(tmp_path, entries, ranks=(10, 20, 30)):
    config = {"1": {"name": "1", "desc": "PIPELINE", "ranks": str(list(ranks))}}
    for rank, entry_list in zip(ranks, entries, strict=True):
        dump = {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": entry_list}
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, 2))
    return answer(tmp_path)


def test_stage_without_sends_is_suspect(tmp_path):
    """Places 0, 1, 2 of the group are ranks 10, 20, 30: rank 30 waits for 20, and 20 for 10."""
    done = "completed"
    document = pipeline(
        tmp_path,
        [
            [pair_entry(0, 1, "send", 0, 1, done)],
            [
                pair_entry(0, 1, "recv", 1, 0, done),
                pair_entry(1, 2, "send", 1, 2, done),
                pair_entry(2, 3, "recv", 1, 0),
            ],
            [pair_entry(0, 1, "recv", 2, 1, done), pair_entry(1, 2, "recv", 2, 1)],
        ],
    )
    assert (document["kind"], document["suspects"]) == ("missing", [10])
    assert document["reasons"][0]["waiting"] == [20]


def test_unfinished_send_and_receive_are_network(tmp_path):
    document = pipeline(
        tmp_path,
        [
            [pair_entry(0, 1, "send", 0, 1)],
            [pair_entry(0, 1, "recv", 1, 0)],
            [pair_entry(0, 1, "send", 2, 0, "completed")],
        ],
    )
    assert (document["kind"], document["suspects"]) == ("network", [])


def test_sends_of_batch_are_done_with_their_batch(tmp_path):
    """The entries of a batch stay "scheduled"; only their "coalesced" entry is completed (ProcessGroupNCCL.cpp)."""
    batch = [
        pair_entry(0, 1, "send", 0, 1),
        pair_entry(1, 1, "recv", 0, 1),
        {**pair_entry(2, 1, "send", 0, 1, "completed"), "profiling_name": "nccl:coalesced"},
    ]
    other = [
        pair_entry(0, 1, "send", 1, 0),
        pair_entry(1, 1, "recv", 1, 0),
        {**pair_entry(2, 1, "send", 1, 0, "completed"), "profiling_name": "nccl:coalesced"},
    ]
    document = pipeline(tmp_path, [batch, other, [pair_entry(0, 1, "send", 2, 0, "completed")]])
    assert (document["kind"], document["suspects"]) == ("none", [])


def test_early_receive_hides_no_stopped_program(tmp_path):
    """Rank 0 entered its receive and stopped before the collective in which rank 1 waits. So rank 1 never sends."""
    collective = {
        **stuck_jobs.dumps(Job([(0, 1)], [(0, 0)]), stuck_jobs.simulate(Job([(0, 1)], [(0, 0)])))[0]["entries"][0]
    }
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "1": {"name": "1", "desc": "PIPELINE", "ranks": "[0, 1]"},
    }
    waiting = {**collective, "record_id": 1, "collective_seq_id": 2, "state": "scheduled", "retired": False}
    for rank, entries in enumerate([[collective, pair_entry(1, 1, "recv", 0, 1)], [collective, waiting]]):
        dump = {"version": "2.9", "pg_config": config, "entries": entries}
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(dump, 2))
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"]) == ("missing", [0])


# --- logs


def test_watchdog_lines_name_missing_rank(tmp_path):
    """torch 2.6: the rank that times out names the operation; the rank that never entered reports only its progress."""
    for rank in range(3):
        (tmp_path / f"rank_{rank}.log").write_text(
            f"step 10\n[rank{rank}]:[E808 04:21:41.160918398 ProcessGroupNCCL.cpp:655] [Rank {rank}] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
            "Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
            f"[rank{rank}]:[E808 04:21:41.161005534 ProcessGroupNCCL.cpp:2299] [PG ID 0 PG GUID 0(default_pg) Rank "
            f"{rank}]  failure detected by watchdog at work sequence id: 808 PG status: last enqueued work: 811, last "
            "completed work: 807\n"
        )
    (tmp_path / "rank_3.log").write_text(
        "[rank3]:[E703 21:51:54.112142364 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 3] Received a "
        "dump signal due to a collective timeout from  rank 0 and we will try our best to dump the debug info. Last "
        "enqueued NCCL work: 807, last completed NCCL work: 807.This is most likely caused by incorrect usages\n"
    )
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"]) == ("missing", [3])
    assert document["groups"][0]["description"] == "default_pg"
    assert (document["groups"][0]["collective"], document["groups"][0]["sequence"]) == ("ALLREDUCE", 808)


def test_watchdog_lines_of_torch_1_13_are_read(tmp_path):
    """torch 1.13: one log for all ranks, without groups and sizes. Rank 1 is in another collective."""
    (tmp_path / "job.log").write_text(
        "".join(
            f"[E ProcessGroupNCCL.cpp:737] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum="
            f"{number}, OpType={kind}, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.\n"
            for rank, number, kind in ((0, 12, "ALLREDUCE"), (1, 12, "BROADCAST"), (2, 12, "ALLREDUCE"))
        )
    )
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"]) == ("mismatch", [])
    assert document["mismatch"]["calls"] == [
        {"message": "ALLREDUCE", "ranks": [0, 2]},
        {"message": "BROADCAST", "ranks": [1]},
    ]


def test_nccl_info_lines_name_rank_with_fewer_operations(tmp_path):
    for rank, last in ((0, 0x1B), (1, 0x1B), (2, 0x1A)):
        prefix = f"gpu-{rank}:1{rank}:2 [0] NCCL INFO"
        lines = [
            f"{prefix} ncclCommInitRank comm 0x55{rank} rank {rank} nranks 3 cudaDev 0 nvmlDev 0 busId 1b000 "
            "commId 0x9f0a - Init COMPLETE"
        ]
        lines += [
            f"{prefix} AllReduce: opCount {count:x} sendbuff 0x1 recvbuff 0x2 count 64 datatype 7 "
            f"op 0 root 0 comm 0x55{rank} [nranks=3] stream 0x7"
            for count in range(0x10, last + 1)
        ]
        (tmp_path / f"nccl.{rank}.log").write_text("\n".join(lines) + "\n")
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"], document["reasons"][0]["host"]) == ("missing", [2], "gpu-2")
    assert any("when it leaves it" in note for note in document["notes"])


# --- hostile folders


def write_hostile_files(tmp_path):
    class Run:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    (tmp_path / "a_rank_90").write_bytes(pickle.dumps(Run(), 2))
    (tmp_path / "b_rank_91").write_bytes(pickle.dumps({"entries": Run(), "version": "2.9"}, 4))
    (tmp_path / "c_rank_92").write_bytes(b"\x80\x02Nr\xff\xff\xff\x7f" + b"N" * 20 + b".")  # a memo of 2^31 places
    (tmp_path / "d_rank_93").write_bytes(b"\x80\x02" + b"]" * 9_000_000)
    (tmp_path / "e_rank_94").write_bytes(b"[" * 100_000)
    (tmp_path / "f_rank_95").write_bytes(b'{"entries": ' + b"[" * 100_000)
    whole = stuck_jobs.as_pickle(stuck_jobs.dumps(JOB, stuck_jobs.simulate(JOB))[0])
    (tmp_path / "g_rank_96").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "h_rank_97").write_bytes(b"")
    with open(tmp_path / "i_rank_98", "wb") as sparse:
        sparse.write(b"\x80\x02")
        sparse.truncate(10 << 30)
    with open(tmp_path / "j_rank_99", "wb") as sparse:
        sparse.truncate(10 << 30)
    os.mkfifo(tmp_path / "k_rank_100")
    os.symlink("/dev/zero", tmp_path / "l_rank_101")
    os.symlink("nowhere", tmp_path / "m_rank_102")
    (tmp_path / "n_rank_103").write_bytes(pickle.dumps({"entries": [{"profiling_name": 7}], "pg_config": {}}, 2))
    (tmp_path / "o_rank_104").write_bytes(pickle.dumps([1, 2, 3], 2))
    with open(os.path.join(os.fsencode(tmp_path), b"p_\xff_rank_105"), "wb") as file:
        file.write(b"\x80\x02.")


def test_hostile_folder_is_read_as_far_as_possible(tmp_path):
    write_dumps(tmp_path)
    write_hostile_files(tmp_path)
    document = answer(tmp_path)
    assert (document["kind"], document["suspects"]) == ("missing", [5])
    why = {entry["file"][:1]: entry["why"] for entry in document["unread"]}
    assert "".join(sorted(why)) == "abcdfghijklmnop"
    for file, text in {
        "a": "nothing was loaded",
        "b": "nothing was loaded",
        "c": "not a pickle of plain data",
        "d": "memory",
        "g": "truncated",
        "h": "is empty",
        "i": "10,737,418,240 bytes",
        "k": "regular file",
        "l": "regular file",
        "m": "No such file",
    }.items():
        assert text in why[file]
    assert not (tmp_path / "ran").exists()
    assert "\x1b" not in text_of(document, Page())


def test_unreadable_folder_is_one_sentence(tmp_path, capsys):
    write_hostile_files(tmp_path)
    assert main(["fleet", "nccl", str(tmp_path)]) == 3
    printed, error = capsys.readouterr()
    assert (printed, error.count("\n")) == ("", 1)
    assert "a_rank_90" in error


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("x"), lambda path: None])
def test_empty_folder_file_or_missing_path_is_one_sentence(tmp_path, capsys, make):
    make(tmp_path / "dumps")
    assert main(["fleet", "nccl", str(tmp_path / "dumps")]) == 3
    assert str(tmp_path / "dumps") in capsys.readouterr().err


# --- the command


def test_command_prints_suspects_and_next_steps(capsys):
    assert main(["fleet", "nccl", str(REAL)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Ranks 12, 14 .*: 14 of 16 ranks ", printed)
    assert re.search(r"Rank 12 never .* 20537 of EXPERT_MODEL_PARALLEL_GROUP \(74\)", printed)
    assert "healthd fleet attribution" in printed


def test_job_without_waiting_ranks_is_no_finding(tmp_path, capsys):
    job = Job(JOB.groups, JOB.program)
    assert main(["fleet", "nccl", str(write_dumps(tmp_path, job=job)), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["kind"], document["suspects"], document["groups"]) == ("none", [], [])


def test_missing_folder_argument_is_usage_error(capsys):
    assert main(["fleet", "nccl"]) == 64
    assert "DIR" in capsys.readouterr().err


def test_empty_folder_raises_unanswerable(tmp_path):
    with pytest.raises(Unanswerable):
        nccl.nccl(str(tmp_path))
