"""Tests of `judge`: who blocks a stuck job, on simulated jobs with a known answer."""

from __future__ import annotations

import stuck_jobs
from hypothesis import given
from hypothesis import strategies as st
from stuck_jobs import Job

from healthd.fleet.collectives import dump
from healthd.fleet.collectives.waits import Judgement, judge


def judged(dumps, gone=()) -> Judgement:
    views = []
    for rank, plain in dumps.items():
        if rank not in gone:
            view = dump.parse_dump(plain, f"dump_{rank}")
            view.rank = rank
            views.append(view)
    return judge(views)


def suspects(judgement: Judgement) -> list[int]:
    return [blame.rank for blame in judgement.suspects]


@st.composite
def jobs(draw, max_stops=1):
    """Return a job with groups as in tensor, data and pipeline parallel jobs: rows, columns, all, others."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    ranks = list(range(rows * columns))
    groups = [tuple(ranks)]
    groups += [tuple(ranks[at * columns : (at + 1) * columns]) for at in range(rows)]
    groups += [tuple(ranks[at::columns]) for at in range(columns) if rows > 1]
    odd = st.lists(st.sampled_from(ranks), min_size=2, unique=True).map(lambda members: tuple(sorted(members)))
    groups += draw(st.lists(odd, max_size=2))
    steps = st.tuples(st.integers(0, len(groups) - 1), st.integers(0, len(stuck_jobs.NAMES) - 1))
    program = draw(st.lists(steps, min_size=5, max_size=60))
    stopped = draw(st.lists(st.sampled_from(ranks), min_size=1, max_size=max_stops, unique=True))
    stops = {}
    for rank in stopped:
        own = sum(rank in groups[group] for group, _ in program)
        stops[rank] = draw(st.integers(0, own))
    return Job(groups, program, stops, draw(st.integers(1, 8)))


DUMP_OPTIONS = st.fixed_dictionaries(
    {"buffer": st.sampled_from([12, 30, 2000]), "only_waiting": st.booleans(), "status": st.booleans()}
)


@given(jobs(), DUMP_OPTIONS)
def test_stopped_rank_is_only_suspect_if_others_wait(job, options):
    state = stuck_jobs.simulate(job)
    judgement = judged(stuck_jobs.dumps(job, state, **options))
    waiting = stuck_jobs.waiting_ranks(job, state)
    if waiting:
        assert suspects(judgement) == list(job.stops)
        assert judgement.kind == "missing"
        assert judgement.blocked_ranks == len(waiting - set(job.stops))
    else:
        assert (judgement.kind, suspects(judgement)) == ("none", [])


@given(jobs(max_stops=3), DUMP_OPTIONS)
def test_waiting_rank_is_never_suspect(job, options):
    state = stuck_jobs.simulate(job)
    found = suspects(judged(stuck_jobs.dumps(job, state, **options)))
    assert set(found) <= set(job.stops)
    assert bool(found) == bool(stuck_jobs.waiting_ranks(job, state))


@given(jobs(), DUMP_OPTIONS)
def test_stopped_rank_is_suspect_without_its_dump(job, options):
    state = stuck_jobs.simulate(job)
    judgement = judged(stuck_jobs.dumps(job, state, **{**options, "status": False}), gone=set(job.stops))
    if stuck_jobs.waiting_ranks(job, state) - set(job.stops):
        assert suspects(judgement) == list(job.stops)
        assert judgement.ranks_without_view == tuple(job.stops)
        assert judgement.blocked_ranks == len(stuck_jobs.waiting_ranks(job, state) - set(job.stops))


@given(jobs(), DUMP_OPTIONS, st.data())
def test_rank_with_stopped_gpu_is_suspect(job, options, data):
    """Its program continues to enter collectives, but its GPU did not complete the last ones."""
    (rank,) = job.stops
    options["status"] = (
        options["status"] or options["only_waiting"]
    )  # PyTorch writes both; without them no rank's exit is known
    state = stuck_jobs.simulate(job)
    late = data.draw(st.integers(1, 3))
    shared = state.positions[rank][max(0, state.done[rank] - late) : state.done[rank]]
    if not shared or not any(len(job.groups[job.program[at][0]]) > 1 for at in shared):
        return
    found = suspects(judged(stuck_jobs.dumps(job, state, late={rank: late}, **options)))
    assert found == [rank]


@given(jobs(), DUMP_OPTIONS)
def test_judge_ignores_order_of_dumps(job, options):
    dumps = stuck_jobs.dumps(job, stuck_jobs.simulate(job), **options)
    forward, backward = judged(dumps), judged(dict(reversed(dumps.items())))
    assert (forward.kind, forward.suspects, forward.difference) == (
        backward.kind,
        backward.suspects,
        backward.difference,
    )
    assert [stall.key.sequence for stall in forward.stalls] == [stall.key.sequence for stall in backward.stalls]


@given(jobs())
def test_collective_entered_by_all_is_network(job):
    """All ranks enter the last collective of the job, in the group of all; it completes on none."""
    job.stops = {}
    job.program.append((0, 0))
    state = stuck_jobs.simulate(job)
    for rank in job.ranks:
        state.done[rank] -= 1
    judgement = judged(stuck_jobs.dumps(job, state))
    assert (judgement.kind, suspects(judgement)) == ("network", [])


@given(jobs(), st.data())
def test_rank_with_gpu_behind_is_suspect(job, data):
    """All programs entered the last collective; the GPU of one rank is in an earlier kernel."""
    job.stops = {}
    job.program.append((0, 0))
    state = stuck_jobs.simulate(job)
    for rank in job.ranks:
        state.done[rank] -= 1
    slow = data.draw(st.sampled_from(job.ranks))
    judgement = judged(stuck_jobs.dumps(job, state, started=set(job.ranks) - {slow}))
    assert [(blame.rank, blame.reason) for blame in judgement.suspects] == [(slow, "behind")]
    assert (judgement.kind, judgement.blocked_ranks) == ("missing", len(job.ranks) - 1)
    assert judged(stuck_jobs.dumps(job, state, started=job.ranks)).kind == "network"


@given(jobs(), st.data())
def test_different_collectives_are_mismatch(job, data):
    """One rank's last call has another collective, size or type than the job's."""
    job.stops = {}
    job.program.append((0, 0))
    state = stuck_jobs.simulate(job)
    for rank in job.ranks:
        state.done[rank] -= 1
    odd = data.draw(st.sampled_from(job.ranks))
    dumps = stuck_jobs.dumps(job, state)
    last = dumps[odd]["entries"][-1]
    last.update(
        data.draw(
            st.sampled_from(
                [
                    {"profiling_name": "nccl:_reduce_scatter_base"},
                    {"input_sizes": [[63, 1]], "output_sizes": [[63, 1]]},
                    {"input_dtypes": ["Float"], "output_dtypes": ["Float"]},
                ]
            )
        )
    )
    judgement = judged(dumps)
    assert (judgement.kind, suspects(judgement)) == ("mismatch", [])
    assert (odd,) in judgement.difference.descriptions.values()


@given(jobs(), st.sampled_from(range(len(stuck_jobs.NAMES))), st.data())
def test_different_type_is_mismatch_in_every_collective(job, kind, data):
    job.stops = {}
    job.program.append((0, kind))
    state = stuck_jobs.simulate(job)
    for rank in job.ranks:
        state.done[rank] -= 1
    odd = data.draw(st.sampled_from(job.ranks))
    dumps = stuck_jobs.dumps(job, state)
    dumps[odd]["entries"][-1].update(input_dtypes=["Float"], output_dtypes=["Float"])
    judgement = judged(dumps)
    assert judgement.kind == "mismatch"
    assert (odd,) in judgement.difference.descriptions.values()
