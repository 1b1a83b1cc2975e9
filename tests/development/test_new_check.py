"""Tests of scripts/new_check.py: it writes a complete check with its test, its table and its pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
GENERATED = (".git", ".venv*", ".*_cache", ".hyp*", ".cov*", "__pycache__", "build", "dist", "wheels", "*.egg-info")
NAME = "fan_speed"
TESTS = ("design", "contract", "contributing", "checks_page", "sample_settings", "conf", "peers", "docs", "man")
PYTEST = ("pytest", "-p", "no:cacheprovider", "-n", "0")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a copy of this checkout that keeps links."""
    copy = tmp_path_factory.mktemp("new_check") / "healthd"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(*GENERATED))
    return copy


def run(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "MYPY_CACHE_DIR": f"{tree}/.mypy_cache"}
    for name in [name for name in environment if name.startswith(("PYTEST_", "COV_", "COVERAGE_"))]:
        del environment[name]
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tree, env=environment)


def new_check(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(tree, "scripts/new_check.py", *words)


def modification_times(tree: Path) -> dict[str, float]:
    return {str(path): path.stat().st_mtime for path in tree.rglob("*") if path.suffix in (".py", ".md", ".toml")}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["Fan"],
            '"Fan" is not a valid name for a check: use lower-case letters, digits and "_", as in "disk_space"',
        ),
        (["fan-speed"], '"fan-speed" is not a valid name for a check'),
        (["../fan"], '"../fan" is not a valid name for a check'),
        (["class"], '"class" is not a valid name for a check'),
        (["f" * 25], "is too long for a check: 24 characters at most"),
        (["mount"], 'the name "mount" is taken: there is checks/mount.py'),
        ([NAME, "--under", "fans"], 'conf/healthd.toml has no heading "fans": there are GPU, PCI Express, network, '),
    ],
)
def test_invalid_name_or_heading_is_one_sentence_and_writes_nothing(tree, words, sentence):
    before = modification_times(tree)
    result = new_check(tree, *words)
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (64, "", 1)
    assert result.stderr.startswith("new_check: ")
    assert sentence in result.stderr
    assert modification_times(tree) == before


def test_new_check_passes_all_tests_of_checks(tree, tmp_path):
    copy = tmp_path / "healthd"
    shutil.copytree(tree, copy, symlinks=True)
    result = new_check(copy, NAME, "--under", "storage")
    assert (result.returncode, result.stderr) == (0, "")
    settings = (copy / "conf/healthd.toml").read_text()
    assert settings.index("[checks.filesystem]") < settings.index(f"[checks.{NAME}]") < settings.index("# --- host")
    for words in (["ruff", "check", "--quiet", "."], ["ruff", "format", "--quiet", "--diff", "."]):
        assert run(copy, "-m", *words).stdout == ""
    types = run(copy, "-m", "mypy", "--strict", "--no-error-summary")
    assert (types.stdout, types.returncode) == ("", 0)
    files = [str(next((copy / "tests").rglob(f"test_{name}.py"))) for name in (*TESTS, NAME)]
    tests = run(copy, "-m", *PYTEST, *files)
    assert tests.returncode == 0, tests.stdout
    for file, selection in (("mutations", NAME), ("normal_life", "healthy or boot")):
        selected = run(copy, "-m", *PYTEST, f"tests/checks/test_{file}.py", "-k", selection)
        assert selected.returncode == 0, selected.stdout
    check_result = run(copy, "-m", "healthd", "check", NAME, "--config", "conf/healthd.toml", "--root", "/")
    assert f"\n{NAME}  completed" in check_result.stdout, check_result.stderr
