"""The journal of repair steps."""

from __future__ import annotations

import pytest

from healthd.agent.repair.journal import ID, Entry, Journal, Outcome, unused_id, with_entry
from healthd.common.model import RepairStep

NOW = 1_795_932_000.0


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.TAKING, Outcome.DONE])
def test_step_in_the_second_of_an_earlier_one_has_its_own_id(outcome: Outcome) -> None:
    journal = Journal("boot-1")
    ids = []
    for _ in range(3):
        ids.append(unused_id(journal, RepairStep.GPU_RESET, NOW))
        journal = with_entry(journal, Entry(ids[-1], RepairStep.GPU_RESET, NOW, "boot-1", outcome))
    assert ids[0] == "20261129T060000Z-gpu_reset"
    assert ids[1] != ids[0]
    assert ids[2] != ids[1]
    assert all(ID.fullmatch(id) for id in ids)


def test_id_without_journal_is_time_and_step() -> None:
    assert unused_id(None, RepairStep.REBOOT, NOW + 0.9) == "20261129T060000Z-reboot"
