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
    SWITCH_CAUSE,
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


def test_every_code_has_cause():
    assert EXPLAINED
    assert [code for code in EXPLAINED if not meaning(code).is_known] == []
    assert {meaning(code).cause for code in EXPLAINED} == set(CAUSES) - {SWITCH_CAUSE}


def test_code_table_matches_checks():
    script = runpy.run_path(str(Path(__file__).parents[3] / "scripts/fleet_codes.py"))
    assert script["TABLE"].read_text("utf-8") == script["table"](CHECKS)


def test_built_in_check_declares_cause_of_each_code():
    undeclared = [
        code
        for check in CHECKS.values()
        for code in check.codes()
        if code not in check.declares.CAUSES and not hasattr(check.module, "cause")
    ]
    assert undeclared == []


def test_check_declares_only_explained_codes():
    for check in CHECKS.values():
        for code in {*check.declares.CAUSES, *check.declares.ENDS_JOB, *check.declares.PERMANENT}:
            assert check.explain(code) is not None, code


def test_declared_causes_have_domain_and_rank():
    assert {cause.value for cause in FailureCause} == set(CAUSES) - {SWITCH_CAUSE}


@pytest.mark.parametrize("names", [INTER_NODE_CAUSES, SINGLE_GPU_CAUSES, PARENT_CAUSES])
def test_cause_names_are_known(names):
    assert set(names) <= set(CAUSES)


def test_parent_cause_ranks_before_child():
    for name, parents in PARENT_CAUSES.items():
        assert all(causes.CAUSE_ORDER[parent] < causes.CAUSE_ORDER[name] for parent in parents)


def test_code_always_ending_jobs_isolates_node():
    """A warning alone decides nothing, and a program's own fault does not isolate its node."""
    wrong = [
        code
        for code, text in EXPLAINED.items()
        if meaning(code).ends is EndsJob.ALWAYS
        and meaning(code).cause != USER_CAUSE
        and text.severity < Severity.DEGRADED
    ]
    assert wrong == []


def test_critical_code_can_end_jobs():
    requeues = [code for code, text in EXPLAINED.items() if text.severity == Severity.CRITICAL]
    assert requeues
    assert [code for code in requeues if meaning(code).ends in (EndsJob.NEVER, EndsJob.IF_NAMED)] == []


def test_only_hardware_codes_have_transience():
    for code in EXPLAINED:
        means = meaning(code)
        assert means.ends in EndsJob
        assert (means.transient is None) == (means.domain != HARDWARE), code


def test_permanent_codes_match_declarations():
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
def test_meaning_of_known_codes(code, cause, ends):
    assert (meaning(code).cause, meaning(code).ends) == (cause, ends)


@pytest.mark.parametrize("code", ["", "nothing", "site_check/bad", "gpu_xid/", "gpu_xid/x", "sxid/١", "gpu_xid/others"])
def test_unknown_code_has_cause_other(code):
    assert meaning(code) == causes.CodeMeaning("other", EndsJob.IF_ISOLATES, None, is_known=False)


def test_all_xids_and_sxids_are_explained():
    numbers = {f"gpu_xid/{number}" for number in codes.xid_numbers()} | {f"sxid/{n}" for n in codes.sxid_numbers()}
    assert len(numbers) > 200
    assert numbers <= set(EXPLAINED)


JOB = Failure(frozenset({"7"}), "FAILED", 1000, 4)
CODES = sorted(EXPLAINED)


def sighting(code: str, node: str = "n1", severity: str = "critical", at: int = 5000, **more: object) -> Sighting:
    plain = Sighting(node, code, "p", code.partition("/")[0], severity, "edge", at, at, True, frozenset())
    return replace(plain, **more)  # type: ignore[arg-type]


def cause(*sightings: Sighting, job: Failure = JOB) -> str | None:
    found = attribute_failure(job, sightings)
    return found and found.cause


def test_pcie_error_with_xid_79_and_sel_entry_is_one_incident():
    sightings = (
        sighting("ipmi_sel/critical_interrupt", severity="degraded", at=4990),
        sighting("gpu_xid/79", at=4995),
        sighting("pcie_aer/fatal"),
        sighting("gpu_access/lost", kind="level"),
    )
    found = attribute_failure(JOB, sightings)
    assert found is not None
    assert (found.cause, found.sighting.code, found.confidence) == ("pcie", "pcie_aer/fatal", "high")
    assert found.possible_causes == {"pcie"}
    assert not found.has_competing_cause
    assert {name for name, _ in found.other_sightings} == {"pcie"}
    assert len(found.other_sightings) == 3


def test_lost_gpu_without_pcie_error_is_gpu_lost():
    assert cause(sighting("gpu_xid/79"), sighting("gpu_access/lost")) == "gpu_lost"
    assert cause(sighting("gpu_xid/79"), sighting("pcie_aer/fatal", node="n2", severity="warning")) == "pcie"
    assert cause(sighting("gpu_xid/79"), sighting("pcie_link/slow", severity="degraded")) == "gpu_lost"


def test_pcie_error_of_warning_severity_is_cause():
    assert cause(sighting("pcie_aer/fatal", severity="warning")) == "pcie"


def test_warning_or_slow_link_is_no_cause():
    for code in ("gpu_temperature/hot", "pcie_aer/correctable", "mount/hang", "filesystem/not_responding"):
        assert cause(sighting(code, severity="warning")) is None
    assert cause(sighting("pcie_link/slow", severity="degraded")) is None


def test_severity_decides_for_uncertain_codes():
    assert cause(sighting("gpu_access/hang", severity="warning")) is None
    assert cause(sighting("gpu_access/hang", severity="degraded")) == "gpu_lost"
    assert cause(sighting("a_sites_check/bad", severity="critical")) == "other"


