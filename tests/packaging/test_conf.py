"""Tests of conf/healthd.toml: it changes nothing as it is or uncommented, and it is complete."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from healthd.agent.settings.config import Settings
from healthd.agent.settings.effective import resolve_settings, setting_rows
from healthd.agent.settings.registry import built_in_checks
from healthd.common.codec import fields_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLE = Path(__file__).parents[2] / "conf/healthd.toml"
TEXT = SAMPLE.read_text("utf-8")
TOP = TEXT.partition("# --- checks")[0]
SETTING = re.compile(r"(?m)^#(?=[a-z_]+ = )")
CHECKS = built_in_checks()


def setting_names(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted name of each setting: "mode", "kernel_log.source"."""
    names = []
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        dotted_name = f"{prefix}{field.name}"
        names += setting_names(value, f"{dotted_name}.") if fields_of(type(value)) else [dotted_name]
    return names


def line_of(name: str) -> str:
    """Return the one line that shows a setting."""
    table, _, key = name.rpartition(".")
    section = TOP.partition(f"[{table}]")[2] if table else TOP
    (line,) = [line for line in section.partition("\n[")[0].splitlines() if line.startswith(f"#{key} = ")]
    return line


def effective_settings(text: str) -> dict[str, Any]:
    """Return the settings in effect with this file, except the interval, which the sample shows for the daemon."""
    loaded = resolve_settings(tomllib.loads(text), "healthd.toml", {}, CHECKS)
    return {name: value for name, value, _ in setting_rows(loaded) if name != "checks.gpu_access.interval_seconds"}


def test_sample_changes_no_setting():
    assert effective_settings(TEXT) == effective_settings("")


def test_uncommented_sample_changes_no_setting():
    assert effective_settings(SETTING.sub("", TEXT)) == effective_settings("")


@pytest.mark.parametrize("name", setting_names(Settings()))
def test_each_daemon_setting_is_in_sample_with_description(name):
    assert re.search(r" # \S.{10,}$", line_of(name))


def test_sample_has_no_unknown_daemon_setting():
    shown = tomllib.loads(SETTING.sub("", TOP))
    names = [f"{key}.{nested}" for key, value in shown.items() if isinstance(value, dict) for nested in value]
    names += [key for key, value in shown.items() if not isinstance(value, dict)]
    assert sorted(names) == sorted(setting_names(Settings()))


def test_named_examples_in_sample_are_accepted():
    examples = re.sub(r"(?m)^# (?=\[(?:checks|kernel_log|node)\.|\[\[node\]\]|[a-z_]+ = )", "", TEXT)
    loaded = resolve_settings(tomllib.loads(examples), "healthd.toml", {}, CHECKS)
    assert {("mount", "/data"), ("exec", "nhc")} <= set(loaded.checks)


def test_settings_requiring_restart_are_marked():
    from healthd.agent.daemon import FIXED_SETTINGS

    marked = {name for name in setting_names(Settings()) if line_of(name).endswith("(start)")}
    assert marked == {name for name in setting_names(Settings()) if name.partition(".")[0] in FIXED_SETTINGS}
