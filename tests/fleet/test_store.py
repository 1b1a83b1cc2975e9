"""Tests of the store: atomic commits, damaged files are named, and other files are left alone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_rows import DECEMBER, NOVEMBER, content, files, job, put, store_with, ticket

from healthd.fleet import step as steps
from healthd.fleet import store as stores
from healthd.fleet.manifest import SCHEMA, StoreError
from healthd.fleet.privacy import site_key
from healthd.fleet.step import step
from healthd.fleet.store import Store, connect, open_for_reading, open_for_writing, select_sql

pytestmark = pytest.mark.one_python


def read_manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_new_store_is_empty_and_readable(tmp_path):
    assert content(store_with(tmp_path / "db")) == {}


def test_rows_are_in_one_file_per_month_in_utc(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a", DECEMBER - 1), ticket("b", DECEMBER), ticket("c", None)]})
    assert files(db) == {f"tickets/month={month}/1.parquet" for month in ("2026-11", "2026-12", "unknown")}
    with open_for_reading(str(db)) as snapshot:
        assert snapshot.files("tickets") == [
            str(db / f"tickets/month={month}/1.parquet") for month in ("2026-11", "2026-12", "unknown")
        ]
        assert snapshot.files("jobs") == []


def test_step_writes_only_touched_months(tmp_path):
    db = store_with(
        tmp_path / "db",
        {"tickets": [ticket("a", NOVEMBER), ticket("b", DECEMBER)]},
        {"tickets": [ticket("c", DECEMBER)]},
    )
    assert files(db) == {"tickets/month=2026-11/1.parquet", "tickets/month=2026-12/2.parquet"}


def step_with_error_in_rows(store: Store) -> None:
    with step(store) as open_step:
        open_step.cursor("read", "to here")
        open_step.stage("tickets", (ticket(str(1 / divisor)) for divisor in (2, 1, 0)))


def test_error_in_step_leaves_store_unchanged(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    before = content(db), read_manifest(db), files(db)
    with open_for_writing(str(db)) as store:
        with pytest.raises(ZeroDivisionError):
            step_with_error_in_rows(store)
        assert not store.cursors
    assert (content(db), read_manifest(db), files(db)) == before
    assert not (db / "temporary").exists()


def step_with_error_in_merge(store: Store) -> None:
    with step(store) as open_step:
        open_step.stage("tickets", [ticket("b")])
        open_step.stage("failures", [("c1", "a", NOVEMBER, "gpu")])
        open_step.execute("ALTER TABLE staging.tickets DROP COLUMN words")  # tickets are merged after failures


def test_error_while_writing_leaves_no_file(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    with open_for_writing(str(db)) as store, pytest.raises(StoreError, match="Binder Error"):
        step_with_error_in_merge(store)
    assert files(db) == {"tickets/month=2026-11/1.parquet"}


def test_rows_and_cursors_are_committed_together(tmp_path):
    db = tmp_path / "db"
    with open_for_writing(str(db), make=True) as store:
        with step(store, "mine ") as open_step:
            open_step.stage("tickets", [ticket("a")])
            open_step.cursor("file", "12")
            open_step.cursor("other", "x")
        with step(store, "mine ") as open_step:
            open_step.cursor("other", "y")
    with open_for_writing(str(db)) as store:
        assert store.cursors == {"mine file": "12", "mine other": "y"}
    assert content(db) == {"tickets": [ticket("a")]}


def test_step_without_rows_changes_nothing(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    before = read_manifest(db)
    store_with(db, {}, {"tickets": []})
    assert read_manifest(db) == before


def modes_of(db: Path) -> set[tuple[bool, int]]:
    return {(path.is_dir(), path.stat().st_mode & 0o7777) for path in [db, *db.rglob("*")]}


@pytest.mark.parametrize("umask", [0, 0o022])
def test_new_store_is_private_to_owner(tmp_path, umask):
    before = os.umask(umask)
    try:
        db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
        assert os.umask(umask) == umask, "the umask is unchanged"
    finally:
        os.umask(before)
    assert modes_of(db) == {(True, 0o700), (False, 0o600)}


def test_existing_folder_keeps_its_mode(tmp_path):
    db = tmp_path / "db"
    db.mkdir()
    db.chmod(0o755)
    store_with(db, {"tickets": [ticket("a")]})
    assert db.stat().st_mode & 0o7777 == 0o755
    assert (db / "manifest.json").stat().st_mode & 0o7777 == 0o600
    assert modes_of(db / "tickets") == {(True, 0o700), (False, 0o600)}


def test_setgid_folder_gives_group_access_except_key(tmp_path):
    db = tmp_path / "db"
    db.mkdir()
    db.chmod(0o2750)
    store_with(db, {"tickets": [ticket("a")]})
    site_key(str(db), None)
    assert modes_of(db / "tickets") == {(True, 0o2750), (False, 0o640)}
    assert {name: (db / name).stat().st_mode & 0o777 for name in ("manifest.json", "lock", "key")} == {
        "manifest.json": 0o640,
        "lock": 0o600,
        "key": 0o600,
    }


def test_second_writer_is_refused_with_process_id(tmp_path):
    db = store_with(tmp_path / "db")
    with (
        open_for_writing(str(db)),
        pytest.raises(StoreError, match=rf"{db}: another ingest \(process {os.getpid()}\) is running"),
        open_for_writing(str(db)),
    ):
        pass
    with open_for_writing(str(db)):
        pass


def test_file_system_without_locks_is_one_sentence(tmp_path, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as Lustre without -o flock

    monkeypatch.setattr(fcntl, "flock", flock)
    with (
        pytest.raises(StoreError, match=f"{tmp_path}: cannot be locked: Function not implemented"),
        create_in(tmp_path),
    ):
        pass


def test_leftover_files_are_removed_and_other_files_stay(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    leftovers = ["tickets/month=2026-11/2.parquet", "jobs/month=2026-12/2.parquet", "nodes/month=all/1.parquet"]
    other_files = [
        *("notes.txt", "tickets/README", "tickets/month=2026-11/mine.parquet", "tickets/month=2026-11/9.parquet"),
        *("tickets/month=2026-11/2.csv", "tickets/mine/1.parquet", "mine/month=2026-11/1.parquet"),
    ]
    for name in (*leftovers, *other_files):
        (db / name).parent.mkdir(parents=True, exist_ok=True)
        (db / name).write_text("x")
    (db / "manifest.json.new").write_text("half of")
    store_with(db, {"tickets": [ticket("b", DECEMBER)]})
    assert [name for name in leftovers if (db / name).exists()] == []
    assert [name for name in other_files if not (db / name).exists()] == []
    assert content(db) == {"tickets": [ticket("a"), ticket("b", DECEMBER)]}


def test_folder_with_other_files_becomes_no_store(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(StoreError, match=f"{tmp_path}: contains other files and is not a store"), create_in(tmp_path):
        pass
    assert os.listdir(tmp_path) == ["thesis.tex"]


def create_in(folder: Path):
    return open_for_writing(str(folder), make=True)


def test_file_is_removed_after_last_reader(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    with open_for_reading(str(db)) as snapshot:
        store_with(db, {"tickets": [ticket("b")]})
        assert files(db) == {"tickets/month=2026-11/1.parquet", "tickets/month=2026-11/2.parquet"}
        with connect() as connection:
            query = select_sql(connection, "tickets", snapshot.files("tickets"))
            assert connection.execute(query).fetchall() == [ticket("a")]
    store_with(db)
    assert files(db) == {"tickets/month=2026-11/2.parquet"}


# --- stores that are refused


def rejection(folder: Path) -> str:
    with pytest.raises(StoreError) as caught:
        content(folder)
    with pytest.raises(StoreError) as also:
        store_with(folder, {"tickets": [ticket("b")]})
    assert str(also.value) == str(caught.value)
    return str(caught.value)


def test_store_of_newer_healthd_is_rejected(tmp_path):
    db = store_with(tmp_path / "db")
    (db / "manifest.json").write_text(json.dumps({"schema": SCHEMA + 1, "shards": 3}))
    assert re.fullmatch(rf"{db}/manifest\.json: .*schema {SCHEMA + 1}; .* {SCHEMA}\)", rejection(db))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1, "tables": []}', '{"schema": "1"}', "[" * 100_000])
def test_damaged_manifest_is_named(tmp_path, text):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    (db / "manifest.json").write_text(text)
    assert rejection(db).startswith(f"{db}/manifest.json: is damaged: ")
    assert files(db) == {"tickets/month=2026-11/1.parquet"}  # the data file is kept


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "tickets/month=2026-10/1.parquet", "jobs/1.parquet"]
)
def test_manifest_with_foreign_file_is_damaged(tmp_path, name):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    document = read_manifest(db)
    document["tables"]["tickets"]["2026-11"]["name"] = name
    (db / "manifest.json").write_text(json.dumps(document))
    assert f'is damaged: "{name}" ' in rejection(db)


def test_missing_or_cut_file_is_named(tmp_path):
    db = store_with(tmp_path / "db", {"tickets": [ticket("a")]})
    file = db / "tickets/month=2026-11/1.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert re.fullmatch(f"{file}: is damaged: .* {len(whole) - 1:,} bytes .* {len(whole):,}", rejection(db))
    file.unlink()
    assert rejection(db).startswith(f"{file}: cannot be read ")


def test_changed_file_is_named(tmp_path):
    db = store_with(
        tmp_path / "db", {"tickets": [ticket("a"), ticket("b", DECEMBER)], "failures": [("c1", "a", 0, "gpu")]}
    )
    file, other = db / "tickets/month=2026-11/1.parquet", db / "tickets/month=2026-12/1.parquet"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    assert rejection(db).startswith(f"{file}: is damaged: ")
    assert other.exists()
    file.write_bytes(whole[:8] + bytes(40) + whole[48:])  # the footer is intact, the rows are not
    assert rejection(db).startswith(f"{file}: is damaged: ")


def test_folder_writable_by_others_is_refused_for_root(tmp_path):
    db = store_with(tmp_path / "db")
    db.chmod(0o777)
    if os.geteuid() != 0:
        pytest.skip("the rule is for root: docs/adr/0019")
    with pytest.raises(StoreError, match=f"{db} \\(the store\\): refused: {db} is writable by all users"):
        store_with(db)


@pytest.mark.parametrize("name", ["db?", "db*", "db[12]", "{db1,db2}", "d\\b", "d\nb", "db\udcff"])
def test_path_with_pattern_characters_is_rejected(tmp_path, name):
    store_with(tmp_path / "db1", {"tickets": [ticket("a")]})
    for open_store in (open_for_reading, create_in):
        with (
            pytest.raises(StoreError, match=r"control characters and .* are not allowed in a store's path"),
            open_store(str(tmp_path / name)),
        ):
            pass
    assert os.listdir(tmp_path) == ["db1"]


def test_column_missing_in_older_store_is_null(tmp_path, monkeypatch):
    new = stores.TABLES["tickets"]
    older = replace(new, columns={name: kind for name, kind in new.columns.items() if name != "text"})
    old_tables = {**stores.TABLES, "tickets": older}
    with monkeypatch.context() as patched:
        for module in (stores, steps):
            patched.setattr(module, "TABLES", old_tables)
        with open_for_writing(str(tmp_path / "db"), make=True) as store:
            put(store, {"tickets": [("c1", "a", NOVEMBER, None), ("c1", "b", DECEMBER, None)]})
    db = store_with(tmp_path / "db", {"tickets": [ticket("c", DECEMBER, text="new")]})
    assert content(db)["tickets"] == [ticket("a"), ticket("b", DECEMBER), ticket("c", DECEMBER, text="new")]


def test_duckdb_loads_no_extension(tmp_path):
    with open_for_writing(str(tmp_path / "db"), make=True) as store:
        put(store, {"jobs": [job(1)]})
        installed = store.connection.execute(
            "SELECT extension_name FROM duckdb_extensions() "
            "WHERE install_mode NOT IN ('STATICALLY_LINKED', 'NOT_INSTALLED')"
        ).fetchall()
        settings = store.connection.execute(
            "SELECT DISTINCT value FROM duckdb_settings() WHERE name LIKE 'auto%known_extensions'"
        ).fetchall()
    assert (settings, [name for (name,) in installed]) == ([("false",)], [])
