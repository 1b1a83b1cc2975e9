"""A few trials of each kind of `make bench-repair`, with a real Slurm. Durations are reported, and fail no test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

from repairs.executor_kills import run_kills  # noqa: E402
from repairs.limit import measure_limit  # noqa: E402
from repairs.races import run_races  # noqa: E402
from repairs.reboot_races import run_reboot_races  # noqa: E402
from repairs.result import Result  # noqa: E402
from repairs.slurm_kills import run_slurm_kills  # noqa: E402
from repairs.times import measure_times  # noqa: E402

pytestmark = [pytest.mark.one_python, pytest.mark.timeout(1800)]
SEED = 7


def require_no_violation(result: Result) -> None:
    print("\n".join(result.rows()))
    assert result.violations == []


def test_each_reset_and_reboot_returns_its_node_to_service() -> None:
    result = measure_times(resets=2, reboots=1, seed=SEED)
    require_no_violation(result)
    assert sorted(map(len, result.seconds.values())) == [1, 2]


def test_operators_and_jobs_at_random_boundaries_lose_nothing() -> None:
    result = run_races(6, SEED, at_once=2)
    require_no_violation(result)
    assert result.counts["trials"] == 6


def test_operators_and_jobs_around_a_reboot_lose_nothing() -> None:
    result = run_reboot_races(3, SEED, at_once=1)
    require_no_violation(result)
    assert result.counts["trials"] == 3


def test_kills_with_fake_commands_repeat_no_step() -> None:
    result = run_kills(10, SEED)
    require_no_violation(result)
    assert result.counts["kills"] >= 10


def test_kills_with_slurm_repeat_no_step_and_harm_no_job() -> None:
    result = run_slurm_kills(4, SEED, at_once=2)
    require_no_violation(result)
    assert result.counts["kills"] > 0


def test_nodes_that_fail_together_keep_to_the_limit() -> None:
    result = measure_limit(nodes=3, max_concurrent=2, seed=SEED)
    require_no_violation(result)
    assert result.counts["resets"] == 3
