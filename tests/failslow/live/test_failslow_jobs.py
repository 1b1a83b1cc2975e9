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


class Gang:
    """Ranks of one job that wait for each other; their times have some reproducible noise."""

    def __init__(
        self, ranks: int = 8, live_settings: LiveSettings | None = None, sends_busy: bool = True, job: str = "4711"
    ) -> None:
        self.jobs = Jobs(live_settings or LiveSettings(), gpu_of)
        self.ranks, self.sends_busy, self.job = ranks, sends_busy, job
        self.now, self.at = 10_000.0, 0

    def step(self, count: int, slow: tuple[int, ...] = (), by: float = 1.5, all_by: float = 1.0) -> Gang:
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
                said = StepMessage(rank, rank, self.at, 1, length, busy, None)
                self.jobs.add_step(rank, 100 + rank, self.job, said, self.now)
        self.jobs.evaluate(False)
        return self

    @property
    def record(self):
        (job,) = self.jobs.records()
        return job


def test_the_gpu_of_a_rank_that_shows_none_is_looked_for_a_few_times_only():
    looks: list[int] = []

    def of_none(pid: int, job: str, local: int) -> str:
        looks.append(pid)
        return ""

    gang = Gang()
    gang.jobs = Jobs(LiveSettings(), of_none)
    gang.step(100)
    for _ in range(4 * MAX_GPU_LOOKUPS):
        gang.step(10, slow=(3,))
    assert (gang.record.slow, gang.record.rank, gang.record.suspect) == (True, "rank 3", "")
    assert looks == [103] * MAX_GPU_LOOKUPS


def test_a_job_that_is_as_ever_is_told_and_not_slow():
    told = Gang().step(200).record
    assert (told.ranks, told.source, told.slow, told.suspect, told.evidence) == (8, "client", False, "", ())


@pytest.mark.parametrize("by", [1.2, 1.5, 3.0])
def test_the_rank_that_works_longer_is_named_with_its_gpu(by):
    told = Gang().step(100).step(40, slow=(5,), by=by).record
    assert (told.slow, told.rank, told.suspect, told.cause) == (True, "rank 5", GPUS[5], "compute_gpu")
    assert told.slowdown == pytest.approx(0.4 * (by - 1) / 0.5, rel=0.15)
    assert told.since == pytest.approx(10_000.0 + 100 * 0.5, abs=5.0)


def test_what_it_cost_is_the_sum_over_all_ranks_that_waited():
    told = Gang().step(100).step(100, slow=(5,), by=1.5).record
    assert told.lost_seconds == pytest.approx(8 * 100 * 0.2, rel=0.05)


def test_it_is_over_once_its_steps_are_as_before_and_what_it_cost_stays():
    gang = Gang().step(100).step(40, slow=(5,))
    lost = gang.record.lost_seconds
    told = gang.step(60).record
    assert (told.slow, told.suspect, told.since) == (False, "", None)
    assert told.lost_seconds >= lost > 0


@pytest.mark.parametrize("sends_busy", [True, False])
def test_where_all_work_longer_nobody_is_named(sends_busy):
    told = Gang(sends_busy=sends_busy).step(100).step(40, all_by=1.5).record
    assert (told.slow, told.rank, told.suspect) == (True, "", "")


def test_without_busy_times_a_gang_names_nobody():
    told = Gang(sends_busy=False).step(100).step(40, slow=(5,)).record
    assert (told.slow, told.rank) == (True, "")


def test_fewer_than_four_ranks_name_nobody():
    assert Gang(3).step(100).step(40, slow=(1,)).record.rank == ""
    assert Gang(4).step(100).step(40, slow=(1,)).record.rank == "rank 1"


def test_half_of_the_ranks_are_no_minority():
    assert Gang(8).step(100).step(40, slow=(0, 1, 2, 3)).record.rank == ""
    told = Gang(8).step(100).step(40, slow=(1, 2)).record
    assert told.rank in ("rank 1", "rank 2")
    assert any("slower too" in sentence for sentence in told.evidence)


