"""atomic_files: a file is replaced completely or not at all, whatever other files exist."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from healthd.common.atomic_files import open_own_file, overwrite_file, remove_leftovers, replace_file


def test_replace_file_keeps_old_file_if_write_fails(tmp_path: Path) -> None:
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


def test_replace_file_rejects_other_types_before_writing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    replace_file(str(path), "old")
    with pytest.raises(TypeError):
        replace_file(str(path), 7)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_replace_file_writes_bytes_unchanged_and_replaces_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(str(path), b"\xff\x00\r\n")
    assert path.read_bytes() == b"\xff\x00\r\n"
    replace_file(str(path), "a\r\n\ud800")
    assert path.read_bytes() == b"a\r\n?"


def test_replace_file_sets_mode_despite_umask(tmp_path: Path) -> None:
    path = tmp_path / "verdict"
    old = os.umask(0o077)
    try:
        replace_file(str(path), "ok", mode=0o644)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o644


def test_replace_file_durable_writes_only_if_file_differs(tmp_path: Path) -> None:
    path, other_path = tmp_path / "ledger.json", tmp_path / "other"

    def was_replaced(text: str) -> bool:
        before = path.lstat().st_ino if path.exists() else None
        replace_file(str(path), text, durable=True)
        assert (path.read_text(), path.lstat().st_mode & 0o777, path.is_symlink()) == (text, 0o600, False)
        return path.lstat().st_ino != before

    assert was_replaced("{}")
    assert not was_replaced("{}")
    assert was_replaced("[]")
    path.write_text("{}")  # an older file was restored
    assert was_replaced("[]")
    path.chmod(0o640)
    assert was_replaced("[]")
    os.link(path, other_path)
    assert was_replaced("[]")
    path.unlink()
    path.symlink_to(other_path)
    assert was_replaced("[]")
    path.unlink()
    os.mkfifo(path)
    replace_file(str(path), "[]", durable=True)
    assert path.read_text() == "[]"
    assert sorted(os.listdir(tmp_path)) == ["ledger.json", "other"]


def test_replace_file_does_not_follow_link_at_temporary_name(tmp_path: Path) -> None:
    path, other_path = tmp_path / "a.rec", tmp_path / "other"
    other_path.write_text("another file")
    (tmp_path / f"a.rec.{os.getpid()}.new").symlink_to(other_path)
    replace_file(str(path), "new")
    assert (path.read_text(), other_path.read_text()) == ("new", "another file")
    assert not path.is_symlink()


def test_remove_leftovers_removes_files_of_dead_writers_only(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as dead_process:
        pass
    expected_files = {f"ledger.json.{os.getpid()}.new", "ledger.json", "notes.new"}
    for name in (*expected_files, f"ledger.json.{dead_process.pid}.new"):
        (tmp_path / name).touch()
    remove_leftovers(str(tmp_path))
    assert set(os.listdir(tmp_path)) == expected_files


def test_overwrite_file_keeps_inode_and_clears_longer_text(tmp_path: Path) -> None:
    path = tmp_path / "verdict"
    path.write_text("drain 1790000000 a longer reason\n")
    before = path.stat().st_ino
    overwrite_file(str(path), "ok 1 x\n")
    assert path.read_text().split() == ["ok", "1", "x"]
    overwrite_file(str(path), "drain 1790000000 a reason that is longer than the first\n")
    assert path.read_text() == "drain 1790000000 a reason that is longer than the first\n"
    assert path.stat().st_ino == before


@pytest.mark.parametrize("kind", ["missing", "fifo", "link"])
def test_overwrite_file_rejects_other_file_types(tmp_path: Path, kind: str) -> None:
    path, other_path = tmp_path / "verdict", tmp_path / "other"
    other_path.write_text("another file")
    if kind == "fifo":
        os.mkfifo(path)
    if kind == "link":
        path.symlink_to(other_path)
    with pytest.raises(OSError):  # noqa: PT011 -- three kinds, three messages
        overwrite_file(str(path), "ok 1 x\n")
    assert other_path.read_text() == "another file"


def test_open_own_file_replaces_fifo_with_or_without_reader(tmp_path: Path) -> None:
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
