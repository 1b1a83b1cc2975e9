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


def rooms(folder: Path) -> dict[str, tuple[int, int]]:
    """Return each file's inode and allocated size in bytes."""
    return {path.name: (path.stat().st_ino, path.stat().st_blocks * 512) for path in folder.iterdir()}


def test_two_files_take_turns_and_neither_gives_its_room_away(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"one")
    first = rooms(tmp_path)
    assert first.keys() == {"ledger.json", "ledger.json.spare"}
    assert all(room >= SIZE_STEP_BYTES for _, room in first.values()), "including the spare file"
    for text in ("two", "x" * (SIZE_STEP_BYTES * 3 // 4), "y", "caf\u00e9"):
        rewrite_file(str(path), text.encode())
        assert path.read_text(encoding="utf-8").rstrip(" ") == text
    assert rooms(tmp_path) == first, "after four exchanges each file has its first name again"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_file_without_room_gets_it_at_the_first_save(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    path.write_text("{}")
    rewrite_file(str(path), b"{}")
    assert all(room >= SIZE_STEP_BYTES for _, room in rooms(tmp_path).values())


def test_room_grows_in_steps_before_it_is_needed_and_is_given_back_when_far_too_large(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    steps = ((SIZE_STEP_BYTES * 3 // 4, 1), (SIZE_STEP_BYTES * 3 // 4 + 1, 2), (3 * SIZE_STEP_BYTES, 4), (0, 4), (0, 4))
    for size, expected in steps:
        rewrite_file(str(path), b"x" * size)
        assert path.stat().st_size == expected * SIZE_STEP_BYTES
    rewrite_file(str(path), b"x" * (40 * SIZE_STEP_BYTES))
    for _ in range(2):
        rewrite_file(str(path), b"small")
    assert path.stat().st_size == SIZE_STEP_BYTES


def test_where_names_cannot_be_exchanged_the_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.EINVAL, "no")

    monkeypatch.setattr(durable_file, "_exchange", cannot)
    path = tmp_path / "ledger.json"
    for text in ("one", "two", "three"):
        rewrite_file(str(path), text.encode())
        assert path.read_text().rstrip() == text
    assert all(room >= SIZE_STEP_BYTES for _, room in rooms(tmp_path).values())


def test_a_link_in_the_place_of_the_spare_file_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another user's text")
    (tmp_path / "ledger.json.spare").symlink_to(other)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        rewrite_file(str(tmp_path / "ledger.json"), b"new")
    assert other.read_text() == "another user's text"


@pytest.mark.parametrize("name", ["ledger.json", "ledger.json.spare"])
def test_rewrite_replaces_a_planted_fifo_without_blocking(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for text in ("one", "two", "three"):
        rewrite_file(str(tmp_path / "ledger.json"), text.encode())
        assert read_whole(str(tmp_path / "ledger.json")) == text
    assert all(path.is_file() for path in tmp_path.iterdir())


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=200).map(str.rstrip), min_size=1, max_size=5))
def test_whatever_was_written_last_is_read(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
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


def test_a_writer_that_is_killed_leaves_one_whole_text(tmp_path: Path) -> None:
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
    words = text.split(",")
    return (len(set(words[:-1])), len(words)) == (1, 5001)


def test_who_reads_while_it_is_written_reads_one_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"1," * 5000)
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], env=dict(os.environ)) as writer:
        try:
            texts = [read_whole(str(path)) for _ in range(500)]
        finally:
            writer.kill()
    assert all(map(is_whole, texts))


def test_who_is_slow_to_read_keeps_what_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    rewrite_file(str(path), b"old")
    with open(path, encoding="utf-8") as reading:
        fcntl.flock(reading, fcntl.LOCK_SH)
        for text in ("one", "two", "three"):
            rewrite_file(str(path), text.encode())
        assert reading.read().rstrip() == "old"
    assert read_whole(str(path)) == "three"
