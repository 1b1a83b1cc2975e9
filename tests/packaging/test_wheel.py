"""Tests of the wheel: it contains healthd and nothing else, even if the folder was built in before."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from wheel_commands import COMMANDS
from wheel_files import LIMIT_BYTES, ROOT, find_differences

from healthd.cli.main import FAMILIES

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GENERATED = (".git", ".venv*", ".*_cache", ".hyp*", ".cov*", "__pycache__", "build", "dist", "wheels", "*.egg-info")


def build(tree: Path) -> Path:
    """Build the wheel of a tree as pip does, but with the setuptools of this environment, without network."""
    folder = tree.with_name("built")
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Create a copy of this checkout that keeps links."""
    shutil.copytree(ROOT, tmp_path / "healthd", symlinks=True, ignore=shutil.ignore_patterns(*GENERATED))
    return tmp_path / "healthd"


def test_wheel_equals_tree_after_module_deletion(tree: Path) -> None:
    leftovers = [tree / "healthd/leftover.py", tree / "checks/leftover.py", tree / "conf/profiles/leftover.toml"]
    for leftover in leftovers:
        leftover.write_text("")
    assert find_differences(build(tree), tree) == []
    for leftover in leftovers:
        leftover.unlink()
    assert find_differences(build(tree), tree) == []
    assert not (tree / "build").exists()


def test_find_differences_reports_extra_missing_and_changed_files(tree: Path) -> None:
    wheel = build(tree)
    (tree / "healthd/cli/main.py").unlink()
    (tree / "healthd/new.py").write_text("")
    (tree / "conf/healthd.toml").write_text("")
    assert find_differences(wheel, tree) == [
        "not in the wheel: healthd/new.py",
        "unexpected in the wheel: healthd/cli/main.py",
        "differs from the tree: data/share/healthd/healthd.toml",
    ]


def test_find_differences_reports_size_above_limit(tree: Path) -> None:
    (tree / "healthd/nvidia/facts/noise.csv").write_bytes(os.urandom(LIMIT_BYTES))
    (difference,) = find_differences(build(tree), tree)
    assert difference.endswith(f"bytes, above {LIMIT_BYTES}")


def test_pyproject_lists_each_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    package_dirs = [
        Path(folder) for folder, _, names in os.walk(ROOT / "healthd", followlinks=True) if "__init__.py" in names
    ]
    assert sorted(listed) == sorted(".".join(folder.relative_to(ROOT).parts) for folder in package_dirs)


def test_wheel_commands_try_every_command() -> None:
    assert set(COMMANDS) == set(FAMILIES)
