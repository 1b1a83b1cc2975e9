"""Metric families as text, in the two formats that Prometheus reads:

    the text format 0.0.4   prometheus.io/docs/instrumenting/exposition_formats
    OpenMetrics 1.0         prometheus.io/docs/specs/om/open_metrics_spec

prometheus-client writes each family separately. An unchanged family's text is reused. If only values changed, only the
values in the text are replaced (docs/adr/0034-the-text-of-the-page.md).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from prometheus_client import core

Labels: TypeAlias = "tuple[tuple[str, str], ...]"  # sorted by name
TOTAL = "_total"
MAX_CACHED_SERIES = 2048  # how many names and labels of observations to cache; more than most nodes have
OPENMETRICS = "application/openmetrics-text"
END = "# EOF\n"
GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # deflate, no time, unknown operating system (RFC 1952, 2.3)
COMPRESSION = 4  # for 69 KiB, the result is 3 % larger than with level 6, in half the time


class Metric(NamedTuple):
    """A metric family.

        name    ends in TOTAL if and only if the metric is a counter
        series  value for each set of labels

    All text can be encoded as UTF-8.
    """

    name: str
    help: str
    series: Mapping[Labels, float]


TextCache: TypeAlias = "dict[str, tuple[Metric, str]]"  # family name -> family and its text


def text(metrics: Iterable[Metric], openmetrics: bool, cache: TextCache | None = None) -> str:
    """Return the families' text, without the end marker of an OpenMetrics page (`END`).

    `cache` contains the texts from the last call in this format, and is updated in place.
    """
    before = cache or {}
    written: TextCache = {}
    for metric in metrics:
        previous = before.get(metric.name)
        family_text = _update_text(*previous, metric) if previous else None
        written[metric.name] = (metric, _text(metric, openmetrics) if family_text is None else family_text)
    if cache is not None:
        cache.clear()
        cache.update(written)
    return "".join([family_text for _metric, family_text in written.values()])


def content_type(openmetrics: bool) -> str:
    from prometheus_client.exposition import choose_encoder

    return choose_encoder(_accept_header(openmetrics))[1]


def _text(metric: Metric, openmetrics: bool) -> str:
    from prometheus_client.exposition import choose_encoder

    encode = choose_encoder(_accept_header(openmetrics))[0]
    return encode(_Family(metric)).decode().removesuffix(END)


def _update_text(previous: Metric, previous_text: str, metric: Metric) -> str | None:
    """Return a family's previous text with the new values, or None if anything else has changed.

    Labels take the most time to write but rarely change. A sample is one line that ends with its value.
    """
    if previous == metric:
        return previous_text
    if (previous.help, previous.series.keys()) != (metric.help, metric.series.keys()):
        return None
    from prometheus_client.utils import floatToGoString

    lines = previous_text.split("\n")[:-1]
    first = len(lines) - len(metric.series)
    for index, (_labels, value) in enumerate(sorted(metric.series.items()), first):
        number = floatToGoString(value)  # type: ignore[no-untyped-call]
        lines[index] = f"{lines[index].rpartition(' ')[0]} {number}"
    return "".join([f"{line}\n" for line in lines])


def _accept_header(openmetrics: bool) -> str:
    return f"{OPENMETRICS}; version=1.0.0" if openmetrics else ""


class _Family:
    """A registry for prometheus-client, which only calls `collect`."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[core.Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name, help_text, series = self._metric
        family = (CounterMetricFamily if name.endswith(TOTAL) else GaugeMetricFamily)(name, help_text)
        for labels, value in sorted(series.items()):
            family.add_sample(name, dict(labels), value)
        yield family


# --- compression in two parts


class Deflated(NamedTuple):
    """The compressed first part of a text, to which another part can be appended. `checksum` and `size` are those of
    the plain text."""

    data: bytes
    checksum: int
    size: int


def deflated(first: bytes) -> Deflated:
    stream = zlib.compressobj(COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
    return Deflated(stream.compress(first) + stream.flush(zlib.Z_SYNC_FLUSH), zlib.crc32(first), len(first))


def gzipped(first: Deflated, second: bytes) -> bytes:
    """Return both parts as one gzip member (RFC 1952).

    The second part is short, so 8 KiB of memory are enough to compress it, instead of 256.
    """
    stream = zlib.compressobj(COMPRESSION, zlib.DEFLATED, wbits=-9, memLevel=1)
    end = struct.pack("<LL", zlib.crc32(second, first.checksum), (first.size + len(second)) & 0xFFFFFFFF)
    return GZIP_HEAD + first.data + stream.compress(second) + stream.flush() + end
