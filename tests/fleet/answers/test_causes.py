"""What each code of a check means for a job that ended."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from healthd.agent.settings import registry
from healthd.common.job_failures import EndsJob, FailureCause
from healthd.common.model import Severity
from healthd.fleet.answers import causes
from healthd.fleet.answers.causes import (
    BELONGS_TO,
    BETWEEN_NODES,
    CAUSES,
    HARDWARE,
    OF_ONE_GPU,
    USER,
    meaning,
)
from healthd.nvidia import codes

CHECKS = registry.built_in()
EXPLAINED = registry.explained(CHECKS)


def test_each_code_that_a_check_can_emit_has_a_cause():
    assert EXPLAINED
    assert [code for code in EXPLAINED if not meaning(code).known] == []
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


@pytest.mark.parametrize("names", [BETWEEN_NODES, OF_ONE_GPU, BELONGS_TO])
def test_a_name_of_a_cause_is_one(names):
    assert set(names) <= set(CAUSES)


def test_what_a_cause_belongs_to_is_preferred_to_it():
    for name, wider in BELONGS_TO.items():
        assert all(causes.ORDER[other] < causes.ORDER[name] for other in wider)


def test_a_code_that_ends_jobs_isolates_a_node_by_its_usual_severity_or_is_the_programs():
    """What only warns decides nothing by itself; a program's own fault does not isolate its node."""
    wrong = [
        code
        for code, text in EXPLAINED.items()
        if meaning(code).ends is EndsJob.ALWAYS and meaning(code).cause != USER and text.severity < Severity.DEGRADED
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
        ("gpu_xid/13", USER, EndsJob.ALWAYS),
        ("gpu_xid/31", USER, EndsJob.ALWAYS),
        ("gpu_xid/45", USER, EndsJob.ALWAYS),
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
    assert meaning(code) == causes.Meaning("other", EndsJob.IF_ISOLATES, None, known=False)


def test_every_xid_and_sxid_of_the_catalogues_is_among_them():
    numbers = {f"gpu_xid/{number}" for number in codes.xid_numbers()} | {f"sxid/{n}" for n in codes.sxid_numbers()}
    assert len(numbers) > 200
    assert numbers <= set(EXPLAINED)
