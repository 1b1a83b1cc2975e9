"""Tests of the exposition formats: the output equals that of prometheus-client, and compressed parts form one text."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as TheirMetric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_plain

from healthd.agent.metrics.exposition import END, TOTAL, Metric, TextCache, deflated, gzipped, text

NAMES = st.from_regex(r"\Ahealthd_[a-z]{1,8}(_total)?\Z").filter(lambda name: name != "healthd__total")
LABEL_NAMES = st.from_regex(r"\A[a-z]{1,5}\Z").filter(lambda name: name not in ("le", "quantile"))
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
LABELS = st.dictionaries(LABEL_NAMES, TEXTS, max_size=3).map(lambda labels: tuple(sorted(labels.items())))
# Without -0.0, which equals 0.0, so that a page could have the text of either.
VALUES = st.floats().map(lambda value: value + 0.0) | st.integers(-(2**70), 2**70) | st.booleans()
SERIES = st.dictionaries(LABELS, VALUES, min_size=1, max_size=5)
FAMILIES = st.lists(
    st.builds(Metric, NAMES, TEXTS, SERIES), max_size=5, unique_by=lambda metric: metric.name.removesuffix(TOTAL)
)


class PrometheusCollector:
    """A prometheus-client collector of the same families."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[TheirMetric]:
        for metric in self.metrics:
            make = CounterMetricFamily if metric.name.endswith(TOTAL) else GaugeMetricFamily
            family = make(metric.name, metric.help)
            for labels, value in sorted(metric.series.items()):
                family.add_sample(metric.name, dict(labels), value)
            yield family


@given(FAMILIES)
@settings(deadline=None)
def test_text_equals_prometheus_client_output(metrics: list[Metric]) -> None:
    assert text(metrics, openmetrics=False).encode() == generate_latest(PrometheusCollector(metrics))  # type: ignore[arg-type]
    assert (text(metrics, openmetrics=True) + END).encode() == openmetrics_latest(PrometheusCollector(metrics))


@given(st.lists(FAMILIES, max_size=4), st.booleans())
@settings(deadline=None)
def test_text_does_not_depend_on_cache(pages: list[list[Metric]], openmetrics: bool) -> None:
    cache: TextCache = {}
    for metrics in pages:
        assert text(metrics, openmetrics, cache) == text(metrics, openmetrics)
        assert cache.keys() == {metric.name for metric in metrics}


@given(FAMILIES, st.booleans(), st.data())
@settings(deadline=None)
def test_text_does_not_depend_on_cache_for_changed_values(
    metrics: list[Metric], openmetrics: bool, data: st.DataObject
) -> None:
    cache: TextCache = {}
    text(metrics, openmetrics, cache)
    for _ in range(2):
        changed = [
            metric._replace(series={series_labels: data.draw(VALUES) for series_labels in metric.series})
            for metric in metrics
        ]
        assert text(changed, openmetrics, cache) == text(changed, openmetrics)


@given(FAMILIES)
@settings(deadline=None)
def test_text_is_read_by_prometheus_parser(metrics: list[Metric]) -> None:
    written = {(metric.name, labels): float(value) for metric in metrics for labels, value in metric.series.items()}
    parsed = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in read_plain(text(metrics, openmetrics=False))
        for sample in family.samples
    }
    assert parsed.keys() == written.keys()
    assert all(value == written[series] or value != value for series, value in parsed.items())


def test_text_is_read_by_strict_openmetrics_parser() -> None:
    """The strict parser refuses a counter that is negative or not a number."""
    metrics = [
        Metric("healthd_gauge", 'a "text"\nof \\ two lines', {(): 1.5, (("a", 'x"\n\\é🔥'), ("b", "")): -1e300}),
        Metric("healthd_counter_total", "counted", {(("a", "1"),): 12345678.0}),
    ]
    counter_last = list(read_openmetrics(text(metrics, openmetrics=True) + END))
    assert [(family.name, family.type) for family in counter_last] == [
        ("healthd_gauge", "gauge"),
        ("healthd_counter", "counter"),
    ]
    assert counter_last[0].documentation == metrics[0].help
    assert [sample.labels for sample in counter_last[0].samples] == [{}, {"a": 'x"\n\\é🔥', "b": ""}]


@given(st.binary(max_size=5000), st.lists(st.binary(max_size=5000), max_size=3))
@settings(deadline=None)
def test_gzipped_parts_are_single_member(first: bytes, tails: list[bytes]) -> None:
    compressed_part = deflated(first)
    for tail in tails:
        compressed = gzipped(compressed_part, tail)
        assert gzip.decompress(compressed) == first + tail
        reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
        assert reader.decompress(compressed) == first + tail
        assert (reader.eof, reader.unused_data) == (True, b""), "one member: not every client reads a second one"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "1.0"),
        (True, "1.0"),
        (1234567.0, "1.234567e+06"),
        (1.8e9, "1.8e+09"),
        (-1e7, "-10000000.0"),
        (1e22, "1e+22"),
    ],
)
def test_numbers_have_go_format(value: float, expected: str) -> None:
    assert text([Metric("healthd_x", "x", {(): value})], openmetrics=False).splitlines()[-1] == f"healthd_x {expected}"
