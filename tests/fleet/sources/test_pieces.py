"""Tests of Slurm commands that healthd runs, and of records about whole files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fleet_reading import RecordedReading, store_rows

from healthd.fleet import times
from healthd.fleet.ingest import IngestError, IngestOptions, ingest
from healthd.fleet.sources import (
    common,
    node_facts,
    preemptions,
    sacct,
    sacctmgr,
    site_tables,
    slurm_commands,
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def install_program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def output_of(*argv: str) -> list[str]:
    return [line for _, line in common.command_lines(argv, RecordedReading().reading)]


def test_slurm_command_gets_own_environment(slurm, monkeypatch):
    for name in ("SQUEUE_FORMAT", "SLURM_CLUSTERS", "SLURM_TOPO_LEN", "SINFO_FORMAT", "SACCTMGR_X"):
        monkeypatch.setenv(name, "xyzzy")
    monkeypatch.setenv("SLURM_CONF", "/etc/other/slurm.conf")
    install_program(slurm, "squeue", 'env | grep -c xyzzy; echo "$SLURM_TIME_FORMAT $SLURM_CONF $LC_ALL"; cat')
    assert output_of("squeue") == ["0", "%s /etc/other/slurm.conf C.UTF-8"]


def test_failed_command_is_one_sentence_after_its_output(slurm):
    complaint = r"sacctmgr: error: \033[31mslurmdbd\n is away"
    install_program(slurm, "sacctmgr", f'echo "Cluster|NodeName"; printf "{complaint}" >&2; exit 1')
    lines = common.command_lines(["sacctmgr", "show", "event"], RecordedReading().reading)
    assert next(lines) == (1, "Cluster|NodeName")
    with pytest.raises(IngestError) as error:
        next(lines)
    assert str(error.value) == "sacctmgr failed: sacctmgr: error: ?[31mslurmdbd is away"


def test_missing_or_hanging_command_is_one_sentence(slurm, monkeypatch):
    with pytest.raises(IngestError, match="nosuchcommand: cannot be run: No such file or directory"):
        output_of("nosuchcommand")
    monkeypatch.setattr(slurm_commands, "OUTPUT_TIMEOUT_SECONDS", 0.2)
    install_program(slurm, "squeue", "sleep 60")
    with pytest.raises(IngestError, match=r"squeue: printed nothing for 0\.2 s and was killed"):
        output_of("squeue")


def test_command_ends_when_reader_stops(slurm, tmp_path):
    install_program(slurm, "squeue", f"echo $$ > {tmp_path}/pid; while :; do echo line || exit; done")
    lines = common.command_lines(["squeue"], RecordedReading().reading)
    assert next(lines) == (1, "line")
    lines.close()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_large_output_and_errors_do_not_block(slurm):
    install_program(slurm, "squeue", "seq 200000; seq 200000 >&2")
    assert len(output_of("squeue")) == 200000


@pytest.mark.one_python
def test_local_slurm_is_not_used_for_other_cluster(slurm, tmp_path):
    install_program(slurm, "scontrol", 'echo "ClusterName             = here"; echo "NodeName=n1 Gres=gpu:h100:8"')
    store = str(tmp_path / "db")
    result = ingest(store, [(node_facts.SOURCE, [])], IngestOptions(1795400000, "there"))
    assert result.failed == [
        "nodes: scontrol --all --oneliner show node: the local cluster is here, not there; "
        "run the command there and save its output to a file"
    ]
    result = ingest(store, [(node_facts.SOURCE, [])], IngestOptions(1795400000))
    assert [(row["cluster"], row["node"], row["gpus"]) for row in store_rows(tmp_path / "db", "nodes")] == [
        ("here", "n1", 8)
    ]
    assert result.unread.unread["nodes"] == 1, "the configuration line is not a node"


NOON = "2026-11-01T12:00:00"
JOBS = f"JobID|State|Submit|Start|End\n7|COMPLETED|{NOON}|{NOON}|2026-11-01T13:00:00\n"
TAKEN = f"[{NOON}.000] preempted JobId=7 has been requeued to reclaim resources for JobId=9\n"
WITHOUT_A_ZONE = {
    "tickets": (site_tables.TICKETS, f"node,opened,text\nn1,{NOON},fan\n"),
    "failures": (site_tables.FAILURES, f"node,time,kind\nn1,{NOON},gpu\n"),
    "jobs": (sacct.SOURCE, JOBS),
    "preemptions": (preemptions.SOURCE, TAKEN * 60),
}


@pytest.mark.one_python
@pytest.mark.parametrize("table", list(WITHOUT_A_ZONE))
def test_file_is_not_stored_twice_with_other_time_zone(tmp_path, table):
    source, text = WITHOUT_A_ZONE[table]
    file, db = tmp_path / "file", tmp_path / "db"
    file.write_text(text)

    def failures_with_zone(zone: str) -> list[str]:
        options = IngestOptions(1795400000, "c1", times.load_zone(zone) if zone else None)
        return ingest(str(db), [(source, [str(file)])], options).failed

    assert failures_with_zone("") == []
    assert store_rows(db, table) == [], "a time without a zone is not read"
    assert failures_with_zone("Europe/Rome") == []
    stored = store_rows(db, table)
    assert len(stored) == 1
    for zone, hint in (("UTC", "with UTC"), ("", "without it")):
        assert failures_with_zone(zone) == [
            f"{source.name}: {file}: was read with --timezone Europe/Rome; {hint} its rows would be stored twice; use "
            "Europe/Rome again. If that zone was wrong, read everything into a new store"
        ]
        assert store_rows(db, table) == stored
        file.write_text(text + text)  # the same holds after the file has grown
    assert failures_with_zone("Europe/Rome") == []
    assert store_rows(db, table) == stored


@pytest.mark.one_python
@pytest.mark.parametrize("table", ["tickets", "jobs"])
def test_wrong_time_zone_stops_all_files_of_source(tmp_path, table):
    source, text = WITHOUT_A_ZONE[table]
    for name in ("before", "old", "behind"):
        (tmp_path / name).write_text(text)

    def failures_with_zone(zone: str, *names: str) -> list[str]:
        sources = [(source, [str(tmp_path / name) for name in names])]
        return ingest(str(tmp_path / "db"), sources, IngestOptions(1795400000, "c1", times.load_zone(zone))).failed

    assert failures_with_zone("Europe/Rome", "old") == []
    stored = [store_rows(tmp_path / "db", name) for name in (table, "ingests")]
    (sentence,) = failures_with_zone("UTC", "before", "old", "behind")
    assert sentence.startswith(f"{source.name}: {tmp_path}/old: was read with --timezone Europe/Rome; ")
    assert [store_rows(tmp_path / "db", name) for name in (table, "ingests")] == stored


@pytest.mark.one_python
def test_unknown_nodes_are_kept_and_reported(tmp_path, capsys):
    (tmp_path / "nodes.csv").write_text("node,gpus\nn[1-2],8\n")
    (tmp_path / "tickets.csv").write_text("node,opened\nn1,1795348800\nN2.example.org,1795348800\nn[3-9],1795348800\n")
    sources = [(site_tables.TICKETS, [str(tmp_path / "tickets.csv")])]
    ingest(str(tmp_path / "first"), sources, IngestOptions(1795400000, "c1"))
    assert capsys.readouterr().err == "", "this store knows no nodes"
    ingest(
        str(tmp_path / "db"),
        [(node_facts.SOURCE, [str(tmp_path / "nodes.csv")]), *sources],
        IngestOptions(1795400000, "c1"),
    )
    message = "tickets: 8 nodes that are unknown in their cluster are kept: N2.example.org, n3, n4, n5, n6, ...\n"
    assert capsys.readouterr().err == message
    assert len(store_rows(tmp_path / "db", "tickets")) == 9


SACCTMGR = """for word; do case "$word" in
start=*) begin=${word#start=uts};; end=*) end=${word#end=uts};; clusters=*) cluster=${word#clusters=};;
esac; done
echo "$cluster $begin $end" >> "$(dirname "$0")/calls"
echo 'Cluster|NodeName|TimeStart|TimeEnd|State|User|Reason'
echo "$cluster|n1|$((end - 10))|Unknown|DOWN|root(0)|x"
"""


@pytest.mark.one_python
def test_slurmdbd_is_queried_per_cluster_for_new_and_earlier_times(slurm, tmp_path, capsys):
    install_program(slurm, "sacctmgr", SACCTMGR)
    install_program(slurm, "scontrol", 'echo "ClusterName = c1"')
    now, hour = 1795400000, 3600

    def queried_periods(at=now, **values):
        result = ingest(str(tmp_path / "db"), [(sacctmgr.NODE_STATES, [])], IngestOptions(at, **values))
        assert result.failed == []
        if not (slurm / "calls").exists():
            return []
        lines = [line.split() for line in (slurm / "calls").read_text().splitlines()]
        (slurm / "calls").unlink()
        return [(cluster, int(begin) - now, int(end) - now) for cluster, begin, end in lines]

    assert queried_periods(from_time=now - 50 * hour) == [("c1", -50 * hour, 0)]
    assert queried_periods(now + hour, from_time=now - 50 * hour) == [("c1", -hour, hour)]
    assert queried_periods(now + hour, from_time=now - 60 * hour) == [("c1", -60 * hour, -50 * hour), ("c1", 0, hour)]
    assert queried_periods(now + hour, cluster="c2", from_time=now - 50 * hour) == [("c2", -50 * hour, hour)]
    assert queried_periods(now + hour, from_time=now - 9 * hour, to_time=now - 8 * hour) == []
    assert capsys.readouterr().err == ""
    assert queried_periods() == [("c1", -61 * hour + 1, 0)], "after a clock was ahead, the period is read again"
    assert "a clock was ahead" in capsys.readouterr().err


@pytest.mark.one_python
def test_queries_to_slurmdbd_are_recorded_as_coverage(slurm, tmp_path):
    install_program(slurm, "sacctmgr", SACCTMGR)
    install_program(slurm, "scontrol", 'echo "ClusterName = c1"')
    now, hour = 1795400000, 3600

    def covered(at: int, **values: int) -> list[tuple]:
        assert ingest(str(tmp_path / "db"), [(sacctmgr.NODE_STATES, [])], IngestOptions(at, **values)).failed == []
        return sorted(
            (row["cluster"], row["from_time"], row["to_time"]) for row in store_rows(tmp_path / "db", "ingests")
        )

    first = ("c1", common.MIN_SLURM_TIME, now)
    assert covered(now) == [first], "without --from the whole period is queried"
    assert covered(now + hour) == [first, ("c1", now - hour, now + hour)]
    assert covered(now + 9 * hour, from_time=now + 5 * hour)[-1] == ("c1", now + 5 * hour, now + 9 * hour)


FILES = {
    "node_states": (sacctmgr.NODE_STATES, "Cluster|NodeName|TimeStart|TimeEnd|State\n{c}|n1|{a}|{b}|DOWN\n"),
    "tickets": (site_tables.TICKETS, "cluster,node,opened,closed\n{c},n1,{a},{b}\n"),
    "failures": (site_tables.FAILURES, "cluster,node,time,kind\n{c},n1,{a},x\n{c},n1,{b},x\n"),
    "jobs": (site_tables.JOBS_FILE, "cluster,job_id,nodes,submit,start,end,state\n{c},1,n1,{a},{a},{b},FAILED\n"),
}


@pytest.mark.one_python
@pytest.mark.parametrize("table", FILES)
def test_coverage_of_file_follows_rows_and_period(tmp_path, table):
    source, text = FILES[table]
    begin, end = 1795000000, 1795009000
    file = tmp_path / "file"
    file.write_text(text.format(c="c7", a=begin, b=end))

    def covered(now: int = end + 60, **values: int) -> list[tuple]:
        assert ingest(str(tmp_path / "db"), [(source, [str(file)])], IngestOptions(now, **values)).failed == []
        names = ("cluster", "from_time", "to_time")
        return [tuple(row[name] for name in names) for row in store_rows(tmp_path / "db", "ingests")]

    assert covered() == [("c7", begin, end)]
    limited = covered(from_time=begin + 10, to_time=end - 10)
    if table == "failures":
        assert limited == [("", None, None), ("c7", begin, end)], "the file has no row in that period"
        return
    assert limited == [("c7", begin + 10, end - 10)]
    assert covered(now=end - 60) == [("c7", begin, end - 60)], "coverage ends at the time of the ingest"


@pytest.mark.one_python
def test_coverage_of_open_rows_and_several_clusters(tmp_path):
    file = tmp_path / "tickets.csv"
    file.write_text("cluster,node,opened,closed\nc1,n1,1795000500,\nc2,n1,1795000000,1795000100\nc2,n2,3600,\n")
    assert ingest(str(tmp_path / "db"), [(site_tables.TICKETS, [str(file)])], IngestOptions(1795400000)).failed == []
    (row,) = store_rows(tmp_path / "db", "ingests")
    assert (row["cluster"], row["from_time"], row["to_time"], row["rows_read"]) == ("", 1795000000, 1795000500, 3)
