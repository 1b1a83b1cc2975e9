"""Test of the stream size that docs/events.md states, with the real ledger and files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]


def test_typical_month_has_documented_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "bench"), *sys.path])
    import event_size

    _, lines, size, compressed, _ = event_size.measured("typical", event_size.MONTHS["typical"])
    row = re.search(
        r"\| typical: .* \| (\d+) \| ([\d.]+) MB \| under (\d+) KB \|", (ROOT / "docs/events.md").read_text()
    )
    assert row is not None
    assert int(row[1]) == pytest.approx(lines, rel=0.1)
    assert float(row[2]) == pytest.approx(size / 1e6, rel=0.15)
    assert compressed < int(row[3]) * 1000
