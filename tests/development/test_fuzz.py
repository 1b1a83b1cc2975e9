"""A short form of `make fuzz`: each boundary gets a few hundred hostile inputs, always the same ones."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from healthd.common import guard
from tests.fuzz import run as fuzzing
from tests.fuzz.mutate import MAX_BYTES, inputs
from tests.fuzz.run import MOST_FAILURES, fuzz
from tests.fuzz.targets import TARGETS, made

INPUTS = 400
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_break_no_promise(name: str) -> None:
    seeds, take = made(name)
    outcome = fuzz(seeds, take, number=20261122, most=max(20, INPUTS // TARGETS[name].cost))
    assert not outcome.failures, f"{outcome.failures[0][1]}\nthe input: {outcome.failures[0][0]!r:.500}"


@pytest.mark.parametrize("name", TARGETS)
def test_a_good_input_is_taken(name: str) -> None:
    seeds, take = made(name)
    assert seeds
    take(seeds[0])


def test_the_same_number_makes_the_same_inputs_and_another_makes_others() -> None:
    seeds, _ = made("kernel-message")
    first, again, other = ([inputs(seeds, random.Random(number)) for _ in range(3)] for number in (1, 1, 2))
    assert first == again != other
    assert max(len(inputs(seeds, random.Random(number))) for number in range(300)) <= MAX_BYTES


def test_a_reader_that_stumbles_behind_a_guard_or_raises_or_is_slow_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [b"name=12 other=34"]

    def raises(data: bytes) -> None:
        assert b"\x00" not in data

    @guard.never_raises(guard.KERNEL_LOG)
    def stumbles(data: bytes) -> int:
        return int(data.partition(b"=")[2].partition(b" ")[0] or 0)

    def guarded(data: bytes) -> None:
        stumbles(data)
        assert not guard.dropped

    def slow(data: bytes) -> None:
        if len(data) > MAX_BYTES // 2:
            end = time.process_time() + 0.06
            while time.process_time() <= end:
                pass

    monkeypatch.setattr(fuzzing, "SLOW_SECONDS", 0.05)
    for take in (raises, guarded, slow):
        assert len(fuzz(seeds, take, number=1, most=5000).failures) == MOST_FAILURES


def test_an_unknown_target_is_one_sentence() -> None:
    argv = [sys.executable, "-m", "tests.fuzz", "kernel"]
    done = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    )
    assert done.returncode == 2
    assert "there is no target kernel; there are: kernel-message, " in done.stderr
