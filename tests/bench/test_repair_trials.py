"""The evaluation of `make bench-repair`: which mistakes of a repair it must detect."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.one_python

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.append(BENCH)

from repairs.executor_kills import run_trial  # noqa: E402
from repairs.limit import longest_over, most_at_once  # noqa: E402
from repairs.races import Acknowledged, Race  # noqa: E402
from repairs.result import Result  # noqa: E402
from repairs.trial import Job  # noqa: E402

from healthd.agent.repair import executor  # noqa: E402

SEED = 3


def made_race(folder: Path, action: str, reset: float, reading: float, job: tuple[float, float] | None = None) -> Race:
    """Return a race with an action that ended at 10, one reset, and the last reading of the node before the reset."""
    race = Race.__new__(Race)
    race.counts, race.folder, race.jobs = Counter(), folder, [Job("7", 0.0)] if job else []
    race.action, race.boundary, race.released = action, "before the step", 11.0
    race.action_result = Acknowledged(9.0, 10.0, is_effective=True)
    race.site = SimpleNamespace(reset_times=lambda: [reset], programs=folder)  # type: ignore[assignment]
    (folder / "commands").write_text(f"{reading} {reading + 0.1} 0 executor sinfo -h -a -n n1 -O PartitionName:128\n")
    (folder / "jobs").mkdir()
    if job:
        (folder / "jobs/7").write_text(f"{job[0]}\n{job[1]}\n")
    return race


@pytest.mark.parametrize(
    ("action", "reset", "reading", "job", "counted"),
    [
        ("drain", 11.0, 10.5, None, "resets in a drain of another owner"),
        ("drain", 11.0, 9.5, None, "actions between a reading and the command after it"),
        ("drain", 9.0, 8.0, None, ""),
        ("submit a job", 11.0, 10.5, (10.2, 12.0), "resets while a job ran"),
        ("submit a job", 11.0, 10.5, (10.7, 12.0), "actions between a reading and the command after it"),
        ("submit a job", 11.0, 10.5, (8.0, 10.0), ""),
        ("healthd pause", 11.5, 10.5, None, "resets during a stop or a pause"),
    ],
)
def test_race_detects_reset_at_wrong_time(
    tmp_path: Path, action: str, reset: float, reading: float, job: tuple[float, float] | None, counted: str
) -> None:
    race = made_race(tmp_path, action, reset, reading, job)
    problems = list(race.reset_problems())
    del race.counts["resets"]
    assert race.counts == (Counter([counted]) if counted else Counter())
    assert bool(problems) is counted.startswith("resets")


def test_kill_trial_detects_repeated_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor.os, "geteuid", lambda: 0)
    counts, violations = run_trial(SEED, 1)
    assert (counts["double actions"], violations) == (0, [])
    monkeypatch.setattr(executor, "tried_within_day", lambda *arguments: False)
    counts, violations = run_trial(SEED, 1)
    assert counts["double actions"] == 1
    assert violations


def test_most_at_once_counts_overlapping_steps() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0.0, 2.0), (1.0, 3.0), (2.5, 4.0)]) == 2


def test_longest_over_returns_longest_excess() -> None:
    history = [(0.0, 2), (0.1, 3), (0.2, 3), (0.4, 2), (0.5, 3), (0.6, 2)]
    assert longest_over(history, 2) == pytest.approx(0.3)
    assert longest_over(history, 3) == 0.0


def test_result_has_a_row_for_each_count_and_duration() -> None:
    result = Result("title", Counter(trials=3), {"reset": [1.0, 2.0, 9.0]})
    rows = list(result.rows())
    assert rows[0] == "title"
    assert [row.split()[0] for row in rows[1:]] == ["reset", "trials", "violations"]
