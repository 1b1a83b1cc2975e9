"""Tests of the import contracts in pyproject.toml: a forbidden import in one check fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
LINT = ROOT / ".venv/bin/lint-imports"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a copy of the package and its contracts."""
    copy = tmp_path_factory.mktemp("tree")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "healthd", copy / "healthd", ignore=without, symlinks=True)
    shutil.copytree(ROOT / "checks", copy / "checks", ignore=without)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    if not LINT.exists():
        pytest.skip("import-linter is not installed")
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([LINT, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True, timeout=240)


def test_contracts_are_kept_by_unchanged_copy(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "forbidden",
    [
        "agent.settings.config",
        "events.rows",
        "fleet.store",
        "failslow.live.document",
        "checks.gpu_xid",
    ],
)
def test_forbidden_import_in_one_check_fails(tree: Path, forbidden: str) -> None:
    check = tree / "checks/clock.py"
    before = check.read_text("utf-8")
    try:
        check.write_text(f"{before}\nimport healthd.{forbidden}\n", "utf-8")
        result = lint(tree)
    finally:
        check.write_text(before, "utf-8")
    assert result.returncode == 1, result.stdout
    assert f"healthd.checks.clock -> healthd.{forbidden}" in result.stdout
