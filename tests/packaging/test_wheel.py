"""Tests of the wheel: it contains healthd and nothing else, even if the folder was built in before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheel_commands import COMMANDS
from wheel_files import LIMIT_BYTES, ROOT, strangers

from healthd.cli.main import FAMILIES

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MADE = (".git", ".venv*", ".*_cache", ".hyp*", ".cov*", "__pycache__", "build", "dist", "wheels", "*.egg-info")


def build(tree: Path) -> Path:
    """Build the wheel of a tree as pip does, but with the setuptools of this environment, without network."""
    folder = tree.with_name("built")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a copy of this checkout that keeps links."""
    shutil.copytree(ROOT, tmp_path / "healthd", symlinks=True, ignore=shutil.ignore_patterns(*MADE))
    return tmp_path / "healthd"


def test_the_wheel_holds_what_the_tree_has_and_nothing_of_a_module_that_is_deleted(tree: Path) -> None:
    leftovers = [tree / "healthd/leftover.py", tree / "checks/leftover.py", tree / "conf/profiles/leftover.toml"]
    for leftover in leftovers:
        leftover.write_text("")
    assert strangers(build(tree), tree) == []
    for leftover in leftovers:
        leftover.unlink()
    assert strangers(build(tree), tree) == []
    assert not (tree / "build").exists()


def test_a_stranger_a_missing_file_and_another_content_are_told(tree: Path) -> None:
    wheel = build(tree)
    (tree / "healthd/cli/main.py").unlink()
    (tree / "healthd/new.py").write_text("")
    (tree / "conf/healthd.toml").write_text("")
    assert strangers(wheel, tree) == [
        "not in the wheel: healthd/new.py",
        "unexpected in the wheel: healthd/cli/main.py",
        "differs from the tree: data/share/healthd/healthd.toml",
    ]


def test_a_wheel_that_is_too_large_is_told(tree: Path) -> None:
    (tree / "healthd/nvidia/facts/noise.csv").write_bytes(os.urandom(LIMIT_BYTES))
    (told,) = strangers(build(tree), tree)
    assert told.endswith(f"bytes, above {LIMIT_BYTES}")


def test_each_package_of_the_tree_is_told_to_setuptools() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = [Path(folder) for folder, _, names in os.walk(ROOT / "healthd", followlinks=True) if "__init__.py" in names]
    assert sorted(told) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in there)


def test_the_installed_wheel_is_tried_with_each_command() -> None:
    assert set(COMMANDS) == set(FAMILIES)
