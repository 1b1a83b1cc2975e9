"""Tests of `sacctmgr show event` and `sacctmgr show reservation`, in the formats of its versions."""

from __future__ import annotations

import pytest
from fleet_reading import RecordedReading, numbered_lines
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet import engine, queries
from healthd.fleet.ingest import IngestOptions, ingest
from healthd.fleet.sources import sacctmgr
from healthd.fleet.store import open_for_reading
from healthd.fleet.tables import TABLES

# The columns of healthd's call, and the default columns (event_functions.c, sacctmgr_list_event()).
OWN_COLUMNS = "Cluster|NodeName|TimeStart|TimeEnd|State|User|Reason\n"
DEFAULT = "Cluster|NodeName|TimeStart|TimeEnd|State|Reason|User\n"


def parse_states(text: str) -> tuple[list[tuple], RecordedReading]:
    noted = RecordedReading()
    return list(sacctmgr.states(numbered_lines(text), noted.reading)), noted


def test_lasting_state_has_no_end_and_user_has_no_uid():
    found, noted = parse_states(OWN_COLUMNS + "c2|n1|1700000000|Unknown|DRAIN|root(0)|healthd: gpu_xid/79\n")
    assert found == [("c2", "n1", 1700000000, None, "DRAIN", "healthd: gpu_xid/79", "root", "healthd")]
    assert (noted.unread, noted.read) == ([], [1])


def test_reason_may_contain_separator_in_any_column():
    for header, row in ((OWN_COLUMNS, "||a|b"), (DEFAULT, "|a|b|")):
        found, noted = parse_states(f"{header}c1|n1|1700000000|1700000060|DOWN*{row}\n")
        assert found == [("c1", "n1", 1700000000, 1700000060, "DOWN*", "a|b", None, "slurm")]
        assert noted.unread == []


def test_iso_times_are_read_in_given_zone():
    found, _ = parse_states(DEFAULT + "c1|n1|2026-11-22T12:00:00|2026-11-22T13:00:00|IDLE+DRAIN|x|alice(1000)\n")
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
def test_set_by_uses_user_and_reason(user, reason, slurm_user, by):
    assert sacctmgr.set_by(user, reason, slurm_user) == by


@pytest.mark.one_python
@pytest.mark.parametrize("users", ["keep", "hash", "drop"])
def test_out_of_service_has_origin_for_any_user_setting(tmp_path, users):
    states = tmp_path / "states.txt"
    fields = {"n1": "slurm(64030)|Not responding", "n2": "alice(1000)|fan", "n3": "root(0)|healthd: x/1", "n4": "|off"}
    lines = (f"c1|{node}|1700000000|1700000600|DOWN|{text}" for node, text in fields.items())
    states.write_text(OWN_COLUMNS + "".join(f"{line}\n" for line in lines))
    db = str(tmp_path / "db")
    result = ingest(db, [(sacctmgr.NODE_STATES, [str(states)])], IngestOptions(1700086400, users=users))
    assert result.failed == []
    needed = queries.with_dependencies(queries.builtin_queries()["out_of_service"], queries.builtin_queries())
    parameters = engine.QueryParameters(1699990000, 1700086400, queries.resolve_parameters(needed, {}))
    with open_for_reading(db) as snapshot:
        files = {table: snapshot.files(table) for table in TABLES}
        with engine.open_database(files, 1, 512) as connection:
            answer = engine.run_on_connection(connection, needed, parameters)
            found = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    by = {"n1": "slurm", "n2": "person", "n3": "healthd", "n4": "slurm"}
    assert {row["node"]: row["by_whom"] for row in found} == by


def test_slurm_user_is_read_from_local_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "ClusterName             = c1"; echo "SlurmUser               = batch(77)"\n')
    scontrol.chmod(0o755)
    assert [sacctmgr.slurm_user(cluster) for cluster in ("c1", "c2")] == ["batch", "slurm"]
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert sacctmgr.slurm_user("c1") == "slurm"


def test_cluster_event_is_no_node_state():
    assert parse_states(OWN_COLUMNS + "c1||1700000000|Unknown|||Cluster Registered TRES\n")[0] == []


def test_unreadable_state_is_counted_with_line():
    found, noted = parse_states(
        OWN_COLUMNS + "c1|n1|yesterday|Unknown|DOWN||\nc1|n2|1700000060|1700000000|DOWN||\nc1|n3|17000\n"
    )
    assert found == []
    assert noted.unread_lines == [2, 3, 4]
    assert "ends before it starts" in noted.unread[1][1]


def test_states_command_queries_every_state_between_times():
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


def parse_reservations(text: str) -> tuple[list[tuple], RecordedReading]:
    noted = RecordedReading()
    return list(sacctmgr.reservations(numbered_lines(text), noted.reading)), noted


def test_reservation_has_row_per_node_and_maintenance_flag():
    found, _ = parse_reservations(RESERVATIONS + "c1|rack7|1700000000|1700003600|MAINT,SPEC_NODES|n[1-2]\n")
    flags = "MAINT,SPEC_NODES"
    assert found == [("c1", "rack7", node, 1700000000, 1700003600, flags, True) for node in ("n1", "n2")]


def test_only_exact_flag_is_maintenance():
    found, _ = parse_reservations(RESERVATIONS + "c1|r|1700000000|1700003600|NO_MAINT,OVERLAP|n1\n")
    assert found[0][-1] is False


def test_reservation_of_licenses_has_row_without_node():
    found, _ = parse_reservations(RESERVATIONS + "c1|r|1700000000|1700003600|ANY_NODES|\n")
    assert [row[2] for row in found] == [None]


def test_invalid_reservation_is_unread():
    _, noted = parse_reservations(RESERVATIONS + "c1|r|1700003600|1700000000||n1\nc1|r|1700000000|1700003600||n[1\n")
    assert noted.unread_lines == [2, 3]


REASONS = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\0"), max_size=30
)


@given(REASONS, st.integers(1, 4_000_000_000), st.integers(0, 10_000_000), st.sampled_from([OWN_COLUMNS, DEFAULT]))
def test_any_reason_is_read_unchanged(reason, start, lasted, header):
    row = f"c1|n1|{start}|{start + lasted}|DOWN|"
    row += f"root(0)|{reason}" if header == OWN_COLUMNS else f"{reason}|root(0)"
    noted = RecordedReading()
    found = list(sacctmgr.states([(1, header.strip()), (2, row)], noted.reading))
    assert [row[:7] for row in found] == [("c1", "n1", start, start + lasted, "DOWN", reason.strip() or None, "root")]


@given(st.text(max_size=200))
def test_any_text_is_read_or_counted(text):
    noted = RecordedReading()
    found = list(sacctmgr.states(numbered_lines(OWN_COLUMNS + text), noted.reading))
    assert len(found) == sum(noted.read)
