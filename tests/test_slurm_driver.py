"""When Slurm is looked at again after trouble, and what a look may still change."""

from __future__ import annotations

import time

import pytest

from healthd.config import Settings
from healthd.model import SlurmMemory
from healthd.slurm import ReconcileReport
from healthd.slurm_driver import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, SlurmDriver

TROUBLE = ReconcileReport(SlurmMemory(), trouble="sinfo did not end in time")
SETTLED = ReconcileReport(SlurmMemory(), settled=True)


@pytest.fixture
def driver() -> SlurmDriver:
    return SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)


def test_retries_back_off_to_five_minutes_and_begin_anew_after_a_success(driver: SlurmDriver) -> None:
    for _ in range(2):
        waits = [driver.retry_seconds(TROUBLE) for _ in range(12)]
        for number, wait in enumerate(waits):
            middle = min(FIRST_RETRY_SECONDS * 2**number, LAST_RETRY_SECONDS)
            assert 0.8 * middle <= wait <= 1.2 * middle
        assert driver.retry_seconds(SETTLED) == float("inf")


def test_a_thousand_nodes_do_not_come_back_in_the_same_second() -> None:
    def last_wait() -> float:
        driver = SlurmDriver(Settings(), "b1", lambda memory: None, lambda: True, time.time, time.monotonic)
        return [driver.retry_seconds(TROUBLE) for _ in range(8)][-1]

    seconds = [int(last_wait()) for _ in range(1000)]
    assert max(seconds.count(second) for second in set(seconds)) < 40  # of 120 s: 8 each on average