def test_a_slowness_that_comes_from_elsewhere_names_no_rank_of_this_node():
    """All ranks wait for another node, and their own busy times do not change."""
    gang = Gang().step(100)
    for _ in range(40):
        gang.at, gang.now = gang.at + 1, gang.now + 0.8
        for rank in range(8):
            gang.jobs.add_step(rank, rank, "4711", StepMessage(rank, rank, gang.at, 1, 0.8, 0.4, None), gang.now)
    gang.jobs.evaluate(False)
    assert (gang.record.slow, gang.record.rank) == (True, "")
    assert "another node" in gang.record.evidence[0]


def test_during_a_pause_nothing_new_is_told_and_what_was_told_ends_as_ever():
    gang = Gang().step(100).step(40, slow=(5,))
    other = Gang(job="8")
    other.jobs, other.now = gang.jobs, gang.now
    other.step(100)
    for _ in range(40):
        other.now += 1.0
        for rank in range(8):
            gang.jobs.add_step(100 + rank, rank, "8", StepMessage(rank, rank, 1, 1, 0.5, 0.4, None), other.now)
    gang.jobs.evaluate(True)
    assert {job.job: job.slow for job in gang.jobs.records()} == {"4711": True, "8": False}


def test_a_pause_hides_what_begins_in_it_until_it_is_over():
    gang = Gang().step(100)
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


def test_a_threshold_changes_for_jobs_that_run_without_what_they_have_shown_being_lost():
    gang = Gang(live_settings=LiveSettings(slow_percent=100.0)).step(100).step(60, slow=(5,), by=1.5)
    assert not gang.record.slow
    gang.jobs.reconfigure(LiveSettings(slow_percent=10.0))
    told = gang.step(20, slow=(5,), by=1.5).record
    assert (told.slow, told.rank) == (True, "rank 5")


def test_a_job_ends_with_its_last_rank_and_only_the_last_ones_are_kept():
    gang = Gang().step(100).step(40, slow=(5,))
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


def test_nobody_can_claim_to_have_lost_more_time_than_went_by():
    jobs = Jobs(LiveSettings(), gpu_of)
    for at in range(200):
        seconds = 1.0 if at < 100 else 100_000.0
        jobs.add_step(1, 1, "1", StepMessage(0, 0, at, 10**7, seconds, None, None), 1000.0 + at)
    jobs.evaluate(False)
    (told,) = jobs.records()
    assert told.slow
    assert told.lost_seconds <= 200 + 60


def test_counters_tell_that_a_job_is_slow_and_never_who():
    jobs = Jobs(LiveSettings(counters_percent=20.0), gpu_of)
    now = 1000.0
    for at in range(200):
        value = 1.0 if at < 120 else 1.5
        now += value
        jobs.add_sample(Sample("9", "ib", now, value, Kind.ITERATION))
    jobs.evaluate(False)
    (told,) = jobs.records()
    assert (told.source, told.slow, told.suspect, told.rank) == ("counters", True, "", "")
    assert told.evidence[0].startswith("ib: iterations take 50% longer")


def test_the_document_comes_back_as_it_was():
    gang = Gang().step(100).step(40, slow=(5,))
    told = LiveDocument(1.0, jobs=gang.jobs.records(), recent=tuple(gang.jobs.recent))
    assert parse(to_json(told)) == told


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
def test_any_times_are_judged_and_who_is_named_is_a_slow_minority(seen):
    found = evaluate_ranks(seen)
    assert found.slow == any(one.iteration.slow is not None for one in seen)
    if found.rank is not None:
        named = seen[found.rank]
        channel = named.busy if any(one.busy is not None and one.busy.ratio for one in seen) else named.iteration
        assert channel is not None
        assert channel.slow is not None
        assert len(seen) >= 4
        slow = [one for one in seen if (one.busy or one.iteration).slow is not None] if channel is named.busy else []
        assert 2 * len([one for one in slow if one.busy]) < len(seen)


@given(st.permutations(range(8)))
def test_the_order_of_the_ranks_changes_nothing(order):
    seen = list(Gang().step(60).step(30, slow=(5,)).jobs._jobs["4711", "client"].ranks.values())
    found = evaluate_ranks([seen[at] for at in order])
    assert found.rank is not None
    assert order[found.rank] == 5
