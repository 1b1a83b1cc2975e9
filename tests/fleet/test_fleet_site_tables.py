"""Tests of tables that a site or another tool writes: tickets, failures, jobs."""

from __future__ import annotations

import pytest
from fleet_reading import RecordedReading, numbered_lines, store_rows
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.ingest import IngestError, IngestOptions, ingest
from healthd.fleet.sources import node_facts, site_tables
from healthd.fleet.tables import JOBS

NOON = 1795348800  # 2026-11-22 12:00:00 UTC


def parse_table(parse, text: str) -> tuple[list[tuple], RecordedReading]:
    noted = RecordedReading()
    return list(parse(numbered_lines(text), noted.reading)), noted


def test_ticket_names_every_node_of_host_list():
    found, noted = parse_table(
        site_tables.tickets, "node,opened,closed,text\nn[1-2],2026-11-22T12:00:00Z,,fan\nn3,1795348800,1795348801,\n"
    )
    assert found == [
        ("c1", "n1", NOON, None, "fan"),
        ("c1", "n2", NOON, None, "fan"),
        ("c1", "n3", NOON, NOON + 1, None),
    ]
    assert (noted.unread, noted.read) == ([], [1, 1])


def test_invalid_tickets_are_counted():
    text = "node,opened,closed\nn1,,\n,1795348800,\nn1,1795348800,1795348799\nn1,soon,\nn[1,1795348800,\nn1,-5,\n"
    found, noted = parse_table(site_tables.tickets, text)
    assert (found, noted.unread_lines) == ([], [2, 3, 4, 5, 6, 7])


def test_failure_has_node_time_and_kind():
    found, noted = parse_table(
        site_tables.failures, "kind;node;time\ngpu;n[1-2];1795348800\n;n3;1795348800\ngpu;;1795348800\n"
    )
    assert found == [("c1", "n1", NOON, "gpu"), ("c1", "n2", NOON, "gpu"), ("c1", "n3", NOON, "")]
    assert noted.unread_lines == [4]


def test_cluster_column_overrides_cluster_option():
    assert parse_table(site_tables.failures, "cluster,node,time,kind\nc9,n1,1795348800,x\n")[0][0][0] == "c9"


HEADER = "job_id,nodes,gpus,submit,start,end,state,restarts,user\n"


def jobs(text: str) -> tuple[list[dict], RecordedReading]:
    noted = RecordedReading()
    lines = numbered_lines(text)
    found = site_tables._rows(site_tables.rows(lines, site_tables.JOB_COLUMNS, noted.reading), noted.reading)
    return [dict(zip(JOBS.columns, row, strict=True)) for row in found], noted


def test_job_has_only_given_values():
    (job,), _ = jobs(HEADER + '7,"n[1-2],n9",24,1795348800,1795348860,,running,2,alice\n')
    assert {name: value for name, value in job.items() if value is not None} == {
        "cluster": "c1",
        "db_index": site_tables.db_index("c1", 7, NOON, 2),
        "job_id": 7,
        "restarts": 2,
        "state": "RUNNING",
        "submit_time": NOON,
        "start_time": NOON + 60,
        "nodes": 3,
        "gpus": 24,
        "node_list": "n[1-2],n9",
        "user_name": "alice",
        "exclusions_known": False,
        "source": "jobs_file",
    }
    assert 0 <= job["db_index"] < 2**62


def test_invalid_jobs_are_counted():
    bad = [
        "x,n1,,1,2,3,F,,",
        ",n1,,1,2,3,F,,",
        "7,n1,,,2,3,F,,",
        "7,n1,,1,3,2,F,,",
        "7,n1,,1,2,3,,,",
        "7,n[,,1,2,3,F,,",
    ]
    bad += ["7,n1,many,1,2,3,F,,", "7,n1,,1,2,3,F,once,"]
    found, noted = jobs(HEADER + "\n".join(bad) + "\n8,None assigned,,1,,,CANCELLED by 0,,\n")
    assert noted.unread_lines == list(range(2, 10))
    assert [(job["job_id"], job["state"], job["nodes"]) for job in found] == [(8, "CANCELLED", None)]


