"""Tests of the tasks that the daemon gives to its worker."""

from __future__ import annotations

import pytest

from healthd.agent.scheduler.worker_tasks import is_outdated
from healthd.common.model import Inventory, Observation


@pytest.mark.parametrize(
    ("domain", "states", "expected"),
    [
        (None, [3, 3], True),
        (None, [3, 2], False),  # a GPU is still joining
        (None, [], False),
        ("", [3, 3], False),  # the fabric ends at the baseboard
        ("4f9a1b2c-0000-0000-0000-00000000000a", [3, 3], False),
    ],
)
def test_inventory_is_outdated_once_the_gpus_have_joined_their_fabric(
    domain: str | None, states: list[int], expected: bool
) -> None:
    observations = [
        Observation("gpu_fabric_state", state, labels=(("pci", f"0000:{i}b:00.0"),)) for i, state in enumerate(states)
    ]
    assert is_outdated(Inventory(domain=domain), observations) is expected
