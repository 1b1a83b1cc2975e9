"""atomic_files: a file is replaced completely or not at all, whatever other files exist."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from healthd.common.atomic_files import open_own_file, overwrite_file, remove_leftovers, replace_file


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    replace_file(str(path), "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            replace_file(str(path), "longer than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_what_is_no_text_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    replace_file(str(path), "old")
    with pytest.raises(TypeError):
        replace_file(str(path), 7)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_bytes_are_written_as_they_are_and_half_a_character_as_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(str(path), b"\xff\x00\r\n")
    assert path.read_bytes() == b"\xff\x00\r\n"
    replace_file(str(path), "a\r\n\ud800")
    assert path.read_bytes() == b"a\r\n?"


def test_who_may_read_it_is_as_said_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "verdict"
    old = os.umask(0o077)
    try:
        replace_file(str(path), "ok", mode=0o644)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_durable_file_is_written_again_only_where_it_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "ledger.json", tmp_path / "other"

    def replaced(text: str) -> bool:
        before = path.lstat().st_ino if path.exists() else None
        replace_file(str(path), text, durable=True)
        assert (path.read_text(), path.lstat().st_mode & 0o777, path.is_symlink()) == (text, 0o600, False)
        return path.lstat().st_ino != before

    assert replaced("{}")
    assert not replaced("{}")
    assert replaced("[]")
    path.write_text("{}")  # an older file was restored
    assert replaced("[]")
    path.chmod(0o640)
    assert replaced("[]")
    os.link(path, other)
    assert replaced("[]")
    path.unlink()
    path.symlink_to(other)
    assert replaced("[]")
    path.unlink()
    os.mkfifo(path)
    replace_file(str(path), "[]", durable=True)
    assert path.read_text() == "[]"
    assert sorted(os.listdir(tmp_path)) == ["ledger.json", "other"]


def test_a_link_that_lies_where_the_new_file_is_made_is_not_followed(tmp_path: Path) -> None:
    path, other = tmp_path / "a.rec", tmp_path / "other"
    other.write_text("another file")
    (tmp_path / f"a.rec.{os.getpid()}.new").symlink_to(other)
    replace_file(str(path), "new")
    assert (path.read_text(), other.read_text()) == ("new", "another file")
    assert not path.is_symlink()


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    kept = {f"ledger.json.{os.getpid()}.new", "ledger.json", "notes.new"}
    for name in (*kept, f"ledger.json.{gone.pid}.new"):
        (tmp_path / name).touch()
    remove_leftovers(str(tmp_path))
    assert set(os.listdir(tmp_path)) == kept


def test_overwrite_file_keeps_the_inode_and_blanks_the_rest_of_a_longer_text(tmp_path: Path) -> None:
    path = tmp_path / "verdict"
    path.write_text("drain 1790000000 a longer reason\n")
    before = path.stat().st_ino
    overwrite_file(str(path), "ok 1 x\n")
    assert path.read_text().split() == ["ok", "1", "x"]
    overwrite_file(str(path), "drain 1790000000 a reason that is longer than the first\n")
    assert path.read_text() == "drain 1790000000 a reason that is longer than the first\n"
    assert path.stat().st_ino == before


@pytest.mark.parametrize("kind", ["missing", "fifo", "link"])
def test_overwrite_file_refuses_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "verdict", tmp_path / "other"
    other.write_text("another file")
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "link":
        path.symlink_to(other)
    with pytest.raises(OSError):  # noqa: PT011 -- three kinds, three messages
        overwrite_file(str(path), "ok 1 x\n")
    assert other.read_text() == "another file"


def test_open_own_file_replaces_a_fifo_with_or_without_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    os.mkfifo(path)
    os.close(open_own_file(str(path)))
    assert path.is_file()
    path.unlink()
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.close(open_own_file(str(path)))
    finally:
        os.close(reader)
    assert path.is_file()
