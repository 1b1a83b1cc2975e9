"""Tests of the meaning of each code for a job that ended, and of the most likely cause of a failed job."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.agent.settings import registry
from healthd.common.job_failures import EndsJob, FailureCause
from healthd.common.model import Severity
from healthd.fleet.answers import causes
from healthd.fleet.answers.causes import (
    CAUSE_ORDER,
    CAUSES,
    CONFIDENCES,
    HARDWARE,
    INTER_NODE_CAUSES,
    PARENT_CAUSES,
    SINGLE_GPU_CAUSES,
    USER_CAUSE,
    Failure,
    Sighting,
    attribute_failure,
    is_unlikely,
    may_have_ended,
    meaning,
)
from healthd.nvidia import codes

CHECKS = registry.built_in_checks()
EXPLAINED = registry.explained(CHECKS)


def test_each_code_that_a_check_can_emit_has_a_cause():
    assert EXPLAINED
    assert [code for code in EXPLAINED if not meaning(code).is_known] == []
    assert {meaning(code).cause for code in EXPLAINED} == set(CAUSES)


def test_table_of_codes_is_what_the_checks_declare():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts/fleet_codes.py"))
    assert script["TABLE"].read_text("utf-8") == script["table"](CHECKS)


def test_each_code_of_a_built_in_check_has_a_declared_cause():
    undeclared = [
        code
        for check in CHECKS.values()
        for code in check.codes()
        if code not in check.declares.CAUSES and not hasattr(check.module, "cause")
    ]
    assert undeclared == []


def test_a_check_declares_no_code_that_it_does_not_explain():
    for check in CHECKS.values():
        for code in {*check.declares.CAUSES, *check.declares.ENDS_JOB, *check.declares.PERMANENT}:
            assert check.explain(code) is not None, code


def test_causes_that_checks_declare_are_those_that_have_a_domain_and_a_rank():
    assert {cause.value for cause in FailureCause} == set(CAUSES)


@pytest.mark.parametrize("names", [INTER_NODE_CAUSES, SINGLE_GPU_CAUSES, PARENT_CAUSES])
def test_a_name_of_a_cause_is_one(names):
    assert set(names) <= set(CAUSES)


def test_what_a_cause_belongs_to_is_preferred_to_it():
    for name, wider in PARENT_CAUSES.items():
        assert all(causes.CAUSE_ORDER[other] < causes.CAUSE_ORDER[name] for other in wider)


def test_a_code_that_ends_jobs_isolates_a_node_by_its_usual_severity_or_is_the_programs():
    """A warning alone decides nothing, and a program's own fault does not isolate its node."""
    wrong = [
        code
        for code, text in EXPLAINED.items()
        if meaning(code).ends is EndsJob.ALWAYS
        and meaning(code).cause != USER_CAUSE
        and text.severity < Severity.DEGRADED
    ]
    assert wrong == []


def test_a_code_that_requeues_jobs_is_never_left_out():
    requeues = [code for code, text in EXPLAINED.items() if text.severity == Severity.CRITICAL]
    assert requeues
    assert [code for code in requeues if meaning(code).ends in (EndsJob.NEVER, EndsJob.IF_NAMED)] == []


def test_only_hardware_is_transient_or_permanent():
    for code in EXPLAINED:
        means = meaning(code)
        assert means.ends in EndsJob
        assert (means.transient is None) == (means.domain != HARDWARE), code


def test_a_code_that_a_check_declares_permanent_is_hardware_that_does_not_recover():
    permanent = {code for check in CHECKS.values() for code in check.declares.PERMANENT}
    assert {code for code in EXPLAINED if meaning(code).transient is False} == permanent
    assert {"gpu_row_remap/failure", "gpu_xid/64", "block_device/missing", "cpu/missing"} <= permanent
    assert meaning("gpu_xid/48").transient is True


