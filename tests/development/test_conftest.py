"""Tests of tests/conftest.py and pyproject.toml: the examples of Hypothesis, and the warnings that are errors."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytestmark = pytest.mark.one_python

TESTS = Path(__file__).parents[1]
RANDOM = ("--hypothesis-profile=random", "--hypothesis-seed=7")


def run(folder: Path, tests: str, *options: str) -> str:
    """Run pytest on `tests` with our settings and return its output. `stranger` is a module of a third party."""
    (folder / "test_conftest.py").write_text(tests)
    (folder / "stranger.py").write_text("import warnings\ndef warn(c, level=1): warnings.warn('old', c, level)\n")
    arguments = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "PYTEST_"))}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=prepend", *arguments, str(folder / "test_conftest.py")],
        env={**environment, "PYTHONPATH": f"{TESTS}/support:{TESTS.parent}:{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.stdout + result.stderr


WARNINGS = """
import threading, warnings
import stranger
class Torn:
    def __del__(self): raise OSError
def test_ours(): warnings.warn("old", DeprecationWarning)
def test_a_call_of_ours(): stranger.warn(DeprecationWarning, 2)
def test_unclosed(): stranger.warn(ResourceWarning)
def test_unraisable(): Torn()
def test_in_a_thread():
    thread = threading.Thread(target=int, args=("x",))
    thread.start()
    thread.join()
def test_others(): stranger.warn(DeprecationWarning)
def test_without(): pass
"""
OURS = {"ours", "a_call_of_ours", "unclosed", "unraisable", "in_a_thread"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), OURS), (("-W", "error"), {*OURS, "others"}), (("-W", "error", "-n", "1"), {*OURS, "others"})],
)
def test_third_party_warnings_fail_only_with_error_option(tmp_path, options, expected):
    output = run(tmp_path, WARNINGS, *options)
    assert {*re.findall(r"(?m)^FAILED .*::test_(\w+)", output)} == expected, output


EXAMPLES = """
from hypothesis import given, strategies
SEEN = []
@given(strategies.integers())
def test_it(number): SEEN.append(number)
def teardown_module(): print("seen:", hash(tuple(SEEN)))
"""


def examples_of_run(folder: Path, *options: str) -> str:
    return re.findall("seen: .*", run(folder, EXAMPLES, "-s", *options))[0]


def test_default_examples_repeat_and_random_ones_depend_on_seed(tmp_path):
    assert hypothesis.settings.get_profile("repeatable").database is None
    assert hypothesis.settings.get_profile("random").database is None
    default, seeded = examples_of_run(tmp_path), examples_of_run(tmp_path, *RANDOM)
    assert examples_of_run(tmp_path, "--hypothesis-seed=8") == default
    assert examples_of_run(tmp_path, *RANDOM) == seeded != default


def suppressed_checks(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "suppress_health_check":
            yield ast.unparse(node.value)


def test_no_test_replaces_health_checks_of_profile() -> None:
    texts = [path.read_text("utf-8") for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    lists = [found for text in texts if "suppress_health_check" in text for found in suppressed_checks(text)]
    assert lists
    assert [found for found in lists if not found.startswith("also(")] == []
