"""Tests of `healthd fleet ettr`: the command, and the ETTR of runs in a store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet_history import BEGIN, END, History, row, write_parquet
from fleet_views import text_of

from healthd.common.page import Page
from healthd.fleet.answers.document import Unanswerable
from healthd.fleet.answers.study import open_study
from healthd.fleet.tables import TABLES
from tests.cli.test_fleet_command import fleet

pytestmark = pytest.mark.one_python

try:  # only .venv has scipy; the marked tests run nowhere else
    from healthd.fleet.answers import ettr
    from healthd.fleet.answers.document import head
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "scipy"):
        raise

HOUR = 3600
README_COMMAND = ("ettr", "--gpus", "16384", "--checkpoint", "60m", "--restart", "5m", "--rate", "6.5")


def test_readme_command_prints_documented_ettr():
    status, out, _ = fleet(*README_COMMAND)
    assert status == 0
    assert "ETTR 0.71" in out


def test_json_has_all_parameters():
    job_options = ("--gpus-per-node", "8", "--queue", "0", "--write", "0", "--productive", "30d", "--seed", "7")
    status, out, _ = fleet(*README_COMMAND, *job_options, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["parameters"] == {
        "gpus": 16384,
        "gpus_per_node": 8,
        "rate": 6.5,
        "checkpoint_seconds": 3600.0,
        "restart_seconds": 300.0,
        "queue_seconds": 0.0,
        "write_seconds": 0.0,
        "productive_seconds": 30 * 86400.0,
        "seed": 7,
    }
    assert found["analytic"] == pytest.approx(0.676, abs=0.001)
    assert found["approximate"] == pytest.approx(0.676, abs=0.001)
    assert abs(found["simulated"] - found["exact"]) < 5 * found["simulation"]["standard_error"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--gpus", value) for value in ("0", "-8", "1.5", "many", "1e9")),
        *(("--rate", value) for value in ("-1", "nan", "inf", "1e308", "10000000", "", "6,5")),
        *(("--checkpoint", value) for value in ("0", "60", "-5m", "nan", "200000d")),
        *(("--queue", value) for value in ("-1m", "5", "inf")),
        *(("--productive", value) for value in ("0", "0s")),
        ("--seed", "-1"),
    ],
)
def test_invalid_value_is_usage_error(flag, value):
    status, out, err = fleet("ettr", "--rate=6.5", f"{flag}={value}")
    assert (status, out) == (64, "")
    assert err.count("\n") == 1
    assert flag in err


def test_job_without_progress_warns():
    assert ettr.ettr_for_rate(2048, 6.5)["warnings"] == []
    assert ettr.ettr_for_rate(100_000, 6.5, checkpoint_seconds=420)["warnings"] == []
    beyond = ettr.ettr_for_rate(131_072, 200)
    assert len(beyond["warnings"]) == 1
    assert beyond["exact"] == pytest.approx(0, abs=0.01)
    assert "makes no progress" in text_of(beyond, Page()).replace("\n", " ")


@pytest.mark.parametrize(("gpus", "r_f", "low", "high"), [(16_384, 8.0, 7.22, 8.83), (100_000, 6.5, 5.5, 7.6)])
def test_headline_and_interval_agree_with_simulation(gpus: int, r_f: float, low: float, high: float) -> None:
    """At every rate within the interval of r_f, the simulated ETTR lies within the interval of the headline."""
    job = ettr.Job(gpus / 8, r_f)
    found = ettr.ettr_values(job, gpus, 8, ettr.SEED, (low, high))
    error = 5 * found["simulation"]["standard_error"]
    assert found["exact"] == pytest.approx(found["simulated"], abs=error)
    for rate in (low, r_f, high):
        simulated = ettr.ettr_for_rate(gpus, rate, seed=7)["simulated"]
        assert found["interval"][0] - error <= simulated <= found["interval"][1] + error
    text = text_of({**head("ettr", None, None, {}, ()), **found, "measured": []}, Page())
    assert f"ETTR {found['exact']:.2f} (95 %: {found['interval'][0]:.2f} to {found['interval'][1]:.2f})" in text


def test_grid_covers_checkpoints_and_rates():
    found = ettr.ettr_for_rate(16_384, 6.5)["grid"]
    hourly = [entry["ettr"] for entry in found["by_checkpoint"] if entry["checkpoint_seconds"] == 3600]
    assert hourly == sorted(hourly, reverse=True)
    assert {entry["rate"] for entry in found["by_rate"]} == set(ettr.GRID_RATES)


def add_run(made: History, key: str, attempts: list[tuple[float, float, str]], *, gpus: int = 256) -> None:
    """Add a run. Each attempt has queued hours, running hours and a state; they follow one another."""
    at = BEGIN
    for queued, ran, state in attempts:
        start = at + int(queued * HOUR)
        number = len(made["jobs"])
        times = {"submit_time": at, "eligible_time": at, "start_time": start, "end_time": start + int(ran * HOUR)}
        made["jobs"].append(
            row(
                "jobs",
                cluster="c1",
                db_index=number,
                job_id=number,
                run_key=key,
                state=state,
                gpus=gpus,
                nodes=gpus // 8,
                **times,
            )
        )
        at = start + int(ran * HOUR)


def ettr_of(made: History, folder: Path, **options: float) -> dict:
    with open_study(write_parquet(made, folder), BEGIN, END) as study:
        return ettr.ettr(study, **options)


def test_run_loses_starts_and_half_interval_per_interruption(tmp_path):
    made: History = {name: [] for name in TABLES}
    add_run(made, "long", [(1, 20, "NODE_FAIL"), (2, 0.25, "PREEMPTED"), (0, 10, "COMPLETED")])
    add_run(made, "short", [(0, 23, "COMPLETED")])
    found = ettr_of(made, tmp_path)
    (row_,) = found["measured"]
    # 20 h lose 5 + 30 min, 0.25 h lose all 15 min, 10 h lose 5 min; 30.25 h of running and 3 h in the queue.
    lost = (35 + 15 + 5) / 60
    assert (row_["gpus_up_to"], row_["runs"], row_["attempts"], row_["interruptions"]) == (256, 1, 3, 2)
    assert row_["mean"] == pytest.approx((30.25 - lost) / 33.25)
    assert row_["queue_seconds"] == pytest.approx(HOUR)
    assert 0 < row_["expected"] < 1
    assert found["rate_interval"][0] < found["parameters"]["rate"] < found["rate_interval"][1]
    assert found["interval"][0] <= found["exact"] <= found["interval"][1]
    assert "Measured: runs of 24 h" in text_of(found, Page())


def test_overlapping_jobs_of_one_name_are_left_out(tmp_path):
    made: History = {name: [] for name in TABLES}
    for _ in range(2):
        add_run(made, "family", [(0, 30, "COMPLETED")])
    found = ettr_of(made, tmp_path)
    assert (found["measured"], found["families"]) == ([], 1)
    assert any(note.startswith("1 run of 24 h") for note in found["notes"])


def test_rate_option_replaces_missing_large_jobs(tmp_path):
    made: History = {name: [] for name in TABLES}
    add_run(made, "small", [(0, 30, "COMPLETED")], gpus=8)
    with pytest.raises(Unanswerable, match="specify one with --rate"):
        ettr_of(made, tmp_path)
    found = ettr_of(made, tmp_path, r_f=6.5)
    assert (found["parameters"]["rate"], found["interval"]) == (6.5, None)
    assert found["measured"][0]["runs"] == 1


def test_run_ettr_is_productive_share_of_run():
    for lost in (0, 50, 100):
        run = ettr.JobRun("c1", 1, 8, 1, 1, 0, 100, 20, lost)
        assert ettr.run_ettr(run) == pytest.approx((100 - lost) / 120)


def test_store_without_failures_warns_about_lower_bound(tmp_path):
    made: History = {name: [] for name in TABLES}
    add_run(made, "long", [(1, 30, "COMPLETED")])
    found = ettr_of(made, tmp_path)
    assert found["parameters"]["rate"] == 0
    assert any("no failure occurred" in warning for warning in found["warnings"])
    assert not any("no failure occurred" in warning for warning in ettr_of(made, tmp_path, r_f=0.0)["warnings"])


def test_missing_interval_advice_is_explained():
    status, out, _ = fleet("ettr", "--rate", "6.5", "--write", "500d")
    assert status == 0
    assert "more than half the time" in " ".join(out.split())
    assert "Young's interval" not in out


def test_view_explains_simulated_mean_for_finite_job():
    short = text_of(ettr.ettr_for_rate(16_384, 6.5, productive_seconds=4 * HOUR), Page())
    assert ettr.RUN_MEAN_NOTE in " ".join(short.split())
    assert ettr.RUN_MEAN_NOTE not in " ".join(text_of(ettr.ettr_for_rate(16_384, 6.5), Page()).split())