@given(st.integers(0, 2**60), st.integers(0, 2**40), st.integers(0, 9))
def test_db_index_is_bigint_and_unique(job, submit, restarts):
    number = site_tables.db_index("c1", job, submit, restarts)
    assert 0 <= number < 2**62
    assert number != site_tables.db_index("c2", job, submit, restarts)
    assert number != site_tables.db_index("c1", job, submit, restarts + 1)


@given(st.text(max_size=200), st.sampled_from([site_tables.tickets, site_tables.failures]))
def test_any_text_is_read_or_counted(text, parse):
    header = "node,opened,closed,time,kind\n"
    found, noted = parse_table(parse, header + text)
    assert len(noted.unread) + len(noted.read) <= len(text.splitlines()) + 1
    assert all(row[0] == "c1" for row in found)


@pytest.mark.one_python
def test_csv_and_parquet_give_same_rows(tmp_path):
    import duckdb

    (tmp_path / "jobs.csv").write_text(
        HEADER + "7,n[1-2],16,1795348800,1795348860,1795352400,failed,0,al\n8,n3,,1795348801,,,PENDING,,\n"
    )
    kinds = {
        "numbers": "job_id BIGINT, nodes VARCHAR, gpus DOUBLE, submit BIGINT, start BIGINT, end BIGINT",
        "times": "job_id INT, nodes VARCHAR[], gpus INT, submit TIMESTAMP, start TIMESTAMPTZ, end TIMESTAMP_S",
    }
    stores = {"csv": tmp_path / "jobs.csv"}
    for name, columns in kinds.items():
        columns = columns.replace("end ", '"end" ')
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'Europe/Berlin'")
            connection.execute(f'CREATE TABLE jobs ({columns}, state VARCHAR, restarts INT, "user" VARCHAR, more INT)')
            as_time = "make_timestamp({0}000000)" if name == "times" else "{0}"
            start = "to_timestamp({0})" if name == "times" else "{0}"
            nodes = ("['n1', 'n2']", "['n3']") if name == "times" else ("'n[1-2]'", "'n3'")
            connection.execute(
                f"INSERT INTO jobs VALUES (7, {nodes[0]}, 16, {as_time.format(NOON)}, {start.format(NOON + 60)}, "
                f"{as_time.format(NOON + 3600)}, 'failed', 0, 'al', 1), "
                f"(8, {nodes[1]}, NULL, {as_time.format(NOON + 1)}, NULL, NULL, 'PENDING', NULL, NULL, 1)"
            )
            stores[name] = tmp_path / f"{name}.parquet"
            connection.execute(f"COPY jobs TO '{stores[name]}' (FORMAT parquet)")
    found = []
    for name, path in stores.items():
        from datetime import timezone

        result = ingest(
            str(tmp_path / name),
            [(site_tables.JOBS_FILE, [str(path)])],
            IngestOptions(1795400000, "c1", timezone.utc, users="keep"),
        )
        assert (result.failed, result.unread.unread) == ([], {})
        rows = store_rows(tmp_path / name, "jobs")
        for row in rows:
            row["node_list"] = row["node_list"].replace("n[1-2]", "n1,n2")
        found.append((rows, store_rows(tmp_path / name, "job_nodes")))
    assert found[0] == found[1] == found[2]
    nodes_of = sorted((row["node"], row["gpus"], row["end_time"]) for row in found[0][1])
    assert nodes_of == [
        ("n1", 8.0, NOON + 3600),
        ("n2", 8.0, NOON + 3600),
        ("n3", None, None),
    ]


@pytest.mark.one_python
def test_invalid_parquet_and_missing_column_are_one_sentence(tmp_path):
    import duckdb

    (tmp_path / "bad").write_bytes(b"PAR1 and nothing more")
    duckdb.connect().execute(f"COPY (SELECT 1 AS job_id) TO '{tmp_path}/few' (FORMAT parquet)")
    for name, message in (
        ("bad", "bad: cannot be read as Parquet: "),
        ("few", 'few: has no column "nodes"'),
        ("gone", "No such file"),
    ):
        result = ingest(
            str(tmp_path / "db"), [(site_tables.JOBS_FILE, [str(tmp_path / name)])], IngestOptions(1795400000, "c1")
        )
        assert [message in sentence for sentence in result.failed] == [True], result.failed