def test_user_fault_ranks_last_and_never_fails_node():
    user_fault = sighting("gpu_xid/31", severity="warning", at=4000)
    assert cause(user_fault) == USER_CAUSE
    assert cause(user_fault, sighting("gpu_xid/95")) == "gpu_memory"
    assert cause(user_fault, job=replace(JOB, state="NODE_FAIL")) is None


def test_user_fault_before_job_start_is_ignored():
    assert cause(sighting("gpu_xid/13", severity="warning", at=999)) is None
    assert cause(sighting("gpu_xid/13", severity="warning", at=1000)) == USER_CAUSE
    assert cause(sighting("gpu_xid/13", severity="warning", at=999), job=replace(JOB, start_time=None)) == USER_CAUSE


def test_gpu_fault_of_other_jobs_counts_only_if_node_failed():
    fault = sighting("gpu_xid/95", jobs=frozenset({"8", "9"}))
    assert cause(fault) is None
    assert cause(fault, job=replace(JOB, state="NODE_FAIL")) == "gpu_memory"
    assert cause(replace(fault, jobs=frozenset({"7", "8"}))) == "gpu_memory"
    assert cause(replace(fault, jobs=frozenset({"3_1"})), job=replace(JOB, ids=frozenset({"7", "3_1"}))) == "gpu_memory"
    assert cause(sighting("mount/missing", jobs=frozenset({"8"}))) == "mount"


def test_contained_memory_error_counts_only_for_named_job():
    contained = sighting("gpu_xid/94", severity="warning")
    assert cause(contained) is None
    assert cause(replace(contained, jobs=frozenset({"7"}))) == "gpu_memory"


def test_link_fault_ranks_last_for_job_of_one_node():
    down = sighting("ib_link/down", severity="degraded", kind="level")
    assert cause(down) == "ib_link"
    single = replace(JOB, nodes=1)
    assert [attribute_failure(JOB, [down]).confidence, attribute_failure(single, [down]).confidence] == ["high", "low"]  # type: ignore[union-attr]
    dead = replace(single, state="NODE_FAIL")
    assert [attribute_failure(dead, [down]).cause, attribute_failure(dead, [down]).confidence] == ["ib_link", "medium"]  # type: ignore[union-attr]
    assert cause(down, sighting("mount/missing"), job=single) == "mount"
    assert cause(down, sighting("mount/missing")) == "ib_link"


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
def test_code_promoted_by_severity_has_lower_confidence(code: str, severity: str, confidence: str) -> None:
    assert attribute_failure(JOB, [sighting(code, severity=severity)]).confidence == confidence  # type: ignore[union-attr]


def test_recovery_action_follows_from_xid():
    found = attribute_failure(
        JOB, [sighting("gpu_xid/154", at=4000), sighting("gpu_recovery_action/gpu_reset"), sighting("gpu_xid/48")]
    )
    assert found is not None
    assert (found.cause, found.sighting.code, found.has_competing_cause) == ("gpu_memory", "gpu_xid/48", False)
    assert cause(sighting("gpu_xid/154")) == "gpu"


def test_competing_incident_or_scrape_lowers_confidence():
    disk, mount = sighting("block_device/nvme"), sighting("mount/missing", node="n2")
    assert [attribute_failure(JOB, sightings).confidence for sightings in ([disk], [disk, mount])] == ["high", "medium"]  # type: ignore[union-attr]
    scraped = replace(disk, from_stream=False)
    assert [attribute_failure(JOB, sightings).confidence for sightings in ([scraped], [scraped, mount])] == [
        "medium",
        "low",
    ]  # type: ignore[union-attr]
    assert attribute_failure(JOB, [sighting("gpu_xid/31")]).confidence == "medium"  # type: ignore[union-attr]
    assert attribute_failure(JOB, [sighting("gpu_xid/45")]).confidence == "low"  # type: ignore[union-attr]


def test_node_with_first_sighting_is_named():
    found = attribute_failure(
        JOB, [sighting("mount/missing", node="n1", at=5010), sighting("mount/missing", node="n9", at=5000)]
    )
    assert found is not None
    assert found.sighting.node == "n9"


def test_no_sighting_is_no_cause():
    assert attribute_failure(JOB, []) is None


SIGHTINGS = st.builds(
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
SIGHTING_LISTS = st.lists(SIGHTINGS, max_size=8, unique_by=lambda entry: (entry.node, entry.code, entry.subject))


@given(FAILURES, SIGHTING_LISTS, st.randoms(use_true_random=False))
def test_attribution_ignores_order_of_sightings(job: Failure, sightings: list[Sighting], random: Random):
    mixed = random.sample(sightings, len(sightings))
    assert attribute_failure(job, mixed) == attribute_failure(job, sightings)


@given(FAILURES, SIGHTING_LISTS)
def test_attribution_uses_every_sighting_and_lowest_rank(job: Failure, sightings: list[Sighting]):
    found = attribute_failure(job, sightings)
    assert (found is not None) == any(may_have_ended(job, entry) for entry in sightings)
    if found is not None:
        assert may_have_ended(job, found.sighting)
        assert found.confidence in CONFIDENCES
        assert sorted([found.sighting, *(entry for _, entry in found.other_sightings)], key=repr) == sorted(
            sightings, key=repr
        )
        assert found.cause in found.possible_causes
        likely = {name for name in found.possible_causes if not is_unlikely(job, name)} or found.possible_causes
        assert CAUSE_ORDER[found.cause] == min(CAUSE_ORDER[name] for name in likely)
        assert CAUSE_ORDER[found.cause] <= CAUSE_ORDER[meaning(found.sighting.code).cause]
