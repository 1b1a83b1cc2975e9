"""Tests of `compare_peers`: the rank, node or group to blame for slowness, or none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from gangs import ONSET, Fault, diagnose, gang, points_of, suspects_of, values_only, workers
from hypothesis import given, settings
from hypothesis import strategies as st

from healthd.failslow.groups import find_pools
from healthd.failslow.model import Confidence, Diagnosis, Evidence, Series
from healthd.failslow.peers import compare_peers

pytestmark = pytest.mark.one_python  # pure arithmetic that takes minutes

SIZES = (4, 8, 16, 64)
GROUP_OF_RANK = {rank: f"g{rank // 4}" for rank in range(32)}


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("component", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("transfer", 1.5, "communication"), ("host", 0.4, "compute_cpu")],
)
def test_rank_with_longer_own_time_is_named_with_cause(ranks: int, component: str, by: float, cause: str) -> None:
    found = diagnose(gang(ranks, [Fault(component, [1], by)]))
    assert suspects_of(found) == [("rank", "1", cause)]
    assert found.slow_jobs == ()
    assert all(found.points), "each rank of the gang is slow and keeps its point"


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    ("component", "by", "cause"),
    [("busy", 0.4, "imbalance"), ("transfer", 1.5, "communication"), ("host", 0.4, "imbalance")],
)
def test_equal_rise_in_all_ranks_names_no_rank(ranks: int, component: str, by: float, cause: str) -> None:
    found = diagnose(gang(ranks, [Fault(component, range(ranks), by)]))
    assert found.suspects == ()
    assert [(entry.cause.value, len(entry.series), entry.peers) for entry in found.slow_jobs] == [(cause, ranks, ranks)]


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_healthy_gang_has_no_findings(ranks: int, seed: int) -> None:
    found = diagnose(gang(ranks, cv=0.05, seed=seed))
    assert (suspects_of(found), found.slow_jobs) == ([], ())


def test_gang_with_only_iteration_times_names_no_rank() -> None:
    found = diagnose(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert len(slow.series) == slow.peers == 16
    assert "equally slow" in slow.reason


def test_rank_with_shortest_wait_is_named() -> None:
    series = [replace(entry, busy=None, transfer=None) for entry in gang(8, [Fault("busy", [1], 0.4)])]
    assert suspects_of(diagnose(series)) == [("rank", "1", "compute")]


def test_fewer_than_four_peers_name_no_rank() -> None:
    found = diagnose(gang(3, [Fault("busy", [1], 0.4)]))
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert slow.reason.startswith("3 peers ")


def test_peers_of_other_group_do_not_count() -> None:
    groups = {rank: f"stage{rank // 2}" for rank in range(8)}
    assert suspects_of(diagnose(gang(8, [Fault("busy", [1], 0.4)], groups=groups))) == []


def test_half_of_role_is_no_minority() -> None:
    assert suspects_of(diagnose(gang(8, [Fault("busy", range(4), 0.4)]))) == []
    assert len(suspects_of(diagnose(gang(8, [Fault("busy", range(3), 0.4)])))) == 3


def test_two_faults_name_two_ranks() -> None:
    faults = [Fault("busy", [1], 0.4), Fault("busy", [5], 0.5)]
    assert [subject for _, subject, _ in suspects_of(diagnose(gang(8, faults)))] == ["1", "5"]


def test_faults_at_different_times_are_two_suspects() -> None:
    faults = [Fault("busy", [1], 0.4, 100, 150), Fault("transfer", [5], 2.0, 220, 270)]
    found = diagnose(gang(8, faults, samples=350))
    assert suspects_of(found) == [("rank", "1", "compute_gpu"), ("rank", "5", "communication")]
    assert [
        abs((entry.point.onset_index if entry.point else 0) - onset) <= 10
        for entry, onset in zip(found.suspects, (100, 220), strict=True)
    ] == [True, True]


@pytest.mark.parametrize(
    ("component", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("transfer", 2.0, "communication_inter_node"), ("host", 0.4, "compute_cpu")],
)
def test_slow_ranks_of_one_node_are_reported_as_node(component: str, by: float, cause: str) -> None:
    found = diagnose(gang(32, [Fault(component, range(8, 16), by)], per_node=8))
    assert suspects_of(found) == [("node", "gpu-1", cause)]
    assert found.suspects[0].series == tuple(sorted(str(rank) for rank in range(8, 16)))


def test_job_on_one_node_names_ranks() -> None:
    found = diagnose(gang(8, [Fault("busy", [1, 2], 0.4)], per_node=8))
    assert suspects_of(found) == [("rank", "1", "compute_gpu"), ("rank", "2", "compute_gpu")]


def test_transfer_in_group_on_one_node_is_intra_node() -> None:
    assert suspects_of(diagnose(gang(8, [Fault("transfer", [1], 2.0)], per_node=8))) == [
        ("rank", "1", "communication_intra_node")
    ]


@pytest.mark.parametrize(("per_node", "cause"), [(0, ""), (4, "_intra_node"), (2, "_inter_node")])
def test_group_with_long_transfer_is_named(per_node: int, cause: str) -> None:
    faults = [Fault("transfer", range(8, 12), 2.0)]
    found = diagnose(gang(32, faults, groups=GROUP_OF_RANK, per_node=per_node))
    assert suspects_of(found) == [("group", "g2", f"communication{cause}")]
    assert found.suspects[0].confidence is Confidence.HIGH


def test_no_group_of_three_is_named() -> None:
    found = diagnose(gang(12, [Fault("transfer", range(4), 2.0)], groups=GROUP_OF_RANK))
    assert found.suspects == ()
    assert [entry.cause.value for entry in found.slow_jobs] == ["communication"]


def test_slow_stage_is_imbalance_of_job() -> None:
    found = diagnose(gang(32, [Fault("busy", range(8, 12), 0.4)], groups=GROUP_OF_RANK))
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert (slow.cause.value, slow.reason.partition(",")[0].rpartition(" ")[2]) == ("imbalance", "g2")


def groups_of_stages(ranks: int) -> dict[int, str]:
    """Return groups of `ranks` ranks each, for 32 ranks."""
    return {rank: f"g{rank // ranks}" for rank in range(32)}


@pytest.mark.parametrize("seed", range(3))
def test_slow_node_with_whole_stage_has_low_confidence(seed: int) -> None:
    faults = [Fault("busy", range(8, 16), 0.4)]
    found = diagnose(gang(32, faults, groups=groups_of_stages(8), per_node=8, seed=seed))
    assert [(*suspects_of(found)[0], found.suspects[0].confidence)] == [
        ("node", "gpu-1", "compute_gpu", Confidence.LOW)
    ]
    assert found.slow_jobs == ()


def test_evidence_raises_confidence_in_node_with_whole_stage() -> None:
    series = gang(32, [Fault("busy", range(8, 16), 0.4)], groups=groups_of_stages(8), per_node=8)
    evidence = [Evidence("gpu-1", ONSET, None, "gpu_clocks/hw_thermal", "the clocks are held down")]
    (found,) = diagnose(series, evidence).suspects
    assert (found.subject, found.confidence) == ("gpu-1", Confidence.MEDIUM)


@pytest.mark.parametrize(
    ("component", "by", "cause"),
    [("busy", 0.4, "compute_gpu"), ("host", 0.4, "compute_cpu"), ("transfer", 1.5, "communication_inter_node")],
)
def test_slow_node_with_half_stage_is_named(component: str, by: float, cause: str) -> None:
    found = diagnose(gang(32, [Fault(component, range(8, 16), by)], groups=groups_of_stages(16), per_node=8))
    assert suspects_of(found) == [("node", "gpu-1", cause)]
    assert found.suspects[0].confidence is Confidence.MEDIUM


@pytest.mark.parametrize(("by", "confidence"), [(0.15, Confidence.LOW), (0.3, Confidence.MEDIUM)])
def test_half_stage_has_medium_confidence_only_if_clearly_slow(by: float, confidence: Confidence) -> None:
    found = diagnose(gang(32, [Fault("busy", range(8, 16), by)], groups=groups_of_stages(16), per_node=8))
    assert [(entry.subject, entry.confidence) for entry in found.suspects] == [("gpu-1", confidence)]


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
def test_changed_work_names_no_node(faults: list[Fault]) -> None:
    found = diagnose(gang(32, faults, groups=groups_of_stages(8), per_node=8))
    assert (suspects_of(found), [entry.cause.value for entry in found.slow_jobs]) == ([], ["imbalance"])


def test_stage_on_one_of_two_nodes_is_not_imbalance() -> None:
    found = diagnose(gang(16, [Fault("busy", range(8), 0.4)], groups=groups_of_stages(8), per_node=8))
    assert (suspects_of(found), [entry.cause.value for entry in found.slow_jobs]) == ([], ["compute_gpu"])


def test_node_common_to_slow_groups_is_named() -> None:
    """Two of eight groups across nodes transfer slowly; they share only node gpu-9."""
    faults = [Fault("transfer", range(8), 2.0)]
    series = [
        replace(entry, node="gpu-9" if at in (0, 4) else f"gpu-1{at}")
        for at, entry in enumerate(gang(32, faults, groups=GROUP_OF_RANK))
    ]
    assert suspects_of(diagnose(series)) == [("node", "gpu-9", "communication_inter_node")]


def test_stages_of_different_levels_are_compared_separately() -> None:
    busy = [1.0] * 4 + [1.8] * 4 + [3.2] * 4 + [0.6] * 4
    assert suspects_of(diagnose(gang(16, busy=busy))) == []
    assert suspects_of(diagnose(gang(16, [Fault("busy", [9], 0.4)], busy=busy))) == [("rank", "9", "compute_gpu")]


def test_rank_with_slack_is_named_with_low_confidence() -> None:
    found = diagnose(gang(16, [Fault("busy", [1], 0.5)], busy=[1.0] * 8 + [2.0] * 8))
    assert not any(found.points)
    assert suspects_of(found) == [("rank", "1", "compute_gpu")]
    assert found.suspects[0].confidence is Confidence.LOW
    assert any("slack" in text for text in found.suspects[0].evidence)


def test_change_of_regime_is_no_fault() -> None:
    series = [
        replace(entry, regimes=["2048"] * ONSET + ["4096"] * ONSET) for entry in gang(8, [Fault("busy", [1, 2], 0.4)])
    ]
    points = points_of(gang(8, [Fault("busy", [1, 2], 0.4)]))
    assert compare_peers(series, points).suspects == ()


def test_evidence_is_readable_sentence() -> None:
    (suspect,) = diagnose(gang(16, [Fault("busy", [1], 0.4)], cv=0.001)).suspects
    assert suspect.evidence == ("busy 1.4, up from 1; its 15 peers 1",)


# --- workers that do not wait for each other


def test_slow_worker_of_ten_is_named() -> None:
    found = diagnose(workers([1.0] * 10, {6: 0.65}))
    assert suspects_of(found) == [("worker", "6", "compute")]
    assert found.suspects[0].confidence is Confidence.HIGH
    assert [bool(points) for points in found.points] == [worker == 6 for worker in range(10)]


def test_fluctuating_slowness_has_high_confidence() -> None:
    slow = [700, 780, 860, 820, 430, 980, 560, 690, 560, 450, 510, 490, 600, 580]
    series = workers([420.0] * 10, {})
    value = list(series[6].value)
    value[ONSET : ONSET + len(slow)] = slow
    series[6] = replace(series[6], value=value)
    found = diagnose(series)
    assert suspects_of(found) == [("worker", "6", "compute")]
    assert found.suspects[0].confidence is Confidence.HIGH


def test_frequent_pauses_give_low_confidence() -> None:
    series = workers([1.0] * 12, {})
    value = [entry * (4 if ONSET <= at < ONSET + 30 and at % 10 < 7 else 1) for at, entry in enumerate(series[6].value)]
    (suspect,) = diagnose([*series[:6], replace(series[6], value=value), *series[7:]]).suspects
    assert (suspect.subject, suspect.confidence) == ("6", Confidence.LOW)
    assert "fast as before" in suspect.evidence[0]


def test_common_pause_at_onset_does_not_hide_slow_worker() -> None:
    series = workers([1.0] * 10, {6: 0.65})
    paused = [
        replace(entry, value=[value * (30 if at == ONSET + 2 else 1) for at, value in enumerate(entry.value)])
        for entry in series
    ]
    found = compare_peers(paused, points_of(series))
    assert suspects_of(found) == [("worker", "6", "compute")]
    assert found.points[6]
    assert found.slow_jobs == ()


def test_several_slow_workers_are_all_named() -> None:
    found = diagnose(workers([1.0] * 10, dict.fromkeys((6, 7, 8, 9), 0.4)))
    assert [subject for _, subject, _ in suspects_of(found)] == ["6", "7", "8", "9"]
    assert {entry.confidence for entry in found.suspects} == {Confidence.MEDIUM}


def test_worker_is_compared_with_workers_of_its_level() -> None:
    levels = [1.0] * 5 + [4.0] * 5
    assert suspects_of(diagnose(workers(levels, {6: 0.65}))) == [("worker", "6", "compute")]
    assert suspects_of(diagnose(workers(levels, {}))) == []


def test_step_of_whole_role_is_one_slow_job() -> None:
    found = diagnose(workers([1.0] * 5 + [4.0] * 5, dict.fromkeys(range(5, 10), 0.3)))
    assert found.suspects == ()
    assert not any(found.points)
    assert [(entry.series, entry.peers) for entry in found.slow_jobs] == [(("5", "6", "7", "8", "9"), 5)]


def test_step_of_all_workers_keeps_their_points() -> None:
    found = diagnose(workers([1.0] * 10, dict.fromkeys(range(10), 0.3)))
    assert all(found.points)
    assert (suspects_of(found), len(found.slow_jobs)) == ([], 1)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_slow_worker_with_too_few_peers_is_slow_job(count: int) -> None:
    found = diagnose(workers([1.0] * count, {0: 0.5}))
    assert found.suspects == ()
    assert found.points[0]
    assert [entry.series for entry in found.slow_jobs] == [("0",)]


def test_waiting_worker_is_no_suspect() -> None:
    series = workers([1.0] * 8, {2: 0.6})
    waiting = [
        replace(entry, busy=[0.5] * 300, transfer=[0.1] * 300, wait=[value - 0.6 for value in entry.value])
        for entry in series
    ]
    found = diagnose(waiting)
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert (slow.series, "it waits for" in slow.reason) == (("2",), True)


# --- evidence of nodes


def evidence_of(node: str, begin: float, end: float | None = None, code: str = "gpu_clocks/hw_thermal") -> Evidence:
    return Evidence(node, begin, end, code, "GPU 3 throttles for its temperature")


def with_nodes(series: Sequence[Series]) -> list[Series]:
    return [replace(entry, node=f"gpu-{at // 4}") for at, entry in enumerate(series)]


def test_node_with_evidence_is_named_if_times_do_not_show_it() -> None:
    series = with_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    found = diagnose(series, [evidence_of("gpu-0", ONSET - 2)])
    assert suspects_of(found) == [("node", "gpu-0", "compute_gpu")]
    assert found.suspects[0].confidence is Confidence.MEDIUM
    evidence = evidence_of("gpu-0", 0.0)
    assert found.suspects[0].evidence[0] == f"node gpu-0 reported {evidence.text} ({evidence.code})"


@pytest.mark.parametrize(
    "evidence",
    [
        [evidence_of("gpu-0", 20, 60)],
        [evidence_of("gpu-0", 280)],
        [evidence_of("elsewhere", ONSET)],
        [evidence_of(f"gpu-{node}", ONSET) for node in range(4)],
    ],
    ids=["ended before", "began later", "node outside the job", "all nodes"],
)
def test_node_is_not_named_by_ambiguous_evidence(evidence: list[Evidence]) -> None:
    series = with_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert suspects_of(diagnose(series, evidence)) == []


def test_evidence_from_before_slowness_has_low_confidence() -> None:
    series = with_nodes(values_only(gang(16, [Fault("busy", [1], 0.4, 250)], samples=400)))
    assert [entry.confidence for entry in diagnose(series, [evidence_of("gpu-0", -1000)]).suspects] == [Confidence.LOW]


def test_evidence_does_not_name_node_with_healthy_ranks() -> None:
    series = with_nodes(gang(16, [Fault("busy", range(4, 16), 0.4)]))
    assert suspects_of(diagnose(series, [evidence_of("gpu-0", ONSET)])) == []


def test_agreeing_evidence_raises_confidence() -> None:
    series = with_nodes(gang(4, [Fault("busy", [1], 0.4)]))
    alone, with_evidence = diagnose(series).suspects, diagnose(series, [evidence_of("gpu-0", ONSET)]).suspects
    assert [entry.confidence for entry in (*alone, *with_evidence)] == [Confidence.MEDIUM, Confidence.HIGH]
    assert len(with_evidence[0].evidence) == len(alone[0].evidence) + 1


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
def test_code_of_evidence_gives_cause(code: str, cause: str) -> None:
    series = with_nodes(values_only(gang(16, [Fault("busy", [1], 0.4)])))
    assert suspects_of(diagnose(series, [evidence_of("gpu-0", ONSET, code=code)])) == [("node", "gpu-0", cause)]


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
SERIES_LISTS = st.one_of(
    st.builds(lambda faults, seed: gang(8, faults, cv=0.05, seed=seed), FAULTS, st.integers(0, 99)),
    st.builds(
        lambda slow, seed: workers([1.0] * 5 + [4.0] * 5, slow, seed=seed),
        st.dictionaries(st.integers(0, 9), st.sampled_from([0.2, 0.6])),
        st.integers(0, 99),
    ),
)
FEW_EXAMPLES = settings(max_examples=25, deadline=None)


def verdict(found: Diagnosis) -> tuple[object, ...]:
    return found.suspects, found.slow_jobs


@FEW_EXAMPLES
@given(SERIES_LISTS, st.randoms(use_true_random=False))
def test_order_of_peers_changes_nothing(series: list[Series], chance: random.Random) -> None:
    order = list(range(len(series)))
    chance.shuffle(order)
    before, after = diagnose(series), diagnose([series[place] for place in order])
    assert verdict(after) == verdict(before)
    assert after.points == tuple(before.points[place] for place in order)


@FEW_EXAMPLES
@given(SERIES_LISTS, st.sampled_from([0.5, 4.0, 1024.0]), st.sampled_from([0.0, 4096.0]))
def test_scaled_times_and_shifted_index_keep_verdict(series: list[Series], scale: float, shift: float) -> None:
    def scale_series(entry: Series) -> Series:
        busy, wait, transfer = (
            None if column is None else [value * scale for value in column]
            for column in (entry.busy, entry.wait, entry.transfer)
        )
        return replace(
            entry,
            value=[value * scale for value in entry.value],
            index=[at + shift for at in entry.index],
            busy=busy,
            wait=wait,
            transfer=transfer,
        )

    points = points_of(series)
    before, after = compare_peers(series, points), compare_peers([scale_series(entry) for entry in series], points)
    assert [(entry.subject, entry.cause, entry.confidence) for entry in after.suspects] == [
        (entry.subject, entry.cause, entry.confidence) for entry in before.suspects
    ]
    assert [(entry.onset - shift, entry.series, entry.cause) for entry in after.slow_jobs] == [
        (entry.onset, entry.series, entry.cause) for entry in before.slow_jobs
    ]
    assert after.points == before.points


@FEW_EXAMPLES
@given(SERIES_LISTS, st.integers(1, 299))
def test_later_samples_remove_no_point(series: list[Series], samples: int) -> None:
    def cut(column: Sequence[float] | None) -> Sequence[float] | None:
        return None if column is None else column[:samples]

    short = [
        replace(
            entry,
            value=entry.value[:samples],
            index=entry.index[:samples],
            busy=cut(entry.busy),
            wait=cut(entry.wait),
            transfer=cut(entry.transfer),
        )
        for entry in series
    ]
    for before, after in zip(diagnose(short).points, diagnose(series).points, strict=True):
        assert {point.onset_index for point in before} <= {point.onset_index for point in after}


@pytest.mark.parametrize(("count", "peers"), [(12, "its 11 peers"), (300, "the median of 60 of its 299 peers")])
def test_evidence_states_number_of_compared_peers(count: int, peers: str) -> None:
    (suspect,) = diagnose(workers([1.0] * count, {7: 0.5})).suspects
    assert peers in suspect.evidence[0]


# --- changes during a slowness


def slow_periods(judgement: Diagnosis) -> list[tuple[str, int, int | None]]:
    """Return (suspect, onset, relief) for each suspect, rounded to ten samples."""
    found = []
    for entry in judgement.suspects:
        assert entry.point is not None
        relief = entry.point.relief_index
        found.append((entry.subject, round(entry.point.onset_index, -1), None if relief is None else round(relief, -1)))
    return found


@pytest.mark.parametrize("component", ["busy", "transfer", "host"])
def test_second_slow_rank_during_slowness_is_named(component: str) -> None:
    faults = [Fault("busy", [2], 0.3, 100), Fault(component, [6], 4.0 if component == "transfer" else 1.2, 200)]
    assert slow_periods(diagnose(gang(8, faults, samples=400))) == [("2", 100, None), ("6", 200, None)]


def test_recovered_rank_during_slowness_has_relief() -> None:
    faults = [Fault("busy", [2], 0.4, 100, 160), Fault("busy", [5], 0.4, 160, 220)]
    assert slow_periods(diagnose(gang(8, faults, samples=400))) == [("2", 100, 160), ("5", 160, 220)]


def test_single_fault_of_long_slowness_stays_only_suspect() -> None:
    for seed in range(8):
        found = diagnose(gang(16, [Fault("busy", [2], 0.4, 100)], samples=500, cv=0.05, seed=seed))
        assert {subject for _, subject, _ in suspects_of(found)} == {"2"}


@pytest.mark.parametrize(
    ("component", "by", "cause", "rose"),
    [
        ("busy", 0.5, "compute", "busy time rose"),
        ("host", 0.5, "compute_cpu", "the time that is neither busy, wait nor transfer rose"),
        ("transfer", 2.0, "communication_inter_node", "transfer time rose"),
    ],
)
def test_slow_node_of_two_is_only_in_reason(component: str, by: float, cause: str, rose: str) -> None:
    found = diagnose(gang(8, [Fault(component, range(4), by)], per_node=4))
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert slow.cause.value == cause
    assert slow.reason.startswith(rose)
    assert "gpu-0 (4 of 8 ranks)" in slow.reason


def test_majority_of_role_is_counted_in_reason() -> None:
    found = diagnose(gang(8, [Fault("busy", range(5), 0.5)]))
    (slow,) = found.slow_jobs
    assert "5 of 8 ranks" in slow.reason


def test_workers_slowing_down_in_turn_are_one_slow_job() -> None:
    noise = random.Random(1)
    series = [
        replace(entry, value=[noise.gauss(1, 0.02) * (1 + 0.4 * (at >= ONSET + 4 * rank)) for at in range(300)])
        if rank < 5
        else entry
        for rank, entry in enumerate(workers([1.0] * 8, {}))
    ]
    found = diagnose(series)
    assert found.suspects == ()
    (slow,) = found.slow_jobs
    assert (slow.series, slow.peers) == (("0", "1", "2", "3", "4"), 8)
    assert abs(slow.onset - ONSET) <= 10
    assert slow.reason.startswith("5 of 8 peers ")
    assert " 5 % " in slow.reason


def test_worsening_worker_has_last_level_and_high_confidence() -> None:
    series = workers([1.0] * 8, {2: 0.2}, samples=450)
    mild = diagnose(series).suspects
    value = [entry * (2 if at >= ONSET + 100 else 1) for at, entry in enumerate(series[2].value)]
    (worse,) = diagnose([*series[:2], replace(series[2], value=value), *series[3:]]).suspects
    assert [entry.evidence for entry in mild] == [(worse.evidence[0].rpartition(";")[0],)]
    assert worse.evidence[0].endswith("; 2.4 at the end")
    assert worse.confidence is Confidence.HIGH


def test_two_often_correlated_workers_are_no_gang() -> None:
    """Their load rises at the same time in three of four samples."""
    noise = random.Random(3)
    common = [noise.gauss(1, 0.02) for _ in range(300)]
    series = [
        replace(entry, value=[load * noise.gauss(1, 0.018) for load in common]) if at in (0, 9) else entry
        for at, entry in enumerate(workers([1.0] * 10, {}))
    ]
    assert len(find_pools(series)) == 1
