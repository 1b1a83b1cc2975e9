"""Tests of `sacctmgr show event` and `sacctmgr show reservation`, in the formats of its versions."""

from __future__ import annotations

import pytest
from fleet_reading import Noted, numbered
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet import engine, queries
from healthd.fleet.ingest import IngestOptions, ingest
from healthd.fleet.sources import sacctmgr
from healthd.fleet.store import open_for_reading
from healthd.fleet.tables import TABLES

# The columns of healthd's call, and the default columns (event_functions.c, sacctmgr_list_event()).
OURS = "Cluster|NodeName|TimeStart|TimeEnd|State|User|Reason\n"
DEFAULT = "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User\n"


def states(text: str) -> tuple[list[tuple], Noted]:
    noted = Noted()
    return list(sacctmgr.states(numbered(text), noted.reading)), noted


def test_a_state_that_lasts_has_no_end_and_the_user_no_number():
    found, noted = states(OURS + "c2|n1|1700000000|Unknown|DRAIN|root(0)|healthd: gpu_xid/79\n")
    assert found == [("c2", "n1", 1700000000, None, "DRAIN", "healthd: gpu_xid/79", "root", "healthd")]
    assert (noted.unread, noted.read) == ([], [1])


def test_a_reason_may_hold_the_separator_where_it_stands_last_and_in_the_middle():
    for header, row in ((OURS, "||a|b"), (DEFAULT, "|a|b|")):
        found, noted = states(f"{header}c1|n1|1700000000|1700000060|DOWN*{row}\n")
        assert found == [("c1", "n1", 1700000000, 1700000060, "DOWN*", "a|b", None, "slurm")]
        assert noted.unread == []


def test_iso_times_are_read_in_the_zone_that_was_said():
    found, _ = states(DEFAULT + "c1|n1|2026-11-22T12:00:00|2026-11-22T13:00:00|IDLE+DRAIN|x|alice(1000)\n")
    assert found[0][2:4] == (1795348800, 1795352400)


@pytest.mark.parametrize(
    ("user", "reason", "slurm_user", "by"),
    [
        *(
            ("slurm", "Not responding", "slurm", "slurm"),
            ("", "", "slurm", "slurm"),
            ("alice", "fan", "slurm", "person"),
        ),
        *(
            ("slurmctl", "x", "slurmctl", "slurm"),
            ("slurm", "x", "slurmctl", "person"),
            ("root", "fan", "root", "person"),
        ),
        *(("root", "Not responding", "root", "slurm"), ("root", "Kill task failed", "slurm", "slurm")),
        *(("root", "healthd: gpu_xid/79", "slurm", "healthd"), (None, "fan", "slurm", None)),
        *((None, "healthd: x", "slurm", "healthd"), ("alice", "Not responding", "slurm", "person")),
    ],
)
def test_whose_doing_a_state_is_is_told_by_its_user_and_for_root_by_its_reason(user, reason, slurm_user, by):
    assert sacctmgr.set_by(user, reason, slurm_user) == by


@pytest.mark.one_python
@pytest.mark.parametrize("users", ["keep", "hash", "drop"])
def test_who_took_a_node_out_is_known_whatever_is_kept_of_users(tmp_path, users):
    states = tmp_path / "states.txt"
    who = {"n1": "slurm(64030)|Not responding", "n2": "alice(1000)|fan", "n3": "root(0)|healthd: x/1", "n4": "|off"}
    lines = (f"c1|{node}|1700000000|1700000600|DOWN|{text}" for node, text in who.items())
    states.write_text(OURS + "".join(f"{line}\n" for line in lines))
    db = str(tmp_path / "db")
    came = ingest(db, [(sacctmgr.NODE_STATES, [str(states)])], IngestOptions(1700086400, users=users))
    assert came.failed == []
    needed = queries.with_dependencies(queries.builtin_queries()["out_of_service"], queries.builtin_queries())
    asked = engine.QueryParameters(1699990000, 1700086400, queries.resolve_parameters(needed, {}))
    with open_for_reading(db) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        with engine.open_database(files, 1, 512) as connection:
            answer = engine.run_on_connection(connection, needed, asked)
            found = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    by = {"n1": "slurm", "n2": "person", "n3": "healthd", "n4": "slurm"}
    assert {row["node"]: row["by_whom"] for row in found} == by


