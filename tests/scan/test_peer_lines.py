"""Lines from the tests of other projects (tests/data/peer_lines.jsonl): healthd reads them with a similar severity.

They are right about the text of the kernel and sometimes wrong about the severity. A row below explains each intended
difference, and docs/peers.md does too.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from fakes import BOOT

from healthd.agent.conditions import intake
from healthd.agent.conditions.ledger import Ledger
from healthd.agent.kernel_log.prefix import strip_prefix
from healthd.agent.kernel_log.source import RawLine, make_event
from healthd.agent.settings import registry
from healthd.common.model import Inventory, KernelEvent, LocalMount, Severity

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
ROWS = [json.loads(row) for row in (ROOT / "tests/data/peer_lines.jsonl").read_text("utf-8").splitlines()]
NOT_FROM_KERNEL = "printed by no driver we know"  # a note of a row: such a line may stay unread
LISTENERS = [(check, check.config()) for check in registry.built_in_checks().values() if check.reads_kernel_log]

# (start of the text, the other project's expectation) -> reason for healthd's difference, as in docs/peers.md.
DIFFERS = {
    ("ACCESS_REG", "event"): "at each start, the driver reads registers that some firmware lacks",
    ("segfault at", "event"): "a crashed process is its user's problem",
    ("nfs_", "event"): "a function in a stack trace is not a fault",
    ("invoked oom-killer", "none"): "recorded, with the job",
    ("Killed process", "none"): "recorded, with the job",
    ("I/O error while reading", "none"): "an unreadable superblock is a fault",
    ("): 14, ", "none"): "an Xid with the address format of old drivers",
    ("RLW_REMAP Nonfatal", "critical (145)"): "a Nonfatal line is a warning",
    ("ena 0000:00:05.0: Reset indication", "none"): "an ENA card that its driver cannot reset is dead",
    ("on link 14(0x0", "drain (74)"): "the first error is a warning, the second drains",
}


def events(text: str) -> list[KernelEvent]:
    """Return the events of the whole text as one record, or of its lines. Prefixes are tested elsewhere."""
    for pieces in ([text], text.splitlines(), [text.rpartition(" kernel: ")[2]]):
        stripped = [found for piece in pieces if (found := strip_prefix(piece, time.time())) is not None]
        if found := [e for each in stripped if (e := make_event(RawLine(1000.0, each.text), BOOT)) is not None]:
            return found
    return []


def severity(found: list[KernelEvent], node: Inventory) -> Severity | None:
    ledger = intake.take_kernel_events(Ledger(boot_id=BOOT, inventory=node), found, LISTENERS, 1000.0).ledger
    return max((condition.severity for condition in ledger.conditions), default=None)


def agrees(row: dict[str, str], node: Inventory) -> bool:
    expected = row["expected"].partition(" (")[0]
    found = events(row["text"])
    worst = severity(found, node) or Severity.INFO
    return {
        "none": not found,
        "nodrain": worst < Severity.DEGRADED,
        "drain": worst >= Severity.DEGRADED,
        "drain if the node's": worst >= Severity.DEGRADED,
        "drain, no requeue": worst is Severity.DEGRADED,
        "critical": worst is Severity.CRITICAL,
    }.get(expected, bool(found))


NODE = Inventory(mounts=(LocalMount("/data", "xfs", "nvme2n1", ("nvme2n1",)),))


def reason_for_difference(row: dict[str, str]) -> str:
    found = (why for (text, expected), why in DIFFERS.items() if text in row["text"] and expected == row["expected"])
    return next(found, "")


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row['label']}-{n}") for n, row in enumerate(ROWS)])
def test_peer_line_is_read_as_in_its_project_or_has_a_reason(row):
    as_expected = agrees(row, NODE) or row.get("note") == NOT_FROM_KERNEL
    assert as_expected or reason_for_difference(row), f"{row['expected']}: {row['text']}"


def test_page_lists_every_intended_difference():
    page = (ROOT / "docs/peers.md").read_text("utf-8")
    assert [why for why in DIFFERS.values() if why not in page] == []
    assert set(DIFFERS.values()) == {reason_for_difference(row) for row in ROWS if not agrees(row, NODE)} - {""}


def test_disk_without_sectors_warns_unless_the_node_uses_it():
    (row,) = [row for row in ROWS if row["expected"] == "drain if the node's"]
    assert severity(events(row["text"]), NODE) is Severity.DEGRADED
    assert severity(events(row["text"]), Inventory()) is Severity.WARNING
