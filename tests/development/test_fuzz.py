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
from tests.fuzz.run import MAX_FAILURES, fuzz
from tests.fuzz.targets import TARGETS, make_target

INPUTS = 400
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_cause_no_failure(name: str) -> None:
    seeds, take = make_target(name)
    outcome = fuzz(seeds, take, seed=20261122, max_inputs=max(20, INPUTS // TARGETS[name].cost))
    assert not outcome.failures, f"{outcome.failures[0][1]}\nthe input: {outcome.failures[0][0]!r:.500}"


@pytest.mark.parametrize("name", TARGETS)
def test_valid_input_is_accepted(name: str) -> None:
    seeds, take = make_target(name)
    assert seeds
    take(seeds[0])


def test_inputs_depend_on_seed_only() -> None:
    seeds, _ = make_target("kernel-message")
    first, again, different = ([inputs(seeds, random.Random(number)) for _ in range(3)] for number in (1, 1, 2))
    assert first == again != different
    assert max(len(inputs(seeds, random.Random(number))) for number in range(300)) <= MAX_BYTES


def test_fuzz_finds_guarded_raising_and_slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [b"name=12 other=34"]

    def raise_on_zero(data: bytes) -> None:
        assert b"\x00" not in data

    @guard.never_raises(guard.KERNEL_LOG)
    def fail_in_guard(data: bytes) -> int:
        return int(data.partition(b"=")[2].partition(b" ")[0] or 0)

    def call_guarded(data: bytes) -> None:
        fail_in_guard(data)
        assert not guard.dropped

    def be_slow(data: bytes) -> None:
        if len(data) > MAX_BYTES // 2:
            end = time.process_time() + 0.06
            while time.process_time() <= end:
                pass

    monkeypatch.setattr(fuzzing, "SLOW_SECONDS", 0.05)
    for target in (raise_on_zero, call_guarded, be_slow):
        assert len(fuzz(seeds, target, seed=1, max_inputs=5000).failures) == MAX_FAILURES


def test_unknown_target_is_one_sentence() -> None:
    argv = [sys.executable, "-m", "tests.fuzz", "kernel"]
    result = subprocess.run(
        argv, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    )
    assert result.returncode == 2
    assert "there is no target kernel; there are: kernel-message, " in result.stderr
