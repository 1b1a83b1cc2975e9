"""Tests of the warnings of `healthd config check` about rounds that may take longer than the interval."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from healthd.agent.settings import registry, round_budget
from healthd.agent.settings.configured import Configured
from healthd.agent.settings.effective import resolve_settings

ALL_BUT_TWO_OFF = "".join(
    f"[checks.{name}]\nenabled = false\n" for name in registry.built_in_checks() if name not in ("clock", "cpu")
)


def configured(text: str) -> Configured:
    from healthd.agent.settings.settings_file import parse_toml

    checks = registry.built_in_checks()
    return Configured(resolve_settings(parse_toml(text + ALL_BUT_TWO_OFF, "file"), "file", {}, checks), checks)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("", 20.0),  # two checks of 10 s each
        ("round_timeout_seconds = 5.0\n", 15.0),  # the second check does not start
        ("[checks.cpu]\ntimeout_seconds = 7.0\n[checks.clock]\nenabled = false\n", 7.0),
    ],
)
def test_max_round_seconds_sums_timeouts(settings: str, expected: float) -> None:
    assert round_budget.max_round_seconds(configured(settings)) == expected


@pytest.mark.parametrize(("interval", "warns"), [(20.0, False), (19.9, True)])
def test_warnings_report_interval_shorter_than_round(interval: float, warns: bool) -> None:
    sentences = round_budget.warnings(configured(f"interval_seconds = {interval}\n"))
    assert [sentence.partition(":")[0] for sentence in sentences] == ["interval_seconds"] * warns


def test_warnings_name_interval_for_single_check() -> None:
    (sentence,) = round_budget.warnings(configured("[checks.cpu]\ninterval_seconds = 15\n"))
    assert sentence.startswith("checks.cpu.interval_seconds: a round may take 20 s (")


def test_default_settings_have_no_warnings() -> None:
    checks = registry.built_in_checks()
    assert round_budget.warnings(Configured(resolve_settings({}, "file", {}, checks), checks)) == []


def test_config_check_warns_and_accepts(tmp_path: Path) -> None:
    file = tmp_path / "healthd.toml"
    file.write_text("interval_seconds = 60.0\n")
    file.chmod(0o644)
    command = [sys.executable, "-m", "healthd", "config", "check", str(file)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert completed.returncode == 0
    assert "no errors; mode observe" in completed.stdout
    assert f"{file}: warning: interval_seconds: a round may take 180 s" in completed.stderr
