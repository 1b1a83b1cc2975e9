"""Tests of the five opening sentences of a report: their numbers, and missing data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.fleet.summary import opening_sentences

DAY = 86400
DOCUMENTS: dict[str, Any] = {
    "states": {
        "by_state": [
            {"state": "COMPLETED", "jobs": 900, "gpu_seconds": 3600 * 6000},
            {"state": "FAILED", "jobs": 100, "gpu_seconds": 3600 * 4000},
        ]
    },
    "goodput": {
        "checkpoint_seconds": 3600.0,
        "price_per_gpu_hour": 2.0,
        "first_order": {"jobs": 12, "gpu_hours": 80.0},
        "second_order": {"jobs": 7, "gpu_hours": 20.0},
    },
    "rate": {"failures": 13, "node_days": 2000.0, "r_f": 6.5, "interval": [3.5, 11.1]},
    "attribution": {
        "causes": [
            {"cause": "user", "domain": "user_program", "jobs": 50},
            {"cause": "gpu_memory", "domain": "hardware", "jobs": 3},
            {"cause": "ib_link", "domain": "hardware", "jobs": 9},
            {"cause": "mount", "domain": "system_software", "jobs": 0},
        ],
        "unattributed": 4,
        "unattributed_node_fails": 0,
    },
    "lemons": {"nodes": [{"node": "n0007"}, {"node": "n0042"}]},
}


def changed_documents(name: str, **values: Any) -> dict[str, Any]:
    documents = copy.deepcopy(DOCUMENTS)
    documents[name] |= values
    return documents


def test_opening_states_runs_losses_rate_cause_and_lemons() -> None:
    assert opening_sentences(DOCUMENTS, {}) == (
        "1,000 jobs ended, after 10,000 GPU-hours; jobs that completed used 60.0 % of these hours.",
        "The infrastructure ended 12 jobs and pre-empted 7 others for requeues: about 100 GPU-hours of work were "
        "lost, 1.0 % of the time used, which cost 200 (a checkpoint every 60 min assumed).",
        "At the measured rate, nodes interrupt a job on 1,024 GPUs every 29 h (95 % interval: 17 h to 2.2 d).",
        "The main cause of failures is InfiniBand, which ended 9 of the 12 jobs that known faults ended; 4 jobs "
        "failed without a known fault on their nodes.",
        "Take out n0007 and n0042 for repair: they keep failing far more often than the others.",
    )


@given(st.sets(st.sampled_from(sorted(DOCUMENTS))), st.booleans())
def test_opening_has_five_sentences_and_names_unknown(names: set[str], with_reasons: bool) -> None:
    remaining = {name: DOCUMENTS[name] for name in DOCUMENTS if name not in names}
    reasons = (
        dict.fromkeys(names, "the store has no jobs: healthd fleet ingest --sacct or --jobs") if with_reasons else {}
    )
    sentences = opening_sentences(remaining, reasons)
    assert len(sentences) == 5
    assert [sentence for sentence in sentences if not sentence.endswith(".") or sentence.endswith("..")] == []
    assert sum("unknown" in sentence for sentence in sentences) == len(names)
    assert sum("no job records" in sentence for sentence in sentences) == len(reasons)
    assert not any("healthd fleet" in sentence or "--" in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("documents", "place", "sentence"),
    [
        (changed_documents("states", by_state=[]), 0, "No job ended in this period."),
        (
            changed_documents("states", by_state=[{"state": "COMPLETED", "jobs": 1, "gpu_seconds": 0}]),
            0,
            "1 job ended; none of them used a GPU.",
        ),
        (
            changed_documents(
                "goodput", first_order={"jobs": 0, "gpu_hours": 0.0}, second_order={"jobs": 0, "gpu_hours": 0.0}
            ),
            1,
            "No job is known to have been ended by the infrastructure, so no loss is known.",
        ),
        (
            changed_documents("rate", failures=0, node_days=0.0, r_f=None, interval=[None, None]),
            2,
            "The interruption rate of a large job is unknown: no job on more than 128 GPUs ran in this period.",
        ),
        (
            changed_documents("rate", failures=0, node_days=1000.0, r_f=0.0, interval=[0.0, 3.69]),
            2,
            "No large job was ended by its nodes in 1,000 node-days, so a job on 1,024 GPUs runs at least 2.1 d "
            "between two interruptions (97.5 % confidence).",
        ),
        (
            changed_documents("rate", interval=[1e-9, 11.1]),
            2,
            "At the measured rate, nodes interrupt a job on 1,024 GPUs every 29 h (95 % interval: 17 h or longer).",
        ),
        (
            changed_documents("attribution", causes=[], unattributed=1),
            3,
            "The main cause of failures is unknown: 1 job failed without a known fault on its nodes.",
        ),
        (
            changed_documents(
                "attribution", causes=[{"cause": "user", "domain": "user_program", "jobs": 50}], unattributed=0
            ),
            3,
            "No job failed because of a known fault.",
        ),
        (
            changed_documents("attribution", unattributed=20, unattributed_node_fails=18),
            3,
            "Most often, a node was lost without a known fault: 18 of the 30 jobs ended by faults or lost nodes; "
            "among the known faults, InfiniBand ended the most jobs: 9.",
        ),
        (
            changed_documents("attribution", causes=[], unattributed=20, unattributed_node_fails=18),
            3,
            "Nodes were lost without a known fault, which ended 18 jobs; 20 jobs failed without a known "
            "fault on their nodes.",
        ),
        (
            changed_documents("lemons", nodes=[]),
            4,
            "No node fails often enough to be taken out.",
        ),
        (
            changed_documents("lemons", nodes=[{"node": f"n{n}"} for n in range(1, 8)]),
            4,
            "Take out n1, n2, n3 and 4 more for repair: they keep failing far more often than the others.",
        ),
        (
            changed_documents("lemons", nodes=[{"node": "n1\n\x1b[31m"}]),
            4,
            "Take out n1??[31m for repair: it keeps failing far more often than the others.",
        ),
    ],
)
def test_opening_is_correct_for_little_data(documents: dict[str, Any], place: int, sentence: str) -> None:
    assert opening_sentences(documents, {})[place] == sentence
