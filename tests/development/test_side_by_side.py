"""tests/support/side_by_side.py: each test runs once, its report is that of one process, no death is missed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

SUPPORT = Path(__file__).parents[1] / "support"
SHARING = """
import os, pytest
@pytest.fixture(scope="module")
def shared(tmp_path_factory): return tmp_path_factory.mktemp("shared"), os.getpid()
@pytest.mark.parametrize("n", range(4))
def test_group(shared, n): assert shared[1] == os.getpid()
def test_other(shared): assert list(shared[0].parent.parent.glob("p*")) != []
"""
OUTCOMES = """
import os, pytest
def test_fails(): os.system("echo printed"); assert 1 == 2
def test_skips(): pytest.skip("why")
def test_passes(capfd): os.system("echo captured"); assert capfd.readouterr().out == "captured\\n"
@pytest.fixture
def torn(): yield; raise OSError("at the end")
def test_torn(torn): pass
"""
DIES = """
import os, pytest
@pytest.mark.parametrize("n", range(3))
def test_it(n): n != 1 or os.kill(os.getpid(), 9)
"""


def run(folder: Path, *options: str, **files: str) -> tuple[int, str]:
    """Return the exit status and the output of pytest on these test files."""
    plugins = 'pytest_plugins = ["side_by_side"]'
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(SUPPORT)!r})\n{plugins}\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q\n")
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=folder, env=own, capture_output=True, text=True, timeout=300
    )
    return done.returncode, done.stdout


def test_each_test_runs_once_and_those_of_a_group_in_one_process(tmp_path: Path) -> None:
    files = {f"test_{name}": SHARING for name in "abc"}
    status, printed = run(tmp_path, "--processes", "3", **files)
    assert (status, re.findall("(?m)^15 passed", printed)) == (0, ["15 passed"]), printed


def test_reports_are_those_of_one_process(tmp_path: Path) -> None:
    printed = []
    for count in ("1", "2"):
        status, text = run(tmp_path, "-rs", "--processes", count, test_a=OUTCOMES, test_b="def test_it(): pass")
        assert status == pytest.ExitCode.TESTS_FAILED
        printed.append(re.findall(r"(?m)^(?:FAILED|ERROR|SKIPPED) .*|^printed$|^\d failed.*(?= in )", text))
    assert sorted(printed[0]) == sorted(printed[1])
    assert "printed" in printed[0]
    assert "1 failed, 3 passed, 1 skipped, 1 error" in printed[0]


def test_tests_of_a_process_that_dies_have_failed_and_the_others_run(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "--processes", "2", test_a=DIES, test_b="def test_it(): pass")
    assert status == pytest.ExitCode.TESTS_FAILED
    assert printed.count("the process that ran it died: SIGKILL") >= 2  # the next one of its group too
    failed = json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text())
    assert {"test_a.py::test_it[1]", "test_a.py::test_it[2]"} <= set(failed)
    assert "test_a.py::test_it[0]" not in failed


def test_tests_that_no_process_is_left_to_run_have_failed(tmp_path: Path) -> None:
    files = {f"test_{number:02}": "import os\ndef test_it(): os._exit(0)" for number in range(9)}
    status, printed = run(tmp_path, "--processes", "2", **files)
    assert (status, re.findall("(?m)^9 failed", printed)) == (1, ["9 failed"]), printed
    assert "all processes that run tests have died" in printed


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    files = {f"test_{name}": "def test_it(): assert 1 == 2" for name in "abcdefgh"}
    status, printed = run(tmp_path, "--processes", "2", "-x", **files)
    assert (status, re.findall("(?m)^1 failed", printed)) == (pytest.ExitCode.TESTS_FAILED, ["1 failed"]), printed
