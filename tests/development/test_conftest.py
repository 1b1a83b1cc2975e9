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
    given = ["-c", str(TESTS.parent / "pyproject.toml"), "-p", "tests.conftest", "-p", "no:cacheprovider", *options]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HEALTHD_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=prepend", *given, str(folder / "test_conftest.py")],
        env={**own, "PYTHONPATH": f"{TESTS}/support:{TESTS.parent}:{folder}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr


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
def test_a_warning_that_blames_others_fails_in_make_test_all_alone(tmp_path, options, expected):
    output = run(tmp_path, WARNINGS, *options)
    assert {*re.findall(r"(?m)^FAILED .*::test_(\w+)", output)} == expected, output


EXAMPLES = """
from hypothesis import given, strategies
SEEN = []
@given(strategies.integers())
def test_it(number): SEEN.append(number)
def teardown_module(): print("seen:", hash(tuple(SEEN)))
"""


def seen(folder: Path, *options: str) -> str:
    return re.findall("seen: .*", run(folder, EXAMPLES, "-s", *options))[0]


def test_make_test_tries_the_same_examples_again_and_make_test_all_those_of_its_seed(tmp_path):
    assert hypothesis.settings.get_profile("repeatable").database is None
    assert hypothesis.settings.get_profile("random").database is None
    same, by_seed = seen(tmp_path), seen(tmp_path, *RANDOM)
    assert seen(tmp_path, "--hypothesis-seed=8") == same
    assert seen(tmp_path, *RANDOM) == by_seed != same


def suppressing(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "suppress_health_check":
            yield ast.unparse(node.value)


def test_no_test_turns_on_again_what_the_profile_has_turned_off() -> None:
    texts = [path.read_text("utf-8") for path in TESTS.rglob("*.py") if path.name != "conftest.py"]
    lists = [found for text in texts if "suppress_health_check" in text for found in suppressing(text)]
    assert lists
    assert [found for found in lists if not found.startswith("also(")] == []