@pytest.mark.parametrize(
    ("code", "cause", "ends"),
    [
        ("gpu_xid/79", "gpu_lost", EndsJob.ALWAYS),
        ("gpu_xid/48", "gpu_memory", EndsJob.ALWAYS),
        ("gpu_xid/74", "nvlink", EndsJob.ALWAYS),
        ("gpu_xid/119", "gsp", EndsJob.ALWAYS),
        ("gpu_xid/13", USER_CAUSE, EndsJob.ALWAYS),
        ("gpu_xid/31", USER_CAUSE, EndsJob.ALWAYS),
        ("gpu_xid/45", USER_CAUSE, EndsJob.ALWAYS),
        ("gpu_xid/63", "gpu_memory", EndsJob.IF_ISOLATES),
        ("gpu_xid/94", "gpu_memory", EndsJob.IF_NAMED),
        ("gpu_xid/99999", "gpu", EndsJob.IF_ISOLATES),
        ("sxid/22003", "nvlink", EndsJob.ALWAYS),
        ("sxid/99999", "nvlink", EndsJob.IF_ISOLATES),
        ("ipmi_sel/critical_interrupt", "pcie", EndsJob.ALWAYS),
        ("mount/hang", "mount", EndsJob.NEVER),
        ("exec/critical", "other", EndsJob.IF_ISOLATES),
    ],
)
def test_what_some_codes_mean(code, cause, ends):
    assert (meaning(code).cause, meaning(code).ends) == (cause, ends)


@pytest.mark.parametrize("code", ["", "nothing", "site_check/bad", "gpu_xid/", "gpu_xid/x", "sxid/١", "gpu_xid/others"])
def test_a_code_that_no_table_names_is_another_cause_that_counts_as_it_was_told(code):
    assert meaning(code) == causes.CodeMeaning("other", EndsJob.IF_ISOLATES, None, is_known=False)


def test_every_xid_and_sxid_of_the_catalogues_is_among_them():
    numbers = {f"gpu_xid/{number}" for number in codes.xid_numbers()} | {f"sxid/{n}" for n in codes.sxid_numbers()}
    assert len(numbers) > 200
    assert numbers <= set(EXPLAINED)


JOB = Failure(frozenset({"7"}), "FAILED", 1000, 4)
CODES = sorted(EXPLAINED)


def seen(code: str, node: str = "n1", severity: str = "critical", at: int = 5000, **more: object) -> Sighting:
    plain = Sighting(node, code, "p", code.partition("/")[0], severity, "edge", at, at, True, frozenset())
    return replace(plain, **more)  # type: ignore[arg-type]


def cause(*those: Sighting, job: Failure = JOB) -> str | None:
    found = attribute_failure(job, those)
    return found and found.cause


def test_pcie_xid_79_and_the_bmcs_critical_interrupt_are_one_incident():
    those = (
        seen("ipmi_sel/critical_interrupt", severity="degraded", at=4990),
        seen("gpu_xid/79", at=4995),
        seen("pcie_aer/fatal"),
        seen("gpu_access/lost", kind="level"),
    )
    found = attribute_failure(JOB, those)
    assert found is not None
    assert (found.cause, found.sighting.code, found.confidence) == ("pcie", "pcie_aer/fatal", "high")
    assert found.possible_causes == {"pcie"}
    assert not found.has_competing_cause
    assert {one for one, _ in found.other_sightings} == {"pcie"}
    assert len(found.other_sightings) == 3


def test_a_gpu_that_is_gone_without_a_pcie_error_is_its_own_cause():
    assert cause(seen("gpu_xid/79"), seen("gpu_access/lost")) == "gpu_lost"
    assert cause(seen("gpu_xid/79"), seen("pcie_aer/fatal", node="n2", severity="warning")) == "pcie"
    assert cause(seen("gpu_xid/79"), seen("pcie_link/slow", severity="degraded")) == "gpu_lost"


