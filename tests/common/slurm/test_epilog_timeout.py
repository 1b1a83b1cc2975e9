"""epilog_timeout: reading the time limit of epilogs from slurm.conf."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healthd.common.slurm.slurm_conf import NO_LIMIT, epilog_timeout, parse_epilog_timeout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", NO_LIMIT),
        ("PrologEpilogTimeout=120\n", 120),
        ("ClusterName=a prologepilogtimeout = 60 # EpilogTimeout=5\n", 60),
        ("EpilogTimeout=30\nPrologEpilogTimeout=120\nPrologTimeout=5\n", 30),
        ("#PrologEpilogTimeout=10\nXEpilogTimeout=3\n", NO_LIMIT),
        ("PrologEpilogTimeout=65534\n", NO_LIMIT),
    ],
)
def test_parse_epilog_timeout_takes_the_effective_limit(text: str, seconds: float) -> None:
    assert parse_epilog_timeout(text) == seconds


@given(st.text())
def test_parse_epilog_timeout_accepts_any_text(text: str) -> None:
    assert parse_epilog_timeout(text) >= 0


def test_epilog_timeout_reads_default_and_given_slurm_conf(tmp_path: Path) -> None:
    assert epilog_timeout(str(tmp_path), {}) == NO_LIMIT
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm/slurm.conf").write_text("PrologEpilogTimeout=90\n")
    assert epilog_timeout(str(tmp_path), {}) == 90
    (tmp_path / "other.conf").write_text("EpilogTimeout=20\n")
    assert epilog_timeout(str(tmp_path), {"SLURM_CONF": str(tmp_path / "other.conf")}) == 20
    assert epilog_timeout(str(tmp_path), {"SLURM_CONF": "/nowhere"}) == NO_LIMIT
