"""Tests of failed InfiniBand requests and hanging watchdogs in logs of ranks, in the format of each version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.cli.main import main
from healthd.fleet.answers import nccl, nccl_transport
from healthd.fleet.collectives import rank_log, transport
from healthd.fleet.collectives.transport import FailedRequest
from healthd.fleet.views import nccl as view

CASE = Path(__file__).parents[2] / "data" / "nccl_logs" / "retry_exceeded"
HEAD = "gpu-1:984:1357 [4] transport/net_ib.cc:1295 NCCL WARN "
LINES = {
    "2.7": (
        "NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129",
        FailedRequest(12, "", "", "", "", "", 129),
    ),
    "2.10": (
        "NET/IB : Got completion from peer 192.0.2.9<44206> with error 4, opcode 32611, len 32611, vendor err 81",
        FailedRequest(4, "192.0.2.9", "", "", "", "", 81),
    ),
    "2.18 over IPv6": (
        "NET/IB : Got completion from peer fe80::966d:ae03:8b:df54%ib0<33397> with error 4, opcode 0, len 0, vendor "
        "err 81 (Send) localGid ::ffff:192.0.2.8 remoteGid ::ffff:192.0.2.9",
        FailedRequest(4, "fe80::966d:ae03:8b:df54%ib0", "::ffff:192.0.2.8", "::ffff:192.0.2.9", "", "Send", 81),
    ),
    "2.20": (
        "NET/IB : Got completion from peer 192.0.2.59<44206> with status=12 opcode=129 len=65536 vendor err 129 (Recv) "
        "localGid ::ffff:198.51.100.182 remoteGids::ffff:198.51.100.221",
        FailedRequest(12, "192.0.2.59", "::ffff:198.51.100.182", "::ffff:198.51.100.221", "", "Recv", 129),
    ),
    "2.20 with global GIDs": (
        "NET/IB : Got completion from peer 192.0.2.59<54862> with status=12 opcode=0 len=0 vendor err 129 (Recv) "
        "localGid fd00:1148:9000:5000:4:200:3:ff22 remoteGidsfd00:1148:9000:5000:4:200:3:ff1f",
        FailedRequest(
            12,
            "192.0.2.59",
            "fd00:1148:9000:5000:4:200:3:ff22",
            "fd00:1148:9000:5000:4:200:3:ff1f",
            "",
            "Recv",
            129,
        ),
    ),
    "a plugin": (
        "NET/IBP:Got completion from peer 192.0.2.83<36315> with status=12 opcode=32698 len=32696 vendor err 129 "
        "(Send)",
        FailedRequest(12, "192.0.2.83", "", "", "", "Send", 129),
    ),
    "2.24 on InfiniBand": (
        "NET/IB: Got completion from peer 192.0.2.9<36315> with status=5 opcode=1 len=4294967295 vendor err 249 "
        "(Flush) hca mlx5_2",
        FailedRequest(5, "192.0.2.9", "", "", "mlx5_2", "Flush", 249),
    ),
    "2.29 of the GPU": (
        "NET/IB/GIN: Got completion from peer 192.0.2.9<36315> with status=10 opcode=1 len=8 vendor err 136 (IPut) "
        "localGid fe80::1 remoteGidsfe80::2 hca mlx5_2",
        FailedRequest(10, "192.0.2.9", "fe80::1", "fe80::2", "mlx5_2", "IPut", 136),
    ),
    "2.29": (
        "NET/IB: Got completion from peer 192.0.2.9<36708> with status=IBV_WC_RETRY_EXC_ERR(12) opcode="
        "IBV_WC_RDMA_WRITE(1) vendor_err=0  localGid fe80::1 remoteGidsfe80::2 hca mlx5_0",
        FailedRequest(12, "192.0.2.9", "fe80::1", "fe80::2", "mlx5_0", "", 0),
    ),
    "later": (
        "NET/IB: Got completion from peer 192.0.2.2<4> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) "
        "reqSize=0 vendor_err=129 req_type=Recv localGid ::ffff:192.0.2.1 remoteGids::ffff:192.0.2.2 hca mlx5_2",
        FailedRequest(12, "192.0.2.2", "::ffff:192.0.2.1", "::ffff:192.0.2.2", "mlx5_2", "Recv", 129),
    ),
}
STUCK = (
    "[rank{0}]:[F1019 01:14:03.35 ProcessGroupNCCL.cpp:1224] [PG 3 Rank 2] [PG 3 Rank 2] ProcessGroupNCCL's watchdog "
    "got stuck for 600 seconds without making progress in monitoring enqueued collectives. This typically indicates"
)


def answer(folder: Path, logs: dict[str, list[str]]) -> nccl.Document:
    for name, lines in logs.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    document = nccl.nccl(str(folder))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    return document


# --- lines


@pytest.mark.parametrize("version", LINES)
def test_parse_reads_failed_request_of_each_version(version: str) -> None:
    line, failed = LINES[version]
    assert transport.parse(HEAD + line) == failed
    assert transport.parse(line) == failed


@pytest.mark.parametrize(
    "line",
    [
        "NET/IB : Got completion from peer 192.0.2.9<4> with status=0 opcode=1 len=4 wr_id=3 r=0x1 type=1 events={0,1}",
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB ; OOB eth0:192.0.2.9<0>",
        "Got completion with error 12, opcode 1, len 0, vendor err 129",
    ],
)
def test_parse_skips_other_lines(line: str) -> None:
    assert transport.parse(HEAD + line) is None


@given(st.sampled_from([line for line, _ in LINES.values()]), st.integers(0, 300), st.binary(max_size=30))
def test_damaged_line_is_failure_or_nothing(line: str, at: int, put: bytes) -> None:
    raw = (HEAD + line).encode()
    found = rank_log.parse_log([raw[:at] + put + raw[at:]], "x.log", "", 0)
    for failure in found.failures:
        assert failure.failed.status > 0
        assert transport.lookup_status(failure.failed.status).meaning


@given(st.integers(1, 30), st.ip_addresses(), st.ip_addresses(v=6), st.ip_addresses(v=6), st.sampled_from(["s", " "]))
def test_parse_reads_both_ends_for_any_address(
    status: int, peer: object, local: object, remote: object, glue: str
) -> None:
    line = (
        f"NET/IB: Got completion from peer {peer}<5> with status={status} opcode=1 len=0 vendor err 1 (Send) localGid "
        f"{local} remoteGid{glue}{remote} hca mlx5_0"
    )
    assert transport.parse(line) == FailedRequest(status, str(peer), str(local), str(remote), "mlx5_0", "Send", 1)


@pytest.mark.parametrize(
    ("number", "name", "source"),
    [
        (4, "LOC_PROT_ERR", "memory"),
        (5, "WR_FLUSH_ERR", "flushed"),
        (10, "REM_ACCESS_ERR", "memory"),
        (12, "RETRY_EXC_ERR", "network"),
        (99, "status 99", "other"),
    ],
)
def test_lookup_status_has_name_and_source_of_libibverbs(number: int, name: str, source: str) -> None:
    assert transport.lookup_status(number)[::2] == (name, source)


def test_parse_log_ignores_overlong_host_name() -> None:
    line = f"{'gpu.' * 100}:984:1357 [4] {LINES['2.20'][0]}"
    (failure,) = rank_log.parse_log([line.encode()], "x.log", "").failures
    assert failure.host == ""


# --- the answer


def test_real_log_with_exhausted_retries_names_both_ends() -> None:
    document = nccl.nccl(str(CASE))
    assert (document["kind"], document["suspects"]) == ("network", [])
    assert [row["status"] for row in document["failures"]] == [12, 5]
    first = document["failures"][0]
    assert (first["local"], first["remote"], first["peer"]) == (
        "::ffff:198.51.100.182",
        "::ffff:198.51.100.221",
        "192.0.2.59",
    )
    assert (first["host"], first["rank"], first["vendor_error"]) == ("hostname-test", 4, 129)


def test_command_prints_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "nccl", str(CASE)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for end in ("::ffff:198.51.100.182", "::ffff:198.51.100.221", "IBV_WC_RETRY_EXC_ERR"):
        assert end in out


def test_memory_registration_error_is_distinct_from_network(tmp_path: Path) -> None:
    """The adapter of rank 0 has no access to its memory. Then the request of the other end is not acknowledged."""
    logs = {"rank1.log": [HEAD + LINES["2.20"][0]], "rank0.log": [HEAD + LINES["2.18 over IPv6"][0]] * 3}
    document = answer(tmp_path, logs)
    assert (document["kind"], document["suspects"]) == ("memory", [])
    assert [(row["rank"], row["source"], row["count"]) for row in document["failures"]] == [
        (0, "memory", 3),
        (1, "network", 1),
    ]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(2, "adapter"), (4, "memory"), (5, "network"), (9, "remote"), (12, "network"), (19, "adapter"), (99, "network")],
)
def test_kind_is_source_of_first_failure(tmp_path: Path, status: int, kind: str) -> None:
    line = f"{HEAD}NET/IB : Got completion from peer 192.0.2.9<4> with status={status} opcode=1 len=4 vendor err 1"
    document = answer(tmp_path, {"rank0.log": [line]})
    assert (document["kind"], document["suspects"]) == (kind, [])
    assert view.verdict_sentence(document) == nccl_transport.failures_verdict(document)
    assert view.advice_sentence(document) == nccl_transport.failures_advice(document)


def test_rank_of_failure_is_rank_of_process_in_job(tmp_path: Path) -> None:
    made = (
        "gpu-1:984:1257 [4] NCCL INFO comm 0x557fe785f7a0 rank 36 nranks 64 cudaDev 4 nvmlDev 4 busId 9b000 commId "
        "0x5ae77eb5ea4ec1ee - Init COMPLETE"
    )
    document = answer(tmp_path, {"job.log": [made, HEAD + LINES["2.29"][0]]})
    assert [(row["rank"], row["host"]) for row in document["failures"]] == [(36, "gpu-1")]


def test_rank_with_stuck_watchdog_hangs(tmp_path: Path) -> None:
    waiting = (
        "[rank{0}]:[E626 06:24:44.9 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
        "(either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 8, last completed NCCL "
        "work: 7."
    )
    logs = {f"rank{rank}.log": [waiting.format(rank)] for rank in range(3)}
    logs["rank3.log"] = [waiting.format(3).replace("Exception", "Status,"), STUCK.format(3)]
    document = answer(tmp_path, logs)
    assert (document["kind"], document["suspects"]) == ("hang", [3])
    assert [(row["rank"], row["seconds"]) for row in document["hangs"]] == [(3, 600)]


def test_single_log_with_stuck_watchdog_is_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.log").write_text(STUCK.format(5) + "\n")
    assert main(["fleet", "nccl", str(tmp_path)]) == 1
    assert "Rank 5 hangs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "[rank7]:[E1019 01:04:03.3 ProcessGroupNCCL.cpp:1375] [PG 3 Rank 7] First PG on this rank that detected no "
        "heartbeat of its watchdog.",
        "[rank7]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 7] Heartbeat monitor timed out! Process will be terminated "
        "after dumping debug info. workMetaList_.size()=103",
    ],
)
def test_parse_log_reads_other_monitor_lines(line: str) -> None:
    (hang,) = rank_log.parse_log([line.encode()], "x.log", "").hangs
    assert (hang.rank, hang.seconds) == (7, 0)


def test_no_rank_is_suspect_if_all_hang(tmp_path: Path) -> None:
    document = answer(tmp_path, {f"rank{rank}.log": [STUCK.format(rank)] for rank in range(4)})
    assert (document["kind"], document["suspects"], len(document["hangs"])) == ("hang", [], 4)


@given(st.lists(st.sampled_from([STUCK.format(1), STUCK.format(2), *(line for line, _ in LINES.values())]), max_size=8))
def test_parse_log_counts_failures_and_hangs_once_per_rank(lines: list[str]) -> None:
    found = rank_log.parse_log([line.encode() for line in lines], "x.log", "")
    stuck = {line for line in lines if "stuck" in line}
    assert len(found.hangs) == len(stuck)
    assert sum(failure.count for failure in found.failures) == sum("stuck" not in line for line in lines)