def test_slurms_user_is_asked_of_the_cluster_here_and_else_is_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "ClusterName             = c1"; echo "SlurmUser               = batch(77)"\n')
    scontrol.chmod(0o755)
    assert [sacctmgr.slurm_user(cluster) for cluster in ("c1", "c2")] == ["batch", "slurm"]
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert sacctmgr.slurm_user("c1") == "slurm"


def test_an_event_of_the_whole_cluster_is_no_nodes():
    assert states(OURS + "c1||1700000000|Unknown|||Cluster Registered TRES\n")[0] == []


def test_what_cannot_be_read_is_counted_with_its_line():
    found, noted = states(OURS + "c1|n1|yesterday|Unknown|DOWN||\nc1|n2|1700000060|1700000000|DOWN||\nc1|n3|17000\n")
    assert found == []
    assert noted.lines == [2, 3, 4]
    assert "ends before it starts" in noted.unread[1][1]


def test_the_call_asks_for_every_state_between_two_times():
    assert sacctmgr.states_command(1700000000, 1700086400, "c1") == [
        "sacctmgr",
        "--readonly",
        "--parsable2",
        "show",
        "event",
        "events=node",
        "start=uts1700000000",
        "end=uts1700086400",
        "clusters=c1",
        "format=Cluster,NodeName,Start,End,State,User,Reason",
    ]


RESERVATIONS = "Cluster|Name|TimeStart|TimeEnd|Flags|NodeName\n"


def reserved(text: str) -> tuple[list[tuple], Noted]:
    noted = Noted()
    return list(sacctmgr.reservations(numbered(text), noted.reading)), noted


def test_a_reservation_has_a_row_for_each_node_and_maintenance_is_its_flag():
    found, _ = reserved(RESERVATIONS + "c1|rack7|1700000000|1700003600|MAINT,SPEC_NODES|n[1-2]\n")
    flags = "MAINT,SPEC_NODES"
    assert found == [("c1", "rack7", node, 1700000000, 1700003600, flags, True) for node in ("n1", "n2")]


def test_a_flag_that_only_holds_the_word_is_no_maintenance():
    found, _ = reserved(RESERVATIONS + "c1|r|1700000000|1700003600|NO_MAINT,OVERLAP|n1\n")
    assert found[0][-1] is False


def test_one_of_licenses_only_has_one_row_without_a_node():
    found, _ = reserved(RESERVATIONS + "c1|r|1700000000|1700003600|ANY_NODES|\n")
    assert [row[2] for row in found] == [None]


def test_a_reservation_that_ends_before_it_starts_or_has_no_host_list_is_unread():
    _, noted = reserved(RESERVATIONS + "c1|r|1700003600|1700000000||n1\nc1|r|1700000000|1700003600||n[1\n")
    assert noted.lines == [2, 3]


WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\0"), max_size=30
)


@given(WORDS, st.integers(1, 4_000_000_000), st.integers(0, 10_000_000), st.sampled_from([OURS, DEFAULT]))
def test_any_reason_comes_back_as_it_was(reason, start, lasted, header):
    row = f"c1|n1|{start}|{start + lasted}|DOWN|"
    row += f"root(0)|{reason}" if header == OURS else f"{reason}|root(0)"
    noted = Noted()
    found = list(sacctmgr.states([(1, header.strip()), (2, row)], noted.reading))
    assert [row[:7] for row in found] == [("c1", "n1", start, start + lasted, "DOWN", reason.strip() or None, "root")]


@given(st.text(max_size=200))
def test_any_text_is_read_or_counted(text):
    noted = Noted()
    found = list(sacctmgr.states(numbered(OURS + text), noted.reading))
    assert len(found) == sum(noted.read)