def test_a_pcie_error_that_the_site_lets_only_warn_still_is_the_cause():
    assert cause(seen("pcie_aer/fatal", severity="warning")) == "pcie"


def test_what_only_warns_or_slows_is_no_cause():
    for code in ("gpu_temperature/hot", "pcie_aer/correctable", "mount/hang", "filesystem/not_responding"):
        assert cause(seen(code, severity="warning")) is None
    assert cause(seen("pcie_link/slow", severity="degraded")) is None


def test_what_the_site_or_time_made_worse_counts_as_it_was_told():
    assert cause(seen("gpu_access/hang", severity="warning")) is None
    assert cause(seen("gpu_access/hang", severity="degraded")) == "gpu_lost"
    assert cause(seen("a_sites_check/bad", severity="critical")) == "other"


def test_a_programs_own_fault_comes_last_and_ends_no_node():
    mine = seen("gpu_xid/31", severity="warning", at=4000)
    assert cause(mine) == USER_CAUSE
    assert cause(mine, seen("gpu_xid/95")) == "gpu_memory"
    assert cause(mine, job=replace(JOB, state="NODE_FAIL")) is None


def test_a_programs_fault_before_the_job_began_is_another_programs():
    assert cause(seen("gpu_xid/13", severity="warning", at=999)) is None
    assert cause(seen("gpu_xid/13", severity="warning", at=1000)) == USER_CAUSE
    assert cause(seen("gpu_xid/13", severity="warning", at=999), job=replace(JOB, start_time=None)) == USER_CAUSE


def test_a_fault_of_one_gpu_that_names_other_jobs_is_not_this_jobs_unless_the_node_died():
    others = seen("gpu_xid/95", jobs=frozenset({"8", "9"}))
    assert cause(others) is None
    assert cause(others, job=replace(JOB, state="NODE_FAIL")) == "gpu_memory"
    assert cause(replace(others, jobs=frozenset({"7", "8"}))) == "gpu_memory"
    assert (
        cause(replace(others, jobs=frozenset({"3_1"})), job=replace(JOB, ids=frozenset({"7", "3_1"}))) == "gpu_memory"
    )
    assert cause(seen("mount/missing", jobs=frozenset({"8"}))) == "mount"


def test_a_contained_memory_error_counts_for_the_job_that_it_names_alone():
    contained = seen("gpu_xid/94", severity="warning")
    assert cause(contained) is None
    assert cause(replace(contained, jobs=frozenset({"7"}))) == "gpu_memory"


def test_a_link_between_nodes_is_the_last_cause_of_a_job_of_one_node():
    down = seen("ib_link/down", severity="degraded", kind="level")
    assert cause(down) == "ib_link"
    single = replace(JOB, nodes=1)
    assert [attribute_failure(JOB, [down]).confidence, attribute_failure(single, [down]).confidence] == ["high", "low"]  # type: ignore[union-attr]
    dead = replace(single, state="NODE_FAIL")
    assert [attribute_failure(dead, [down]).cause, attribute_failure(dead, [down]).confidence] == ["ib_link", "medium"]  # type: ignore[union-attr]
    assert cause(down, seen("mount/missing"), job=single) == "mount"
    assert cause(down, seen("mount/missing")) == "ib_link"


@pytest.mark.parametrize(
    ("code", "severity", "confidence"),
    [
        ("gpu_ecc/uncorrected", "degraded", "high"),
        ("gpu_ecc/corrected", "degraded", "medium"),
        ("ib_errors/symbol_rate", "degraded", "medium"),
        ("pcie_aer/nonfatal", "critical", "high"),
        ("site/bad", "critical", "medium"),
        ("site/bad", "degraded", "low"),
    ],
)
def test_a_code_that_only_its_severity_makes_a_cause_is_less_sure(code: str, severity: str, confidence: str) -> None:
    assert attribute_failure(JOB, [seen(code, severity=severity)]).confidence == confidence  # type: ignore[union-attr]


