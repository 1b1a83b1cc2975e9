"""Tests of conf/healthd.toml: it has every setting of every check, commented, at its default."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from healthd.agent.settings.config import CheckConfig
from healthd.agent.settings.registry import built_in_checks
from healthd.common.codec import dump, fields_of

pytestmark = pytest.mark.one_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLE = Path(__file__).parents[2] / "conf/healthd.toml"
CHECKS = SAMPLE.read_text("utf-8").partition("# --- checks")[2]
TABLES = tomllib.loads(re.sub(r"(?m)^#([a-z_]+ = )", r"\1", CHECKS))["checks"]
COMMON_FIELDS = {field.name for field in fields_of(CheckConfig)}
COMMON_SETTINGS = {field.name for field in fields_of(CheckConfig)} - {"name", "guessed"}


@pytest.mark.parametrize("name", sorted(built_in_checks()))
def test_check_has_table_with_every_setting_at_default(name):
    config = built_in_checks()[name].config
    own_defaults = {
        field.name: dump(getattr(config(), field.name))
        for field in fields_of(config)
        if field.name not in COMMON_FIELDS
    }
    assert {key: value for key, value in TABLES[name].items() if key not in COMMON_SETTINGS} == own_defaults


def test_common_settings_are_shown_once_at_their_defaults():
    common = {key: value for key, value in TABLES["gpu_access"].items() if key in COMMON_SETTINGS}
    defaults = {key: dump(getattr(CheckConfig(), key)) for key in COMMON_SETTINGS}
    assert common == {**defaults, "interval_seconds": 300.0}


def test_commented_sample_sets_nothing():
    tables = tomllib.loads(CHECKS)["checks"]
    assert all(table == {} for table in tables.values())


def test_sample_has_no_table_of_unknown_check():
    assert set(TABLES) == set(built_in_checks())
