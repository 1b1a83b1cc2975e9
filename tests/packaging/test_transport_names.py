"""Tests of the object names that the transport examples produce: the reader accepts them as files of a stream."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from event_lines import lines

from healthd.common import toml
from healthd.events.reader import Cursor, Tally, find, read

TRANSPORT = Path(__file__).parents[2] / "packaging/transport"
SECOND = "1763812800"


def vector(number: int) -> str:
    """Return the object name as vector's src/sinks/aws_s3/sink.rs builds it.

    It is the prefix, the time, "-" and a uuid if enabled, "." and the extension.
    """
    sink = toml.parse((TRANSPORT / "vector.toml").read_text())["sinks"]["store"]
    name = sink["filename_time_format"].replace("%s", SECOND).replace("%9f", f"{number:09}")
    uuid = "-6f0bd1d6-6f0c-4a0e-9d3f-0c1f7ad3c0de" if sink["filename_append_uuid"] else ""
    return str(sink["key_prefix"].replace("${HOSTNAME}", "n1")) + f"{name}{uuid}.{sink['filename_extension']}"


def fluent_bit(number: int) -> str:
    """Return the object name as s3_put_object of fluent-bit's plugins/out_s3/s3.c builds it.

    A random string is appended unless the format has $UUID or $INDEX or the path is static.
    """
    text = (TRANSPORT / "fluent-bit.conf").read_text()
    found = re.findall(r"(?m)^    (s3_key_format|static_file_path) +(\S+)$", text)
    key = dict(found)["s3_key_format"]
    is_fixed = "$UUID" in key or "$INDEX" in key or dict(found).get("static_file_path") == "On"
    object_name = key.replace("${HOSTNAME}", "n1").replace("%s", SECOND).replace("$INDEX", str(number))
    return (object_name if is_fixed else f"{object_name}-objectk3Jx9aQz").lstrip("/")


@pytest.mark.parametrize("name", [vector, fluent_bit])
def test_objects_of_transport_examples_are_read_in_order(tmp_path: Path, name: Callable[[int], str]) -> None:
    for number in range(3):  # within one second
        file = tmp_path / name(number)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(gzip.compress(lines(10 * number + 1, 10 * number + 10)))
    tally = Tally()
    (stream,) = find([str(tmp_path)], tally)
    assert stream == str(tmp_path / "n1")
    assert [stream_event.seq for stream_event in read(stream, Cursor(), tally)] == list(range(1, 31))
    assert tally.problems == {}
