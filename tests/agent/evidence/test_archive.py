"""Archives: content, permissions, limits, a full disk, and damaged files."""

from __future__ import annotations

import errno
import os
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.evidence import archive
from healthd.agent.evidence.archive import Archive, ArchiveError, to_remove
from healthd.agent.evidence.case import Cause
from healthd.agent.evidence.manifest import Manifest

ID = "20261129T060000Z-gpu_xid-79"


def manifest(id: str = ID) -> Manifest:
    return Manifest(id, "gpu-1", "0.1", "boot", 10.0, 9.0, causes=(Cause("gpu_xid/79", "a-1"),))


def saved(tmp_path: Path, id: str = ID, **texts: str) -> str:
    folder = archive.prepare_folder(str(tmp_path))
    files = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        files[f"first/{name}"] = str(tmp_path / name)
    path = f"{folder}/{id}{archive.SUFFIX}"
    archive.write_archive(path, manifest(id), files)
    return path


def test_archive_is_readable_by_root_only(tmp_path: Path) -> None:
    os.umask(0)
    path = saved(tmp_path, kernel="x")
    os.umask(0o022)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    with tarfile.open(path) as tar:
        assert {(member.uname, member.uid, member.mode) for member in tar} == {("", 0, 0o600)}


def test_manifest_and_files_are_read_again(tmp_path: Path) -> None:
    path = saved(tmp_path, kernel="abc")
    assert archive.read_manifest(path) == manifest()
    assert dict(archive.list_files(path)).keys() == {"manifest.json", "first/kernel"}
    assert [found.id for found in archive.list_archives(str(tmp_path))] == [ID]


def test_later_part_keeps_files_of_earlier_part(tmp_path: Path) -> None:
    path = saved(tmp_path, kernel="abc")
    (tmp_path / "sel").write_text("sel")
    archive.write_archive(path, manifest(), {"full/sel": str(tmp_path / "sel")}, earlier=path)
    assert dict(archive.list_files(path)) | {"manifest.json": 0} == {
        "manifest.json": 0,
        "first/kernel": 3,
        "full/sel": 3,
    }


def test_too_large_archive_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = saved(tmp_path, kernel="abc")
    before = Path(path).read_bytes()
    (tmp_path / "noise").write_bytes(os.urandom(100_000))
    with pytest.raises(ArchiveError):
        archive.write_archive(path, manifest(), {"full/noise": str(tmp_path / "noise")}, max_bytes=50_000)
    assert Path(path).read_bytes() == before
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_full_disk_leaves_nothing_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ArchiveError, match="No space left"):
        saved(tmp_path, kernel="abc")
    assert os.listdir(tmp_path / "evidence") == []


def test_unfinished_file_of_another_process_is_not_removed(tmp_path: Path) -> None:
    folder = Path(archive.prepare_folder(str(tmp_path)))
    other = folder / f"{ID}.tar.gz.new"
    other.write_text("other")
    with pytest.raises(ArchiveError):
        archive.write_archive(str(folder / f"{ID}.tar.gz"), manifest(), {})
    assert other.read_text() == "other"


def test_archive_with_damaged_data_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, kernel=os.urandom(20_000).hex())
    archive.verify(path)
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:2000] + b"\xff" * 2000 + data[4000:])
    with pytest.raises(ArchiveError):
        archive.verify(path)


@pytest.mark.parametrize("name", ["gpu_xid-79", "a" * 40])
def test_damaged_archive_that_was_put_aside_is_not_the_newest(tmp_path: Path, name: str) -> None:
    id = f"20261129T060000Z-{name}"
    damaged = archive.put_aside(saved(tmp_path, id), id)
    path = saved(tmp_path, id)
    assert [found.path for found in archive.list_archives(str(tmp_path))] == [damaged, path]


def test_prepare_folder_removes_unfinished_files(tmp_path: Path) -> None:
    folder = Path(archive.prepare_folder(str(tmp_path)))
    (folder / f"{ID}.tar.gz.new").touch()
    folder.chmod(0o755)
    archive.prepare_folder(str(tmp_path))
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("data", [b"", b"not gzip", b"\x1f\x8b\x08\x00"])
def test_damaged_archive_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar.gz").write_bytes(data)
    with pytest.raises(ArchiveError):
        archive.read_manifest(str(tmp_path / "x.tar.gz"))


def test_truncated_archive_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, kernel=os.urandom(20_000).hex())
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])
    with pytest.raises(ArchiveError):
        archive.list_files(path)


@given(st.binary())
def test_parse_manifest_survives_any_data(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        archive.parse_manifest(data, "x")


DAY = 86400.0


def entries(*sizes_and_days: tuple[int, float]) -> list[Archive]:
    return [
        Archive(f"2026{number:04}T000000Z-x", "", size, -days * DAY)
        for number, (size, days) in enumerate(sizes_and_days)
    ]


def test_to_remove_takes_old_then_oldest_files() -> None:
    found = entries((10, 100.0), (10, 5.0), (10, 4.0), (10, 3.0))
    assert to_remove(found, "", 10, 1000, 90, 0.0) == found[:1]
    assert to_remove(found, "", 2, 1000, 90, 0.0) == found[:2]
    assert to_remove(found, "", 10, 15, 90, 0.0) == found[:3]
    assert to_remove(found, found[0].id, 1, 15, 90, 0.0) == found[1:]


def test_to_remove_keeps_files_from_the_future() -> None:
    """The clock was wrong when the file was written, or is wrong now."""
    found = entries((10, -1000.0), (10, -1.0))
    assert to_remove(found, "", 10, 1000, 90, 0.0) == []


@given(
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 200)), min_size=1),
    st.integers(1, 10),
    st.integers(1, 500),
    st.data(),
)
def test_what_stays_is_within_the_limits(
    shape: list[tuple[int, float]], max_files: int, max_bytes: int, data: st.DataObject
) -> None:
    found = entries(*shape)
    keep = data.draw(st.sampled_from(found))
    removed = to_remove(found, keep.id, max_files, max_bytes, 90, 0.0)
    left = [entry for entry in found if entry not in removed]
    assert keep in left
    assert len(left) <= max_files
    assert sum(entry.bytes for entry in left) <= max_bytes or left == [keep]
    assert all(-entry.modified <= 90 * DAY for entry in left if entry is not keep)


def test_remove_old_ignores_other_files(tmp_path: Path) -> None:
    first, second = saved(tmp_path, "20261101T000000Z-a"), saved(tmp_path, "20261102T000000Z-b")
    other = Path(first).with_name("notes.txt")
    other.touch()
    os.utime(other, (0, 0))
    os.utime(first, (time.time() - 100 * DAY,) * 2)
    archive.remove_old(str(tmp_path), "20261102T000000Z-b", 20, 100, 90)
    assert sorted(os.listdir(tmp_path / "evidence")) == sorted([os.path.basename(second), "notes.txt"])
