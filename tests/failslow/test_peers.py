"""Tests of `compare_peers`: the rank, node or group to blame for slowness, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gangs import ONSET, Fault, gang, judged, named, points_of, values_only, workers
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.groups import find_pools
from healthd.failslow.model import Confidence, Diagnosis, Evidence, Series
from healthd.failslow.peers import compare_peers

pytestmark = pytest.mark.one_python  # pure arithmetic that takes minutes

SIZES = (4, 8, 16, 64)
RANKS_OF_GROUPS = {rank: f"g{rank // 4}" for rank in range(32)}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("what", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("transfer", 1.5, "communication"), ("host", 0.4, "compute_cpu")],
)
def test_the_rank_whose_own_time_rose_is_named_and_what_rose_is_the_cause(
    ranks: int, what: str, by: float, cause: str
) -> None:
    found = judged(gang(ranks, [Fault(what, [1], by)]))
    assert named(found) == [("rank", "1", cause)]
    assert found.slow_jobs == ()
    assert all(found.points), "each rank of the gang is slow and keeps its point"


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("what", "by", "cause"),
    [("busy", 0.4, "imbalance"), ("transfer", 1.5, "communication"), ("host", 0.4, "imbalance")],
)
def test_what_rose_in_all_ranks_names_nobody(ranks: int, what: str, by: float, cause: str) -> None:
    found = judged(gang(ranks, [Fault(what, range(ranks), by)]))
    assert found.suspects == ()
    assert [(one.cause.value, len(one.series), one.peers) for one in found.slow_jobs] == [(cause, ranks, ranks)]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_a_gang_in_which_nothing_happens_is_silent(ranks: int, seed: int) -> None:
    found = judged(gang(ranks, cv=0.05, seed=seed))
    assert (named(found), found.slow_jobs) == ([], ())


def test_a_gang_of_which_only_iteration_times_are_known_names_nobody() -> None:
    found = judged(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert len(slow.series) == slow.peers == 16
    assert "equally slow" in slow.reason


def test_where_only_the_wait_is_known_who_waits_least_worked_longest() -> None:
    series = [replace(one, busy=None, transfer=None) for one in gang(8, [Fault("busy", [1], 0.4)])]
    assert named(judged(series)) == [("rank", "1", "compute")]


def test_fewer_than_four_peers_name_nobody() -> None:
    found = judged(gang(3, [Fault("busy", [1], 0.4)]))
    assert found.suspects == ()
    assert [one.reason for one in found.slow_jobs] == ["3 peers of one role are too few to find an outlier"]


def test_peers_of_another_group_do_not_count() -> None:
    groups = {rank: f"stage{rank // 2}" for rank in range(8)}
    assert named(judged(gang(8, [Fault("busy", [1], 0.4)], groups=groups))) == []


def test_half_of_a_role_is_no_minority() -> None:
    assert named(judged(gang(8, [Fault("busy", range(4), 0.4)]))) == []
    assert len(named(judged(gang(8, [Fault("busy", range(3), 0.4)])))) == 3


def test_two_culprits_are_both_named() -> None:
    faults = [Fault("busy", [1], 0.4), Fault("busy", [5], 0.5)]
    assert [subject for _, subject, _ in named(judged(gang(8, faults)))] == ["1", "5"]


def test_two_culprits_at_different_times_are_two_suspects() -> None:
    faults = [Fault("busy", [1], 0.4, 100, 150), Fault("transfer", [5], 2.0, 220, 270)]
    found = judged(gang(8, faults, samples=350))
    assert named(found) == [("rank", "1", "compute_gpu"), ("rank", "5", "communication")]
    assert [
        abs((one.point.onset_index if one.point else 0) - onset) <= 10
        for one, onset in zip(found.suspects, (100, 220), strict=True)
    ] == [True, True]


@pytest.mark.parametrize(
    ("what", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("transfer", 2.0, "communication_inter_node"), ("host", 0.4, "compute_cpu")],
)
def test_all_slow_ranks_on_one_node_are_the_node(what: str, by: float, cause: str) -> None:
    found = judged(gang(32, [Fault(what, range(8, 16), by)], per_node=8))
    assert named(found) == [("node", "gpu-1", cause)]
    assert found.suspects[0].series == tuple(sorted(str(rank) for rank in range(8, 16)))


def test_a_job_on_one_node_names_its_ranks() -> None:
    found = judged(gang(8, [Fault("busy", [1, 2], 0.4)], per_node=8))
    assert named(found) == [("rank", "1", "compute_gpu"), ("rank", "2", "compute_gpu")]


def test_the_link_of_a_rank_in_a_group_of_one_node_is_within_the_node() -> None:
    assert named(judged(gang(8, [Fault("transfer", [1], 2.0)], per_node=8))) == [
        ("rank", "1", "communication_intra_node")
    ]


@pytest.mark.parametrize(("per_node", "cause"), [(0, ""), (4, "_intra_node"), (2, "_inter_node")])
def test_a_group_that_transfers_long_is_the_group(per_node: int, cause: str) -> None:
    faults = [Fault("transfer", range(8, 12), 2.0)]
    found = judged(gang(32, faults, groups=RANKS_OF_GROUPS, per_node=per_node))
    assert named(found) == [("group", "g2", f"communication{cause}")]
    assert found.suspects[0].confidence is Confidence.HIGH


def test_of_three_groups_none_is_named() -> None:
    found = judged(gang(12, [Fault("transfer", range(4), 2.0)], groups=RANKS_OF_GROUPS))
    assert found.suspects == ()
    assert [one.cause.value for one in found.slow_jobs] == ["communication"]


def test_a_whole_stage_that_works_longer_is_the_jobs_imbalance() -> None:
    found = judged(gang(32, [Fault("busy", range(8, 12), 0.4)], groups=RANKS_OF_GROUPS))
    assert found.suspects == ()
    assert [(one.cause.value, one.reason) for one in found.slow_jobs] == [
        ("imbalance", "busy time rose in group g2: more work for all")
    ]


def stages(ranks: int) -> dict[int, str]:
    """Return groups of `ranks` ranks each, for 32 ranks."""
    return {rank: f"g{rank // ranks}" for rank in range(32)}


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_node_with_a_whole_stage_is_a_suspect_of_low_confidence(seed: int) -> None:
    faults = [Fault("busy", range(8, 16), 0.4)]
    found = judged(gang(32, faults, groups=stages(8), per_node=8, seed=seed))
    assert [(*named(found)[0], found.suspects[0].confidence)] == [("node", "gpu-1", "compute_gpu", Confidence.LOW)]
    assert found.slow_jobs == ()


def test_evidence_of_the_node_makes_a_node_with_a_whole_stage_surer() -> None:
    series = gang(32, [Fault("busy", range(8, 16), 0.4)], groups=stages(8), per_node=8)
    evidence = [Evidence("gpu-1", ONSET, None, "gpu_clocks/hw_thermal", "the clocks are held down")]
    (found,) = judged(series, evidence).suspects
    assert (found.subject, found.confidence) == ("gpu-1", Confidence.MEDIUM)


@pytest.mark.parametrize(
    ("what", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("host", 0.4, "compute_cpu"), ("transfer", 1.5, "communication_inter_node")],
)
def test_one_of_four_nodes_is_named_although_it_is_half_of_its_stage(what: str, by: float, cause: str) -> None:
    found = judged(gang(32, [Fault(what, range(8, 16), by)], groups=stages(16), per_node=8))
    assert named(found) == [("node", "gpu-1", cause)]
    assert found.suspects[0].confidence is Confidence.MEDIUM


@pytest.mark.parametrize(("by", "confidence"), [(0.15, Confidence.LOW), (0.3, Confidence.MEDIUM)])
def test_half_of_a_stage_is_of_medium_confidence_only_if_it_is_clearly_slow(by: float, confidence: Confidence) -> None:
    found = judged(gang(32, [Fault("busy", range(8, 16), by)], groups=stages(16), per_node=8))
    assert [(one.subject, one.confidence) for one in found.suspects] == [("gpu-1", confidence)]


@pytest.mark.parametrize(
    "faults",
    [
        [Fault("busy", range(8, 16), 0.3), Fault("busy", [*range(8), *range(16, 32)], -0.1)],
        [Fault("busy", range(32), 0.3)],
        [Fault("busy", range(16), 0.3)],
        [Fault("host", range(8), 0.4)],
    ],
    ids=["work moved to one stage", "more work for all", "two nodes", "the first stage loads data"],
)
def test_a_changed_work_names_no_node(faults: list[Fault]) -> None:
    found = judged(gang(32, faults, groups=stages(8), per_node=8))
    assert (named(found), [one.cause.value for one in found.slow_jobs]) == ([], ["imbalance"])


def test_a_stage_on_one_of_two_nodes_is_not_called_imbalance() -> None:
    found = judged(gang(16, [Fault("busy", range(8), 0.4)], groups=stages(8), per_node=8))
    assert (named(found), [one.cause.value for one in found.slow_jobs]) == ([], ["compute_gpu"])


def test_the_node_common_to_the_slow_groups_is_named() -> None:
    """Two of eight groups across nodes transfer slowly; they share only node gpu-9."""
    faults = [Fault("transfer", range(8), 2.0)]
    series = [
        replace(one, node="gpu-9" if at in (0, 4) else f"gpu-1{at}")
        for at, one in enumerate(gang(32, faults, groups=RANKS_OF_GROUPS))
    ]
    assert named(judged(series)) == [("node", "gpu-9", "communication_inter_node")]


def test_stages_of_different_levels_are_compared_each_with_itself() -> None:
    busy = [1.0] * 4 + [1.8] * 4 + [3.2] * 4 + [0.6] * 4
    assert named(judged(gang(16, busy=busy))) == []
    assert named(judged(gang(16, [Fault("busy", [9], 0.4)], busy=busy))) == [("rank", "9", "compute_gpu")]


def test_a_rank_that_has_slack_and_works_longer_is_named_with_low_confidence() -> None:
    found = judged(gang(16, [Fault("busy", [1], 0.5)], busy=[1.0] * 8 + [2.0] * 8))
    assert not any(found.points)
    assert named(found) == [("rank", "1", "compute_gpu")]
    assert found.suspects[0].confidence is Confidence.LOW
    assert "no iteration became slower: it has slack" in found.suspects[0].evidence


def test_a_longer_sequence_that_is_told_is_no_fault() -> None:
    series = [
        replace(one, regimes=["2048"] * ONSET + ["4096"] * ONSET) for one in gang(8, [Fault("busy", [1, 2], 0.4)])
    ]
    points = points_of(gang(8, [Fault("busy", [1, 2], 0.4)]))
    assert compare_peers(series, points).suspects == ()


def test_the_evidence_is_sentences_for_people() -> None:
    (suspect,) = judged(gang(16, [Fault("busy", [1], 0.4)], cv=0.001)).suspects
    assert suspect.evidence == ("busy 1.4 against 1 before; its 15 peers 1",)


# --- workers that do not wait for each other


def test_one_slow_worker_of_ten_is_named() -> None:
    found = judged(workers([1.0] * 10, {6: 0.65}))
    assert named(found) == [("worker", "6", "compute")]
    assert found.suspects[0].confidence is Confidence.HIGH
    assert [bool(points) for points in found.points] == [worker == 6 for worker in range(10)]


def test_a_slowness_that_itself_fluctuates_is_clear() -> None:
    slow = [700, 780, 860, 820, 430, 980, 560, 690, 560, 450, 510, 490, 600, 580]
    series = workers([420.0] * 10, {})
    value = list(series[6].value)
    value[ONSET : ONSET + len(slow)] = slow
    series[6] = replace(series[6], value=value)
    found = judged(series)
    assert named(found) == [("worker", "6", "compute")]
    assert found.suspects[0].confidence is Confidence.HIGH


def test_pauses_that_lie_close_together_make_a_suspect_of_low_confidence() -> None:
    series = workers([1.0] * 12, {})
    value = [one * (4 if ONSET <= at < ONSET + 30 and at % 10 < 7 else 1) for at, one in enumerate(series[6].value)]
    (suspect,) = judged([*series[:6], replace(series[6], value=value), *series[7:]]).suspects
    assert (suspect.subject, suspect.confidence) == ("6", Confidence.LOW)
    assert "of its samples as fast as before" in suspect.evidence[0]


def test_a_pause_of_all_at_the_onset_does_not_hide_who_is_slow() -> None:
    series = workers([1.0] * 10, {6: 0.65})
    paused = [
        replace(one, value=[value * (30 if at == ONSET + 2 else 1) for at, value in enumerate(one.value)])
        for one in series
    ]
    found = compare_peers(paused, points_of(series))
    assert named(found) == [("worker", "6", "compute")]
    assert found.points[6]
    assert found.slow_jobs == ()


def test_several_slow_workers_are_named_and_may_have_something_in_common() -> None:
    found = judged(workers([1.0] * 10, dict.fromkeys((6, 7, 8, 9), 0.4)))
    assert [subject for _, subject, _ in named(found)] == ["6", "7", "8", "9"]
    assert {one.confidence for one in found.suspects} == {Confidence.MEDIUM}


def test_a_worker_is_compared_with_those_of_its_level_at_rest() -> None:
    levels = [1.0] * 5 + [4.0] * 5
    assert named(judged(workers(levels, {6: 0.65}))) == [("worker", "6", "compute")]
    assert named(judged(workers(levels, {}))) == []


def test_a_role_that_steps_is_one_slow_job_instead_of_points() -> None:
    found = judged(workers([1.0] * 5 + [4.0] * 5, dict.fromkeys(range(5, 10), 0.3)))
    assert found.suspects == ()
    assert not any(found.points)
    assert [(one.series, one.peers) for one in found.slow_jobs] == [(("5", "6", "7", "8", "9"), 5)]


def test_where_all_step_each_keeps_its_point() -> None:
    found = judged(workers([1.0] * 10, dict.fromkeys(range(10), 0.3)))
    assert all(found.points)
    assert (named(found), len(found.slow_jobs)) == ([], 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_slow_worker_with_too_few_peers_is_a_slow_job(count: int) -> None:
    found = judged(workers([1.0] * count, {0: 0.5}))
    assert found.suspects == ()
    assert found.points[0]
    assert [one.series for one in found.slow_jobs] == [("0",)]


def test_a_worker_that_only_waits_longer_is_a_victim() -> None:
    series = workers([1.0] * 8, {2: 0.6})
    waiting = [
        replace(one, busy=[0.5] * 300, transfer=[0.1] * 300, wait=[value - 0.6 for value in one.value])
        for one in series
    ]
    found = judged(waiting)
    assert found.suspects == ()
    assert [(one.series, one.reason) for one in found.slow_jobs] == [
        (("2",), "neither its busy nor its transfer time rose: it waits for other ranks")
    ]


# --- evidence of nodes


def told(node: str, begin: float, end: float | None = None, code: str = "gpu_clocks/hw_thermal") -> Evidence:
    return Evidence(node, begin, end, code, "GPU 3 throttles for its temperature")


def on_nodes(series: Sequence[Series]) -> list[Series]:
    return [replace(one, node=f"gpu-{at // 4}") for at, one in enumerate(series)]


def test_a_node_that_told_what_slows_it_is_named_where_times_cannot() -> None:
    series = on_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    found = judged(series, [told("gpu-0", ONSET - 2)])
    assert named(found) == [("node", "gpu-0", "compute_gpu")]
    assert found.suspects[0].confidence is Confidence.MEDIUM
    assert found.suspects[0].evidence[0] == (
        "node gpu-0 reported GPU 3 throttles for its temperature (gpu_clocks/hw_thermal)"
    )


@pytest.mark.parametrize(
    "evidence",
    [
        [told("gpu-0", 20, 60)],
        [told("gpu-0", 280)],
        [told("elsewhere", ONSET)],
        [told(f"gpu-{node}", ONSET) for node in range(4)],
    ],
    ids=["ended before", "began later", "node outside the job", "all nodes"],
)
def test_a_node_is_not_named_by_what_does_not_single_it_out(evidence: list[Evidence]) -> None:
    series = on_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert named(judged(series, evidence)) == []


def test_what_stood_while_the_job_was_fast_is_low() -> None:
    series = on_nodes(values_only(gang(16, [Fault("busy", [1], 0.4, 250)], samples=400)))
    assert [one.confidence for one in judged(series, [told("gpu-0", -1000)]).suspects] == [Confidence.LOW]


def test_a_node_whose_ranks_show_that_they_are_well_is_not_named_by_evidence() -> None:
    series = on_nodes(gang(16, [Fault("busy", range(4, 16), 0.4)]))
    assert named(judged(series, [told("gpu-0", ONSET)])) == []


def test_agreeing_evidence_makes_a_suspect_surer() -> None:
    series = on_nodes(gang(4, [Fault("busy", [1], 0.4)]))
    alone, both = judged(series).suspects, judged(series, [told("gpu-0", ONSET)]).suspects
    assert [one.confidence for one in (*alone, *both)] == [Confidence.MEDIUM, Confidence.HIGH]
    assert len(both[0].evidence) == len(alone[0].evidence) + 1


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("gpu_nvlink/down", "communication_intra_node"),
        ("pcie_link/width", "communication_intra_node"),
        ("ib_errors/symbol_error", "communication_inter_node"),
        ("gpu_xid/63", "compute_gpu"),
        ("cpu/throttled", "compute_cpu"),
        ("something/else", "unknown"),
    ],
)
def test_the_code_says_what_it_slows(code: str, cause: str) -> None:
    series = on_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert named(judged(series, [told("gpu-0", ONSET, code=code)])) == [("node", "gpu-0", cause)]


# --- invariants

FAULTS = st.lists(
    st.builds(
        Fault,
        st.sampled_from(["busy", "transfer", "host"]),
        st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True),
        st.sampled_from([0.15, 0.4, 1.5]),
        st.sampled_from([100, 150, 200]),
    ),
    max_size=2,
)
MADE = st.one_of(
    st.builds(lambda faults, seed: gang(8, faults, cv=0.05, seed=seed), FAULTS, st.integers(0, 99)),
    st.builds(
        lambda slow, seed: workers([1.0] * 5 + [4.0] * 5, slow, seed=seed),
        st.dictionaries(st.integers(0, 9), st.sampled_from([0.2, 0.6])),
        st.integers(0, 99),
    ),
)
FEW = settings(max_examples=25, deadline=None)


def verdict(found: Diagnosis) -> tuple[object, ...]:
    return found.suspects, found.slow_jobs


@FEW
@given(MADE, st.randoms(use_true_random=False))
def test_to_permute_peers_changes_nothing(series: list[Series], chance: random.Random) -> None:
    order = list(range(len(series)))
    chance.shuffle(order)
    before, after = judged(series), judged([series[one] for one in order])
    assert verdict(after) == verdict(before)
    assert after.points == tuple(before.points[one] for one in order)


@FEW
@given(MADE, st.sampled_from([0.5, 4.0, 1024.0]), st.sampled_from([0.0, 4096.0]))
def test_to_scale_times_or_to_shift_the_index_changes_no_verdict(
    series: list[Series], scale: float, shift: float
) -> None:
    def scaled(one: Series) -> Series:
        busy, wait, transfer = (
            None if column is None else [value * scale for value in column]
            for column in (one.busy, one.wait, one.transfer)
        )
        return replace(
            one,
            value=[value * scale for value in one.value],
            index=[at + shift for at in one.index],
            busy=busy,
            wait=wait,
            transfer=transfer,
        )

    points = points_of(series)
    before, after = compare_peers(series, points), compare_peers([scaled(one) for one in series], points)
    assert [(one.subject, one.cause, one.confidence) for one in after.suspects] == [
        (one.subject, one.cause, one.confidence) for one in before.suspects
    ]
    assert [(one.onset - shift, one.series, one.cause) for one in after.slow_jobs] == [
        (one.onset, one.series, one.cause) for one in before.slow_jobs
    ]
    assert after.points == before.points


@FEW
@given(MADE, st.integers(1, 299))
def test_later_samples_take_no_point_away(series: list[Series], samples: int) -> None:
    def cut(column: Sequence[float] | None) -> Sequence[float] | None:
        return None if column is None else column[:samples]

    short = [
        replace(
            one,
            value=one.value[:samples],
            index=one.index[:samples],
            busy=cut(one.busy),
            wait=cut(one.wait),
            transfer=cut(one.transfer),
        )
        for one in series
    ]
    for before, after in zip(judged(short).points, judged(series).points, strict=True):
        assert {point.onset_index for point in before} <= {point.onset_index for point in after}


@pytest.mark.parametrize(("count", "who"), [(12, "its 11 peers"), (300, "the median of 60 of its 299 peers")])
def test_how_many_peers_were_compared_is_told_and_how_many_there_are(count: int, who: str) -> None:
    (suspect,) = judged(workers([1.0] * count, {7: 0.5})).suspects
    assert who in suspect.evidence[0]


# --- changes during a slowness


def stretches(judgement: Diagnosis) -> list[tuple[str, int, int | None]]:
    """Return (suspect, onset, relief) for each suspect, rounded to ten samples."""
    found = []
    for one in judgement.suspects:
        assert one.point is not None
        relief = one.point.relief_index
        found.append((one.subject, round(one.point.onset_index, -1), None if relief is None else round(relief, -1)))
    return found


@pytest.mark.parametrize("what", ["busy", "transfer", "host"])
def test_who_becomes_slow_while_another_is_slow_is_named_from_then_on(what: str) -> None:
    faults = [Fault("busy", [2], 0.3, 100), Fault(what, [6], 4.0 if what == "transfer" else 1.2, 200)]
    assert stretches(judged(gang(8, faults, samples=400))) == [("2", 100, None), ("6", 200, None)]


def test_who_recovers_while_another_is_slow_is_relieved_when_it_did() -> None:
    faults = [Fault("busy", [2], 0.4, 100, 160), Fault("busy", [5], 0.4, 160, 220)]
    assert stretches(judged(gang(8, faults, samples=400))) == [("2", 100, 160), ("5", 160, 220)]


def test_one_culprit_of_a_long_slowness_stays_the_only_one() -> None:
    for seed in range(8):
        found = judged(gang(16, [Fault("busy", [2], 0.4, 100)], samples=500, cv=0.05, seed=seed))
        assert {subject for _, subject, _ in named(found)} == {"2"}


@pytest.mark.parametrize(
    ("what", "by", "cause", "rose"),
    [
        ("busy", 0.5, "compute", "busy time rose"),
        ("host", 0.5, "compute_cpu", "the time that is neither busy, wait nor transfer rose"),
        ("transfer", 2.0, "communication_inter_node", "transfer time rose"),
    ],
)
def test_of_two_nodes_none_is_named_and_the_reason_says_which_was_slow(
    what: str, by: float, cause: str, rose: str
) -> None:
    found = judged(gang(8, [Fault(what, range(4), by)], per_node=4))
    assert found.suspects == ()
    assert [(one.cause.value, one.reason) for one in found.slow_jobs] == [
        (cause, f"{rose} on node gpu-0 (4 of 8 ranks): half is not a minority")
    ]


def test_more_than_half_of_a_role_without_nodes_is_counted() -> None:
    found = judged(gang(8, [Fault("busy", range(5), 0.5)]))
    assert [one.reason for one in found.slow_jobs] == ["busy time rose in 5 of 8 ranks: that is not a minority"]


def test_workers_that_become_slow_one_after_the_other_until_most_are_is_one_slow_job_from_the_first_on() -> None:
    noise = random.Random(1)
    series = [
        replace(one, value=[noise.gauss(1, 0.02) * (1 + 0.4 * (at >= ONSET + 4 * rank)) for at in range(300)])
        if rank < 5
        else one
        for rank, one in enumerate(workers([1.0] * 8, {}))
    ]
    found = judged(series)
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert (slow.series, slow.peers) == (("0", "1", "2", "3", "4"), 8)
    assert abs(slow.onset - ONSET) <= 10
    assert slow.reason == "5 of 8 peers became slower by 5 % or more at about the same time"


def test_who_becomes_worse_is_told_with_its_last_level_and_surer() -> None:
    series = workers([1.0] * 8, {2: 0.2}, samples=450)
    mild = judged(series).suspects
    value = [one * (2 if at >= ONSET + 100 else 1) for at, one in enumerate(series[2].value)]
    (worse,) = judged([*series[:2], replace(series[2], value=value), *series[3:]]).suspects
    assert [one.evidence for one in mild] == [(worse.evidence[0].rpartition(";")[0],)]
    assert worse.evidence[0].endswith("; 2.4 at the end")
    assert worse.confidence is Confidence.HIGH


def test_two_workers_that_often_vary_together_are_peers_of_the_others_and_no_gang() -> None:
    """Their load rises at the same time in three of four samples."""
    noise = random.Random(3)
    common = [noise.gauss(1, 0.02) for _ in range(300)]
    series = [
        replace(one, value=[load * noise.gauss(1, 0.018) for load in common]) if at in (0, 9) else one
        for at, one in enumerate(workers([1.0] * 10, {}))
    ]
    assert len(find_pools(series)) == 1
