"""Tests of faults of an NVLink domain's switch side."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.statistics.domain_faults import (
    CONSEQUENCE_CODES,
    JOIN_SECONDS,
    LINK_CODES,
    MIN_NODES,
    OUTAGE_SECONDS,
    ROUND_SECONDS,
    WINDOW_SECONDS,
    DomainFault,
    LinkFault,
    domain_fault,
    explains_outage,
    faults_by_node,
    find_domain_faults,
)

ROOT = Path(__file__).parents[3]
RACK, OTHER_RACK = "00000001-0000-0000-0000-000000000001", "00000001-0000-0000-0000-000000000002"
XID, CHECK = "gpu_xid/149", "gpu_nvlink/inactive"


def fault(node: str, time: int, code: str = XID, domain: str = RACK, cluster: str = "c1") -> LinkFault:
    return LinkFault(cluster, node, domain, code, time)


def test_two_nodes_are_no_domain_fault() -> None:
    faults = [fault("t1", 1000), fault("t2", 1000), fault("t2", 1010, CHECK), fault("t1", 1020, "gpu_fabric/unhealthy")]
    assert find_domain_faults(faults) == []


@pytest.mark.parametrize(("last", "expected"), [(1000, 1), (1060, 1), (1061, 0), (5000, 0)])
def test_three_nodes_are_domain_fault_within_one_minute(last: int, expected: int) -> None:
    faults = [fault("t1", 1000), fault("t2", 1030), fault("t3", last)]
    assert len(find_domain_faults(faults)) == expected


@pytest.mark.parametrize(("last", "expected"), [(1360, 1), (1361, 0)])
def test_finding_of_a_check_may_have_begun_a_round_earlier(last: int, expected: int) -> None:
    faults = [fault("t1", 1000), fault("t2", 1030), fault("t3", last, CHECK)]
    assert len(find_domain_faults(faults)) == expected


def test_earlier_finding_of_a_check_is_not_later_than_its_time() -> None:
    assert find_domain_faults([fault("t1", 1000, CHECK), fault("t2", 1061), fault("t3", 1061)]) == []


@pytest.mark.parametrize(
    "other",
    [{"domain": OTHER_RACK}, {"domain": ""}, {"cluster": "c2"}, {"code": "gpu_xid/137"}, {"code": "imex/daemon"}],
)
def test_fault_of_another_domain_or_kind_does_not_count(other: dict[str, str]) -> None:
    assert find_domain_faults([fault("t1", 1000), fault("t2", 1000), fault("t3", 1000, **other)]) == []


def test_nodes_without_domain_are_no_domain_fault() -> None:
    assert find_domain_faults([fault(f"t{n}", 1000, domain="") for n in range(18)]) == []


def test_wrong_clock_of_one_node_does_not_hide_the_fault_of_the_others() -> None:
    faults = [fault(f"t{n}", 1000 + n) for n in range(17)]
    (found,) = find_domain_faults([*faults, fault("t17", 1000 - 3600)])
    assert found.nodes == {f"t{n}" for n in range(17)}


def test_domain_fault_has_nodes_that_report_it_later() -> None:
    faults = [fault(f"t{n}", 1000) for n in range(3)]
    late = [fault("t3", 1000 + JOIN_SECONDS), fault("t4", 1001 + JOIN_SECONDS)]
    assert find_domain_faults([*late, *faults]) == [
        DomainFault("c1", RACK, 1000, 1000 + JOIN_SECONDS, frozenset({"t0", "t1", "t2", "t3"}))
    ]


def test_later_fault_of_the_same_domain_is_another_one() -> None:
    found = find_domain_faults([fault(f"t{n}", time) for n in range(3) for time in (1000, 5000)])
    assert [each.start_time for each in found] == [1000, 5000]


def test_domain_fault_covers_link_faults_and_resets_of_its_nodes() -> None:
    faults = faults_by_node(find_domain_faults([fault(f"t{n}", 1000) for n in range(3)]))
    assert domain_fault(faults, "c1", "t0", CHECK, 1200) is not None
    assert domain_fault(faults, "c1", "t0", "gpu_recovery_action/gpu_reset", 1200) is not None
    for cluster, node, code, time in (
        ("c1", "t0", "gpu_xid/79", 1200),
        ("c1", "t0", CHECK, 999),
        ("c1", "t0", CHECK, 1001 + JOIN_SECONDS),
        ("c1", "t9", CHECK, 1200),
        ("c2", "t0", CHECK, 1200),
    ):
        assert domain_fault(faults, cluster, node, code, time) is None


@pytest.mark.parametrize(
    ("code", "time", "expected"),
    [
        (CHECK, 1000, True),
        ("gpu_recovery_action/gpu_reset", 2000, True),
        ("person", 1000 + OUTAGE_SECONDS, True),
        ("person", 1001 + OUTAGE_SECONDS, False),
        ("person", 999, False),
        ("down", 1000, False),
        ("gpu_xid/79", 1000, False),
    ],
)
def test_domain_fault_explains_outage(code: str, time: int, expected: bool) -> None:
    faults = faults_by_node(find_domain_faults([fault(f"t{n}", 1000) for n in range(3)]))
    assert explains_outage(faults, "c1", "t0", code, time) is expected
    assert not explains_outage(faults, "c1", "t9", code, time)


FAULTS = st.builds(
    fault,
    st.sampled_from(["t1", "t2", "t3", "t4", "t5"]),
    st.integers(0, 4000),
    st.sampled_from([XID, CHECK, "gpu_xid/79"]),
    st.sampled_from([RACK, OTHER_RACK, ""]),
)


@given(st.lists(FAULTS, max_size=30), st.randoms())
def test_domain_faults_do_not_depend_on_order_and_have_enough_nodes(faults: list[LinkFault], random: Any) -> None:
    found = find_domain_faults(faults)
    random.shuffle(faults)
    assert find_domain_faults(faults) == found
    assert all(len(each.nodes) >= MIN_NODES and each.domain for each in found)
    for earlier, later in pairwise(found):
        assert earlier.domain != later.domain or earlier.end_time < later.start_time


def find_slowly(faults: list[LinkFault]) -> list[DomainFault]:
    """Find the faults of one domain by the rule's definition."""
    remaining = sorted(faults, key=lambda each: each.time)
    while remaining:
        start = remaining[0].time
        minute = [each for each in remaining if each.earliest <= start + WINDOW_SECONDS]
        if len({each.node for each in minute}) >= MIN_NODES:
            end = max(each.time for each in minute) + JOIN_SECONDS
            nodes = frozenset(each.node for each in remaining if each.time <= end)
            later = [each for each in remaining if each.time > end]
            return [DomainFault("c1", RACK, start, end, nodes), *find_slowly(later)]
        remaining = remaining[1:]
    return []


