"""Tests of the time that monitored jobs of a node lost, also after their end."""

from __future__ import annotations

import pytest

from healthd.failslow.live.datagram import StepMessage
from healthd.failslow.live.jobs import Jobs
from healthd.failslow.live.series import Sample
from healthd.failslow.live.settings import LiveSettings


def add_steps(jobs: Jobs, connection: int, seconds: float, count: int, at: float) -> float:
    for _ in range(count):
        at += seconds
        jobs.add_step(connection, 100 + connection, "4711", StepMessage(0, 0, 1, 1, seconds, None, None), at)
    return at


def test_lost_seconds_sum_over_jobs_and_outlive_them() -> None:
    jobs = Jobs(LiveSettings(client=True), lambda pid, job, local: "")
    at = add_steps(jobs, 1, 1.0, 100, 1e9)
    jobs.evaluate(False)
    assert jobs.lost_seconds().client == 0.0
    at = add_steps(jobs, 1, 1.5, 100, at)
    jobs.evaluate(False)
    slow = jobs.lost_seconds().client
    assert 40.0 < slow <= 55.0
    assert jobs.lost_seconds().counters == 0.0
    jobs.remove_connection(1, "4711", at)
    assert jobs.lost_seconds().client == slow
    at = add_steps(jobs, 2, 1.0, 100, at)
    jobs.evaluate(False)
    assert jobs.lost_seconds().client == slow


def test_pause_hides_slowness_but_counts_loss() -> None:
    jobs = Jobs(LiveSettings(client=True), lambda pid, job, local: "")
    at = add_steps(jobs, 1, 1.0, 100, 1e9)
    add_steps(jobs, 1, 1.5, 100, at)
    jobs.evaluate(True)
    assert not any(job.slow for job in jobs.records())
    assert jobs.lost_seconds().client > 40.0
    jobs.evaluate(False)
    assert [job.slow for job in jobs.records()] == [True]


def add_samples(jobs: Jobs, seconds: float, count: int, at: float, series: str = "ib") -> float:
    for _ in range(count):
        at += 10 * seconds
        jobs.add_sample(Sample("4711", series, at, seconds, steps=10))
    return at


def test_loss_of_several_counters_counts_once() -> None:
    jobs = Jobs(LiveSettings(sample=("ib", "nvlink")), lambda pid, job, local: "")
    for series in ("ib", "nvlink"):
        at = add_samples(jobs, 2.0, 60, 1e9, series)
        at = add_samples(jobs, 3.0, 40, at, series)
    jobs.evaluate(False)
    (job,) = jobs.records()
    assert job.slow
    assert (job.source, job.ranks) == ("counters", 1)  # the loss is not divided by ranks
    assert job.slowdown == pytest.approx(0.5, rel=0.05)
    assert 40 * 10 * 0.8 <= job.lost_seconds <= 40 * 10 * 1.05  # each sample covers ten iterations


def test_job_ends_without_samples_except_in_pause() -> None:
    jobs = Jobs(LiveSettings(sample=("ib",)), lambda pid, job, local: "")
    at = add_samples(jobs, 2.0, 60, 1e9)
    assert not jobs.end_quiet_jobs(at + 600, "4711")
    assert jobs.end_quiet_jobs(at, "4712")
    assert not jobs.has_jobs


def test_silent_job_ends_after_one_hour() -> None:
    jobs = Jobs(LiveSettings(sample=("ib",)), lambda pid, job, local: "")
    at = add_samples(jobs, 2.0, 60, 1e9)
    assert jobs.end_quiet_jobs(at + 3600, "4711")


def test_add_sample_reports_new_job_and_evaluate_reports_changes() -> None:
    jobs = Jobs(LiveSettings(sample=("ib",)), lambda pid, job, local: "")
    assert jobs.add_sample(Sample("4711", "ib", 1e9, 2.0))
    assert not jobs.add_sample(Sample("4711", "ib", 1e9 + 2, 2.0))
    assert not jobs.evaluate(False)
    at = add_samples(jobs, 2.0, 60, 1e9)
    at = add_samples(jobs, 3.0, 40, at)
    assert jobs.evaluate(False)
    assert not jobs.evaluate(False)
    jobs.end_quiet_jobs(at, "")
    assert jobs.evaluate(False)  # the job ended while it was slow
