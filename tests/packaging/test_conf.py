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


def settings(config: Any, prefix: str = "") -> list[str]:
    """Return the dotted name of each setting: "mode", "kernel_log.source"."""
    names = []
    for field in fields_of(type(config)):
        value = getattr(config, field.name)
        below = f"{prefix}{field.name}"
        names += settings(value, f"{below}.") if fields_of(type(value)) else [below]
    return names


def line_of(name: str) -> str:
    """Return the one line that shows a setting."""
    table, _, key = name.rpartition(".")
    section = TOP.partition(f"[{table}]")[2] if table else TOP
    (line,) = [line for line in section.partition("\n[")[0].splitlines() if line.startswith(f"#{key} = ")]
    return line


def effect(text: str) -> dict[str, Any]:
    """Return the settings in effect with this file, except the interval, which the sample shows for the daemon."""
    loaded = resolve_settings(tomllib.loads(text), "healthd.toml", {}, CHECKS)
    return {name: value for name, value, _ in setting_rows(loaded) if name != "checks.gpu_access.interval_seconds"}


def test_the_sample_as_it_is_changes_nothing():
    assert effect(TEXT) == effect("")


def test_the_sample_with_every_setting_uncommented_changes_nothing_either():
    assert effect(SETTING.sub("", TEXT)) == effect("")


@pytest.mark.parametrize("name", settings(Settings()))
def test_a_setting_of_the_daemon_stands_in_the_sample_with_a_word_on_what_it_does(name):
    assert re.search(r" # \S.{10,}$", line_of(name))


def test_the_sample_shows_no_setting_that_the_daemon_does_not_have():
    shown = tomllib.loads(SETTING.sub("", TOP))
    names = [f"{key}.{below}" for key, value in shown.items() if isinstance(value, dict) for below in value]
    names += [key for key, value in shown.items() if not isinstance(value, dict)]
    assert sorted(names) == sorted(settings(Settings()))


def test_the_named_examples_in_the_sample_are_accepted():
    examples = re.sub(r"(?m)^# (?=\[(?:checks|kernel_log|node)\.|\[\[node\]\]|[a-z_]+ = )", "", TEXT)
    loaded = resolve_settings(tomllib.loads(examples), "healthd.toml", {}, CHECKS)
    assert {("mount", "/data"), ("exec", "nhc")} <= set(loaded.checks)


def test_what_a_reload_leaves_as_it_was_is_marked():
    from healthd.agent.daemon import FIXED_SETTINGS

    marked = {name for name in settings(Settings()) if line_of(name).endswith("(start)")}
    assert marked == {name for name in settings(Settings()) if name.partition(".")[0] in FIXED_SETTINGS}
