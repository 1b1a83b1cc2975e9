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

TROUBLE = ReconcileReport(DrainRecord(), problem="sinfo did not end in time")
SETTLED = ReconcileReport(DrainRecord(), settled=True)


@pytest.fixture
def driver() -> SlurmDriver:
    return SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)


def test_retries_back_off_to_five_minutes_and_begin_anew_after_a_success(driver: SlurmDriver) -> None:
    for _ in range(2):
        waits = [driver.retry_seconds(TROUBLE) for _ in range(12)]
        for number, wait in enumerate(waits):
            middle = min(FIRST_RETRY_SECONDS * 2**number, MAX_RETRY_SECONDS)
            assert 0.8 * middle <= wait <= 1.2 * middle
        assert driver.retry_seconds(SETTLED) == float("inf")


def test_a_thousand_nodes_do_not_come_back_in_the_same_second() -> None:
    def last_wait() -> float:
        driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)
        return [driver.retry_seconds(TROUBLE) for _ in range(8)][-1]

    seconds = [int(last_wait()) for _ in range(1000)]
    assert max(seconds.count(second) for second in set(seconds)) < 40  # within 120 s: 8 per second on average


def test_a_node_that_is_not_steady_is_looked_at_often_for_half_an_hour_after_the_start() -> None:
    now = [0.0]
    driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, lambda: now[0])
    unsettled = ReconcileReport(DrainRecord())
    assert max(driver.retry_seconds(unsettled) for _ in range(20)) <= 1.2 * BOOT_RETRY_SECONDS
    now[0] = BOOT_SECONDS
    assert driver.retry_seconds(unsettled) >= 0.8 * MAX_RETRY_SECONDS
    assert driver.retry_seconds(TROUBLE) >= 0.8 * MAX_RETRY_SECONDS


def test_when_slurmd_has_been_started_its_registration_is_waited_for_in_half_seconds() -> None:
    now = [0.0]
    driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, lambda: now[0])
    unsettled = ReconcileReport(DrainRecord())
    driver.expect_registration()
    assert driver.retry_seconds(unsettled) == REGISTRATION_RETRY_SECONDS
    assert driver.retry_seconds(TROUBLE) >= 0.8 * FIRST_RETRY_SECONDS, (
        "a Slurm that does not answer is not queried often"
    )
    assert driver.retry_seconds(SETTLED) == float("inf")
    now[0] = REGISTRATION_SECONDS
    assert driver.retry_seconds(unsettled) >= 0.8 * FIRST_RETRY_SECONDS


def test_a_mistake_with_what_slurm_said_is_slurms_trouble_and_the_next_look_goes_on(
    driver: SlurmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = DrainRecord(pending_reason="healthd: ...")

    def stumbles(*_: object) -> Iterator[SaveRecord]:
        yield SaveRecord(remembered)
        raise OverflowError("too many digits")

    with monkeypatch.context() as broken:
        broken.setattr("healthd.agent.slurm.driver.reconcile", stumbles)
        report = driver.start(Verdict(Health.HEALTHY), DrainRecord(), Policy())
    assert report is not None
    assert report.record == remembered, "the saved record is kept"
    assert report.problem == "healthd cannot process Slurm's output: OverflowError: too many digits"
    assert (driver.status.problem, driver.is_busy, dict(guard.dropped)) == (report.problem, False, {"slurm": 1})
    assert driver.retry_seconds(report) < MAX_RETRY_SECONDS
