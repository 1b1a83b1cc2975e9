"""A file is replaced whole or not at all, whatever was left beside it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from healthd.judge.ledger import read_text
from healthd.machine.files import remove_leftovers, replace_file


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.json")
    replace_file(path, "old")
    with pytest.raises(TypeError):
        replace_file(path, 7)  # type: ignore[arg-type]
    assert read_text(path) == "old"
    assert os.listdir(tmp_path) == ["ledger.json"]


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    kept = {f"ledger.json.{os.getpid()}.new", "ledger.json", "notes.new"}
    for name in (*kept, f"ledger.json.{gone.pid}.new"):
        (tmp_path / name).touch()
    remove_leftovers(str(tmp_path))
    assert set(os.listdir(tmp_path)) == kept