LINK_FAULTS = st.builds(
    fault, st.sampled_from(["t1", "t2", "t3", "t4"]), st.integers(0, 4000), st.sampled_from([XID, CHECK])
)


@given(st.lists(LINK_FAULTS, max_size=40))
def test_domain_faults_are_those_of_the_definition(faults: list[LinkFault]) -> None:
    assert find_domain_faults(faults) == find_slowly(faults)


def test_recording_rules_have_the_same_codes_and_numbers() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which reads the rules, is not installed")
    groups = yaml.safe_load((ROOT / "packaging/prometheus/healthd.recording.yml").read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    by_name = {rule["record"]: rule["expr"] for rule in rules}
    assert f'code=~"{LINK_CODES}"' in by_name["condition:healthd_link_fault:latest"]
    incident = by_name["domain:healthd_link_incident:start"]
    assert incident.count(f">= {MIN_NODES}\n") == 2
    assert incident.count(f"condition:healthd_link_fault:earliest - {WINDOW_SECONDS}\n") == 2
    for rule in ("domain:healthd_link_incident:start", "condition:healthd_link_incident:latest"):
        assert f"condition:healthd_link_fault:earliest - {WINDOW_SECONDS} - {JOIN_SECONDS}\n" in by_name[rule]
    assert (
        by_name["condition:healthd_link_fault:minute"].count("count_values")
        == 1 + (WINDOW_SECONDS + ROUND_SECONDS) // 60
    )
    assert f'code!~"{CONSEQUENCE_CODES}"' in by_name["condition:healthd_link_incident:unexplained"]


def test_round_is_the_default_interval_of_the_checks() -> None:
    from healthd.agent.settings.config import Settings

    assert Settings().interval_seconds == ROUND_SECONDS
