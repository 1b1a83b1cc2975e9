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
NOT_OWN = {field.name for field in fields_of(CheckConfig)}
COMMON = {field.name for field in fields_of(CheckConfig)} - {"name", "guessed"}


@pytest.mark.parametrize("name", sorted(built_in_checks()))
def test_a_check_has_its_table_with_every_setting_at_its_default(name):
    config = built_in_checks()[name].config
    own = {f.name: dump(getattr(config(), f.name)) for f in fields_of(config) if f.name not in NOT_OWN}
    assert {key: value for key, value in TABLES[name].items() if key not in COMMON} == own


def test_the_settings_that_all_checks_have_are_shown_once_at_their_defaults():
    common = {key: value for key, value in TABLES["gpu_access"].items() if key in COMMON}
    defaults = {key: dump(getattr(CheckConfig(), key)) for key in COMMON}
    assert common == {**defaults, "interval_seconds": 300.0}


def test_as_it_is_the_sample_sets_nothing():
    tables = tomllib.loads(CHECKS)["checks"]
    assert all(table == {} for table in tables.values())


def test_there_is_no_table_for_a_check_that_does_not_exist():
    assert set(TABLES) == set(built_in_checks())
