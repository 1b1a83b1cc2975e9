"""Tests of the driver: when Slurm is queried again after a failure, and what a failed reconciliation keeps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from healthd.agent.settings.config import Settings
from healthd.agent.slurm.driver import (
    BOOT_RETRY_SECONDS,
    BOOT_SECONDS,
    FIRST_RETRY_SECONDS,
    MAX_RETRY_SECONDS,
    REGISTRATION_RETRY_SECONDS,
    REGISTRATION_SECONDS,
    SlurmDriver,
)
from healthd.agent.slurm.policy import Policy
from healthd.agent.slurm.reconcile import ReconcileReport, SaveRecord
from healthd.common import guard
from healthd.common.model import DrainRecord, Health, Verdict

FAILED = ReconcileReport(DrainRecord(), problem="sinfo did not end in time")
SETTLED = ReconcileReport(DrainRecord(), settled=True)


@pytest.fixture
def driver() -> SlurmDriver:
    return SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)


def test_retry_seconds_backs_off_and_restarts_after_success(driver: SlurmDriver) -> None:
    for _ in range(2):
        waits = [driver.retry_seconds(FAILED) for _ in range(12)]
        for number, wait in enumerate(waits):
            expected = min(FIRST_RETRY_SECONDS * 2**number, MAX_RETRY_SECONDS)
            assert 0.8 * expected <= wait <= 1.2 * expected
        assert driver.retry_seconds(SETTLED) == float("inf")


def test_retry_seconds_spreads_nodes() -> None:
    def last_wait() -> float:
        driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)
        return [driver.retry_seconds(FAILED) for _ in range(8)][-1]

    seconds = [int(last_wait()) for _ in range(1000)]
    assert max(seconds.count(second) for second in set(seconds)) < 40  # within 120 s: 8 per second on average


def test_retry_seconds_is_short_after_boot() -> None:
    now = [0.0]
    driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, lambda: now[0])
    unsettled = ReconcileReport(DrainRecord())
    assert max(driver.retry_seconds(unsettled) for _ in range(20)) <= 1.2 * BOOT_RETRY_SECONDS
    now[0] = BOOT_SECONDS
    assert driver.retry_seconds(unsettled) >= 0.8 * MAX_RETRY_SECONDS
    assert driver.retry_seconds(FAILED) >= 0.8 * MAX_RETRY_SECONDS


def test_retry_seconds_is_short_while_slurmd_registers() -> None:
    now = [0.0]
    driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, lambda: now[0])
    unsettled = ReconcileReport(DrainRecord())
    driver.expect_registration()
    assert driver.retry_seconds(unsettled) == REGISTRATION_RETRY_SECONDS
    assert driver.retry_seconds(FAILED) >= 0.8 * FIRST_RETRY_SECONDS, (
        "a Slurm that does not answer is not queried often"
    )
    assert driver.retry_seconds(SETTLED) == float("inf")
    now[0] = REGISTRATION_SECONDS
    assert driver.retry_seconds(unsettled) >= 0.8 * FIRST_RETRY_SECONDS


def test_error_in_slurm_output_is_reported_and_retried(driver: SlurmDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_record = DrainRecord(pending_reason="healthd: ...")

    def fail_after_save(*_: object) -> Iterator[SaveRecord]:
        yield SaveRecord(saved_record)
        raise OverflowError("too many digits")

    with monkeypatch.context() as broken:
        broken.setattr("healthd.agent.slurm.driver.reconcile", fail_after_save)
        report = driver.start(Verdict(Health.HEALTHY), DrainRecord(), Policy())
    assert report is not None
    assert report.record == saved_record, "the saved record is kept"
    assert report.problem == "healthd cannot process Slurm's output: OverflowError: too many digits"
    assert (driver.status.problem, driver.is_busy, dict(guard.dropped)) == (report.problem, False, {"slurm": 1})
    assert driver.retry_seconds(report) < MAX_RETRY_SECONDS
