"""oom: the kernel spares the daemon if memory runs out, but not its child processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from healthd.host.child_process import Child
from healthd.host.oom import SCORE, raise_score, trampoline_argv
from healthd.host.program import run_program

READ = ("cat", SCORE)
REPOSITORY = Path(__file__).parents[2]


def output_with_score(score: int, *argv: str) -> str:
    """Return the output of a program started with this score. Scores below 0 require privileges."""
    program = f"open({SCORE!r}, 'w').write({str(score)!r}); import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.run(
        [sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=240, cwd=REPOSITORY
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


RAISE_SCORE_PROGRAM = (
    "from healthd.host.oom import raise_score; raise_score(300); print(open('/proc/self/oom_score_adj').read())"
)


@pytest.mark.parametrize(
    "argv", [(*trampoline_argv(300), *READ), (sys.executable, "-c", RAISE_SCORE_PROGRAM)], ids=["a command", "a worker"]
)
@pytest.mark.parametrize(("before", "after"), [(100, "300"), (300, "300"), (700, "700")])
def test_raise_score_raises_lower_score_and_keeps_higher_one(argv: tuple[str, ...], before: int, after: str) -> None:
    assert output_with_score(before, *argv).strip() == after


def test_child_passes_arguments_unchanged_and_returns_status() -> None:
    child = Child(("printf", "%s|", "a b", "$HOME", "-n", "'"), time.monotonic() + 60, time.monotonic)
    while not child.step():
        time.sleep(0.01)
    assert (child.status, child.output()) == (0, (b"a b|$HOME|-n|'|", ""))


def test_missing_command_has_status_127() -> None:
    child = Child(("no-such-program-of-ours",), time.monotonic() + 60, time.monotonic)
    while not child.step():
        time.sleep(0.01)
    assert child.status == 127
    assert "no-such-program-of-ours" in child.output()[1]
    assert "No such file or directory" in child.output()[1]


def test_raise_score_without_argument_keeps_score() -> None:
    before = Path(SCORE).read_text()
    raise_score()
    assert Path(SCORE).read_text() == (before if int(before) >= 0 else "0\n")
    assert run_program(READ, 60).stdout == Path(SCORE).read_text()
