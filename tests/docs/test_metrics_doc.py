"""Tests of docs/metrics.md: every metric is documented as the code defines it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from healthd.agent.metrics.families import render
from healthd.agent.metrics.names import FAMILIES, PREFIX
from healthd.agent.settings import registry
from tests.agent.metrics.test_families import faulty, healthy

pytestmark = pytest.mark.one_python

ROOT = Path(__file__).parents[2]
PAGES = (healthy, faulty)  # fixtures: the readings of a DGX H100, and a node with every possible problem
ROW = re.compile(r"(?m)^\| `(healthd_\w+)` \| (gauge|counter) \| ([^|]*) \| [^|]* \| [^|]+ \|$")


def test_metrics_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "scripts/metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text("utf-8")
    assert text == script.page(text), "run scripts/metrics_page.py: a metric or a check's OBSERVATIONS changed"


@pytest.mark.parametrize("name", ["healthy", "faulty"])
def test_each_series_is_documented_with_type_and_labels(name: str, request: pytest.FixtureRequest) -> None:
    listed = {
        metric: (kind, set(re.findall(r"`(\w+)`", labels)))
        for metric, kind, labels in ROW.findall((ROOT / "docs/metrics.md").read_text("utf-8"))
    }
    page = render(request.getfixturevalue(name)).decode()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == "healthd_mount_stalls_total":  # a metric of test_metrics.py only
                continue
            kind, labels = listed[sample.name]
            assert family.type == kind, sample.name
            assert set(sample.labels) <= labels, sample.name


def test_each_family_is_rendered() -> None:
    made = (ROOT / "healthd/agent/metrics/families.py").read_text("utf-8")
    assert {name for name in FAMILIES if f'"{name}"' not in made} == set()


def test_each_metric_text_names_unit_of_its_name() -> None:
    texts = {name: family.text for name, family in FAMILIES.items()}
    for check in registry.built_in_checks().values():
        texts |= {name: meaning.text for name, meaning in check.declares.OBSERVATIONS.items()}
    for name, text in texts.items():
        plain = name.removesuffix("_total")
        if plain.endswith("_timestamp_seconds"):
            assert "since the epoch" in text, name
        elif plain.endswith(("_seconds", "_bytes", "_celsius", "_watts")):
            assert plain.rpartition("_")[2] in text.lower(), name
        assert text.endswith("."), name
        assert not text.startswith("Whether"), f"{name}: say which of 0 and 1 it is"
        assert PREFIX not in name
