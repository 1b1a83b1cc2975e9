"""Tests of jobs that send their steps: which are slow, since when, the cost, and the rank to blame."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.live.datagram import StepMessage
from healthd.failslow.live.document import MAX_RECENT, LiveDocument, parse, to_json
from healthd.failslow.live.jobs import MAX_GPU_LOOKUPS, Jobs, evaluate_ranks
from healthd.failslow.live.series import Sample
from healthd.failslow.live.settings import LiveSettings
from healthd.failslow.model import Kind, Point

GPUS = [f"0000:{number:02x}:00.0" for number in range(16)]


def gpu_of(pid: int, job: str, local: int) -> str:
    return GPUS[local] if 0 <= local < len(GPUS) else ""


class SimulatedGang:
    """Ranks of one job that wait for each other; their times have some reproducible noise."""

    def __init__(
        self, ranks: int = 8, live_settings: LiveSettings | None = None, sends_busy: bool = True, job: str = "4711"
    ) -> None:
        self.jobs = Jobs(live_settings or LiveSettings(), gpu_of)
        self.ranks, self.sends_busy, self.job = ranks, sends_busy, job
        self.now, self.at = 10_000.0, 0

    def step(self, count: int, slow: tuple[int, ...] = (), by: float = 1.5, all_by: float = 1.0) -> SimulatedGang:
        for _ in range(count):
            self.at += 1
            work = [
                0.4 * all_by * (by if rank in slow else 1.0) * (1 + 0.004 * ((self.at * 7 + rank * 3) % 5))
                for rank in range(self.ranks)
            ]
            length = max(work) + 0.1
            self.now += length
            for rank in range(self.ranks):
                busy = work[rank] if self.sends_busy else None
                message = StepMessage(rank, rank, self.at, 1, length, busy, None)
                self.jobs.add_step(rank, 100 + rank, self.job, message, self.now)
        self.jobs.evaluate(False)
        return self

    @property
    def record(self):
        (job,) = self.jobs.records()
        return job


def test_gpu_lookup_of_rank_is_limited():
    looked_up_pids: list[int] = []

    def find_no_gpu(pid: int, job: str, local: int) -> str:
        looked_up_pids.append(pid)
        return ""

    gang = SimulatedGang()
    gang.jobs = Jobs(LiveSettings(), find_no_gpu)
    gang.step(100)
    for _ in range(4 * MAX_GPU_LOOKUPS):
        gang.step(10, slow=(3,))
    assert (gang.record.slow, gang.record.rank, gang.record.suspect) == (True, "rank 3", "")
    assert looked_up_pids == [103] * MAX_GPU_LOOKUPS


def test_steady_job_is_recorded_and_not_slow():
    record = SimulatedGang().step(200).record
    assert (record.ranks, record.source, record.slow, record.suspect, record.evidence) == (8, "client", False, "", ())


@pytest.mark.parametrize("by", [1.2, 1.5, 3.0])
def test_slower_rank_is_named_with_gpu(by):
    record = SimulatedGang().step(100).step(40, slow=(5,), by=by).record
    assert (record.slow, record.rank, record.suspect, record.cause) == (True, "rank 5", GPUS[5], "compute_gpu")
    assert record.slowdown == pytest.approx(0.4 * (by - 1) / 0.5, rel=0.15)
    assert record.since == pytest.approx(10_000.0 + 100 * 0.5, abs=5.0)


def test_lost_seconds_sum_over_all_waiting_ranks():
    record = SimulatedGang().step(100).step(100, slow=(5,), by=1.5).record
    assert record.lost_seconds == pytest.approx(8 * 100 * 0.2, rel=0.05)


def test_relief_ends_slowness_and_keeps_loss():
    gang = SimulatedGang().step(100).step(40, slow=(5,))
    lost = gang.record.lost_seconds
    record = gang.step(60).record
    assert (record.slow, record.suspect, record.since) == (False, "", None)
    assert record.lost_seconds >= lost > 0


@pytest.mark.parametrize("sends_busy", [True, False])
def test_no_rank_is_named_if_all_are_slower(sends_busy):
    record = SimulatedGang(sends_busy=sends_busy).step(100).step(40, all_by=1.5).record
    assert (record.slow, record.rank, record.suspect) == (True, "", "")


def test_no_rank_is_named_without_busy_times():
    record = SimulatedGang(sends_busy=False).step(100).step(40, slow=(5,)).record
    assert (record.slow, record.rank) == (True, "")


def test_no_rank_is_named_below_four_ranks():
    assert SimulatedGang(3).step(100).step(40, slow=(1,)).record.rank == ""
    assert SimulatedGang(4).step(100).step(40, slow=(1,)).record.rank == "rank 1"


def test_half_of_ranks_is_no_minority():
    assert SimulatedGang(8).step(100).step(40, slow=(0, 1, 2, 3)).record.rank == ""
    record = SimulatedGang(8).step(100).step(40, slow=(1, 2)).record
    assert record.rank in ("rank 1", "rank 2")
    assert any("also slower" in sentence for sentence in record.evidence)


def test_no_rank_is_named_if_other_node_is_slow():
    """All ranks wait for another node, and their own busy times do not change."""
    gang = SimulatedGang().step(100)
    for _ in range(40):
        gang.at, gang.now = gang.at + 1, gang.now + 0.8
        for rank in range(8):
            gang.jobs.add_step(rank, rank, "4711", StepMessage(rank, rank, gang.at, 1, 0.8, 0.4, None), gang.now)
    gang.jobs.evaluate(False)
    assert (gang.record.slow, gang.record.rank) == (True, "")
    assert "another node" in gang.record.evidence[0]


def test_pause_keeps_open_slowness_and_starts_no_new():
    gang = SimulatedGang().step(100).step(40, slow=(5,))
    other_job = SimulatedGang(job="8")
    other_job.jobs, other_job.now = gang.jobs, gang.now
    other_job.step(100)
    for _ in range(40):
        other_job.now += 1.0
        for rank in range(8):
            gang.jobs.add_step(100 + rank, rank, "8", StepMessage(rank, rank, 1, 1, 0.5, 0.4, None), other_job.now)
    gang.jobs.evaluate(True)
    assert {job.job: job.slow for job in gang.jobs.records()} == {"4711": True, "8": False}


def test_pause_hides_new_slowness_until_its_end():
    gang = SimulatedGang().step(100)
    gang.step(0)
    jobs = gang.jobs
    for _ in range(40):
        gang.now += 0.8
        for rank in range(8):
            jobs.add_step(
                rank, rank, "4711", StepMessage(rank, rank, 1, 1, 0.8, 0.7 if rank == 5 else 0.4, None), gang.now
            )
    assert not jobs.evaluate(True)
    assert not gang.record.slow
    assert jobs.evaluate(False)
    assert gang.record.rank == "rank 5"


def test_changed_threshold_keeps_history_of_running_jobs():
    gang = SimulatedGang(live_settings=LiveSettings(slow_percent=100.0)).step(100).step(60, slow=(5,), by=1.5)
    assert not gang.record.slow
    gang.jobs.reconfigure(LiveSettings(slow_percent=10.0))
    record = gang.step(20, slow=(5,), by=1.5).record
    assert (record.slow, record.rank) == (True, "rank 5")


def test_job_ends_with_last_rank_and_recent_jobs_are_limited():
    gang = SimulatedGang().step(100).step(40, slow=(5,))
    lost = gang.record.lost_seconds
    for rank in range(8):
        gang.jobs.remove_connection(rank, "4711", 20_000.0)
    assert gang.jobs.records() == ()
    (ended,) = gang.jobs.recent
    assert (ended.job, ended.ended, ended.slow) == ("4711", 20_000.0, True)
    assert ended.lost_seconds == pytest.approx(lost)
    for number in range(3 * MAX_RECENT):
        gang.jobs.add_step(1000 + number, 1, str(number), StepMessage(0, 0, 1, 1, 0.5, None, None), 20_000.0)
        gang.jobs.remove_connection(1000 + number, str(number), 20_000.0)
    assert len(gang.jobs.recent) == MAX_RECENT


def test_lost_time_is_limited_to_elapsed_time():
    jobs = Jobs(LiveSettings(), gpu_of)
    for at in range(200):
        seconds = 1.0 if at < 100 else 100_000.0
        jobs.add_step(1, 1, "1", StepMessage(0, 0, at, 10**7, seconds, None, None), 1000.0 + at)
    jobs.evaluate(False)
    (record,) = jobs.records()
    assert record.slow
    assert record.lost_seconds <= 200 + 60


def test_counters_mark_job_slow_without_rank():
    jobs = Jobs(LiveSettings(counters_percent=20.0), gpu_of)
    now = 1000.0
    for at in range(200):
        value = 1.0 if at < 120 else 1.5
        now += value
        jobs.add_sample(Sample("9", "ib", now, value, Kind.ITERATION))
    jobs.evaluate(False)
    (record,) = jobs.records()
    assert (record.source, record.slow, record.suspect, record.rank) == ("counters", True, "", "")
    assert record.evidence[0].startswith("ib: ")
    assert " 50% " in record.evidence[0]


def test_document_round_trips():
    gang = SimulatedGang().step(100).step(40, slow=(5,))
    record = LiveDocument(1.0, jobs=gang.jobs.records(), recent=tuple(gang.jobs.recent))
    assert parse(to_json(record)) == record


# --- evaluation of any times

points = st.builds(Point, st.just(0), st.just(9), st.floats(0.1, 50), st.just(0.9))
channels = st.builds(
    lambda slow, healthy, ratio: SimpleNamespace(slow=slow, since=slow and 1.0, healthy=healthy, ratio=ratio),
    st.none() | points,
    st.floats(0, 1e6),
    st.none() | st.floats(1e-6, 1e6),
)
ranks = st.lists(
    st.builds(SimpleNamespace, name=st.text(max_size=3), iteration=channels, busy=st.none() | channels), max_size=12
)


@settings(max_examples=300)
@given(ranks)
def test_evaluate_ranks_names_only_slow_minority(job_ranks):
    found = evaluate_ranks(job_ranks)
    assert found.slow == any(rank.iteration.slow is not None for rank in job_ranks)
    if found.rank is not None:
        named = job_ranks[found.rank]
        channel = (
            named.busy if any(rank.busy is not None and rank.busy.ratio for rank in job_ranks) else named.iteration
        )
        assert channel is not None
        assert channel.slow is not None
        assert len(job_ranks) >= 4
        slow = (
            [rank for rank in job_ranks if (rank.busy or rank.iteration).slow is not None]
            if channel is named.busy
            else []
        )
        assert 2 * len([rank for rank in slow if rank.busy]) < len(job_ranks)


@given(st.permutations(range(8)))
def test_evaluate_ranks_ignores_order_of_ranks(order):
    job_ranks = list(SimulatedGang().step(60).step(30, slow=(5,)).jobs._jobs["4711", "client"].ranks.values())
    found = evaluate_ranks([job_ranks[at] for at in order])
    assert found.rank is not None
    assert order[found.rank] == 5
