"""Tests of files that are rewritten often: they stay allocated and complete, also after a kill."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.conditions import durable_file
from healthd.agent.conditions.durable_file import SIZE_STEP_BYTES, read_whole, rewrite_file


def allocations(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each file's inode and allocated size in bytes."""
    return {path.name: (path.stat().st_ino, path.stat().st_blocks * 512) for path in folder.iterdir()}


def test_rewrite_file_alternates_two_preallocated_files(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"one")
    first = allocations(tmp_path)
    assert first.keys() == {"ledger.json", "ledger.json.spare"}
    assert all(allocated >= SIZE_STEP_BYTES for _, allocated in first.values()), "including the spare file"
    for text in ("two", "x" * (SIZE_STEP_BYTES * 3 // 4), "y", "caf\u00e9"):
        rewrite_file(str(path), text.encode())
        assert path.read_text(encoding="utf-8").rstrip(" ") == text
    assert allocations(tmp_path) == first, "after four exchanges each file has its first name again"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_rewrite_file_preallocates_at_first_save(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text("{}")
    rewrite_file(str(path), b"{}")
    assert all(allocated >= SIZE_STEP_BYTES for _, allocated in allocations(tmp_path).values())


def test_rewrite_file_grows_in_steps_and_shrinks(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    steps = ((SIZE_STEP_BYTES * 3 // 4, 1), (SIZE_STEP_BYTES * 3 // 4 + 1, 2), (3 * SIZE_STEP_BYTES, 4), (0, 4), (0, 4))
    for size, expected in steps:
        rewrite_file(str(path), b"x" * size)
        assert path.stat().st_size == expected * SIZE_STEP_BYTES
    rewrite_file(str(path), b"x" * (40 * SIZE_STEP_BYTES))
    for _ in range(2):
        rewrite_file(str(path), b"small")
    assert path.stat().st_size == SIZE_STEP_BYTES


def test_rewrite_file_replaces_file_without_rename_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_exchange(*_: object) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(durable_file, "_exchange", fail_exchange)
    path = tmp_path / "ledger.json"
    for text in ("one", "two", "three"):
        rewrite_file(str(path), text.encode())
        assert path.read_text().rstrip() == text
    assert all(allocated >= SIZE_STEP_BYTES for _, allocated in allocations(tmp_path).values())


def test_rewrite_file_does_not_follow_symlinked_spare(tmp_path: Path) -> None:
    target = tmp_path / "other"
    target.write_text("another user's text")
    (tmp_path / "ledger.json.spare").symlink_to(target)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        rewrite_file(str(tmp_path / "ledger.json"), b"new")
    assert target.read_text() == "another user's text"


@pytest.mark.parametrize("name", ["ledger.json", "ledger.json.spare"])
def test_rewrite_file_replaces_planted_fifo_without_blocking(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for text in ("one", "two", "three"):
        rewrite_file(str(tmp_path / "ledger.json"), text.encode())
        assert read_whole(str(tmp_path / "ledger.json")) == text
    assert all(path.is_file() for path in tmp_path.iterdir())


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=200).map(str.rstrip), min_size=1, max_size=5))
def test_rewrite_file_stores_last_text(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rewrite") / "a"
    for text in texts:
        rewrite_file(str(path), text.encode())
    assert path.read_bytes().decode().rstrip(" ") == texts[-1].rstrip(" ")


WRITER = """
import sys
from healthd.agent.conditions.durable_file import rewrite_file
number = 0
while True:
    number += 1
    rewrite_file(sys.argv[1], b"%d," % number * 5000)
"""


def test_rewrite_file_survives_kill(tmp_path: Path) -> None:
    path, before = tmp_path / "ledger.json", 0
    for _ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=dict(os.environ)) as writer:
            end = time.monotonic() + 120
            while not path.exists() or path.stat().st_mtime_ns == before:
                assert time.monotonic() < end
                time.sleep(0.001)
            writer.send_signal(signal.SIGKILL)
        before = path.stat().st_mtime_ns
        assert is_whole(path.read_text().rstrip())


def is_whole(text: str) -> bool:
    numbers = text.split(",")
    return (len(set(numbers[:-1])), len(numbers)) == (1, 5001)


def test_read_whole_during_rewrite_returns_complete_text(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"1," * 5000)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=dict(os.environ)) as writer:
        try:
            texts = [read_whole(str(path)) for _ in range(500)]
        finally:
            writer.kill()
    assert all(map(is_whole, texts))


def test_locked_reader_keeps_opened_text(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"old")
    with open(path, encoding="utf-8") as open_file:
        fcntl.flock(open_file, fcntl.LOCK_SH)
        for text in ("one", "two", "three"):
            rewrite_file(str(path), text.encode())
        assert open_file.read().rstrip() == "old"
    assert read_whole(str(path)) == "three"