@pytest.mark.one_python
def test_file_is_read_again_only_after_change(tmp_path):
    path, store = tmp_path / "tickets.csv", tmp_path / "db"
    sources = [(site_tables.TICKETS, [str(path)])]
    path.write_text("node,opened,closed,text\nn1,1795348800,,fan\n")
    assert ingest(str(store), sources, IngestOptions(1795400000, "c1")).unread.rows == {"tickets": 1}
    assert ingest(str(store), sources, IngestOptions(1795400001, "c1")).unread.rows == {}
    path.write_text("node,opened,closed,text\nn1,1795348800,1795348900,fan\n")
    assert ingest(str(store), sources, IngestOptions(1795400002, "c1")).unread.rows == {"tickets": 1}
    assert [row["closed_time"] for row in store_rows(store, "tickets")] == [1795348900]


@pytest.mark.one_python
@pytest.mark.parametrize(
    ("source", "text", "bad"),
    [
        (site_tables.TICKETS, "node,opened\nn1,1795348800\n", 'has no column "node"'),
        (node_facts.SOURCE, "node,gpus\nn1,8\n", 'has no column "node"'),
        (
            site_tables.JOBS_FILE,
            HEADER + "7,n1,8,1795348800,1795348860,1795352400,failed,0,al\n",
            'has no column "job_id"',
        ),
    ],
)
def test_missing_or_invalid_file_does_not_stop_next_file(tmp_path, source, text, bad):
    missing, invalid, good = paths = [str(tmp_path / name) for name in ("gone.csv", "wrong.csv", "good.csv")]
    (tmp_path / "wrong.csv").write_text("colour,shape\nred,round\n")
    (tmp_path / "good.csv").write_text(text)
    result = ingest(str(tmp_path / "db"), [(source, paths)], IngestOptions(1795400000, "c1"))
    assert result.failed[0].startswith(f"{source.name}: {missing}: ")
    assert result.failed[1].startswith(f"{source.name}: {invalid}: {bad}")
    assert (len(result.failed), result.unread.rows[source.name]) == (2, 1)
    assert [row["name"] for row in store_rows(tmp_path / "db", "ingests")] == [good]


@pytest.mark.one_python
def test_missing_cluster_is_one_sentence_and_keeps_nothing(tmp_path):
    path = tmp_path / "tickets.csv"
    path.write_text("node,opened\nn1,1795348800\n")
    result = ingest(str(tmp_path / "db"), [(site_tables.TICKETS, [str(path)])], IngestOptions(1795400000))
    (message,) = result.failed
    assert message.startswith(f"tickets: {path}: ")
    assert "--cluster" in message
    assert store_rows(tmp_path / "db", "tickets") == []


def test_missing_column_is_named_with_file():
    with pytest.raises(IngestError, match='file: has no column "kind"; the first line must name node, time, kind'):
        parse_table(site_tables.failures, "node,time\n")


@pytest.mark.one_python
@pytest.mark.parametrize("name", ["jobs[12].parquet", "jobs?.parquet", "jobs\udcff.parquet", "a\\jobs.parquet"])
def test_parquet_file_name_is_no_pattern(tmp_path, name):
    import duckdb

    with duckdb.connect() as connection:
        for job, path in ((1, tmp_path / "jobs1.parquet"), (2, tmp_path / "jobs2.parquet"), (3, tmp_path / "made")):
            connection.execute(
                f"COPY (SELECT {job} AS job_id, 'n1' AS nodes, {NOON} AS submit, NULL AS start, NULL AS \"end\", "
                f"'PENDING' AS state) TO '{path}' (FORMAT parquet)"
            )
    (tmp_path / "made").rename(tmp_path / name)
    result = ingest(
        str(tmp_path / "db"), [(site_tables.JOBS_FILE, [str(tmp_path / name)])], IngestOptions(1795400000, "c1")
    )
    assert (result.failed, result.unread.unread) == ([], {})
    assert [row["job_id"] for row in store_rows(tmp_path / "db", "jobs")] == [3]
