"""What each code of a check means for a job that ended."""

from __future__ import annotations

import pytest

from healthd.agent.settings import registry
from healthd.common.model import Severity
from healthd.fleet.answers import causes
from healthd.fleet.answers.causes import (
    BELONGS_TO,
    BETWEEN_NODES,
    CAUSES,
    ENDS,
    HARDWARE,
    NAMED,
    NEVER,
    OF_ONE_GPU,
    PERMANENT,
    TOLD,
    USER,
    meaning,
)
from healthd.nvidia import codes

EXPLAINED = registry.explained(registry.built_in())


def test_each_code_that_a_check_can_emit_has_a_cause():
    assert EXPLAINED
    assert [code for code in EXPLAINED if not meaning(code).known] == []
    assert {meaning(code).cause for code in EXPLAINED} == set(CAUSES)


def test_no_cause_names_a_code_that_no_check_has():
    listed = {word.rstrip("!?-") for words in causes._WORDS.values() for word in words.split()}
    assert listed - set(EXPLAINED) == set()
    assert PERMANENT - set(EXPLAINED) == set()


@pytest.mark.parametrize("names", [BETWEEN_NODES, OF_ONE_GPU, BELONGS_TO, causes._WORDS, causes._XIDS])
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
        if meaning(code).ends == ENDS and meaning(code).cause != USER and text.severity < Severity.DEGRADED
    ]
    assert wrong == []


def test_a_code_that_requeues_jobs_is_never_left_out():
    requeues = [code for code, text in EXPLAINED.items() if text.severity == Severity.CRITICAL]
    assert requeues
    assert [code for code in requeues if meaning(code).ends in (NEVER, NAMED)] == []


def test_each_meaning_has_one_of_four_marks_and_hardware_alone_is_transient_or_permanent():
    for code in EXPLAINED:
        means = meaning(code)
        assert means.ends in (ENDS, TOLD, NAMED, NEVER)
        assert (means.transient is None) == (means.domain != HARDWARE), code


@pytest.mark.parametrize(
    ("code", "cause", "ends"),
    [
        ("gpu_xid/79", "gpu_lost", ENDS),
        ("gpu_xid/48", "gpu_memory", ENDS),
        ("gpu_xid/74", "nvlink", ENDS),
        ("gpu_xid/119", "gsp", ENDS),
        ("gpu_xid/13", USER, ENDS),
        ("gpu_xid/31", USER, ENDS),
        ("gpu_xid/45", USER, ENDS),
        ("gpu_xid/63", "gpu_memory", TOLD),
        ("gpu_xid/94", "gpu_memory", NAMED),
        ("gpu_xid/99999", "gpu", TOLD),
        ("sxid/22003", "nvlink", ENDS),
        ("sxid/99999", "nvlink", TOLD),
        ("ipmi_sel/critical_interrupt", "pcie", ENDS),
        ("mount/hang", "mount", NEVER),
        ("exec/critical", "other", TOLD),
    ],
)
def test_what_some_codes_mean(code, cause, ends):
    assert (meaning(code).cause, meaning(code).ends) == (cause, ends)


@pytest.mark.parametrize("code", ["", "nothing", "site_check/bad", "gpu_xid/", "gpu_xid/x", "sxid/١", "gpu_xid/others"])
def test_a_code_that_no_table_names_is_another_cause_that_counts_as_it_was_told(code):
    assert meaning(code) == causes.Meaning("other", TOLD, None, known=False)


def test_every_xid_and_sxid_of_the_catalogues_is_among_them():
    numbers = {f"gpu_xid/{number}" for number in codes.xid_numbers()} | {f"sxid/{n}" for n in codes.sxid_numbers()}
    assert len(numbers) > 200
    assert numbers <= set(EXPLAINED)