def test_what_the_driver_asks_for_follows_from_the_xid_that_says_why():
    found = attribute_failure(
        JOB, [seen("gpu_xid/154", at=4000), seen("gpu_recovery_action/gpu_reset"), seen("gpu_xid/48")]
    )
    assert found is not None
    assert (found.cause, found.sighting.code, found.has_competing_cause) == ("gpu_memory", "gpu_xid/48", False)
    assert cause(seen("gpu_xid/154")) == "gpu"


def test_another_incident_that_isolates_makes_it_less_sure_and_so_does_a_scrape_alone():
    disk, mount = seen("block_device/nvme"), seen("mount/missing", node="n2")
    assert [attribute_failure(JOB, those).confidence for those in ([disk], [disk, mount])] == ["high", "medium"]  # type: ignore[union-attr]
    scraped = replace(disk, from_stream=False)
    assert [attribute_failure(JOB, those).confidence for those in ([scraped], [scraped, mount])] == ["medium", "low"]  # type: ignore[union-attr]
    assert attribute_failure(JOB, [seen("gpu_xid/31")]).confidence == "medium"  # type: ignore[union-attr]
    assert attribute_failure(JOB, [seen("gpu_xid/45")]).confidence == "low"  # type: ignore[union-attr]


def test_of_several_nodes_the_one_that_was_seen_first_is_told():
    found = attribute_failure(
        JOB, [seen("mount/missing", node="n1", at=5010), seen("mount/missing", node="n9", at=5000)]
    )
    assert found is not None
    assert found.sighting.node == "n9"


def test_nothing_seen_is_no_cause():
    assert attribute_failure(JOB, []) is None


SEEN = st.builds(
    Sighting,
    node=st.sampled_from(("n1", "n2", "n3")),
    code=st.sampled_from([*CODES, "site/bad"]),
    subject=st.sampled_from(("", "a", "b")),
    check=st.just("check"),
    severity=st.sampled_from(("info", "warning", "degraded", "critical")),
    kind=st.sampled_from(("edge", "level")),
    first_seen=st.integers(4400, 4410),
    last_seen=st.integers(4410, 5300),
    from_stream=st.booleans(),
    jobs=st.frozensets(st.sampled_from(("7", "8")), max_size=2),
)
FAILURES = st.builds(
    Failure,
    ids=st.just(frozenset({"7"})),
    state=st.sampled_from(("FAILED", "NODE_FAIL")),
    start_time=st.none() | st.integers(4000, 6000),
    nodes=st.integers(0, 3),
)
WHO = st.lists(SEEN, max_size=8, unique_by=lambda entry: (entry.node, entry.code, entry.subject))


@given(FAILURES, WHO, st.randoms(use_true_random=False))
def test_the_order_of_what_was_seen_changes_nothing(job: Failure, those: list[Sighting], random: Random):
    mixed = random.sample(those, len(those))
    assert attribute_failure(job, mixed) == attribute_failure(job, those)


@given(FAILURES, WHO)
def test_a_job_has_a_cause_where_something_decides_and_all_that_was_seen_is_told(job: Failure, those: list[Sighting]):
    found = attribute_failure(job, those)
    assert (found is not None) == any(may_have_ended(job, one) for one in those)
    if found is not None:
        assert may_have_ended(job, found.sighting)
        assert found.confidence in CONFIDENCES
        assert sorted([found.sighting, *(one for _, one in found.other_sightings)], key=repr) == sorted(those, key=repr)
        assert found.cause in found.possible_causes
        likely = {name for name in found.possible_causes if not is_unlikely(job, name)} or found.possible_causes
        assert CAUSE_ORDER[found.cause] == min(CAUSE_ORDER[name] for name in likely)
        assert CAUSE_ORDER[found.cause] <= CAUSE_ORDER[meaning(found.sighting.code).cause]
